"""Putting arrays on JAX's devices. Results equal those of documented functions, which also are the fallback."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib.xla_client
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fastpipe
import fastpipe.jax
import samples
from fastpipe._interop.memory import ALIGNMENT, aligned
from fastpipe.jax import _put
from processes import outputs, run
from samples import Data

DENSE = {"features": {name: samples.FEATURES[name] for name in ("vector", "score")}}
DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Returns 60 rows."""
    return samples.write(tmp_path_factory.mktemp("jax"), [samples.blocks_of(60)])


@pytest.fixture
def x64(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test without or with 64-bit types."""
    jax.config.update("jax_enable_x64", request.param)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def anew() -> Iterator[None]:
    """Clears what was detected about JAX, before and after a test."""
    for found in (_put._put_on.cache_clear, _put._warned.clear):
        found()
    yield
    for found in (_put._put_on.cache_clear, _put._warned.clear):
        found()


def rows() -> NamedSharding:
    return NamedSharding(jax.make_mesh((1,), ("rows",)), PartitionSpec("rows"))


def filled(shape: tuple[int, ...], dtype: str, offset: int = 0) -> np.ndarray:
    """Returns an array that begins `offset` bytes after a multiple of the alignment."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = aligned((size + offset,), np.uint8)[offset:].view(dtype).reshape(shape)
    array[...] = np.arange(array.size).reshape(shape) % 3
    return array


def test_it_is_used_with_this_jax(caplog: pytest.LogCaptureFixture, anew: None) -> None:
    array = filled((8, 3), "float32")
    sharded = _put.Sharded(rows(), 1)
    with caplog.at_level(logging.WARNING, "fastpipe"):
        _put.put([array])
        sharded([array])
    assert not caplog.records
    assert _put._put_on(jax.devices()[0]) is not _put._device_put
    assert set(sharded._puts.values()).isdisjoint([sharded._documented])


@pytest.mark.parametrize("shape", [(), (1,), (1024,), (100, 7), (3, 2, 5), (0,), (0, 2)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "x64"),
    [(dtype, x64) for dtype in DTYPES for x64 in (False, True) if x64 or np.dtype(dtype).itemsize < 8],
    indirect=["x64"],
)
@pytest.mark.usefixtures("x64")
def test_arrays_equal_those_of_device_put(dtype: str, shape: tuple[int, ...]) -> None:
    sharding = rows() if shape else NamedSharding(jax.make_mesh((1,), ("rows",)), PartitionSpec())
    ways = [(_put.put, jax.device_put)]
    if shape:
        ways.append((_put.Sharded(sharding, 1), lambda array: jax.device_put(array, sharding)))
    for put, documented in ways:
        array = filled(shape, dtype)
        for _ in range(2):  # With a sharding, the first call is special.
            made: Any = put([array])[0]
            expected: Any = documented(array)
            assert type(made) is type(expected)
            assert (made.aval, made.sharding, made.committed) == (expected.aval, expected.sharding, expected.committed)
            assert (made.dtype, made.weak_type) == (array.dtype, False)
            assert np.array_equal(made, array)
            assert array.size == 0 or made.unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize("offset", [4, 16, 32, 60])
def test_unaligned_arrays_are_correct(offset: int) -> None:
    array = filled((100, 3), "int32", offset)
    assert array.ctypes.data % ALIGNMENT == offset
    before = array.copy()
    for put in (_put.put, _put.Sharded(rows(), 1)):
        for _ in range(2):
            assert np.array_equal(put([array])[0], before)
    assert np.array_equal(_put.put([array[::2, 1:]])[0], before[::2, 1:])
    assert np.array_equal(_put.put([array.T])[0], before.T)


def test_the_arrays_of_batches_are_aligned(data: Data) -> None:
    """The alignment lets JAX share their memory."""
    for batch in data.read(batch_size=7):
        for name, node in batch.items():
            for array in fastpipe.jax._forms.leaves(node, name):
                assert array.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("sharded", [False, True])
def test_arrays_keep_memory_alive(sharded: bool) -> None:
    put = _put.Sharded(rows(), 1) if sharded else _put.put
    put([filled((1000, 3), "float32")])
    array = filled((1000, 3), "float32")
    expected, memory = array.copy(), weakref.ref(array.base)
    made = put([array])[0]
    del array
    gc.collect()
    put([filled((1000, 3), "float32")])
    assert memory() is not None
    assert np.array_equal(made, expected)
    # A dispatched computation also keeps the memory alive, but not longer.
    total = made.sum()
    del made
    assert float(total) == expected.sum()
    gc.collect()
    put([filled((1000, 3), "float32")])
    gc.collect()
    assert memory() is None


def test_arrays_outlive_the_reader(data: Data) -> None:
    reader = data.read(**DENSE, batch_size=7, epochs=3, prefetch=1, num_threads=1)
    expected = list(data.read(**DENSE, batch_size=7))
    batches = fastpipe.jax.iterator(reader)
    kept = [next(batches)["vector"] for _ in range(len(expected))]
    for _ in batches:  # Overwrites all free memory.
        pass
    batches.close()
    del batches, reader
    gc.collect()
    for array, wanted in zip(kept, expected, strict=True):
        assert np.array_equal(array, wanted["vector"])


def test_transfers_are_explicit(data: Data) -> None:
    """For `jax.transfer_guard`, the transfers are explicit like transfers by `jax.device_put`."""
    for sharding in (None, rows()):
        batches = fastpipe.jax.iterator(data.read(**DENSE, batch_size=7, drop_last=True), sharding=sharding)
        first = next(batches)
        with jax.transfer_guard("disallow"):
            second = next(batches)
        first, second = ([(leaf.aval, leaf.sharding) for leaf in jax.tree.leaves(batch)] for batch in (first, second))
        assert first == second
        with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed host-to-device"):
            next(batches)


def test_devices_may_change_from_batch_to_batch(data: Data) -> None:
    script = """
        import jax, numpy as np, fastpipe, fastpipe.jax
        from fastpipe.jax import _put
        reader = fastpipe.read_avro(sys.argv[1:], columns=["id", "terms"], batch_size=7)
        jax.config.update("jax_enable_x64", True)
        plain = list(fastpipe.read_avro(sys.argv[1:], columns=["id", "terms"], batch_size=7))
        batches = fastpipe.jax.iterator(reader)
        devices = jax.devices()
        for number, wanted in enumerate(plain[:6]):
            if number in (0, 3):
                batch, device = next(batches), devices[0]
            elif number == 4:
                with jax.default_device("cpu"):
                    batch, device = next(batches), devices[0]
            else:
                device = devices[number % 4]
                with jax.default_device(device):
                    batch = next(batches)
            for array in jax.tree.leaves(batch):
                assert array.devices() == {device} and not array.committed, (number, array.devices())
            assert np.array_equal(batch["id"], wanted["id"])
            assert np.array_equal(batch["terms"].data, wanted["terms"].values)
        assert not _put._warned
        print("ok")
    """
    assert outputs(run(script, *data.paths, devices=4)) == ["ok\n"]


def test_parts_share_the_memory_of_batches() -> None:
    """Covers shardings of several devices.

    The first array is put by JAX's function, and the second one must match it.
    """
    script = """
        import gc, weakref, jax, numpy as np
        from fastpipe.jax import _put
        from fastpipe._interop.memory import aligned
        from jax.sharding import NamedSharding, PartitionSpec as P
        jax.config.update("jax_enable_x64", True)
        flat, square = jax.make_mesh((4,), ("a",)), jax.make_mesh((2, 2), ("a", "b"))
        specs = [(flat, P("a")), (flat, P()), (flat, P(None, "a")), (square, P("a")), (square, P(("a", "b"))),
                 (square, P(("b", "a"))), (square, P("b", "a")), (square, P(None, ("a", "b")))]
        for mesh, spec in specs:
            sharding = NamedSharding(mesh, spec)
            put = _put.Sharded(sharding, 1)
            for dtype in ("bool", "int64", "float32"):
                for fill in range(3):
                    array = aligned((256, 64), dtype)
                    array[...] = np.arange(array.size).reshape(array.shape) % (fill + 2)
                    made, = put([array])
                    wanted = jax.device_put(array, sharding)
                    assert (made.aval, made.sharding, made.committed) == (wanted.aval, sharding, True)
                    assert np.array_equal(made, array)
                    shared = 0
                    for one, other in zip(made.addressable_shards, wanted.addressable_shards, strict=True):
                        assert (one.device, one.index) == (other.device, other.index)
                        assert np.array_equal(one.data, array[one.index])
                        part = array[one.index]
                        if part.flags.c_contiguous:
                            assert one.data.unsafe_buffer_pointer() == part.ctypes.data, (spec, dtype)
                            shared += 1
                    assert shared == (4 if len(spec) < 2 else 0), "parts of rows lie in one piece"
                    memory, expected = weakref.ref(array.base), array.copy()
                    del array, wanted, one, other, part
                    gc.collect()
                    assert memory() is not None or not shared
                    assert np.array_equal(made, expected)
            assert put._puts and set(put._puts.values()).isdisjoint([put._documented])
        print("ok")
    """
    assert outputs(run(script, devices=4)) == ["ok\n"]


REAL = jaxlib.xla_client.batched_device_put


def with_other_arguments(aval: Any, parts: Any, sharding: Any, devices: Any) -> Any:
    raise AssertionError


def committing(aval: Any, sharding: Any, parts: Any, devices: Any, committed: bool) -> Any:
    return REAL(aval, sharding, parts, devices, not committed)


def copying(aval: Any, sharding: Any, parts: Any, devices: Any, committed: bool) -> Any:
    return REAL(aval, sharding, [part.copy() for part in parts], devices, committed)


def of_other_values(aval: Any, sharding: Any, parts: Any, devices: Any, committed: bool) -> Any:
    return REAL(aval, sharding, [np.zeros_like(part) for part in parts], devices, committed)


def of_another_class(aval: Any, sharding: Any, parts: Any, devices: Any, committed: bool) -> Any:
    return parts[0]


def of_weak_types(aval: Any, sharding: Any, parts: Any, devices: Any, committed: bool) -> Any:
    return REAL(aval.update(weak_type=True), sharding, parts, devices, committed)


def letting_go(aval: Any, sharding: Any, parts: Any, devices: Any, committed: bool) -> Any:
    """Returns arrays that use the memory without keeping it alive."""
    loose = []
    for part in parts:
        memory = (ctypes.c_char * part.nbytes).from_address(part.ctypes.data)
        loose.append(np.frombuffer(memory, part.dtype).reshape(part.shape))
    return REAL(aval, sharding, loose, devices, committed)


@pytest.mark.parametrize("sharded", [False, True], ids=["default device", "sharding"])
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (with_other_arguments, "positional argument"),
        (committing, "_committed of its arrays is"),
        (copying, "don't share memory"),
        (of_other_values, "other values"),
        (of_another_class, "it makes ndarray"),
        (of_weak_types, "aval of its arrays is .*weak_type=True"),
        (letting_go, "don't keep memory alive"),
    ],
)
def test_documented_functions_are_used_if_it_has_changed(
    data: Data,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    anew: None,
    changed: Callable[..., Any],
    reason: str,
    sharded: bool,
) -> None:
    """A warning is logged once, and the memory is still shared."""
    monkeypatch.setattr(_put, "_batched_device_put", lambda: changed)
    sharding = rows() if sharded else None
    options = DENSE | {"batch_size": 7, "drop_last": True, "epochs": 2}
    with caplog.at_level(logging.WARNING, "fastpipe"):
        batches = list(fastpipe.jax.iterator(data.read(**options), sharding=sharding))
        array = filled((1000,), "float32")
        put = _put.put if sharding is None else _put.Sharded(sharding, 1)
        assert put([array])[0].unsafe_buffer_pointer() == array.ctypes.data
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"JAX {jax.__version__}" in record.getMessage()
    assert re.search(reason, record.getMessage())
    for batch, wanted in zip(batches, data.read(**options), strict=True):
        assert np.array_equal(batch["vector"], wanted["vector"])
        assert batch["vector"].committed == sharded
        assert np.array_equal(batch["score"].values, wanted["score"].values.astype(np.float32))
        assert np.array_equal(batch["score"].valid, wanted["score"].valid)


def test_documented_functions_are_used_if_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, anew: None
) -> None:
    monkeypatch.setitem(sys.modules, "jaxlib.xla_client", None)
    array = filled((1000,), "float32")
    with caplog.at_level(logging.WARNING, "fastpipe"):
        made = [_put.put([array])[0], _put.Sharded(rows(), 1)([array])[0], _put.put([array])[0]]
    assert {one.unsafe_buffer_pointer() for one in made} == {array.ctypes.data}
    (record,) = caplog.records
    assert "jaxlib.xla_client" in record.getMessage()
