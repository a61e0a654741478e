"""Custom allocators: all memory of batches comes from them, and it is never mixed with other memory."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import samples
from fastpipe import _fastpipe
from fastpipe._interop.memory import aligned
from samples import FEATURES, SHUFFLES, Data

CSR = FEATURES | {"terms": fastpipe.SparseSpec((8,), "float32", layout="csr")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(tmp_path_factory.mktemp("allocator"), [samples.blocks_of(60), samples.blocks_of(45, (3, 1))])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Returns enough rows for batches to use whole arenas as their memory."""
    return samples.write(tmp_path_factory.mktemp("large"), [[3000, 4000, 1000, 4000]])


class Regions:
    """An allocator that records its arrays and whether they are still alive."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int, weakref.ref[np.ndarray]]] = []

    def __call__(self, nbytes: int) -> np.ndarray:
        array = aligned((nbytes,), np.uint8)
        array[:] = 255
        self.given.append((array.ctypes.data, nbytes, weakref.ref(array)))
        return array

    def has(self, array: np.ndarray) -> bool:
        at, end = array.ctypes.data, array.ctypes.data + array.nbytes
        return any(start <= at and end <= start + size for start, size, kept in self.given if kept() is not None)

    @property
    def alive(self) -> int:
        return sum(kept() is not None for _, _, kept in self.given)


def start(reader: fastpipe.Reader, regions: Any, held: int = 1) -> Iterator[dict[str, Any]]:
    memory = _fastpipe.PassMemory(reader._data.handle, regions, held)
    return reader._start(memory)


def arrays(node: Any) -> Iterator[np.ndarray]:
    """Yields the data arrays of a batch value."""
    if isinstance(node, np.ndarray):
        yield node
    else:
        yield from arrays(node.values)
        for name in ("offsets", "indices", "valid"):
            if hasattr(node, name):
                yield from arrays(getattr(node, name))


def check(batch: dict[str, Any], regions: Regions) -> None:
    """Checks that each array of a batch is in memory of the allocator."""
    found = [array for node in batch.values() for array in arrays(node)]
    assert len(found) > 8
    for array in found:
        assert array.size == 0 or regions.has(array)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("features", [FEATURES, CSR], ids=["coo", "csr"])
def test_batches_use_its_memory(data: Data, shuffle: Any, num_threads: int, features: dict[str, Any]) -> None:
    options = samples.order_of(shuffle) | {"num_threads": num_threads, "features": features}
    reader, regions = data.read(**options), Regions()
    expected = samples.digests(data.read(**options))
    found = []
    for batch in start(reader, regions):
        check(batch, regions)
        found.append(samples.digest(batch))
    assert found == expected


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_large_batches_use_its_memory(large: Data, num_threads: int, shuffle: bool) -> None:
    options = {"batch_size": 4000, "num_threads": num_threads, "shuffle": shuffle, "seed": 3}
    reader, regions = large.read(**options), Regions()
    expected = samples.digests(large.read(**options))
    slabs = []
    for batch, wanted in zip(start(reader, regions), expected, strict=True):
        check(batch, regions)
        assert samples.digest(batch) == wanted
        memory = batch["id"].base
        pieces = memory.pieces()
        slabs.append(len(pieces))
        assert sum(piece.nbytes for piece, _ in pieces) == memory.nbytes
        assert all(regions.has(piece) for piece, _ in pieces)
        stretch = np.zeros(memory.nbytes + 256 * len(pieces), np.uint8)
        for piece, begin in pieces:
            stretch[begin : begin + piece.nbytes] = piece
        for array in (array for node in batch.values() for array in arrays(node) if array.size):
            place = memory.place(array)
            assert stretch[place : place + array.nbytes].tobytes() == array.tobytes()
            assert memory.place(array[1:]) == (place + array.strides[0] if len(array) > 1 else None)
            assert memory.place(array[::-1]) is (place if len(array) == 1 else None)
        assert memory.place(np.zeros(3)) is None
    if num_threads == 1 and not shuffle:
        assert max(slabs) > 2, "no arena became the memory of a batch"


def test_pools_do_not_mix(data: Data) -> None:
    reader = data.read(batch_size=7, num_threads=2)
    ours, others = Regions(), Regions()
    memories = [_fastpipe.PassMemory(reader._data.handle, regions, 1) for regions in (ours, others)]
    for _ in range(3):
        for memory, regions in [(memories[0], ours), (None, None), (memories[1], others), (None, None)]:
            for batch in reader._start(memory):
                for array in (array for node in batch.values() for array in arrays(node) if array.size):
                    assert [ours.has(array), others.has(array)] == [regions is ours, regions is others]


def test_memory_is_used_again(data: Data) -> None:
    reader, regions = data.read(batch_size=7, num_threads=1, prefetch=1), Regions()
    memory = _fastpipe.PassMemory(reader._data.handle, regions, 1)
    counts = []
    for _ in range(6):
        for batch in reader._start(memory):
            check(batch, regions)
        counts.append(len(regions.given))
    # Threads and consumer overlap differently each time. Without reuse the count would be six times as high.
    assert counts[-1] < 2 * counts[0]


def test_batches_outlive_the_reader(data: Data) -> None:
    regions = Regions()
    reader = data.read(batch_size=7)
    kept = list(start(reader, regions))
    samples.check(kept[3], range(21, 28))
    reader.close()
    assert regions.alive > 0
    samples.check(kept[3], range(21, 28))
    del kept, reader
    gc.collect()
    # The next call drops references that were freed on a thread of a pass.
    assert data.read(batch_size=7).num_rows == data.total
    assert regions.alive == 0


def test_memory_limits_apply(data: Data) -> None:
    options = {"batch_size": 7, "num_threads": 2, "memory_limit": "20MB"}
    reader, regions = data.read(**options), Regions()
    assert samples.digests(start(reader, regions)) == samples.digests(data.read(**options))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
def test_errors_of_the_allocator_are_raised(large: Data, after: int, threads: int) -> None:
    regions = Regions()

    def allocate(nbytes: int) -> np.ndarray:
        if len(regions.given) >= after:
            raise OSError("no page-locked memory is left")
        return regions(nbytes)

    # With several threads per batch, other tasks wait for the data that the task without memory was going to read.
    reader = large.read(batch_size=4000, num_threads=threads, prefetch=1)
    wanted = r"asked for \d+ bytes, the allocator raised OSError: no page-locked memory is left"
    started = start(reader, allocate)
    with pytest.raises(fastpipe.errors.LimitError, match=wanted):
        list(started)
    with pytest.raises(fastpipe.errors.LimitError, match=wanted):
        next(started)
    assert samples.ids_of(reader) == list(range(large.total))


WRONG = {
    "a list": (lambda n: [0] * n, fastpipe.errors.LimitError, "the allocator raised TypeError"),
    "floats": (lambda n: np.zeros(n), fastpipe.errors.LimitError, "the allocator raised TypeError"),
    "two dimensions": (
        lambda n: np.zeros((n, 1), np.uint8),
        fastpipe.errors.LimitError,
        "the allocator raised TypeError",
    ),
    "gaps": (lambda n: aligned((2 * n,), np.uint8)[::2], fastpipe.errors.LimitError, "not contiguous"),
    "too few": (
        lambda n: aligned((n - 1,), np.uint8),
        fastpipe.errors.UnsupportedError,
        "asked for 4096 bytes.*returned 4095",
    ),
    "none": (lambda n: aligned((0,), np.uint8), fastpipe.errors.UnsupportedError, "asked for 4096 bytes.*returned 0"),
    "not aligned": (lambda n: aligned((n + 1,), np.uint8)[1:], fastpipe.errors.UnsupportedError, "at a multiple of 64"),
    "read-only": (lambda n: np.frombuffer(bytes(n), np.uint8), fastpipe.errors.LimitError, "writ"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_arrays_are_rejected(data: Data, name: str) -> None:
    allocate, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        list(start(data.read(batch_size=7), allocate))


@pytest.mark.parametrize("overlap", ["the same", "the end of it"])
def test_an_array_in_use_is_rejected(large: Data, overlap: str) -> None:
    given: list[np.ndarray] = []

    def allocate(nbytes: int) -> np.ndarray:
        if not given:
            given.append(aligned((1 << 26,), np.uint8))
            return given[0][: 1 << 25]
        return given[0][: 1 << 25] if overlap == "the same" else given[0][(1 << 25) - 64 :]

    with pytest.raises(fastpipe.errors.LimitError, match="overlaps one that was returned before and is still in use"):
        list(start(large.read(batch_size=4000, num_threads=1), allocate))


def test_an_array_in_use_is_not_resized(data: Data) -> None:
    given: list[np.ndarray] = []

    def allocate(nbytes: int) -> np.ndarray:
        # NumPy only resizes arrays that own their memory, which are rarely aligned.
        for spare in range(200):
            array = np.zeros(nbytes + 16 * spare, np.uint8)
            if array.ctypes.data % 64 == 0:
                given.append(array)
                return array
            unfit.append(array)
        raise MemoryError("no array is aligned")

    unfit: list[np.ndarray] = []
    started = start(data.read(batch_size=7), allocate)
    kept = next(started)
    parts = [array.ctypes.data for node in kept.values() for array in arrays(node) if array.size]
    held = [array for array in given if any(0 <= at - array.ctypes.data < array.nbytes for at in parts)]
    assert held
    for array in held:
        with pytest.raises(ValueError, match="resize"):
            array.resize(2 * array.size, refcheck=False)


def test_running_out_of_memory_is_reported(data: Data) -> None:
    def allocate(nbytes: int) -> np.ndarray:
        raise MemoryError("it is full")

    with pytest.raises(fastpipe.errors.OutOfMemoryError, match="the allocator raised MemoryError: it is full"):
        list(start(data.read(batch_size=7), allocate))


def test_pass_memory_belongs_to_one_dataset(data: Data) -> None:
    memory = _fastpipe.PassMemory(data.read(batch_size=7)._data.handle, Regions(), 1)
    with pytest.raises(ValueError, match="another dataset"):
        data.read(batch_size=7)._start(memory)


def test_closing_during_an_allocation(data: Data) -> None:
    """The closing thread waits for a thread that needs the GIL."""
    regions, asked, go = Regions(), threading.Event(), threading.Event()

    def allocate(nbytes: int) -> np.ndarray:
        asked.set()
        go.wait()
        return regions(nbytes)

    reader = data.read(batch_size=7, num_threads=2)
    batches = start(reader, allocate)
    asked.wait()
    closing = threading.Thread(target=reader.close)
    closing.start()
    go.set()
    closing.join()
    with pytest.raises(fastpipe.FastpipeError, match="closed"):
        next(batches)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_use_it(data: Data, tmp_path: Path) -> None:
    reader, regions = data.read(batch_size=7), Regions()
    memory = _fastpipe.PassMemory(reader._data.handle, regions, 1)
    batches = reader._start(memory)
    batch = next(batches)
    alive = regions.alive
    child = os.fork()
    if child == 0:
        del batch
        gc.collect()
        freed = alive - regions.alive
        try:
            reader._start(memory)
        except fastpipe.FastpipeError as error:
            os._exit(10 + freed if "another process" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 10
    samples.check(batch, range(7))
