"""The log of epochs: under any schedule, all workers of a pass read the same epoch, and finished passes advance it."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

import fastpipe

# The tests don't need torch, but the module under test imports it.
pytest.importorskip("torch")

from fastpipe.torch._worker_epochs import EpochLog, EpochLogFile, Joined, Participant, Version

MAIN = 1000
START = Version(0, 0, False)


def through(ledger: EpochLog) -> EpochLog:
    """Returns the log as another process reads it."""
    return EpochLog.parse(ledger.text())


class Loop:
    """A pass of a loader. Its workers have the version that the main process had when the pass began."""

    def __init__(
        self,
        version: Version,
        key: str,
        workers: int,
        *,
        kept: bool = False,
        main: int = MAIN,
        last: Loop | None = None,
    ) -> None:
        self.version, self.key, self.workers, self.kept, self.main = version, key, workers, kept, main
        self.last = last
        self.joined: dict[int, Joined] = {}
        self.ended: set[int] = set()

    def join(self, ledger: EpochLog, worker: int) -> int:
        assert self.attempt(ledger, worker)
        return self.joined[worker].epoch

    def attempt(self, ledger: EpochLog, worker: int) -> bool:
        """Lets a worker join, and returns whether it could do so without waiting."""
        last = None if self.last is None else self.last.joined[worker].serial
        participant = Participant(self.main, self.version, self.kept, self.key, worker, self.workers, None, last)
        joined = ledger.join(participant)
        if joined is not None:
            self.joined[worker] = joined
        return joined is not None

    def count(self, ledger: EpochLog, worker: int) -> None:
        """Records that a worker was asked for more than prefetched batches, or ended after the loop was left."""
        ledger.count(self.joined[worker].serial, self.joined[worker].epoch + 1)

    def end(self, ledger: EpochLog, worker: int) -> None:
        self.ended.add(worker)
        ledger.end(self.joined[worker].serial, worker, self.joined[worker].epoch + 1)

    def run(self, ledger: EpochLog) -> int:
        epochs = {self.join(ledger, worker) for worker in range(self.workers)}
        for worker in range(self.workers):
            self.end(ledger, worker)
        (epoch,) = epochs
        return epoch


steps = st.one_of(
    st.tuples(st.just("begin"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("worker"), st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.just("set"), st.integers(0, 9), st.none()),
)


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.lists(steps, max_size=60))
def test_workers_of_a_pass_have_one_epoch(script: list[tuple[str, int, Any]]) -> None:
    """Runs several loaders at once, whose workers begin and end in any order, and sets the epoch in between.

    Successive loaders may have the same seed if all workers of the earlier loader have begun.
    """
    ledger, version, loops, seed = EpochLog(), START, [], 0
    for step, number, more in script:
        ledger = through(ledger)
        if step == "set":
            version = Version(version.number + 1, number, False)
            ledger.announce(MAIN, version)
        elif step == "begin":
            alike = more and all(len(loop.joined) == loop.workers for loop in loops)
            seed += not alike
            loops.append(Loop(version, f"{seed}/0", number))
            loops[-1].expected = ledger.next(MAIN, version)[0]
            loops[-1].alone = all(len(loop.ended) == loop.workers for loop in loops[:-1])
        elif loops:
            loop = loops[-1 - number % len(loops)]
            worker = more % loop.workers
            if worker not in loop.joined:
                loop.join(ledger, worker)
            elif worker not in loop.ended:
                loop.end(ledger, worker)
        for loop in loops:
            epochs = {joined.epoch for joined in loop.joined.values()}
            assert len(epochs) <= 1
            if loop.alone and len(loop.joined) == loop.workers and loop is loops[-1]:
                # No other loader was active, so the pass reads the epoch that was next when it began.
                assert epochs == {loop.expected}
    for loop in loops:
        if len(loop.ended) == loop.workers and loop.version == version:
            assert ledger.next(MAIN, version)[0] > loop.joined[0].epoch


def test_passes_advance_the_epoch_when_all_workers_end() -> None:
    ledger = EpochLog()
    assert Loop(START, "1/0", 2).run(ledger) == 0
    left = Loop(START, "2/0", 2)
    left.join(ledger, 0)
    left.end(ledger, 0)
    # Worker 1 is late, or was killed.
    assert ledger.next(MAIN, START) == (1, True)
    assert Loop(START, "3/0", 3).run(ledger) == 1
    assert ledger.next(MAIN, START) == (2, False)


def test_passes_left_early_count() -> None:
    ledger = EpochLog()
    begun, left = Loop(START, "1/0", 2), Loop(START, "2/0", 2)
    # `tqdm.auto.tqdm` calls `iter` twice.
    assert [begun.join(ledger, worker) for worker in (0, 1)] == [0, 0]
    assert left.join(ledger, 1) == 0
    left.count(ledger, 1)
    assert left.join(ledger, 0) == 0
    assert ledger.next(MAIN, START) == (1, True)
    begun.count(ledger, 0)
    left.count(ledger, 0)
    assert Loop(START, "3/0", 2).run(ledger) == 1


@hypothesis.given(st.permutations([0, 1, 2]), st.sampled_from([None, 0, 1, 2]))
def test_kept_workers_wait_for_workers_in_the_loop(order: list[int], asked: int | None) -> None:
    """Covers every order in which workers join, and every worker that may yield the loop's last batch."""
    ledger = EpochLog()
    left = Loop(START, "1/0", 3)
    for worker in range(3):
        assert left.join(ledger, worker) == 0
    following = Loop(START, "1/1", 3, kept=True, last=left)
    waiting = []
    for worker in order:
        ledger = through(ledger)
        # The request for a batch, which precedes the next pass in the worker's queue.
        if worker == asked:
            left.count(ledger, worker)
        if not following.attempt(ledger, worker):
            waiting.append(worker)
    for worker in waiting:
        assert following.attempt(ledger, worker)
    assert {joined.epoch for joined in following.joined.values()} == {0 if asked is None else 1}


