"""Random samples of CSV files as one array, by each of the methods."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag, names, shown
from fastpipe._fastpipe import CsvReservoir, estimate_csv
from fastpipe._reader.options import Options, Settings
from fastpipe._reader.ordering import seed_of, within
from fastpipe._reader.reader import Reader
from fastpipe._reader.sampling import LARGEST_SAMPLE, blocks, rows_of_sample, sample, take
from fastpipe.errors import MissingFileError, SchemaError, StorageError, in_file
from fastpipe.sources.csv._reading import (
    DEFAULT_DIALECT,
    DEFAULT_NULLS,
    SUFFIXES,
    CsvData,
    Dialect,
    Header,
    LosslessDialect,
    OnRagged,
    read_csv,
)
from fastpipe.sources.files._in_memory_files import Contents, ReadableFile, Source, lowered, opened, pieces
from fastpipe.sources.files._index_cache import IndexCache
from fastpipe.specs import DenseSpec, Features

# Text that the batches which are made at the same time lie in, about, and what a batch has of rows.
_TEXT = 8 << 20
_LEAST_BATCH, _MOST_BATCH = 64, 1 << 16


class RowEstimate(NamedTuple):
    """How many rows files have, as random bytes tell it.

    Attributes:
        rows: the estimate, which is unbiased.
        low: of the interval in which the number lies with a probability of about `confidence`.
        high: of that interval.
        confidence: 0.95.
    """

    rows: int
    low: int
    high: int
    confidence: float = 0.95


class CsvSample(NamedTuple):
    """Some rows of CSV files.

    Attributes:
        values: one row for each, one column for each of `columns`: `[rows, columns]`; NaN where a field stands for no
            value.
        rows: int64 `[rows]`, ascending: their numbers, counted over all files in their order, from 0. None with
            `method="estimate"`, for nobody counted them.
        columns: the names of the columns.
        seed: with which they were drawn.
        design_effect: with `method="block"`, float64 `[columns]`: by how much the variance of a column's mean is larger
            than that of as many rows drawn one by one, as this sample tells it; divide the number of rows by it to have
            that of rows which say as much. NaN where it can't be told. None with other methods, for which it is 1.
        offsets: with `method="estimate"`, int64 `[rows]`: the byte of its file at which each row starts; else None.
        files: with `method="estimate"`, int64 `[rows]`, ascending: the number of the file that each row is in, from 0;
            else None.
        estimate: with `method="estimate"`, how many rows all files have, about; else None.
    """

    values: npt.NDArray[Any]
    rows: npt.NDArray[np.int64] | None
    columns: list[str]
    seed: int
    design_effect: npt.NDArray[np.float64] | None = None
    offsets: npt.NDArray[np.int64] | None = None
    files: npt.NDArray[np.int64] | None = None
    estimate: RowEstimate | None = None


@dataclass(frozen=True)
class Asked:
    """What is asked of a sample, whatever the method, checked.

    Attributes:
        rows: how many.
        seed: of the drawing.
        dialect: how files are written.
        columns: those that are named; None for all.
        spec: of each column.
        order: of the array in memory.
        options: of the reader.
        num_threads: None for as many as pay.
        memory_limit: bytes; None for no limit.
    """

    rows: int
    seed: int
    dialect: Dialect
    columns: list[str] | None
    spec: DenseSpec
    order: Literal["C", "F"]
    options: Options
    num_threads: int | None
    memory_limit: int | None

    @classmethod
    def of(
        cls,
        rows: int,
        seed: int,
        dialect: Dialect,
        columns: Any,
        dtype: npt.DTypeLike,
        order: Any,
        options: Options,
    ) -> Asked:
        """Checks the rest of what users give.

        Raises:
            TypeError: if an argument is of the wrong type.
            ValueError: if one is out of range.
        """
        if order not in ("C", "F"):
            raise ValueError(f'order is "C" or "F", not {order!r}')
        element = DenseSpec((), dtype)
        if element.dtype in ("string", "bytes"):
            raise ValueError(f"dtype is that of numbers, not {element.dtype}: sample() draws columns of any type")
        spec = DenseSpec((), dtype, fill=math.nan) if element.dtype.startswith("float") else element
        wanted = None if columns is None else names("columns", columns)
        if wanted is not None and not wanted:
            raise ValueError("columns is empty: name at least one")
        running = Settings(read_csv, 1, options).running
        return cls(rows, seed, dialect, wanted, spec, order, options, running.num_threads, running.memory_limit)

    @property
    def features(self) -> Features | None:
        """Those of the columns that are named; None if none are."""
        return None if self.columns is None else self._features(self.columns)

    def _features(self, columns: list[str]) -> Features:
        return Features(dict.fromkeys(columns, self.spec))

    def typed(self, data: CsvData) -> tuple[CsvData, list[str]]:
        """The data set with the columns of the sample, and their names. If none are named, it was opened with all.

        Raises:
            SchemaError: if one of all isn't of numbers.
        """
        if self.columns is not None:
            return data, self.columns
        wanted = _numbers(data.features)
        return data.with_features(self._features(wanted)), wanted

    def reader(self, data: CsvData) -> Reader:
        """A reader with batches of about as much text as is read at a time."""
        batch = min(max(self.rows * _TEXT // max(data.text_bytes, 1), _LEAST_BATCH), _MOST_BATCH)
        return Settings(read_csv, batch, self.options).reader(data)

    def array(self, drawn: Reader, wanted: list[str], rows: SupportsIndex) -> npt.NDArray[Any]:
        """All that a reader yields."""
        values = np.empty((rows, len(wanted)), self.spec.dtype, order=self.order)
        at = 0
        with drawn:
            for batch in drawn:
                end = at + len(batch[wanted[0]])
                for number, name in enumerate(wanted):
                    values[at:end, number] = batch[name]
                at = end
        return values


def _numbers(features: Features) -> list[str]:
    """The names of columns that are numbers, all of them."""
    others = [name for name, spec in features.items() if spec.dtype == "string" or spec.dtype.startswith("datetime")]
    if others:
        named = ", ".join(map(repr, others[:5])) + (", ..." if len(others) > 5 else "")
        numbers = [name for name in features if name not in others]
        raise SchemaError(
            f"an array of numbers has no room for the columns {named}: name those that are numbers, columns={numbers}",
            feature=others[0],
        )
    return list(features)


class BlockVariance:
    """Sums over units, for the variance of the ratio of units' sums to their rows.

    The source is W. G. Cochran, Sampling Techniques, 1977, 9A.5. NaN isn't counted.

    Args:
        columns: how many.
    """

    def __init__(self, columns: int) -> None:
        # Columns are counted from about their mean on, or squares would swallow what differs.
        self._zero: npt.NDArray[np.float64] | None = None
        self._open = -1
        # Of the unit that isn't over: rows and sums.
        self._rows, self._sum = np.zeros(columns), np.zeros(columns)
        # Over units: how many, rows, rows squared, sums, sums squared, rows times sums; over rows: squares.
        self._units, self._n, self._nn = np.zeros(columns), np.zeros(columns), np.zeros(columns)
        self._s, self._ss, self._ns = np.zeros(columns), np.zeros(columns), np.zeros(columns)
        self._squares = np.zeros(columns)

    def add(self, columns: Sequence[npt.NDArray[Any]], units: npt.NDArray[np.int64]) -> None:
        """Adds rows, whose units ascend over all calls."""
        if not len(units):
            return
        table = np.array(columns, np.float64)
        there = np.isfinite(table)
        if self._zero is None:
            with np.errstate(invalid="ignore"):
                counts = there.sum(1)
                self._zero = np.where(counts > 0, np.where(there, table, 0).sum(1) / np.maximum(counts, 1), 0)
        table = np.where(there, table - self._zero[:, None], 0)
        self._squares += (table**2).sum(1)
        starts = np.flatnonzero(np.diff(units, prepend=-1))
        rows = np.add.reduceat(there.astype(np.float64), starts, axis=1)
        sums = np.add.reduceat(table, starts, axis=1)
        if units[0] == self._open:
            rows[:, 0] += self._rows
            sums[:, 0] += self._sum
        else:
            self._close(self._rows[:, None], self._sum[:, None])
        self._close(rows[:, :-1], sums[:, :-1])
        self._rows, self._sum, self._open = rows[:, -1], sums[:, -1], int(units[-1])

    def design_effect(self) -> npt.NDArray[np.float64]:
        """By how much each mean varies more than that of as many rows drawn one by one; NaN if it isn't told."""
        self._close(self._rows[:, None], self._sum[:, None])
        self._rows, self._sum, self._open = np.zeros_like(self._n), np.zeros_like(self._n), -1
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self._s / self._n
            variance = (self._squares - self._n * mean**2) / (self._n - 1)
            between = self._ss - 2 * mean * self._ns + mean**2 * self._nn
            effect = between * self._units / (self._units - 1) / self._n / variance
        told: npt.NDArray[np.float64] = np.where((self._units > 1) & (variance > 0), effect, np.nan)
        return told

    def _close(self, rows: npt.NDArray[np.float64], sums: npt.NDArray[np.float64]) -> None:
        """Adds units that are over."""
        self._units += (rows > 0).sum(1)
        self._n += rows.sum(1)
        self._nn += (rows**2).sum(1)
        self._s += sums.sum(1)
        self._ss += (sums**2).sum(1)
        self._ns += (rows * sums).sum(1)


