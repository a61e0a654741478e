"""JAX arrays over the memory of NumPy arrays, without the per-array overhead of JAX's Python code.

`jax.device_put` takes 30 to 40 microseconds per array, because it derives the same facts for each array. The function
that it finally calls, jaxlib's `batched_device_put`, takes 4 to 7. That function isn't documented, although the
arguments passed here have been its first five from JAX 0.4.26 to 0.12. So it is verified before it is used, on each
device, and for each shape under a sharding. Its arrays must have the same type, device, values and memory as arrays of
JAX's documented functions, and must keep the memory alive. If it fails, the documented functions are used, and the
logger `"fastpipe"` warns once.

The function also doesn't distinguish explicit from implicit transfers. While `jax.transfer_guard` logs or disallows
transfers, arrays are created by the documented functions, which the guard treats as explicit.
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
"""Creates JAX arrays from NumPy arrays."""

_log = logging.getLogger("fastpipe")
# mypy doesn't know the attributes of its options.
_config: Any = jax.config

# Contains the reason why the function isn't used, after the warning.
_warned: list[str] = []

# Number of cached abstract values by shape and dtype. Each value takes 4 microseconds to create, and 500 bytes. The
# cache is limited because ragged and sparse arrays keep having new shapes.
_MOST_AVALS = 4096


def put(arrays: list[np.ndarray]) -> list[jax.Array]:
    """Puts arrays on JAX's default device without committing them to it, as `jax.device_put` does.

    On a CPU, the JAX arrays share the memory of aligned arrays.

    Args:
        arrays: Arrays of numbers or bools, with dtypes that JAX supports under its current options.
    """
    if _guarded():
        return _device_put(arrays)
    device = _config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return _put_on(device)(arrays)


class Sharded:
    """Puts arrays on devices according to a sharding.

    JAX's documented functions put the first array of each shape and dtype, and later arrays are placed like the first
    one. If the sharding contains devices of other processes, the documented functions put all arrays.

    Args:
        sharding: Layout of arrays over devices.
        scale: Factor by which the global array has more rows than a local one.
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
    """Returns a function that puts arrays on a device, which must be the default device."""

    def build(batched_device_put: Any) -> Put:
        sharding = SingleDeviceSharding(device)
        devices = [device]
        return lambda arrays: [
            batched_device_put(_aval(array.shape, array.dtype), sharding, [array], devices, False) for array in arrays
        ]

    return _verified(build, _device_put, (64, 3), [np.float32, np.int32, np.bool_])


def _device_put(arrays: list[np.ndarray]) -> list[jax.Array]:
    # This shares memory as from_dlpack does, which takes twice the time and would commit the arrays to their device.
    placed: list[jax.Array] = jax.device_put(arrays)
    return placed


@functools.lru_cache(_MOST_AVALS)
def _aval(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return jax.core.ShapedArray(shape, dtype)


def _verified(build: Callable[[Any], Put], documented: Put, shape: tuple[int, ...], dtypes: list[Any]) -> Put:
    """Returns the function that `build` creates if it works like `documented`, and otherwise `documented`."""
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
    """Raises an error if `put` doesn't work like the documented function."""
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
    """Counts the references to the array and to its memory, because parts of the array refer to the memory."""
    return sys.getrefcount(example) + sys.getrefcount(example.base)


def _shared(array: jax.Array, example: np.ndarray) -> list[bool]:
    """Returns for each part of the array whether it is stored in the example's memory."""
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
        "JAX %s, jaxlib %s: jaxlib.xla_client.batched_device_put has changed (%s), so arrays take 40"
        " microseconds each instead of 5",
        jax.__version__,
        jaxlib_version,
        reason,
    )
