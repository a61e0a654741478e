"""A GPU by way of CuPy, as a device that is filled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from fastpipe._interop.gpu_cupy import gpu, page_locked
from fastpipe.cuda._filling._devices import Layout, Piece
from fastpipe.errors import OutOfMemoryError

__all__ = ["CupyDevice"]


class CupyDevice:
    """A GPU whose arrays are `cupy.ndarray`s.

    Args:
        device: `"cuda:<index>"`.

    Raises:
        DeviceError: if there is no such GPU.
    """

    def __init__(self, device: Any) -> None:
        self._device = cupy.cuda.Device(gpu(device))
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._memory: Any = None

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"cuda:{self._device.id}"

    def free(self) -> int:
        """Bytes that the driver and CuPy's own store of memory have left."""
        with self._device:
            return int(cupy.cuda.runtime.memGetInfo()[0]) + int(cupy.get_default_memory_pool().free_bytes())

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Makes page-locked memory."""
        return page_locked(self._device.id, nbytes)

    def hold(self, nbytes: int) -> None:
        """Takes memory of the GPU."""
        with self._device:
            try:
                self._memory = cupy.cuda.alloc(nbytes)
            except cupy.cuda.memory.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"{self.name} has no {nbytes} bytes in one piece: a lower occupancy or fewer rows take less"
                    f" ({error})"
                ) from error
        # It may be memory that other streams haven't done with.
        self.settle()

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies pieces on a stream of its own."""
        with self._device:
            for piece in pieces:
                at = ctypes.c_void_p(piece.bytes.ctypes.data)
                (self._memory + piece.at).copy_from_host_async(at, piece.bytes.nbytes, self._stream)
            # Who waits for it sleeps: the processors are wanted for parsing.
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._stream)
            event.synchronize()

    def settle(self) -> None:
        """Waits for the GPU."""
        with self._device:
            self._device.synchronize()

    def matrix(self, rows: int, columns: int, dtype: npt.DTypeLike, order: Layout) -> Any:
        """An array over the memory."""
        with self._device:
            return cupy.ndarray((rows, columns), dtype, memptr=self._memory, order=order)

    def indices(self, numbers: npt.NDArray[np.int64]) -> Any:
        """The numbers as an array there."""
        with self._device:
            return cupy.asarray(numbers)
