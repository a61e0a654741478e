"""Samples of CSV files whose rows are all found first: `method="exact"` and `"block"`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe._reader.options import Options, Settings
from fastpipe._reader.ordering import within
from fastpipe._reader.reader import Reader
from fastpipe._reader.sampling import blocks, rows_of_sample, sample, take
from fastpipe.sources.csv._block_variance import BlockVariance
from fastpipe.sources.csv._data import SUFFIXES, CsvData
from fastpipe.sources.csv._dialect import DEFAULT_DIALECT
from fastpipe.sources.csv._reading import read_csv
from fastpipe.sources.csv._sample import Asked, CsvSample
from fastpipe.sources.files._contents import Contents, Source, opened
from fastpipe.sources.files._index_cache import IndexCache
from fastpipe.specs import DenseSpec, Features

__all__ = ["draw_blocks", "draw_rows", "of_numbers"]

_MOST_BATCH = 1 << 16


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
