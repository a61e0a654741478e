"""Partitions: a reader's data divided into parts that are read by themselves."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, SupportsIndex

from fastpipe._reader.dataset import Dataset
from fastpipe._reader.ordering import Ordering, digest, within
from fastpipe._reader.state import VERSION
from fastpipe.errors import StateError

_MOST = 2**31


class Partition(NamedTuple):
    """A part of a data set: some units, one behind the other.

    It is a few numbers, so it goes through pickle, a queue or a task of another engine. As JSON it is a list, of which
    `Partition(*values)` makes it again.

    Attributes:
        number: which of the parts, from 0.
        partitions: how many there are.
        start: its first unit.
        stop: the unit behind its last.
        rows: in it.
        digest: of the data set.
    """

    number: int
    partitions: int
    start: int
    stop: int
    rows: int
    digest: str


def split_dataset(data: Dataset, ordering: Ordering, partitions: SupportsIndex) -> list[Partition]:
    """The parts of a data set that is read in some order. See `Reader.partition`."""
    _check(ordering)
    count = within("partitions", partitions, 1, _MOST)
    found = data.handle.stretches(count)
    digest = _digest(data)
    return [Partition(number, len(found), *range_, digest) for number, range_ in enumerate(found)]


def dataset_part(data: Dataset, ordering: Ordering, partition: Partition) -> Dataset:
    """A part of a data set as one. See `Reader.read_partition`."""
    _check(ordering)
    if not isinstance(partition, Partition):
        raise TypeError(
            f"partition is a fastpipe.Partition, not {type(partition).__name__}: Partition(*values) of JSON"
        )
    if partition.digest != _digest(data):
        raise StateError(f"the partition is of another data set than this reader: {data.words.other_digest}")
    part: Any = _Part(data, partition)
    found: Dataset = part
    return found


def _check(ordering: Ordering) -> None:
    if ordering.is_sample:
        raise ValueError("a sample isn't divided: divide the reader that it was drawn of, or draw it in parts (part=)")


def _digest(data: Dataset) -> str:
    return str(data.fingerprint()["digest"])


class _Part:
    """A part of a data set as one."""

    def __init__(self, whole: Dataset, part: Partition) -> None:
        self._whole, self._part = whole, part
        self.handle = whole.handle.stretch(part.start, part.stop)
        self.features, self.files, self.symbols, self.words = whole.features, whole.files, whole.symbols, whole.words
        self.interpretation, self.column_times = whole.interpretation, whole.column_times

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """That of all, with the part's rows, and a digest of its own."""
        whole = copy.copy(self._whole.fingerprint(version))
        named = f"{whole['digest']} {self._part.start} {self._part.stop}"
        return whole | {"rows": self._part.rows, "digest": digest(named.encode())}

    def place(self, unit: int, record: int) -> tuple[Any, ...]:
        """Where it comes from in the whole."""
        return self._whole.place(self._part.start + unit, record)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Part, (self._whole, self._part)

    def __str__(self) -> str:
        return f"part {self._part.number} of {self._part.partitions} of {self._whole}"
