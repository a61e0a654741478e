"""CSV files as columns of numbers: what samples and devices are filled with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy.typing as npt

from fastpipe._arguments import names
from fastpipe._contents import Source, opened
from fastpipe._index_cache import IndexCache
from fastpipe._options import Options, Settings
from fastpipe.csv._data import SUFFIXES, CsvData
from fastpipe.csv._dialect import DEFAULT_DIALECT, Dialect
from fastpipe.csv._reading import read_csv
from fastpipe.errors import SchemaError
from fastpipe.reader import Reader
from fastpipe.specs import DenseSpec, Features

__all__ = ["Numbers", "numbers"]

# Text that the batches which are made at the same time lie in, about, and what a batch has of rows.
_TEXT = 8 << 20
_LEAST_BATCH, _MOST_BATCH = 64, 1 << 16


class Numbers(NamedTuple):
    """CSV files, opened.

    Attributes:
        data: the files.
        columns: those that are read.
        dtype: in which they are read.
    """

    data: CsvData
    columns: list[str]
    dtype: str

    def batch_size(self, count: int) -> int:
        """Rows a batch, where so many of all are read: they lie in so much text."""
        return min(max(count * _TEXT // max(self.data.nbytes, 1), _LEAST_BATCH), _MOST_BATCH)

    def reader(self, count: int, options: Options) -> Reader:
        """A reader of them, for so many rows of all."""
        return Settings(read_csv, self.batch_size(count), options).reader(self.data)


def numbers(
    source: Source,
    columns: Sequence[str] | None,
    dtype: npt.DTypeLike,
    dialect: Dialect = DEFAULT_DIALECT,
    index_cache: IndexCache = None,
) -> Numbers:
    """Opens files for columns of numbers, all of one dtype.

    Raises:
        SchemaError: if a column isn't there, or `columns` is None and one isn't of numbers.
        ValueError: if the dtype is none of numbers, or no column is named.
    """
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
        wanted = _of_numbers(data.features)
        data = data.with_features(Features(dict.fromkeys(wanted, spec)))
    return Numbers(data, wanted, element.dtype)


def _of_numbers(features: Features) -> list[str]:
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
