"""JAX arrays over the memory of NumPy arrays, without what JAX's own Python costs for each.

`jax.device_put` takes 30 to 40 microseconds an array: it finds out anew for each what is the same for all. What it ends
in, jaxlib's `batched_device_put`, takes 4 to 7. That isn't documented, though the arguments given here have been its
first five from JAX 0.4.26 to 0.12. So it is tried out before it is used, on each device, and for each shape under a
sharding: what it makes must have the type, device, values and memory that an array of JAX's documented functions has,
and keep the memory alive. Else those functions are used, and a warning of the logger `"fastpipe"` says so, once.

Nor does it know explicit transfers from implicit ones. While `jax.transfer_guard` reports or refuses some, arrays are
made by the documented functions, which the guard takes for explicit.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxlib.version import __version__ as jaxlib_version

from fastpipe._interop.memory import aligned

Put: TypeAlias = Callable[[list[np.ndarray]], list[jax.Array]]
"""Makes JAX arrays of NumPy arrays."""

_log = logging.getLogger("fastpipe")
# Its options are no attributes for mypy.
_config: Any = jax.config

# Why it isn't used, once that has been said.
_warned: list[str] = []

# Abstract values, by shape and dtype: each takes 4 microseconds to make, and 500 bytes. Ragged and sparse arrays have
# ever new shapes, so not all are kept.
_MOST_AVALS = 4096


def put(arrays: list[np.ndarray]) -> list[jax.Array]:
    """Puts arrays on JAX's default device, without committing them to it, as `jax.device_put` does.

    Where that is a CPU they share memory that is aligned.

    Args:
        arrays: of numbers or bools, of types that JAX has with the options of now.
    """
    if _guarded():
        return _device_put(arrays)
    device = _config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return _put_on(device)(arrays)


class Sharded:
    """Puts arrays on devices as a sharding says: call it with arrays.

    The first array of each shape and dtype is put by JAX's documented functions, further ones where its parts are.
    Those functions put all if the sharding has devices of other processes.

    Args:
        sharding: how to lay arrays out over devices.
        scale: how many times as many rows as an array's the global array has.
    """

    def __init__(self, sharding: Sharding, scale: int) -> None:
        self._sharding = sharding
        self._scale = scale
        self._puts: dict[tuple[tuple[int, ...], np.dtype], Put] = {}

    def __call__(self, arrays: list[np.ndarray]) -> list[jax.Array]:
        if not self._sharding.is_fully_addressable or _guarded():
            return self._documented(arrays)
        made = []
        for array in arrays:
            put = self._puts.get((array.shape, array.dtype))
            if put is None:
                put = self._puts[array.shape, array.dtype] = self._put_like(array)
            made += put([array])
        return made

    def _put_like(self, example: np.ndarray) -> Put:
        def build(batched_device_put: Any) -> Put:
            made: Any = self._documented([example])[0]
            aval, sharding = made.aval, made.sharding
            devices = [shard.device for shard in made.addressable_shards]
            parts = [shard.index for shard in made.addressable_shards]
            return lambda arrays: [
                batched_device_put(aval, sharding, [array[part] for part in parts], devices, True) for array in arrays
            ]

        return _verified(build, self._documented, example.shape, [example.dtype])

    def _documented(self, arrays: list[np.ndarray]) -> list[jax.Array]:
        if self._sharding.is_fully_addressable:
            placed: list[jax.Array] = jax.device_put(arrays, self._sharding)
            return placed
        return [
            jax.make_array_from_process_local_data(
                self._sharding, array, (array.shape[0] * self._scale, *array.shape[1:])
            )
            for array in arrays
        ]


def _guarded() -> bool:
    return _config.jax_transfer_guard_host_to_device not in (None, "allow")


@functools.cache
def _put_on(device: Any) -> Put:
    """What puts arrays on a device, which is the default one."""

    def build(batched_device_put: Any) -> Put:
        sharding = SingleDeviceSharding(device)
        devices = [device]
        return lambda arrays: [
            batched_device_put(_aval(array.shape, array.dtype), sharding, [array], devices, False) for array in arrays
        ]

    return _verified(build, _device_put, (64, 3), [np.float32, np.int32, np.bool_])


def _device_put(arrays: list[np.ndarray]) -> list[jax.Array]:
    # It shares memory as from_dlpack does. That takes twice the time, and would bind the arrays to their device.
    placed: list[jax.Array] = jax.device_put(arrays)
    return placed


@functools.lru_cache(_MOST_AVALS)
def _aval(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return jax.core.ShapedArray(shape, dtype)


def _verified(build: Callable[[Any], Put], documented: Put, shape: tuple[int, ...], dtypes: list[Any]) -> Put:
    """What `build` makes of `batched_device_put`, if that does as the documented function; else the latter."""
    try:
        put = build(_batched_device_put())
        with jax.transfer_guard("allow"):
            for dtype in dtypes:
                _check(put, documented, shape, dtype)
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")
        return documented
    return put


def _batched_device_put() -> Any:
    from jaxlib.xla_client import batched_device_put

    return batched_device_put


def _check(put: Put, documented: Put, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises something, if `put` doesn't do as the documented function."""
    example = aligned(shape, dtype)
    example[...] = np.arange(example.size).reshape(shape) % 101
    references = _references(example)
    found: Any = put([example])[0]
    held = _references(example) > references
    wanted: Any = documented([example])[0]
    if type(found) is not type(wanted):
        raise TypeError(f"it makes {type(found).__name__}, not {type(wanted).__name__}")
    for attribute in ("aval", "sharding", "_committed"):
        made, expected = getattr(found, attribute), getattr(wanted, attribute)
        if made != expected:
            raise ValueError(f"{attribute} of its arrays is {made!r}, not {expected!r}")
    if np.asarray(found).tobytes() != example.tobytes():
        raise ValueError("its arrays have other values")
    shared = _shared(found, example)
    if any(before and not now for before, now in zip(_shared(wanted, example), shared, strict=True)):
        raise ValueError("its arrays don't share memory")
    if any(shared) and not held:
        raise ValueError("its arrays don't keep memory alive")


def _references(example: np.ndarray) -> int:
    """To the array and to its memory: those of its parts refer to the latter."""
    return sys.getrefcount(example) + sys.getrefcount(example.base)


def _shared(array: jax.Array, example: np.ndarray) -> list[bool]:
    """Which of the array's parts lie in the example's memory."""
    memory = range(example.ctypes.data, example.ctypes.data + example.nbytes)
    return [
        shard.device.platform == "cpu" and shard.data.unsafe_buffer_pointer() in memory
        for shard in array.addressable_shards
    ]


def _warn(reason: str) -> None:
    if _warned:
        return
    _warned.append(reason)
    _log.warning(
        "JAX %s, jaxlib %s: jaxlib.xla_client.batched_device_put isn't what it was (%s), so that arrays take 40"
        " microseconds each instead of 5",
        jax.__version__,
        jaxlib_version,
        reason,
    )
