"""Datasets whose rows are groups of another dataset's rows, by the lengths of the rows.

The Rust module `packing` says how rows are grouped. The groups are the same in each epoch, and orders, ranks and states
apply to groups as they do to rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown
from fastpipe._locations import Location
from fastpipe._reader.dataset import BaseDataset, Dataset
from fastpipe._reader.indexed_rows import indexed
from fastpipe._reader.ordering import Ordering, digest
from fastpipe._reader.packs import without_masks
from fastpipe._reader.sequential_reads import columns_of
from fastpipe._reader.state import VERSION
from fastpipe._text import plural
from fastpipe.batch import Masked, Ragged
from fastpipe.errors import NullValueError, SchemaError, memory_errors
from fastpipe.specs import RaggedSpec

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader

OnLong: TypeAlias = Literal["error", "truncate", "split"]

Lengths: TypeAlias = npt.NDArray[np.uint32]


class Grouping(NamedTuple):
    """How rows are grouped.

    Attributes:
        columns: Names of the features whose items count. In each row, all of them have equally many.
        length: Maximum number of items in a group. If `most_rows` is set, this includes padding to the longest row.
        window: Number of rows among which groups are formed.
        on_long: How to handle rows with more items.
        most_rows: Maximum number of rows in a group of rows with similar lengths. None for packs.
    """

    columns: tuple[str, ...]
    length: int
    window: int
    on_long: OnLong
    most_rows: int | None = None

    def __str__(self) -> str:
        if self.most_rows is None:
            return f"{', '.join(self.columns)} in rows of {self.length}"
        return f"rows of similar lengths of {self.columns[0]}"


class GroupedDataset(BaseDataset):
    """Groups of a dataset's rows as rows.

    Args:
        whole: The dataset, with whole units.
        lengths: Number of items of each row, in the sequence of the units, uint32 `[rows]`.
        grouping: How rows are grouped.
    """

    def __init__(self, whole: Dataset, lengths: Lengths, grouping: Grouping) -> None:
        self.whole, self._lengths, self.grouping = whole, lengths, grouping
        split = grouping.on_long == "split"
        self.handle = whole.handle.grouped(
            lengths, grouping.length, grouping.window, split=split, most_rows=grouping.most_rows
        )
        self.features, self.files, self.words = whole.features, whole.files, whole.words
        self.categories, self.interpretation = whole.categories, whole.interpretation
        self.column_times = whole.column_times
        self._own_digest: str | None = None

    @property
    def stage(self) -> tuple[str, str]:
        """The name and description of the stage in a plan."""
        rows, groups = plural(self.whole.handle.num_rows, "row"), self.handle.num_rows
        if self.grouping.most_rows is not None:
            return "bucket", f"{self.grouping}: {groups:,} batches of {rows}"
        lengths = self._lengths
        if self.grouping.on_long != "split":
            lengths = np.minimum(lengths, self.grouping.length)
        filled = float(lengths.sum(dtype=np.int64)) / max(groups * self.grouping.length, 1)
        return "pack", f"{self.grouping}: {groups:,} packs of {rows}, {filled:.2%} filled"

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the fingerprint of the rows with the number of groups and a separate digest."""
        whole = self.whole.fingerprint(version)
        if self._own_digest is None:
            self._own_digest = digest(repr(tuple(self.grouping)).encode(), self._lengths.data)
        named = f"{whole['digest']} groups {self._own_digest}"
        return whole | {"rows": self.handle.num_rows, "digest": digest(named.encode())}

    @property
    def holds_units(self) -> bool:
        """Whether an order keeps the units of its window in memory, as that of the rows does."""
        return self.whole.holds_units

    def default_window(self, batch_size: int) -> int:
        """Returns the default of the rows if they have their own, or else the default for units of groups."""
        whole = self.whole.default_window(batch_size)
        if whole is None:
            return self.handle.default_buffer(batch_size)
        return max(min(whole, self.handle.num_rows), batch_size)

    def unsliced(self) -> Self:
        """Returns the dataset itself."""
        return self

    def place(self, unit: int, record: int) -> Location:
        """Returns where a row of a group comes from."""
        return self.whole.place(unit, record)

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupedDataset, (self.whole, self._lengths, self.grouping)

    def __str__(self) -> str:
        return f"{self.grouping} of {self.whole}"