def draw_rows(
    files: Sequence[str | Contents],
    asked: Asked,
    index_cache: IndexCache,
    *,
    replace: bool,
    part: SupportsIndex,
    stratify: str | npt.ArrayLike | None,
    weights: str | npt.ArrayLike | None,
) -> CsvSample:
    """Draws row by row."""
    data, wanted = asked.typed(CsvData(files, asked.dialect, asked.features, None, index_cache))
    drawn = sample(
        asked.reader(data),
        asked.rows,
        replace=replace,
        seed=asked.seed,
        part=part,
        stratify=_column(data, stratify, asked),
        weights=_column(data, weights, asked, "float64"),
    )
    values = asked.array(drawn, wanted, drawn.num_rows)
    return CsvSample(values, rows_of_sample(drawn), wanted, asked.seed)


def draw_blocks(
    files: Sequence[str | Contents], asked: Asked, index_cache: IndexCache, *, part: SupportsIndex
) -> CsvSample:
    """Draws whole stretches."""
    data, wanted = asked.typed(CsvData(files, asked.dialect, asked.features, None, index_cache))
    numbers, units = blocks(data.handle.unit_rows(), asked.rows, asked.seed, within("part", part, 0, 2**20))
    drawn = take(asked.reader(data), numbers)
    values = asked.array(drawn, wanted, drawn.num_rows)
    variance = BlockVariance(len(wanted))
    # Piece by piece: it makes float64 of them.
    for start in range(0, len(values), _MOST_BATCH):
        piece = slice(start, start + _MOST_BATCH)
        variance.add(list(values[piece].T), units[piece])
    return CsvSample(values, rows_of_sample(drawn), wanted, asked.seed, variance.design_effect())


