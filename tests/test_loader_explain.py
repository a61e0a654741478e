"""The output of a loader's `explain` for passes that are over, in progress, or stalled."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from apart import apart, wait_until
from fastpipe.errors import WorkerError
from fastpipe.torch import DataLoader
from fastpipe.torch.loader import _time_account
from fastpipe.torch.loader._time_account import Account, Look, _verdict, _without_workers
from loader_data import FORKED, THREADS, WORKERS, Gated, Items, Numbers, Slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

workers = pytest.mark.parametrize("way", WORKERS)


def slowly(items: list[Any]) -> Any:
    time.sleep(0.04)
    return items


@apart
@workers
def test_it_names_the_bottleneck_of_a_pass(way: str) -> None:
    # With persistent workers the second pass has no start-up time, which a busy machine prolongs.
    kept = WORKERS[way] | {"persistent_workers": True}
    loader = DataLoader(Slow(40, {7: 0.5}, 0.01), 4, **kept)
    assert loader.explain() == "No pass has begun: explain() describes the last one."
    for _ in range(2):
        for _ in loader:
            pass
    said = loader.explain()
    assert said.startswith("item-bound: the consumer waits ")
    assert re.search(r"Of the workers' time: making items \d+%", said)
    assert re.search(r"40 items took [\d.]+ ms each", said)
    # On a busy machine, another item may take even longer.
    assert re.search(r"The slowest: (index \d+ \([\d.]+ ms\), )*index 7 \(\d{3,}\.\d ms\)", said), said
    quick = DataLoader(Numbers(40), 4, **kept)
    list(quick)
    for _ in quick:
        time.sleep(0.04)
    assert re.match("consumer-bound|not a bottleneck", quick.explain())


@apart
@workers
@pytest.mark.parametrize(
    ("joiners", "advice"),
    [(1, "more num_batch_workers help"), (0, "item workers collate; num_batch_workers=1 or more collate in parallel")],
)
def test_it_names_collation_by_any_worker(way: str, joiners: int, advice: str) -> None:
    kept = WORKERS[way] | {"num_batch_workers": joiners, "persistent_workers": True}
    loader = DataLoader(Slow(40, {}, 0.002), 4, collate_fn=slowly, **kept)
    for _ in range(2):
        for _ in loader:
            pass
    assert re.match(rf"collation-bound: the consumer waits \d+% of the time.*{advice}", loader.explain())


@apart
def test_it_names_copying() -> None:
    kept = DataLoader(Items([torch.zeros(1 << 20)] * 60), 4, **FORKED, persistent_workers=True)
    for _ in range(2):
        for _ in kept:
            pass
    assert kept.explain().startswith("copy-bound: ")


@pytest.mark.parametrize(
    ("seconds", "spent", "verdict"),
    [
        # Seconds of starting workers, of waiting for the first batch, of being away, and of waiting for the second one.
        # Seconds that the only worker has spent on making, copying and collating items.
        ((4, 2, 1, 1), (1, 0, 0), "start-bound: 75% of the time passed before the first batch"),
        ((1, 5, 1, 1), (1, 0, 0), "start-bound: 75% of the time passed before the first batch"),
        ((1, 5, 1, 1), (5, 0, 0), "item-bound: the consumer waits 75% of the time"),
        ((0, 1, 5, 2), (5, 0, 0), "consumer-bound: the consumer is away 62% of the time"),
        ((0, 1, 28, 0.4), (5, 0, 0), "not a bottleneck: the consumer waits 5% of the time, the start"),
        ((0, 1, 28, 0.6), (5, 0, 0), "consumer-bound: the consumer is away 95% of the time"),
        ((1, 1, 28, 0), (5, 0, 0), "consumer-bound: the consumer is away 93% of the time"),
        ((2, 1, 2, 3), (1, 0, 0), "item-bound: the consumer waits 50% of the time"),
        ((2, 1, 2, 3), (1, 2, 0), "copy-bound: the consumer waits 50% of the time"),
        ((2, 1, 2, 3), (1, 2, 3), "collation-bound: the consumer waits 50% of the time"),
    ],
)
def test_a_verdict_follows_from_the_account(
    seconds: tuple[float, ...], spent: tuple[int, int, int], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(_time_account.time, "perf_counter", lambda: now)
    account = Account()
    for duration, record in zip(seconds, (account.started, account.leave, account.wait, account.leave), strict=True):
        now += duration
        record()
    maker = dict(zip(("making", "placing", "joining"), spent, strict=True))
    assert _verdict(account, Look([maker], [], None, False)).startswith(verdict)


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        # Seconds of making the first batch, of being away, and of making the second one.
        ((0.01, 1, 0.02), "not a bottleneck: making batches takes 3% of the time, without workers."),
        ((0.1, 1, 0.1), "consumer-bound: making batches takes 17% of the time, without workers."),
        ((1, 1, 1), "item-bound: the program makes batches itself, which takes 67% of the time"),
    ],
)
def test_a_verdict_without_workers_follows_from_the_account(
    seconds: tuple[float, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(_time_account.time, "perf_counter", lambda: now)
    account = Account()
    account.wait()
    for duration, record in zip(seconds, (account.leave, account.wait, account.leave), strict=True):
        now += duration
        record()
    assert _without_workers(account).startswith(verdict)


@apart
def test_it_names_the_start_of_workers() -> None:
    def late(number: int) -> None:
        time.sleep(0.5)

    loader = DataLoader(Numbers(8), 4, worker_init_fn=late, **FORKED)
    for _ in loader:
        pass
    assert loader.explain().startswith("start-bound: ")
    kept = DataLoader(Slow(20, {}, 0.01), 4, worker_init_fn=late, persistent_workers=True, **FORKED)
    for _ in range(2):
        for _ in kept:
            pass
        assert re.search(r"^20 items took \d{2,}\.\d+ ms each", kept.explain(), re.MULTILINE)
    assert kept.explain().startswith("item-bound: ")


@apart
@workers
def test_pauses_between_passes_are_not_counted(way: str) -> None:
    """Persistent workers have separate accounts for each pass."""
    loader = DataLoader(Slow(20, {}, 0.01), 4, persistent_workers=True, **WORKERS[way])
    for _ in range(3):
        for _ in loader:
            pass
        time.sleep(0.5)
    said = loader.explain()
    assert said.startswith("item-bound: ")
    assert "\n20 items took " in said


@contextmanager
def reading(loader: DataLoader[Any]) -> Iterator[list[Any]]:
    """Reads in another thread, which may stall."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(loader))
    thread.start()
    try:
        yield found
    finally:
        thread.join()


