"""Statistics of one feature.

Moments of parts are merged pairwise (Chan, Golub and LeVeque). Sums of integers are exact, so large offsets don't cause
cancellation. Sums of floats are float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown, within
from fastpipe.errors import UnsupportedError
from fastpipe.statistics._counts import Counts, Quantiles, Value

if TYPE_CHECKING:
    import pyarrow as pa

# Limits the memory of temporary arrays to about 1 MB.
_CHUNK = 1 << 15


@dataclass
class Moments:
    """Statistics of integers or floats. NaN and infinities are counted separately from finite values.

    Attributes:
        count: Number of finite values.
        total: Exact sum of the values, for integers.
        mean: Mean of the finite values; NaN without values.
        squares: Sum of squared distances from the mean.
        min: Smallest finite value; None without values.
        max: Largest finite value; None without values.
        nan_count: Number of NaN values.
        inf_count: Number of infinite values.
    """

    count: int = 0
    total: int = 0
    mean: float = math.nan
    squares: float = 0.0
    min: int | float | None = None
    max: int | float | None = None
    nan_count: int = 0
    inf_count: int = 0

    @property
    def std(self) -> float:
        """Population standard deviation (divided by `count`); NaN without finite values."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def add(self, values: npt.NDArray[np.generic]) -> None:
        """Adds an array of integers, or of floats of up to 64 bits.

        Raises:
            TypeError: If the array has another dtype.
        """
        if values.dtype.kind not in "iuf" or values.dtype.itemsize > 8:
            raise TypeError(f"moments require integers, or floats of up to 64 bits; got {values.dtype}")
        flat = values.reshape(-1)
        for start in range(0, len(flat), _CHUNK):
            chunk = flat[start : start + _CHUNK]
            self.merge(_integers(chunk) if chunk.dtype.kind in "iu" else _floats(chunk))

    def merge(self, other: Moments) -> None:
        """Adds the moments of another object. Both must be of integers, or both of floats."""
        self.nan_count += other.nan_count
        self.inf_count += other.inf_count
        if not other.count:
            return
        if self.min is None or self.max is None or other.min is None or other.max is None:
            self.count, self.total, self.mean, self.squares = other.count, other.total, other.mean, other.squares
            self.min, self.max = other.min, other.max
            return
        both = self.count + other.count
        if isinstance(self.min, int):
            # Python integers are exact, and their quotient is rounded once.
            delta = (other.total * self.count - self.total * other.count) / (self.count * other.count)
            self.total += other.total
            self.mean = self.total / both
        else:
            delta = other.mean - self.mean
            self.mean += delta * (other.count / both)
        self.squares += other.squares + delta * delta * (self.count * (other.count / both))
        self.count = both
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def stored(self) -> dict[str, Any]:
        """Returns JSON-compatible data. Sums of integers are text, because JSON readers may round numbers."""
        own = dict(self.__dict__)
        return own | {"total": str(self.total), "mean": None if math.isnan(self.mean) else self.mean}

    @classmethod
    def restored(cls, stored: dict[str, Any]) -> Moments:
        """Returns the object that `stored` wrote."""
        mean = math.nan if stored["mean"] is None else float(stored["mean"])
        return cls(**stored | {"total": int(stored["total"]), "mean": mean})


def _integers(chunk: npt.NDArray[np.generic]) -> Moments:
    wide: npt.NDArray[np.generic] = chunk.astype(np.uint64 if chunk.dtype.kind == "u" else np.int64)
    least, most, count = int(wide.min()), int(wide.max()), len(wide)
    # Arithmetic modulo 2^64, which the distances from the minimum don't exceed.
    distances = wide.view(np.uint64) - np.uint64(least % 2**64)
    high = int((distances >> np.uint64(32)).sum())
    above = (high << 32) + int((distances & np.uint64(2**32 - 1)).sum())
    total = least * count + above
    squares = float(np.square(distances.astype(np.float64) - above / count).sum())
    return Moments(count, total, total / count, squares, least, most)


def _floats(chunk: npt.NDArray[np.generic]) -> Moments:
    # The array fits into the processor's cache, so several passes over it are cheap.
    wide = chunk.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        least, most = float(wide.min()), float(wide.max())
    if math.isfinite(least) and math.isfinite(most):
        # NaN values would have made the minimum and maximum NaN.
        return _finite(wide, least, most)
    finite = wide[np.isfinite(wide)]
    nans = int(np.isnan(wide).sum())
    found = _finite(finite, float(finite.min()), float(finite.max())) if len(finite) else Moments()
    found.nan_count, found.inf_count = nans, len(wide) - len(finite) - nans
    return found


