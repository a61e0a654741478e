"""Sources in Python: what they are, the threads that call them, their units as a data set, and its reader."""

from __future__ import annotations

import atexit
import functools
import json
import operator
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex, Unpack, runtime_checkable

import numpy as np

from fastpipe._arguments import imported, shown
from fastpipe._arrow.schema import asked_for, written
from fastpipe._fastpipe import UnitCalls, UnitsDataset
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.options import LARGEST_WINDOW, Options, Settings, takes_options
from fastpipe._reader.ordering import digest
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import VERSION
from fastpipe.errors import SchemaError, ShapeError
from fastpipe.specs import Features, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies


@runtime_checkable
class Units(Protocol):
    """A custom source: rows by units, such as files, row groups, partitions of a query, pages of a service.

    Besides what is listed here, it may have

    - `name(unit) -> str`: what a unit is called in errors and by `locate`; else it is called by its number;
    - `select(columns) -> Units`: the same units, of which only these columns are read. It is called once, before
      anything is read;
    - `read_slices(unit, start, rows) -> Iterator`: yields the rows of a unit from `start` on, `rows` at a time (fewer
      at the unit's end), each slice as what `read` returns. Where rows are read in their order, units of more than 16
      MiB are then read in slices of some 8 MiB, and needn't be in memory as a whole. Slices of a unit are asked for one
      after the other, by different threads;
    - `dictionaries`, a mapping from columns to lists of text: what the codes of their dictionaries stand for. Units may
      differ in their dictionaries, so a feature that is codes (an integer dtype for a dictionary of text) needs it; the
      dictionary of each unit is mapped to it by value. Columns within others go by their paths, as in `features`;
    - `nbytes`, a sequence of each unit's bytes in memory: memory limits and windows are planned with it. Where there is
      `select`, it is asked of what that returns, and counts its columns only. Without it they are planned with what the
      types of the schema suggest, until units are read.

    For workers that are spawned, and for other machines, it must be possible to pickle it.

    Attributes:
        schema: of every unit: a `pyarrow.Schema`, or anything else with `__arrow_c_schema__`. What it says of nulls
            counts: a column that may have some becomes `Masked`.
        rows: number of rows of each unit, below 2^32.
    """

    schema: Any
    rows: Sequence[int]

    def read(self, unit: int) -> Any:
        """Returns a unit's rows.

        It is called on threads of its own, up to `num_fetches` at once; and once for each time that a unit is needed,
        so it must return the same rows each time. It may wait. What it raises is raised by the `next` whose batch has
        rows of the unit, with its traceback.

        Args:
            unit: its number, from 0.

        Returns:
            Whatever has `__arrow_c_stream__` or `__arrow_c_array__`: a table or record batch of pyarrow, a data frame
            of polars, ... with as many rows as `rows` says, and at least the schema's columns.
        """

    def fingerprint(self) -> Any:
        """Returns what tells this data set from others, fit for JSON: a version, paths with sizes and dates, a digest.

        A state is only loaded by a reader whose source has the same fingerprint and the same numbers of rows.
        """


# Iterators that wait for their next slice, at most. A pass needs one; those of passes that were left wait in vain.
_WAITING = 8

_END = object()


class Slices:
    """Reads slices of units: each by the iterator that has read the one in front of it, if there is one.

    Args:
        units: have `read_slices`.
        rows: number of rows of each unit.
    """

    def __init__(self, units: Any, rows: Sequence[int]) -> None:
        self._units, self._rows = units, rows
        # By process, unit and next row. Without a lock, which could be held by another thread when the process forks.
        self._waiting: OrderedDict[tuple[int, int, int], Iterator[Any]] = OrderedDict()

    def read(self, unit: int, first: int, end: int) -> Any:
        """The rows of a unit from `first` up to `end`, as Arrow.

        Raises:
            ShapeError: if the unit ends before, or doesn't end where it should.
        """
        process, all_rows = os.getpid(), self._rows[unit]
        slices = self._waiting.pop((process, unit, first), None)
        if slices is None:
            slices = iter(self._units.read_slices(unit, first, end - first))
        found = next(slices, _END)
        if found is _END:
            reason = f"read_slices({unit}) ended before row {first}, and the unit has {all_rows} rows as `rows` says"
            raise ShapeError(reason, reason=reason)
        if end < all_rows:
            self._waiting[process, unit, end] = slices
            while len(self._waiting) > _WAITING:
                self._waiting.popitem(last=False)
        elif next(slices, _END) is not _END:
            reason = f"read_slices({unit}) went on behind row {end}, where the unit ends as `rows` says"
            raise ShapeError(reason, reason=reason)
        return found

    def clear(self) -> None:
        """Forgets what no pass waits for."""
        self._waiting.clear()


