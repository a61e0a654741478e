"""What the forms of batches share: how they unpack, are indexed by rows, and are shown."""

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
    """The array; of dates, times and durations the int64 that it holds, over the same memory. NaT is the least."""
    return array.view(np.int64) if array.dtype.kind in "mM" else array


def row_index(index: int, rows: int) -> int:
    try:
        if isinstance(index, (bool, np.bool_)):
            raise TypeError
        number = operator.index(index)
    except TypeError:
        raise TypeError(f"a row is a number, not {shown(index)}") from None
    if not -rows <= number < rows:
        raise IndexError(f"row {number} of {rows}")
    return number + rows if number < 0 else number


def rows_by_key(form: Any, key: Any) -> Any:
    """What `form[key]` is."""
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
            f"{type(form).__name__} is indexed by rows alone, not by {shown(key)}; take items of a row: x[i][j]"
        )
    return form.row(key)


def _chosen(key: Any, count: int) -> np.ndarray:
    """The numbers of the rows that a mask or an array of numbers chooses."""
    array = np.asarray(key)
    if array.ndim != 1:
        raise TypeError(f"rows are chosen by an array of one dimension, not of {array.ndim}")
    if array.dtype == np.bool_:
        if len(array) != count:
            raise IndexError(f"a mask has one entry for each of the {count} rows, not {len(array)}")
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"rows are chosen by bools or integers, not {array.dtype}")
    wrong = (array < -count) | (array >= count) if array.dtype.kind == "i" else array >= count
    if wrong.any():
        raise IndexError(f"row {array[wrong][0]} of {count}")
    rows = array.astype(np.int64)
    rows[rows < 0] += count
    return rows


def spans(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of the items of some rows, one row after the other, and the offsets of these rows."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    taken = np.zeros(len(rows) + 1, offsets.dtype)
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
    """What the forms share. A subclass lists its parts, in the order of its constructor, in `_parts`."""

    # Weak references let a test, or a cache, see when a batch's memory goes back to the pool.
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
        """Rows: the same form for a slice, a mask or numbers of rows, and one row for a number."""
        return rows_by_key(self, key)

    def row(self, index: int) -> Any:
        """One row.

        Args:
            index: the row; negative ones count from the end.

        Raises:
            IndexError: if there is no such row.
            TypeError: if it is no number.
        """
        raise NotImplementedError

    def _slice(self, start: int, stop: int) -> Any:
        """These rows, as a view."""
        raise NotImplementedError

    def _take(self, rows: np.ndarray) -> Any:
        """These rows, copied. Numbers are int64, and in range."""
        raise NotImplementedError

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        # Without this, NumPy takes the form for a sequence and makes an array of its parts.
        raise TypeError(
            f"a {type(self).__name__} has no single NumPy array: use its parts ({', '.join(self._parts)}) or to_list()"
        )

    def to_list(self) -> list[Any]:
        """Nested Python lists, one entry a row."""
        raise NotImplementedError

    def to_arrow(self) -> pa.Array:
        """The rows as a pyarrow array over the same memory (extra `arrow`), as `fastpipe.to_arrow` lays out a column.

        Ragged rows are large lists, strings `large_string` or `large_binary`, masks nulls, and sparse rows structs of
        lists `indices0`, `indices1` ... and `values`, without the dense shape. Only bools, masks, and the indices of
        `Sparse` are copied.

        Raises:
            ImportError: if pyarrow isn't installed.
            TypeError: if Arrow has no such dtype.
            ValueError: if the parts contradict themselves: offsets or entries that aren't in order, masks of another
                shape, text that isn't UTF-8.
        """
        from fastpipe._arrow.export import form_to_arrow

        return form_to_arrow(self)


def described(parts: Any) -> str:
    """A named tuple of arrays, by their dtypes and shapes."""
    fields = [f"{name}={describe(part)}" for name, part in zip(parts._fields, parts, strict=True)]
    return f"{type(parts).__name__}({', '.join(fields)})"


def describe(part: Any, levels: int = _SHOWN_LEVELS) -> str:
    if isinstance(part, np.ndarray):
        return f"{part.dtype}[{', '.join(map(str, part.shape))}]"
    return part._described(levels) if isinstance(part, Form) else shown(part)
