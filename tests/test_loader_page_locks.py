"""`pin_memory` with a GPU that page-locks the loader's memory in place. `plain_driver.py` replaces the driver."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch

import plain_driver
from apart import apart
from fastpipe.torch import DataLoader
from fastpipe.torch.loader import _page_locks
from loader_data import WORKERS, Items, Large, Squares, assert_same, logged, outcomes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

workers = pytest.mark.parametrize("way", WORKERS)


def rows(batch: Any) -> torch.Tensor:
    return batch["row"]


def wide(items: list[Any]) -> torch.Tensor:
    """A batch whose rows are longer than what thread workers copy."""
    return torch.stack([torch.full((300_000,), float(item["index"])) for item in items])


kinds = pytest.mark.parametrize("kind", ["in place", "collated"])


def loader_of(kind: str, way: str, items: int = 24, **more: Any) -> Any:
    options = {"batch_size": 2, "pin_memory": True} | WORKERS[way] | more
    if kind == "in place":
        return DataLoader(Squares(items, width=400), **options)
    return DataLoader(Squares(items), collate_fn=wide, **options)


def values(kind: str, batch: Any) -> torch.Tensor:
    return rows(batch) if kind == "in place" else batch


@apart
@kinds
@workers
def test_batches_are_pinned_without_a_copy(kind: str, way: str) -> None:
    pins = plain_driver.install()
    driver = pins.driver
    loader = loader_of(kind, way, persistent_workers=True)
    expected = [values(kind, batch).clone() for batch in loader_of(kind, way, pin_memory=False)]
    for _ in range(10):
        found = []
        for batch in loader:
            assert values(kind, batch).is_pinned()
            driver.copy(values(kind, batch))
            found.append(values(kind, batch).clone())
            # The program drops the batch before the next one is requested.
            del batch
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(expected)
    assert pins.copies == 0
    # At most 10 batches are in flight, each in one or two places. There were 120 batches.
    assert driver.registrations < 60, "memory that is reused is registered only once"
    kept = values(kind, next(iter(loader)))
    address = kept.data_ptr()
    del loader
    gc.collect()
    assert kept.is_pinned(), "a batch stays page-locked as long as it lives"
    del kept
    gc.collect()
    assert not driver.is_locked(address, 1)
    assert driver.is_clean()


@apart
@kinds
@workers
def test_memory_is_reused_after_the_device_has_copied_it(kind: str, way: str) -> None:
    driver = plain_driver.install().driver
    _page_locks._PATIENCE = 0.05
    driver.waits = True
    addresses = []
    for number, batch in enumerate(loader_of(kind, way, items=80)):
        driver.copy(values(kind, batch))
        addresses.append(values(kind, batch).data_ptr())
        del batch
        if number == 7:
            # The device has used eight different places. It compares them with what it was to copy.
            assert len(set(addresses)) == 8
        if number >= 7:
            driver.finish()
    # Some batches were in flight, with memory of their own, when the device had copied the first eight.
    assert len(addresses) == 40
    assert len(set(addresses)) < 20, "memory is reused when it was copied"


@apart
@workers
def test_a_device_that_lags_bounds_the_memory(way: str) -> None:
    driver = plain_driver.install().driver
    sleeps = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        driver.finish()

    _page_locks.time = type("Clock", (), {"sleep": sleep, "monotonic": lambda: 0.0})  # type: ignore[attr-defined]
    driver.waits = True
    addresses = set()
    for batch in loader_of("in place", way, items=80):
        driver.copy(rows(batch))
        addresses.add(rows(batch).data_ptr())
        del batch
    # At most eight batches in flight (usually `prefetch_factor`, which is 2), two that the device copies, one that the
    # program has, and one whose place is free. There were 40 batches.
    assert len(addresses) <= 12
    assert sleeps


@apart
@workers
def test_a_failed_device_is_reported(way: str) -> None:
    driver = plain_driver.install().driver
    batches = iter(loader_of("in place", way))
    driver.copy(rows(next(batches)))
    driver.failed = True
    with pytest.raises(RuntimeError, match="other work of the GPU failed: CUDA_ERROR_LAUNCH_FAILED"):
        next(batches)


@apart
@workers
@pytest.mark.parametrize("limit", [0, 5_000])
def test_batches_are_copied_if_memory_cannot_be_locked(way: str, limit: int) -> None:
    pins = plain_driver.install()
    # The first limit refuses everything. The second one allows the first batch.
    pins.driver.limit = limit
    messages = logged()
    loader = loader_of("in place", way, batch_size=2)
    expected = [rows(batch).clone() for batch in loader_of("in place", way, batch_size=2, pin_memory=False)]
    for _ in range(2):
        found = list(loader)
        assert all(rows(batch).is_pinned() for batch in found)
        assert all(torch.equal(rows(batch), wanted) for batch, wanted in zip(found, expected, strict=True))
        del found
    assert pins.copies > 0
    (said,) = messages.found
    assert said.startswith("batches are copied to page-locked memory, because CUDA can't page-lock the loader's shared")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in said
    del loader
    gc.collect()
    assert pins.driver.is_clean()


def no_bindings(driver: Any) -> None:
    sys.modules["cuda.bindings"] = None  # type: ignore[assignment]


def old_driver(driver: Any) -> None:
    driver.cuCtxRecordEvent = None


def unknown_to_torch(driver: Any) -> None:
    driver.is_locked = lambda *_: False


def not_initialized(driver: Any) -> None:
    torch.cuda.is_initialized = lambda: False


def other_vendor(driver: Any) -> None:
    torch.version.hip = "7.0"


def other_accelerator(driver: Any) -> None:
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("xpu")


REASONS: dict[Any, str] = {
    no_bindings: "ModuleNotFoundError",
    old_driver: "TypeError",
    unknown_to_torch: "torch doesn't consider registered memory as page-locked",
    not_initialized: "CUDA wasn't initialized when the pass began",
    other_vendor: "the device is a GPU of AMD",
    other_accelerator: "the device is xpu",
}


@apart
@pytest.mark.parametrize("reason", REASONS)
def test_the_log_says_why_batches_are_copied(reason: Any) -> None:
    pins = plain_driver.install()
    reason(pins.driver)
    messages = logged()
    loader = loader_of("in place", "fork")
    for _ in range(2):
        batches = list(loader)
        assert all(rows(batch).is_pinned() for batch in batches)
    assert pins.copies >= 24
    (said,) = messages.found
    assert REASONS[reason] in said
    assert pins.driver.registrations <= 1, "at most one page was tried"
    assert pins.driver.is_clean()


@apart
@workers
def test_memory_is_unlocked_before_it_is_released(way: str) -> None:
    pins = plain_driver.install()
    loader = DataLoader(Large(240, 1 << 20), batch_size=4, pin_memory=True, **WORKERS[way])
    kept = []
    for number, batch in enumerate(loader):
        assert batch.is_pinned()
        assert batch[:, -1].tolist() == list(range(number * 4, number * 4 + 4))
        if number < 40:
            kept.append(batch)
            continue
        if kept:
            locked = len(pins.driver.registered)
            assert locked > 40
            kept.clear()
        pins.driver.copy(batch)
        del batch
    # Memory is kept for 5 batches, which may be in flight or lag, and 32 MB more. At most 11 batches are in use.
    assert len(pins.driver.registered) <= 5 + 8 + 11
    del loader
    gc.collect()
    assert pins.driver.is_clean()
    assert pins.copies == 0


KEPT: list[Any] = []


class SlowSquares(Squares):
    """Items that are slow enough for a batch worker to collate them."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.003)
        return super().__getitem__(index)


