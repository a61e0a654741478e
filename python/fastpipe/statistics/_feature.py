"""Statistics of one feature.

Moments of parts are merged pairwise (Chan, Golub and LeVeque). Sums of integers are exact, so that large offsets don't
cancel; sums of floats are float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown
from fastpipe.errors import UnsupportedError
from fastpipe.statistics._counts import Counts, Quantiles, Value

if TYPE_CHECKING:
    import pyarrow as pa

# Bounds the memory of temporary arrays to about a megabyte.
_CHUNK = 1 << 15


@dataclass
class Moments:
    """Statistics of integers, or of floats. NaN and infinities are counted apart from the finite values.

    Attributes:
        count: finite values.
        total: their sum for integers, exact.
        mean: of the finite values; NaN if there is none.
        squares: sum of the squared distances from the mean.
        minimum: of the finite values, None if there is none.
        maximum: likewise.
        nans: values that are NaN.
        infinities: values that are infinite.
    """

    count: int = 0
    total: int = 0
    mean: float = math.nan
    squares: float = 0.0
    minimum: int | float | None = None
    maximum: int | float | None = None
    nans: int = 0
    infinities: int = 0

    @property
    def deviation(self) -> float:
        """Of the population (divided by `count`), NaN if there is no finite value."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def add(self, values: npt.NDArray[np.generic]) -> None:
        """Adds an array of integers, or of floats of up to 64 bits.

        Raises:
            TypeError: if it holds something else.
        """
        if values.dtype.kind not in "iuf" or values.dtype.itemsize > 8:
            raise TypeError(f"moments are of integers, or of floats of up to 64 bits, not of {values.dtype}")
        flat = values.reshape(-1)
        for start in range(0, len(flat), _CHUNK):
            chunk = flat[start : start + _CHUNK]
            self.merge(_integers(chunk) if chunk.dtype.kind in "iu" else _floats(chunk))

    def merge(self, other: Moments) -> None:
        """Adds what another has seen; both are of integers, or both of floats."""
        self.nans += other.nans
        self.infinities += other.infinities
        if not other.count:
            return
        if self.minimum is None or self.maximum is None or other.minimum is None or other.maximum is None:
            self.count, self.total, self.mean, self.squares = other.count, other.total, other.mean, other.squares
            self.minimum, self.maximum = other.minimum, other.maximum
            return
        both = self.count + other.count
        if isinstance(self.minimum, int):
            # Python's integers are exact, and their quotient is rounded once.
            delta = (other.total * self.count - self.total * other.count) / (self.count * other.count)
            self.total += other.total
            self.mean = self.total / both
        else:
            delta = other.mean - self.mean
            self.mean += delta * (other.count / both)
        self.squares += other.squares + delta * delta * (self.count * (other.count / both))
        self.count = both
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)

    def stored(self) -> dict[str, Any]:
        """As JSON can hold it: sums of integers as text, since readers of JSON may round them."""
        own = dict(self.__dict__)
        return own | {"total": str(self.total), "mean": None if math.isnan(self.mean) else self.mean}

    @classmethod
    def restored(cls, stored: dict[str, Any]) -> Moments:
        """What `stored` wrote."""
        mean = math.nan if stored["mean"] is None else float(stored["mean"])
        return cls(**stored | {"total": int(stored["total"]), "mean": mean})


def _integers(chunk: npt.NDArray[np.generic]) -> Moments:
    wide: npt.NDArray[np.generic] = chunk.astype(np.uint64 if chunk.dtype.kind == "u" else np.int64)
    least, most, count = int(wide.min()), int(wide.max()), len(wide)
    # Modulo 2^64, which distances from the least don't exceed.
    distances = wide.view(np.uint64) - np.uint64(least % 2**64)
    high = int((distances >> np.uint64(32)).sum())
    above = (high << 32) + int((distances & np.uint64(2**32 - 1)).sum())
    total = least * count + above
    squares = float(np.square(distances.astype(np.float64) - above / count).sum())
    return Moments(count, total, total / count, squares, least, most)


