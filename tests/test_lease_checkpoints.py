"""Checkpoints of ledgers with several workers: they include everything that was used, or are refused."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import fixtures
from processes import together

BATCHES = 40

url = fixtures.url


def reader(**options: Any) -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(BATCHES)}, **{"batch_size": 1, "shuffle": True, "seed": 5} | options)


def committed(checkpoint: dict[str, Any]) -> int:
    """Returns the number of committed batches of the first epoch in a checkpoint."""
    starts = range(0, checkpoint["batches"], checkpoint["stretch"])
    return sum(step - start for start, step in zip(starts, checkpoint["epochs"]["0"], strict=True))


def use(worker: fastpipe.leases.LeaseWorker, count: int) -> None:
    for _ in range(count):
        next(worker)
        worker.commit()


UNSETTLED: dict[str, Callable[[fastpipe.leases.LeaseWorker], Any]] = {
    "uses a batch": next,
    "commits": lambda worker: use(worker, 1),
    "commits and waits": lambda worker: (use(worker, 1), worker.commit(wait=True)),
    "draws after a flush": lambda worker: (use(worker, 1), worker.flush(), next(worker)),
}


@pytest.mark.parametrize("act", UNSETTLED)
def test_a_checkpoint_that_may_lack_commits_is_refused(url: str, act: str) -> None:
    ledger = fastpipe.leases.Ledger(url)
    with (
        reader().lease(url, worker_name="rank-0", stretch=5) as here,
        reader().lease(url, worker_name="rank-1") as other,
    ):
        use(here, 3)
        UNSETTLED[act](other)
        for checkpoint in (here.checkpoint, ledger.checkpoint):
            with pytest.raises(
                fastpipe.errors.StateError, match=r"the workers 'rank-1' of .*Call worker\.flush\(\) in each"
            ):
                checkpoint()
        other.flush()
        found = ledger.checkpoint()
        assert found == here.checkpoint() == other.checkpoint()
        status = {worker.worker_name: worker.batches for worker in ledger.status().workers}
        assert committed(found) == sum(status.values())
        assert status["rank-0"] == 3
        next(here)
        with pytest.raises(fastpipe.errors.StateError, match=r"the workers 'rank-0' of"):
            ledger.checkpoint()


def test_workers_without_leases_do_not_prevent_checkpoints(url: str) -> None:
    ledger = fastpipe.leases.Ledger(url)
    with reader().lease(url, worker_name="left", stretch=5) as left:
        use(left, 2)
    assert committed(ledger.checkpoint()) == 2
    silent = reader().lease(url, worker_name="silent", ttl=0.5)
    next(silent)
    # The worker's thread is blocked, as in a stopped process, so the lease isn't renewed.
    with silent._agent.changed:
        time.sleep(0.7)
        assert committed(ledger.checkpoint()) == 2
    silent.close()


class Ranks:
    """Ranks that train one model in lockstep like DDP, as the manual describes. Each rank is a thread."""

    def __init__(self, url: str, ranks: int, every: int) -> None:
        self.url, self.ranks, self.every = url, ranks, every
        self.barrier = threading.Barrier(ranks)
        self.lock = threading.Lock()
        # The batches that the model was trained on, and the last checkpoint of model and ledger.
        self.model: list[tuple[int, int]] = []
        self.saved: tuple[dict[str, Any], list[tuple[int, int]], int] | None = None
        self.errors: list[BaseException] = []

    def run(self, stop: int) -> None:
        """Resumes from the last checkpoint and crashes before step `stop`."""
        first = 0
        if self.saved is not None:
            checkpoint, model, first = self.saved
            fastpipe.leases.Ledger(self.url).restore(checkpoint)
            self.model = list(model)
        together([threading.Thread(target=self._guarded, args=(rank, first, stop)) for rank in range(self.ranks)])
        assert not self.errors

    def _guarded(self, rank: int, first: int, stop: int) -> None:
        try:
            self._train(rank, first, stop)
        except BaseException as error:
            self.errors.append(error)
            self.barrier.abort()

    def _train(self, rank: int, first: int, stop: int) -> None:
        options: dict[str, Any] = {"barrier": False, "copies": False, "stretch": 3, "ttl": 1000}
        worker = reader(epochs=None).lease(self.url, worker_name=f"rank-{rank}", **options)
        for step in range(first, stop):
            if step % self.every == 0:
                worker.flush()
                self.barrier.wait(60)
                if rank == 0:
                    self.saved = fastpipe.leases.Ledger(self.url).checkpoint(), list(self.model), step
                self.barrier.wait(60)
            next(worker)
            assert worker.position is not None
            with self.lock:
                self.model.append(tuple(worker.position))
            # The backward pass synchronizes the ranks, so none is a step ahead.
            self.barrier.wait(60)
            worker.commit()
        # Some ranks are killed before their commits are sent, others after it.
        if rank % 2:
            worker._agent._wishes.used.clear()
        worker.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_that_crash_train_each_batch_once(url: str, ranks: int) -> None:
    group = Ranks(url, ranks, every=5)
    for stop in (3, 8, 14, 23):
        group.run(stop)
        # No batch was trained twice, and the number of batches is that of all ranks.
        assert max(Counter(group.model).values()) == 1
        assert len(group.model) == ranks * stop


@pytest.mark.skipif(sys.platform == "win32", reason="open files can't be deleted")
@pytest.mark.parametrize("fate", ["deleted", "replaced"])
def test_deleting_a_ledger_in_use_is_an_error(tmp_path: Path, fate: str) -> None:
    path = tmp_path / "ledger.db"
    worker = _leased(path)
    use(worker, 2)
    worker.commit(wait=True)
    next(worker)
    if fate == "deleted":
        path.unlink()
    else:
        shutil.copy(path, tmp_path / "copy.db")
        os.replace(tmp_path / "copy.db", path)
    with pytest.raises(fastpipe.errors.LedgerError, match=rf"ledger\.db was {fate}.* while it was in use"):
        worker.commit(wait=True)
    with pytest.raises(fastpipe.errors.LedgerError, match="while it was in use"):
        next(worker)
    # The error was already raised.
    worker.close()


def _leased(path: Path) -> fastpipe.leases.LeaseWorker:
    return reader().lease(f"sqlite:///{path}", worker_name="one", stretch=5)


def ends(worker: fastpipe.leases.LeaseWorker) -> None:
    assert len(list(worker)) == BATCHES
    assert not worker.finished


def test_closing_a_worker_without_commits_warns(tmp_path: Path) -> None:
    worker = _leased(tmp_path / "ledger.db")
    ends(worker)
    with pytest.warns(UserWarning, match=r"'one' .* 40 batches that it yielded were never committed.*worker\.commit"):
        worker.close()


def test_dropping_a_worker_without_commits_warns(tmp_path: Path) -> None:
    workers = [_leased(tmp_path / "ledger.db")]
    ends(workers[0])

    def forget() -> None:
        workers.clear()
        gc.collect()

    with pytest.warns(UserWarning, match="40 batches that it yielded were never committed"):
        forget()


def test_iterating_again_without_commits_warns(tmp_path: Path) -> None:
    with _leased(tmp_path / "ledger.db") as worker:
        ends(worker)
        with pytest.warns(UserWarning, match="40 batches that it yielded were never committed"):
            assert list(worker) == []
        worker.commit()
        assert list(worker) == []
        assert worker.finished


def test_no_warning_after_a_late_commit_or_a_break(tmp_path: Path) -> None:
    with _leased(tmp_path / "left.db") as worker:
        next(worker)
    with _leased(tmp_path / "ledger.db") as worker:
        ends(worker)
        worker.commit(wait=True)
        assert list(worker) == []
        assert worker.finished