def of_numbers(
    source: Source, columns: Sequence[str] | None, dtype: npt.DTypeLike, index_cache: IndexCache, options: Options
) -> tuple[Reader, list[str]]:
    """A reader of files as columns of numbers, and their names.

    Raises:
        SchemaError: if a column isn't there, or `columns` is None and one isn't of numbers.
        ValueError: if no column is named.
    """
    asked = Asked.of(1, 0, DEFAULT_DIALECT, columns, dtype, "C", options)
    files = opened(source, SUFFIXES)
    data, wanted = asked.typed(CsvData(files, asked.dialect, asked.features, None, index_cache))
    return asked.reader(data), wanted


def _column(data: CsvData, given: str | npt.ArrayLike | None, asked: Asked, dtype: str = "string") -> Any:
    """What a column has in all rows, if it is one that is named."""
    if not isinstance(given, str):
        return given
    only = data.with_features(Features({given: DenseSpec((), dtype)}))
    with Settings(read_csv, _MOST_BATCH, {"num_threads": asked.num_threads}).reader(only) as reader:
        return np.concatenate([np.array(batch[given]) for batch in reader])


def draw_at_bytes(files: Sequence[str | Contents], asked: Asked, *, replace: bool) -> CsvSample:
    """Draws the rows in which random bytes lie, each row with the same probability.

    Raises:
        ValueError: if there are fewer rows, or hardly more.
        FastpipeError: as `read_csv`; a LimitError if quotes around a byte can be read in two ways.
    """
    handle, numbers, offsets, (rows, low, high) = estimate_csv(
        lowered(files),
        asked.dialect.lowered(),
        asked.rows,
        asked.seed,
        replace=replace,
        num_threads=asked.num_threads,
    )
    data, wanted = asked.typed(CsvData.of_rows(handle, asked.dialect, asked.features))
    values = asked.array(asked.reader(data), wanted, asked.rows)
    # As many there are for certain.
    least = len(np.unique(np.stack([numbers, offsets]), axis=1).T)
    found = RowEstimate(
        max(round(rows), least), max(math.floor(round(low, 3)), least), max(math.ceil(round(high, 3)), least)
    )
    return CsvSample(values, None, wanted, asked.seed, offsets=offsets, files=numbers, estimate=found)


# Bytes that are asked of a file or pipe at once: signals are looked at in between.
_PIECE = 1 << 20


