"""Counts and quantiles of values: exact up to a number of distinct values, then sketches of Apache DataSketches.

Frequent items: D. Anderson et al., A High-Performance Algorithm for Identifying Frequent Items in Data Streams, IMC
2017. Distinct values: P. Flajolet et al., HyperLogLog, AofA 2007, as implemented by DataSketches. Quantiles: Z. Karnin,
K. Lang, E. Liberty, Optimal Quantile Approximation in Streams, FOCS 2016.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# The rank error of a quantile is at most 0.67 % in 99 of 100 sketches. A sketch needs about 10 KB.
_K = 400
_CHUNK = 1 << 16


def require_datasketches() -> Any:
    """Returns the module `datasketches`.

    Raises:
        ImportError: If it isn't installed. The message names the extra.
    """
    try:
        import datasketches
    except ImportError as error:
        raise ImportError("Reader.describe requires datasketches: pip install 'fastpipe-data[describe]'") from error
    return datasketches


class Quantiles:
    """Quantiles of finite float64 values."""

    def __init__(self) -> None:
        self._sketch = require_datasketches().kll_doubles_sketch(_K)

    @property
    def count(self) -> int:
        """Number of values that were added."""
        return int(self._sketch.n)

    @property
    def error(self) -> float:
        """Maximum rank error of a quantile as a fraction of all values, in 99 of 100 cases."""
        return float(self._sketch.normalized_rank_error(False)) if self._sketch.is_estimation_mode() else 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Adds finite values."""
        if len(values):
            self._sketch.update(values)

    def add_counts(self, counts: Mapping[Any, int]) -> None:
        """Adds values with the number of times that each occurs."""
        values = np.array(list(counts), np.float64)
        ends = np.cumsum(np.array(list(counts.values()), np.int64))
        for start in range(0, int(ends[-1]), _CHUNK):
            places = np.arange(start, min(start + _CHUNK, int(ends[-1])))
            self.add(values[np.searchsorted(ends, places, side="right")])

    def merge(self, other: Quantiles) -> None:
        """Adds the values of another object."""
        self._sketch.merge(other._sketch)

    def at(self, fractions: Sequence[float]) -> list[float]:
        """Returns quantiles: for each fraction, the smallest value that at least this fraction of them doesn't exceed.

        Without values, returns NaN.
        """
        if not self.count:
            return [float("nan")] * len(fractions)
        return [float(value) for value in self._sketch.get_quantiles(list(fractions), True)]

    def stored(self) -> str:
        """Returns the sketch as text."""
        return base64.b64encode(self._sketch.serialize()).decode()

    @classmethod
    def restored(cls, text: str) -> Quantiles:
        """Returns the object that `stored` wrote."""
        found = cls()
        found._sketch = type(found._sketch).deserialize(base64.b64decode(text, validate=True))
        return found


Value: TypeAlias = "str | bytes | int"

# Counts are off by at most 3.5 / 2^16 of the total count.
_LOG_ITEMS = 16
# The number of distinct values has a standard error of 1.6 %.
_LOG_REGISTERS = 12


