"""Memory for rows, on a device or in this process.

A device has one contiguous memory region for all of its rows. Pieces of page-locked memory are copied into it as bytes.
Arrays of any shape and framework are views of the region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe._interop.memory import aligned
from fastpipe.errors import OutOfMemoryError

Layout = Literal["C", "F"]


class Piece(NamedTuple):
    """Bytes to copy to a device.

    Attributes:
        bytes: uint8 `[n]`, contiguous.
        at: Offset in the device's memory.
    """

    bytes: npt.NDArray[np.uint8]
    at: int


class Device(Protocol):
    """A device that stores rows. Only one thread at a time copies, while another thread may request arrays."""

    @property
    def name(self) -> str:
        """The user's name of the device, such as `"cuda:0"`."""

    def free(self) -> int | None:
        """Returns the free bytes on the device, or None if the user must specify them."""

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocates at least `nbytes` bytes of host memory from which copies are fast."""

    def hold(self, nbytes: int) -> None:
        """Allocates memory on the device. Called once.

        Raises:
            OutOfMemoryError: If the device has too little memory.
        """

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies pieces, and returns after they have arrived. Releases the GIL while copying."""

    def settle(self) -> None:
        """Waits until all work on the device is done, so that its memory may be overwritten."""

    def matrix(self, rows: int, columns: int, dtype: npt.DTypeLike, order: Layout) -> Any:
        """Returns the memory as an array `[rows, columns]`, in column-major layout if `order` is "F"."""

    def indices(self, numbers: npt.NDArray[np.int64]) -> Any:
        """Returns numbers as an array on the device."""


class HostDevice:
    """Memory of this process as a device, `"cpu"`.

    Args:
        framework: `"torch"` for tensors, otherwise NumPy arrays.
    """

    name = "cpu"

    def __init__(self, framework: str | None = None) -> None:
        self._framework = framework
        self._memory = np.empty(0, np.uint8)

    def free(self) -> None:
        """Returns None: other programs also need the free memory, so the user must specify the size."""

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocates ordinary memory."""
        return aligned((nbytes,), np.uint8)

    def hold(self, nbytes: int) -> None:
        """Allocates memory of this process."""
        try:
            self._memory = aligned((nbytes,), np.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(f"could not allocate {nbytes} bytes for the rows of a device") from error

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies pieces. NumPy releases the GIL while copying."""
        for piece in pieces:
            np.copyto(self._memory[piece.at : piece.at + len(piece.bytes)], piece.bytes)

    def settle(self) -> None:
        """Does nothing, since no work runs asynchronously."""

    def matrix(self, rows: int, columns: int, dtype: npt.DTypeLike, order: Layout) -> Any:
        """Returns an array over the memory."""
        return self._given(np.ndarray((rows, columns), dtype, buffer=self._memory.data, order=order))

    def indices(self, numbers: npt.NDArray[np.int64]) -> Any:
        """Returns the numbers themselves."""
        return self._given(numbers)

    def _given(self, array: npt.NDArray[Any]) -> Any:
        if self._framework != "torch":
            return array
        import torch

        return torch.from_numpy(array)
