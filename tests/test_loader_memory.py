"""Memory of a loader: the prefetched batches and one consumed batch, for any number of workers.

If memory can't be allocated, the error names the required size, and nothing is written.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

from apart import apart
from fastpipe.errors import OutOfMemoryError
from fastpipe.torch import DataLoader
from loader_data import FORKED, THREADS, Large, Numbers, Squares, assert_same, listed
from loader_streams import Counted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

MB = 1 << 20
# Allowance for batches that are started for idle workers, and for memory that Python keeps.
BESIDE = 64 * MB


class SlowLarge(Large):
    """Slow arrays. Idle workers therefore start batches beyond the prefetched ones."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.03)
        return super().__getitem__(index)


class WholeLarge(Large):
    """Arrays that are requested a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(0.01)
        return [self[index] for index in indices]


class Growing(Large):
    """Arrays that are larger in the second half."""

    def __getitem__(self, index: int) -> Any:
        return np.full(self.nbytes if index < self.count // 2 else self.nbytes * 5 // 4, index % 251, np.uint8)


class Ragged(Large):
    """Arrays of different shapes: one or two dimensions, and 20 to 100 % of `nbytes` bytes."""

    def __getitem__(self, index: int) -> Any:
        found = np.full(self.nbytes * (20 + index * 37 % 81) // 200 * 2, index % 251, np.uint8)
        return found.reshape(2, -1) if index % 3 == 0 else found


def peak(batches: Any, away: float, *, keeps: bool = False) -> int:
    """Returns the maximum of committed bytes while a pass is read.

    Args:
        batches: The pass.
        away: Seconds after each batch.
        keeps: Whether to keep each batch until the next one has arrived.
    """
    file = batches._consumer.file
    ended = threading.Event()
    seen = [0]

    def look() -> None:
        while not ended.wait(0.0005):
            committed = 0 if file is None else os.fstat(file).st_blocks * 512
            seen.append(max(committed, batches._consumer.held))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for batch in batches:
            if not keeps:
                del batch
            time.sleep(away)
    finally:
        ended.set()
        thread.join()
    return max(seen)


# Kinds of batches: dataset, batch size, bytes of a batch, and further arguments.
KINDS: dict[str, tuple[Callable[[], Any], int | None, int, dict[str, Any]]] = {
    "many rows": (lambda: Large(128, MB), 16, 16 * MB, {}),
    "a row": (lambda: SlowLarge(24, 16 * MB), 1, 16 * MB, {}),
    "a sample": (lambda: SlowLarge(24, 16 * MB), None, 16 * MB, {}),
    "at once": (lambda: WholeLarge(128, MB), 16, 16 * MB, {}),
    "collated": (lambda: Large(128, MB), 16, 16 * MB, {"collate_fn": listed}),
    "a stream": (lambda: Counted(16 * MB, 24), 1, 16 * MB, {}),
    "a stream, collated": (lambda: Counted(4 * MB, 96), 4, 16 * MB, {"collate_fn": listed}),
    # If sizes vary, items are stored next to slabs that are too small for them.
    "growing": (lambda: Growing(160, 2 * MB), 16, 56 * MB, {"collate_fn": listed, "num_batch_workers": 0}),
    "ragged": (lambda: Ragged(160, 2 * MB), 16, 21 * MB, {"collate_fn": listed}),
    "ragged, by few": (lambda: Ragged(160, 2 * MB), 16, 21 * MB, {"collate_fn": listed, "num_batch_workers": 0}),
}


@pytest.mark.parametrize("kind", KINDS)
@apart
def test_memory_does_not_depend_on_the_number_of_workers(kind: str) -> None:
    make, size, nbytes, more = KINDS[kind]
    for workers, ahead, away in [(1, 2, 0.0), (4, 2, 0.0), (8, 1, 0.01), (4, 4, 0.0), (16, 2, 0.0)]:
        for way in (FORKED, THREADS) if workers in (8, 16) and "stream" not in kind else (FORKED,):
            arguments = way | {"num_workers": workers, "prefetch_factor": ahead} | more
            found = peak(iter(DataLoader(make(), size, **arguments)), away)
            assert found <= (ahead + 1) * nbytes + BESIDE, f"{workers} workers, {ahead} ahead: {found:,} bytes"


@apart
@pytest.mark.parametrize("workers", [1, 8])
def test_the_first_batches_of_a_stream_use_no_more_memory_than_others(workers: int) -> None:
    """The size of a batch isn't known before the first one is complete."""
    for more in ({}, {"collate_fn": listed}):
        batches = iter(DataLoader(Counted(32 * MB, 16), 2, **FORKED | {"num_workers": workers} | more))
        # Two batches in flight and one that the program has. The index pages and the states are small.
        assert peak(batches, 0.01, keeps=True) <= 3 * 64 * MB + MB


