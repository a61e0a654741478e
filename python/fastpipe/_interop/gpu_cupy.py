"""GPUs by way of CuPy: which there are, and page-locked memory for them."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from fastpipe.errors import DeviceError

__all__ = ["gpu", "page_locked"]


def page_locked(index: int, nbytes: int) -> np.ndarray:
    """Page-locked memory as an array of bytes."""
    with cupy.cuda.Device(index):
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def gpu(device: Any) -> int:
    """The number of the GPU that a user names.

    Raises:
        DeviceError: if there is none of this name, or no driver for it.
    """
    kind, _, index = str(device).partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise DeviceError(f'device names a GPU, as "cuda:0" does, not {device!r}')
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"CuPy finds no GPU here, or no driver that works with it: {error}") from None
    found = int(index) if index else cupy.cuda.Device().id
    if found >= count:
        raise DeviceError(f"there is no device cuda:{found}: the machine has {count} GPUs")
    return int(found)
