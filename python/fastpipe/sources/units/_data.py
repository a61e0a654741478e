"""Units as a data set."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fastpipe import _fastpipe
from fastpipe._arguments import imported, shown
from fastpipe._arrow.column_features import written
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.state import VERSION
from fastpipe.errors import SchemaError
from fastpipe.sources.units._calls import start
from fastpipe.sources.units._protocol import Units
from fastpipe.sources.units._slices import Slices
from fastpipe.specs import Features, inferred
from fastpipe.specs import _vocabularies as vocabularies

__all__ = ["UnitLocation", "UnitsData"]

# Bytes of the units that a window takes rows of, unless the user says how many rows it has.
_WINDOW_BYTES = 256 << 20

# Bytes of a slice of a unit: some fit in a processor's cache.
_SLICE_BYTES = 8 << 20

# Rows of a window are counted in 32 bits.
_LARGEST_WINDOW = 2**31

_MOST_ROWS = 2**32 - 1


class UnitLocation(NamedTuple):
    """Where a row of a source's units is.

    Attributes:
        unit: the number of its unit, from 0.
        name: what the source calls the unit.
        row: the row's number within it.
    """

    unit: int
    name: str
    row: int


class UnitsData:
    """Units, ready to be read: the `Data` of `read_units`.

    Args:
        units: the source.
        features: as in `read_units`.
        columns: as in `read_units`.
        num_fetches: as in `read_units`.
        in_sequence: whether rows are read in their order, and so a slice of a large unit at a time where the source can
            do that.
    """

    words = SourceWording(
        advice={
            "fetching": "The source is the limit: more calls at once (`num_fetches`) make it faster if it can answer "
            "them; more threads don't."
        }
    )

    def __init__(
        self,
        units: Units,
        features: Features | None,
        columns: list[str] | None,
        num_fetches: int,
        *,
        in_sequence: bool,
    ) -> None:
        self._units, self._num_fetches, self._in_sequence = units, num_fetches, in_sequence
        for name in ("schema", "rows", "read", "fingerprint"):
            if not hasattr(units, name):
                raise TypeError(
                    f"units must have schema, rows, read(unit) and fingerprint(): {shown(units)} has no {name}"
                )
        if not hasattr(units.schema, "__arrow_c_schema__"):
            raise TypeError(
                f"units.schema must be an Arrow schema (it has __arrow_c_schema__), not {shown(units.schema)}"
            )
        self._rows = _counts(units.rows, "rows", _MOST_ROWS)
        dictionaries = _dictionaries(getattr(units, "dictionaries", None))
        if features is None:
            # Files may have no nulls where their schema allows them.
            schema = getattr(units, "inferred_schema", units.schema)
            features = _written(schema, columns)
            if features is None and schema is not units.schema:
                features = _inferred(schema, columns)
        lowered = None if features is None else [(name, spec._lower()) for name, spec in features.items()]
        lookups = None if features is None else vocabularies.lowered(features)

        def begin(calls: _fastpipe.UnitCalls, threads: int) -> int:
            return start(chosen.read, slices, calls, threads)

        slice_bytes = _SLICE_BYTES if in_sequence and hasattr(units, "read_slices") else None

        def handle(nbytes: list[int] | None) -> _fastpipe.UnitsDataset:
            return _fastpipe.UnitsDataset(
                units.schema,
                self._rows,
                nbytes,
                functools.partial(_name, units),
                begin,
                num_fetches,
                lowered,
                columns if lowered is None else None,
                slice_bytes,
                dictionaries,
                lookups,
            )

        chosen, first = units, None
        if (select := getattr(units, "select", None)) is not None:
            # A handle tells which columns are read. Only these count for memory, so nbytes is asked of what has them.
            first = handle(None)
            chosen = select(first.used())
        slices = Slices(chosen, self._rows)
        nbytes = _nbytes(chosen, len(self._rows))
        self.handle = handle(nbytes) if first is None or nbytes is not None else first
        if features is None:
            features = inferred(self.handle.features())
        if not features:
            raise SchemaError("the schema has no columns")
        self._asked = features
        self.features = vocabularies.in_form(features, self.handle.features()) if lookups else features
        self.interpretation = vocabularies.interpretation(features)
        self.files: list[str] = list(getattr(units, "files", []))
        self.symbols = dict(self.handle.symbols())

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """The numbers of units and rows, and a digest of all numbers of rows and the source's own fingerprint."""
        own = self._units.fingerprint()
        try:
            told = json.dumps(own, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"fingerprint() must return what JSON can hold: {error}") from error
        digest = hashlib.sha256(json.dumps(self._rows).encode() + b"\0" + told.encode())
        return {"units": len(self._rows), "rows": self.handle.num_rows, "digest": digest.hexdigest()[:32]}

    def default_window(self, batch_size: int) -> int:
        """Rows of a window whose units take no more than 256 MiB when they are open, as far as that is known.

        At least a unit, at least a batch, and no more than all.
        """
        units, rows = max(len(self._rows), 1), self.handle.num_rows
        average = -(-rows // units)
        held = _WINDOW_BYTES // max(self.handle.row_bytes(), 1)
        # It has parts of two units at its edges.
        within = max(held - 2 * average, average, batch_size)
        return max(min(within, rows, _LARGEST_WINDOW), batch_size)

    def place(self, unit: int, record: int) -> UnitLocation:
        """The unit, what it is called, and the row within it."""
        unit, row = self.handle.row_of(unit, record)
        return UnitLocation(unit, _name(self._units, unit), row)

    def column_times(self) -> tuple[float, list[tuple[str, float]]]:
        """Nothing: nothing is decoded."""
        return 0.0, []

    def __reduce__(self) -> tuple[Any, ...]:
        known = (self._units, self._asked, None, self._num_fetches)
        return functools.partial(UnitsData, in_sequence=self._in_sequence), known

    def __str__(self) -> str:
        units = f"{len(self._rows)} unit" + "s" * (len(self._rows) != 1)
        return f"{units} of {type(self._units).__name__} with {self.handle.num_rows} rows"


def _written(schema: Any, columns: list[str] | None) -> Features | None:
    """The specs that fastpipe wrote beside columns, with inferred ones for what was added; None if it wrote none."""
    pa = imported("pyarrow")
    if pa is None or not isinstance(schema, pa.Schema):
        return None
    found = written(schema, columns)
    if found is None or columns is not None:
        return found
    added = [name for name in schema.names if name not in found]
    if added:
        found |= _inferred(schema, added)
    return found


def _inferred(schema: Any, columns: list[str] | None) -> Features:
    """The specs that follow from the types of a schema: of these columns, or of all."""
    return inferred(_fastpipe.UnitsDataset(schema, [], None, str, _unread, 1, None, columns).features())


def _unread(calls: _fastpipe.UnitCalls, threads: int) -> int:
    return 0


def _nbytes(units: Units, number: int) -> list[int] | None:
    nbytes = getattr(units, "nbytes", None)
    if nbytes is None:
        return None
    counts = _counts(nbytes, "nbytes", 2**63 - 1)
    if len(counts) != number:
        raise ValueError(f"units.nbytes has {len(counts)} entries, and units.rows {number}")
    return counts


def _name(units: Units, unit: int) -> str:
    name = getattr(units, "name", None)
    return str(unit) if name is None else str(name(unit))


def _dictionaries(given: Any) -> dict[str, list[str]] | None:
    """What codes of dictionaries stand for.

    Raises:
        TypeError: if it is no mapping from columns to lists of text.
    """
    if given is None:
        return None
    expected = 'units.dictionaries must map columns to lists of their values, {"country": ["AT", "DE"]}, not'
    if not isinstance(given, Mapping):
        raise TypeError(f"{expected} {shown(given)}")
    found = {}
    for column, values in given.items():
        listed = isinstance(values, Iterable) and not isinstance(values, (str, bytes))
        texts = list(values) if listed else []
        if not listed or not isinstance(column, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{expected} {shown({column: values})}")
        found[column] = texts
    return found


def _counts(values: Any, name: str, most: int) -> list[int]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        array = np.empty((), object)
    if array.ndim != 1 or (array.size > 0 and array.dtype.kind not in "iu"):
        raise TypeError(f"units.{name} must be a sequence of numbers, one for each unit, not {shown(values)}")
    counts: list[int] = array.tolist()
    for unit, count in enumerate(counts):
        if not 0 <= count <= most:
            raise ValueError(f"units.{name}[{unit}] is {count}, and must be from 0 to {most}")
    return counts
