"""Sources in Python: their interface, the threads that call them, their units as a dataset, and the reader."""

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
from typing import Any, Protocol, Self, Unpack, runtime_checkable

import numpy as np

from fastpipe._arguments import imported, shown
from fastpipe._arrow.schema import written
from fastpipe._fastpipe import UnitCalls, UnitsDataset
from fastpipe._locations import UnitLocation
from fastpipe._reader.condition_bounds import Bounds
from fastpipe._reader.dataset import LARGEST_WINDOW, BaseDataset, SourceWording
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.ordering import digest
from fastpipe._reader.pass_options import available_processors
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import VERSION
from fastpipe.errors import SchemaError, ShapeError
from fastpipe.specs import Features, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies
from fastpipe.specs._requests import FeatureRequest


@runtime_checkable
class Units(Protocol):
    """A custom source: rows in units such as files, row groups, partitions of a query, or pages of a service.

    A source can also have:

    - `name(unit) -> str`: the name of a unit in errors and in `locate`. By default, a unit's name is its index.
    - `select(columns) -> Units`: returns the same units with only these columns. It is called before anything is read,
      and again for a pass that needs fewer columns, as `Reader.filter` does.
    - `read_slices(unit, start, rows) -> Iterator`: yields the rows of a unit from `start`, in slices of `rows` rows
      (the last slice may be shorter). A slice is like the result of `read`. When rows are read in sequence, units of
      more than 16 MiB are read in slices of about 8 MiB, so that the whole unit need not fit in memory. The slices of a
      unit are requested one after another, by different threads.
    - `dictionaries`: a mapping from columns to lists of text, the values of their dictionary codes. It is required for
      a feature that is codes (an integer dtype for a dictionary of text), because units may have different
      dictionaries. The dictionary of each unit is mapped to it by value. Nested columns are named by their paths, as in
      `features`.
    - `nbytes`: a sequence of the bytes that each unit occupies in memory, for planning memory limits and windows. If
      `select` exists, `nbytes` is read from its result and counts only the selected columns. Without it, sizes are
      estimated from the schema's types until units are read.

    The source must be picklable if workers are spawned or run on other machines.

    Attributes:
        schema: The schema of every unit: a `pyarrow.Schema`, or another object with `__arrow_c_schema__`. A column that
            is nullable in the schema is read as `Masked`.
        rows: The number of rows of each unit, below 2^32.
    """

    schema: Any
    rows: Sequence[int]

    def read(self, unit: int) -> Any:
        """Returns the rows of a unit.

        Separate threads call this method, up to `num_fetches` at once. It is called each time that a unit is needed,
        and must return the same rows each time. It may block. Its exceptions are raised, with their traceback, by the
        `next` whose batch needs rows of the unit.

        Args:
            unit: The index of the unit, from 0.

        Returns:
            An object with `__arrow_c_stream__` or `__arrow_c_array__`, such as a pyarrow table or record batch or a
            polars data frame. It must have the number of rows in `rows`, and at least the columns of the schema.
        """

    def fingerprint(self) -> Any:
        """Returns a JSON value that identifies this dataset: a version, a digest, or paths with sizes and dates.

        A state can only be loaded by a reader whose source has the same fingerprint and the same numbers of rows.
        """


# The maximum number of iterators that wait for their next slice. A pass needs one, and abandoned passes leave theirs.
_WAITING = 8

_END = object()


