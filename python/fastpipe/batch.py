"""The forms that a feature takes in a batch.

A fixed shape is a plain `numpy.ndarray`. Everything else is one of the small classes here, which name a few arrays and
do nothing else: they own no data, check nothing (Rust builds one for each column of each batch) and cache nothing, so
whoever writes into an array sees the change everywhere. Each unpacks into its arrays, compares by identity, and can be
pickled.

The forms nest. `array<array<string>>` is `Ragged(Ragged(Strings, offsets), offsets)`; an array that may be null, of
items that may be null, is `Masked(Ragged(Masked(ndarray, valid), offsets), valid)`. A level says something about the
rows that the level around it holds and about nothing else, so every method here is a short recursion.

Offsets begin with 0 and end with the number of items, in whatever comes out of a reader and in the views taken by `row`
and by slices.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

__all__ = ["Masked", "Ragged", "Sparse", "SparseCSR", "Strings"]

Node: TypeAlias = "np.ndarray | Ragged | Masked | Sparse | SparseCSR"


class _Form:
    """What the forms share. A subclass lists its parts, in the order of its constructor, in `_parts`."""

    # Weak references let a test, or a cache, see when a batch's memory goes back to the pool.
    __slots__ = ("__weakref__",)
    _parts: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self._parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={_describe(getattr(self, name))}' for name in self._parts)})"

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        # Without this, NumPy takes the form for a sequence and makes an array of its parts.
        raise TypeError(
            f"a {type(self).__name__} has no single NumPy array: use its parts ({', '.join(self._parts)}) or to_list()"
        )

    def to_list(self) -> list[Any]:
        """Nested Python lists, one entry a row."""
        raise NotImplementedError


class Ragged(_Form):
    """Rows of differing length: row `i` is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: the items of all rows, one after the other: an ndarray `[items, ...]`, or another form with as many
            rows.
        offsets: int64 `[rows + 1]`.
    """

    __slots__ = ("_offsets", "_values")
    _parts = ("values", "offsets")

    def __init__(self, values: Node, offsets: np.ndarray) -> None:
        self._values: Any = values
        self._offsets = offsets

    @property
    def values(self) -> Any:
        """The items of all rows."""
        return self._values

    @property
    def offsets(self) -> np.ndarray:
        """Where each row begins and ends."""
        return self._offsets

    @property
    def lengths(self) -> np.ndarray:
        """The number of items in each row, int64 `[rows]` (a new array)."""
        return np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, key: int | slice) -> Any:
        """`row(i)` for an int; for a slice of step 1, those rows in the same form. Items are never copied."""
        if not isinstance(key, slice):
            return self.row(key)
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError(f"rows can be sliced in steps of 1 only, not {step}")
        return self._slice(start, max(start, stop))

    def row(self, index: int) -> Any:
        """The items of one row, as a view: an ndarray, or another form if the items are ragged, strings or masked.

        Args:
            index: the row; negative ones count from the end.

        Raises:
            IndexError: if there is no such row.
        """
        index = _row_index(index, len(self))
        return _slice(self._values, int(self._offsets[index]), int(self._offsets[index + 1]))

    def to_list(self) -> list[Any]:
        """Nested Python lists, one a row; None where an item is null."""
        items = _to_list(self._values)
        return [items[start:stop] for start, stop in pairwise(self._offsets.tolist())]

    def to_arrow(self) -> pa.Array:
        """The rows as a `pyarrow.LargeListArray` over the same memory.

        Only bool items and null masks are copied, into bits.

        Raises:
            ImportError: if pyarrow isn't installed.
        """
        return _to_arrow(self)

    def _slice(self, start: int, stop: int) -> Ragged:
        offsets = self._offsets[start : stop + 1]
        first = int(offsets[0])
        return Ragged(_slice(self._values, first, int(offsets[-1])), offsets - first)


class Strings(Ragged):
    """Strings or byte strings in one buffer, as in Arrow.

    Entry `i`, in C order of `shape`, is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: uint8 `[bytes]`: the bytes of all entries; UTF-8 unless `binary`.
        offsets: int64 `[prod(shape) + 1]`.
        shape: the shape that the entries make; the first dimension is the rows.
        binary: False for strings, True for bytes.
    """

    __slots__ = ("_binary", "_shape")

    def __init__(self, values: np.ndarray, offsets: np.ndarray, shape: tuple[int, ...], binary: bool) -> None:
        self._values = values
        self._offsets = offsets
        self._shape = shape
        self._binary = binary

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the entries make."""
        return self._shape

    @property
    def binary(self) -> bool:
        """Whether the entries are bytes."""
        return self._binary

    @property
    def lengths(self) -> np.ndarray:
        """The number of bytes of each entry, int64 with `shape` (a new array)."""
        return np.diff(self._offsets).reshape(self._shape)

    def __len__(self) -> int:
        return self._shape[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Strings, (self._values, self._offsets, self._shape, self._binary)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, shape={self._shape}, binary={self._binary})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:  # type: ignore[override]
        if copy is False:
            raise ValueError("Strings can't become a NumPy array without a copy")
        entries = self.to_numpy()
        return entries if dtype is None else entries.astype(dtype)

    def row(self, index: int) -> Any:
        """One row: a str (bytes if `binary`), or a view of shape `shape[1:]` if there are more dimensions.

        Args:
            index: the row; negative ones count from the end.

        Raises:
            IndexError: if there is no such row.
        """
        index = _row_index(index, len(self))
        row = self._slice(index, index + 1)
        if len(self._shape) == 1:
            return row._entries()[0]
        return Strings(row._values, row._offsets, self._shape[1:], self._binary)

    def to_list(self) -> list[Any]:
        """Nested lists of str (bytes if `binary`), as `shape` says."""
        return _nest(self._entries(), self._shape)

    def to_numpy(self) -> np.ndarray:
        """An object array of str (bytes if `binary`) with `shape`.

        Raises:
            UnicodeDecodeError: if a string isn't UTF-8.
        """
        entries = self._entries()
        out = np.empty(len(entries), dtype=object)
        out[:] = entries
        return out.reshape(self._shape)

    def to_stringdtype(self) -> np.ndarray:
        """An array of `numpy.dtypes.StringDType` with `shape`.

        Raises:
            TypeError: if `binary`: NumPy has no such type for bytes.
            ImportError: if NumPy is older than 2.0.
        """
        if self._binary:
            raise TypeError("NumPy's StringDType holds text, not bytes: use to_numpy()")
        dtype = getattr(getattr(np, "dtypes", None), "StringDType", None)
        if dtype is None:
            raise ImportError(f"StringDType came with NumPy 2.0, and this is NumPy {np.__version__}: use to_numpy()")
        return np.array(self._entries(), dtype=dtype()).reshape(self._shape)

    def to_arrow(self) -> pa.Array:
        """A `pyarrow.LargeStringArray` (`LargeBinaryArray` if `binary`) over the same memory.

        Each dimension of `shape` after the first is a level of fixed-size lists around it.

        Raises:
            ImportError: if pyarrow isn't installed.
        """
        return _to_arrow(self)

    def _slice(self, start: int, stop: int) -> Strings:
        entries = math.prod(self._shape[1:])
        offsets = self._offsets[start * entries : stop * entries + 1]
        first = int(offsets[0])
        values = self._values[first : int(offsets[-1])]
        return Strings(values, offsets - first, (stop - start, *self._shape[1:]), self._binary)

    def _entries(self) -> list[Any]:
        data = self._values.tobytes()
        spans = pairwise(self._offsets.tolist())
        if self._binary:
            return [data[start:stop] for start, stop in spans]
        if data.isascii():  # Then bytes are characters: decoding once and slicing the text is nearly twice as fast.
            text = data.decode("ascii")
            return [text[start:stop] for start, stop in spans]
        return [data[start:stop].decode("utf-8") for start, stop in spans]


