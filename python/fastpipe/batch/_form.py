"""Code that the forms of batches share: unpacking, indexing by rows, and printing."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa


def counted(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Returns dates, times and durations as int64 over the same memory, and other arrays unchanged.

    NaT is the smallest int64.
    """
    return array.view(np.int64) if array.dtype.kind in "mM" else array


def row_index(index: int, rows: int) -> int:
    try:
        if isinstance(index, (bool, np.bool_)):
            raise TypeError
        number = operator.index(index)
    except TypeError:
        raise TypeError(f"a row index must be an integer; got {shown(index)}") from None
    if not -rows <= number < rows:
        raise IndexError(f"row {number} does not exist: there are {rows} rows")
    return number + rows if number < 0 else number


def rows_by_key(form: Any, key: Any) -> Any:
    """Returns `form[key]`."""
    count = len(form)
    if isinstance(key, slice):
        start, stop, step = key.indices(count)
        if step == 1:
            return form._slice(start, max(start, stop))
        return form._take(np.arange(start, stop, step))
    if isinstance(key, (list, np.ndarray)) and np.ndim(key) > 0:
        return form._take(_chosen(key, count))
    if isinstance(key, tuple) or key is None or key is Ellipsis:
        raise TypeError(
            f"{type(form).__name__} can only be indexed by rows; got {shown(key)}. For items of a row use x[i][j]"
        )
    return form._row(row_index(key, count))


def _chosen(key: Any, count: int) -> np.ndarray:
    """Returns the indices of the rows that a mask or an index array selects."""
    array = np.asarray(key)
    if array.ndim != 1:
        raise TypeError(f"rows must be selected by a one-dimensional array; got ndim={array.ndim}")
    if array.dtype == np.bool_:
        if len(array) != count:
            raise IndexError(f"a mask must have one entry for each of the {count} rows; got {len(array)}")
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"rows must be selected by bools or integers; got {array.dtype}")
    wrong = (array < -count) | (array >= count) if array.dtype.kind == "i" else array >= count
    if wrong.any():
        raise IndexError(f"row {array[wrong][0]} does not exist: there are {count} rows")
    rows = array.astype(np.int64)
    rows[rows < 0] += count
    return rows


def spans(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions of the items of some rows, concatenated, and the offsets of these rows."""
    starts = offsets[rows]
    return ranges(starts, offsets[rows + 1] - starts)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions in ranges of items, concatenated, and the offsets of the ranges."""
    taken = np.zeros(len(lengths) + 1, starts.dtype)
    np.cumsum(lengths, out=taken[1:])
    return np.arange(taken[-1], dtype=np.int64) + np.repeat(starts - taken[:-1], lengths), taken


def with_rows(dense_shape: np.ndarray, rows: int) -> np.ndarray:
    shape = dense_shape.copy()
    shape[0] = rows
    return shape


def take_rows(node: Any, rows: np.ndarray) -> Any:
    return node[rows] if isinstance(node, np.ndarray) else node._take(rows)


def slice_rows(node: Any, start: int, stop: int) -> Any:
    return node[start:stop] if isinstance(node, np.ndarray) else node._slice(start, stop)


def to_list(node: Any) -> list[Any]:
    rows: list[Any] = node.tolist() if isinstance(node, np.ndarray) else node.to_list()
    return rows


def nest(entries: list[Any], shape: tuple[int, ...]) -> list[Any]:
    for depth in range(len(shape) - 1, 0, -1):
        size = shape[depth]
        entries = [entries[i * size : (i + 1) * size] for i in range(math.prod(shape[:depth]))]
    return entries


def blank(rows: list[Any], valid: np.ndarray) -> list[Any]:
    if valid.ndim > 1:
        return [blank(row, flags) for row, flags in zip(rows, valid, strict=True)]
    return [row if flag else None for row, flag in zip(rows, valid.tolist(), strict=True)]


Rows: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | np.ndarray"

_SHOWN_LEVELS = 8


class Form:
    """Base class of the forms. A subclass lists its parts in `_parts`, in the order of its constructor."""

    # Weak references let a test or a cache observe when a batch's memory returns to the pool.
    __slots__ = ("__weakref__",)
    _parts: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self._parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self)

    def __repr__(self) -> str:
        return self._described(_SHOWN_LEVELS)

    def _described(self, levels: int) -> str:
        if not levels:
            return f"{type(self).__name__}(...)"
        parts = [f"{name}={describe(getattr(self, name), levels - 1)}" for name in self._parts]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __getitem__(self, key: Rows) -> Any:
        """Returns rows in the same form for a slice, a mask or row indices, and one row for an integer.

        Raises:
            IndexError: If an index is out of range.
            TypeError: If the key doesn't select rows, or if it is an integer and the rows are sparse, since a single
                sparse row has no form.
        """
        return rows_by_key(self, key)

    def _row(self, index: int) -> Any:
        """Returns the row with this index, which is in range."""
        raise NotImplementedError

    def _slice(self, start: int, stop: int) -> Any:
        """Returns a range of rows as a view."""
        raise NotImplementedError

    def _take(self, rows: np.ndarray) -> Any:
        """Returns a copy of the rows with these indices, which are int64 and in range."""
        raise NotImplementedError

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        # Without this method, NumPy treats the form as a sequence and makes an array of its parts.
        raise TypeError(
            f"a {type(self).__name__} is not a single NumPy array: use its parts {', '.join(self._parts)}, or to_list()"
        )

    def to_list(self) -> list[Any]:
        """Returns nested Python lists, one entry per row."""
        raise NotImplementedError

    def to_arrow(self) -> pa.Array:
        """Converts the rows to a pyarrow array over the same memory (extra `arrow`). See also `fastpipe.to_arrow`.

        Ragged rows are converted to large lists, strings to `large_string` or `large_binary`, and masks to nulls.
        Sparse rows are converted to structs of the lists `indices0`, `indices1` ... and `values`, without the dense
        shape. Only bools, masks, and the indices of `Sparse` are copied.

        Raises:
            ImportError: If pyarrow isn't installed.
            LimitError: If there are more than 64 levels of nesting.
            TypeError: If Arrow doesn't support the dtype.
            ValueError: If the parts are inconsistent: offsets or entries are not in order, a mask has the wrong shape,
                or text isn't valid UTF-8.
        """
        from fastpipe._arrow.export import form_to_arrow

        return form_to_arrow(self)


def described(parts: Any) -> str:
    """Returns a description of a named tuple of arrays, with their dtypes and shapes."""
    fields = [f"{name}={describe(part)}" for name, part in zip(parts._fields, parts, strict=True)]
    return f"{type(parts).__name__}({', '.join(fields)})"


def describe(part: Any, levels: int = _SHOWN_LEVELS) -> str:
    if isinstance(part, np.ndarray):
        return f"{part.dtype}[{', '.join(map(str, part.shape))}]"
    return part._described(levels) if isinstance(part, Form) else shown(part)