@apart
def test_a_pass_may_read_more_than_the_address_space() -> None:
    """Memory that any worker reuses needs no additional address space."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (130 * MB, resource.RLIM_INFINITY))
    for dataset, more in [
        (WholeLarge(400, MB), {}),
        (Large(400, MB), {}),
        (Large(400, MB), {"collate_fn": listed, "num_batch_workers": 1}),
    ]:
        loader = DataLoader(dataset, 4, persistent_workers=True, **FORKED, **more)
        for _ in range(2):
            found = [int(batch[-1][-1]) for batch in loader]
            assert found == [row % 251 for row in range(3, 400, 4)]


@apart
def test_errors_of_the_limit_name_sizes() -> None:
    for way in (FORKED, THREADS):
        for dataset, more in [(Large(12, MB), {}), (WholeLarge(12, MB), {}), (Large(12, MB), {"collate_fn": listed})]:
            batches = iter(DataLoader(dataset, 4, memory_limit=3 * MB, **way, **more))
            for _ in range(3):
                with pytest.raises(OutOfMemoryError) as caught:
                    next(batches)
                assert re.search(r"[\d,]{7,}.*(memory_limit|limit of)", str(caught.value), re.DOTALL), caught.value
            assert list(batches) == []
            assert len(list(DataLoader(dataset, 4, memory_limit=40 * MB, **way, **more))) == 3


@apart
def test_kept_batches_count_against_the_limit() -> None:
    for way in (FORKED, THREADS):
        batches = iter(DataLoader(Large(80, MB), 4, memory_limit=30 * MB, **way))
        kept: list[Any] = []
        with pytest.raises(OutOfMemoryError, match="release batches that the program keeps"):
            # Batches delivered before the error remain valid.
            kept.extend(batches)
        assert 3 <= len(kept) <= 7
        assert all(batch[0, 0] == 4 * number for number, batch in enumerate(kept))
        kept.clear()
        # Batches that were started in the meantime may also have failed.
        found = []
        while len(found) < 5:
            try:
                found.append(next(batches)[0, 0].item())
            except OutOfMemoryError:
                assert not found
        assert [number % 4 for number in found] == [0] * 5


@apart
@pytest.mark.parametrize("allowed", [4000, 400])
def test_a_limit_on_address_space(allowed: int) -> None:
    before = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (before + allowed * MB, resource.RLIM_INFINITY))
    assert_same(list(DataLoader(Squares(40), 4, **FORKED)), list(DataLoader(Squares(40), 4)))
    assert len(list(DataLoader(Large(200, MB // 8), 4, **FORKED))) == 50


@apart
def test_too_little_address_space_is_an_error_with_a_hint() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB, resource.RLIM_INFINITY))
    with pytest.raises(OutOfMemoryError, match=r"16,777,216 bytes.*ulimit"):
        iter(DataLoader(Numbers(4), **FORKED))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert len(list(DataLoader(Numbers(4), **FORKED))) == 4


@apart
def test_a_later_pass_begins_with_the_known_layout() -> None:
    for way in (FORKED, THREADS):
        loader = DataLoader(Squares(20), 4, **way)
        first = iter(loader)
        list(first)
        later = iter(loader)
        told = later._consumer.layout()
        assert told is not None
        assert told[0] == 1
        assert_same(list(later), list(DataLoader(Squares(20), 4)))
        # If the limit is too small for any batch, the batches raise the error, not the start of the pass.
        loader.memory_limit = 1
        limited = iter(loader)
        with pytest.raises(OutOfMemoryError):
            next(limited)