class Masked(_Form):
    """Rows of which some are null.

    Attributes:
        values: an ndarray or another form. Where `valid` is False it holds zeros or nothing, to be ignored.
        valid: bool, True where a value is present. Its shape is a prefix of the shape of `values`, so that it says
            which rows (`[n]`) or which entries within them (`[n, ...]`) are there.
    """

    __slots__ = ("_valid", "_values")
    _parts = ("values", "valid")

    def __init__(self, values: Node, valid: np.ndarray) -> None:
        self._values = values
        self._valid = valid

    @property
    def values(self) -> Any:
        """The values, of any form."""
        return self._values

    @property
    def valid(self) -> np.ndarray:
        """True where a value is present."""
        return self._valid

    def __len__(self) -> int:
        return len(self._valid)

    def to_list(self) -> list[Any]:
        """The values as nested Python lists, with None for whatever is null."""
        return _blank(_to_list(self._values), self._valid)

    def to_arrow(self) -> pa.Array:
        """The values as a pyarrow array over the same memory, with the mask as its null bitmap.

        Raises:
            ImportError: if pyarrow isn't installed.
            TypeError: if the values are sparse, for which Arrow has no array.
        """
        return _to_arrow(self)

    def _slice(self, start: int, stop: int) -> Masked:
        return Masked(_slice(self._values, start, stop), self._valid[start:stop])


