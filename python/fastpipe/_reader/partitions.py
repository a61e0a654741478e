"""Partitions: parts of a reader's dataset that can be read separately."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import within
from fastpipe._locations import Location
from fastpipe._reader.dataset import BaseDataset, Dataset, IndexEntries
from fastpipe._reader.left_out_steps import check_all_steps
from fastpipe._reader.ordering import Ordering, digest
from fastpipe._reader.state import VERSION
from fastpipe.errors import StateError, UnsupportedError

_MOST = 2**31


class Partition(NamedTuple):
    """A partition of a dataset: a range of consecutive units.

    A partition consists of a few numbers, so it can be pickled, put in a queue or passed to a task of another engine.
    JSON stores it as a list; `Partition(*values)` restores it.

    Attributes:
        number: Index of the partition, from 0.
        num_partitions: Number of partitions.
        start: Index of the first unit.
        stop: Index after the last unit.
        rows: Number of rows in the partition.
        digest: Digest of the whole dataset.
    """

    number: int
    num_partitions: int
    start: int
    stop: int
    rows: int
    digest: str


def split_dataset(data: Dataset, ordering: Ordering, num_partitions: int) -> list[Partition]:
    """Divides a dataset into partitions. See `Reader.partition`."""
    _check(ordering)
    count = within("num_partitions", num_partitions, 1, _MOST)
    found = data.unsliced().handle.partitions(count)
    digest = _digest(data)
    return [Partition(number, len(found), *range_, digest) for number, range_ in enumerate(found)]


def dataset_part(data: Dataset, ordering: Ordering, partition: Partition) -> Dataset:
    """Returns a partition as a dataset. See `Reader.read_partition`."""
    _check(ordering)
    if not isinstance(partition, Partition):
        raise TypeError(
            f"partition must be a fastpipe.typing.Partition; got {type(partition).__name__}."
            " From JSON: Partition(*values)"
        )
    if partition.digest != _digest(data):
        raise StateError(f"the partition does not belong to this reader: {data.words.other_digest}")
    found = _Part(data, partition)
    if found.handle.num_rows != partition.rows:
        raise StateError(
            f"the partition does not belong to this reader: it has {partition.rows} rows, and the same units of the"
            f" reader {found.handle.num_rows}"
        )
    return found


def _check(ordering: Ordering) -> None:
    if ordering.is_mixture:
        reason = "cannot partition a mixture: partition its readers, or divide the mixture among ranks"
        raise UnsupportedError(reason, reason=reason)
    check_all_steps(ordering, "cannot partition a reader", "call without(steps=...) for each reader of a partition")
    if ordering.is_sample:
        raise ValueError(
            "cannot partition samples that are drawn for each epoch: draw one sample with redraw=False, or partition"
            " the original reader"
        )


def _digest(data: Dataset) -> str:
    return str(data.fingerprint()["digest"])


def _range(data: Dataset, part: Partition) -> tuple[int, int]:
    """Returns the start and stop of a partition among the units of a handle, which may be slices of units."""
    whole = data.unsliced()
    if whole is data:
        return part.start, part.stop
    rows, sliced = (np.cumsum(np.append(0, each.handle.unit_rows()), dtype=np.int64) for each in (whole, data))
    start, stop = np.searchsorted(sliced, rows[np.clip([part.start, part.stop], 0, len(rows) - 1)]).tolist()
    return start, stop


class _Part(BaseDataset):
    """A partition as a dataset."""

    def __init__(self, whole: Dataset, part: Partition) -> None:
        self._whole, self._part = whole, part
        self._start, stop = _range(whole, part)
        self.handle = whole.handle.partition(self._start, stop)
        self.features, self.files, self.words = whole.features, whole.files, whole.words
        self.categories = whole.categories
        self.interpretation, self.column_times = whole.interpretation, whole.column_times

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the fingerprint of the whole dataset with the partition's rows and a separate digest."""
        whole = copy.copy(self._whole.fingerprint(version))
        named = f"{whole['digest']} {self._part.start} {self._part.stop}"
        return whole | {"rows": self._part.rows, "digest": digest(named.encode())}

    def unsliced(self) -> _Part:
        """Returns the same partition with whole units."""
        whole = self._whole.unsliced()
        return self if whole is self._whole else _Part(whole, self._part)

    def narrowed(self, names: Sequence[str]) -> _Part:
        """Returns the same partition with fewer features."""
        return _Part(self._whole.narrowed(names), self._part)

    @property
    def holds_units(self) -> bool:
        """Returns what holds for the whole dataset."""
        return self._whole.holds_units

    def default_window(self, batch_size: int) -> int:
        """Returns the default of the whole dataset if it has its own, or else the default for the partition's units."""
        whole = self._whole.default_window(batch_size)
        return self.handle.default_buffer(batch_size) if whole is None else whole

    def index_entries(self) -> IndexEntries | None:
        """Returns those of the whole dataset, whose files contain the rows."""
        return self._whole.index_entries()

    def storage_counts(self) -> dict[str, Any]:
        """Returns the counts of the whole dataset."""
        return self._whole.storage_counts()

    def place(self, unit: int, record: int) -> Location:
        """Returns where a row comes from in the whole dataset."""
        return self._whole.place(self._start + unit, record)

    def origin(self) -> tuple[Dataset, slice | npt.NDArray[np.int64]]:
        """Returns the whole dataset, and the range or indices of its rows."""
        rows = self._whole.unsliced().handle.unit_rows()[: self._part.stop]
        start, stop = (int(rows[:unit].sum(dtype=np.int64)) for unit in (self._part.start, self._part.stop))
        if (sequence := self._whole.handle.rows_in_sequence) is not None:
            return self._whole, np.flatnonzero((sequence >= start) & (sequence < stop))
        return self._whole, slice(start, stop)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Part, (self._whole, self._part)

    def __str__(self) -> str:
        return f"part {self._part.number} of {self._part.num_partitions} of {self._whole}"
