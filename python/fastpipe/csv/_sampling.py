"""Draws random samples of CSV files into one array, by several methods."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import column_names, flag, shown, within
from fastpipe._fastpipe import CsvReservoir, estimate_csv
from fastpipe._files._in_memory_files import Contents, ReadableFile, Source, lowered, opened, pieces
from fastpipe._files._index_cache import IndexCache
from fastpipe._reader.options import Options, Settings
from fastpipe._reader.ordering import seed_of
from fastpipe._reader.reader import Reader
from fastpipe._reader.sampling import LARGEST_SAMPLE, blocks, rows_of_sample, sample, take
from fastpipe.csv._reading import (
    DEFAULT_DIALECT,
    DEFAULT_NULLS,
    SUFFIXES,
    CsvData,
    Dialect,
    Header,
    LosslessDialect,
    OnRagged,
    read_csv,
    report_ragged,
)
from fastpipe.errors import MissingFileError, SchemaError, StorageError, in_file
from fastpipe.specs import DenseSpec, Features

# Approximate bytes of text in the batches that are read at the same time, and limits of a batch's rows.
_TEXT = 8 << 20
_LEAST_BATCH, _MOST_BATCH = 64, 1 << 16


@dataclass(frozen=True, slots=True)
class RowEstimate:
    """Estimate of the number of rows, derived from random bytes.

    Attributes:
        rows: The estimate, which is unbiased.
        low: Lower end of the confidence interval.
        high: Upper end of the confidence interval.
        confidence: Approximate probability that the interval contains the number of rows: 0.95.
    """

    rows: int
    low: int
    high: int
    confidence: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CsvSample:
    """Sampled rows of CSV files.

    Attributes:
        values: Array `[rows, columns]` of the sampled values. NaN for null.
        rows: int64 `[rows]`, ascending: the indices of the rows, counted over all files in order, from 0. None with
            `method="estimate"`, which doesn't count rows.
        columns: The names of the columns.
        seed: The seed of the sample.
        design_effect: With `method="block"`, float64 `[columns]`: the factor by which the sample inflates the variance
            of each column's mean, compared with the same number of independently drawn rows. Divide the number of rows
            by it to get the effective sample size. NaN if it can't be estimated. With other methods, the factor is 1
            and this is None.
        offsets: With `method="estimate"`, int64 `[rows]`: the byte offset in its file at which each row starts;
            otherwise None.
        files: With `method="estimate"`, int64 `[rows]`, ascending: the index of each row's file, from 0; otherwise
            None.
        estimate: With `method="estimate"`, the estimated number of rows in all files; otherwise None.
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
    """Checked arguments that all methods of sampling share.

    Attributes:
        rows: The number of rows to draw.
        seed: The seed of the sample.
        dialect: The dialect of the files.
        columns: The names of the columns; None for all.
        spec: The spec of each column.
        order: The memory order of the array.
        options: The options of the reader.
        num_threads: The number of threads; None to choose it automatically.
        memory_limit: The limit in bytes; None for no limit.
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
        """Returns the shared arguments after checking them.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range.
        """
        if order not in ("C", "F"):
            raise ValueError(f'order must be "C" or "F"; got {order!r}')
        element = DenseSpec((), dtype)
        if element.dtype in ("string", "bytes"):
            raise ValueError(f"dtype must be numeric; got {element.dtype}. sample() draws columns of any type")
        spec = DenseSpec((), dtype, fill=math.nan) if element.dtype.startswith("float") else element
        wanted = column_names(columns)
        running = Settings(read_csv, 1, options).running
        return cls(rows, seed, dialect, wanted, spec, order, options, running.num_threads, running.memory_limit)

    @property
    def features(self) -> Features | None:
        """The features of the named columns; None if no columns are named."""
        return None if self.columns is None else self._features(self.columns)

    def _features(self, columns: list[str]) -> Features:
        return Features(dict.fromkeys(columns, self.spec))

    def opened(self, files: Sequence[str | Contents], index_cache: IndexCache) -> tuple[CsvData, list[str]]:
        """Returns the dataset of files with the sample's columns, and the names of these columns. Reports skipped rows.

        Raises:
            SchemaError: If no columns are named and a column isn't numeric.
            FastpipeError: If the files can't be read.
        """
        data = CsvData(files, self.dialect, self.features, None, index_cache)
        data.report_skipped()
        return self.typed(data)

    def typed(self, data: CsvData) -> tuple[CsvData, list[str]]:
        """Returns the dataset with the sample's columns, and the names of these columns.

        Raises:
            SchemaError: If no columns are named and a column isn't numeric.
        """
        if self.columns is not None:
            return data, self.columns
        wanted = _numbers(data.features)
        return data.with_features(self._features(wanted)), wanted

    def reader(self, data: CsvData) -> Reader:
        """Returns a reader whose batches contain about as much text as is read at a time."""
        batch = min(max(self.rows * _TEXT // max(data.text_bytes, 1), _LEAST_BATCH), _MOST_BATCH)
        return Settings(read_csv, batch, self.options).reader(data)

    def array(self, drawn: Reader, wanted: list[str], rows: int) -> npt.NDArray[Any]:
        """Returns one array with all rows that a reader yields."""
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
    """Returns the names of all columns, and raises `SchemaError` if a column isn't numeric."""
    others = [name for name, spec in features.items() if spec.dtype == "string" or spec.dtype.startswith("datetime")]
    if others:
        named = ", ".join(map(repr, others[:5])) + (", ..." if len(others) > 5 else "")
        numbers = [name for name in features if name not in others]
        raise SchemaError(
            f"an array of numbers can't hold the columns {named}: name the numeric columns, columns={numbers}",
            feature=others[0],
        )
    return list(features)