class Sparse(_Form):
    """Sparse rows as coordinates (COO), in row order.

    Attributes:
        indices: int64 `[nnz, rank + 1]`: the row in the batch, then the index in each dimension.
        values: ndarray or Strings, `[nnz]`.
        dense_shape: int64 `[rank + 1]`: the rows in the batch, then the size of each dimension.
    """

    __slots__ = ("_dense_shape", "_indices", "_values")
    _parts = ("indices", "values", "dense_shape")

    def __init__(self, indices: np.ndarray, values: Node, dense_shape: np.ndarray) -> None:
        self._indices = indices
        self._values = values
        self._dense_shape = dense_shape

    @property
    def indices(self) -> np.ndarray:
        """Row and index of each entry."""
        return self._indices

    @property
    def values(self) -> Any:
        """The values of the entries."""
        return self._values

    @property
    def dense_shape(self) -> np.ndarray:
        """Rows, then the size of each dimension."""
        return self._dense_shape

    def __len__(self) -> int:
        return int(self._dense_shape[0])

    def to_list(self) -> list[Any]:
        """For each row the list of its (index tuple, value)."""
        rows: list[list[Any]] = [[] for _ in range(len(self))]
        for (row, *index), value in zip(self._indices.tolist(), _to_list(self._values), strict=True):
            rows[row].append((tuple(index), value))
        return rows


class SparseCSR(_Form):
    """Sparse rows as compressed rows (CSR): the entries of row `i` are those from `offsets[i]` to `offsets[i + 1]`.

    Attributes:
        offsets: int64 `[rows + 1]`.
        indices: int64 `[nnz]` for one dimension, else `[nnz, rank]`.
        values: ndarray or Strings, `[nnz]`.
        dense_shape: int64 `[rank + 1]`: the rows in the batch, then the size of each dimension.
    """

    __slots__ = ("_dense_shape", "_indices", "_offsets", "_values")
    _parts = ("offsets", "indices", "values", "dense_shape")

    def __init__(self, offsets: np.ndarray, indices: np.ndarray, values: Node, dense_shape: np.ndarray) -> None:
        self._offsets = offsets
        self._indices = indices
        self._values = values
        self._dense_shape = dense_shape

    @property
    def offsets(self) -> np.ndarray:
        """Where the entries of each row begin and end."""
        return self._offsets

    @property
    def indices(self) -> np.ndarray:
        """Index of each entry."""
        return self._indices

    @property
    def values(self) -> Any:
        """The values of the entries."""
        return self._values

    @property
    def dense_shape(self) -> np.ndarray:
        """Rows, then the size of each dimension."""
        return self._dense_shape

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def to_list(self) -> list[Any]:
        """For each row the list of its (index tuple, value)."""
        indices = self._indices if self._indices.ndim > 1 else self._indices[:, np.newaxis]
        entries = list(zip(map(tuple, indices.tolist()), _to_list(self._values), strict=True))
        return [entries[start:stop] for start, stop in pairwise(self._offsets.tolist())]