# How long a program that ends waits for reads, in seconds. CPython before 3.14 ends a daemon wherever it next wants the
# GIL, by unwinding its stack: within pyarrow's C++ that aborts the program.
PATIENCE = 1.0

_serving: weakref.WeakKeyDictionary[threading.Thread, UnitCalls] = weakref.WeakKeyDictionary()


def start(read: Callable[[int], Any], slices: Slices, calls: UnitCalls, threads: int) -> int:
    """Starts threads that answer calls, and returns how many could be started.

    They are daemons: a program that ends waits a second for them, and no longer. They end by themselves when no pass is
    left.
    """
    for started in range(threads):
        thread = threading.Thread(target=_serve, args=(calls, read, slices), name="fastpipe-read", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # There is no memory for it, or the interpreter is ending.
            return started
        _serving[thread] = calls
    return threads


@atexit.register
def _end() -> None:
    threads = list(_serving.items())
    for _, calls in threads:
        calls.end()
    end = time.monotonic() + PATIENCE
    for thread, _ in threads:
        if thread.is_alive():
            thread.join(max(end - time.monotonic(), 0))


def _serve(calls: UnitCalls, read: Callable[[int], Any], slices: Slices) -> None:
    while (call := calls.next()) is not None:
        try:
            unit, rows = call.unit, call.rows
            call.answer(_checked(read(unit) if rows is None else slices.read(unit, *rows), unit, rows))
        # Whatever it is belongs to the batch.
        except BaseException as error:
            call.fail(error)
        # While the thread waits it keeps nothing.
        del call
    slices.clear()


def _checked(table: Any, unit: int, rows: tuple[int, int] | None) -> Any:
    if hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__"):
        return table
    called, returned = ("read", "return") if rows is None else ("read_slices", "yield")
    raise TypeError(
        f"{called}({unit}) must {returned} Arrow data (something with __arrow_c_stream__ or __arrow_c_array__), and "
        f"{returned}ed {shown(table)}"
    )


# Bytes of the units that a window takes rows of, unless the user says how many rows it has.
_WINDOW_BYTES = 256 << 20

# Bytes of a slice of a unit: some fit in a processor's cache.
_SLICE_BYTES = 8 << 20

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
    column_times = None

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
        wanted = columns if features is None else features._lower()

        def begin(calls: UnitCalls, threads: int) -> int:
            return start(chosen.read, slices, calls, threads)

        slice_bytes = _SLICE_BYTES if in_sequence and hasattr(units, "read_slices") else None

        def handle(nbytes: list[int] | None) -> UnitsDataset:
            return UnitsDataset(
                units.schema,
                wanted,
                (self._rows, nbytes),
                (functools.partial(_name, units), begin, num_fetches),
                slice_bytes,
                dictionaries,
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
        self.features = vocabularies.in_form(features, self.handle.features)
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
        layout = json.dumps(self._rows).encode()
        return {
            "units": len(self._rows),
            "rows": self.handle.num_rows,
            "digest": digest(layout, b"\0", told.encode()),
        }

    def default_window(self, batch_size: int) -> int:
        """Rows of a window whose units take no more than 256 MiB when they are open, as far as that is known.

        At least a unit, at least a batch, and no more than all.
        """
        units, rows = max(len(self._rows), 1), self.handle.num_rows
        average = -(-rows // units)
        held = _WINDOW_BYTES // max(self.handle.row_bytes(), 1)
        # It has parts of two units at its edges.
        within = max(held - 2 * average, average, batch_size)
        return max(min(within, rows, LARGEST_WINDOW), batch_size)

    def place(self, unit: int, record: int) -> UnitLocation:
        """The unit, what it is called, and the row within it."""
        unit, row = self.handle.row_of(unit, record)
        return UnitLocation(unit, _name(self._units, unit), row)

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
    return inferred(UnitsDataset(schema, columns, ([], None), (str, _unread, 1), None, {}).features())


def _unread(calls: UnitCalls, threads: int) -> int:
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


def _dictionaries(given: Any) -> dict[str, list[str]]:
    """What codes of dictionaries stand for.

    Raises:
        TypeError: if it is no mapping from columns to lists of text.
    """
    if given is None:
        return {}
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
