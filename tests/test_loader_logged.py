"""What a loader logs about its settings."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from apart import apart
from fastpipe.torch import DataLoader
from loader_data import WORKERS, AtOnce, Numbers, listed, logged

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

workers = pytest.mark.parametrize("way", WORKERS)


@apart
@workers
def test_workers_without_use_are_logged_once(way: str) -> None:
    messages = logged()

    def said(dataset: Any = None, **options: Any) -> list[str]:
        messages.found.clear()
        for _ in range(2):
            list(DataLoader(dataset or Numbers(8), **(WORKERS[way] | {"num_workers": 4} | options)))
        return [text.partition(":")[0] for text in messages.found]

    # As many as are useful.
    assert said(batch_size=2) == said(batch_size=1, prefetch_factor=4) == []
    assert said(batch_size=4, collate_fn=listed, num_batch_workers=2) == []
    # Batches of unknown size.
    assert said(batch_sampler=[[0], [1]]) == []
    assert said(batch_size=1) == ["num_workers=4 exceeds prefetch_factor * batch_size (2)"]
    assert said(batch_size=1) == [], "it was logged before"
    assert said(AtOnce(8), batch_size=4, prefetch_factor=3) == [
        "num_workers=4 exceeds prefetch_factor (3), and one worker makes a whole batch of this dataset"
    ]
    assert said(batch_size=4, collate_fn=listed, num_batch_workers=3) == [
        "num_batch_workers=3 exceeds prefetch_factor (2)"
    ]
    assert said(batch_size=4, num_batch_workers=3) == [], "there are no batch workers without collate_fn"
