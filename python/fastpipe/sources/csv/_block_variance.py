"""What rows of whole units tell of a mean, counted as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BlockVariance"]


class BlockVariance:
    """Sums over units, for the variance of the ratio of units' sums to their rows.

    The source is W. G. Cochran, Sampling Techniques, 1977, 9A.5. NaN isn't counted.

    Args:
        columns: how many.
    """

    def __init__(self, columns: int) -> None:
        # Columns are counted from about their mean on, or squares would swallow what differs.
        self._zero: npt.NDArray[np.float64] | None = None
        self._open = -1
        # Of the unit that isn't over: rows and sums.
        self._rows, self._sum = np.zeros(columns), np.zeros(columns)
        # Over units: how many, rows, rows squared, sums, sums squared, rows times sums; over rows: squares.
        self._units, self._n, self._nn = np.zeros(columns), np.zeros(columns), np.zeros(columns)
        self._s, self._ss, self._ns = np.zeros(columns), np.zeros(columns), np.zeros(columns)
        self._squares = np.zeros(columns)

    def add(self, columns: Sequence[npt.NDArray[Any]], units: npt.NDArray[np.int64]) -> None:
        """Adds rows, whose units ascend over all calls."""
        if not len(units):
            return
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
        """By how much each mean varies more than that of as many rows drawn one by one; NaN if it isn't told."""
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
        """Adds units that are over."""
        self._units += (rows > 0).sum(1)
        self._n += rows.sum(1)
        self._nn += (rows**2).sum(1)
        self._s += sums.sum(1)
        self._ss += (sums**2).sum(1)
        self._ns += (rows * sums).sum(1)