def grouped(reader: Reader, grouping: Grouping) -> tuple[GroupedDataset, Ordering]:
    """Returns the groups of a reader's rows, and the order of the groups. Reads the columns once.

    Raises:
        SchemaError: If a feature doesn't exist or isn't one ragged array per row, or if features have different
            lengths in a row.
        ValueError: If a row is too long.
    """
    for column in grouping.columns:
        _check(reader, column, grouping)
    # Only packs check the items.
    what = "lengths", list(grouping.columns), grouping.most_rows is None
    shape = reader._data.handle.num_rows, np.uint32
    lengths, _ = indexed(reader, grouping.columns, what, shape, lambda: _lengths(reader, grouping))
    if (
        grouping.most_rows is None
        and grouping.on_long == "error"
        and (long := np.flatnonzero(lengths > grouping.length)).size
    ):
        others = f", as do {long.size - 1:,} other rows" if long.size > 1 else ""
        raise ValueError(
            f"row {_named(reader, long[0])} has {lengths[long[0]]:,} items of {grouping.columns[0]!r}, more than"
            f' length={grouping.length}{others}: pass on_long="split" to divide long rows, on_long="truncate" to cut'
            " off their ends, or leave them out before"
        )
    with memory_errors("group rows"):
        data = GroupedDataset(reader._data.unsliced(), lengths, grouping)
    ordering, rows = reader._ordering, max(len(lengths), 1)
    if ordering.shuffle_buffer is not None and ordering.shuffle != "sequential":
        groups = -(-ordering.shuffle_buffer * data.handle.num_rows // rows)
        ordering = ordering.with_buffer(max(groups, 1))
    return data, ordering


def _check(reader: Reader, column: str, grouping: Grouping) -> None:
    if not isinstance(column, str):
        raise TypeError(f"a column must be the name of a feature; got {shown(column)}")
    if column not in reader.features:
        known = ", ".join(map(repr, reader.features))
        raise SchemaError(f"{column!r} is not a feature: the reader has {known}", feature=column)
    spec = reader.features[column]
    if grouping.most_rows is not None:
        if not isinstance(spec, RaggedSpec):
            raise SchemaError(f"feature {column!r} is {spec}: its rows have no lengths to compare", feature=column)
    elif not isinstance(spec, RaggedSpec) or len(spec.shape) != 1 or spec.dtype in _TEXT:
        raise SchemaError(
            f"feature {column!r} is {spec}: only numbers of one ragged dimension can be packed, such as"
            ' RaggedSpec((None,), "int32")',
            feature=column,
        )


_TEXT = ("string", "bytes")


def _lengths(reader: Reader, grouping: Grouping) -> Lengths:
    """Returns the number of items of each row, in the sequence of the units."""
    found: Lengths = np.empty(reader._data.handle.num_rows, np.uint32)
    at = 0
    with columns_of(reader, grouping.columns) as rows, memory_errors("read the lengths of rows"):
        for lengths in _batch_lengths(reader, rows, grouping):
            found[at : at + len(lengths)] = lengths
            at += len(lengths)
    if at != len(found):
        raise RuntimeError("internal error: a pass has another number of rows than its dataset; please report this")
    sequence = reader._data.handle.rows_in_sequence
    if sequence is not None:
        # The pass had the sequence of rows that were taken by index.
        in_sequence, found = found, np.empty_like(found)
        found[sequence] = in_sequence
    return found


def _batch_lengths(reader: Reader, rows: Reader, grouping: Grouping) -> Iterator[npt.NDArray[np.int64]]:
    columns, before = grouping.columns, 0
    for batch in rows:
        for column in columns:
            if grouping.most_rows is None and (row := _row_with_null(batch[column])) is not None:
                raise NullValueError(
                    f"row {_named(reader, before + row)} has a null item in {column!r}, which can't be packed: replace"
                    " nulls with fill= in the feature's spec",
                    feature=column,
                )
        values = [without_masks(batch[column]) for column in columns]
        lengths = values[0].lengths
        for column, other in zip(columns, values, strict=True):
            if (differ := np.flatnonzero(other.lengths != lengths)).size:
                row = differ[0]
                raise SchemaError(
                    f"row {_named(reader, before + row)} has {lengths[row]:,} items of {columns[0]!r} and"
                    f" {other.lengths[row]:,} of {column!r}: columns that are packed together need equally many",
                    feature=column,
                )
        if (long := np.flatnonzero(lengths >= 2**32)).size:
            raise ValueError(f"row {_named(reader, before + long[0])} has {lengths[long[0]]:,} items, 2^32 or more")
        before += len(lengths)
        yield lengths


def _row_with_null(rows: Ragged | Masked) -> int | None:
    """Returns the first row with a null item."""
    plain: Ragged = rows.values if isinstance(rows, Masked) else rows
    if not isinstance(plain.values, Masked) or plain.values.valid.all():
        return None
    item = int(plain.values.valid.argmin())
    return int(np.searchsorted(plain.offsets, item, side="right")) - 1


def _named(reader: Reader, row: int) -> str:
    """Returns the index of a row in a pass without shuffling, and its file."""
    handle = reader._data.handle
    sequence = handle.rows_in_sequence
    at = int(row if sequence is None else sequence[row])
    ends = np.cumsum(handle.unit_rows(), dtype=np.int64)
    unit = int(np.searchsorted(ends, at, side="right"))
    place = reader._data.place(unit, at - int(ends[unit - 1] if unit else 0))
    return f"{row:,}" if place.file is None else f"{row:,} ({place})"
