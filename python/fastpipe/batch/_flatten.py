"""Splits forms into the parts of their columns, and joins the parts again.

A form of any kind and depth consists of a few arrays, the *parts* of its column. Each row owns a range of each part:
one element of a dense column, or a length and that many items of a ragged one. So rows are moved by moving ranges,
which `_fastpipe.RowBuffer` does. This module does no work per row.

The order of a column's parts is the same as in batches of readers (`Form::parts` of `fastpipe-batch`): from the
outermost to the innermost level, each nested in all lengths before it. Sparse columns of both layouts have CSR parts.
This module doesn't convert forms to specs, because incoming batches may have dtypes that no spec supports (complex
numbers, structs, the other byte order) and nested masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.batch._form import slice_rows

# For lengths, the number of them per item of the enclosing level. For values, their dtype and their shape per item.
Part: TypeAlias = "int | tuple[np.dtype[Any], tuple[int, ...]]"


class ColumnLayout:
    """The columns of batches, as the first batch defines them. All later batches must match.

    Args:
        first: The first batch.
        batch_size: Maximum number of rows in resulting batches.

    Attributes:
        parts: The parts of each column.
    """

    def __init__(self, first: Mapping[str, Any], batch_size: int) -> None:
        if not first:
            raise ValueError("a batch has no columns")
        self._nodes: dict[str, _Node] = {}
        self.parts: list[list[Part]] = []
        for name, form in first.items():
            parts: list[Part] = []
            self._nodes[name] = _node(form, f"column {name!r}", parts, batch_size)
            self.parts.append(parts)

    @property
    def arrays(self) -> list[str] | None:
        """The names of the columns if all of them are plain arrays, which are their only part. Otherwise None."""
        plain = all(type(node) is _Dense for node in self._nodes.values())
        return list(self._nodes) if plain else None

    def split(self, batch: Mapping[str, Any]) -> tuple[int, list[np.ndarray]]:
        """Returns the number of rows in a batch, and its parts.

        Lengths are one-dimensional int64 arrays. All other parts are C-contiguous.

        Raises:
            TypeError: If the form or dtype of a column differs from the first batch.
            ValueError: If columns are missing or new, if their shapes differ from the first batch, if their numbers of
                rows differ, or if offsets or coordinates are not in order.
        """
        if batch.keys() != self._nodes.keys():
            missing, others = sorted(self._nodes.keys() - batch.keys()), sorted(batch.keys() - self._nodes.keys())
            problem = f"lacks {missing}" if missing else f"also has {others}"
            raise ValueError(f"the columns of a batch differ from the first batch: it {problem}")
        parts: list[np.ndarray] = []
        rows = None
        for name, node in self._nodes.items():
            count = node.count(batch[name])
            rows = count if rows is None else rows
            if count != rows:
                raise ValueError(f"the columns of a batch have {rows} rows, but {node.where} has {count}")
            node.split(batch[name], rows, parts)
        return rows or 0, parts

    def join(self, rows: int, parts: list[np.ndarray]) -> dict[str, Any]:
        """Returns the batch with these parts, in which offsets replace lengths."""
        following = iter(parts)
        return {name: node.join(rows, following) for name, node in self._nodes.items()}


class _Node:
    """Splits a form into parts and joins them again. All methods process the parts in the same order.

    The constructor appends the parts of the form to the parts of its column. For `batch_size` see `ColumnLayout`.
    """

    def __init__(self, form: Any, where: str) -> None:
        self.kind: type[Any] = _kind(form, where)
        self.where = where

    def count(self, form: Any) -> int:
        """Returns the number of rows in a form. Checks the form only as far as that requires."""
        self.hold(form)
        try:
            return len(form)
        except (TypeError, ValueError, IndexError) as error:
            raise TypeError(f"the rows of {self.where} can't be counted: {error}") from None

    def hold(self, form: Any) -> None:
        """Raises an error if the form has another kind than in the first batch."""
        if (kind := _kind(form, self.where)) is not self.kind:
            raise TypeError(f"{self.where} is {kind.__name__} in a batch, but {self.kind.__name__} in the first batch")

    def split(self, form: Any, rows: int, parts: list[np.ndarray]) -> None:
        """Appends the parts of a form with `rows` rows."""
        raise NotImplementedError

    def join(self, rows: int, parts: Iterator[np.ndarray]) -> Any:
        """Returns a form of `rows` rows."""
        raise NotImplementedError

    def same(self, what: str, value: Any, first: Any, error: type[Exception] = ValueError) -> None:
        """Raises an error if a property of a batch differs from the first batch."""
        if value != first:
            raise error(f"{self.where} has {what} {value} in a batch, but {first} in the first batch")

    def inner(self, node: _Node, form: Any, rows: int, parts: list[np.ndarray]) -> None:
        """Appends the parts of a nested form."""
        if (count := node.count(form)) != rows:
            raise ValueError(f"{node.where} must have length {rows}; got {count}")
        node.split(form, rows, parts)


class _Dense(_Node):
    def __init__(self, form: Any, where: str, parts: list[Part], batch_size: int) -> None:
        super().__init__(form, where)
        self._check(form)
        self.dtype, self.shape = form.dtype, form.shape[1:]
        if self.dtype.hasobject:
            raise TypeError(f"{where} holds Python objects (dtype {self.dtype}), which can't be moved as bytes")
        if self.dtype.itemsize == 0:
            raise TypeError(f"{where} has a dtype without bytes: {self.dtype}")
        parts.append((self.dtype, self.shape))

    def _check(self, form: Any) -> None:
        if isinstance(form, np.ma.MaskedArray):
            raise TypeError(f"{self.where} is a NumPy masked array: use fastpipe.Masked")
        if form.ndim == 0:
            raise ValueError(f"{self.where} is an array without dimensions, so it has no rows")

    def count(self, form: Any) -> int:
        if type(form) is np.ndarray and form.dtype == self.dtype and form.shape[1:] == self.shape and form.ndim > 0:
            return len(form)  # The common case. The code below finds out what is wrong.
        self.hold(form)
        self._check(form)
        self.same("dtype", form.dtype, self.dtype, TypeError)
        self.same("rows of shape", form.shape[1:], self.shape)
        return len(form)

    def split(self, form: Any, rows: int, parts: list[np.ndarray]) -> None:
        parts.append(np.ascontiguousarray(form))

    def join(self, rows: int, parts: Iterator[np.ndarray]) -> Any:
        return next(parts)


class _Ragged(_Node):
    def __init__(self, form: Any, where: str, parts: list[Part], batch_size: int) -> None:
        super().__init__(form, where)
        parts.append(1)
        self.values = _node(form.values, f"values of {where}", parts, batch_size)

    def split(self, form: Any, rows: int, parts: list[np.ndarray]) -> None:
        self.values.hold(form.values)
        lengths, first, last = _lengths(form.offsets, rows, len(form.values), self.where)
        parts.append(lengths)
        self.inner(self.values, _cut(form.values, first, last), last - first, parts)

    def join(self, rows: int, parts: Iterator[np.ndarray]) -> Ragged:
        offsets = next(parts)
        return Ragged(self.values.join(int(offsets[-1]), parts), offsets)


class _Strings(_Node):
    def __init__(self, form: Any, where: str, parts: list[Part], batch_size: int) -> None:
        super().__init__(form, where)
        self.shape, self.binary = tuple(form.shape[1:]), form.binary
        self.entries = math.prod(self.shape)
        parts.append(self.entries)
        values = f"values of {where}"
        self.values = _Dense(_array(form.values, np.uint8, values), values, parts, batch_size)

    def split(self, form: Any, rows: int, parts: list[np.ndarray]) -> None:
        self.same("rows of shape", tuple(form.shape[1:]), self.shape)
        self.same("binary", form.binary, self.binary, TypeError)
        self.values.hold(form.values)
        lengths, first, last = _lengths(form.offsets, rows * self.entries, len(form.values), self.where)
        parts.append(lengths)
        self.inner(self.values, form.values[first:last], last - first, parts)

    def join(self, rows: int, parts: Iterator[np.ndarray]) -> Strings:
        offsets = next(parts)
        return Strings(next(parts), offsets, (rows, *self.shape), self.binary)


class _Masked(_Node):
    def __init__(self, form: Any, where: str, parts: list[Part], batch_size: int) -> None:
        super().__init__(form, where)
        valid = f"valid of {where}"
        self.valid = _Dense(_array(form.valid, np.bool_, valid), valid, parts, batch_size)
        self.values = _node(form.values, f"values of {where}", parts, batch_size)

    def split(self, form: Any, rows: int, parts: list[np.ndarray]) -> None:
        self.inner(self.valid, form.valid, rows, parts)
        self.inner(self.values, form.values, rows, parts)

    def join(self, rows: int, parts: Iterator[np.ndarray]) -> Masked:
        valid = next(parts)
        return Masked(self.values.join(rows, parts), valid)


class _Sparse(_Node):
    """Both layouts of sparse rows. The lengths determine the row of an entry, so it isn't stored."""

    def __init__(self, form: Any, where: str, parts: list[Part], batch_size: int) -> None:
        super().__init__(form, where)
        if any(isinstance(part, int) for part in parts):
            raise TypeError(f"{where} is {self.kind.__name__}: sparse values can't be nested, only masked")
        parts.append(1)
        self.sizes = np.zeros(len(form.dense_shape) - 1, dtype=np.int64)
        coordinates = self._coordinates(form)
        self.indices = _Dense(coordinates, f"indices of {where}", parts, batch_size)
        # Also the dtype of row coordinates. The incoming dtype may be too narrow for the rows of resulting batches.
        fits = batch_size - 1 <= np.iinfo(coordinates.dtype).max
        self.dtype = coordinates.dtype if fits else np.dtype(np.int64)
        self.values = _node(form.values, f"values of {where}", parts, batch_size)

    def _coordinates(self, form: Any) -> np.ndarray:
        indices = _array(form.indices, np.integer, f"indices of {self.where}")
        coo = issubclass(self.kind, Sparse)
        if indices.ndim != 2 and (coo or indices.ndim != 1):
            raise ValueError(f"indices of {self.where} must have two dimensions; got shape {indices.shape}")
        coordinates = indices[:, 1:] if coo else indices
        width, rank = coordinates.shape[1] if coordinates.ndim > 1 else 1, len(form.dense_shape) - 1
        if width != rank:
            raise ValueError(f"indices of {self.where} have shape {indices.shape}; dense_shape has {rank} dimensions")
        return coordinates

    def split(self, form: Any, rows: int, parts: list[np.ndarray]) -> None:
        self.same("dimensions", len(form.dense_shape) - 1, len(self.sizes))
        coordinates = self._coordinates(form)
        self.values.hold(form.values)
        if len(coordinates) != len(form.values):
            raise ValueError(f"{self.where} has {len(coordinates)} indices and {len(form.values)} values")
        if isinstance(form, SparseCSR):
            lengths, first, last = _lengths(form.offsets, rows, len(form.values), self.where)
        else:
            row, first, last = form.indices[:, 0].astype(np.int64), 0, len(coordinates)
            if last and (row[0] < 0 or row[-1] >= rows or (np.diff(row) < 0).any()):
                raise ValueError(f"indices of {self.where} are not sorted by row, or outside of its {rows} rows")
            lengths = np.bincount(row, minlength=rows).astype(np.int64, copy=False)
        sizes = _array(np.asarray(form.dense_shape), np.integer, f"dense_shape of {self.where}").astype(np.int64)[1:]
        self._check_inside(coordinates, sizes)
        parts.append(lengths)
        self.inner(self.indices, coordinates[first:last], last - first, parts)
        self.inner(self.values, _cut(form.values, first, last), last - first, parts)
        self.sizes = np.maximum(self.sizes, sizes)

    def _check_inside(self, coordinates: np.ndarray, sizes: np.ndarray) -> None:
        """Raises an error if a coordinate is outside of the dense shape."""
        if len(coordinates) and ((coordinates.min(0) < 0) | (coordinates.max(0) >= sizes)).any():
            table = coordinates.reshape(len(coordinates), -1)
            wrong = ((table < 0) | (table >= sizes)).any(1)
            found, shape = table[wrong][0].tolist(), sizes.tolist()
            raise ValueError(f"indices of {self.where} contain {found}, which is outside of its dense_shape {shape}")

    def join(self, rows: int, parts: Iterator[np.ndarray]) -> Sparse | SparseCSR:
        offsets, indices = next(parts), next(parts)
        values = self.values.join(int(offsets[-1]), parts)
        dense_shape = np.concatenate(([rows], self.sizes))
        if self.kind is SparseCSR:
            return SparseCSR(offsets, indices, values, dense_shape)
        whole = np.empty((len(indices), indices.shape[1] + 1), dtype=self.dtype)
        whole[:, 0] = np.repeat(np.arange(rows), np.diff(offsets))
        whole[:, 1:] = indices
        return Sparse(whole, values, dense_shape)


