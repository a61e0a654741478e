"""Dense arrays of forms: padded rows, counts of indices, and sparse rows with their zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown, within

Length: TypeAlias = "int | Sequence[int | None] | None"

_LARGEST = 2**63 - 1


def lengths_of(length: Any) -> list[int | None]:
    """Returns the length of each dimension that the caller passed.

    Raises:
        TypeError: If a length isn't an integer.
        ValueError: If a length is negative, or if there are no lengths.
    """
    several = length if isinstance(length, (list, tuple)) else [length]
    if not several:
        raise ValueError("length must have at least one entry")
    return [None if size is None else within("length", size, 0, _LARGEST) for size in several]


def padded(values: npt.NDArray[Any], offsets: npt.NDArray[Any], length: int | None, value: Any) -> npt.NDArray[Any]:
    """Returns rows of items as an array `[rows, length, ...]`.

    Raises:
        TypeError: If the value doesn't have the items' type.
        ValueError: If the value doesn't fit the items' dtype.
    """
    counts = np.diff(offsets)
    if length is None:
        length = int(counts.max(initial=0))
    shape = (len(counts), length, *values.shape[1:])
    found = np.full(_allocatable(shape), fitting(value, values.dtype), values.dtype)
    taken = np.minimum(counts, length)
    rows = np.repeat(np.arange(len(counts)), taken)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(taken) - taken, taken)
    found[rows, places] = values[np.repeat(offsets[:-1], taken) + places]
    return found


def fitting(value: Any, dtype: np.dtype[Any]) -> Any:
    """Returns a value as a scalar of a dtype. An integer dtype doesn't round it or wrap it around.

    Raises:
        TypeError: If the value doesn't have the dtype's type.
        ValueError: If the value doesn't fit the dtype.
    """
    reason = f"value={shown(value)} doesn't fit the items' dtype {dtype}"
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(value).astype(dtype)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(reason) from None
    if found.ndim:
        raise TypeError(f"value must be a single value; got {shown(value)}")
    if dtype.kind in "biu" and found.item() != value:
        raise ValueError(reason)
    return found[()]


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
    found = np.zeros(_allocatable(shape), values.dtype)
    # The sum of bools is True if one of them is.
    np.add.at(found, tuple(array.astype(np.int64) for array in indices), values)
    return found


def _allocatable(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape. NumPy raises a ValueError for arrays that exceed the address space."""
    if math.prod(shape) >= 2**59:
        raise MemoryError(f"an array of the shape {tuple(shape)} exceeds the memory of any machine")
    return tuple(shape)


def _check_indices(indices: npt.NDArray[Any], size: int, what: str) -> None:
    if not len(indices):
        return
    wrong = int(indices.min()) if indices.min() < 0 else int(indices.max())
    if not 0 <= wrong < size:
        raise ValueError(f"index {wrong} is out of range: {what} is {size}")
