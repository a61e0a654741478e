"""The array types that represent features in a batch.

A feature with a fixed shape is a plain `numpy.ndarray`. All other features are instances of the small classes in this
module. A class only names a few arrays: it owns no data, checks nothing (Rust creates one for each column of each
batch) and caches nothing, so a write into an array is visible everywhere. Each form unpacks into its arrays, compares
by identity, and can be pickled.

Forms nest. `array<array<string>>` is `Ragged(Ragged(Strings, offsets), offsets)`. A nullable array of nullable items is
`Masked(Ragged(Masked(ndarray, valid), offsets), valid)`. A level describes only the rows of the level around it, so
every method in this module is a short recursion.

In batches of readers and in selections of their rows, offsets begin with 0 and end with the number of items.

All forms can be indexed by rows. Slices, masks (bool `[rows]`), integer arrays and lists return rows in the same form.
An integer returns one row, except of sparse forms. Slices with step 1 are views. Other selections are copies, as in
NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np

from fastpipe._arguments import within
from fastpipe.batch._dense import added, counts
from fastpipe.batch._form import (
    Form,
    blank,
    described,
    nest,
    row_index,
    slice_rows,
    spans,
    take_rows,
    to_list,
    with_rows,
)

__all__ = ["Batch", "Masked", "Padded", "Ragged", "Sparse", "SparseCSR", "Strings"]

Batch: TypeAlias = dict[str, Any]
"""A batch: features by name, in the order of the reader's `features`. Each is an ndarray `[rows, ...]` or a form."""

Node: TypeAlias = "np.ndarray | Ragged | Strings | Masked | Sparse | SparseCSR"
Side: TypeAlias = Literal["left", "right"]

_INT32 = 2**31 - 1


class Padded(NamedTuple):
    """Rows of one length, made by `Ragged.to_padded`. Its arrays are copies.

    Attributes:
        values: Items and padding, ndarray `[rows, width, ...]`, with a width for each ragged level; for text `Strings`
            of that shape.
        mask: True for an item, False for padding and nulls, bool `[rows, width]` with a width for each ragged level.
            If entries of items with a fixed shape can be null, it also has the dimensions of that shape.
        lengths: Number of items in each row of the outermost level, without padding and with nulls, int64 `[rows]`.

    Example:
        >>> import numpy as np
        >>> import fastpipe
        >>> ragged = fastpipe.Ragged(np.array([1, 2, 3]), np.array([0, 2, 2, 3]))
        >>> padded = ragged.to_padded(multiple_of=4)
        >>> padded
        Padded(values=int64[3, 4], mask=bool[3, 4], lengths=int64[3])
        >>> padded.mask.astype("int64")
        array([[1, 1, 0, 0],
               [0, 0, 0, 0],
               [1, 0, 0, 0]])
    """

    values: Any
    mask: np.ndarray
    lengths: np.ndarray

    def __repr__(self) -> str:
        return described(self)


