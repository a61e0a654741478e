"""Batches as CuPy arrays: always over host memory, and with `-m cuda` on a GPU that CuPy finds."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fastpipe
import fastpipe.cuda
import plain_cupy
import samples
from samples import FEATURES, SHUFFLES, Data

CSR = FEATURES | {"terms": fastpipe.SparseSpec((8,), "float32", layout="csr")}


def _gpus() -> int:
    if importlib.util.find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def on_gpu(test: Any) -> Any:
    """Marks a test that needs a GPU and is skipped without one."""
    skip = pytest.mark.skipif(_gpus() == 0, reason="needs CuPy and a GPU")
    return pytest.mark.cuda(skip(test))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(tmp_path_factory.mktemp("cupy"), [samples.blocks_of(60), samples.blocks_of(45, (3, 1))])


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cupy", plain_cupy.modules())
    for module in ("fastpipe.cuda._cupy", "fastpipe.cuda._cupy"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    yield
    for module in ("fastpipe.cuda._cupy", "fastpipe.cuda._cupy"):
        sys.modules.pop(module, None)


def prefetch(reader: fastpipe.Reader, device: Any = "cuda:0", **options: Any) -> fastpipe.cuda.Prefetcher:
    return fastpipe.cuda.iterator(reader, device, framework="cupy", **options)


def on_host(node: Any, get: Any) -> Any:
    """Returns the batch value with NumPy arrays."""
    if isinstance(node, fastpipe.Strings):
        return fastpipe.Strings(get(node.values), get(node.offsets), node.shape, node.binary)
    if isinstance(node, np.ndarray) or not hasattr(node, "values"):
        return get(node)
    return type(node)(*(on_host(part, get) for part in node))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("features", [FEATURES, CSR], ids=["coo", "csr"])
def test_batches(data: Data, shuffle: Any, features: dict[str, Any], depth: int) -> None:
    options = samples.order_of(shuffle) | {"features": features, "num_threads": 2, "on_uneven": "pad"}
    consumer = plain_cupy.Stream()
    with consumer:
        found = []
        for batch in prefetch(data.read(**options), prefetch=depth):
            # A kernel would read the batch when its stream reaches it.
            consumer.put(lambda batch=batch: found.append(samples.digest(batch)))
            if len(found) % 3 == 0:
                consumer.synchronize()
        consumer.synchronize()
    assert found == samples.digests(data.read(**options))


@pytest.mark.usefixtures("plain")
def test_memory_belongs_to_the_consumers_stream(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the consumer's stream reuses is not overwritten before the stream's earlier work is done."""
    taken: list[plain_cupy.Stream] = []
    cupy = sys.modules["cupy"]
    allocate = cupy.cuda.alloc
    monkeypatch.setattr(cupy.cuda, "alloc", lambda size: taken.append(plain_cupy.current()) or allocate(size))
    consumer, earlier = plain_cupy.Stream(), []
    with consumer:
        batches = iter(prefetch(data.read(batch_size=7)))
        next(batches)
        consumer.put(lambda: earlier.append("a kernel"))
        while len(taken) < 4:
            batch = next(batches)
        for kept in (batch, next(batches)):
            assert len(kept["id"]) == 7
        batches.close()
    assert set(taken) == {consumer}
    assert earlier == ["a kernel"]


@pytest.mark.usefixtures("plain")
def test_devices(data: Data) -> None:
    assert "cuda:1" in repr(prefetch(data.read(batch_size=7), "cuda:1"))
    assert "cuda:0" in repr(prefetch(data.read(batch_size=7), "cuda"))
    for device in ("cpu", "cuda:x", 0):
        with pytest.raises(fastpipe.errors.DeviceError, match='device must be a GPU such as "cuda:0"'):
            prefetch(data.read(batch_size=7), device)
    with pytest.raises(fastpipe.errors.DeviceError, match="device cuda:2 does not exist: the machine has 2 GPUs"):
        prefetch(data.read(batch_size=7), "cuda:2")


def test_without_a_gpu(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", plain_cupy.modules(devices=0))
    monkeypatch.delitem(sys.modules, "fastpipe.cuda._cupy", raising=False)
    try:
        with pytest.raises(fastpipe.errors.DeviceError, match="CuPy finds no GPU here"):
            prefetch(data.read(batch_size=7))
    finally:
        sys.modules.pop("fastpipe.cuda._cupy", None)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@on_gpu
def test_batches_on_a_gpu(data: Data, shuffle: Any, depth: int) -> None:
    import cupy

    options = samples.order_of(shuffle) | {"num_threads": 2, "on_uneven": "pad"}
    expected = samples.digests(data.read(**options))
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(20):
            batches = prefetch(data.read(**options), prefetch=depth)
            found = [samples.digest({n: on_host(node, _get) for n, node in batch.items()}) for batch in batches]
            assert found == expected


@on_gpu
def test_protocols_on_a_gpu(data: Data) -> None:
    import cupy

    batch = next(iter(prefetch(data.read(batch_size=7))))
    assert batch["id"].__cuda_array_interface__["data"][0] == batch["id"].data.ptr
    assert cupy.from_dlpack(batch["id"]).data.ptr == batch["id"].data.ptr
    assert batch["id"].get().tolist() == list(range(7))


def _get(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()
