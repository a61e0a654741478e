"""Partitions: a reader's data divided into parts that are read by themselves."""

from __future__ import annotations

import copy
import hashlib
from typing import Any, NamedTuple, SupportsIndex

from fastpipe._data import Data
from fastpipe._ordering import within
from fastpipe._state import VERSION
from fastpipe.errors import StateError
from fastpipe.reader import Reader

__all__ = ["Partition", "partition", "read_partition"]

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


def partition(reader: Reader, partitions: SupportsIndex) -> list[Partition]:
    """Divides the data of a reader into parts that take about as long to read, for whoever deals them out.

    Each row is in one part. Units (blocks of Avro files, row groups, stretches of CSV) stay whole, in their order. The
    division is a pure function of the data set.

    Args:
        reader: of any source. Only its data set counts, not its order or its rank.
        partitions: how many, at most: no part is empty, so there are fewer where there are few units.

    Returns:
        The parts, in their order.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if one is out of range, or the reader is of a sample.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_csv("rides.csv", batch_size=256)
        >>> parts = fastpipe.partition(reader, 4)
        >>> sum(part.rows for part in parts) == reader.num_rows
        True
        >>> sum(len(batch["distance"]) for part in parts for batch in fastpipe.read_partition(reader, part))
        2000
    """
    _check(reader)
    count = within("partitions", partitions, 1, _MOST)
    found = reader._data.handle.stretches(count)
    digest = _digest(reader._data)
    return [Partition(number, len(found), *range_, digest) for number, range_ in enumerate(found)]


def read_partition(reader: Reader, partition: Partition) -> Reader:
    """Reads one part of a reader's data.

    Args:
        reader: of the data set that was divided: the same one, unpickled, or made in another process. Its features,
            order, seed, ranks, threads, limits and epochs are kept: shuffling stays within the part, which ranks share.
        partition: as `fastpipe.partition` made it.

    Returns:
        A reader of the part, with states, `batch_at` and adapters as any other. Its states fit this part alone.

    Raises:
        StateError: if the partition is of another data set, or of one that has changed.
        TypeError: if an argument is of the wrong type.
        ValueError: if the reader is of a sample.
    """
    _check(reader)
    if not isinstance(partition, Partition):
        raise TypeError(
            f"partition is a fastpipe.Partition, not {type(partition).__name__}: Partition(*values) of JSON"
        )
    if partition.digest != _digest(reader._data):
        raise StateError(f"the partition is of another data set than this reader: {reader._data.words.other_digest}")
    data: Any = _Part(reader._data, partition)
    return Reader(data, **reader._options())


def _check(reader: Reader) -> None:
    if not isinstance(reader, Reader):
        raise TypeError(f"reader is a fastpipe.Reader, not {type(reader).__name__}")
    if reader._ordering.is_sample:
        raise ValueError("a sample isn't divided: divide the reader that it was drawn of, or draw it in parts (part=)")


def _digest(data: Data) -> str:
    return str(data.fingerprint()["digest"])


class _Part:
    """A part of a data set as one."""

    def __init__(self, whole: Data, part: Partition) -> None:
        self._whole, self._part = whole, part
        self.handle = whole.handle.stretch(part.start, part.stop)
        self.features, self.files, self.symbols, self.words = whole.features, whole.files, whole.symbols, whole.words

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """That of all, with the part's rows, and a digest of its own."""
        whole = copy.copy(self._whole.fingerprint(version))
        named = f"{whole['digest']} {self._part.start} {self._part.stop}"
        return whole | {"rows": self._part.rows, "digest": hashlib.sha256(named.encode()).hexdigest()[:32]}

    def place(self, unit: int, record: int) -> tuple[Any, ...]:
        """Where it comes from in the whole."""
        return self._whole.place(self._part.start + unit, record)

    def column_times(self) -> tuple[float, list[tuple[str, float]]]:
        """Those of the whole."""
        return self._whole.column_times()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Part, (self._whole, self._part)

    def __str__(self) -> str:
        return f"part {self._part.number} of {self._part.partitions} of {self._whole}"