def draw_from_stream(source: Any, asked: Asked) -> CsvSample:
    """Draws rows by a reservoir, while the stream passes.

    Raises:
        ValueError: if there are fewer rows.
        FastpipeError: as `read_csv`; a LimitError if rows take more than `memory_limit`.
    """
    name, stream = _opened(source)
    features = Features({}) if asked.features is None else asked.features
    reservoir = CsvReservoir(
        name,
        asked.dialect.lowered(),
        features._lower(),
        asked.rows,
        asked.seed,
        asked.memory_limit,
    )
    with closing(stream):
        for piece in stream:
            reservoir.push(piece)
    there = reservoir.end()
    if there < asked.rows:
        raise ValueError(f"rows={asked.rows} are more than the {there} rows of the stream")
    handle, rows = reservoir.take()
    data, wanted = asked.typed(CsvData.of_rows(handle, asked.dialect, asked.features))
    return CsvSample(asked.array(asked.reader(data), wanted, asked.rows), rows, wanted, asked.seed)


def _opened(source: Any) -> tuple[str, Generator[bytes]]:
    """What a stream is called in errors, and its bytes."""
    if isinstance(source, str | os.PathLike):
        path = os.path.expanduser(os.fspath(source))
        return path, _of_path(path)
    name = f"<{type(source).__name__}>"
    if isinstance(source, bytes | bytearray | memoryview):
        return name, _of_iterable([source])
    if callable(getattr(source, "read", None)):
        own = getattr(source, "name", None)
        # Pipes have their descriptor for a name.
        name = own if isinstance(own, str) and own else name
        return name, pieces(cast("ReadableFile", source), name)
    if not isinstance(source, Iterable):
        raise TypeError(
            'with method="stream", source is a path, a binary file object, bytes or an iterable of bytes, not '
            f"{type(source).__name__}"
        )
    return name, _of_iterable(source)


def _of_path(path: str) -> Generator[bytes]:
    try:
        # Without a buffer a pipe gives what it has.
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                yield piece
    except FileNotFoundError as error:
        reason = f'{error.strerror}: with method="stream", source is the path of one file or pipe'
        raise in_file(MissingFileError, path, reason) from error
    except OSError as error:
        raise in_file(StorageError, path, str(error.strerror)) from error


def _of_iterable(source: Iterable[Any]) -> Generator[bytes]:
    for piece in source:
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise TypeError(f'with method="stream", an iterable yields pieces of bytes, not {shown(piece)}')
        yield bytes(piece)


