"""The parts of CuPy that `fastpipe.cuda` uses, implemented over host memory.

A stream is a queue of work that runs only when something waits for it. Work that a stream doesn't wait for thus hasn't
happened when the stream runs, which reveals missing synchronization.
"""

from __future__ import annotations

import ctypes
import threading
import types
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from fastpipe._interop.memory import aligned

# The device runs work of any stream on one thread at a time.
_device = threading.RLock()


class Stream:
    """Work that runs in order. As a context manager, it is the current stream."""

    def __init__(self, non_blocking: bool = False) -> None:
        self._work: list[Callable[[], object]] = []
        self._done = 0

    @property
    def length(self) -> int:
        return len(self._work)

    def put(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def run(self, until: int) -> None:
        with _device:
            while self._done < until:
                self._done += 1
                self._work[self._done - 1]()

    def synchronize(self) -> None:
        self.run(len(self._work))

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def __enter__(self) -> Self:
        _streams.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams.entered.pop()


class _Current(threading.local):
    """The streams that a thread has entered."""

    def __init__(self) -> None:
        self.entered = [DEFAULT]


DEFAULT = Stream()
_streams = _Current()


def current() -> Stream:
    """Returns the thread's current stream."""
    return _streams.entered[-1]


class Event:
    """A point in the work of a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self._stream, self._at = DEFAULT, 0

    def record(self, stream: Stream) -> None:
        self._stream, self._at = stream, stream.length

    @property
    def done(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._stream.run(self._at)


class MemoryPointer:
    """A position in memory that belongs to a stream."""

    def __init__(self, memory: np.ndarray, stream: Stream, offset: int = 0) -> None:
        self.memory, self.stream, self.offset = memory, stream, offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.memory, self.stream, self.offset + offset)

    def copy_from_host_async(self, mem: ctypes.c_void_p, size: int, stream: Stream) -> None:
        unowned = (ctypes.c_ubyte * size).from_address(mem.value or 0)
        stream.put(lambda: np.copyto(self.memory[self.offset : self.offset + size], np.frombuffer(unowned, np.uint8)))


def ndarray(shape: tuple[int, ...], dtype: Any, memptr: MemoryPointer, order: Any = "C") -> np.ndarray:
    return np.ndarray(shape, dtype, buffer=memptr.memory.data, offset=memptr.offset, order=order)


class Device:
    """A device, also usable as a context manager."""

    def __init__(self, index: int = 0) -> None:
        self.id = index

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


# Memory of a device in bytes.
MEMORY = 1 << 20


def alloc(size: int) -> MemoryPointer:
    if size > MEMORY:
        raise OutOfMemoryError(f"out of memory allocating {size} bytes")
    return MemoryPointer(np.full(size, 255, np.uint8), current())


def modules(devices: int = 2) -> types.ModuleType:
    """Returns a replacement for the module `cupy`, for a machine with `devices` devices."""

    def count() -> int:
        if devices == 0:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return devices

    cupy: Any = types.ModuleType("cupy")
    cupy.ndarray = ndarray
    cupy.cuda = types.SimpleNamespace(
        Device=Device,
        Event=Event,
        Stream=Stream,
        alloc=alloc,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        alloc_pinned_memory=lambda size: aligned((size,), np.uint8),
        get_current_stream=current,
        runtime=types.SimpleNamespace(
            getDeviceCount=count, CUDARuntimeError=CUDARuntimeError, memGetInfo=lambda: (MEMORY // 2, MEMORY)
        ),
    )
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(free_bytes=lambda: MEMORY // 4)
    cupy.asarray = np.asarray
    module: types.ModuleType = cupy
    return module