def _floats(chunk: npt.NDArray[np.generic]) -> Moments:
    # Of an array in the processor's cache, so that passes over it cost little.
    wide = chunk.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        least, most = float(wide.min()), float(wide.max())
    if math.isfinite(least) and math.isfinite(most):
        # NaN would have come out as the extremes.
        return _finite(wide, least, most)
    finite = wide[np.isfinite(wide)]
    nans = int(np.isnan(wide).sum())
    found = _finite(finite, float(finite.min()), float(finite.max())) if len(finite) else Moments()
    found.nans, found.infinities = nans, len(wide) - len(finite) - nans
    return found


def _finite(values: npt.NDArray[np.float64], least: float, most: float) -> Moments:
    """Of finite values, which it overwrites."""
    with np.errstate(over="ignore", invalid="ignore"):
        first = float(values[0])
        values -= first
        offset = float(values.mean())
        values -= offset
        squares = float(np.square(values, out=values).sum())
    return Moments(len(values), 0, first + offset, squares, least, most)


# They keep the memory of their batches.
_MOST = 1 << 17


class ValueBuffer:
    """Values of one type that are still to be counted."""

    def __init__(self) -> None:
        self._arrays: list[pa.Array] = []
        self._values = 0

    def add(self, values: pa.Array) -> bool:
        """Adds values, without nulls. Returns whether they should be counted now."""
        self._arrays.append(values)
        self._values += len(values)
        return self._values >= _MOST

    def counted(self, *, text: bool) -> dict[Any, int]:
        """How often each value occurs; forgets them.

        Args:
            text: whether they are the bytes of texts.
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


Kind: TypeAlias = Literal["integer", "real", "bool", "time", "text", "bytes"]


class FeatureStatistics:
    """What `fastpipe.describe` has found out about a feature.

    Values of rows with several, ragged and sparse ones too, count one by one; `lengths` says how many rows have.

    Attributes:
        kind: `integer`, `real`, `bool`, `time` (dates, times and durations), `text` or `bytes`.
        dtype: of the values, such as `float32` or `datetime64[us]`; `string` or `bytes`.
        nulls: values that are null: masked, NaT, or NaN if the feature's spec has `fill=nan`.
        lengths: statistics of how many values a row has, for ragged and sparse features; else None.
        symbols: what the codes of a dictionary or enum stand for; None for others.
    """

    def __init__(self, kind: Kind, dtype: str, exact_values: int, symbols: Sequence[str] | None = None) -> None:
        self.kind: Kind = kind
        self.dtype = dtype
        self.nulls = 0
        self.lengths: FeatureStatistics | None = None
        self.symbols = None if symbols is None else list(symbols)
        self._moments = None if kind in ("text", "bytes") else Moments()
        self._quantiles = None if kind in ("text", "bytes", "bool") else Quantiles()
        self._counts = None if kind == "real" else Counts(exact_values)
        self._buffer = ValueBuffer()
        self._texts = 0

    # What it is asked.

    @property
    def count(self) -> int:
        """Values that aren't null; NaN and infinities are values."""
        if self._moments is None:
            return self._texts
        return self._moments.count + self._moments.nans + self._moments.infinities

    @property
    def null_share(self) -> float:
        """Nulls over all values; NaN if there are none at all."""
        both = self.count + self.nulls
        return self.nulls / both if both else math.nan

    @property
    def nans(self) -> int:
        """Values that are NaN."""
        return 0 if self._moments is None else self._moments.nans

    @property
    def infinities(self) -> int:
        """Values that are infinite."""
        return 0 if self._moments is None else self._moments.infinities

    @property
    def mean(self) -> Any:
        """Of the finite values: a float, NaN without any; a date, time or duration where they are."""
        mean = self._numbers("mean").mean
        return self._timed(None if math.isnan(mean) else round(mean)) if self.kind == "time" else mean

    @property
    def deviation(self) -> Any:
        """The standard deviation of the finite values, divided by their number; NaN without any.

        A duration, `timedelta64`, for dates, times and durations.
        """
        found = self._numbers("deviation").deviation
        if self.kind != "time":
            return found
        unit = np.datetime_data(np.dtype(self.dtype))[0]
        return np.array("NaT" if math.isnan(found) else round(found), f"m8[{unit}]")[()]

    @property
    def minimum(self) -> Any:
        """The least finite value; None without any."""
        return self._timed(self._numbers("minimum").minimum)

    @property
    def maximum(self) -> Any:
        """The largest finite value; None without any."""
        return self._timed(self._numbers("maximum").maximum)

    @property
    def quantile_error(self) -> float:
        """By how much the rank of a quantile may be off, as a share of all values, in 99 of 100 cases; 0.0 if exact."""
        return 0.0 if self._ranked() is not None else self._sketch().error

    def quantile(self, share: float | Sequence[float]) -> Any:
        """The least value below or at which a share of the finite values is.

        Args:
            share: from 0 to 1, or several.

        Returns:
            A value, or a list of values; NaN, or None for dates, times and integers, without any.

        Raises:
            TypeError: if a share is no number.
            UnsupportedError: for text.
            ValueError: if it isn't from 0 to 1.
        """
        shares = [share] if isinstance(share, (int, float)) else list(share)
        for each in shares:
            if isinstance(each, bool) or not isinstance(each, (int, float)):
                raise TypeError(f"a share is a number, not {shown(each)}")
            if not 0 <= each <= 1:
                raise ValueError(f"a share is from 0 to 1, not {shown(each)}")
        found = self._exact_quantiles(shares) if self._ranked() is not None else self._sketch().at(shares)
        if self.kind in ("integer", "time", "bool"):
            found = [None if value is None or math.isnan(value) else self._timed(int(value)) for value in found]
        return found[0] if isinstance(share, (int, float)) else found

    @property
    def distinct(self) -> tuple[float, float, float]:
        """The number of different values, and between which numbers it is in 95 of 100 cases: thrice the same if exact.

        Raises:
            UnsupportedError: for floats.
        """
        return self._counted("distinct values").distinct()

    @property
    def counts_error(self) -> int:
        """By how much a count may be off at most; 0 if all are exact.

        Raises:
            UnsupportedError: for floats.
        """
        return self._counted("counts").error

    def counts(self, most: int | None = None) -> dict[Any, int]:
        """How often values occur, the most frequent first; of equally frequent ones the least first.

        Where there were more different values than `describe` was to count, rarer ones than `counts_error` may be
        missing.

        Args:
            most: so many at most; None for all.

        Raises:
            UnsupportedError: for floats.
        """
        found = self._counted("counts").most()
        return {self._named(value): count for value, count in list(found.items())[:most]}

    def vocabulary(self, min_count: int = 1, most: int | None = None) -> list[Any]:
        """The values, the most frequent first: what `VocabularySpec` takes.

        Args:
            min_count: only values that occur at least so often.
            most: so many at most; None for all.

        Raises:
            UnsupportedError: for floats.
            ValueError: if `min_count` is so small that values may be missing: there were more different values than
                `describe` was to count.
        """
        counts = self._counted("a vocabulary")
        if not counts.is_exact and min_count <= counts.error:
            raise ValueError(
                f"values that occur less than {counts.error + 1} times may be missing: raise min_count to that, or "
                f"exact_values of describe, which was {counts.limit}"
            )
        return [self._named(value) for value in list(counts.most(min_count))[:most]]

    def buckets(self, number: int) -> list[Any]:
        """Boundaries that divide the finite values into buckets of about as many values: what `numpy.digitize` takes.

        Args:
            number: of buckets, at least 2.

        Returns:
            At most `number` - 1 boundaries, ascending, none twice: fewer where many values are equal.

        Raises:
            TypeError: if the number is no integer.
            UnsupportedError: for text.
            ValueError: if it is less than 2.
        """
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"number is an integer, not {shown(number)}")
        if number < 2:
            raise ValueError(f"there are at least 2 buckets, not {number}")
        if not self._numbers("buckets").count:
            return []
        found = self.quantile([i / number for i in range(1, number)])
        return sorted(set(found) - {self.minimum})

    # What it is told.

    def add_numbers(self, values: npt.NDArray[Any]) -> None:
        """Adds numbers of its kind; times as their integers, without NaT."""
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
        """Adds texts, as bytes."""
        self._texts += len(values)
        if self._buffer.add(values):
            self._count()

    def merge(self, other: FeatureStatistics) -> None:
        """Adds what another has seen of the same feature."""
        self._count()
        other._count()
        self.nulls += other.nulls
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
        """What must be the same for two to be merged."""
        return self.kind, self.dtype, self.symbols, self.lengths is not None

    # How it does that.

    def _count(self) -> None:
        """Counts what isn't counted yet."""
        if self._counts is None or not (found := self._buffer.counted(text=self.kind == "text")):
            return
        before = self._counts.exact
        self._counts.add(found)
        self._rank(found if before is None else before)

    def _rank(self, counts: Mapping[Any, int] | None) -> None:
        """Tells the sketch of quantiles how often values occur, if they don't follow from counts any more."""
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
        reason = f"a feature of {self.dtype} has no {what}"
        return UnsupportedError(reason, reason=reason)

    def _sketch(self) -> Quantiles:
        if self._quantiles is None:
            raise self._without("quantiles")
        return self._quantiles

    def _ranked(self) -> Counts | None:
        """The counts, if quantiles follow from them."""
        if self._moments is None:
            raise self._without("quantiles")
        self._count()
        return self._counts if self._counts is not None and self._counts.is_exact else None

    def _exact_quantiles(self, shares: Sequence[float]) -> list[Any]:
        counts = self._ranked()
        assert counts is not None
        ordered = sorted(counts.most().items())
        if not ordered:
            return [None] * len(shares)
        ends = np.cumsum([count for _, count in ordered])
        ranks = [max(math.ceil(share * int(ends[-1])), 1) for share in shares]
        return [ordered[int(np.searchsorted(ends, rank))][0] for rank in ranks]

    def _timed(self, value: Any) -> Any:
        if self.kind == "bool" and value is not None:
            return bool(value)
        if self.kind != "time":
            return value
        return None if value is None else np.int64(value).view(np.dtype(self.dtype))

    def _named(self, value: Value) -> Any:
        if self.symbols is not None and isinstance(value, int):
            return self.symbols[value] if 0 <= value < len(self.symbols) else value
        return self._timed(value)

    # As JSON.

    def stored(self) -> dict[str, Any]:
        """As JSON can hold it."""
        self._count()
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "nulls": self.nulls,
            "texts": self._texts,
            "symbols": self.symbols,
            "lengths": None if self.lengths is None else self.lengths.stored(),
            "moments": None if self._moments is None else self._moments.stored(),
            "quantiles": None if self._quantiles is None else self._quantiles.stored(),
            "counts": None if self._counts is None else self._counts.stored(),
        }

    @classmethod
    def restored(cls, stored: dict[str, Any]) -> FeatureStatistics:
        """What `stored` wrote."""
        found = cls(stored["kind"], stored["dtype"], 1, stored["symbols"])
        found.nulls, found._texts = int(stored["nulls"]), int(stored["texts"])
        if stored["lengths"] is not None:
            found.lengths = cls.restored(stored["lengths"])
        if found._moments is not None:
            found._moments = Moments.restored(stored["moments"])
        if found._quantiles is not None:
            found._quantiles = Quantiles.restored(stored["quantiles"])
        if found._counts is not None:
            found._counts = Counts.restored(stored["counts"])
        return found
