"""The values of one feature, as they are added batch by batch and merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe.errors import UnsupportedError
from fastpipe.statistics._counts import Counts, Quantiles
from fastpipe.statistics._moments import Moments

if TYPE_CHECKING:
    import pyarrow as pa

Kind: TypeAlias = Literal["integer", "float", "bool", "time", "string", "bytes"]

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


class Accumulator:
    """Adds the values of a feature.

    Args:
        kind: Kind of the values. See `FeatureStatistics.kind`.
        dtype: Dtype of the values. See `FeatureStatistics.dtype`.
        exact_values: Maximum number of distinct values that are counted exactly.
        categories: Categories of a feature of codes, or None.

    Attributes:
        null_count: Number of null values.
        lengths: Number of values per row, for ragged and sparse features. Otherwise None.
    """

    def __init__(self, kind: Kind, dtype: str, exact_values: int, categories: Sequence[str] | None = None) -> None:
        self.kind: Kind = kind
        self.dtype = dtype
        self.null_count = 0
        self.lengths: Accumulator | None = None
        self.categories = None if categories is None else list(categories)
        self._moments = None if kind in ("string", "bytes") else Moments()
        self._quantiles = None if kind in ("string", "bytes", "bool") else Quantiles()
        self._counts = None if kind == "float" else Counts(exact_values)
        self._buffer = ValueBuffer()
        self._texts = 0

    @property
    def count(self) -> int:
        """Number of values that aren't null, including NaN and infinities."""
        if self._moments is None:
            return self._texts
        return self._moments.count + self._moments.nan_count + self._moments.inf_count

    @property
    def nan_count(self) -> int:
        """Number of NaN values."""
        return 0 if self._moments is None else self._moments.nan_count

    @property
    def inf_count(self) -> int:
        """Number of infinite values."""
        return 0 if self._moments is None else self._moments.inf_count

    @property
    def form(self) -> tuple[Any, ...]:
        """Properties that must be equal for two objects to be merged."""
        return self.kind, self.dtype, self.categories, self.lengths is not None

    def add_numbers(self, values: npt.NDArray[Any]) -> None:
        """Adds numbers of the feature's kind. Times are passed as integers, without NaT."""
        moments = self.moments("numbers")
        if not len(values):
            return
        moments.add(values)
        if self._counts is None:
            wide = values.astype(np.float64)
            self.quantiles().add(wide[np.isfinite(wide)])
            return
        import pyarrow as pa

        if self._buffer.add(pa.array(np.ascontiguousarray(values))):
            self._count()

    def add_texts(self, values: pa.Array) -> None:
        """Adds texts as bytes."""
        self._texts += len(values)
        if self._buffer.add(values):
            self._count()

    def merge(self, other: Accumulator) -> None:
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

    def moments(self, what: str) -> Moments:
        """Returns the moments of the values.

        Raises:
            UnsupportedError: If the feature is text, which doesn't support `what`.
        """
        if self._moments is None:
            raise self._without(what)
        return self._moments

    def counts(self, what: str) -> Counts:
        """Returns the number of occurrences of each value.

        Raises:
            UnsupportedError: If the feature has floats, which don't support `what`.
        """
        if self._counts is None:
            raise self._without(what)
        self._count()
        return self._counts

    def quantiles(self) -> Quantiles:
        """Returns the sketch of quantiles.

        Raises:
            UnsupportedError: If the feature is text.
        """
        if self._quantiles is None:
            raise self._without("quantiles")
        return self._quantiles

    def ranked(self) -> Counts | None:
        """Returns the counts if quantiles can be calculated from them, else None.

        Raises:
            UnsupportedError: If the feature is text.
        """
        self.moments("quantiles")
        self._count()
        return self._counts if self._counts is not None and self._counts.is_exact else None

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

    def _without(self, what: str) -> UnsupportedError:
        reason = f"a feature of {self.dtype} doesn't support {what}"
        return UnsupportedError(reason, reason=reason)

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
    def restored(cls, stored: dict[str, Any]) -> Accumulator:
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
