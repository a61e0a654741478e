"""GPUs through PyTorch: page-locked memory, a stream for copies, and tensors of batches or rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fastpipe._interop.tensors import Forms
from fastpipe.cuda._fill._devices import Layout, Piece
from fastpipe.cuda._staging import Completion, EventCompletion, PackedBatch
from fastpipe.errors import DeviceError, OutOfMemoryError


def gpu(device: Any) -> torch.device:
    """Returns the GPU that `device` names.

    Raises:
        DeviceError: If the GPU or its driver isn't available.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        # For an unsupported type, torch's error only lists the supported types.
        reason = error if isinstance(error, RuntimeError) else f"got {device!r}"
        raise DeviceError(f'device must be a GPU such as "cuda:0": {reason}') from None
    if found.type != "cuda":
        raise DeviceError(f'device must be a GPU such as "cuda:0"; got {str(found)!r}. fastpipe.torch needs no GPU')
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise DeviceError(
            f"PyTorch {torch.__version__} is built without CUDA: install a build with CUDA (see pytorch.org), or use"
            " fastpipe.torch, which needs no GPU"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            "PyTorch finds no GPU here, or no driver that works with it (nvidia-smi shows both): use"
            ' fastpipe.torch, or fill devices=["cpu"], which need no GPU'
        )
    # According to its type, the index can't be None, but it can.
    index = torch.cuda.current_device() if found.index is None else found.index  # type: ignore[redundant-expr]
    if index >= torch.cuda.device_count():
        raise DeviceError(f"device cuda:{index} does not exist: the machine has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def page_locked(device: torch.device, nbytes: int) -> np.ndarray:
    """Returns page-locked memory as an array of at least `nbytes` bytes."""
    # PyTorch rounds up to powers of two in any case, and keeps freed memory.
    size = 1 << max(nbytes - 1, 0).bit_length()
    with torch.cuda.device(device):
        array: np.ndarray = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return array


class TorchDevice:
    """A GPU whose arrays are tensors.

    Args:
        device: Device, as PyTorch names it.

    Raises:
        DeviceError: If the GPU isn't available.
    """

    def __init__(self, device: Any) -> None:
        self._device = gpu(device)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def name(self) -> str:
        """The device's name in PyTorch."""
        return str(self._device)

    def free(self) -> int:
        """Returns the free bytes of the driver and of PyTorch's memory cache."""
        # Memory that PyTorch has cached is also free.
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + kept

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocates page-locked memory."""
        return page_locked(self._device, nbytes)

    def hold(self, nbytes: int) -> None:
        """Allocates memory on the GPU."""
        try:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{self.name} cannot allocate {nbytes} contiguous bytes: reduce occupancy or rows ({error})"
            ) from error
        # Other streams may still use memory from the cache.
        self.settle()

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies pieces on a separate stream and waits until they have arrived."""
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                to = self._memory[piece.at : piece.at + len(piece.bytes)]
                to.copy_(torch.from_numpy(piece.bytes), non_blocking=True)
        _recorded(self._stream).synchronize()

    def settle(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize(self._device)

    def matrix(self, rows: int, columns: int, dtype: npt.DTypeLike, order: Layout) -> torch.Tensor:
        """Returns a tensor over the memory."""
        typed = self._memory.view(torch.from_numpy(np.empty(0, dtype)).dtype)
        if order == "F":
            return typed[: rows * columns].view(columns, rows).t()
        return typed[: rows * columns].view(rows, columns)

    def indices(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        """Returns the numbers as a tensor on the GPU."""
        return torch.from_numpy(numbers).to(self._device)


class TorchEngine:
    """Copies batches to one GPU as tensors.

    Their memory is allocated on the copying stream and recorded for the stream that uses it (`record_stream`). So it is
    reused only after both streams no longer need it.

    Args:
        device: Device, as PyTorch names it.
        forms: Types of ragged, sparse and string features.

    Raises:
        DeviceError: If the GPU isn't available.
    """

    def __init__(self, device: Any, forms: Forms) -> None:
        self.device = self._checked(device)
        self._forms = forms
        self._stream = self._new_stream()
        # Allocates a page-locked uint8 array of at least the given size in bytes. It doesn't reference the engine,
        # since arrays may outlive the engine.
        self.allocate: Callable[[int], np.ndarray] = partial(page_locked, self.device)

    def __str__(self) -> str:
        return str(self.device)

    def begin(self) -> None:
        """Does nothing. The consumer's thread calls it before a pass."""

    def copy(self, host: Any) -> tuple[Any, Completion]:
        """Begins copying a batch in a few pieces to one tensor of bytes. Its tensors are views of that tensor."""
        with self._on_stream():
            try:
                return self._copy(host)
            except BaseException:
                # Started copies must not outlast the host batch.
                self._event().wait()
                raise

    def arrive(self, device: Any, completion: Any) -> dict[str, Any]:
        """Makes the consumer's stream, the current stream of its thread, wait for a batch."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(completion.event)
        for owner in device.owners:
            owner.record_stream(stream)
        batch: dict[str, Any] = device.batch
        return batch

    def _copy(self, host: Mapping[str, Any]) -> tuple[_Tensors, EventCompletion]:
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
                # The array is empty, or was created for a type that the batch doesn't contain.
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

    def _event(self, kept: Any = None) -> EventCompletion:
        """Returns the completion of all started copies."""
        event = _recorded(self._stream)
        return EventCompletion(event, event.query, kept)


class _Tensors(NamedTuple):
    """A batch on the device.

    Attributes:
        batch: The batch that the consumer receives.
        owners: The tensors that own the memory of all other tensors.
    """

    batch: dict[str, Any]
    owners: list[torch.Tensor]


def _recorded(stream: Any) -> Any:
    """Returns an event recorded after all work of a stream so far."""
    # With a blocking event, a waiting thread sleeps and leaves the processors to decoding.
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@cache
def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Returns PyTorch's dtype for NumPy's."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
