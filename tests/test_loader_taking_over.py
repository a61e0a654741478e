"""Workers claim many cheap items at once. If one item is slow, idle workers take over the items after it."""

from __future__ import annotations

import mmap
import multiprocessing
import sys
import time
from typing import Any

import pytest
import torch

from apart import apart
from fastpipe.torch import DataLoader, item_rng, worker_info
from loader_data import WORKERS, Gathering, Numbers, listed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

# Collation: in place because items are adjacent in memory, by the worker of the last item, or by batch workers.
COLLATION: dict[str, dict[str, Any]] = {
    "in place": {},
    "by makers": {"collate_fn": listed, "num_batch_workers": 0},
    "by joiners": {"collate_fn": listed, "num_batch_workers": 2},
}
workers = pytest.mark.parametrize("way", WORKERS)
collation = pytest.mark.parametrize("collation", COLLATION)


class Meeting(Numbers):
    """Numbers. From index `first` on, each waits until four workers are making a number."""

    def __init__(self, count: int, first: int) -> None:
        super().__init__(count)
        self.first = first
        # Shared by this process and its forks.
        self.lock = multiprocessing.get_context("fork").Lock()
        self.begun = mmap.mmap(-1, mmap.PAGESIZE)

    def __getitem__(self, index: int) -> int:
        if index >= self.first:
            with self.lock:
                number = self._count()
                self.begun[:8] = (number + 1).to_bytes(8, "little")
            deadline = time.monotonic() + 60
            while self._count() < number // 4 * 4 + 4:
                assert time.monotonic() < deadline, "the other workers make no item"
                time.sleep(0.0002)
        return super().__getitem__(index)

    def _count(self) -> int:
        return int.from_bytes(self.begun[:8], "little")


@apart
@workers
@collation
# Either all items wait or only those after cheap ones. The number of batches varies, down to one.
@pytest.mark.parametrize(("count", "first", "size"), [(96, 0, 8), (104, 48, 8), (404, 400, 100), (40, 0, 40)])
def test_items_may_always_wait_for_those_of_other_workers(
    way: str, collation: str, count: int, first: int, size: int
) -> None:
    arguments = WORKERS[way] | COLLATION[collation] | {"num_workers": 4}
    found = [list(map(int, batch)) for batch in DataLoader(Meeting(count, first), size, **arguments)]
    assert found == [list(range(begin, min(begin + size, count))) for begin in range(0, count, size)]


class Drawn(Numbers):
    """The number drawn for an index and the worker that made it. In workers, one item waits for the items after it.

    If an item fails, the items after it may not be made, so the waiting item then takes half a second.
    """

    def __init__(self, count: int, slow: int, fails: int | None = None) -> None:
        super().__init__(count)
        self.slow = slow
        self.fails = fails
        self.behind = Gathering(count - slow)

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        info = worker_info()
        if index == self.slow and self.fails is not None:
            time.sleep(0.5)
        elif index == self.slow and info is not None:
            self.behind.wait(0)
        elif index > self.slow:
            self.behind.come(index - self.slow)
        if index == self.fails:
            raise LookupError(f"no item {index}")
        return super().__getitem__(index), item_rng().random_generator.random(), -1 if info is None else info.id


@apart
@workers
@collation
def test_a_slow_item_does_not_delay_later_ones(way: str, collation: str) -> None:
    """The items and their order do not depend on the workers."""
    arguments = COLLATION[collation]

    def rows(**more: Any) -> list[list[tuple[int, float, int]]]:
        found = []
        for batch in DataLoader(Drawn(32 * 40, 32 * 39 + 3), 32, **arguments, **more):
            columns = zip(*batch, strict=True) if collation != "in place" else batch
            numbers, drawn, makers = (list(map(float, column)) for column in columns)
            found.append([*zip(map(int, numbers), drawn, map(int, makers), strict=True)])
        return found

    alone = rows(num_workers=0, generator=seeded())
    found = rows(**WORKERS[way], generator=seeded())
    assert [[row[:2] for row in batch] for batch in found] == [[row[:2] for row in batch] for batch in alone]
    slow, *behind = (maker for _, _, maker in found[-1][3:])
    assert set(behind) == {1 - slow}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@apart
@workers
@collation
@pytest.mark.parametrize("fails", [32 * 39 + 1, 32 * 39 + 3, 32 * 39 + 20])
def test_a_batch_raises_the_error_of_its_first_failing_item(way: str, collation: str, fails: int) -> None:
    """The failing item is before the slow one, is the slow one, or is after it and made by another worker."""
    data = Drawn(32 * 40, 32 * 39 + 3, fails)
    batches = iter(DataLoader(data, 32, **WORKERS[way], **COLLATION[collation]))
    for _ in range(39):
        next(batches)
    with pytest.raises(LookupError, match=f"no item {fails}"):
        next(batches)
    assert list(batches) == []
