"""Dense arrays of forms: counts of indices, and sparse rows with their zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import available_memory

# Smaller arrays are left to NumPy. A query of the available memory takes some microseconds.
_LARGE = 2**30


def counts(indices: npt.NDArray[Any], offsets: npt.NDArray[Any], size: int, dtype: Any) -> npt.NDArray[Any]:
    """Returns how often each row has each index, as an array `[rows, size]`."""
    _check_indices(indices, size, "size")
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    items = indices[int(offsets[0]) : int(offsets[-1])]
    return added((len(offsets) - 1, size), [rows, items], np.ones(len(rows), dtype))


def added(shape: Sequence[int], indices: Sequence[npt.NDArray[Any]], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns an array of zeros to which values are added at their indices.

    Raises:
        ValueError: If an index is out of range.
    """
    for dim, (size, array) in enumerate(zip(shape, indices, strict=True)):
        _check_indices(array, size, f"dimension {dim}")
    found = np.zeros(allocatable(shape, values.itemsize), values.dtype)
    # The sum of bools is True if one of them is.
    np.add.at(found, tuple(array.astype(np.int64) for array in indices), values)
    return found


def allocatable(shape: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Returns the shape of an array that the machine can have.

    NumPy raises a ValueError for an array that exceeds the address space. For an array that exceeds the memory, the
    system may end the process, because it finds out only when the array is written.

    Raises:
        MemoryError: If the array is too large.
    """
    if math.prod(max(size, 1) for size in shape) * itemsize >= 2**62:
        raise MemoryError(f"an array of the shape {tuple(shape)} exceeds the memory of any machine")
    size = math.prod(shape) * itemsize
    if size >= _LARGE and (free := available_memory()) is not None and size > free:
        raise MemoryError(f"an array of the shape {tuple(shape)} takes {size} bytes, and {free} are available")
    return tuple(shape)


def _check_indices(indices: npt.NDArray[Any], size: int, what: str) -> None:
    if not len(indices):
        return
    wrong = int(indices.min()) if indices.min() < 0 else int(indices.max())
    if not 0 <= wrong < size:
        raise ValueError(f"index {wrong} is out of range: {what} is {size}")