_NODES: dict[type[Any], type[Any]] = {
    np.ndarray: _Dense,
    Ragged: _Ragged,
    Strings: _Strings,
    Masked: _Masked,
    Sparse: _Sparse,
    SparseCSR: _Sparse,
}


def _kind(form: Any, where: str) -> type[Any]:
    for kind in _NODES:
        if isinstance(form, kind):
            return kind
    raise TypeError(f"{where} must be a NumPy array or a fastpipe array such as Ragged; got {type(form).__name__}")


def _node(form: Any, where: str, parts: list[Part], batch_size: int) -> _Node:
    node: _Node = _NODES[_kind(form, where)](form, where, parts, batch_size)
    return node


def _array(array: Any, dtype: Any, where: str) -> np.ndarray:
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, dtype):
        raise TypeError(
            f"{where} must be an array of {dtype.__name__}; got {getattr(array, 'dtype', type(array).__name__)}"
        )
    return array


def _lengths(offsets: Any, rows: int, items: int, where: str) -> tuple[np.ndarray, int, int]:
    """Returns the lengths between offsets, int64 `[rows]`, the start of the first row and the end of the last one."""
    offsets = _array(offsets, np.integer, f"offsets of {where}").astype(np.int64, copy=False)
    if offsets.shape != (rows + 1,):
        raise ValueError(f"offsets of {where} must have length {rows + 1}; got shape {offsets.shape}")
    lengths, first, last = np.diff(offsets), int(offsets[0]), int(offsets[-1])
    if first < 0 or last > items or (lengths < 0).any():
        raise ValueError(f"offsets of {where} must ascend from 0 to at most {items}, the number of items")
    return lengths, first, last


def _cut(form: Any, first: int, last: int) -> Any:
    return form if first == 0 and last == len(form) else slice_rows(form, first, last)
