"""A GPU by way of PyTorch: page-locked memory, a stream of its own to copy on, and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fastpipe._interop.gpu_torch import gpu, page_locked
from fastpipe._interop.staging import Completion
from fastpipe._interop.tensors import Forms
from fastpipe.batch._packing import PackedBatch

__all__ = ["TorchEngine"]


class TorchEngine:
    """Copies batches to one GPU, as tensors.

    Their memory is the copying stream's, and told to the stream that uses it (`record_stream`): so it is used again
    when both are done with it.

    Args:
        device: as PyTorch names it.
        forms: what ragged, sparse and string features become.

    Raises:
        DeviceError: if there is no such GPU.
    """

    def __init__(self, device: Any, forms: Forms) -> None:
        self.device = self._checked(device)
        self._forms = forms
        self._stream = self._new_stream()
        # Page-locked uint8 arrays of at least these bytes. It does not know the engine, since they may outlast it.
        self.allocate: Callable[[int], np.ndarray] = partial(page_locked, self.device)

    def __str__(self) -> str:
        return str(self.device)

    def begin(self) -> None:
        """Called by the consumer's thread before a pass."""

    def copy(self, host: Any) -> tuple[Any, Completion]:
        """Begins to copy a batch: in a few pieces to one tensor of bytes, of which its tensors are views."""
        with self._on_stream():
            try:
                return self._copy(host)
            except BaseException:
                # What was begun must not outlast the batch.
                self._event().wait()
                raise

    def arrive(self, device: Any, completion: Any) -> dict[str, Any]:
        """Lets the consumer's stream, the current one of his thread, wait for a batch."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(completion.event)
        for owner in device.owners:
            owner.record_stream(stream)
        batch: dict[str, Any] = device.batch
        return batch

    def _copy(self, host: Mapping[str, Any]) -> tuple[_Tensors, _Completion]:
        packed = PackedBatch(host, self.allocate)
        memory = torch.empty(packed.nbytes, dtype=torch.uint8, device=self.device)
        for piece, start in packed.pieces:
            self._transfer(torch.from_numpy(piece), memory[start : start + piece.nbytes])
        owners = [memory]
        kept: list[Any] = [packed]
        of_dtype: dict[np.dtype[Any], torch.Tensor] = {}

        def tensor(array: np.ndarray) -> torch.Tensor:
            place = packed.place(array)
            if place is None:
                # Empty, or made for a form that the batch isn't in.
                on_host = torch.from_numpy(array)
                kept.append(on_host)
                owners.append(on_host.to(self.device, non_blocking=True))
                return owners[-1]
            typed, size = of_dtype.get(array.dtype), array.itemsize
            if typed is None:
                typed = of_dtype[array.dtype] = memory.view(_dtype(array.dtype))
            return typed.as_strided(array.shape, [stride // size for stride in array.strides], place // size)

        batch = self._forms.convert(host, tensor)
        return _Tensors(batch, owners), self._event(kept)

    def _transfer(self, piece: torch.Tensor, to: torch.Tensor) -> None:
        to.copy_(piece, non_blocking=True)

    def _checked(self, device: Any) -> torch.device:
        return gpu(device)

    def _new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def _event(self, kept: Any = None) -> _Completion:
        """The completion of all that was begun."""
        # Who waits for it sleeps: the processors are wanted for decoding.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _Completion(event, kept)


class _Tensors(NamedTuple):
    """A batch on the device.

    Attributes:
        batch: what the consumer gets.
        owners: the tensors that have the memory of all others.
    """

    batch: dict[str, Any]
    owners: list[torch.Tensor]


class _Completion:
    """An event behind the copies of a batch."""

    def __init__(self, event: Any, kept: Any) -> None:
        self.event = event
        # Host memory that must stay as it is until then.
        self._kept = kept

    def done(self) -> bool:
        done: bool = self.event.query()
        return done

    def wait(self) -> None:
        self.event.synchronize()
        self._kept = None


@cache
def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """PyTorch's dtype for NumPy's."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
