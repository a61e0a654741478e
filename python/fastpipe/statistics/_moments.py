"""Moments of numbers: count, sum, mean, variance, minimum and maximum.

Moments of parts are merged pairwise (Chan, Golub and LeVeque). Sums of integers are exact, so large offsets don't cause
cancellation. Sums of floats are float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
