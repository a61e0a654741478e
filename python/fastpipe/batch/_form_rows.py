"""Rows of the forms of batches: which ones a key chooses, and taking them of arrays and of forms alike."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from fastpipe._arguments import shown


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


def no_sparse_row(form: Any, index: Any) -> TypeError:
    at = row_index(index, len(form))
    return TypeError(
        f"a sparse row has no form of its own: [{at}:{at + 1}] is the row in the same form, to_list() has them all"
    )


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
