"""Memory that rows are put into: a device's, or this process's own.

A device has one stretch of memory for all of its rows. Pieces of page-locked memory are copied into it by byte, and
whatever shape and framework arrays are of lies over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe._interop.memory import aligned
from fastpipe.errors import OutOfMemoryError

Layout = Literal["C", "F"]


class Piece(NamedTuple):
    """Bytes on their way.

    Attributes:
        bytes: uint8 `[n]`, contiguous.
        at: where they belong in the device's memory.
    """

    bytes: npt.NDArray[np.uint8]
    at: int


class Device(Protocol):
    """Where rows are put. One thread at a time copies; another may ask for arrays."""

    @property
    def name(self) -> str:
        """As users call it: `"cuda:0"`."""

    def free(self) -> int | None:
        """Bytes that are free there; None if that is for the user to say."""

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocates at least `nbytes` bytes of this process from which copies are fast."""

    def hold(self, nbytes: int) -> None:
        """Takes memory on the device, once.

        Raises:
            OutOfMemoryError: if there isn't so much.
        """

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies pieces, and returns when they have arrived; lets go of the GIL meanwhile."""

    def settle(self) -> None:
        """Waits until whatever was begun on the device is done, so that its memory may be written."""

    def matrix(self, rows: int, columns: int, dtype: npt.DTypeLike, order: Layout) -> Any:
        """The memory as an array `[rows, columns]`, of which columns lie one behind the other if `order` is "F"."""

    def indices(self, numbers: npt.NDArray[np.int64]) -> Any:
        """Numbers as an array on the device."""


class HostDevice:
    """Memory of this process, as a device: `"cpu"`.

    Args:
        framework: `"torch"` for tensors, else NumPy's arrays.
    """

    name = "cpu"

    def __init__(self, framework: str | None = None) -> None:
        self._framework = framework
        self._memory = np.empty(0, np.uint8)

    def free(self) -> None:
        """Nothing is known: others want memory, too."""

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Makes plain memory."""
        return aligned((nbytes,), np.uint8)

    def hold(self, nbytes: int) -> None:
        """Takes memory of this process."""
        try:
            self._memory = aligned((nbytes,), np.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(f"the system has no {nbytes} bytes for the rows of a device") from error

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies pieces. NumPy lets go of the GIL meanwhile."""
        for piece in pieces:
            np.copyto(self._memory[piece.at : piece.at + len(piece.bytes)], piece.bytes)

    def settle(self) -> None:
        """Nothing runs there."""

    def matrix(self, rows: int, columns: int, dtype: npt.DTypeLike, order: Layout) -> Any:
        """An array over the memory."""
        return self._given(np.ndarray((rows, columns), dtype, buffer=self._memory.data, order=order))

    def indices(self, numbers: npt.NDArray[np.int64]) -> Any:
        """The numbers themselves."""
        return self._given(numbers)

    def _given(self, array: npt.NDArray[Any]) -> Any:
        if self._framework != "torch":
            return array
        import torch

        return torch.from_numpy(array)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises OutOfMemoryError for what NumPy and Python's threads raise where the system has no more memory."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"filling devices: {error}; fewer rows, or a smaller memory=, need less") from error
    except RuntimeError as error:
        # Python has no type of its own for it.
        if "can't start new thread" not in str(error):
            raise
        raise OutOfMemoryError(
            "filling devices: the system has no memory for another thread, or allows no more of them"
        ) from error
