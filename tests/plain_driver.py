"""A CUDA driver without a GPU, for tests of page-locked memory: it registers host memory, and "copies" from it later.

`install()` replaces `cuda.bindings.driver` and the functions with which torch finds an accelerator and pins tensors.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
import types
from typing import Any

import torch


class CUresult(enum.IntEnum):
    """Results of the driver's functions."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713
    CUDA_ERROR_LAUNCH_FAILED = 719


class CUevent_flags(enum.IntEnum):
    """Flags of events."""

    CU_EVENT_DISABLE_TIMING = 2


class PlainDriver(types.ModuleType):
    """The functions of the driver that the loader calls.

    Attributes:
        limit: Maximum number of bytes that can be registered.
        registered: Address -> number of bytes.
        registrations: Number of registrations so far.
        waits: Whether copies wait until `finish` is called.
        failed: Whether the device has failed.
    """

    CUresult = CUresult
    CUevent_flags = CUevent_flags
    CU_MEMHOSTREGISTER_PORTABLE = 1

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.limit = sys.maxsize
        self.registered: dict[int, int] = {}
        self.registrations = 0
        self.waits = self.failed = False
        self._process = os.getpid()
        self._current: list[Any] = []
        self._retained = 0
        self._events: dict[int, int] = {}
        self._made = 0
        # Copies that haven't been made: the source, its size, and its bytes when the copy was requested.
        self._copies: list[tuple[int, bytes]] = []
        self._requested = self._copied = 0

    def _check(self) -> None:
        assert os.getpid() == self._process, "a forked process can't use CUDA"

    # The device.

    def copy(self, tensor: torch.Tensor) -> None:
        """Requests a copy of a page-locked tensor, which the device makes later if `waits` is set."""
        size = tensor.nbytes
        assert self.is_locked(tensor.data_ptr(), size)
        self._copies.append((tensor.data_ptr(), ctypes.string_at(tensor.data_ptr(), size)))
        self._requested += 1
        if not self.waits:
            self.finish()

    def finish(self) -> None:
        """Makes all requested copies."""
        for address, wanted in self._copies:
            assert self.is_locked(address, len(wanted)), "memory was unlocked before it was copied"
            assert ctypes.string_at(address, len(wanted)) == wanted, "memory was reused before it was copied"
        self._copies.clear()
        self._copied = self._requested

    def is_locked(self, address: int, nbytes: int) -> bool:
        """Whether memory is page-locked."""
        return any(start <= address and address + nbytes <= start + size for start, size in self.registered.items())

    # The driver's functions.

    def cuDeviceGetCount(self) -> tuple[CUresult, int]:
        self._check()
        return CUresult.CUDA_SUCCESS, 2

    def cuDeviceGet(self, device: int) -> tuple[CUresult, int]:
        return CUresult.CUDA_SUCCESS, device

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[CUresult, int, int]:
        return CUresult.CUDA_SUCCESS, 0, int(device == 1)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[CUresult, str]:
        self._retained += 1
        return CUresult.CUDA_SUCCESS, f"context {device}"

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[CUresult]:
        self._check()
        self._retained -= 1
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: str) -> tuple[CUresult]:
        self._check()
        self._current.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[CUresult, str]:
        return CUresult.CUDA_SUCCESS, self._current.pop()

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[CUresult]:
        assert self._current == ["context 0"]
        assert flags == 1
        if any(start < address + nbytes and address < start + size for start, size in self.registered.items()):
            return (CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        if nbytes + sum(self.registered.values()) > self.limit:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        self.registered[address] = nbytes
        self.registrations += 1
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address: int) -> tuple[CUresult]:
        assert self._current == ["context 0"]
        if address not in self.registered:
            return (CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)
        # This crashes if the memory was unmapped before.
        ctypes.string_at(address, 1)
        del self.registered[address]
        return (CUresult.CUDA_SUCCESS,)

    def cuEventCreate(self, flags: int) -> tuple[CUresult, int]:
        assert self._current
        assert flags == 2
        self._made += 1
        self._events[self._made] = 0
        return CUresult.CUDA_SUCCESS, self._made

    def cuEventDestroy(self, event: int) -> tuple[CUresult]:
        del self._events[event]
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxRecordEvent(self, context: str, event: int) -> tuple[CUresult]:
        assert self._current == [context]
        # Only device 1 copies.
        self._events[event] = self._requested if context == "context 1" else 0
        return (CUresult.CUDA_SUCCESS,)

    def cuEventQuery(self, event: int) -> tuple[CUresult]:
        if self.failed:
            return (CUresult.CUDA_ERROR_LAUNCH_FAILED,)
        is_complete = self._events[event] <= self._copied
        return (CUresult.CUDA_SUCCESS if is_complete else CUresult.CUDA_ERROR_NOT_READY,)

    def cuCtxSynchronize(self) -> tuple[CUresult]:
        self.finish()
        return (CUresult.CUDA_SUCCESS,)

    def is_clean(self) -> bool:
        """Whether nothing is registered, and all events and contexts were freed."""
        return not (self.registered or self._events or self._retained or self._current)


class Pins:
    """torch's functions for page-locked memory, with a `PlainDriver`.

    Attributes:
        driver: The driver.
        copies: Number of tensors that were copied to page-locked memory.
    """

    def __init__(self, driver: PlainDriver) -> None:
        self.driver = driver
        self.copies = 0
        self._copied: set[int] = set()

    def is_pinned(self, tensor: torch.Tensor, device: Any = None) -> bool:
        return tensor.data_ptr() in self._copied or self.driver.is_locked(tensor.data_ptr(), tensor.nbytes)

    def pin_memory(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if self.is_pinned(tensor):
            return tensor
        copy = tensor.clone()
        self.copies += 1
        self._copied.add(copy.data_ptr())
        return copy


def install() -> Pins:
    """Makes torch and fastpipe find a GPU. Only for processes that end after the test."""
    driver = PlainDriver()
    pins = Pins(driver)
    bindings, package = types.ModuleType("cuda.bindings"), types.ModuleType("cuda")
    package.bindings, bindings.driver = bindings, driver  # type: ignore[attr-defined]
    sys.modules |= {"cuda": package, "cuda.bindings": bindings, "cuda.bindings.driver": driver}
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda device: None  # type: ignore[assignment]
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.is_pinned = lambda self, device=None: pins.is_pinned(self)  # type: ignore[method-assign,assignment]
    torch.Tensor.pin_memory = lambda self, device=None: pins.pin_memory(self)  # type: ignore[method-assign,assignment]
    return pins