def _describe(part: Any) -> str:
    return f"{part.dtype}[{', '.join(map(str, part.shape))}]" if isinstance(part, np.ndarray) else repr(part)


def _row_index(index: int, rows: int) -> int:
    if not -rows <= index < rows:
        raise IndexError(f"row {index} of {rows}")
    return index + rows if index < 0 else index


def _slice(node: Any, start: int, stop: int) -> Any:
    return node[start:stop] if isinstance(node, np.ndarray) else node._slice(start, stop)


def _to_list(node: Any) -> list[Any]:
    rows: list[Any] = node.tolist() if isinstance(node, np.ndarray) else node.to_list()
    return rows


def _nest(entries: list[Any], shape: tuple[int, ...]) -> list[Any]:
    for depth in range(len(shape) - 1, 0, -1):
        size = shape[depth]
        entries = [entries[i * size : (i + 1) * size] for i in range(math.prod(shape[:depth]))]
    return entries


def _blank(rows: list[Any], valid: np.ndarray) -> list[Any]:
    if valid.ndim > 1:
        return [_blank(row, flags) for row, flags in zip(rows, valid, strict=True)]
    return [row if flag else None for row, flag in zip(rows, valid.tolist(), strict=True)]


def _to_arrow(node: Any) -> pa.Array:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError("to_arrow needs pyarrow: pip install 'fastpipe-data[arrow]'") from error

    # A mask of k dimensions belongs to the k-th level of nesting; two of the same depth (a nullable field of a nullable
    # record) are one in Arrow.
    masks: dict[int, np.ndarray] = {}
    while isinstance(node, Masked):
        depth = node.valid.ndim
        masks[depth] = node.valid & masks[depth] if depth in masks else node.valid
        node = node.values

    def bitmap(depth: int) -> pa.Buffer | None:
        return pa.py_buffer(np.packbits(masks[depth], bitorder="little")) if depth in masks else None

    if isinstance(node, Strings):
        shape = node.shape
        kind = pa.large_binary() if node.binary else pa.large_string()
        buffers = [bitmap(len(shape)), pa.py_buffer(node.offsets), pa.py_buffer(node.values)]
        array = pa.Array.from_buffers(kind, math.prod(shape), buffers)
    elif isinstance(node, Ragged):
        shape = (len(node),)
        items = _to_arrow(node.values)
        array = pa.Array.from_buffers(
            pa.large_list(items.type), len(node), [bitmap(1), pa.py_buffer(node.offsets)], children=[items]
        )
    elif isinstance(node, np.ndarray):
        shape = node.shape
        data = np.packbits(node, bitorder="little") if node.dtype == np.bool_ else np.ascontiguousarray(node)
        buffers = [bitmap(len(shape)), pa.py_buffer(data)]
        array = pa.Array.from_buffers(pa.from_numpy_dtype(node.dtype), node.size, buffers)
    else:
        raise TypeError(f"Arrow has no array for a {type(node).__name__}")

    for depth in range(len(shape) - 1, 0, -1):
        kind = pa.list_(array.type, shape[depth])
        array = pa.Array.from_buffers(kind, math.prod(shape[:depth]), [bitmap(depth)], children=[array])
    return array
