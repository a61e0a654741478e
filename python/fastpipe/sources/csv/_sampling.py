"""Random samples of CSV files as one array: which method draws them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Literal, SupportsIndex

import numpy.typing as npt

from fastpipe._arguments import flag, shown
from fastpipe._reader.options import Options
from fastpipe._reader.ordering import within
from fastpipe._reader.sampling import LARGEST_SAMPLE
from fastpipe.sources.csv._data import SUFFIXES
from fastpipe.sources.csv._dialect import DEFAULT_NULLS, Header, LosslessDialect, OnRagged
from fastpipe.sources.csv._estimate import draw_at_bytes
from fastpipe.sources.csv._sample import Asked, CsvSample
from fastpipe.sources.csv._scanned import draw_blocks, draw_rows
from fastpipe.sources.csv._stream import draw_from_stream
from fastpipe.sources.files._contents import Source, opened
from fastpipe.sources.files._index_cache import IndexCache

__all__ = ["sample_csv"]


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
    chosen = secrets.randbits(48) if seed is None else within("seed", seed, 0, 2**64 - 1)
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
