"""Memory for arrays that frameworks accept without a copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Alignment of the arrays of batches in bytes. Frameworks need it: XLA copies unaligned arrays, and TensorFlow aborts.
"""


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an uninitialized array whose address is a multiple of `ALIGNMENT`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array: np.ndarray = memory[start : start + size].view(dtype).reshape(shape)
    return array