class BlockVariance:
    """Accumulates sums over units for the variance of a ratio estimator: the sum of values over the number of rows.

    Source: W. G. Cochran, Sampling Techniques, 1977, 9A.5. NaN isn't counted.

    Args:
        columns: The number of columns.
    """

    def __init__(self, columns: int) -> None:
        # Values are shifted by approximately their column's mean. Otherwise squares would cancel out the differences.
        self._zero: npt.NDArray[np.float64] | None = None
        self._open = -1
        # Rows and sums of the current unit, which may continue in the next call.
        self._rows, self._sum = np.zeros(columns), np.zeros(columns)
        # Sums over units: units, rows, rows squared, sums, sums squared, rows times sums. Sum over rows: squares.
        self._units, self._n, self._nn = np.zeros(columns), np.zeros(columns), np.zeros(columns)
        self._s, self._ss, self._ns = np.zeros(columns), np.zeros(columns), np.zeros(columns)
        self._squares = np.zeros(columns)

    def add(self, columns: Sequence[npt.NDArray[Any]], units: npt.NDArray[np.int64]) -> None:
        """Adds rows. Unit indices must ascend over all calls."""
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
        """Returns the variance of each mean relative to independently drawn rows; NaN if it can't be estimated."""
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
        """Adds complete units."""
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
    part: int,
    stratify: str | npt.ArrayLike | None,
    weights: str | npt.ArrayLike | None,
) -> CsvSample:
    """Draws rows one by one."""
    data, wanted = asked.opened(files, index_cache)
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
    return CsvSample(values=values, rows=rows_of_sample(drawn), columns=wanted, seed=asked.seed)


def draw_blocks(files: Sequence[str | Contents], asked: Asked, index_cache: IndexCache, *, part: int) -> CsvSample:
    """Draws whole chunks."""
    data, wanted = asked.opened(files, index_cache)
    numbers, units = blocks(data.handle.unit_rows(), asked.rows, asked.seed, within("part", part, 0, 2**20))
    drawn = take(asked.reader(data), numbers)
    values = asked.array(drawn, wanted, drawn.num_rows)
    variance = BlockVariance(len(wanted))
    # Slice by slice, because `add` converts the values to float64.
    for start in range(0, len(values), _MOST_BATCH):
        piece = slice(start, start + _MOST_BATCH)
        variance.add(list(values[piece].T), units[piece])
    return CsvSample(
        values=values,
        rows=rows_of_sample(drawn),
        columns=wanted,
        seed=asked.seed,
        design_effect=variance.design_effect(),
    )


def of_numbers(
    source: Source, columns: Any, dtype: npt.DTypeLike, index_cache: IndexCache, options: Options
) -> tuple[Reader, list[str]]:
    """Returns a reader of files as numeric columns, and the names of the columns.

    Raises:
        SchemaError: If a column does not exist, or `columns` is None and a column isn't numeric.
        ValueError: If `columns` is empty.
    """
    asked = Asked.of(1, 0, DEFAULT_DIALECT, columns, dtype, "C", options)
    files = opened(source, SUFFIXES)
    data, wanted = asked.opened(files, index_cache)
    return asked.reader(data), wanted


def _column(data: CsvData, given: str | npt.ArrayLike | None, asked: Asked, dtype: str = "string") -> Any:
    """Returns the values of a named column in all rows. Other arguments are returned unchanged."""
    if not isinstance(given, str):
        return given
    only = data.with_features(Features({given: DenseSpec((), dtype)}))
    with Settings(read_csv, _MOST_BATCH, {"num_threads": asked.num_threads}).reader(only) as reader:
        return np.concatenate([np.array(batch[given]) for batch in reader])


