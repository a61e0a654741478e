"""The start of a pass with workers.

Tests cover errors of `worker_init_fn`, items that wait for each other, and batches that are started before the size of
an item is known.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apart import apart
from fastpipe.errors import WorkerError
from fastpipe.torch import DataLoader
from loader_data import FORKED, SPAWNED, THREADS, WORKERS, Failing, Large, Numbers, Slow, assert_same, listed, outcomes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

MB = 1 << 20
workers = pytest.mark.parametrize("way", WORKERS)


class Together(Large):
    """Arrays. The first `together` arrays wait until all of them are being made."""

    def __init__(self, count: int, nbytes: int, together: int) -> None:
        super().__init__(count, nbytes)
        self.together = together
        # Shared by this process and its forks.
        self.begun = mmap.mmap(-1, mmap.PAGESIZE)

    def __getitem__(self, index: int) -> Any:
        if index < self.together:
            self.begun[index] = 1
            deadline = time.monotonic() + 60
            while not all(self.begun[: self.together]):
                assert time.monotonic() < deadline, list(self.begun[: self.together])
                time.sleep(0.001)
        return super().__getitem__(index)


@apart
@workers
@pytest.mark.parametrize("size", [1, 2, 4])
def test_items_may_wait_for_items_of_all_workers(way: str, size: int) -> None:
    wanted = list(DataLoader(Large(30, 1000), size))
    for more in ({"in_order": False}, {"prefetch_factor": 1, "worker_init_fn": print_nothing}):
        arguments = WORKERS[way] | {"num_workers": 6} | more
        found = list(DataLoader(Together(30, 1000, 6), size, **arguments))
        assert_same(sorted(found, key=lambda batch: int(batch[0, 0])), wanted)
    own = DataLoader(Together(30, 1000, 6), size, collate_fn=listed, **WORKERS[way] | {"num_workers": 6})
    assert_same(list(own), list(DataLoader(Large(30, 1000), size, collate_fn=listed)))


def print_nothing(number: int) -> None:
    print(end="")


@apart
@workers
def test_memory_is_limited_to_prefetched_batches(way: str) -> None:
    """Workers keep items of later batches until there is room for them."""
    loader = DataLoader(Together(24, 16 * MB, 8), 1, **WORKERS[way] | {"num_workers": 8})
    batches = iter(loader)
    most = 0
    for number, batch in enumerate(batches):
        assert batch[0, ::MB].tolist() == [number % 251] * 16
        most = max(most, batches._consumer.held)
        time.sleep(0.01)
    assert number == 23
    assert most <= 3 * 16 * MB + 64 * MB, most


class Torn(Large):
    """Arrays, except that the first ones raise an error."""

    def __getitem__(self, index: int) -> Any:
        if index < 40:
            raise ValueError(index)
        return super().__getitem__(index)


@apart
@workers
@pytest.mark.parametrize("joiners", [0, 2])
def test_memory_is_limited_before_item_sizes_are_known(way: str, joiners: int) -> None:
    """The first batches fail, so further batches are started before there is a layout."""
    arguments = WORKERS[way] | {"num_workers": 8, "collate_fn": listed, "num_batch_workers": joiners}
    batches = iter(DataLoader(Torn(400, MB), 10, **arguments))
    most, found = 0, []
    while len(found) < 40:
        try:
            found.append(len(next(batches)))
        except ValueError:
            found.append(0)
        most = max(most, batches._consumer.held)
        time.sleep(0.005)
    assert found == [0] * 4 + [10] * 36
    assert most <= 3 * 10 * MB + 64 * MB, most


class First(Large):
    """Arrays. One array is much larger than the others."""

    def __init__(self, count: int, largest: int, at: int = 0, *, tensors: bool = False) -> None:
        super().__init__(count, 64 << 10)
        self.largest, self.at, self.tensors = largest, at, tensors

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        found = np.full(self.largest if index == self.at else self.nbytes, index % 251, np.uint8)
        return torch.from_numpy(found) if self.tensors else found


@apart
@pytest.mark.parametrize(("number", "at"), [(1, 0), (2, 0), (8, 0), (1, 1), (8, 16)])
def test_one_much_larger_item_is_stored_separately(number: int, at: int) -> None:
    for way in (FORKED, THREADS):
        loader = DataLoader(
            First(160, 32 * MB, at), 16, collate_fn=listed, shuffle=False, **way | {"num_workers": number}
        )
        batches = iter(loader)
        most, found = 0, []
        for batch in batches:
            found.append([(item.nbytes, int(item[0]), int(item[-1])) for item in batch])
            del batch
            most = max(most, batches._consumer.held)
        assert [item for batch in found for item in batch] == [
            (32 * MB if index == at else 64 << 10, index % 251, index % 251) for index in range(160)
        ]
        assert most <= 3 * (32 * MB + 15 * 64 * 1024) + 64 * MB


@apart
@workers
def test_a_layout_of_large_items_needs_two_items(way: str) -> None:
    """A worker keeps the first item until then, and its batch is still correct."""
    for number in (1, 4):
        for tensors in (False, True):
            dataset = First(24, 64 << 10, tensors=tensors)
            dataset.nbytes = dataset.largest = 2 * MB
            loader = DataLoader(dataset, 8, **WORKERS[way] | {"num_workers": number})
            batches = iter(loader)
            assert_same(list(batches), list(DataLoader(dataset, 8)))
            assert batches._consumer.layout()[0] == 1
            # The next pass knows the layout.
            assert_same(list(loader), list(DataLoader(dataset, 8)))


@apart
@workers
def test_batches_that_fail_before_there_is_a_layout(way: str) -> None:
    """Some batches were started for idle workers and never had a slab."""

    class Unwritten(Slow):
        def __getitem__(self, index: int) -> int:
            found = super().__getitem__(index)
            if index < 20:
                raise ValueError(index)
            return found

    loader = DataLoader(Unwritten(30, {}, 0.01), 1, persistent_workers=True, **WORKERS[way] | {"num_workers": 6})
    for _ in range(2):
        found = outcomes(iter(loader))
        assert found[:20] == [ValueError] * 20
        assert [int(batch) for batch in found[20:]] == list(range(20, 30))


@apart
@workers
def test_passes_that_are_left_before_there_is_a_layout(way: str) -> None:
    loader = DataLoader(
        Slow(30, {0: 2.0}, 0.2), 1, timeout=0.1, persistent_workers=True, **WORKERS[way] | {"num_workers": 6}
    )
    for _ in range(2):
        with pytest.raises(WorkerError, match="timed out"):
            next(iter(loader))
    batches = iter(loader)
    batches._timeout = 0
    assert int(next(batches)) == 0


class Refuses:
    """A slow `worker_init_fn` that raises in some workers."""

    def __init__(self, *numbers: int, seconds: dict[int, float] | None = None) -> None:
        self.numbers, self.seconds = numbers, seconds or {}

    def __call__(self, number: int) -> None:
        time.sleep(self.seconds.get(number, 0.0))
        if number in self.numbers:
            raise ValueError(f"not {number}")


class Waits:
    """A `worker_init_fn` that waits for a file in some workers."""

    def __init__(self, go: Path, *numbers: int) -> None:
        self.go = go
        self.numbers = numbers

    def __call__(self, number: int) -> None:
        while number in self.numbers and not self.go.exists():
            time.sleep(0.01)


@apart
@pytest.mark.parametrize("way", [*WORKERS, "spawn"])
def test_a_pass_fails_if_workers_cannot_begin(way: str) -> None:
    arguments = (WORKERS | {"spawn": SPAWNED})[way] | {"num_workers": 2}
    # Spawned workers may start seconds apart, and the first one makes the first batch.
    for refuses in (Refuses(0, 1), *([Refuses(1, seconds={1: 0.05})] if way != "spawn" else [])):
        # The first batch takes much longer than worker 1 takes to fail.
        dataset = Slow(8, {}, 3.0)
        loader = DataLoader(dataset, 2, worker_init_fn=refuses, persistent_workers=True, **arguments)
        with pytest.raises(ValueError, match=r"(?s)in DataLoader worker (process|thread) [01].*not [01]"):
            iter(loader)
        # Without the function the pass begins.
        loader.worker_init_fn = None
        dataset.otherwise = 0.0
        assert [int(number) for batch in loader for number in batch] == list(range(8))


@apart
@workers
def test_batch_workers_may_fail_to_begin(way: str) -> None:
    loader = DataLoader(
        *(Slow(4, {}, 0.3), 2), worker_init_fn=Refuses(2), collate_fn=listed, num_batch_workers=1, **WORKERS[way]
    )
    with pytest.raises(ValueError, match="not 2"):
        iter(loader)


@apart
@workers
def test_a_state_survives_a_pass_that_cannot_begin(way: str) -> None:
    def make(**more: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Slow(40, {}, 0.01), 4, shuffle=True, generator=generator, **WORKERS[way] | more)

    first = make()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state, rest = first.state_dict(), [batch.tolist() for batch in batches]
    loader = make(worker_init_fn=Refuses(0, 1))
    loader.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"not [01]"):
            iter(loader)
        assert loader.state_dict() == state
    loader.worker_init_fn = None
    assert [batch.tolist() for batch in loader] == rest


@apart
@workers
def test_the_first_batch_does_not_wait_for_late_workers(way: str, tmp_path: Path) -> None:
    """Otherwise the test would time out."""
    batches = iter(DataLoader(Numbers(40), 4, worker_init_fn=Waits(tmp_path / "go", 1), **WORKERS[way]))
    assert next(batches).tolist() == [0, 1, 2, 3]
    (tmp_path / "go").touch()
    assert len(list(batches)) == 9


@apart
@workers
def test_a_timeout_starts_when_a_batch_is_requested(way: str, tmp_path: Path) -> None:
    late = Waits(tmp_path / "go", 0, 1)
    batches = iter(DataLoader(Numbers(8), 4, worker_init_fn=late, timeout=0.1, **WORKERS[way]))
    with pytest.raises(WorkerError, match="timed out"):
        next(batches)
    (tmp_path / "go").touch()


@apart
def test_a_worker_that_exits_at_its_start_is_named() -> None:
    def end(number: int) -> None:
        if number == 1:
            raise SystemExit(3)

    with pytest.raises(WorkerError, match="exit code 3"):
        list(DataLoader(Slow(40, {}, 0.05), 4, worker_init_fn=end, **FORKED))
    # An item's error is raised in place of its batch.
    failing = iter(DataLoader(Failing(8, {0: ValueError("no")}), 4, worker_init_fn=print_nothing, **FORKED))
    assert outcomes(failing)[0] is ValueError
