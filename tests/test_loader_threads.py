"""What threads that make a batch alone hand over: the objects themselves, where they are small."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from apart import apart, wait_until
from fastpipe.loading._handed import Handed
from fastpipe.torch import DataLoader
from loader_data import THREADS, Items, listed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers share memory by means of Linux")


@apart
def test_threads_hand_small_batches_over_as_they_are() -> None:
    rows = [np.arange(row, row + 50) for row in range(12)]
    loader = DataLoader(Items(rows), 4, collate_fn=listed, persistent_workers=True, **THREADS)
    for _ in range(3):
        batches = list(loader)
        # The first ones may be made by several threads, and written to memory in common.
        assert [[row.tolist() for row in batch] for batch in batches] == [
            [row.tolist() for row in rows[first : first + 4]] for first in (0, 4, 8)
        ]
    assert wait_until(lambda: any(row is rows[8] for row in list(loader)[2]))


@apart
def test_batches_that_nobody_takes_are_not_kept() -> None:
    rows = [np.arange(row, row + 50) for row in range(12)]
    made = weakref.WeakSet[Any]()

    def kept(items: list[Any]) -> Any:
        found = [torch.tensor(item) for item in items]
        made.update(found)
        return found

    loader = DataLoader(Items(rows), 2, collate_fn=kept, persistent_workers=True, **THREADS)
    for _ in range(5):
        list(loader)
        next(iter(loader))
    iter(loader)
    del loader
    gc.collect()
    assert wait_until(lambda: not len(made))


@pytest.mark.parametrize(
    ("batch", "suits"),
    [
        ([], True),
        ([1, 2.5, True, None, "text", b"bytes", 1j], True),
        ({"a": np.arange(5), "b": (torch.ones(3), [np.zeros((2, 0))])}, True),
        (np.zeros(1 << 20, np.uint8), True),
        (np.zeros((1 << 20) + 1, np.uint8), False),
        ([np.zeros(600 << 10, np.uint8)] * 2, False),
        ([0] * 1000, True),
        ([0] * 1100, False),
        ("x" * (2 << 20), False),
        # What couldn't be sent to another process, or would be something else there.
        (lambda: 1, False),
        ([np.array([object()])], False),
        (torch.ones(3, requires_grad=True), False),
        (torch.eye(3).to_sparse(), False),
        (torch.nn.Parameter(torch.ones(3)), False),
        ({"a": range(5)}, False),
    ],
)
def test_which_batches_are_handed_over(batch: Any, suits: bool) -> None:
    assert Handed().suits(batch) is suits


def test_a_list_that_holds_itself_is_not_handed_over() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert not Handed().suits(batch)