def sample_csv(
    source: Source | Iterable[bytes],
    rows: SupportsIndex,
    *,
    seed: SupportsIndex | None = None,
    method: Literal["exact", "block", "estimate", "stream"] = "exact",
    replace: bool = False,
    part: SupportsIndex = 0,
    stratify: str | npt.ArrayLike | None = None,
    weights: str | npt.ArrayLike | None = None,
    columns: Sequence[str] | None = None,
    dtype: npt.DTypeLike = "float32",
    order: Literal["C", "F"] = "C",
    delimiter: str = ",",
    quote: str | None = '"',
    header: Header = True,
    comment: str | None = None,
    decimal: str = ".",
    null_values: Sequence[str] = DEFAULT_NULLS,
    on_ragged: OnRagged = "error",
    index_cache: IndexCache = None,
    num_threads: SupportsIndex | Literal["auto"] | None = "auto",
    memory_limit: SupportsIndex | str | None = None,
    progress: bool = False,
) -> CsvSample:
    """Draws a uniform random sample of the rows of CSV files into one array.

    Every row is equally likely, however long it is and whatever stands in front of it, by each method. Which rows are
    drawn is a pure function of the seed and the files.

    Args:
        source: as in `read_csv`. With `method="stream"` one path, of a pipe too (`/dev/stdin`), a binary file object,
            bytes, or an iterable of bytes.
        rows: how many to draw, up to 2^31; without `replace`, at most as many as there are.
        seed: 0 to 2^64 - 1; one is drawn by default, and shown by `CsvSample.seed`.
        method: "exact" draws row by row: files are scanned for their rows first, at the speed of memory, or their index
            is at hand (`index_cache`), and then only stretches of 64 KiB of which rows were drawn are read.

            "block" arranges stretches of 64 KiB on a circle at random and takes the rows that follow a random row, so
            it reads no more than it returns: for slow disks. Neighbors are often similar, so such a sample may say much
            less than one of as many single rows: `CsvSample.design_effect` says how much.

            "estimate" scans nothing: a first look at local files of any size. It draws random bytes, and takes the row
            that a byte lies in if the byte is among the row's first `c`, where each row has at least `c`: long rows
            aren't drawn more often. `CsvSample.estimate` says how many rows there are, about. It is for few rows of
            many. Rows can't be told where quotes can be read in two ways for 16 MiB, which is a `LimitError`; the text
            of a field that looks like rows of this file for longer than 16 KiB is taken for such.

            "stream" passes once over what can't be read again, and keeps a reservoir of rows (Algorithm L; K.-H. Li,
            Reservoir-Sampling Algorithms of Time Complexity O(n(1+log(N/n))), 1994), of which the rows depend on the
            seed and on how many rows there are. It holds the texts of the rows that it keeps.
        replace: whether a row may be drawn several times (a bootstrap); not with "block" and "stream".
        part: with "exact" and "block", samples of the same seed and number of rows with different parts have no row in
            common, as in `sample`.
        stratify: with "exact", draws from each group of rows with equal values in proportion to its rows, rounded up or
            down at random by the seed, as `sample`: the name of a column, whose text is read of all rows first, or an
            array with a value for each row.
        weights: with "exact", draws rows in proportion to these: the name of a column, or an array.
        columns: those to take, in this order; None for all, which must be numbers or truth values then.
        dtype: of the array: float32, or any other number. A `ValueRangeError` names the column if it has an integer
            that the dtype doesn't have, such as 16,777,217 for float32, or a finite number that is beyond it. Decimal
            fractions are rounded.
        order: "C" for row after row in memory, "F" for column after column, which XGBoost and cuML like.
        delimiter: as in `read_csv`, like the arguments that follow.
        quote: as in `read_csv`.
        header: as in `read_csv`.
        comment: as in `read_csv`.
        decimal: as in `read_csv`.
        null_values: as in `read_csv`. They become NaN; for an integer dtype they are a `NullValueError`.
        on_ragged: as in `read_csv`; "error" with `method="estimate"`.
        index_cache: as in `read_csv`; None with "estimate" and "stream".
        num_threads: as in `read_csv`.
        memory_limit: as in `read_csv`; the array itself comes on top. With "stream" it bounds the rows that are kept as
            well, at twice their texts: more are a `LimitError`.
        progress: as in `read_csv`.

    Returns:
        The sample.

    Raises:
        SchemaError: if a column isn't there, or `columns` is None and one isn't of numbers.
        ValueRangeError: if a field isn't a number, or one that the dtype would round to another integer or to infinity.
        UnsupportedError: for a compressed file that can only be read in sequence, and as `read_csv`.
        ValueError: if there are too few rows, or an argument is out of range.
        FastpipeError: as `read_csv`.

    Example:
        >>> import fastpipe
        >>> drawn = fastpipe.sample_csv("rides.csv", rows=500, columns=["distance"], seed=7)
        >>> drawn.values.shape, drawn.values.dtype, len(set(drawn.rows.tolist()))
        ((500, 1), dtype('float32'), 500)
    """
    chosen = seed_of(seed)
    dialect = LosslessDialect.of(delimiter, quote, header, comment, decimal, null_values, on_ragged)
    options: Options = {"num_threads": num_threads, "memory_limit": memory_limit, "progress": progress}
    count = within("rows", rows, 1, LARGEST_SAMPLE)
    asked = Asked.of(count, chosen, dialect, columns, dtype, order, options)
    replaced, parts = flag("replace", replace), within("part", part, 0, 2**20)
    given = {
        "replace": replaced,
        "part": parts != 0,
        "stratify": stratify is not None,
        "weights": weights is not None,
        "index_cache": index_cache not in (None, False),
        "on_ragged": on_ragged != "error",
    }
    if method == "exact":
        return draw_rows(
            opened(source, SUFFIXES),
            asked,
            index_cache,
            replace=replaced,
            part=parts,
            stratify=stratify,
            weights=weights,
        )
    if method == "block":
        _refuse("block", "draws stretches alike", given, "replace", "stratify", "weights")
        return draw_blocks(opened(source, SUFFIXES), asked, index_cache, part=parts)
    if method == "estimate":
        unknown = ("part", "stratify", "weights", "index_cache", "on_ragged")
        _refuse("estimate", "doesn't look for all rows", given, *unknown)
        return draw_at_bytes(opened(source, SUFFIXES), asked, replace=replaced)
    if method == "stream":
        _refuse("stream", "passes each row once", given, "replace", "part", "stratify", "weights", "index_cache")
        return draw_from_stream(source, asked)
    raise ValueError(f'method is "exact", "block", "estimate" or "stream", not {shown(method)}')


def _refuse(method: str, why: str, given: dict[str, bool], *unknown: str) -> None:
    """Refuses arguments that a method doesn't know."""
    wrong = [name for name in unknown if given[name]]
    if wrong:
        raise ValueError(f'method="{method}" {why}: leave out {" and ".join(wrong)}, or draw with method="exact"')
