"""Dates, times and durations, for which frameworks have no dtype: they take the numbers that NumPy counts them in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["counted"]


def counted(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The array; of dates, times and durations the int64 that it holds, over the same memory. NaT is the least."""
    return array.view(np.int64) if array.dtype.kind in "mM" else array