def keeps(items: list[Any]) -> Any:
    """Keeps the items of some batches, whose memory then belongs to the batch worker."""
    if int(items[0]["index"]) % 3 == 0:
        KEPT.append(items)
    return torch.stack([torch.from_numpy(item["row"]) for item in items])


@apart
@workers
def test_memory_that_collate_fn_keeps_is_unlocked(way: str) -> None:
    driver = plain_driver.install().driver
    for batch in DataLoader(SlowSquares(180, 20_000), batch_size=1, collate_fn=keeps, pin_memory=True, **WORKERS[way]):
        assert batch.is_pinned()
        del batch
    # The batch workers have kept the memory of 60 batches, most of which was locked for an earlier batch. At most 14
    # batches are in flight, lag, or are in use.
    assert len(driver.registered) <= 14, driver.registrations
    KEPT.clear()


@apart
@workers
def test_errors_do_not_end_a_pass(way: str) -> None:
    pins = plain_driver.install()
    items = [np.full(1000, row, np.float32) if row != 5 else None for row in range(12)]
    options = {"batch_size": 2} | WORKERS[way]
    found = outcomes(iter(DataLoader(Items(items), pin_memory=True, **options)))
    assert_same(found, outcomes(iter(DataLoader(Items(items), **options))))
    assert len(found) == 6
    assert pins.copies == 0


@apart
def test_a_forked_process_leaves_the_locks_alone() -> None:
    driver = plain_driver.install().driver
    batches = iter(loader_of("in place", "fork"))
    batch = next(batches)
    child = os.fork()
    if child == 0:
        # The driver raises an error if it is called here.
        sys.unraisablehook = lambda error: os._exit(2)
        del batch, batches
        gc.collect()
        os._exit(0 if driver.registered else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert rows(batch).is_pinned()
    assert len(list(batches)) == 11
