"""The memory of a batch as a few stretches of bytes, which are copied elsewhere as they are.

The arrays of a batch lie in a few slabs: all that is of fixed size in the first one, and all else in a second one, or
in one of its own each where a single thread has made the batch. So a batch is copied in as many pieces, to one stretch
of memory elsewhere, and each array has its place there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastpipe import _fastpipe

__all__ = ["PackedBatch"]

# Of pieces and arrays in the stretch, in bytes: what GPUs want for whatever reads them, and a multiple of any element.
_ALIGNMENT = 256


class PackedBatch:
    """The pieces of a batch, and where they and its arrays lie in one stretch of memory.

    `dense_shape` of sparse columns isn't data, and in no piece.

    Args:
        batch: arrays and forms by name. Who has this must keep that.
        allocate: makes an array of a number of bytes, or more, for arrays that aren't in a slab (which rows are valid,
            for example): they are copied to one piece.

    Attributes:
        pieces: the bytes of each, uint8 `[size]`, and where it begins in the stretch.
        nbytes: bytes of the stretch, a multiple of 256.
    """

    def __init__(self, batch: Mapping[str, Any], allocate: Callable[[int], np.ndarray]) -> None:
        arrays = [array for node in batch.values() for array in _arrays(node)]
        bases: list[Any] = [array.base for array in arrays]
        self._memory = next((base for base in bases if isinstance(base, _fastpipe.Memory)), None)
        self.pieces: list[tuple[np.ndarray, int]] = [] if self._memory is None else self._memory.pieces()
        self.nbytes = 0
        if self.pieces:
            last, start = self.pieces[-1]
            self.nbytes = start + _aligned(last.nbytes)
        self._strays: dict[tuple[int, int], int] = {}
        strays = [a for a, base in zip(arrays, bases, strict=True) if base is not self._memory and a.size]
        if strays:
            self._gather(strays, allocate)

    def place(self, array: np.ndarray) -> int | None:
        """Where an array of the batch, or a view of one, begins in the stretch; None for others, and empty ones."""
        place = None if self._memory is None else self._memory.place(array)
        return self._strays.get(_extent(array)) if place is None else place

    def _gather(self, arrays: list[np.ndarray], allocate: Callable[[int], np.ndarray]) -> None:
        piece = allocate(sum(_aligned(array.nbytes) for array in arrays))
        end = 0
        for array in arrays:
            piece[end : end + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._strays[_extent(array)] = self.nbytes + end
            end += _aligned(array.nbytes)
        self.pieces.append((piece[:end], self.nbytes))
        self.nbytes += end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _extent(array: np.ndarray) -> tuple[int, int]:
    """Where an array lies in this process's memory, transposed or not: its address and bytes."""
    return array.__array_interface__["data"][0], array.nbytes


def _arrays(node: Any) -> Iterator[np.ndarray]:
    """The arrays of a form that have its data."""
    if isinstance(node, np.ndarray):
        yield node
        return
    for name in node._parts:
        if name in ("values", "offsets", "indices", "valid"):
            yield from _arrays(getattr(node, name))
