"""Random samples of CSV files as one array."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import names, shown
from fastpipe._contents import Source, opened
from fastpipe._draws import blocks, design_effect
from fastpipe._index_cache import IndexCache
from fastpipe._options import Options, Settings
from fastpipe._ordering import within
from fastpipe._reader_samples import LARGEST_SAMPLE, rows_of_sample, sample, take
from fastpipe.csv._data import SUFFIXES, CsvData
from fastpipe.csv._dialect import DEFAULT_NULLS, Dialect, Header, OnRagged
from fastpipe.csv._reading import read_csv
from fastpipe.errors import SchemaError
from fastpipe.specs import DenseSpec, Features

__all__ = ["CsvSample", "sample_csv"]

# Text that the batches which are made at the same time lie in, about, and what a batch has of rows.
_TEXT = 8 << 20
_LEAST_BATCH, _MOST_BATCH = 64, 1 << 16


class CsvSample(NamedTuple):
    """Some rows of CSV files.

    Attributes:
        values: one row for each, one column for each of `columns`: `[rows, columns]`; NaN where a field stands for no
            value.
        rows: int64 `[rows]`, ascending: their numbers, counted over all files in their order, from 0.
        columns: the names of the columns.
        seed: with which they were drawn.
        design_effect: with `method="block"`, float64 `[columns]`: by how much the variance of a column's mean is larger
            than that of as many rows drawn one by one, as this sample tells it; divide the number of rows by it to have
            that of rows which say as much. NaN where it can't be told. None with `method="exact"`, for which it is 1.
    """

    values: npt.NDArray[Any]
    rows: npt.NDArray[np.int64]
    columns: list[str]
    seed: int
    design_effect: npt.NDArray[np.float64] | None = None


def sample_csv(
    source: Source,
    rows: SupportsIndex,
    *,
    seed: SupportsIndex | None = None,
    method: Literal["exact", "block"] = "exact",
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

    Every row is equally likely, however long it is and whatever stands in front of it: files are scanned for their rows
    first, at the speed of memory, or their index is at hand (`index_cache`). Then only stretches of 64 KiB of which
    rows were drawn are read. Which rows are drawn is a pure function of the seed.

    Args:
        source: as in `read_csv`.
        rows: how many to draw, up to 2^31; without `replace`, at most as many as there are.
        seed: 0 to 2^64 - 1; one is drawn by default, and shown by `CsvSample.seed`.
        method: "exact" draws row by row. "block" draws stretches of 64 KiB and takes all of their rows, so it reads no
            more than it returns: for disks that are cold or far away. Neighbours are often alike, so such a sample may
            say much less than one of as many single rows: `CsvSample.design_effect` tells how much.
        replace: whether a row may be drawn several times (a bootstrap).
        part: samples of the same seed and number of rows with different parts have no row in common, as in `sample`.
        stratify: draws from each group of rows with equal values in proportion to its rows: the name of a column, which
            is read of all rows first, or an array with a value for each row.
        weights: draws rows in proportion to these: the name of a column, or an array.
        columns: those to take, in this order; None for all, which must be numbers or truth values then.
        dtype: of the array: float32, or any other number.
        order: "C" for row after row in memory, "F" for column after column, which XGBoost and cuML like.
        delimiter: as in `read_csv`, like the arguments that follow.
        quote: as in `read_csv`.
        header: as in `read_csv`.
        comment: as in `read_csv`.
        decimal: as in `read_csv`.
        null_values: as in `read_csv`. They become NaN; for an integer dtype they are a `NullValueError`.
        on_ragged: as in `read_csv`.
        index_cache: as in `read_csv`.
        num_threads: as in `read_csv`.
        memory_limit: as in `read_csv`; the array itself comes on top.
        progress: as in `read_csv`.

    Returns:
        The sample.

    Raises:
        SchemaError: if a column isn't there, or `columns` is None and one isn't of numbers.
        UnsupportedError: for a compressed file that can only be read in sequence, and as `read_csv`.
        ValueError: if there aren't so many rows, or an argument is out of range.
        FastpipeError: as `read_csv`.

    Example:
        >>> import fastpipe
        >>> drawn = fastpipe.sample_csv("rides.csv", rows=500, columns=["distance"], seed=7)
        >>> drawn.values.shape, drawn.values.dtype, len(set(drawn.rows.tolist()))
        ((500, 1), dtype('float32'), 500)
    """
    if order not in ("C", "F"):
        raise ValueError(f'order is "C" or "F", not {order!r}')
    dialect = Dialect.of(delimiter, quote, header, comment, decimal, null_values, on_ragged)
    options: Options = {"num_threads": num_threads, "memory_limit": memory_limit, "progress": progress}
    element = DenseSpec((), dtype)
    if element.dtype in ("string", "bytes"):
        raise ValueError(f"dtype is that of numbers, not {element.dtype}: sample() draws columns of any type")
    spec = DenseSpec((), dtype, fill=math.nan) if element.dtype.startswith("float") else element
    wanted = None if columns is None else names("columns", columns)
    if wanted is not None and not wanted:
        raise ValueError("columns is empty: name at least one")
    features = None if wanted is None else Features(dict.fromkeys(wanted, spec))
    data = CsvData(opened(source, SUFFIXES), dialect, features, None, index_cache)
    if wanted is None:
        wanted = _numbers(data.features)
        data = data.with_features(Features(dict.fromkeys(wanted, spec)))
    count = within("rows", rows, 1, LARGEST_SAMPLE)
    # So many rows of all lie in so much text.
    size = min(max(count * _TEXT // max(data.text_bytes, 1), _LEAST_BATCH), _MOST_BATCH)
    reader = Settings(read_csv, size, options).reader(data)
    if method not in ("exact", "block"):
        raise ValueError(f'method is "exact" or "block", not {shown(method)}')
    if method == "block" and (replace or stratify is not None or weights is not None):
        raise ValueError('method="block" draws stretches alike: leave out replace, stratify and weights')
    chosen = secrets.randbits(48) if seed is None else within("seed", seed, 0, 2**64 - 1)
    units: npt.NDArray[np.int64] | None = None
    if method == "block":
        numbers, units = blocks(data.handle.unit_rows(), count, chosen, within("part", part, 0, 2**20))
        drawn = take(reader, numbers)
    else:
        drawn = sample(
            reader,
            count,
            replace=replace,
            seed=chosen,
            part=part,
            stratify=_column(data, stratify, options),
            weights=_column(data, weights, options, "float64"),
        )
    values = np.empty((drawn.num_rows, len(wanted)), element.dtype, order=order)
    at = 0
    with drawn:
        for batch in drawn:
            end = at + len(batch[wanted[0]])
            for number, name in enumerate(wanted):
                values[at:end, number] = batch[name]
            at = end
    effect = None if units is None else design_effect(values, units)
    return CsvSample(values, rows_of_sample(drawn), wanted, chosen, effect)


def _column(data: CsvData, given: str | npt.ArrayLike | None, options: Options, dtype: str = "string") -> Any:
    """What a column has in all rows, if it is one that is named."""
    if not isinstance(given, str):
        return given
    only = data.with_features(Features({given: DenseSpec((), dtype)}))
    with Settings(read_csv, _MOST_BATCH, {"num_threads": options["num_threads"]}).reader(only) as reader:
        return np.concatenate([np.array(batch[given]) for batch in reader])


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
