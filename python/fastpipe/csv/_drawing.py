"""What all methods of drawing rows of CSV files share: their arguments, their results and the variance of clusters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._files._in_memory_files import File
from fastpipe._files._index_cache import IndexCache
from fastpipe._reader.options import Options, Settings
from fastpipe._reader.reader import Reader
from fastpipe.batch import Masked
from fastpipe.csv._reading import CsvData, Dialect, read_csv
from fastpipe.errors import NullValueError, SchemaError, UnsupportedError
from fastpipe.specs import DenseSpec, Features, Spec
from fastpipe.specs._requests import FeatureRequest
from fastpipe.specs._vocabularies import LookupSpec

# Approximate bytes of text in the batches that are read at the same time, and limits of a batch's rows.
_TEXT = 8 << 20
LEAST_BATCH, MOST_BATCH = 64, 1 << 16


@dataclass(frozen=True, slots=True)
class RowEstimate:
    """Estimate of the number of rows, derived from random parts of the files.

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
        values: Array `[rows, columns]` of the sampled values. NaN for null. With `dtype="string"`, an object array of
            str.
        rows: int64 `[rows]`, ascending: the indices of the rows, counted over all files in order, from 0. None with
            `method="estimate"` and "buffered", which don't count rows.
        columns: The names of the columns.
        seed: The seed of the sample.
        design_effect: With `method="block"` or "buffered", float64 `[columns]`: the factor by which the sample inflates
            the variance of each column's mean, compared with the same number of independently drawn rows. Divide the
            number of rows by it to get the effective sample size. NaN if it can't be estimated. With other methods, the
            factor is 1 and this is None.
        offsets: With `method="estimate"` or "buffered", int64 `[rows]`: the byte offset in its file at which each row
            starts; otherwise None. With "buffered", rows are in the order in which they were drawn.
        files: With `method="estimate"` or "buffered", int64 `[rows]`: the index of each row's file, from 0; otherwise
            None.
        estimate: With `method="estimate"` or "buffered", the estimated number of rows in all files; otherwise None.
    """

    values: npt.NDArray[Any]
    rows: npt.NDArray[np.int64] | None
    columns: list[str]
    seed: int
    design_effect: npt.NDArray[np.float64] | None = None
    offsets: npt.NDArray[np.int64] | None = None
    files: npt.NDArray[np.int64] | None = None
    estimate: RowEstimate | None = None

    def to_pandas(self) -> Any:
        """Returns the values as a `pandas.DataFrame` with the columns' names.

        Example:
            >>> import fastpipe
            >>> drawn = fastpipe.csv.sample_csv("rides.csv", rows=500, columns=["distance"], seed=7)
            >>> list(drawn.to_pandas().columns)
            ['distance']
        """
        import pandas

        return pandas.DataFrame(self.values, columns=self.columns)

    def to_arrow(self) -> Any:
        """Returns the values as a `pyarrow.Table` with a column for each of `columns`. NaN stays NaN.

        Example:
            >>> import fastpipe
            >>> drawn = fastpipe.csv.sample_csv("rides.csv", rows=500, columns=["distance"], seed=7)
            >>> drawn.to_arrow().num_rows
            500
        """
        return require_pyarrow().table(dict(zip(self.columns, self.values.T, strict=True)))

    def to_torch(self) -> Any:
        """Returns the values as a `torch.Tensor` `[rows, columns]` that shares their memory.

        Raises:
            UnsupportedError: If the values are text.

        Example:
            >>> import fastpipe
            >>> drawn = fastpipe.csv.sample_csv("rides.csv", rows=500, columns=["distance"], seed=7)
            >>> drawn.to_torch().shape
            torch.Size([500, 1])
        """
        import torch

        if self.values.dtype.kind == "O":
            raise UnsupportedError("a tensor can't hold text: read it as indices with a HashSpec or VocabularySpec")
        return torch.from_numpy(self.values)


@dataclass(frozen=True)
class Asked:
    """Checked arguments that all methods of sampling share.

    Attributes:
        rows: The number of rows to draw; 0 if it is a fraction of all rows.
        seed: The seed of the sample.
        dialect: The dialect of the files.
        columns: The names of the columns; None for all.
        spec: The spec of each column that `overrides` doesn't name.
        order: The memory order of the array.
        options: The options of the reader.
        num_threads: The number of threads; None to choose it automatically.
        memory_limit: The limit in bytes; None for no limit.
        fraction: The fraction of all rows to draw; None if their number is known.
        overrides: The specs of some columns.
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
    fraction: float | None = None
    overrides: Features = field(default_factory=Features)

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
        overrides: Mapping[str, Spec] | None = None,
    ) -> Asked:
        """Returns the shared arguments after checking them.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range.
        """
        if order not in ("C", "F"):
            raise ValueError(f'order must be "C" or "F"; got {order!r}')
        element = DenseSpec((), dtype)
        if element.dtype == "bytes":
            raise ValueError('dtype must be numeric or "string"; got bytes')
        spec = DenseSpec((), dtype, fill=math.nan) if element.dtype.startswith("float") else element
        request = FeatureRequest.of(None, columns, overrides)
        for name, override in request.overrides.items():
            _check_override(name, override, spec, request.columns)
        running = Settings(read_csv, 1, options).running
        return cls(
            rows,
            seed,
            dialect,
            request.columns,
            spec,
            order,
            options,
            running.num_threads,
            running.memory_limit,
            overrides=request.overrides,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array: object for text."""
        return np.dtype(object if self.spec.dtype == "string" else self.spec.dtype)

    @property
    def features(self) -> Features | None:
        """The features of the named columns; None if no columns are named."""
        return None if self.columns is None else self._features(self.columns)

    def _features(self, columns: list[str]) -> Features:
        return Features({name: self.overrides.get(name, self.spec) for name in columns})

    def opened(self, files: Sequence[File], index_cache: IndexCache) -> tuple[Asked, CsvData, list[str]]:
        """Scans files, and reports skipped rows.

        Returns:
            These arguments with the number of rows to draw, the dataset with the sample's columns, and their names.

        Raises:
            SchemaError: If no columns are named and a column isn't numeric.
            FastpipeError: If the files can't be read.
        """
        data = CsvData(files, self.dialect, self.features, None, index_cache)
        data.report_skipped()
        asked = self
        if self.fraction is not None:
            total = int(data.handle.unit_rows().sum(dtype=np.int64))
            asked = replace(self, rows=max(round(self.fraction * total), 1))
        return asked, *self.typed(data)

    def typed(self, data: CsvData) -> tuple[CsvData, list[str]]:
        """Returns the dataset with the sample's columns, and the names of these columns.

        Raises:
            SchemaError: If no columns are named and a column isn't numeric.
        """
        if self.columns is not None:
            return data, self.columns
        data.report_later_columns()
        missing = [name for name in self.overrides if name not in data.features]
        if missing:
            raise SchemaError(f"overrides: there is no column {missing[0]!r}", feature=missing[0])
        wanted = list(data.features)
        if self.spec.dtype != "string":
            _check_numbers({name: spec for name, spec in data.features.items() if name not in self.overrides})
        return data.with_features(self._features(wanted)), wanted

    def reader(self, data: CsvData) -> Reader:
        """Returns a reader whose batches contain about as much text as is read at a time."""
        batch = min(max(int(self.rows * _TEXT / max(data.text_bytes, 1)), LEAST_BATCH), MOST_BATCH)
        return Settings(read_csv, batch, self.options).reader(data)

    def array(self, drawn: Reader, wanted: list[str], rows: int) -> npt.NDArray[Any]:
        """Returns one array with all rows that a reader yields."""
        values = np.empty((rows, len(wanted)), self.dtype, order=self.order)
        self.read_into(values, drawn, wanted)
        return values

    def read_into(self, values: npt.NDArray[Any], drawn: Reader, wanted: list[str]) -> None:
        """Copies all rows that a reader yields into an array `[rows, columns]`."""
        at = 0
        with drawn:
            for batch in drawn:
                end = at + len(batch[wanted[0]])
                for number, name in enumerate(wanted):
                    values[at:end, number] = column_of(name, batch[name], values.dtype)
                at = end


def column_of(name: str, values: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns a feature of a batch as an array `[rows, ...]`. NaN marks missing numbers, and None marks missing text.

    Raises:
        NullValueError: If a value is missing, and the dtype can't represent that.
    """
    if not isinstance(values, Masked):
        return np.asarray(values)
    valid, found = np.asarray(values.valid), np.asarray(values.values)
    if valid.all():
        return found
    if dtype.kind not in "fO":
        raise NullValueError(
            f"{name!r} is null in a row, which {dtype} cannot represent: use a float dtype, or set a fill in its spec",
            feature=name,
        )
    valid = valid.reshape(valid.shape + (1,) * (found.ndim - valid.ndim))
    missing: Any = np.nan if dtype.kind == "f" else None
    return np.where(valid, found.astype(dtype), missing)


def _check_override(name: str, override: Spec, spec: DenseSpec, columns: list[str] | None) -> None:
    """Raises an error if an array can't hold a column with this spec."""
    if columns is not None and name not in columns:
        raise SchemaError(f"overrides: columns= doesn't select a column {name!r}", feature=name)
    numeric = isinstance(override, DenseSpec | LookupSpec) and np.dtype(_numpy(override)).kind in "biuf"
    if spec.dtype == "string" or not numeric:
        what = 'dtype="string" reads all columns as text' if spec.dtype == "string" else "the array holds numbers"
        raise SchemaError(f"overrides: {what}, but {name!r} is {override!r}", feature=name)
    if isinstance(override, LookupSpec) and not _holds(spec.dtype, override.size - 1):
        reason = f"overrides: {spec.dtype} can't hold the indices of {name!r}, up to {override.size - 1}: pass dtype="
        raise SchemaError(f'{reason}"int64" or "float64"', feature=name)


def _numpy(spec: Spec) -> str | type:
    return object if spec.dtype in ("string", "bytes") else str(spec.dtype)


def _holds(dtype: str, number: int) -> bool:
    """Returns whether a dtype represents all integers from 0 to a number exactly."""
    kind = np.dtype(dtype)
    most = 2 ** (np.finfo(kind).nmant + 1) if kind.kind == "f" else np.iinfo(kind).max if kind.kind in "iu" else 1
    return number <= most


def _check_numbers(features: Mapping[str, Spec]) -> None:
    """Raises `SchemaError` if a column isn't numeric."""
    others = [name for name, spec in features.items() if spec.dtype == "string" or spec.dtype.startswith("datetime")]
    if others:
        named = ", ".join(map(repr, others[:5])) + (", ..." if len(others) > 5 else "")
        numbers = [name for name in features if name not in others]
        raise SchemaError(
            f"an array of numbers can't hold the columns {named}: name the numeric columns, columns={numbers}; read "
            f"text as indices, overrides={{{others[0]!r}: fastpipe.HashSpec(1000)}} or a VocabularySpec; or read all "
            'columns as text into host memory, dtype="string"',
            feature=others[0],
        )


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
        if not len(units) or columns[0].dtype.kind == "O":
            return  # Text has no variance.
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
