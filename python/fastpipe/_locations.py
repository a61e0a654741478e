"""The locations of rows that `Reader.locate` returns.

The locations of all sources are here: a client of the data service has the classes without importing the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a row is stored, as `Reader.locate` returns it. Each kind of source has a subclass, which says more.

    Attributes:
        file: Path of the row's file. None if the source isn't stored in files, or doesn't report them.
        row: Index of the row, from 0. The subclass says in which part of the source rows are counted.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024)
        >>> where = reader.locate(0, row=5)
        >>> isinstance(where, fastpipe.typing.Location), where.file, where.row
        (True, 'data/part-0.avro', 5)
    """

    file: str | None = None
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AvroLocation(Location):
    """Location of a row in Avro files. `row` is the index of the record in its block.

    Attributes:
        block: Index of the row's block in the file, from 0.
    """

    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvLocation(Location):
    """Location of a row in CSV files. `row` is its index in the file, without headers, comments and empty lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TFRecordLocation(Location):
    """Location of a row in TFRecord files. `row` is the index of the record in its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLocation(Location):
    """Location of a row in a table in memory. `row` is its index in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLocation(Location):
    """Location of a row in Parquet and Arrow files, SQL queries and custom sources. `row` is its index in the unit.

    Attributes:
        unit: Index of the row's unit in the source, from 0.
        name: Name of the unit in the source, such as "row group 3 of data/part-0.parquet".
    """

    unit: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PointLocation(Location):
    """Origin of a row of interactions. `row` is its index among the rows of all positives, skipped users included.

    Attributes:
        user: Index of the user.
        positive: Index of the positive, ordered by user and then by item.
        draw: 0 for the positive itself, or the index of the negative, from 1.
    """

    user: int
    positive: int
    draw: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureLocation(Location):
    """Location of a row of a mixture. `file` and `row` are those of `location`.

    Attributes:
        reader: Name of the reader from which the row comes.
        location: Where the row is stored, as the `locate` method of that reader says.
    """

    reader: str
    location: Location


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLocation(Location):
    """Locations of the rows in a pack. `file` and `row` are those of the first row.

    Attributes:
        rows: Where each row of the pack is stored, in their sequence in the pack.
    """

    rows: tuple[Location, ...]


_KINDS: Mapping[str, type[Location]] = {
    kind.__name__: kind
    for kind in (
        AvroLocation,
        CsvLocation,
        TFRecordLocation,
        RowLocation,
        UnitLocation,
        PointLocation,
        MixtureLocation,
        PackLocation,
    )
}


def to_json(location: Location) -> dict[str, Any]:
    """Returns the name of the class and the fields."""
    values = {field.name: getattr(location, field.name) for field in fields(location)}
    if isinstance(location, MixtureLocation):
        values["location"] = to_json(location.location)
    elif isinstance(location, PackLocation):
        values["rows"] = [to_json(row) for row in location.rows]
    return {"kind": type(location).__name__, "fields": values}


def from_json(found: Any) -> Location:
    """Returns the location of `to_json`, or only its common fields if fastpipe doesn't have the class.

    Raises:
        TypeError: If a field is missing, unknown, or of another type.
        KeyError: If the class or a common field is missing.
    """
    values: dict[str, Any] = found["fields"]
    kind = _KINDS.get(found["kind"])
    if kind is None:
        return Location(file=values["file"], row=values["row"])
    if kind is MixtureLocation:
        values = values | {"location": from_json(values["location"])}
    elif kind is PackLocation:
        values = values | {"rows": tuple(map(from_json, values["rows"]))}
    return kind(**values)
