"""Readers of units."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, Unpack

from fastpipe._arguments import shown
from fastpipe._arrow.schema import asked_for
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.sources.units._data import Units, UnitsData
from fastpipe.specs import Spec

__all__ = ["fetches", "read_units", "reader_of", "threads_of"]

_FETCHES = 8
_MOST_FETCHES = 1024


@takes_options()
def read_units(
    units: Units,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: SupportsIndex,
    num_fetches: SupportsIndex | None = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads a custom source, which returns its units as Arrow, as batches of NumPy arrays.

    `units.read` is called on threads of its own, before its rows are needed: several calls wait at once, and none of
    them keeps the threads of the pass from working. A pass that is left doesn't wait for calls that are under way.

    When rows are shuffled, `shuffle_buffer` is as large as 256 MiB of units allow, unless it is given.

    Args:
        units: has `schema`, `rows`, `read(unit)` and `fingerprint()`: see `Units`.
        features: dict from name to spec, as in `from_arrow`. By default, the specs in the metadata of a
            `pyarrow.Schema` that fastpipe made, else what follows from the types of the schema: columns that may have
            nulls, as it says, have `nulls="mask"`.
        columns: only these, and what is nested in them; at least one.
        batch_size: rows a batch.
        num_fetches: calls of `units.read` at once; 8 by default.
        **options: see `fastpipe.Options`.

    Returns:
        The reader.

    Raises:
        SchemaError: if a column isn't there, or a spec doesn't fit its type; while reading, if a unit hasn't the
            schema's columns.
        ShapeError: while reading, if a unit hasn't as many rows as `units.rows` says.
        UnsupportedError: if a wanted column is of a type that isn't read, such as intervals and unions.
        TypeError: if units lacks something, or an argument is of the wrong type.
        ValueError: for values out of range, and for arguments that exclude each other.

        While reading, also whatever `units.read` raises, as it was raised.

    Example:
        >>> import fastpipe
        >>> import pyarrow as pa
        >>> class Squares:
        ...     schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
        ...     rows = [3, 3]
        ...
        ...     def read(self, unit):
        ...         return pa.table({"x": [i * i for i in range(3 * unit, 3 * unit + 3)]})
        ...
        ...     def fingerprint(self):
        ...         return "squares"
        >>> [batch["x"].tolist() for batch in fastpipe.read_units(Squares(), batch_size=4)]
        [[0, 1, 4, 9], [16, 25]]
    """
    settings = Settings(read_units, batch_size, options)
    return reader_of(settings, units, features, columns, fetches(num_fetches, _FETCHES))


def fetches(given: SupportsIndex | None, default: int) -> int:
    """The number of calls at once.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is out of range.
    """
    if given is None:
        return default
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"num_fetches is a number or None, not {shown(given)}") from None
    if isinstance(given, bool) or not 1 <= number <= _MOST_FETCHES:
        raise ValueError(f"num_fetches is from 1 to {_MOST_FETCHES}, not {shown(given)}")
    return number


def reader_of(
    settings: Settings,
    units: Any,
    features: Mapping[str, Spec] | None,
    columns: Sequence[str] | None,
    num_fetches: int,
) -> Reader:
    """The reader of units."""
    wanted, chosen = asked_for(features, columns)
    in_sequence = settings.ordering.shuffle == "sequential"
    data = UnitsData(units, wanted, chosen, num_fetches, in_sequence=in_sequence)
    return settings.reader(data, data.default_window)


def threads_of(settings: Settings) -> int:
    """Threads that a reader may use at most."""
    wanted = settings.running.num_threads
    if isinstance(wanted, int):
        return wanted
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
