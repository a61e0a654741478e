"""The GPU that `device_parts.py` measures, or host memory in a dry run."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import generate
from harness import take_turns

if TYPE_CHECKING:
    import fastpipe
    from fastpipe.cuda._torch import TorchEngine

Figures = Iterator[tuple[str, dict[str, Any]]]

TESTS = Path(__file__).resolve().parent.parent / "tests"
ROWS = {"a": 32_768, "b": 131_072, "c": 131_072, "d": 262_144}
"""Dataset -> number of rows. The files have 40 to 230 MB."""


class Machine:
    """The GPU, or host memory in a dry run.

    Args:
        dry_run: Whether to replace the GPU with host memory and use small datasets.

    Attributes:
        dry_run: Whether host memory replaces the GPU.
        device: PyTorch's name of the device that batches are copied to.
        rounds: Number of rounds in which the compared variants take turns.
    """

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.device = "cpu" if dry_run else "cuda:0"
        self.rounds = 1 if dry_run else 5

    def few(self, number: int, fewest: int = 1) -> int:
        """Returns `number`. In a dry run, returns 1/64 of it, but at least `fewest`."""
        return max(fewest, number // 64) if self.dry_run else number

    def file(self, dataset: str, codec: str = "null") -> Path:
        """Returns the path of an Avro file of a dataset, and generates the file if it is missing."""
        path, _ = generate.generate(dataset, self.few(ROWS[dataset], 2048), codec=codec)
        return path

    def threads(self) -> list[int]:
        """Returns 1, 2, 4, ... up to the number of available cores, at most 16."""
        available = min(2 if self.dry_run else 16, len(os.sched_getaffinity(0)))
        return sorted({available, *(2**k for k in range(5) if 2**k <= available)})

    def engine(self) -> TorchEngine:
        """Returns the engine that copies batches."""
        from fastpipe._interop.tensors import Forms
        from fastpipe.cuda._torch import TorchEngine

        if not self.dry_run:
            return TorchEngine(self.device, Forms(sparse="coo"))
        sys.path.append(str(TESTS))
        plain: Any = importlib.import_module("plain_gpu")
        engine: TorchEngine = plain.PlainEngine("cpu", Forms(sparse="coo"))
        return engine

    def prefetch(self, reader: fastpipe.Reader, **options: Any) -> Iterable[Any]:
        """Returns an iterable of the reader's batches on the device."""
        import fastpipe.cuda

        if not self.dry_run:
            return fastpipe.cuda.iterator(reader, self.device, **options)
        return fastpipe.cuda.Prefetcher._of(reader, [self.engine()], 2, several=False)

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""
        import torch

        if not self.dry_run:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Returns the seconds that `work` takes, including its work on the device."""
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started

    def medians(self, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
        """Runs the variants in turn and returns the median of each. The first turn is a warm-up."""
        turns = take_turns(ways, self.rounds)
        return {name: turns.median(name, "result") for name in ways}
