"""A GPU by way of PyTorch, as a device that is filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastpipe._interop.gpu_torch import gpu, page_locked
from fastpipe.cuda._filling._devices import Layout, Piece
from fastpipe.errors import OutOfMemoryError

__all__ = ["TorchDevice"]


class TorchDevice:
    """A GPU whose arrays are tensors.

    Args:
        device: as PyTorch names it.

    Raises:
        DeviceError: if there is no such GPU.
    """

    def __init__(self, device: Any) -> None:
        self._device = gpu(device)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def name(self) -> str:
        """As PyTorch calls it."""
        return str(self._device)

    def free(self) -> int:
        """Bytes that the driver and PyTorch's own store of memory have left."""
        # What PyTorch keeps for later is free, too.
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + kept

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Makes page-locked memory."""
        return page_locked(self._device, nbytes)

    def hold(self, nbytes: int) -> None:
        """Takes memory of the GPU."""
        try:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{self.name} has no {nbytes} bytes in one piece: a lower occupancy or fewer rows take less ({error})"
            ) from error
        # It may be memory that other streams haven't done with.
        self.settle()

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies pieces on a stream of its own."""
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                to = self._memory[piece.at : piece.at + len(piece.bytes)]
                to.copy_(torch.from_numpy(piece.bytes), non_blocking=True)
        # Who waits for it sleeps: the processors are wanted for parsing.
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        event.synchronize()

    def settle(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize(self._device)

    def matrix(self, rows: int, columns: int, dtype: npt.DTypeLike, order: Layout) -> torch.Tensor:
        """A tensor over the memory."""
        typed = self._memory.view(torch.from_numpy(np.empty(0, dtype)).dtype)
        if order == "F":
            return typed[: rows * columns].view(columns, rows).t()
        return typed[: rows * columns].view(rows, columns)

    def indices(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        """The numbers as a tensor there."""
        return torch.from_numpy(numbers).to(self._device)