def _finite(values: npt.NDArray[np.float64], least: float, most: float) -> Moments:
    """Returns the moments of finite values, and overwrites the values."""
    with np.errstate(over="ignore", invalid="ignore"):
        first = float(values[0])
        values -= first
        offset = float(values.mean())
        values -= offset
        squares = float(np.square(values, out=values).sum())
    return Moments(len(values), 0, first + offset, squares, least, most)


# Buffered arrays keep the memory of their batches.
_MOST = 1 << 17


class ValueBuffer:
    """Values of one type that are not yet counted."""

    def __init__(self) -> None:
        self._arrays: list[pa.Array] = []
        self._values = 0

    def add(self, values: pa.Array) -> bool:
        """Adds values without nulls. Returns whether they should be counted now."""
        self._arrays.append(values)
        self._values += len(values)
        return self._values >= _MOST

    def counted(self, *, text: bool) -> dict[Any, int]:
        """Returns the number of occurrences of each value, and clears the buffer.

        Args:
            text: Whether the values are the bytes of texts.
        """
        import pyarrow as pa
        import pyarrow.compute

        if not self._arrays:
            return {}
        arrays, self._arrays, self._values = self._arrays, [], 0
        found = pyarrow.compute.value_counts(pa.chunked_array(arrays))
        keys = found.field(0).to_pylist()
        if text:
            keys = [key.decode("utf-8", "surrogateescape") for key in keys]
        return dict(zip(keys, found.field(1).to_pylist(), strict=True))


_LARGEST = 2**63 - 1


def _limit(limit: int | None) -> int | None:
    return None if limit is None else within("limit", limit, 0, _LARGEST)


def _fraction(q: Any) -> float:
    if isinstance(q, bool) or not isinstance(q, (int, float, np.integer, np.floating)):
        raise TypeError(f"q must be a number; got {shown(q)}")
    if not 0 <= q <= 1:
        raise ValueError(f"q must be between 0 and 1; got {shown(q)}")
    return float(q)


Kind: TypeAlias = Literal["integer", "float", "bool", "time", "string", "bytes"]


