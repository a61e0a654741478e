"""Batches on a device: always over host memory, and with `-m cuda` on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastpipe
import fastpipe.cuda
import fastpipe.torch
import samples
from fastpipe._interop.tensors import Forms
from fastpipe.cuda import _staging as staging
from fastpipe.cuda import _torch
from plain_gpu import PlainEngine
from samples import FEATURES, SHUFFLES, Data, ids_by_batch

CSR = FEATURES | {"terms": fastpipe.SparseSpec((8,), "float32", layout="csr")}
FORMS = [
    {},
    {"sparse": "bag"},
    {"strings": "lists"},
    {"ragged": "nested", "strings": "lists"},
    {"sparse": "csr"},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(tmp_path_factory.mktemp("cuda"), [samples.blocks_of(60), samples.blocks_of(45, (3, 1))])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(tmp_path_factory.mktemp("large"), [[500] * 24])


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces every device by host memory."""
    monkeypatch.setattr(_torch, "TorchEngine", PlainEngine)


def prefetch(
    reader: fastpipe.Reader, device: Any = "cuda:0", depth: int = 2, **options: Any
) -> fastpipe.cuda.Prefetcher:
    return fastpipe.cuda.iterator(reader, device, prefetch=depth, **options)


def parts(node: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a batch value."""
    if isinstance(node, torch.Tensor):
        if node.is_nested:
            yield from (node.values(), node.offsets())
        elif node.layout == torch.sparse_coo:
            yield from (node._indices(), node._values())
        elif node.layout == torch.sparse_csr:
            yield from (node.crow_indices(), node.col_indices(), node.values())
        else:
            yield node
    elif isinstance(node, tuple):
        for part in node:
            yield from parts(part)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Checks that two batches of tensors are equal, on any devices."""
    assert list(found) == list(wanted)
    for name, node in wanted.items():
        assert type(found[name]) is type(node)
        if isinstance(node, list):
            assert found[name] == node
            continue
        for one, other in zip(parts(found[name]), parts(node), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name
            assert torch.equal(one.cpu(), other), name


def check_forms(data: Data, device: str, forms: dict[str, Any], features: dict[str, Any], **options: Any) -> None:
    """Checks that batches equal those of `fastpipe.torch`."""
    if forms.get("ragged") == "nested":
        features = {name: spec for name, spec in features.items() if name != "words"}
    reader = data.read(features=features, **options)
    seen = 0
    for found, batch in zip(prefetch(reader, device, **forms), data.read(features=features, **options), strict=True):
        same(found, fastpipe.torch.tensors(batch, **forms))
        seen += 1
    assert seen == len(reader)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("features", [FEATURES, CSR], ids=["coo", "csr"])
@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_forms(data: Data, forms: dict[str, Any], features: dict[str, Any]) -> None:
    check_forms(data, "cuda:0", forms, features, batch_size=7)
    check_forms(data, "cuda:0", forms, features, batch_size=7, rank=1, world_size=2, on_uneven="pad")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_batch_is_one_block_of_memory(large: Data, num_threads: int) -> None:
    reader = large.read(batch_size=4000, num_threads=num_threads)
    engine = PlainEngine()
    for batch in fastpipe.cuda.Prefetcher._of(reader, [engine], 2, several=False):
        storages = {part.untyped_storage().data_ptr() for node in batch.values() for part in parts(node)}
        assert len(storages) == 1
    # There are pieces of fixed size, and pieces of variable size, which may be joined.
    assert engine.pieces
    assert all(1 < pieces <= 10 for pieces in engine.pieces)
    padded = large.read(batch_size=4000, rank=0, world_size=2, on_uneven="pad")
    for batch in fastpipe.cuda.Prefetcher._of(padded, [PlainEngine()], 2, several=False):
        assert batch["valid"].untyped_storage().data_ptr() == batch["id"].untyped_storage().data_ptr()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_memory_is_not_reused_too_early(large: Data, shuffle: Any, depth: int) -> None:
    """Copies run as late as possible, from the memory into which the reader decodes."""
    options = {"shuffle": shuffle, "batch_size": 500, "seed": 2, "num_threads": 2, "prefetch": 1}
    expected = [fastpipe.torch.tensors(batch) for batch in large.read(**options)]
    batches = prefetch(large.read(**options), depth=depth)
    assert isinstance(batches, fastpipe.cuda.Prefetcher)
    for _ in range(2):
        batches.set_epoch(0)
        for found, wanted in zip(batches, expected, strict=True):
            same(found, wanted)


@pytest.mark.usefixtures("plain")
def test_reusing_memory_too_early_is_detected(large: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: Any, slot: Any) -> None:
        slot.completion._kept = slot.host = None

    monkeypatch.setattr(staging._Belt, "_settle", settle)

    def often() -> None:
        # Whether memory is overwritten before it is copied depends on the timing of threads, so several attempts are
        # made.
        for _ in range(20):
            test_memory_is_not_reused_too_early(large, False, 5)

    with pytest.raises(AssertionError):
        often()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_it_yields_the_batches_of_the_reader(data: Data, shuffle: Any) -> None:
    options = samples.order_of(shuffle)
    reader, batches = data.read(**options), prefetch(data.read(**options))
    assert len(batches) == len(reader)
    for epoch in range(2):  # A pass that ends advances the epoch.
        assert batches.epoch == epoch
        assert ids_by_batch(batches) == ids_by_batch(reader)
    batches.set_epoch(9)
    reader.set_epoch(9)
    assert ids_by_batch(batches) == ids_by_batch(reader)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("depth", [1, 3])
def test_it_resumes_at_every_step(data: Data, shuffle: Any, depth: int) -> None:
    options = samples.order_of(shuffle)
    reader = data.read(**options)
    expected = [ids_by_batch(reader), ids_by_batch(reader)]
    for step in range(len(expected[0]) + 1):
        first = prefetch(data.read(**options), depth=depth)
        batches = iter(first)
        assert ids_by_batch(next(batches) for _ in range(step)) == expected[0][:step]
        if step == len(expected[0]):
            assert next(batches, None) is None
        state = samples.through_json(first.state_dict())
        first.close()
        assert first.state_dict() == state
        other, alone = prefetch(data.read(**options), depth=depth), data.read(**options)
        for resumed in (other, alone):
            resumed.load_state_dict(state)
            if step < len(expected[0]):
                assert ids_by_batch(resumed) == expected[0][step:]
            assert ids_by_batch(resumed) == expected[1]


@pytest.mark.usefixtures("plain")
def test_states_that_do_not_fit(data: Data) -> None:
    batches = prefetch(data.read(**samples.order_of(True)))
    started = iter(batches)
    seen = ids_by_batch([next(started)])
    with pytest.raises(fastpipe.errors.StateError):
        batches.load_state_dict({"version": 1})
    assert seen + ids_by_batch(started) == ids_by_batch(data.read(**samples.order_of(True)))


@pytest.mark.usefixtures("plain")
def test_a_pass_that_is_left_counts_as_an_epoch(data: Data) -> None:
    options = samples.order_of(True) | {"epochs": 2}
    reader, expected = data.read(**options), []
    for epoch in (0, 1, 2):
        reader.set_epoch(epoch)
        expected.append(ids_by_batch(reader))
    first, second, third = expected
    # With this depth the reader itself reaches its end much earlier.
    batches = prefetch(data.read(**options), depth=100)
    # Nothing was taken from a pass that was only started.
    iter(batches)
    started = iter(batches)
    assert ids_by_batch([next(started)]) == first[:1]
    assert batches.epoch == 0
    state = batches.state_dict()
    started = iter(batches)
    assert ids_by_batch(next(started) for _ in range(20)) == second[:20]
    # The pass was left in its second epoch.
    assert batches.epoch == 2
    batches.set_epoch(2)
    assert ids_by_batch(batches) == third
    assert batches.epoch == 4
    batches.load_state_dict(state)
    iter(batches)
    assert ids_by_batch(batches) == first[1:]


DEVICES = ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("on_uneven", ["drop", "pad"])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_several_devices(data: Data, shuffle: Any, on_uneven: str) -> None:
    options = samples.order_of(shuffle) | {"on_uneven": on_uneven, "batch_size": 3}
    batches = prefetch(data.read(**options), DEVICES)
    steps = list(batches)
    assert len(steps) == len(batches)
    assert all(len(step) == 3 for step in steps)
    shares = [ids_by_batch(data.read(**options, rank=rank, world_size=3)) for rank in range(3)]
    assert [ids_by_batch(step[rank] for step in steps) for rank in range(3)] == shares
    if on_uneven == "pad":
        found = [
            {name: part.numpy() for name, part in batch.items() if name in ("id", "valid")}
            for s in steps
            for batch in s
        ]
        assert sorted(samples.ids_of(found)) == list(range(data.total))
    assert [reader.stats()["batches"] for reader in batches.readers] == [len(steps)] * 3


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("shuffle", "shard_by"), samples.ELASTIC)
def test_states_resume_with_another_number_of_devices(data: Data, shuffle: Any, shard_by: str) -> None:
    options = samples.order_of(shuffle) | {"on_uneven": "pad", "batch_size": 3, "shard_by": shard_by}
    first = prefetch(data.read(**options), DEVICES)
    started = iter(first)
    seen = [batch for _ in range(4) for batch in next(started)]
    state = samples.through_json(first.state_dict())
    first.close()
    for count in (1, 2, 3):
        other = prefetch(data.read(**options), DEVICES[:count])
        other.load_state_dict(state)
        both = [*seen, *(batch for step in other for batch in step)]
        found = [{name: batch[name].numpy() for name in ("id", "valid")} for batch in both]
        assert sorted(samples.ids_of(found)) == list(range(data.total))


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("shuffle", ["block", "buffer"])
def test_devices_with_separate_blocks(data: Data, shuffle: str) -> None:
    options = samples.order_of(shuffle) | {"batch_size": 3}
    first = prefetch(data.read(**options), DEVICES)
    started = iter(first)
    for _ in range(2):
        next(started)
    state = samples.through_json(first.state_dict())
    rest = [ids_by_batch(step) for step in started]
    other = prefetch(data.read(**options), DEVICES)
    other.load_state_dict(state)
    assert [ids_by_batch(step) for step in other] == rest
    with pytest.raises(fastpipe.errors.StateError, match="world_size=3"):
        prefetch(data.read(**options), DEVICES[:2]).load_state_dict(state)


def copying() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastpipe-copy")]


def train(batches: Any) -> None:
    for batch in batches:
        assert len(batch["id"]) // 0


@pytest.mark.usefixtures("plain")
def test_leaving_early_leaves_no_thread(data: Data) -> None:
    batches = prefetch(data.read(batch_size=7, epochs=None), ["cuda:0", "cuda:1"])
    kept = [next(iter(batches)) for _ in range(3)]
    assert not copying()
    with prefetch(data.read(batch_size=7, epochs=None)) as endless:
        started = iter(endless)
        next(started)
        assert copying()
    assert not copying()
    with pytest.raises(fastpipe.FastpipeError, match="closed"):
        next(started)
    assert ids_by_batch(kept[0]) == ids_by_batch(kept[2])
    with pytest.raises(ZeroDivisionError):
        train(prefetch(data.read(batch_size=7, epochs=None)))
    assert not copying()


@pytest.mark.usefixtures("plain")
def test_errors_follow_the_batches_before_them(data: Data, tmp_path: Path) -> None:
    whole = Path(data.paths[0]).read_bytes()
    path = tmp_path / "damaged.avro"
    path.write_bytes(whole)
    reader = fastpipe.read_avro(path, features=FEATURES, batch_size=7)
    times = path.stat()
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    # The old timestamp makes the damage look original.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    batches = iter(prefetch(reader))
    seen = []
    with pytest.raises(fastpipe.errors.MalformedFileError) as caught:
        seen += (batch for batch in batches)
    assert caught.value.path == str(path)
    assert ids_by_batch(seen) == [list(range(i, i + 7)) for i in range(0, 7 * len(seen), 7)]
    assert seen
    # The stored error must not keep the pass's threads alive.
    assert not sys.platform.startswith("linux") or samples.threads_are(0)
    with pytest.raises(fastpipe.errors.MalformedFileError):
        next(batches)


def test_a_device_without_memory(data: Data) -> None:
    class Full(PlainEngine):
        def _transfer(self, piece: torch.Tensor, to: torch.Tensor) -> None:
            if len(self.pieces) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super()._transfer(piece, to)

    batches = iter(fastpipe.cuda.Prefetcher._of(data.read(batch_size=7), [Full()], 2, several=False))
    assert ids_by_batch(next(batches) for _ in range(3)) == [list(range(i, i + 7)) for i in (0, 7, 14)]
    with pytest.raises(torch.OutOfMemoryError):
        next(batches)


def test_no_page_locked_memory(data: Data) -> None:
    engine = PlainEngine()

    def allocate(nbytes: int) -> np.ndarray:
        raise RuntimeError("CUDA error: out of memory")

    engine.allocate = allocate
    batches = fastpipe.cuda.Prefetcher._of(data.read(batch_size=7), [engine], 2, several=False)
    with pytest.raises(
        fastpipe.errors.LimitError, match="the allocator raised RuntimeError: CUDA error: out of memory"
    ):
        next(iter(batches))


EXIT = """
import sys
sys.path.insert(0, {folder!r})
import fastpipe, fastpipe.cuda, samples
from plain_gpu import PlainEngine
reader = fastpipe.read_avro({paths!r}, columns=["id", "words"], batch_size=7, epochs=None, num_threads=2)
batches = fastpipe.cuda.Prefetcher._of(reader, [PlainEngine(), PlainEngine()], 2, several=True)
for step, batch in enumerate(batches):
    if step == 3:
        {how}
"""


@pytest.mark.parametrize("how", ["break", "raise SystemExit(0)", "kept = batch; it = iter(batches); sys.exit()"])
def test_the_interpreter_ends(data: Data, how: str) -> None:
    code = EXIT.format(folder=str(Path(__file__).parent), paths=data.paths, how=how)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(data: Data) -> None:
    with pytest.raises(fastpipe.errors.DeviceError, match="use fastpipe"):
        prefetch(data.read(batch_size=7))


def test_invalid_devices(data: Data) -> None:
    reader = data.read(batch_size=7)
    for device in ("cpu", "nothing", ["cpu"], None, 3.5):
        with pytest.raises(fastpipe.errors.DeviceError, match='device must be a GPU such as "cuda:0"'):
            prefetch(reader, device, framework="torch")
    with pytest.raises(ValueError, match='framework must be "torch" or "cupy"; got \'jax\''):
        prefetch(reader, framework="jax")
    with pytest.raises(ValueError, match="require PyTorch"):
        prefetch(reader, framework="cupy", sparse="bag")
    with pytest.raises(ValueError, match="prefetch"):
        prefetch(reader, depth=0)
    with pytest.raises(TypeError, match="got list"):
        fastpipe.cuda.iterator([1, 2])  # type: ignore[arg-type]


@pytest.mark.usefixtures("plain")
def test_arguments(data: Data) -> None:
    with pytest.raises(ValueError, match="empty list"):
        prefetch(data.read(batch_size=7), [])
    with pytest.raises(ValueError, match='on_uneven="allow"'):
        prefetch(data.read(batch_size=7, on_uneven="allow"), DEVICES)
    assert repr(prefetch(data.read(batch_size=7))).startswith("<fastpipe.cuda.Prefetcher to cpu of <fastpipe.Reader")


def test_without_frameworks(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = data.read(batch_size=7)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="requires PyTorch built with CUDA, or CuPy"):
        prefetch(reader)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "fastpipe.cuda._cupy", raising=False)
    with pytest.raises(ImportError, match="pip install cupy"):
        prefetch(reader, framework="cupy")


