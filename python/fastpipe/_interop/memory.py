"""Memory for arrays that frameworks take without a copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Of the arrays of batches, in bytes, and what frameworks want: XLA copies what lies otherwise, TensorFlow aborts."""


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that begins at a multiple of `ALIGNMENT`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array: np.ndarray = memory[start : start + size].view(dtype).reshape(shape)
    return array