class FeatureStatistics:
    """Statistics of a feature that `Reader.describe` computed.

    In rows with several values, including ragged and sparse rows, each value counts separately. `lengths` describes the
    number of values per row.

    Attributes:
        kind: `integer`, `float`, `bool`, `time` (dates, times and durations), `string` or `bytes`.
        dtype: Dtype of the values, such as `float32` or `datetime64[us]`; `string` or `bytes`.
        null_count: Number of null values: masked, NaT, or NaN if the feature's spec has `fill=nan`.
        lengths: Statistics of the number of values per row, for ragged and sparse features. Otherwise None.
        categories: Categories of a feature of codes: code `i` is category `i`. Otherwise None.
    """

    def __init__(self, kind: Kind, dtype: str, exact_values: int, categories: Sequence[str] | None = None) -> None:
        self.kind: Kind = kind
        self.dtype = dtype
        self.null_count = 0
        self.lengths: FeatureStatistics | None = None
        self.categories = None if categories is None else list(categories)
        self._moments = None if kind in ("string", "bytes") else Moments()
        self._quantiles = None if kind in ("string", "bytes", "bool") else Quantiles()
        self._counts = None if kind == "float" else Counts(exact_values)
        self._buffer = ValueBuffer()
        self._texts = 0

    # Properties and methods that return statistics.

    @property
    def count(self) -> int:
        """Number of values that aren't null, including NaN and infinities."""
        if self._moments is None:
            return self._texts
        return self._moments.count + self._moments.nan_count + self._moments.inf_count

    @property
    def null_fraction(self) -> float:
        """Fraction of values that are null; NaN without values."""
        both = self.count + self.null_count
        return self.null_count / both if both else math.nan

    @property
    def nan_count(self) -> int:
        """Number of NaN values."""
        return 0 if self._moments is None else self._moments.nan_count

    @property
    def inf_count(self) -> int:
        """Number of infinite values."""
        return 0 if self._moments is None else self._moments.inf_count

    @property
    def mean(self) -> Any:
        """Mean of the finite values: a float (NaN without values), or a date, time or duration."""
        mean = self._numbers("mean").mean
        return self._timed(None if math.isnan(mean) else round(mean)) if self.kind == "time" else mean

    @property
    def std(self) -> Any:
        """Population standard deviation (divided by the count) of the finite values; NaN without values.

        For dates, times and durations it is a duration, `timedelta64`.
        """
        found = self._numbers("std").std
        if self.kind != "time":
            return found
        unit = np.datetime_data(np.dtype(self.dtype))[0]
        return np.array("NaT" if math.isnan(found) else round(found), f"m8[{unit}]")[()]

    @property
    def min(self) -> Any:
        """The smallest finite value; None without values."""
        return self._timed(self._numbers("min").min)

    @property
    def max(self) -> Any:
        """The largest finite value; None without values."""
        return self._timed(self._numbers("max").max)

    @property
    def quantile_error(self) -> float:
        """Maximum rank error of a quantile as a fraction of all values, in 99 of 100 cases; 0.0 if exact."""
        return 0.0 if self._ranked() is not None else self._sketch().error

    def quantile(self, q: float | Sequence[float] | npt.NDArray[np.floating[Any]]) -> Any:
        """Returns quantiles: the smallest value that at least the fraction `q` of the finite values doesn't exceed.

        Args:
            q: A fraction, 0 to 1, or a sequence or array of fractions: 0.5 is the median.

        Returns:
            A value, or a list of values. Without finite values, NaN for floats, and None for integers, bools, dates and
            times.

        Raises:
            TypeError: If `q` is neither a number nor a sequence of numbers.
            UnsupportedError: If the feature is text.
            ValueError: If a fraction isn't between 0 and 1.
        """
        fractions = [_fraction(each) for each in (q if isinstance(q, Iterable) else [q])]
        found = self._exact_quantiles(fractions) if self._ranked() is not None else self._sketch().at(fractions)
        if self.kind in ("integer", "time", "bool"):
            found = [None if value is None or math.isnan(value) else self._timed(int(value)) for value in found]
        return found if isinstance(q, Iterable) else found[0]

    @property
    def n_unique(self) -> int:
        """Number of distinct values: an estimate if there are more than the `exact_values` of `describe`.

        Raises:
            UnsupportedError: If the feature has floats.
        """
        return self._counted("n_unique").n_unique()

    @property
    def n_unique_interval(self) -> tuple[int, int]:
        """Lower and upper bound of the number of distinct values, in 95 of 100 cases.

        Both are `n_unique` if counts are exact.

        Raises:
            UnsupportedError: If the feature has floats.
        """
        return self._counted("n_unique").n_unique_interval()

    @property
    def value_counts_error(self) -> int:
        """Maximum error of a count in `value_counts`; 0 if all counts are exact.

        Raises:
            UnsupportedError: If the feature has floats.
        """
        return self._counted("value counts").error

    def value_counts(self, limit: int | None = None) -> dict[Any, int]:
        """Returns the number of occurrences of values, sorted by descending count and then by value.

        If there were more distinct values than the `exact_values` of `describe`, values that are rarer than
        `value_counts_error` may be missing.

        Args:
            limit: Maximum number of values to return, 0 to 2^63 - 1. Defaults to None, which returns all.

        Returns:
            The counts by value. Codes of a dictionary or enum are replaced by their text.

        Raises:
            TypeError: If `limit` is neither an integer nor None.
            UnsupportedError: If the feature has floats.
            ValueError: If `limit` is out of range.
        """
        found = self._counted("value counts").most()
        return {self._named(value): count for value, count in list(found.items())[: _limit(limit)]}

    def vocabulary(self, min_count: int = 1, limit: int | None = None) -> list[Any]:
        """Returns the values sorted by descending count, for `VocabularySpec`.

        Args:
            min_count: Minimum number of occurrences of a value, 1 to 2^63 - 1. Defaults to 1.
            limit: Maximum number of values to return, 0 to 2^63 - 1. Defaults to None, which returns all.

        Raises:
            TypeError: If an argument isn't an integer.
            UnsupportedError: If the feature has floats.
            ValueError: If an argument is out of range, or if values may be missing, because `min_count` is small and
                there were more distinct values than the `exact_values` of `describe`.
        """
        min_count = within("min_count", min_count, 1, _LARGEST)
        counts = self._counted("a vocabulary")
        if not counts.is_exact and min_count <= counts.error:
            raise ValueError(
                f"values that occur less than {counts.error + 1} times may be missing: increase min_count to that, or "
                f"increase exact_values of describe, which was {counts.limit}"
            )
        return [self._named(value) for value in list(counts.most(min_count))[: _limit(limit)]]

    def bin_edges(self, bins: int) -> list[Any]:
        """Returns the inner edges of bins with about the same number of finite values, for `numpy.digitize`.

        The edges are quantiles. The outer edges, `min` and `max`, are not included: values below the first edge are in
        the first bin, and values from the last edge on are in the last bin.

        Args:
            bins: Number of bins, 2 to 2^31 - 1.

        Returns:
            Up to `bins - 1` distinct edges, ascending. There are fewer if many values are equal, and none without
            finite values.

        Raises:
            TypeError: If `bins` isn't an integer.
            UnsupportedError: If the feature is text.
            ValueError: If `bins` is out of range.
        """
        bins = within("bins", bins, 2, 2**31 - 1)
        if not self._numbers("bin edges").count:
            return []
        found = self.quantile([i / bins for i in range(1, bins)])
        return sorted(set(found) - {self.min})

    # Methods that add values.

    def add_numbers(self, values: npt.NDArray[Any]) -> None:
        """Adds numbers of the feature's kind. Times are passed as integers, without NaT."""
        moments = self._numbers("numbers")
        if not len(values):
            return
        moments.add(values)
        if self._counts is None:
            wide = values.astype(np.float64)
            self._sketch().add(wide[np.isfinite(wide)])
            return
        import pyarrow as pa

        if self._buffer.add(pa.array(np.ascontiguousarray(values))):
            self._count()

    def add_texts(self, values: pa.Array) -> None:
        """Adds texts as bytes."""
        self._texts += len(values)
        if self._buffer.add(values):
            self._count()

    def merge(self, other: FeatureStatistics) -> None:
        """Adds the statistics of another object for the same feature."""
        self._count()
        other._count()
        self.null_count += other.null_count
        self._texts += other._texts
        if self._moments is not None and other._moments is not None:
            self._moments.merge(other._moments)
        if self.lengths is not None and other.lengths is not None:
            self.lengths.merge(other.lengths)
        if self._counts is not None and other._counts is not None:
            mine, its = self._counts.exact, other._counts.exact
            self._counts.merge(other._counts)
            self._rank(mine if mine is not None else its)
        if self._quantiles is not None and other._quantiles is not None:
            self._quantiles.merge(other._quantiles)

    @property
    def form(self) -> tuple[Any, ...]:
        """Properties that must be equal for two objects to be merged."""
        return self.kind, self.dtype, self.categories, self.lengths is not None

    # Private helpers.

    def _count(self) -> None:
        """Counts the buffered values."""
        if self._counts is None or not (found := self._buffer.counted(text=self.kind == "string")):
            return
        before = self._counts.exact
        self._counts.add(found)
        self._rank(found if before is None else before)

    def _rank(self, counts: Mapping[Any, int] | None) -> None:
        """Adds counts to the quantile sketch if the quantiles can't be calculated from the counts anymore."""
        if counts and self._quantiles is not None and self._counts is not None and not self._counts.is_exact:
            self._quantiles.add_counts(counts)

    def _numbers(self, what: str) -> Moments:
        if self._moments is None:
            raise self._without(what)
        return self._moments

    def _counted(self, what: str) -> Counts:
        if self._counts is None:
            raise self._without(what)
        self._count()
        return self._counts

    def _without(self, what: str) -> UnsupportedError:
        reason = f"a feature of {self.dtype} doesn't support {what}"
        return UnsupportedError(reason, reason=reason)

    def _sketch(self) -> Quantiles:
        if self._quantiles is None:
            raise self._without("quantiles")
        return self._quantiles

    def _ranked(self) -> Counts | None:
        """Returns the counts if quantiles can be calculated from them, else None."""
        if self._moments is None:
            raise self._without("quantiles")
        self._count()
        return self._counts if self._counts is not None and self._counts.is_exact else None

    def _exact_quantiles(self, fractions: Sequence[float]) -> list[Any]:
        counts = self._ranked()
        assert counts is not None
        ordered = sorted(counts.most().items())
        if not ordered:
            return [None] * len(fractions)
        ends = np.cumsum([count for _, count in ordered])
        ranks = [max(math.ceil(q * int(ends[-1])), 1) for q in fractions]
        return [ordered[int(np.searchsorted(ends, rank))][0] for rank in ranks]

    def _timed(self, value: Any) -> Any:
        if self.kind == "bool" and value is not None:
            return bool(value)
        if self.kind != "time":
            return value
        return None if value is None else np.int64(value).view(np.dtype(self.dtype))

    def _named(self, value: Value) -> Any:
        if self.categories is not None and isinstance(value, int):
            return self.categories[value] if 0 <= value < len(self.categories) else value
        return self._timed(value)

    # Conversion to and from JSON.

    def stored(self) -> dict[str, Any]:
        """Returns the statistics as JSON-compatible data."""
        self._count()
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "null_count": self.null_count,
            "texts": self._texts,
            "categories": self.categories,
            "lengths": None if self.lengths is None else self.lengths.stored(),
            "moments": None if self._moments is None else self._moments.stored(),
            "quantiles": None if self._quantiles is None else self._quantiles.stored(),
            "counts": None if self._counts is None else self._counts.stored(),
        }

    @classmethod
    def restored(cls, stored: dict[str, Any]) -> FeatureStatistics:
        """Returns the object that `stored` wrote."""
        found = cls(stored["kind"], stored["dtype"], 1, stored["categories"])
        found.null_count, found._texts = int(stored["null_count"]), int(stored["texts"])
        if stored["lengths"] is not None:
            found.lengths = cls.restored(stored["lengths"])
        if found._moments is not None:
            found._moments = Moments.restored(stored["moments"])
        if found._quantiles is not None:
            found._quantiles = Quantiles.restored(stored["quantiles"])
        if found._counts is not None:
            found._counts = Counts.restored(stored["counts"])
        return found
