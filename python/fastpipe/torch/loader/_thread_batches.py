"""Batches in flight from worker threads to the consumer: small ones are copied, all others are pickled as elsewhere.

Pickling holds the GIL, so threads that pickle small batches for each other are slower than one thread: batches of 32
arrays of 4 KB took 2 to 6 times as long. A copy has the same effect as a pickle. The consumer may modify the batch in
place, and never shares its memory with the data set.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from fastpipe._fastpipe import ItemMemory, ItemRoom
from fastpipe.torch.loader import _messages

__all__ = ["ThreadBatches"]

# Length of a message that holds the number of a copied batch. All others are longer: their header has 8 bytes, and a
# pickle follows.
_LENGTH = 8

# Larger batches are pickled: they lie in slabs, which `memory_limit` counts, and their pickle is the cheaper part.
_MOST_BYTES = 1 << 20
_MOST_PARTS = 1024
_DEPTH = 32

_IMMUTABLE = frozenset({int, float, bool, complex, type(None)})


class _NotCopiedError(Exception):
    """The batch is large, or has parts that only a pickle can copy."""


class _Copier:
    """Copies a batch."""

    def __init__(self) -> None:
        self._bytes, self._parts = _MOST_BYTES, _MOST_PARTS

    def copy(self, part: Any, depth: int = 0) -> Any:
        """A copy that shares no memory with the original.

        Raises:
            _NotCopiedError: if it can't be copied here.
        """
        kind = type(part)
        self._count(1, 0)
        if kind in _IMMUTABLE:
            return part
        if kind is str or kind is bytes:
            self._count(0, len(part))
            return part
        if kind is np.ndarray and part.flags.writeable and not part.dtype.hasobject:
            self._count(0, part.nbytes)
            return part.copy(order="K")
        if kind is torch.Tensor and _messages.storable(part):
            self._count(0, part.nbytes)
            return part.clone()
        if depth < _DEPTH:
            if kind is list:
                return [self.copy(each, depth + 1) for each in part]
            if kind is tuple:
                return tuple([self.copy(each, depth + 1) for each in part])
            if kind is dict:
                return {self.copy(key, depth + 1): self.copy(value, depth + 1) for key, value in part.items()}
        raise _NotCopiedError

    def _count(self, parts: int, nbytes: int) -> None:
        self._parts -= parts
        self._bytes -= nbytes
        if self._parts < 0 or self._bytes < 0:
            raise _NotCopiedError


class ThreadBatches:
    """Writes and reads the messages of batches that a thread made by itself."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._copies: dict[int, Any] = {}

    def message(self, batch: Any, room: ItemRoom) -> tuple[int, int]:
        """Writes the message of a batch. Returns its offset and length.

        Raises:
            OutOfMemoryError: if there is no room.
            Exception: whatever pickling the batch raises.
        """
        try:
            copied = _Copier().copy(batch)
        except _NotCopiedError:
            return _messages.message(batch, room)
        number = next(self._numbers)
        offset = room.write(number.to_bytes(_LENGTH, "little"))
        self._copies[number] = copied
        return offset, _LENGTH

    def read(self, memory: ItemMemory, offset: int, length: int) -> Any:
        """Reads a message. A copied batch is handed out once."""
        if length == _LENGTH:
            return self._copies.pop(int.from_bytes(memory.bytes(offset, length), "little"))
        return _messages.read(memory, offset, length)

    def clear(self) -> None:
        """Drops the batches whose messages nobody will read."""
        self._copies.clear()