def draw_at_bytes(files: Sequence[str | Contents], asked: Asked, *, replace: bool) -> CsvSample:
    """Draws the rows that contain random bytes, such that each row has the same probability.

    Raises:
        ValueError: If the files have fewer rows than requested, or only slightly more.
        FastpipeError: If the files can't be read (see `read_csv`), or the quotes around a byte are ambiguous
            (`LimitError`).
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
    # The number of distinct rows is a certain lower bound.
    least = len(np.unique(np.stack([numbers, offsets]), axis=1).T)
    found = RowEstimate(
        max(round(rows), least), max(math.floor(round(low, 3)), least), max(math.ceil(round(high, 3)), least)
    )
    return CsvSample(
        values=values, rows=None, columns=wanted, seed=asked.seed, offsets=offsets, files=numbers, estimate=found
    )


# Bytes per read of a file or pipe. Signals are handled between reads.
_PIECE = 1 << 20


def draw_from_stream(source: Any, asked: Asked) -> CsvSample:
    """Draws rows from a stream with a reservoir.

    Raises:
        ValueError: If the stream has fewer rows than requested.
        FastpipeError: If the stream can't be read (see `read_csv`), or its rows need more than `memory_limit`
            (`LimitError`).
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
    there, skipped = reservoir.end()
    report_ragged(skipped, there)
    if there < asked.rows:
        raise ValueError(f"rows={asked.rows} exceeds the {there} rows of the stream")
    handle, rows = reservoir.take()
    data, wanted = asked.typed(CsvData.of_rows(handle, asked.dialect, asked.features))
    values = asked.array(asked.reader(data), wanted, asked.rows)
    return CsvSample(values=values, rows=rows, columns=wanted, seed=asked.seed)


def _opened(source: Any) -> tuple[str, Generator[bytes]]:
    """Returns the name of a stream in error messages, and its bytes."""
    if isinstance(source, str | os.PathLike):
        path = os.path.expanduser(os.fspath(source))
        return path, _of_path(path)
    name = f"<{type(source).__name__}>"
    if isinstance(source, bytes | bytearray | memoryview):
        return name, _of_iterable([source])
    if callable(getattr(source, "read", None)):
        own = getattr(source, "name", None)
        # The name of a pipe is its file descriptor.
        name = own if isinstance(own, str) and own else name
        return name, pieces(cast("ReadableFile", source), name)
    if not isinstance(source, Iterable):
        raise TypeError(
            'with method="stream", source must be a path, a binary file object, bytes or an iterable of bytes; got '
            f"{type(source).__name__}"
        )
    return name, _of_iterable(source)


def _of_path(path: str) -> Generator[bytes]:
    try:
        # Without a buffer, a read from a pipe returns the available bytes.
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                yield piece
    except FileNotFoundError as error:
        reason = f'{error.strerror}: with method="stream", source must be the path of one file or pipe'
        raise in_file(MissingFileError, path, reason) from error
    except OSError as error:
        raise in_file(StorageError, path, str(error.strerror)) from error


def _of_iterable(source: Iterable[Any]) -> Generator[bytes]:
    for piece in source:
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise TypeError(f'with method="stream", an iterable must yield bytes; got {shown(piece)}')
        yield bytes(piece)


