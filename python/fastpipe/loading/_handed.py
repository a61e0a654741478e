"""Small batches that a thread has made of items of its own: objects that go to the consumer as they are."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from fastpipe._fastpipe import ItemMemory, ItemRoom

__all__ = ["Handed"]

# Bytes of a message that says which. Those of `_messages` are longer: their head is as long, and a pickle follows.
_LENGTH = 8

# Larger batches, for which copying costs more than pickling, lie in the memory that is counted.
_MOST_BYTES = 1 << 20
_MOST_PARTS = 1024

_PLAIN = frozenset({int, float, bool, complex, type(None)})


class Handed:
    """Batches that are on their way from threads to the consumer.

    What a thread has made lies in memory that the consumer sees, so pickling it only costs, and no other thread runs
    meanwhile: with it, batches of 32 arrays of 4 KB took two to six times as long.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._batches: dict[int, Any] = {}

    def suits(self, batch: Any) -> bool:
        """Whether a batch is small, and nothing that another process couldn't be sent."""
        left, parts = _MOST_BYTES, 0
        pending = [batch]
        while pending:
            part = pending.pop()
            kind, parts = type(part), parts + 1
            if kind is np.ndarray:
                if part.dtype.hasobject:
                    return False
                left -= part.nbytes
            elif kind is torch.Tensor:
                if part.requires_grad or not part.is_cpu or part.layout is not torch.strided:
                    return False
                left -= part.nbytes
            elif kind is list or kind is tuple:
                pending.extend(part)
            elif kind is dict:
                pending.extend(part)
                pending.extend(part.values())
            elif kind is str or kind is bytes:
                left -= len(part)
            elif kind not in _PLAIN:
                return False
            if left < 0 or parts + len(pending) > _MOST_PARTS:
                return False
        return True

    def message(self, batch: Any, room: ItemRoom) -> tuple[int, int]:
        """Keeps a batch, and writes a message that says which. Returns its offset and length.

        Raises:
            OutOfMemoryError: if there is no room.
        """
        number = next(self._numbers)
        offset = room.write(number.to_bytes(_LENGTH, "little"))
        self._batches[number] = batch
        return offset, _LENGTH

    def has(self, length: int) -> bool:
        """Whether a message of so many bytes says which batch it is."""
        return length == _LENGTH

    def take(self, memory: ItemMemory, offset: int) -> Any:
        """The batch that a message stands for, which nobody else will have."""
        return self._batches.pop(int.from_bytes(bytes(memory.bytes(offset, _LENGTH)), "little"))

    def clear(self) -> None:
        """Lets go of batches that nobody has taken."""
        self._batches.clear()