class Ragged(Form):
    """Rows that differ in length: row `i` is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: Concatenated items of all rows: an ndarray `[items, ...]`, or another form with that many rows.
        offsets: Start and end of each row, int64 `[rows + 1]`.

    Example:
        >>> import numpy as np
        >>> import fastpipe
        >>> ragged = fastpipe.Ragged(np.array([1, 2, 3]), np.array([0, 2, 2, 3]))
        >>> ragged.to_list(), ragged[0], len(ragged)
        ([[1, 2], [], [3]], array([1, 2]), 3)
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
        """Start and end of each row."""
        return self._offsets

    @property
    def lengths(self) -> np.ndarray:
        """Number of items in each row, int64 `[rows]` (a new array)."""
        return np.diff(self._offsets)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._offsets) - 1

    def row(self, index: int) -> Any:
        """Returns the items of one row as a view: an ndarray, or a form if they are ragged, strings or masked.

        Args:
            index: Index of the row. Negative indices count from the end.

        Raises:
            IndexError: If the index is out of range.
            TypeError: If the index isn't an integer.
        """
        return self._row(row_index(index, len(self)))

    def _row(self, index: int) -> Any:
        return slice_rows(self._values, int(self._offsets[index]), int(self._offsets[index + 1]))

    def to_list(self) -> list[Any]:
        """Returns a nested list for each row, with None for null items."""
        items = to_list(self._values)
        return [items[start:stop] for start, stop in pairwise(self._offsets.tolist())]

    def to_padded(
        self,
        length: int | Sequence[int | None] | None = None,
        *,
        pad: Any = 0,
        multiple_of: int | Sequence[int | None] | None = None,
        side: Side = "right",
        truncate: Side | None = None,
    ) -> Padded:
        """Returns the rows as an array `[rows, width, ...]` and the mask of their items (copies).

        `DenseSpec((length,), dtype, pad=0)` reads numbers in this form without a copy, and truncates them. This method
        also pads text, and indices of a `VocabularySpec`, `HashSpec` or `BucketSpec`.

        Args:
            length: Maximum number of items of each row, 0 to 2^63 - 1, and the width of the array. None is the length
                of the longest row. For rows within rows, a sequence with an entry for each level, outermost first.
                Defaults to None.
            pad: Value of padding and of null items: for text a str, for bytes a bytes. Defaults to 0.
            multiple_of: Number to a multiple of which the width is rounded up, 1 to 2^63 - 1, or None. Rows are not
                longer than `length` even so. For rows within rows, a sequence with an entry for each level. Defaults to
                None.
            side: Side of the padding: `"right"`, after the items, or `"left"`, before them. Defaults to `"right"`.
            truncate: Side on which rows longer than `length` are cut off: `"right"` keeps their first items, `"left"`
                their last ones. None raises an error. Defaults to None.

        Raises:
            MemoryError: If the machine has too little memory for the array.
            TypeError: If the items are sparse, or if an argument has the wrong type.
            ValueError: If a row is longer than `length`, and `truncate` is None; if an argument is out of range; or if
                there is not one length for each level.

        Example:
            >>> import numpy as np
            >>> import fastpipe
            >>> ragged = fastpipe.Ragged(np.array([1, 2, 3]), np.array([0, 2, 2, 3]))
            >>> ragged.to_padded(pad=-1).values
            array([[ 1,  2],
                   [-1, -1],
                   [ 3, -1]])
            >>> values, mask, lengths = ragged.to_padded(1, truncate="left")
            >>> values.tolist(), mask.tolist(), lengths.tolist()
            ([[2], [0], [3]], [[True], [False], [True]], [1, 0, 1])
        """
        from fastpipe.batch._padding import Padding, to_padded

        return to_padded(self, length, multiple_of, Padding(pad, side, truncate))

    def truncated(self, length: int, side: Side = "right") -> Ragged:
        """Returns the rows with at most `length` items each (a copy). Of rows within rows, the outermost are truncated.

        Args:
            length: Maximum number of items, 0 to 2^63 - 1.
            side: Side on which longer rows are cut off: `"right"` keeps their first items, `"left"` their last ones.
                Defaults to `"right"`.

        Raises:
            TypeError: If the length isn't an integer, or if the items are sparse.
            ValueError: If an argument is out of range.

        Example:
            >>> import numpy as np
            >>> import fastpipe
            >>> ragged = fastpipe.Ragged(np.array([1, 2, 3]), np.array([0, 2, 2, 3]))
            >>> ragged.truncated(1, side="left").to_list()
            [[2], [], [3]]
        """
        from fastpipe.batch._padding import truncated

        return truncated(self, length, side)

    def cu_seqlens(self) -> np.ndarray:
        """Returns the offsets as int32 `[rows + 1]`, starting with 0 (a copy), as FlashAttention's kernels take them.

        With `values`, they are the arguments of `flash_attn_varlen_func`. Its `max_seqlen` is
        `int(rows.lengths.max(initial=0))`.

        Raises:
            ValueError: If there are more than 2^31 - 1 items.

        Example:
            >>> import numpy as np
            >>> import fastpipe
            >>> ragged = fastpipe.Ragged(np.array([7, 8, 9]), np.array([0, 2, 2, 3]))
            >>> ragged.cu_seqlens(), ragged.positions()
            (array([0, 2, 2, 3], dtype=int32), array([0, 1, 0]))
        """
        offsets: np.ndarray = self._offsets - self._offsets[0]
        if offsets[-1] > _INT32:
            raise ValueError(f"{offsets[-1]} items are too many for int32: use a smaller batch, or offsets")
        return offsets.astype(np.int32)

    def positions(self) -> np.ndarray:
        """Returns the index of each item in its row, int64 `[items]` (a new array): position ids for packed rows."""
        lengths = self.lengths
        starts = np.repeat(self._offsets[:-1] - self._offsets[0], lengths)
        found: np.ndarray = np.arange(len(starts), dtype=np.int64) - starts
        return found

    def to_counts(self, size: int, dtype: Any = "float32") -> np.ndarray:
        """Returns how often each row has each index, as an array `[rows, size]`: a bag of words.

        `to_counts(size) > 0` is the multi-hot encoding. Null items don't count.

        Args:
            size: Number of indices, 0 to 2^63 - 1: the `size` of a `VocabularySpec`, `HashSpec` or `BucketSpec`. The
                array has `rows * size` elements.
            dtype: Dtype of the counts. Defaults to "float32".

        Raises:
            TypeError: If the items aren't integers.
            ValueError: If an index is out of range.

        Example:
            >>> import numpy as np
            >>> import fastpipe
            >>> ragged = fastpipe.Ragged(np.array([1, 1, 2]), np.array([0, 2, 2, 3]))
            >>> ragged.to_counts(3, dtype="int8")
            array([[0, 2, 0],
                   [0, 0, 0],
                   [0, 0, 1]], dtype=int8)
        """
        size = within("size", size, 0, 2**63 - 1)
        items, offsets = self._values, self._offsets
        if isinstance(items, Masked) and items.valid.ndim == 1:
            before = np.concatenate([[0], np.cumsum(items.valid)])
            items, offsets = items.values[items.valid], before[offsets]
        if not isinstance(items, np.ndarray) or items.ndim > 1 or items.dtype.kind not in "iu":
            raise TypeError("only rows of indices can be counted: the items must be integers, in one level of rows")
        return counts(items, offsets, size, dtype)

    def _slice(self, start: int, stop: int) -> Ragged:
        offsets = self._offsets[start : stop + 1]
        first = int(offsets[0])
        return Ragged(slice_rows(self._values, first, int(offsets[-1])), offsets - first)

    def _take(self, rows: np.ndarray) -> Ragged:
        items, offsets = spans(self._offsets, rows)
        return Ragged(take_rows(self._values, items), offsets)


class Strings(Form):
    """Strings or byte strings in one buffer, as in Arrow.

    Entry `i`, in C order of `shape`, is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: Bytes of all entries, uint8 `[bytes]`. UTF-8 unless `binary`.
        offsets: Start and end of each entry, int64 `[prod(shape) + 1]`.
        shape: Shape of the array of entries. The first dimension is the number of rows.
        binary: False for strings, True for bytes.

    Example:
        >>> import fastpipe
        >>> features = {"country": fastpipe.DenseSpec((), "string", fill="")}
        >>> batch = next(iter(fastpipe.read_avro("data/*.avro", features=features, batch_size=4)))
        >>> batch["country"].to_list()
        ['', 'PE', 'JP', 'NL']
    """

    __slots__ = ("_binary", "_offsets", "_shape", "_values")
    _parts = ("values", "offsets")

    def __init__(self, values: np.ndarray, offsets: np.ndarray, shape: tuple[int, ...], binary: bool) -> None:
        self._values = values
        self._offsets = offsets
        self._shape = shape
        self._binary = binary

    @property
    def values(self) -> np.ndarray:
        """The bytes of all entries."""
        return self._values

    @property
    def offsets(self) -> np.ndarray:
        """Start and end of each entry."""
        return self._offsets

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of entries."""
        return self._shape

    @property
    def binary(self) -> bool:
        """Whether the entries are bytes."""
        return self._binary

    @property
    def lengths(self) -> np.ndarray:
        """Number of bytes in each entry, int64 with shape `shape` (a new array)."""
        return np.diff(self._offsets).reshape(self._shape)

    def __len__(self) -> int:
        """Returns the number of rows, which is the first dimension of `shape`."""
        return self._shape[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Strings, (self._values, self._offsets, self._shape, self._binary)

    def _described(self, levels: int) -> str:
        parts = super()._described(levels)
        return f"{parts[:-1]}, shape={self._shape}, binary={self._binary})" if levels else parts

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:  # type: ignore[override]
        if copy is False:
            raise ValueError("Strings can't be converted to a NumPy array without a copy")
        entries = self.to_numpy()
        return entries if dtype is None else entries.astype(dtype)

    def row(self, index: int) -> Any:
        """Returns one row: a str (bytes if `binary`), or a view of shape `shape[1:]` if there are more dimensions.

        Args:
            index: Index of the row. Negative indices count from the end.

        Raises:
            IndexError: If the index is out of range.
            TypeError: If the index isn't an integer.
        """
        return self._row(row_index(index, len(self)))

    def _row(self, index: int) -> Any:
        row = self._slice(index, index + 1)
        if len(self._shape) == 1:
            return row._entries()[0]
        return Strings(row._values, row._offsets, self._shape[1:], self._binary)

    def to_list(self) -> list[Any]:
        """Returns nested lists of str (bytes if `binary`) with shape `shape`."""
        return nest(self._entries(), self._shape)

    def to_numpy(self) -> np.ndarray:
        """Returns an object array of str (bytes if `binary`) with shape `shape`.

        Raises:
            UnicodeDecodeError: If a string isn't valid UTF-8.
        """
        entries = self._entries()
        out = np.empty(len(entries), dtype=object)
        out[:] = entries
        return out.reshape(self._shape)

    def to_stringdtype(self) -> np.ndarray:
        """Returns an array of `numpy.dtypes.StringDType` with shape `shape`.

        Raises:
            TypeError: If `binary`, because NumPy has no such dtype for bytes.
            ImportError: If NumPy is older than 2.0.
        """
        if self._binary:
            raise TypeError("NumPy's StringDType holds text, not bytes: use to_numpy()")
        dtype = getattr(getattr(np, "dtypes", None), "StringDType", None)
        if dtype is None:
            raise ImportError(f"StringDType requires NumPy 2.0, and this is NumPy {np.__version__}: use to_numpy()")
        return np.array(self._entries(), dtype=dtype()).reshape(self._shape)

    def _slice(self, start: int, stop: int) -> Strings:
        entries = math.prod(self._shape[1:])
        offsets = self._offsets[start * entries : stop * entries + 1]
        first = int(offsets[0])
        values = self._values[first : int(offsets[-1])]
        return Strings(values, offsets - first, (stop - start, *self._shape[1:]), self._binary)

    def _take(self, rows: np.ndarray) -> Strings:
        entries = math.prod(self._shape[1:])
        chosen = (rows[:, np.newaxis] * entries + np.arange(entries)).reshape(-1)
        places, offsets = spans(self._offsets, chosen)
        return Strings(self._values[places], offsets, (len(rows), *self._shape[1:]), self._binary)

    def _entries(self) -> list[Any]:
        data = self._values.tobytes()
        spans = pairwise(self._offsets.tolist())
        if self._binary:
            return [data[start:stop] for start, stop in spans]
        if data.isascii():  # Decoding ASCII once and slicing the text is nearly twice as fast.
            text = data.decode("ascii")
            return [text[start:stop] for start, stop in spans]
        return [data[start:stop].decode("utf-8") for start, stop in spans]


class Masked(Form):
    """Values with a mask of nulls.

    Attributes:
        values: An ndarray or another form. Entries for which `valid` is False are zeros or empty, and must be ignored.
        valid: Bool array, True for values that are present. Its shape is a prefix of the shape of `values`, so it marks
            null rows (`[n]`) or null entries within rows (`[n, ...]`).

    Example:
        >>> import numpy as np
        >>> import fastpipe
        >>> masked = fastpipe.Masked(np.array([1.5, 0.0]), np.array([True, False]))
        >>> masked.to_list()
        [1.5, None]
    """

    __slots__ = ("_valid", "_values")
    _parts = ("values", "valid")

    def __init__(self, values: Node, valid: np.ndarray) -> None:
        self._values = values
        self._valid = valid

    @property
    def values(self) -> Any:
        """The values: an ndarray or another form."""
        return self._values

    @property
    def valid(self) -> np.ndarray:
        """True for values that are present."""
        return self._valid

    def __len__(self) -> int:
        """Returns the number of rows, including null rows."""
        return len(self._valid)

    def row(self, index: int) -> Any:
        """Returns one row: None if it is null, else the row of `values`. If entries can be null, returns a `Masked`.

        Args:
            index: Index of the row. Negative indices count from the end.

        Raises:
            IndexError: If the index is out of range.
            TypeError: If the index isn't an integer, or if the values are sparse.
        """
        return self._row(row_index(index, len(self)))

    def _row(self, index: int) -> Any:
        if self._valid.ndim > 1:
            return Masked(self._values[index], self._valid[index])
        return self._values[index] if self._valid[index] else None

    def to_list(self) -> list[Any]:
        """Returns the values as nested Python lists, with None for nulls."""
        return blank(to_list(self._values), self._valid)

    def fill(self, value: Any) -> Any:
        """Returns the values, with `value` in place of nulls (a copy): an ndarray, `Strings` or `Ragged`.

        A spec with `fill=` replaces nulls while they are read, without a copy.

        Args:
            value: Value that fits the dtype. For `Strings`, a str, or bytes if they are `binary`. For `Ragged`, a list
                of the items of a row, such as `[]`.

        Raises:
            TypeError: If the value has the wrong type, or if the values are sparse.
            ValueError: If the value doesn't fit the dtype.

        Example:
            >>> import numpy as np
            >>> import fastpipe
            >>> masked = fastpipe.Masked(np.array([1.5, 0.0]), np.array([True, False]))
            >>> masked.fill(-1)
            array([ 1.5, -1. ])
        """
        from fastpipe.batch._padding import filled

        return filled(self, value)

    def _slice(self, start: int, stop: int) -> Masked:
        return Masked(slice_rows(self._values, start, stop), self._valid[start:stop])

    def _take(self, rows: np.ndarray) -> Masked:
        return Masked(take_rows(self._values, rows), self._valid[rows])


class _SparseForm(Form):
    """Base class of both layouts of sparse rows."""

    __slots__ = ("_dense_shape", "_indices", "_values")
    _indices: np.ndarray
    _values: Any
    _dense_shape: np.ndarray

    @property
    def indices(self) -> np.ndarray:
        """Index of each entry in each dimension. In COO, the row of the entry comes first."""
        return self._indices

    @property
    def values(self) -> Any:
        """The values of the entries."""
        return self._values

    @property
    def dense_shape(self) -> np.ndarray:
        """Number of rows, followed by the size of each dimension."""
        return self._dense_shape

    def __len__(self) -> int:
        """Returns the number of rows, which is the first entry of `dense_shape`."""
        return int(self._dense_shape[0])

    def to_dense(self) -> np.ndarray:
        """Returns an array of `dense_shape` (a copy), with zeros where no entry is. Entries at equal indices are added.

        Raises:
            TypeError: If the values aren't numbers.
            ValueError: If an index is out of range.

        Example:
            >>> import numpy as np
            >>> import fastpipe
            >>> indices, values = np.array([[0, 3], [1, 2], [1, 2]]), np.array([0.5, 1.0, 1.0])
            >>> fastpipe.Sparse(indices, values, np.array([2, 4])).to_dense()
            array([[0. , 0. , 0. , 0.5],
                   [0. , 0. , 2. , 0. ]])
        """
        if not isinstance(self._values, np.ndarray) or self._values.dtype.kind not in "biuf":
            raise TypeError("only sparse rows of numbers have a dense form: use to_list()")
        return added(self._dense_shape.tolist(), self._coordinates(), self._values)

    def _coordinates(self) -> list[np.ndarray]:
        """Returns the row and the index in each dimension of each entry."""
        raise NotImplementedError

    def _row(self, index: int) -> NoReturn:
        raise TypeError(
            f"a sparse array can't return a single row: use [{index}:{index + 1}] for an array of one row, or to_list()"
        )


class Sparse(_SparseForm):
    """Sparse rows as coordinates (COO), sorted by row.

    Attributes:
        indices: Row in the batch, followed by the index in each dimension, int64 `[nnz, rank + 1]`.
        values: Values of the entries, ndarray or Strings `[nnz]`.
        dense_shape: Number of rows in the batch, followed by the size of each dimension, int64 `[rank + 1]`.

    Example:
        >>> import numpy as np
        >>> import fastpipe
        >>> indices, values = np.array([[0, 3], [1, 2]]), np.array([0.5, 1.5])
        >>> sparse = fastpipe.Sparse(indices, values, np.array([2, 4]))
        >>> len(sparse), sparse.dense_shape
        (2, array([2, 4]))
    """

    __slots__ = ()
    _parts = ("indices", "values", "dense_shape")

    def __init__(self, indices: np.ndarray, values: Node, dense_shape: np.ndarray) -> None:
        self._indices = indices
        self._values = values
        self._dense_shape = dense_shape

    def _coordinates(self) -> list[np.ndarray]:
        return list(self._indices.T)

    def _slice(self, start: int, stop: int) -> Sparse:
        return self._take(np.arange(start, stop))

    def _take(self, rows: np.ndarray) -> Sparse:
        # Entries are sorted by row.
        offsets = np.searchsorted(self._indices[:, 0], np.arange(len(self) + 1))
        entries, starts = spans(offsets, rows)
        indices = self._indices[entries]
        indices[:, 0] = np.repeat(np.arange(len(rows)), np.diff(starts))
        return Sparse(indices, take_rows(self._values, entries), with_rows(self._dense_shape, len(rows)))

    def to_list(self) -> list[Any]:
        """Returns, for each row, the list of its (index tuple, value) pairs."""
        rows: list[list[Any]] = [[] for _ in range(len(self))]
        for (row, *index), value in zip(self._indices.tolist(), to_list(self._values), strict=True):
            rows[row].append((tuple(index), value))
        return rows


class SparseCSR(_SparseForm):
    """Sparse rows in compressed layout (CSR): row `i` has the entries `offsets[i]` to `offsets[i + 1] - 1`.

    Attributes:
        offsets: Start and end of each row's entries, int64 `[rows + 1]`.
        indices: Index of each entry, int64 `[nnz]` for one dimension, else `[nnz, rank]`.
        values: Values of the entries, ndarray or Strings `[nnz]`.
        dense_shape: Number of rows in the batch, followed by the size of each dimension, int64 `[rank + 1]`.

    Example:
        >>> import numpy as np
        >>> import fastpipe
        >>> offsets, indices, values = np.array([0, 1, 2]), np.array([3, 2]), np.array([0.5, 1.5])
        >>> sparse = fastpipe.batch.SparseCSR(offsets, indices, values, np.array([2, 4]))
        >>> len(sparse), sparse.indices
        (2, array([3, 2]))
    """

    __slots__ = ("_offsets",)
    _parts = ("offsets", "indices", "values", "dense_shape")

    def __init__(self, offsets: np.ndarray, indices: np.ndarray, values: Node, dense_shape: np.ndarray) -> None:
        self._offsets = offsets
        self._indices = indices
        self._values = values
        self._dense_shape = dense_shape

    @property
    def offsets(self) -> np.ndarray:
        """Start and end of each row's entries."""
        return self._offsets

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._offsets) - 1

    def _coordinates(self) -> list[np.ndarray]:
        rows = np.repeat(np.arange(len(self)), np.diff(self._offsets))
        return [rows, *(self._indices.T if self._indices.ndim > 1 else [self._indices])]

    def _slice(self, start: int, stop: int) -> SparseCSR:
        offsets = self._offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        values = slice_rows(self._values, first, last)
        return SparseCSR(offsets - first, self._indices[first:last], values, with_rows(self._dense_shape, stop - start))

    def _take(self, rows: np.ndarray) -> SparseCSR:
        entries, offsets = spans(self._offsets, rows)
        values = take_rows(self._values, entries)
        return SparseCSR(offsets, self._indices[entries], values, with_rows(self._dense_shape, len(rows)))

    def to_list(self) -> list[Any]:
        """Returns, for each row, the list of its (index tuple, value) pairs."""
        indices = self._indices if self._indices.ndim > 1 else self._indices[:, np.newaxis]
        entries = list(zip(map(tuple, indices.tolist()), to_list(self._values), strict=True))
        return [entries[start:stop] for start, stop in pairwise(self._offsets.tolist())]
