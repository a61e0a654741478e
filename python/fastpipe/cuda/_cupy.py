"""GPUs through CuPy: page-locked memory, a stream for copies, and `cupy.ndarray`s of batches or rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from fastpipe import batch as forms
from fastpipe.cuda._fill._devices import Layout, Piece
from fastpipe.cuda._staging import Completion, EventCompletion, PackedBatch
from fastpipe.errors import DeviceError, OutOfMemoryError


def page_locked(index: int, nbytes: int) -> np.ndarray:
    """Returns page-locked memory as an array of bytes."""
    with cupy.cuda.Device(index):
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def gpu(device: Any) -> int:
    """Returns the index of the GPU that `device` names.

    Raises:
        DeviceError: If the GPU or its driver isn't available.
    """
    kind, _, index = str(device).partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise DeviceError(f'device must be a GPU such as "cuda:0"; got {device!r}')
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"CuPy finds no GPU here, or no driver that works with it: {error}") from None
    found = int(index) if index else cupy.cuda.Device().id
    if found >= count:
        raise DeviceError(f"device cuda:{found} does not exist: the machine has {count} GPUs")
    return int(found)


class CupyDevice:
    """A GPU whose arrays are `cupy.ndarray`s.

    Args:
        device: `"cuda:<index>"`.

    Raises:
        DeviceError: If the GPU isn't available.
    """

    def __init__(self, device: Any) -> None:
        self._device = cupy.cuda.Device(gpu(device))
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._memory: Any = None

    @property
    def name(self) -> str:
        """The device's name for messages."""
        return f"cuda:{self._device.id}"

    def free(self) -> int:
        """Returns the free bytes of the driver and of CuPy's memory pool."""
        with self._device:
            return int(cupy.cuda.runtime.memGetInfo()[0]) + int(cupy.get_default_memory_pool().free_bytes())

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocates page-locked memory."""
        return page_locked(self._device.id, nbytes)

    def hold(self, nbytes: int) -> None:
        """Allocates memory on the GPU."""
        with self._device:
            try:
                self._memory = cupy.cuda.alloc(nbytes)
            except cupy.cuda.memory.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"{self.name} cannot allocate {nbytes} contiguous bytes: reduce occupancy or rows ({error})"
                ) from error
        # Other streams may still use memory from the pool.
        self.settle()

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies pieces on a separate stream and waits until they have arrived."""
        with self._device:
            _copied(pieces, self._memory, self._stream).synchronize()

    def settle(self) -> None:
        """Waits for the GPU."""
        with self._device:
            self._device.synchronize()

    def matrix(self, rows: int, columns: int, dtype: npt.DTypeLike, order: Layout) -> Any:
        """Returns an array over the memory."""
        with self._device:
            return cupy.ndarray((rows, columns), dtype, memptr=self._memory, order=order)

    def indices(self, numbers: npt.NDArray[np.int64]) -> Any:
        """Returns the numbers as an array on the GPU."""
        with self._device:
            return cupy.asarray(numbers)


class CupyEngine:
    """Copies batches to one GPU. Batches keep the reader's types, with `cupy.ndarray`s as arrays.

    CuPy has no `record_stream`. So the memory of batches is allocated on the consumer's stream, which is the current
    stream when a pass begins. The copying stream waits until the consumer's stream no longer uses the memory.

    Args:
        device: `"cuda:<index>"`, or `"cuda"` for CuPy's current device.

    Raises:
        DeviceError: If the GPU isn't available.
    """

    def __init__(self, device: Any) -> None:
        self._device = cupy.cuda.Device(gpu(device))
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._consumer = cupy.cuda.get_current_stream()
        # Allocates a page-locked uint8 array of at least the given size in bytes. It doesn't reference the engine,
        # since arrays may outlive the engine.
        self.allocate: Callable[[int], np.ndarray] = partial(page_locked, self._device.id)

    def __str__(self) -> str:
        return f"cuda:{self._device.id}"

    def begin(self) -> None:
        """Stores the current stream of the consumer's thread before a pass."""
        with self._device:
            self._consumer = cupy.cuda.get_current_stream()

    def copy(self, host: Any) -> tuple[Any, Completion]:
        """Begins copying a batch in a few pieces to one memory region, over which its arrays are created."""
        with self._device:
            try:
                return self._copy(host)
            except BaseException:
                # Started copies must not outlast the host batch.
                self._stream.synchronize()
                raise

    def arrive(self, device: Any, completion: Any) -> Any:
        """Makes the consumer's stream, the current stream of its thread, wait for a batch."""
        with self._device:
            cupy.cuda.get_current_stream().wait_event(completion.event)
        return device

    def _copy(self, host: Mapping[str, Any]) -> tuple[dict[str, Any], EventCompletion]:
        packed = PackedBatch(host, self.allocate)
        with self._consumer:
            memory = cupy.cuda.alloc(packed.nbytes)
        unused = cupy.cuda.Event(disable_timing=True)
        unused.record(self._consumer)
        self._stream.wait_event(unused)
        event = _copied(packed.pieces, memory, self._stream)

        def on_device(array: np.ndarray) -> Any:
            # An empty array has no place in the memory.
            return cupy.ndarray(array.shape, array.dtype, memptr=memory + (packed.place(array) or 0))

        batch = {name: _form(node, on_device) for name, node in host.items()}
        return batch, EventCompletion(event, lambda: bool(event.done), packed)


def _copied(pieces: Iterable[tuple[np.ndarray, int]], memory: Any, stream: Any) -> Any:
    """Begins copying pieces to their places in the device's memory, and returns an event recorded after them."""
    for piece, start in pieces:
        at = ctypes.c_void_p(piece.ctypes.data)
        (memory + start).copy_from_host_async(at, piece.nbytes, stream)
    # With a blocking event, a waiting thread sleeps and leaves the processors to decoding.
    event = cupy.cuda.Event(block=True, disable_timing=True)
    event.record(stream)
    return event


def _form(node: Any, on_device: Callable[[np.ndarray], Any]) -> Any:
    """Returns the same batch type with arrays on the device. `dense_shape` stays in host memory."""
    match node:
        case np.ndarray():
            return on_device(node)
        case forms.Strings():
            return forms.Strings(on_device(node.values), on_device(node.offsets), node.shape, node.binary)
        case forms.Ragged():
            return forms.Ragged(_form(node.values, on_device), on_device(node.offsets))
        case forms.Masked():
            return forms.Masked(_form(node.values, on_device), on_device(node.valid))
        case forms.Sparse():
            return forms.Sparse(on_device(node.indices), _form(node.values, on_device), node.dense_shape)
        case _:
            values = _form(node.values, on_device)
            return forms.SparseCSR(on_device(node.offsets), on_device(node.indices), values, node.dense_shape)
