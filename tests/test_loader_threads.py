"""Batches that a single worker thread makes: small ones are copied to the consumer, larger ones are pickled."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from apart import apart, wait_until
from fastpipe.torch import DataLoader
from fastpipe.torch.loader import _messages
from fastpipe.torch.loader._messages import ThreadBatches
from loader_data import THREADS, Items, assert_same, listed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")


class Rows(Items):
    """Returns a batch of items at a time, so that one worker makes each batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Room:
    """A message buffer in place of a batch's memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def reserve(self, sizes: list[int]) -> None:
        """Does nothing: the buffer grows."""

    def write(self, data: Any) -> int:
        offset = len(self.data)
        self.data += bytes(data)
        return offset

    def bytes(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])

    def array(self, offset: int, length: int) -> np.ndarray:
        return np.frombuffer(self.data, np.uint8, length, offset)


def sent(batch: Any) -> tuple[Any, bool]:
    """Returns the batch that the consumer reads, and whether it was copied instead of pickled."""
    batches, room = ThreadBatches(), Room()
    offset, length = batches.message(batch, room)  # type: ignore[arg-type]
    copied = bool(batches._copies)
    found = batches.read(room, offset, length)  # type: ignore[arg-type]
    assert not batches._copies
    return found, copied


TUPLE = (torch.ones(3), [np.zeros((2, 0)), np.asfortranarray(np.ones((3, 4)))])


@pytest.mark.parametrize(
    ("batch", "copied"),
    [
        ([], True),
        ([1, 2.5, True, None, "text", b"bytes", 1j], True),
        ({"a": np.arange(5), "b": TUPLE, 3: ()}, True),
        (np.zeros(1 << 20, np.uint8), True),
        (np.zeros((1 << 20) + 1, np.uint8), False),
        ([np.zeros(600 << 10, np.uint8)] * 2, False),
        ([0] * 1000, True),
        ([0] * 1100, False),
        ("x" * (2 << 20), False),
        # A pickle of these objects differs from a copy, so they are pickled.
        ([np.array([object], dtype=object)], False),
        (np.broadcast_to(np.arange(3), (2, 3)), False),
        (torch.nn.Parameter(torch.ones(3)), False),
        ({"a": range(5)}, False),
        (np.float32(2), False),
    ],
)
def test_which_batches_are_copied(batch: Any, copied: bool) -> None:
    found, was_copied = sent(batch)
    assert was_copied is copied
    assert_same([found], [batch])


def test_copies_share_no_memory_with_the_original() -> None:
    row, tensor = np.arange(6.0), torch.arange(4)
    inner = [row]
    found, copied = sent({"a": inner, "b": row[2:], "c": tensor[::2]})
    assert copied
    row[:], tensor[:] = -1, -1
    inner.clear()
    assert found["a"][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert (found["b"].tolist(), found["c"].tolist()) == ([2, 3, 4, 5], [0, 2])


def test_other_unpicklable_objects_are_errors() -> None:
    with pytest.raises(Exception, match="pickle"):
        sent([lambda: 1])
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    assert sent(deep) == (deep, False)
    endless: list[Any] = []
    endless.append(endless)
    found, copied = sent(endless)
    assert found[0] is found
    assert not copied


@apart
@pytest.mark.parametrize("at_once", [False, True])
def test_changing_batches_does_not_change_the_dataset(at_once: bool) -> None:
    rows = [np.arange(row, row + 50) for row in range(12)]
    dataset = Rows(rows) if at_once else Items(rows)
    loader = DataLoader(dataset, 4, collate_fn=listed, persistent_workers=True, **THREADS)
    for _ in range(20):
        for first, batch in zip((0, 4, 8), loader, strict=True):
            assert [row[0] for row in batch] == [first, first + 1, first + 2, first + 3]
            for row in batch:
                row += 1


@apart
def test_threads_pickle_no_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = []
    message = _messages.message
    monkeypatch.setattr(_messages, "message", lambda item, room: pickled.append(item) or message(item, room))
    for size, some in ((50, False), (1 << 20, True)):
        pickled.clear()
        rows = [np.arange(row, row + size) for row in range(4)]
        loader = DataLoader(Rows(rows), 2, collate_fn=listed, **THREADS)
        assert [row[0] for batch in loader for row in batch] == [0, 1, 2, 3]
        assert bool(pickled) is some


@apart
def test_unread_batches_are_dropped() -> None:
    rows = [np.arange(row, row + 50) for row in range(40)]
    loader = DataLoader(Rows(rows), 2, collate_fn=listed, persistent_workers=True, prefetch_factor=8, **THREADS)
    next(iter(loader))
    batches = loader._iterator._delivery.thread_batches
    gone, copies = weakref.ref(batches), batches._copies
    for _ in range(5):
        assert wait_until(lambda: len(copies) > 2)
        assert len(list(loader)) == 20
        assert not copies
        next(iter(loader))
    assert loader._iterator._delivery.thread_batches is batches
    del loader, batches
    gc.collect()
    assert wait_until(lambda: gone() is None)
