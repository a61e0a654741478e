"""A loader's page-locked memory on a GPU. It imports nothing that the GPU's machine may lack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastpipe.torch import DataLoader
from fastpipe.torch.loader._advice import log_once
from loader_data import WORKERS, Numbers


class Numbered(Numbers):
    """Items of 1 MB, each with its own number."""

    def __getitem__(self, index: int) -> Any:
        return np.full(1 << 18, index, np.float32)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and PyTorch built with CUDA")
@pytest.mark.parametrize("way", WORKERS)
def test_a_gpu_copies_from_memory_that_the_program_has_dropped(way: str, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    loader = DataLoader(Numbered(96), batch_size=4, pin_memory=True, **WORKERS[way])
    work, side = torch.rand(4096, 4096, device="cuda"), torch.cuda.Stream()
    with caplog.at_level("INFO", logger="fastpipe"):
        for _ in range(2):
            found = []
            for number, batch in enumerate(loader):
                assert batch.is_pinned()
                # The copy waits for work of the GPU, on the current stream or on another one.
                for _ in range(20):
                    work = torch.nn.functional.normalize(work @ work)
                stream = side if number % 2 else torch.cuda.current_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    found.append(batch.to("cuda", non_blocking=True))
                del batch
            torch.cuda.synchronize()
            assert [int(row) for rows in found for row in rows.min(1).values] == list(range(96))
            assert [int(row) for rows in found for row in rows.max(1).values] == list(range(96))
    assert caplog.messages == [], "memory was page-locked in place"