def test_importing_it_imports_no_framework() -> None:
    code = "import sys, fastpipe.cuda; assert not {'torch', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def on_gpu(test: Any) -> Any:
    """Marks a test that needs a GPU and is skipped without one."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and PyTorch built with CUDA")
    return pytest.mark.cuda(skip(test))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("features", [FEATURES, CSR], ids=["coo", "csr"])
@pytest.mark.parametrize("forms", FORMS, ids=str)
@on_gpu
def test_forms_on_a_gpu(data: Data, forms: dict[str, Any], features: dict[str, Any]) -> None:
    check_forms(data, "cuda:0", forms, features, batch_size=7)
    check_forms(data, "cuda:0", forms, features, batch_size=7, rank=1, world_size=2, on_uneven="pad")


@pytest.mark.parametrize("num_threads", [1, 2])
@on_gpu
def test_batches_are_decoded_to_page_locked_memory(large: Data, num_threads: int) -> None:
    class Looking(_torch.TorchEngine):
        def _transfer(self, piece: torch.Tensor, to: torch.Tensor) -> None:
            assert piece.is_pinned()
            seen.append(piece.numel())
            super()._transfer(piece, to)

    seen: list[int] = []
    reader = large.read(batch_size=4000, num_threads=num_threads)
    batches = fastpipe.cuda.Prefetcher._of(reader, [Looking("cuda:0", Forms())], 2, several=False)
    for batch, wanted in zip(batches, large.read(batch_size=4000), strict=True):
        assert batch["id"].device == torch.device("cuda:0")
        same(batch, fastpipe.torch.tensors(wanted))
    assert len(seen) >= 2 * len(reader)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@on_gpu
def test_no_race_on_a_gpu(large: Data, shuffle: Any, depth: int) -> None:
    """The consumer's stream is busy, and batches are dropped long before it reaches them."""
    options = {"shuffle": shuffle, "batch_size": 500, "seed": 2, "num_threads": 2, "prefetch": 1}
    expected = [digests(fastpipe.torch.tensors(batch)) for batch in large.read(**options)]
    work = torch.randn(2048, 2048, device="cuda:0")
    batches = prefetch(large.read(**options), depth=depth)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            found = []
            for _ in range(10):
                batches.set_epoch(0)
                for batch in batches:
                    work = torch.tanh(work @ work)
                    found.append(digests(batch))
            stream.synchronize()
        for i, sums in enumerate(found):
            assert [s.item() for s in sums] == [s.item() for s in expected[i % len(expected)]]


