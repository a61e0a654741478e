"""Quantiles of numbers in one pass, mergeable: KLL sketches of Apache DataSketches.

Z. Karnin, K. Lang, E. Liberty, Optimal Quantile Approximation in Streams, FOCS 2016.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Quantiles", "require_datasketches"]

# Rank error of 0.67 % for a quantile in 99 of 100 sketches; some 10 KB.
_K = 400
_CHUNK = 1 << 16


def require_datasketches() -> Any:
    """The library.

    Raises:
        ImportError: if it isn't installed; it names the extra.
    """
    try:
        import datasketches
    except ImportError as error:
        raise ImportError("fastpipe.describe needs datasketches: pip install 'fastpipe-data[describe]'") from error
    return datasketches


class Quantiles:
    """Quantiles of finite float64 values."""

    def __init__(self) -> None:
        self._sketch = require_datasketches().kll_doubles_sketch(_K)

    @property
    def count(self) -> int:
        """Values that were added."""
        return int(self._sketch.n)

    @property
    def error(self) -> float:
        """By how much the rank of a quantile may be off, as a share of all values, in 99 of 100 cases."""
        return float(self._sketch.normalized_rank_error(False)) if self._sketch.is_estimation_mode() else 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Adds finite values."""
        if len(values):
            self._sketch.update(values)

    def add_counts(self, counts: Mapping[Any, int]) -> None:
        """Adds values by how often they occur."""
        values = np.array(list(counts), np.float64)
        ends = np.cumsum(np.array(list(counts.values()), np.int64))
        for start in range(0, int(ends[-1]), _CHUNK):
            places = np.arange(start, min(start + _CHUNK, int(ends[-1])))
            self.add(values[np.searchsorted(ends, places, side="right")])

    def merge(self, other: Quantiles) -> None:
        """Adds what another has seen."""
        self._sketch.merge(other._sketch)

    def at(self, shares: Sequence[float]) -> list[float]:
        """The least values below or at which these shares of all are; NaN without values."""
        if not self.count:
            return [float("nan")] * len(shares)
        return [float(value) for value in self._sketch.get_quantiles(list(shares), True)]

    def stored(self) -> str:
        """As text."""
        return base64.b64encode(self._sketch.serialize()).decode()

    @classmethod
    def restored(cls, text: str) -> Quantiles:
        """What `stored` wrote."""
        found = cls()
        found._sketch = type(found._sketch).deserialize(base64.b64decode(text, validate=True))
        return found
