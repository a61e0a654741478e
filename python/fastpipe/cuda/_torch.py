"""GPUs by way of PyTorch: page-locked memory, a stream to copy on, and tensors of batches or of rows."""

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
    """The GPU that a user names.

    Raises:
        DeviceError: if there is none of this name, or no driver for it.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        # What isn't of any type that it takes, Torch answers with a list of those.
        reason = error if isinstance(error, RuntimeError) else f"not {device!r}"
        raise DeviceError(f'device names a GPU, as "cuda:0" does: {reason}') from None
    if found.type != "cuda":
        raise DeviceError(f'device names a GPU, as "cuda:0" does, not {str(found)!r}: fastpipe.torch needs none')
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise DeviceError(
            f"PyTorch {torch.__version__} is built without CUDA: install a build with it (pytorch.org says how), or use"
            " fastpipe.torch, which needs no GPU"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            "PyTorch finds no GPU here, or no driver that works with it (nvidia-smi shows both): use"
            ' fastpipe.torch, or fill devices=["cpu"], which need none'
        )
    # Its type says that there is an index always.
    index = torch.cuda.current_device() if found.index is None else found.index  # type: ignore[redundant-expr]
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no device cuda:{index}: the machine has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def page_locked(device: torch.device, nbytes: int) -> np.ndarray:
    """Page-locked memory as an array of at least `nbytes` bytes."""
    # PyTorch takes powers of two in any case, and keeps them when they are given back.
    size = 1 << max(nbytes - 1, 0).bit_length()
    with torch.cuda.device(device):
        array: np.ndarray = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return array


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
        _recorded(self._stream).synchronize()

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

    def _event(self, kept: Any = None) -> EventCompletion:
        """The completion of all that was begun."""
        event = _recorded(self._stream)
        return EventCompletion(event, event.query, kept)


class _Tensors(NamedTuple):
    """A batch on the device.

    Attributes:
        batch: what the consumer gets.
        owners: the tensors that have the memory of all others.
    """

    batch: dict[str, Any]
    owners: list[torch.Tensor]


def _recorded(stream: Any) -> Any:
    """An event after all that a stream has to do."""
    # A thread that waits for it sleeps: the processors are wanted for decoding.
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@cache
def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """PyTorch's dtype for NumPy's."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
