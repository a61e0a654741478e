"""PyTorch's copy engine over host memory, which tests everything except the GPU itself without one.

Copies are delayed until something waits for them or, as on a GPU, until the consumer needs them. If the reader reused
its memory too early, later batches have overwritten it by then.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from fastpipe._interop.memory import aligned
from fastpipe._interop.tensors import Forms
from fastpipe.cuda._torch import TorchEngine


class PlainEngine(TorchEngine):
    """Copies to tensors on the CPU."""

    def __init__(self, device: Any = "cpu", forms: Forms | None = None) -> None:
        self._begun: list[Callable[[], object]] = []
        self._running = threading.Lock()
        super().__init__(device, forms or Forms())
        self.allocate = _memory
        # Number of pieces copied for each batch.
        self.pieces: list[int] = []

    def arrive(self, device: Any, completion: Any) -> dict[str, Any]:
        completion.wait()
        batch: dict[str, Any] = device.batch
        return batch

    def _copy(self, host: Any) -> Any:
        before = len(self._begun)
        made = super()._copy(host)
        self.pieces.append(len(self._begun) - before)
        return made

    def _transfer(self, piece: torch.Tensor, to: torch.Tensor) -> None:
        # Only the address is used, so that only the ring keeps the memory alive.
        unowned = (ctypes.c_ubyte * piece.numel()).from_address(piece.data_ptr())
        self._begun.append(partial(to.copy_, torch.frombuffer(unowned, dtype=torch.uint8)))

    def _checked(self, device: Any) -> torch.device:
        return torch.device("cpu")

    def _new_stream(self) -> None:
        return None

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _event(self, kept: Any = None) -> Any:
        return _Late(self._begun, len(self._begun), kept, self._running)


def _memory(nbytes: int) -> np.ndarray:
    return aligned((nbytes,), np.uint8)


class _Late:
    """The completion of the first `until` copies."""

    def __init__(self, begun: list[Any], until: int, kept: Any, lock: threading.Lock) -> None:
        self._lock = lock
        self._begun = begun
        self._until = until
        self._kept = kept

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        with self._lock:
            for i, copy in enumerate(self._begun[: self._until]):
                if copy is not None:
                    copy()
                    self._begun[i] = None
        self._kept = None