def digests(batch: dict[str, Any]) -> list[torch.Tensor]:
    """Returns an order-independent checksum of each tensor, computed on its device."""
    return [
        part.contiguous().view(torch.uint8).to(torch.int64).sum() for node in batch.values() for part in parts(node)
    ]


@pytest.mark.parametrize("depth", [1, 3])
@on_gpu
def test_training_on_a_gpu(large: Data, depth: int) -> None:
    """A model learns exactly the same as from batches that are copied one at a time."""

    def train(batches: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        bag = torch.nn.EmbeddingBag(8, 4, mode="sum", include_last_offset=True).cuda()
        layer = torch.nn.Linear(7, 1).cuda()
        optimizer = torch.optim.SGD([*bag.parameters(), *layer.parameters()], 1e-9)
        for batch in batches:
            terms = batch["terms"]
            summed = bag(terms.indices, terms.offsets, per_sample_weights=terms.values)
            loss = layer(torch.cat([batch["vector"], summed], 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in (*bag.parameters(), *layer.parameters())]

    def copied(reader: fastpipe.Reader) -> Iterator[dict[str, Any]]:
        for batch in reader:
            found = fastpipe.torch.tensors(batch, sparse="bag")
            terms = fastpipe.torch.Bag(*(part.cuda() for part in found["terms"]))
            yield {"vector": found["vector"].cuda(), "terms": terms}

    options = {"features": CSR, "batch_size": 500, "shuffle": True, "seed": 2}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        ours = train(prefetch(large.read(**options), depth=depth, sparse="bag"))
        theirs = train(copied(large.read(**options)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.allclose(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("how", ["break", "raise SystemExit(0)", "kept = batch; it = iter(batches); sys.exit()"])
@on_gpu
def test_the_interpreter_ends_with_a_gpu(data: Data, how: str) -> None:
    code = EXIT.replace("[PlainEngine(), PlainEngine()]", "[TorchEngine('cuda:0', Forms()) for _ in 'ab']").replace(
        "from plain_gpu import PlainEngine",
        "from fastpipe.cuda._torch import TorchEngine; from fastpipe._interop.tensors import Forms",
    )
    code = code.format(folder=str(Path(__file__).parent), paths=data.paths, how=how)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@on_gpu
def test_protocols_on_a_gpu(data: Data) -> None:
    batch = next(iter(prefetch(data.read(batch_size=7))))
    assert batch["id"].__cuda_array_interface__["data"][0] == batch["id"].data_ptr()
    assert torch.from_dlpack(batch["id"]).data_ptr() == batch["id"].data_ptr()
    assert next(iter(prefetch(data.read(batch_size=7), "cuda")))["id"].tolist() == list(range(7))
    missing = torch.cuda.device_count()
    with pytest.raises(fastpipe.errors.DeviceError, match=f"device cuda:{missing} does not exist"):
        prefetch(data.read(batch_size=7), f"cuda:{missing}")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus(data: Data) -> None:
    options = {"batch_size": 3, "shuffle": True, "seed": 1, "on_uneven": "pad"}
    steps = list(prefetch(data.read(**options), ["cuda:0", "cuda:1"]))
    assert {batch["id"].device.index for step in steps for batch in step} == {0, 1}
    for rank in range(2):
        share = ids_by_batch(data.read(**options, rank=rank, world_size=2))
        assert ids_by_batch(step[rank] for step in steps) == share
