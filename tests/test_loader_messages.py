"""Messages of DataLoader workers keep no reference to the objects they were made from."""

from __future__ import annotations

import copyreg
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fastpipe.torch.loader import _messages  # noqa: E402


class Room:
    """A message buffer in this process."""

    def __init__(self) -> None:
        self.data = bytearray()

    def reserve(self, sizes: list[int]) -> None:
        """Does nothing: the buffer grows."""

    def write(self, data: Any) -> int:
        place = len(self.data) + -len(self.data) % 64
        self.data += bytes(place - len(self.data)) + bytes(data)
        return place

    def bytes(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])

    def array(self, offset: int, length: int) -> np.ndarray:
        return np.frombuffer(bytearray(self.bytes(offset, length)), np.uint8)


def sent(item: Any) -> Any:
    room: Any = Room()
    return _messages.read(room, *_messages.message(item, room))


class Marked(np.ndarray):
    """An array that supports weak references."""


@pytest.mark.parametrize("make", [lambda: np.zeros(1000).view(Marked), lambda: torch.zeros(1000)])
def test_nothing_is_kept(make: Callable[[], Any]) -> None:
    gc.disable()
    try:
        item = make()
        seen = weakref.ref(item)
        sent([item, {"again": item}])
        del item
        assert seen() is None
    finally:
        gc.enable()


ARRAYS = [
    np.arange(6, dtype="<i2").reshape(2, 3),
    np.arange(6, dtype=">i4").reshape(2, 3).T,
    np.arange(1000.0).reshape(10, 100),
    np.arange(1000.0).reshape(10, 100)[:, ::3],
    np.asfortranarray(np.arange(600.0).reshape(20, 30)),
    np.array(1.5),
    np.zeros((0, 3), np.float32),
    np.array(["a", "bc"]),
    np.array([1, "two", None], object),
    np.zeros(3, [("x", "i4"), ("y", "f8")]),
    np.array(["2024-01-01"], "datetime64[D]"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_round_trip(array: np.ndarray) -> None:
    (found,) = sent([array])
    assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape)
    assert found.tolist() == array.tolist()
    assert found.flags.writeable


def test_read_only_arrays_stay_read_only() -> None:
    array = np.arange(4)
    array.flags.writeable = False
    assert not sent(array).flags.writeable


def test_an_object_sent_twice_stays_one_object() -> None:
    tensor, array = torch.arange(100), np.arange(100)
    first, second, third, fourth = sent([tensor, tensor, array, array])
    assert first is second
    assert third is fourth


def test_tensors_keep_sharing_a_storage() -> None:
    whole = torch.arange(1000)
    found, part = sent([whole, whole[10:800]])
    part += 1
    assert found[9:12].tolist() == [9, 11, 12]


def test_a_registered_reducer_for_arrays_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (float, (array.sum(),)))
    assert sent([np.arange(4.0)]) == [6.0]
