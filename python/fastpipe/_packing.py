"""The memory of a batch as a few stretches of bytes, which are copied elsewhere as they are.

The arrays of a batch lie in a few slabs: all that is of fixed size in the first one, and all else in a second one, or
in one of its own each where a single thread has made the batch. So a batch is copied in as many pieces, to one stretch
of memory elsewhere, and each array has its place there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastpipe import _fastpipe

__all__ = ["PackedBatch", "address_of"]

# Of pieces and arrays in the stretch, in bytes: what GPUs want for whatever reads them, and a multiple of any element.
_ALIGNMENT = 256


class PackedBatch:
    """The pieces of a batch, and where they and its arrays lie in one stretch of memory.

    `dense_shape` of sparse columns isn't data, and in no piece.

    Args:
        batch: arrays and forms by name.
        allocate: makes an array of so many bytes, or more, for arrays that aren't in a slab (which rows are valid, for
            example): they are copied to one piece.

    Attributes:
        pieces: the bytes of each, uint8 `[size]`, and where it begins in the stretch.
        nbytes: bytes of the stretch, a multiple of 256.
    """

    def __init__(self, batch: Mapping[str, Any], allocate: Callable[[int], np.ndarray]) -> None:
        self.pieces: list[tuple[np.ndarray, int]] = []
        self.nbytes = 0
        # Address, size and place of each, by address.
        self._found: list[tuple[int, ...]] = []
        arrays = [array for node in batch.values() for array in _arrays(node)]
        memory = next((found for array in arrays if (found := _memory(array)) is not None), None)
        for slab in [] if memory is None else memory.slabs:
            self._found.append((address_of(slab), slab.nbytes, self.nbytes))
            self._add(slab)
        self._found.sort()
        self._gather([a for a in arrays if a.size and self.place(address_of(a), a.nbytes) is None], allocate)

    def place(self, address: int, nbytes: int) -> int | None:
        """Where bytes of the batch begin in the stretch; None if they aren't the batch's."""
        i = bisect_left(self._found, (address + 1,)) - 1
        if i < 0:
            return None
        start, size, place = self._found[i]
        offset = address - start
        return place + offset if offset + nbytes <= size else None

    def _add(self, piece: np.ndarray) -> None:
        self.pieces.append((piece, self.nbytes))
        self.nbytes += _aligned(piece.nbytes)

    def _gather(self, arrays: list[np.ndarray], allocate: Callable[[int], np.ndarray]) -> None:
        if not arrays:
            return
        piece = allocate(sum(_aligned(array.nbytes) for array in arrays))
        end = 0
        found: list[tuple[int, ...]] = []
        for array in arrays:
            piece[end : end + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            found.append((address_of(array), array.nbytes, self.nbytes + end))
            end += _aligned(array.nbytes)
        self._add(piece[:end])
        self._found = sorted(self._found + found)


def address_of(array: np.ndarray) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _arrays(node: Any) -> Iterator[np.ndarray]:
    """The arrays of a form that have its data."""
    if isinstance(node, np.ndarray):
        yield node
        return
    yield from _arrays(node.values)
    for name in ("offsets", "indices", "valid"):
        if hasattr(node, name):
            yield from _arrays(getattr(node, name))


def _memory(array: np.ndarray) -> _fastpipe.Memory | None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, _fastpipe.Memory) else None