def sample_csv(
    source: Source | Iterable[bytes],
    rows: int,
    *,
    seed: int | None = None,
    method: Literal["exact", "block", "estimate", "stream"] = "exact",
    replace: bool = False,
    part: int = 0,
    stratify: str | npt.ArrayLike | None = None,
    weights: str | npt.ArrayLike | None = None,
    columns: str | Sequence[str] | None = None,
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
    num_threads: int | Literal["auto"] | None = "auto",
    memory_limit: int | str | None = None,
    progress: bool = False,
) -> CsvSample:
    """Draws a uniform random sample of the rows of CSV files into one array.

    With each method, all rows are equally likely, regardless of their length and the rows before them. The drawn rows
    are a pure function of the seed and the files.

    Args:
        source: Paths, globs, directories, contiguous buffers with the bytes of a file, or binary file objects.
            Directories and globs skip names that begin with `_` or `.`, and also empty files, with a warning. With
            `method="stream"`, one path, which may be a pipe (`/dev/stdin`), a binary file object, bytes, or an iterable
            of bytes.
        rows: The number of rows to draw, up to 2^31. Without `replace`, at most the number of rows in the files.
        seed: Seed of the sample, 0 to 2^64 - 1. By default, a random seed is used, which `CsvSample.seed` returns.
        method: "exact" (the default) draws rows one by one. It first scans the files for rows, at the speed of memory,
            unless an index exists (`index_cache`). Then it reads only the 64 KiB chunks that contain drawn rows.

            "block" arranges the 64 KiB chunks on a circle in random order and takes the rows that follow a random row.
            It reads no more than it returns, which suits slow disks. Neighboring rows are often similar, so such a
            sample may carry much less information: `CsvSample.design_effect` says how much.

            "estimate" doesn't scan: it gives a first look at local files of any size, and suits few rows of many. It
            draws random byte offsets and accepts an offset only if it falls within the first `c` bytes of a row, where
            no row is shorter than `c`. Long rows are therefore not drawn more often. `CsvSample.estimate` is an
            estimate of the number of rows. If quotes are ambiguous for 16 MiB, row boundaries can't be found and
            `LimitError` is raised. A field whose text looks like rows of this file for more than 16 KiB is mistaken for
            rows.

            "stream" reads data that can't be read twice, in one pass. It keeps a reservoir of rows (Algorithm L; K.-H.
            Li, Reservoir-Sampling Algorithms of Time Complexity O(n(1+log(N/n))), 1994) and holds their text in memory.
            The chosen rows depend on the seed and the number of rows.
        replace: Whether a row may be drawn several times (a bootstrap). Defaults to False. Not supported by "block" and
            "stream".
        part: With "exact" and "block", the index of one of several disjoint samples, 0 to 2^20 - 1. Samples with the
            same seed and number of rows but different parts share no rows. Defaults to 0.
        stratify: With "exact", the groups to draw from: the name of a column, or an array with a value for each row.
            Rows with equal values form a group. Each group contributes in proportion to its size, rounded up or down at
            random. The text of a named column is read for all rows first. Defaults to None.
        weights: With "exact", the relative probability of each row: the name of a column, or an array. Defaults to
            None: all rows are equally likely.
        columns: The columns to read, in this order: a list, or one name as a string. Defaults to None: all columns,
            which must then be numbers or bools.
        dtype: The numeric dtype of the array. Defaults to float32. An integer that the dtype can't represent, such as
            16,777,217 in float32, or a finite number beyond its range raises `ValueRangeError`, which names the column.
            Decimal fractions are rounded.
        order: "C" (the default) stores rows contiguously in memory; "F" stores columns contiguously, as XGBoost and
            cuML prefer.
        delimiter: The ASCII character between fields. Defaults to ",".
        quote: The ASCII character that quotes fields. None disables quoting. Defaults to '"'.
        header: True (the default) if the first row names the columns; False, or the names of the columns, for files
            without a header.
        comment: The ASCII character that begins comment lines. Defaults to None: there are no comments.
        decimal: The ASCII character before the decimals of a number. Defaults to ".".
        null_values: The fields that are read as NaN. With an integer dtype, they raise `NullValueError`.
        on_ragged: "error" (the default) raises an error for a row with too many or too few fields; "skip" ignores the
            row. Must be "error" with `method="estimate"`.
        index_cache: A directory that keeps the offsets of all rows; True for the user's cache directory. Defaults to
            None: no cache. Must be None with "estimate" and "stream".
        num_threads: The number of threads. Defaults to "auto".
        memory_limit: The maximum memory for reading, in bytes or as text ("512MB"). The array itself is not included.
            With "stream", the limit also applies to the rows in the reservoir, at twice the size of their text. More
            rows raise `LimitError`. Defaults to None: no limit.
        progress: Whether to show a progress bar. Defaults to False.

    Returns:
        The sampled values, with the indices of their rows and how they were drawn.

    Raises:
        SchemaError: If a column does not exist, or `columns` is None and a column isn't numeric.
        ValueRangeError: If a field isn't a number, or the dtype would round it to another integer or to infinity.
        UnsupportedError: If a compressed file can only be read in sequence, or the source is not supported by
            `read_csv`.
        ValueError: If the files have too few rows, or an argument is out of range.
        FastpipeError: If the files can't be read; `read_csv` lists the errors.

    Example:
        >>> import fastpipe
        >>> drawn = fastpipe.csv.sample_csv("rides.csv", rows=500, columns=["distance"], seed=7)
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
        _refuse("block", "draws chunks with equal probability", given, "replace", "stratify", "weights")
        return draw_blocks(opened(source, SUFFIXES), asked, index_cache, part=parts)
    if method == "estimate":
        unknown = ("part", "stratify", "weights", "index_cache", "on_ragged")
        _refuse("estimate", "doesn't scan all rows", given, *unknown)
        return draw_at_bytes(opened(source, SUFFIXES), asked, replace=replaced)
    if method == "stream":
        _refuse("stream", "reads each row once", given, "replace", "part", "stratify", "weights", "index_cache")
        return draw_from_stream(source, asked)
    raise ValueError(f'method must be "exact", "block", "estimate" or "stream"; got {shown(method)}')


def _refuse(method: str, why: str, given: dict[str, bool], *unknown: str) -> None:
    """Raises `ValueError` if the user passed arguments that a method doesn't support."""
    wrong = [name for name in unknown if given[name]]
    if wrong:
        raise ValueError(f'method="{method}" {why}: leave out {" and ".join(wrong)}, or draw with method="exact"')
