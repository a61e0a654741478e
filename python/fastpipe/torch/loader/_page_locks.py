"""Memory of batches that CUDA page-locks in place, so that a GPU copies from it directly and batches need no copy.

The memory of a batch is registered with CUDA when it is delivered for the first time. The consumer reuses its memory,
so after a few batches no further memory is registered. torch asks CUDA about a tensor's address, so `is_pinned()` is
true for tensors in this memory, and `pin_memory()` returns them unchanged.

A copy with `non_blocking=True` may begin long after the program has dropped the batch. torch tracks such copies from
its own page-locked memory, but not from other memory, and the program may use any stream. So memory is reused only
after an event that captures all work of each device that this process uses (`cuCtxRecordEvent`), recorded after the
program has dropped the batch. `next` records the events. It waits for a device that lags by many batches, so that
memory stays bounded.

The driver's API is called through cuda.bindings, which torch's wheels for CUDA 13 install. Unlike in the runtime's
API, a later call doesn't report an earlier error again.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from fastpipe._fastpipe import ItemConsumer, ItemMemory

# Seconds for which `next` waits for a device that lags behind, and between its checks. After that, batches get more
# memory: the device may be waiting for another program or a later batch.
_PATIENCE = 1.0
_LOOK = 0.0005


class CudaError(RuntimeError):
    """An error of the CUDA driver."""


class Driver:
    """The functions of the CUDA driver.

    Args:
        device: Index of the device on whose behalf memory is registered. The memory is page-locked for all devices.

    Raises:
        Exception: If cuda.bindings or the driver is missing.
    """

    def __init__(self, device: int) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._contexts: dict[int, Any] = {}
        self._count: int = self._call("cuDeviceGetCount")
        self._context = self._retained(device)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name} failed with {getattr(error, 'name', error)}")
        return values[0] if len(values) == 1 else values

    def _retained(self, device: int) -> Any:
        context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
        self._contexts[device] = context
        return context

    @contextmanager
    def _current(self, context: Any) -> Iterator[None]:
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks memory."""
        with self._current(self._context):
            self._call("cuMemHostRegister", address, nbytes, self._driver.CU_MEMHOSTREGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """Removes the page lock of memory."""
        with self._current(self._context):
            self._call("cuMemHostUnregister", address)

    def record(self) -> list[Any]:
        """Returns events that are complete after all current work of all devices that this process uses."""
        for device in range(self._count):
            if device not in self._contexts:
                _, active = self._call("cuDevicePrimaryCtxGetState", self._call("cuDeviceGet", device))
                if active:
                    self._retained(device)
        events: list[Any] = []
        try:
            for context in self._contexts.values():
                with self._current(context):
                    flags = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
                    events.append(self._call("cuEventCreate", int(flags)))
                    self._call("cuCtxRecordEvent", context, events[-1])
        except BaseException:
            self.destroy(events)
            raise
        return events

    def are_complete(self, events: list[Any]) -> bool:
        """Whether events are complete.

        Raises:
            CudaError: If a device has failed.
        """
        for event in events:
            (error,) = self._driver.cuEventQuery(event)
            if error == self._driver.CUresult.CUDA_ERROR_NOT_READY:
                return False
            if error != self._driver.CUresult.CUDA_SUCCESS:
                raise CudaError(f"a copy of an earlier batch or other work of the GPU failed: {error.name}")
        return True

    def destroy(self, events: list[Any]) -> None:
        """Frees events."""
        for event in events:
            with suppress(CudaError):
                self._call("cuEventDestroy", event)

    def synchronize(self) -> None:
        """Waits for all devices that this process uses."""
        for context in self._contexts.values():
            with self._current(context):
                self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Releases the contexts."""
        for device in self._contexts:
            with suppress(CudaError):
                self._call("cuDevicePrimaryCtxRelease", self._call("cuDeviceGet", device))
        self._contexts.clear()


class PageLocks:
    """The page locks of a consumer's memory. Only the thread that uses the consumer may use them.

    Attributes:
        refusal: The reason why no further memory is page-locked, or an empty string.

    Raises:
        Exception: If memory can't be page-locked in place.
    """

    def __init__(self) -> None:
        self.refusal = ""
        self._process = os.getpid()
        self._registered: set[int] = set()
        # Events, and how many returned batches may be reused after them.
        self._marks: deque[tuple[list[Any], int]] = deque()
        self._marked = 0
        self._driver = Driver(torch.cuda.current_device())
        try:
            self._probe()
        except BaseException:
            self._driver.close()
            raise

    def _probe(self) -> None:
        """Checks that everything works that is needed later."""
        tensor = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
        self._driver.register(tensor.data_ptr(), mmap.PAGESIZE)
        try:
            if not tensor.is_pinned():
                raise CudaError("torch doesn't consider registered memory as page-locked")
            self._driver.destroy(self._driver.record())
        finally:
            self._driver.unregister(tensor.data_ptr())

    def lock(self, memory: ItemMemory) -> None:
        """Page-locks the memory of a batch that is about to be delivered. If CUDA refuses, sets `refusal`."""
        for address, nbytes in memory.pieces():
            if self.refusal or address in self._registered:
                continue
            try:
                self._driver.register(address, nbytes)
            except CudaError as error:
                self.refusal = str(error)
            else:
                self._registered.add(address)

    def unlock(self, address: int) -> bool:
        """Removes the lock of the memory at this address, if it has one. Returns whether it is unlocked now."""
        if address not in self._registered:
            return True
        with suppress(CudaError):
            self._driver.unregister(address)
            self._registered.remove(address)
        return address not in self._registered

    def reuse(self, consumer: ItemConsumer, most: int) -> None:
        """Has the consumer reuse the memory of returned batches that no device copies from anymore.

        Args:
            consumer: Consumer of the memory.
            most: Number of batches by which devices may lag.

        Raises:
            CudaError: If a device has failed.
        """
        returned = consumer.returned()
        # Recording the event would end the capture of a graph.
        if returned > self._marked and not torch.cuda.is_current_stream_capturing():
            self._marks.append((self._driver.record(), returned))
            self._marked = returned
        deadline = time.monotonic() + _PATIENCE
        while self._marks:
            events, count = self._marks[0]
            if self._driver.are_complete(events):
                self._marks.popleft()
                self._driver.destroy(events)
                consumer.reuse(count)
            elif len(self._marks) <= most or time.monotonic() > deadline:
                return
            else:
                time.sleep(_LOOK)

    def close(self) -> None:
        """Removes all locks. The consumer calls this before its memory is unmapped."""
        # A forked process can't use CUDA, and its memory isn't locked.
        if self._process != os.getpid() or sys.is_finalizing():
            return
        if self._registered:
            with suppress(CudaError):
                self._driver.synchronize()
        for address in list(self._registered):
            self.unlock(address)
        for events, _ in self._marks:
            self._driver.destroy(events)
        self._marks.clear()
        self._driver.close()