class Counts:
    """Number of occurrences of each value of one type.

    Args:
        limit: Maximum number of distinct values that are counted exactly.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._exact: dict[Value, int] | None = {}
        self._frequent: Any = None
        self._distinct: Any = None
        self._kind: type = str

    @property
    def exact(self) -> Mapping[Value, int] | None:
        """Number of occurrences of each value, as a live view. None if the counts are estimates."""
        return self._exact

    @property
    def is_exact(self) -> bool:
        """Whether all counts are exact."""
        return self._exact is not None

    @property
    def error(self) -> int:
        """Maximum error of a count."""
        if self._exact is not None:
            return 0
        return int(self._frequent.epsilon * self._frequent.total_weight) + 1

    def add(self, counts: Mapping[Any, int]) -> None:
        """Adds the number of occurrences of values."""
        if self._exact is not None:
            exact = self._exact
            for value, count in counts.items():
                exact[value] = exact.get(value, 0) + count
            if len(exact) > self.limit:
                self._spill(type(next(iter(exact))))
        else:
            self._count(counts)

    def _spill(self, kind: type) -> None:
        """Switches to sketches for values of type `kind`."""
        sketches = require_datasketches()
        exact, self._exact = self._exact or {}, None
        self._kind = kind
        self._frequent = sketches.frequent_strings_sketch(_LOG_ITEMS)
        self._distinct = sketches.hll_sketch(_LOG_REGISTERS, sketches.tgt_hll_type.HLL_8)
        self._count(exact)

    def _count(self, counts: Mapping[Any, int]) -> None:
        frequent, distinct = self._frequent.update, self._distinct.update
        for value, count in counts.items():
            text = _text(value)
            frequent(text, count)
            distinct(text)

    def merge(self, other: Counts) -> None:
        """Adds the counts of another object."""
        if other._exact is not None:
            self.add(other._exact)
            return
        if self._exact is not None:
            self._spill(other._kind)
        self._frequent.merge(other._frequent)
        union = require_datasketches().hll_union(_LOG_REGISTERS)
        union.update(self._distinct)
        union.update(other._distinct)
        self._distinct = union.get_result(require_datasketches().tgt_hll_type.HLL_8)

    def n_unique(self) -> int:
        """Returns the number of distinct values, which is an estimate unless counts are exact."""
        return len(self._exact) if self._exact is not None else round(self._distinct.get_estimate())

    def n_unique_interval(self) -> tuple[int, int]:
        """Returns the bounds of the number of distinct values in 95 of 100 cases."""
        if self._exact is not None:
            return len(self._exact), len(self._exact)
        sketch = self._distinct
        return math.floor(sketch.get_lower_bound(2)), math.ceil(sketch.get_upper_bound(2))

    def most(self, least: int = 1) -> dict[Value, int]:
        """Returns values that occur at least `least` times, sorted by descending count and then by value.

        With sketches, counts are estimates that are off by at most `error`, and values that are rarer than `error` may
        be missing.
        """
        if self._exact is not None:
            found = [(value, count) for value, count in self._exact.items() if count >= least]
        else:
            kinds = require_datasketches().frequent_items_error_type
            items = self._frequent.get_frequent_items(kinds.NO_FALSE_NEGATIVES, max(least - 1, 0))
            found = [(_value(item[0], self._kind), int(item[1])) for item in items]
            found = [(value, count) for value, count in found if count >= least]
        return dict(sorted(found, key=lambda pair: (-pair[1], pair[0])))

    def stored(self) -> dict[str, Any]:
        """Returns the counts as JSON-compatible data."""
        if self._exact is not None:
            kind = type(next(iter(self._exact))) if self._exact else str
            return {
                "limit": self.limit,
                "kind": kind.__name__,
                "values": [_text(value) for value in self._exact],
                "counts": list(self._exact.values()),
            }
        return {
            "limit": self.limit,
            "kind": self._kind.__name__,
            "frequent": base64.b64encode(self._frequent.serialize()).decode(),
            "distinct": base64.b64encode(self._distinct.serialize_updatable()).decode(),
        }

    @classmethod
    def restored(cls, stored: dict[str, Any]) -> Counts:
        """Returns the object that `stored` wrote."""
        found = cls(int(stored["limit"]))
        kind = {"str": str, "bytes": bytes, "int": int}[stored["kind"]]
        if "values" in stored:
            found._exact = {
                _value(text, kind): int(count) for text, count in zip(stored["values"], stored["counts"], strict=True)
            }
            return found
        sketches = require_datasketches()
        found._exact, found._kind = None, kind
        frequent, distinct = (base64.b64decode(stored[name], validate=True) for name in ("frequent", "distinct"))
        found._frequent = sketches.frequent_strings_sketch.deserialize(frequent)
        found._distinct = sketches.hll_sketch.deserialize(distinct)
        return found


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _value(text: str, kind: type) -> Value:
    if kind is bytes:
        return text.encode("latin-1")
    return int(text) if kind is int else text
