"""Count, extremes, mean and deviation of numbers in one pass, mergeable.

Chan, Golub and LeVeque's pairwise merge. Sums of integers are exact, so that large offsets don't cancel; sums of floats
are float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Moments"]

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