class Slices:
    """Reads slices of units. A slice reuses the iterator that read the previous slice, if it still exists.

    Args:
        units: A source with `read_slices`.
        rows: The number of rows of each unit.
    """

    def __init__(self, units: Any, rows: Sequence[int]) -> None:
        self._units, self._rows = units, rows
        # The key is the process, the unit and the next row. A lock could be held by another thread when the process
        # forks.
        self._waiting: OrderedDict[tuple[int, int, int], Iterator[Any]] = OrderedDict()

    def read(self, unit: int, first: int, end: int) -> Any:
        """Returns the rows of a unit from `first` up to `end`, as Arrow data.

        Raises:
            ShapeError: If the unit ends before `end`, or continues after its last row.
        """
        process, all_rows = os.getpid(), self._rows[unit]
        slices = self._waiting.pop((process, unit, first), None)
        if slices is None:
            slices = iter(self._units.read_slices(unit, first, end - first))
        found = next(slices, _END)
        if found is _END:
            reason = f"read_slices({unit}) ended before row {first}, but `rows` says that the unit has {all_rows} rows"
            raise ShapeError(reason, reason=reason)
        if end < all_rows:
            self._waiting[process, unit, end] = slices
            while len(self._waiting) > _WAITING:
                self._waiting.popitem(last=False)
        elif next(slices, _END) is not _END:
            reason = f"read_slices({unit}) continued after row {end}, where the unit ends according to `rows`"
            raise ShapeError(reason, reason=reason)
        return found

    def clear(self) -> None:
        """Discards the iterators of abandoned passes."""
        self._waiting.clear()


# Seconds that an exiting program waits for reads. CPython before 3.14 unwinds the stack of a daemon thread as soon as
# it requests the GIL. Inside pyarrow's C++ code, this aborts the program.
PATIENCE = 1.0

_serving: weakref.WeakKeyDictionary[threading.Thread, UnitCalls] = weakref.WeakKeyDictionary()


