"""What a sample of CSV files is, and how its values become one array."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import names
from fastpipe._reader.options import Options, Settings
from fastpipe._reader.reader import Reader
from fastpipe.errors import SchemaError
from fastpipe.sources.csv._data import CsvData
from fastpipe.sources.csv._dialect import Dialect
from fastpipe.sources.csv._reading import read_csv
from fastpipe.specs import DenseSpec, Features

__all__ = ["Asked", "CsvSample", "RowEstimate"]

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