def test_equal_seeds_are_different_passes() -> None:
    ledger = EpochLog()
    assert [Loop(START, "7/0", 2).run(ledger) for _ in range(4)] == [0, 1, 2, 3]


def test_epochs_set_while_workers_start_apply_to_the_next_pass() -> None:
    ledger, later = EpochLog(), Version(1, 9, False)
    early = Loop(START, "1/0", 3)
    assert early.join(ledger, 2) == 0
    ledger.announce(MAIN, later)
    assert (early.join(ledger, 0), early.join(ledger, 1)) == (0, 0)
    # No worker of this pass had begun, but the pass keeps the version with which it was started.
    assert Loop(START, "2/0", 2).run(ledger) == 0
    assert Loop(later, "3/0", 2).run(ledger) == 9


def test_kept_workers_use_the_newest_version() -> None:
    ledger = EpochLog()
    assert Loop(START, "1/0", 2).run(ledger) == 0
    assert Loop(START, "1/1", 2, kept=True).run(ledger) == 1
    ledger.announce(MAIN, Version(1, 5, False))
    third = Loop(START, "1/2", 2, kept=True)
    assert third.join(ledger, 1) == 5
    ledger.announce(MAIN, Version(2, 7, False))
    assert third.join(ledger, 0) == 5
    third.end(ledger, 0)
    third.end(ledger, 1)
    assert Loop(START, "1/3", 2, kept=True).run(ledger) == 7


def test_a_loaded_state_is_for_one_pass() -> None:
    ledger, loaded = EpochLog(), Version(1, 3, True)
    first = Loop(loaded, "1/0", 2)
    assert [first.join(ledger, worker) for worker in (0, 1)] == [3, 3]
    assert [joined.loaded for joined in first.joined.values()] == [True, True]
    again = Loop(loaded, "2/0", 1)
    assert again.join(ledger, 0) == 3
    assert not again.joined[0].loaded
    ledger.announce(MAIN, Version(2, 4, True))
    with pytest.raises(fastpipe.errors.StateError, match="create a new DataLoader"):
        Loop(loaded, "1/1", 2, kept=True).join(ledger, 0)


def test_main_processes_have_separate_epochs() -> None:
    ledger = EpochLog()
    assert Loop(START, "1/0", 2).run(ledger) == 0
    assert Loop(START, "1/0", 2, main=2000).run(ledger) == 0
    assert Loop(START, "2/0", 2, main=2000).run(ledger) == 1
    assert ledger.next(MAIN, START) == (1, False)


def test_the_log_stays_small_and_keeps_the_newest_passes() -> None:
    ledger = EpochLog()
    ledger.announce(2000, Version(4, 17, False))
    for number in range(500):
        version = Version(number, number, False)
        ledger.announce(MAIN, version)
        assert Loop(version, f"{number}/0", 4).run(ledger) == number
    assert len(ledger.text()) < 30_000
    assert Loop(START, "kept/1", 2, kept=True, main=2000).run(ledger) == 17
    # The log has dropped the old version, so the version that the workers were started with counts.
    assert Loop(Version(3, 3, False), "late/0", 2).run(ledger) == 3


def add(file: EpochLogFile, worker: int, epochs: Any) -> None:
    with file.open() as ledger:
        epochs.put(ledger.join(Participant(MAIN, START, False, "1/0", worker, 20)).epoch)


def test_processes_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = EpochLogFile()
    assert file.next(START) == (0, False)
    file.announce(START)
    assert os.listdir(tmp_path) == [], "without workers there must be no file"
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    epochs = context.Queue()
    workers = [context.Process(target=add, args=(file, worker, epochs)) for worker in range(4)]
    for worker in workers:
        worker.start()
    assert [epochs.get(timeout=60) for _ in workers] == 4 * [0]
    for worker in workers:
        worker.join()
    (path,) = tmp_path.iterdir()
    (noted,) = json.loads(path.read_text())["passes"]
    assert sorted(noted["joined"]) == [0, 1, 2, 3]
    # The end of a longer log, which a killed worker left in the file.
    path.write_bytes(path.read_bytes() + b"left\n")
    assert file.next(START) == (0, False)
    del workers, worker, file
    assert os.listdir(tmp_path) == []
