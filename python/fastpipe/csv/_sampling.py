"""Draws random samples of CSV files into one array, by several methods."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag, shown, within
from fastpipe._fastpipe import CsvReservoir, RemoteFile, estimate_csv
from fastpipe._files._in_memory_files import File, ReadableFile, Source, lowered, opened, pieces
from fastpipe._files._index_cache import IndexCache
from fastpipe._files._remote_files import BlockCache, StorageOptions, expander, is_remote
from fastpipe._reader.options import Options, Settings
from fastpipe._reader.ordering import seed_of
from fastpipe._reader.sampling import LARGEST_SAMPLE, blocks, rows_of_sample, sample, take
from fastpipe.csv._drawing import MOST_BATCH, Asked, BlockVariance, CsvSample, RowEstimate
from fastpipe.csv._line_buffer import LEAST_SHARE, draw_lines, share_of
from fastpipe.csv._reading import (
    DEFAULT_NULLS,
    SUFFIXES,
    CsvData,
    Header,
    LosslessDialect,
    OnRagged,
    read_csv,
    report_ragged,
)
from fastpipe.errors import MissingFileError, StorageError, UnsupportedError, in_file, memory_errors
from fastpipe.specs import DenseSpec, Features, Spec


def draw_rows(
    files: Sequence[File],
    asked: Asked,
    index_cache: IndexCache,
    *,
    replace: bool,
    part: int,
    stratify: str | npt.ArrayLike | None,
    weights: str | npt.ArrayLike | None,
) -> CsvSample:
    """Draws rows one by one."""
    asked, data, wanted = asked.opened(files, index_cache)
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


def draw_blocks(files: Sequence[File], asked: Asked, index_cache: IndexCache, *, part: int) -> CsvSample:
    """Draws whole chunks."""
    asked, data, wanted = asked.opened(files, index_cache)
    numbers, units = blocks(data.handle.unit_rows(), asked.rows, asked.seed, within("part", part, 0, 2**20))
    drawn = take(asked.reader(data), numbers)
    values = asked.array(drawn, wanted, drawn.num_rows)
    variance = BlockVariance(len(wanted))
    # Slice by slice, because `add` converts the values to float64.
    for start in range(0, len(values), MOST_BATCH):
        piece = slice(start, start + MOST_BATCH)
        variance.add(list(values[piece].T), units[piece])
    return CsvSample(
        values=values,
        rows=rows_of_sample(drawn),
        columns=wanted,
        seed=asked.seed,
        design_effect=variance.design_effect(),
    )


def _column(data: CsvData, given: str | npt.ArrayLike | None, asked: Asked, dtype: str = "string") -> Any:
    """Returns the values of a named column in all rows. Other arguments are returned unchanged."""
    if not isinstance(given, str):
        return given
    only = data.with_features(Features({given: DenseSpec((), dtype)}))
    with Settings(read_csv, MOST_BATCH, {"num_threads": asked.num_threads}).reader(only) as reader:
        return np.concatenate([np.array(batch[given]) for batch in reader])


def draw_at_bytes(files: Sequence[File], asked: Asked, *, replace: bool) -> CsvSample:
    """Draws the rows that contain random bytes, such that each row has the same probability.

    Raises:
        ValueError: If the files have fewer rows than requested, or only slightly more.
        FastpipeError: If the files can't be read (see `read_csv`), or the quotes around a byte are ambiguous
            (`LimitError`).
        UnsupportedError: If a file is remote.
    """
    if remote := [str(file) for file in files if isinstance(file, RemoteFile)]:
        reason = (
            'method="estimate" would send a request for each draw: use method="buffered", which reads larger ranges'
        )
        raise in_file(UnsupportedError, remote[0], reason)
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
    if isinstance(source, str) and is_remote(source):
        reason = (
            'method="stream" reads no URLs: use method="exact" or "buffered", or pass a file object such as fsspec\'s'
        )
        raise in_file(UnsupportedError, source, reason)
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


@memory_errors("draw rows")
def sample_csv(
    source: Source | Iterable[bytes],
    rows: int | None = None,
    *,
    fraction: float | None = None,
    seed: int | None = None,
    method: Literal["exact", "block", "buffered", "estimate", "stream"] = "exact",
    share: float | None = None,
    replace: bool = False,
    part: int = 0,
    stratify: str | npt.ArrayLike | None = None,
    weights: str | npt.ArrayLike | None = None,
    columns: str | Sequence[str] | None = None,
    dtype: npt.DTypeLike = "float32",
    overrides: Mapping[str, Spec] | None = None,
    order: Literal["C", "F"] = "C",
    delimiter: str = ",",
    quote: str | None = '"',
    header: Header = True,
    comment: str | None = None,
    decimal: str = ".",
    null_values: Sequence[str] = DEFAULT_NULLS,
    on_ragged: OnRagged = "error",
    index_cache: IndexCache = None,
    storage_options: StorageOptions = None,
    block_cache: BlockCache = None,
    num_threads: int | Literal["auto"] | None = "auto",
    memory_limit: int | str | None = None,
    progress: bool = False,
) -> CsvSample:
    """Draws a uniform random sample of the rows of CSV files into one array.

    With each method, all rows are equally likely, regardless of their length and the rows before them. The drawn rows
    are a pure function of the seed and the files.

    Args:
        source: Paths, globs, directories, URLs of object stores and web servers (except with "estimate" and "stream"),
            contiguous buffers with the bytes of a file, or binary file objects. Directories and globs skip names that
            begin with `_` or `.`, and also empty files, with a warning. With `method="stream"`, one path, which may be
            a pipe (`/dev/stdin`), a binary file object, bytes, or an iterable of bytes.
        rows: The number of rows to draw, up to 2^31. Without `replace`, at most the number of rows in the files.
        fraction: Instead of `rows`, the fraction of all rows to draw, above 0 and up to 1. It is rounded to at least
            one row. Only "exact" and "block" know the number of rows.
        seed: Seed of the sample, 0 to 2^64 - 1. By default, a random seed is used, which `CsvSample.seed` returns.
        method: "exact" (the default) draws rows one by one. It first scans the files for rows, at the speed of memory,
            unless an index exists (`index_cache`). Then it reads only the 64 KiB chunks that contain drawn rows.

            "block" arranges the 64 KiB chunks on a circle in random order and takes the rows that follow a random row.
            It reads no more than it returns, which suits slow disks. Neighboring rows are often similar, so such a
            sample may carry much less information: `CsvSample.design_effect` says how much.

            "buffered" doesn't scan: it suits samples of files that are too large to scan. It divides the files into
            cells of up to 256 KiB, reads cells in random order, and takes a random `share` of the rows of each. So it
            reads `1 / share` times as much as it returns. `CsvSample.design_effect` says how much less information the
            rows carry than independently drawn ones, and `CsvSample.estimate` how many rows the files have.
            The ambiguities of "estimate" apply.

            "estimate" doesn't scan either: it gives a first look at local files of any size, and suits few rows of
            many. It draws random byte offsets and accepts an offset only if it falls within the first `c` bytes of a
            row, where no row is shorter than `c`. Long rows are therefore not drawn more often. `CsvSample.estimate` is
            an estimate of the number of rows. If quotes are ambiguous for 16 MiB, row boundaries can't be found and
            `LimitError` is raised. A field whose text looks like rows of this file for more than 16 KiB is mistaken for
            rows.

            "stream" reads data that can't be read twice, in one pass. It keeps a reservoir of rows (Algorithm L; K.-H.
            Li, Reservoir-Sampling Algorithms of Time Complexity O(n(1+log(N/n))), 1994) and holds their text in memory.
            The chosen rows depend on the seed and the number of rows.
        share: With "buffered", the fraction of the rows of a cell to take, 0.001 to 1. A smaller share reads more for
            the same number of rows, but the rows carry more information. By default 0.25 for many rows, and less for
            few rows, so that they come from at least 64 cells.
        replace: Whether a row may be drawn several times (a bootstrap). Defaults to False. Supported by "exact" and
            "estimate".
        part: With "exact" and "block", the index of one of several disjoint samples, 0 to 2^20 - 1. Samples with the
            same seed and number of rows but different parts share no rows. Defaults to 0.
        stratify: With "exact", the groups to draw from: the name of a column, or an array with a value for each row.
            Rows with equal values form a group. Each group contributes in proportion to its size, rounded up or down at
            random. The text of a named column is read for all rows first. Defaults to None.
        weights: With "exact", the relative probability of each row: the name of a column, or an array. Defaults to
            None: all rows are equally likely.
        columns: The columns to read, in this order: a list, or one name as a string. Defaults to None: all columns,
            which must then be numbers, bools, or text that `overrides` reads as numbers.
        dtype: The numeric dtype of the array. Defaults to float32. An integer that the dtype can't represent, such as
            16,777,217 in float32, or a finite number beyond its range raises `ValueRangeError`, which names the column.
            Decimal fractions are rounded. "string" reads all columns as text: the array contains str objects.
        overrides: The specs of some columns, by name: `VocabularySpec` or `HashSpec` to read text as indices, or
            `DenseSpec((), dtype)` of a number. Defaults to None: all columns are numbers.
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
            row. Must be "error" with "buffered" and "estimate".
        index_cache: A directory that keeps the offsets of all rows; True for the user's cache directory. Defaults to
            None: no cache. Must be None with "buffered", "estimate" and "stream".
        storage_options: How to reach the object store of a URL, such as `{"region": "eu-west-1"}`, in the words of
            fsspec or polars. Defaults to None: the environment's credentials and settings.
        block_cache: A folder on a local disk and its size, such as `("/nvme/fastpipe", "500GB")`, which keeps bytes of
            URLs for later samples and other processes. Paths of local files ignore it. Defaults to None: no cache.
        num_threads: The number of threads. Defaults to "auto".
        memory_limit: The maximum memory for reading, in bytes or as text ("512MB"). The array itself is not included.
            With "stream", the limit also applies to the rows in the reservoir, at twice the size of their text. More
            rows raise `LimitError`. Defaults to None: no limit.
        progress: Whether to show a progress bar. Defaults to False.

    Returns:
        The sampled values, with the indices of their rows and how they were drawn.

    Raises:
        SchemaError: If a column does not exist, or `columns` is None and a column isn't numeric, or a spec of
            `overrides` isn't that of numbers.
        ValueRangeError: If a field isn't a number, or the dtype would round it to another integer or to infinity.
        UnsupportedError: If a compressed file can only be read in sequence, the source is not supported by `read_csv`,
            or the method doesn't support URLs.
        ValueError: If the files have too few rows, or an argument is out of range.
        OutOfMemoryError: If the system has too little memory for the array.
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
    if (rows is None) == (fraction is None):
        raise ValueError("pass either rows or fraction")
    count = 0 if rows is None else within("rows", rows, 1, LARGEST_SAMPLE)
    asked = Asked.of(count, chosen, dialect, columns, dtype, order, options, overrides)
    if fraction is not None:
        asked = dataclasses.replace(asked, fraction=_fraction(fraction, method))
    replaced, parts = flag("replace", replace), within("part", part, 0, 2**20)
    given = {
        "replace": replaced,
        "part": parts != 0,
        "stratify": stratify is not None,
        "weights": weights is not None,
        "index_cache": index_cache not in (None, False),
        "on_ragged": on_ragged != "error",
        "share": share is not None,
    }
    expand = expander(storage_options, block_cache)
    if method == "exact":
        _refuse("exact", "draws single rows", given, "share")
        return draw_rows(
            opened(source, SUFFIXES, expand),
            asked,
            index_cache,
            replace=replaced,
            part=parts,
            stratify=stratify,
            weights=weights,
        )
    if method == "block":
        _refuse("block", "draws chunks with equal probability", given, "replace", "stratify", "weights", "share")
        return draw_blocks(opened(source, SUFFIXES, expand), asked, index_cache, part=parts)
    if method == "buffered":
        unknown = ("replace", "part", "stratify", "weights", "index_cache", "on_ragged")
        _refuse("buffered", "doesn't scan all rows", given, *unknown)
        return draw_lines(opened(source, SUFFIXES, expand), asked, share_of(share, LEAST_SHARE))
    if method == "estimate":
        unknown = ("part", "stratify", "weights", "index_cache", "on_ragged", "share")
        _refuse("estimate", "doesn't scan all rows", given, *unknown)
        return draw_at_bytes(opened(source, SUFFIXES, expand), asked, replace=replaced)
    if method == "stream":
        unknown = ("replace", "part", "stratify", "weights", "index_cache", "share")
        _refuse("stream", "reads each row once", given, *unknown)
        return draw_from_stream(source, asked)
    raise ValueError(f'method must be "exact", "block", "buffered", "estimate" or "stream"; got {shown(method)}')


def _fraction(fraction: Any, method: str) -> float:
    if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1; got {shown(fraction)}")
    if method not in ("exact", "block"):
        raise ValueError(f'method="{method}" doesn\'t know the number of rows: pass rows=, or draw with method="exact"')
    return float(fraction)


def _refuse(method: str, why: str, given: dict[str, bool], *unknown: str) -> None:
    """Raises `ValueError` if the user passed arguments that a method doesn't support."""
    wrong = [name for name in unknown if given[name]]
    if wrong:
        raise ValueError(f'method="{method}" {why}: leave out {" and ".join(wrong)}, or draw with method="exact"')
