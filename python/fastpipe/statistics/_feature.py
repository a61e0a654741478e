"""Statistics of one feature, as users see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown, within
from fastpipe._private_constructor import private_constructor
from fastpipe.errors import UnsupportedError
from fastpipe.specs._buckets import BucketSpec, OnNan
from fastpipe.specs._vocabularies import Unknown, VocabularySpec
from fastpipe.statistics._accumulator import Accumulator, Kind
from fastpipe.statistics._counts import Counts, Value

_LARGEST = 2**63 - 1
# A BucketSpec has up to this many edges.
_MOST_BINS = 2**16


def _limit(limit: int | None) -> int | None:
    return None if limit is None else within("limit", limit, 0, _LARGEST)


def _fraction(q: Any) -> float:
    if isinstance(q, bool) or not isinstance(q, (int, float, np.integer, np.floating)):
        raise TypeError(f"q must be a number; got {shown(q)}")
    if not 0 <= q <= 1:
        raise ValueError(f"q must be between 0 and 1; got {shown(q)}")
    return float(q)


class FeatureStatistics:
    """Statistics of a feature that `Reader.describe` computed.

    In rows with several values, including ragged and sparse rows, each value counts separately. `lengths` describes the
    number of values per row. `Description.merge` updates the statistics of its description.
    """

    @private_constructor("reader.describe()")
    def _of(self, values: Accumulator) -> None:
        self._values = values

    @property
    def kind(self) -> Kind:
        """`integer`, `float`, `bool`, `time` (dates, times and durations), `string` or `bytes`."""
        return self._values.kind

    @property
    def dtype(self) -> str:
        """Dtype of the values, such as `float32` or `datetime64[us]`; `string` or `bytes`."""
        return self._values.dtype

    @property
    def categories(self) -> list[str] | None:
        """Categories of a feature of codes: code `i` is category `i`. Otherwise None."""
        return self._values.categories

    @property
    def lengths(self) -> FeatureStatistics | None:
        """Statistics of the number of values per row, for ragged and sparse features. Otherwise None."""
        lengths = self._values.lengths
        return None if lengths is None else FeatureStatistics._of(lengths)

    @property
    def null_count(self) -> int:
        """Number of null values: masked, NaT, or NaN if the feature's spec has `fill=nan`."""
        return self._values.null_count

    @property
    def count(self) -> int:
        """Number of values that aren't null, including NaN and infinities."""
        return self._values.count

    @property
    def null_fraction(self) -> float:
        """Fraction of values that are null; NaN without values."""
        both = self.count + self.null_count
        return self.null_count / both if both else math.nan

    @property
    def nan_count(self) -> int:
        """Number of NaN values."""
        return self._values.nan_count

    @property
    def inf_count(self) -> int:
        """Number of infinite values."""
        return self._values.inf_count

    @property
    def mean(self) -> Any:
        """Mean of the finite values: a float (NaN without values), or a date, time or duration."""
        mean = self._values.moments("mean").mean
        return self._timed(None if math.isnan(mean) else round(mean)) if self.kind == "time" else mean

    @property
    def std(self) -> Any:
        """Population standard deviation (divided by the count) of the finite values; NaN without values.

        For dates, times and durations it is a duration, `timedelta64`.
        """
        found = self._values.moments("std").std
        if self.kind != "time":
            return found
        unit = np.datetime_data(np.dtype(self.dtype))[0]
        return np.array("NaT" if math.isnan(found) else round(found), f"m8[{unit}]")[()]

    @property
    def min(self) -> Any:
        """The smallest finite value; None without values."""
        return self._timed(self._values.moments("min").min)

    @property
    def max(self) -> Any:
        """The largest finite value; None without values."""
        return self._timed(self._values.moments("max").max)

    @property
    def quantile_error(self) -> float:
        """Maximum rank error of a quantile as a fraction of all values, in 99 of 100 cases; 0.0 if exact."""
        return 0.0 if self._values.ranked() is not None else self._values.quantiles().error

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
        counts = self._values.ranked()
        found: list[Any]
        found = self._values.quantiles().at(fractions) if counts is None else _exact_quantiles(counts, fractions)
        if self.kind in ("integer", "time", "bool"):
            found = [None if value is None or math.isnan(value) else self._timed(int(value)) for value in found]
        return found if isinstance(q, Iterable) else found[0]

    @property
    def n_unique(self) -> int:
        """Number of distinct values: an estimate if there are more than the `exact_values` of `describe`.

        Raises:
            UnsupportedError: If the feature has floats.
        """
        return self._values.counts("n_unique").n_unique()

    @property
    def n_unique_interval(self) -> tuple[int, int]:
        """Lower and upper bound of the number of distinct values, in 95 of 100 cases.

        Both are `n_unique` if counts are exact.

        Raises:
            UnsupportedError: If the feature has floats.
        """
        return self._values.counts("n_unique").n_unique_interval()

    @property
    def value_counts_error(self) -> int:
        """Maximum error of a count in `value_counts`; 0 if all counts are exact.

        Raises:
            UnsupportedError: If the feature has floats.
        """
        return self._values.counts("value counts").error

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
        found = self._values.counts("value counts").most()
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
        counts = self._values.counts("a vocabulary")
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
        if not self._values.moments("bin edges").count:
            return []
        found = self.quantile([i / bins for i in range(1, bins)])
        return sorted(set(found) - {self.min})

    def to_spec(
        self,
        num_buckets: int = 10,
        *,
        min_count: int = 1,
        limit: int | None = None,
        on_unknown: Unknown = "bucket",
        field: str | None = None,
    ) -> VocabularySpec | BucketSpec:
        r"""Returns a spec that reads the feature as indices, from 0 to below `spec.size`.

        Text is read as indices of its `vocabulary`, and numbers as indices of the bins between their `bin_edges`. If
        the feature has nulls, the spec masks them. If it has NaN, NaN gets its own index. Arguments for the other kind
        of feature have no effect, so one call suits features of both kinds.

        Args:
            num_buckets: Maximum number of buckets of numbers, 2 to 65,537. There are fewer if many values are equal,
                but at least 2. Defaults to 10.
            min_count: Minimum number of occurrences of a text, 1 to 2^63 - 1. Defaults to 1.
            limit: Maximum number of texts in the vocabulary, 1 to 2^63 - 1. Defaults to None, which includes all.
            on_unknown: How to handle texts that aren't in the vocabulary. See `VocabularySpec`. Defaults to "bucket",
                an index after all others, because the vocabulary may lack rare or new texts.
            field: Path of the field to read. Defaults to the feature's name.

        Returns:
            A `VocabularySpec` for text, bytes, enums and codes of dictionaries. A `BucketSpec` for integers and floats.

        Raises:
            TypeError: If an argument has the wrong type.
            UnsupportedError: If the feature has bools, dates or times.
            ValueError: If an argument is out of range, if texts may be missing from the vocabulary, if no text occurs
                `min_count` times, or if the numbers have less than two values.

        Example:
            >>> import fastpipe
            >>> rows = b"city,age\nRome,20\nOslo,30\nRome,40\nBonn,50\n"
            >>> found = fastpipe.read_csv(rows, batch_size=8).describe()
            >>> found["age"].to_spec(num_buckets=2)
            fastpipe.BucketSpec([30])
            >>> features = {name: found[name].to_spec(num_buckets=2) for name in found}
            >>> batch = next(iter(fastpipe.read_csv(rows, features=features, batch_size=8)))
            >>> batch["city"], batch["age"]
            (array([0, 2, 0, 1]), array([0, 1, 1, 1]))
        """
        num_buckets = within("num_buckets", num_buckets, 2, _MOST_BINS + 1)
        limit = None if limit is None else within("limit", limit, 1, _LARGEST)
        on_null: Literal["error", "mask"] = "mask" if self.null_count else "error"
        if self.kind in ("string", "bytes") or self.categories is not None:
            keys = self.vocabulary(min_count, limit)
            if not keys:
                raise ValueError(f"the vocabulary is empty: no text occurs {min_count} times; describe more rows")
            return VocabularySpec(keys, on_unknown=on_unknown, on_null=on_null, field=field)
        if self.kind not in ("integer", "float"):
            what = "bools" if self.kind == "bool" else "dates, times and durations"
            raise UnsupportedError(f"{what} have neither a vocabulary nor buckets: DenseSpec reads them")
        edges = self._edges(num_buckets)
        if not edges:
            raise ValueError(
                f"the feature has no two different finite values (min={self.min!r}, max={self.max!r}), so no edge "
                "divides them: leave it out, or describe more rows"
            )
        on_nan: OnNan = "bucket" if self.nan_count else "error"
        return BucketSpec(edges, on_nan=on_nan, on_null=on_null, field=field)

    def _edges(self, bins: int) -> list[Any]:
        """Returns `bin_edges(bins)`, or one edge above the smallest value if no coarser quantile differs from it."""
        edges = self.bin_edges(bins)
        while not edges and bins < _MOST_BINS:
            bins *= 2
            edges = self.bin_edges(bins)[:1]
        return edges or ([] if self.min == self.max else [self.max])

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


def _exact_quantiles(counts: Counts, fractions: Sequence[float]) -> list[Any]:
    ordered = sorted(counts.most().items())
    if not ordered:
        return [None] * len(fractions)
    ends = np.cumsum([count for _, count in ordered])
    ranks = [max(math.ceil(q * int(ends[-1])), 1) for q in fractions]
    return [ordered[int(np.searchsorted(ends, rank))][0] for rank in ranks]