def start(read: Callable[[int], Any], slices: Slices, queues: list[UnitCalls]) -> int:
    """Starts a thread for each queue to answer its calls, and returns the number of threads that could be started.

    The threads are daemons: an exiting program waits at most one second for them. They exit when no pass is left.
    """
    for started, calls in enumerate(queues):
        thread = threading.Thread(target=_serve, args=(calls, read, slices), name="fastpipe-read", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Memory is exhausted, or the interpreter is shutting down.
            return started
        _serving[thread] = calls
    return len(queues)


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
        # Every exception is delivered to the batch, including KeyboardInterrupt.
        except BaseException as error:
            call.fail(error)
        # Release the call, so that a waiting thread keeps no data alive.
        del call
    slices.clear()


def _checked(table: Any, unit: int, rows: tuple[int, int] | None) -> Any:
    if hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__"):
        return table
    called, returned = ("read", "return") if rows is None else ("read_slices", "yield")
    raise TypeError(
        f"{called}({unit}) must {returned} Arrow data (an object with __arrow_c_stream__ or __arrow_c_array__); "
        f"{returned}ed {shown(table)}"
    )


# Maximum bytes of the units of a window, unless the user sets its number of rows.
_WINDOW_BYTES = 256 << 20

# Bytes of a slice of a unit. Several slices fit in a processor's cache.
_SLICE_BYTES = 8 << 20

_MOST_ROWS = 2**32 - 1


class UnitsData(BaseDataset):
    """Units that are ready to read: the `Data` of `read_units`.

    Args:
        units: The source.
        request: The features to read.
        num_fetches: The maximum number of concurrent calls of the source.
        in_sequence: Whether rows are read in sequence. Large units are then read in slices if the source supports it.
    """

    words = SourceWording(
        advice={
            "fetching": "The source is the limit: more concurrent calls (`num_fetches`) help if the source can answer "
            "them; more threads don't."
        }
    )
    column_times = None

    def __init__(
        self,
        units: Units,
        request: FeatureRequest,
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
                f"units.schema must be an Arrow schema (with __arrow_c_schema__); got {shown(units.schema)}"
            )
        self._rows = _counts(units.rows, "rows", _MOST_ROWS)
        dictionaries = _dictionaries(getattr(units, "dictionaries", None))
        features = request.features
        if features is None:
            # Files may contain no nulls although their schema allows nulls.
            schema = getattr(units, "inferred_schema", units.schema)
            features = _written(schema, request.columns)
            if features is None and (schema is not units.schema or request.overrides):
                features = _inferred(schema, request.columns)
            if features is not None:
                features = request.changed(features)
        if features is not None and hasattr(units, "with_texts"):
            units = self._units = units.with_texts(vocabularies.key_fields(features))
        wanted = request.columns if features is None else features._lower()

        def begin(queues: list[UnitCalls]) -> int:
            return start(chosen.read, slices, queues)

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
            # Only the columns that are read count for memory. A first handle determines them, before `nbytes` is read.
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
        self.categories = dict(self.handle.categories())
        self._digest: tuple[str, str] | None = None

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the counts of units and rows, and a digest of the row counts and the source's fingerprint."""
        own = self._units.fingerprint()
        try:
            told = json.dumps(own, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"fingerprint() must return a JSON value: {error}") from error
        if self._digest is None or self._digest[0] != told:
            # There may be a million units, and the digest is needed for each state.
            self._digest = told, digest(json.dumps(self._rows).encode(), b"\0", told.encode())
        return {"units": len(self._rows), "rows": self.handle.num_rows, "digest": self._digest[1]}

    def default_window(self, batch_size: int) -> int:
        """Returns the number of rows of a window whose units occupy at most about 256 MiB in memory.

        A window has at least the rows of a unit and of a batch, and at most all rows.
        """
        units, rows = max(len(self._rows), 1), self.handle.num_rows
        average = -(-rows // units)
        held = _WINDOW_BYTES // max(self.handle.row_bytes(), 1)
        # A window contains parts of two more units at its edges.
        within = max(held - 2 * average, average, batch_size)
        return max(min(within, rows, LARGEST_WINDOW), batch_size)

    def unsliced(self) -> Self:
        """Returns the dataset as readers that shuffle read it: large units aren't read in slices."""
        return self if self.handle.uncut == len(self.handle.unit_rows()) else self._unsliced

    @functools.cached_property
    def _unsliced(self) -> Self:
        return type(self)(self._units, FeatureRequest(self._asked), self._num_fetches, in_sequence=False)

    def narrowed(self, names: Sequence[str]) -> Self:
        """Returns a dataset of the same rows with only some features, and only their columns."""
        features = Features({name: spec for name, spec in self._asked.items() if name in names})
        return type(self)(self._units, FeatureRequest(features), self._num_fetches, in_sequence=True)

    def bounds(self, names: Sequence[str]) -> tuple[Sequence[int], dict[str, Bounds | None]] | None:
        """Returns the rows of each unit, and the bounds of features if the source has statistics."""
        find = getattr(self._units, "_bounds", None)
        return None if find is None else (self._rows, {name: find(name, self._asked[name]) for name in names})

    def place(self, unit: int, record: int) -> UnitLocation:
        """Returns the file (of Parquet and Arrow files), the unit, its name, and the index of the row in it."""
        unit, row = self.handle.row_of(unit, record)
        file_of = getattr(self._units, "_file_of", None)
        file = None if file_of is None else file_of(unit)
        return UnitLocation(file=file, row=row, unit=unit, name=_name(self._units, unit))

    def __reduce__(self) -> tuple[Any, ...]:
        known = (self._units, FeatureRequest(self._asked), self._num_fetches)
        return functools.partial(type(self), in_sequence=self._in_sequence), known

    def __str__(self) -> str:
        units = f"{len(self._rows)} unit" + "s" * (len(self._rows) != 1)
        return f"{units} of {type(self._units).__name__} with {self.handle.num_rows} rows"


def _written(schema: Any, columns: list[str] | None) -> Features | None:
    """Returns the specs in the metadata that fastpipe wrote, with inferred specs for added columns; otherwise None."""
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
    """Returns the specs that are inferred from the types of a schema, for the given columns or all columns."""
    return inferred(UnitsDataset(schema, columns, ([], None), (str, _unread, 1), None, {}).features())


def _unread(queues: list[UnitCalls]) -> int:
    return 0


def _nbytes(units: Units, number: int) -> list[int] | None:
    nbytes = getattr(units, "nbytes", None)
    if nbytes is None:
        return None
    counts = _counts(nbytes, "nbytes", 2**63 - 1)
    if len(counts) != number:
        raise ValueError(f"units.nbytes must have one entry for each of the {number} units; got {len(counts)}")
    return counts


def _name(units: Units, unit: int) -> str:
    name = getattr(units, "name", None)
    return str(unit) if name is None else str(name(unit))


def _dictionaries(given: Any) -> dict[str, list[str]]:
    """Returns the values of dictionary codes by column.

    Raises:
        TypeError: If the argument is not a mapping from columns to lists of text.
    """
    if given is None:
        return {}
    expected = 'units.dictionaries must map columns to lists of their values, {"country": ["AT", "DE"]}; got'
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
        raise TypeError(f"units.{name} must be a sequence of integers, one for each unit; got {shown(values)}")
    counts: list[int] = array.tolist()
    for unit, count in enumerate(counts):
        if not 0 <= count <= most:
            raise ValueError(f"units.{name}[{unit}] must be from 0 to {most}; got {count}")
    return counts


_FETCHES = 8
_MOST_FETCHES = 1024


@takes_options()
def read_units(
    units: Units,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    batch_size: int,
    num_fetches: int | None = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads a custom source, which returns its units as Arrow data, as batches of NumPy arrays.

    Separate threads call `units.read` before its rows are needed. Several calls can block at the same time without
    stopping the threads of the pass. An abandoned pass doesn't wait for pending calls.

    When rows are shuffled, `shuffle_buffer` defaults to the rows of 256 MiB of units.

    While reading, the reader also raises the exceptions of `units.read` unchanged.

    Args:
        units: An object with the attributes `schema` and `rows` and the methods `read(unit)` and `fingerprint()`, which
            `Units` describes.
        features: The spec of each feature, by name: the path of a column, with dots between the names of nested fields.
            By default, features come from the specs in the metadata of a `pyarrow.Schema` that fastpipe created, or
            else from the types of the schema: lists are ragged, fixed-size lists are dense, and other structs have a
            feature for each field. Columns that are nullable in the schema have `on_null="mask"`.
        columns: The columns to read: a list of at least one name, or one name as a string. A name includes everything
            nested in it. Defaults to None: all columns.
        overrides: Specs that replace some of the specs that `features` has by default, by name. Not allowed with
            `features`. Defaults to None.
        batch_size: Number of rows per batch.
        num_fetches: The maximum number of concurrent calls of `units.read`, 1 to 1024. Defaults to 8.
        **options: See `fastpipe.typing.Options`.

    Returns:
        The reader.

    Raises:
        SchemaError: If a column does not exist, a spec doesn't fit its type, or `overrides` names a column that isn't
            read. While reading, if a unit lacks columns of the schema.
        ShapeError: While reading, if a unit's number of rows differs from `units.rows`.
        UnsupportedError: If the type of a requested column is not supported, such as intervals and unions.
        TypeError: If `units` lacks an attribute, or an argument has the wrong type.
        ValueError: If arguments are out of range or exclude each other.

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
    request = FeatureRequest.of(features, columns, overrides)
    return reader_of(settings, units, request, fetches(num_fetches, _FETCHES))


def fetches(given: int | None, default: int) -> int:
    """Returns the number of concurrent calls.

    Raises:
        TypeError: If the argument is not an integer.
        ValueError: If the argument is out of range.
    """
    if given is None:
        return default
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"num_fetches must be an integer or None; got {shown(given)}") from None
    if isinstance(given, bool) or not 1 <= number <= _MOST_FETCHES:
        raise ValueError(f"num_fetches must be from 1 to {_MOST_FETCHES}; got {shown(given)}")
    return number


def reader_of(
    settings: Settings, units: Any, request: FeatureRequest, num_fetches: int, kind: type[UnitsData] = UnitsData
) -> Reader:
    """Returns the reader of units, as a dataset of a class."""
    in_sequence = settings.ordering.shuffle == "sequential"
    data = kind(units, request, num_fetches, in_sequence=in_sequence)
    return settings.reader(data)


def threads_of(settings: Settings) -> int:
    """Returns the maximum number of threads that a reader may use."""
    wanted = settings.running.num_threads
    if isinstance(wanted, int):
        return wanted
    return available_processors()