@apart
@workers
def test_it_explains_a_stall_while_it_lasts(way: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    loader = DataLoader(Gated(12, 5, go), 4, **WORKERS[way])
    with reading(loader) as found:
        assert wait_until(lambda: "stalled" in loader.explain())
        first, second, *_ = loader.explain().splitlines()
        go.touch()
    # One thread may also have claimed the items before it, which count when the thread is done. Other threads make the
    # items after it.
    missing = "one of its items is" if way == "fork" else "(one of its items is|2 of its items are)"
    assert re.fullmatch(rf"stalled: the consumer has waited \d+\.\d s for batch 1: {missing} missing\.", first), first
    assert re.fullmatch(r"\S+ has been making index 5, row 1 of batch 1, for \d+\.\d s\.", second), second
    assert re.search(r"The slowest: index 5 \(\d{4,}\.\d ms\)", loader.explain())
    assert "stalled" not in loader.explain()
    assert len(found) == 3


class Stuck:
    """A `collate_fn` that waits for a file at the second batch."""

    def __init__(self, go: Path) -> None:
        self.go = go

    def __call__(self, items: list[Any]) -> Any:
        while 4 in items and not self.go.exists():
            time.sleep(0.01)
        return items


@apart
@workers
@pytest.mark.parametrize("joiners", [0, 2])
def test_it_explains_collation_that_stalls(way: str, joiners: int, tmp_path: Path) -> None:
    go = tmp_path / "go"
    loader = DataLoader(Numbers(12), 4, collate_fn=Stuck(go), num_batch_workers=joiners, **WORKERS[way])
    with reading(loader):
        assert wait_until(lambda: "stalled" in loader.explain())
        said = loader.explain()
        go.touch()
    assert re.search(r"^\S+ has been collating batch 1 for \d+\.\d s\.$", said, re.MULTILINE)


@apart
def test_it_explains_after_a_timeout() -> None:
    loader = DataLoader(Slow(8, {5: 600.0}, 0.0), 4, timeout=60, **FORKED)
    batches: Any = iter(loader)
    next(batches)
    batches._timeout = 1.2
    with pytest.raises(WorkerError, match="timed out"):
        next(batches)
    said = loader.explain()
    assert re.search(r"has been making index 5, row 1 of batch 1, for \d+\.\d s\.", said)
    assert re.search(r"The slowest: index 5 \(\d{4,}\.\d ms so far\)", said)


@apart
def test_passes_without_workers_are_explained() -> None:
    loader = DataLoader(Slow(8, {}, 0.01), 4)
    for _ in loader:
        pass
    assert re.match(r"item-bound: the program makes batches itself, which takes \d+% of the time", loader.explain())
    for _ in (quick := DataLoader(Numbers(8), 4)):
        time.sleep(0.01)
    assert re.match("(consumer-bound|not a bottleneck): making batches takes ", quick.explain())


@apart
def test_an_account_keeps_no_workers_and_no_memory() -> None:
    loader = DataLoader(Numbers(8), 4, **THREADS)
    for _ in loader:
        break
    assert wait_until(lambda: not [thread for thread in threading.enumerate() if "fastpipe" in thread.name])
    assert "items took" in loader.explain()
