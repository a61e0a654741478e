"""Leases: the user's view of workers and ledgers, and a ledger's transactions compared with a model."""

from __future__ import annotations

import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import fixtures
import servers
from fastpipe.leases._database import database_of
from fastpipe.leases._exchange import Member, Request, Token, Used, exchange
from fastpipe.leases._job import Job, default_stretch
from fastpipe.leases._ledger import join
from fastpipe.leases._sqlite import Sqlite
from processes import together

ROWS = 400

url = fixtures.url


def reader(**options: Any) -> fastpipe.Reader:
    chosen: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 5} | options
    return fastpipe.from_arrays({"id": np.arange(ROWS)}, **chosen)


def used(
    worker: fastpipe.leases.LeaseWorker, most: int | None = None
) -> list[tuple[fastpipe.leases.StepOfEpoch, list[int]]]:
    """Uses and commits batches, at most `most` of them."""
    found = []
    for batch in worker:
        assert worker.position is not None
        found.append((worker.position, batch["id"].tolist()))
        worker.commit()
        if len(found) == most:
            break
    return found


def expected(epochs: int = 1, **options: Any) -> dict[tuple[int, int], list[int]]:
    """Returns the batches of a reader without leases."""
    whole = reader(**options)
    steps = range(len(reader(**options | {"epochs": 1})))
    return {(e, s): whole.batch_at(s, epoch=e)["id"].tolist() for e in range(epochs) for s in steps}


def test_one_worker_has_the_readers_batches(url: str) -> None:
    with reader(epochs=3).lease(url, worker_name="one", stretch=7) as worker:
        assert (worker.worker_name, worker.job, worker.epoch, worker.position) == ("one", "default", 0, None)
        found = used(worker)
        assert worker.finished
    assert [position for position, _ in found] == sorted(expected(3))
    assert dict(found) == expected(3)


def test_workers_share_the_batches(url: str) -> None:
    found: list[Any] = []

    def work(name: str) -> None:
        with reader(epochs=2).lease(url, worker_name=name, stretch=3) as worker:
            found.extend(used(worker))

    together([threading.Thread(target=work, args=(f"w{i}",)) for i in range(4)])
    # Near the end a second copy may use a batch again, but never with other rows.
    assert dict(found) == expected(2)
    status = fastpipe.leases.Ledger(url).status()
    assert status.finished
    assert sum(worker.batches for worker in status.workers) == 80
    assert sum(worker.rows for worker in status.workers) == 2 * ROWS


def test_other_workers_continue_from_the_last_commit(url: str) -> None:
    with reader().lease(url, worker_name="first", stretch=20) as worker:
        first = used(worker, 5)
        next(worker)  # Yielded but not committed.
    with reader().lease(url, worker_name="second", stretch=20) as worker:
        second = used(worker)
    assert len(first) + len(second) == 40
    assert dict(first + second) == expected()


def test_an_expired_lease_goes_to_others_and_its_commit_is_refused(url: str) -> None:
    slow = reader().lease(url, worker_name="slow", stretch=40, ttl=0.5)
    batches = iter(slow)
    next(batches)
    slow.commit(wait=True)
    next(batches)
    # The worker's thread is blocked, as in a stopped process, so the lease isn't renewed.
    with slow._agent.changed:
        time.sleep(0.7)
        with reader().lease(url, worker_name="quick", stretch=40) as quick:
            rest = used(quick)
    assert len(rest) == 39
    with pytest.raises(
        fastpipe.errors.StaleLeaseError, match=r"batch 1 of epoch 0 was refused: the lease of 'slow'"
    ) as caught:
        slow.commit(wait=True)
    assert (caught.value.worker_name, caught.value.epoch, caught.value.start, caught.value.stop) == ("slow", 0, 1, 2)
    # No batch is left, and iteration ends.
    assert list(slow) == []
    assert slow.finished
    slow.close()
    assert {worker.worker_name: worker.batches for worker in fastpipe.leases.Ledger(url).status().workers} == {
        "slow": 1,
        "quick": 39,
    }


def test_a_straggler_gets_a_second_copy_and_the_first_commit_wins(url: str) -> None:
    slow = reader().lease(url, worker_name="slow", stretch=40)
    next(slow)
    with reader().lease(url, worker_name="quick", stretch=40) as quick:
        assert dict(used(quick)) == expected()
    with pytest.raises(fastpipe.errors.StaleLeaseError):
        slow.commit(wait=True)
    slow.close()


def test_without_copies_a_worker_waits_for_others(url: str) -> None:
    slow = reader().lease(url, worker_name="slow", stretch=40)
    first = next(slow)["id"].tolist()
    done = threading.Event()

    def work() -> None:
        with reader().lease(url, worker_name="quick", stretch=40, copies=False) as quick:
            assert used(quick) == []
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.wait(1.0)
    slow.commit()
    rest = used(slow)
    slow.close()
    assert done.wait(60)
    thread.join()
    assert [first, *(rows for _, rows in rest)] == [*expected().values()]


def test_a_returning_name_recovers_its_leases(url: str) -> None:
    old = reader().lease(url, worker_name="pod", stretch=40, ttl=1000)
    next(old)
    with reader().lease(url, worker_name="pod", stretch=40, copies=False) as new:
        assert len(used(new)) == 40
    with pytest.raises(
        fastpipe.errors.StateError, match="another worker of the job 'default' has taken the name 'pod'"
    ):
        old.commit(wait=True)
    old.close()


@pytest.mark.parametrize("barrier", [True, False])
def test_epochs_with_and_without_a_barrier(url: str, barrier: bool) -> None:
    slow = reader(epochs=2).lease(url, worker_name="slow", stretch=20, barrier=barrier)
    next(slow)
    other = reader(epochs=2).lease(url, worker_name="other", stretch=20, barrier=barrier, copies=False)
    found = used(other, 20)
    assert {position.epoch for position, _ in found} == {0}
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.extend(used(other, 1)))
    thread.start()
    thread.join(1.0 if barrier else 60)
    assert bool(done) is not barrier
    slow.commit()
    used(slow, 19)
    thread.join(60)
    assert done[0][0].epoch == 1
    slow.close()
    other.close()


def test_rare_commits_need_another_loop(url: str) -> None:
    seen, loops = [], 0
    with reader(epochs=2).lease(url, stretch=4) as worker:
        while not worker.finished:
            loops += 1
            for i, batch in enumerate(worker):
                seen.append(batch["id"].tolist())
                if i % 9 == 8:
                    worker.commit()
            worker.commit(wait=True)
    assert sorted(seen) == sorted(expected(2).values())
    assert 2 <= loops <= 10


def test_checkpoints_restore_a_ledger(url: str) -> None:
    ledger = fastpipe.leases.Ledger(url)
    with reader(epochs=2).lease(url, worker_name="a", stretch=8) as worker:
        first = used(worker, 11)
        checkpoint = json.loads(json.dumps(worker.checkpoint()))
        lost = used(worker, 9)
        ledger.restore(checkpoint)
        refused = 0
        while not worker.finished:
            # Its lease may be from before the restore.
            try:
                used(worker)
            except fastpipe.errors.StaleLeaseError:
                refused += 1
        assert refused >= 1
    assert ledger.status().finished
    assert len(lost) == 9
    ledger.restore(checkpoint)
    assert ledger.checkpoint() == checkpoint
    with reader(epochs=2).lease(url, worker_name="b", stretch=8) as worker:
        rest = used(worker)
    assert dict(first + rest) == expected(2)
    assert len(first) + len(rest) == 80


@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (lambda c: [], TypeError, "checkpoint must be a dict returned by checkpoint"),
        (lambda c: c | {"version": 9}, fastpipe.errors.StateError, "has version 9; the supported version is 1"),
        (lambda c: c | {"job": "other"}, fastpipe.errors.StateError, "belong to the job 'default': its job is 'other'"),
        (lambda c: c | {"batches": 9}, fastpipe.errors.StateError, "its batches is 9, but 40 in the ledger"),
        (lambda c: {k: v for k, v in c.items() if k != "epochs"}, fastpipe.errors.StateError, "damaged: KeyError"),
        (lambda c: c | {"epochs": {"0": [99] * 5}}, fastpipe.errors.StateError, "damaged: the batches of epoch 0"),
        (
            lambda c: c | {"epochs": {"7": [0, 8, 16, 24, 32]}},
            fastpipe.errors.StateError,
            "damaged: the batches of epoch 7",
        ),
    ],
)
def test_wrong_checkpoints_change_nothing(tmp_path: Path, damage: Any, error: type[Exception], match: str) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with reader().lease(url, stretch=8) as worker:
        used(worker, 3)
        checkpoint = worker.checkpoint()
    with pytest.raises(error, match=match):
        fastpipe.leases.Ledger(url).restore(damage(checkpoint))
    assert fastpipe.leases.Ledger(url).checkpoint() == checkpoint


@pytest.mark.parametrize(
    ("options", "arguments", "error", "match"),
    [
        ({}, {"url": 5}, TypeError, "the URL of a ledger must be a string; got int"),
        ({}, {"url": "mysql://x/y"}, ValueError, "a ledger needs PostgreSQL or SQLite"),
        ({}, {"url": "sqlite://ledger.db"}, ValueError, "three slashes"),
        ({}, {"worker_name": ""}, ValueError, "worker_name must have 1 to 200 characters"),
        ({}, {"worker_name": 5}, TypeError, "worker_name must be a string; got 5"),
        ({}, {"job": None}, TypeError, "job must be a string; got None"),
        ({}, {"stretch": 0}, ValueError, "stretch must be between 1"),
        ({}, {"prefetch": 0}, ValueError, "prefetch must be between 1"),
        ({}, {"stretch": 1.5}, TypeError, "stretch must be an integer; got 1.5"),
        ({}, {"ttl": 0.1}, ValueError, "ttl must be at least 0.5 seconds"),
        ({}, {"patience": "long"}, TypeError, "patience must be a number of seconds"),
        ({}, {"barrier": 1}, TypeError, "barrier must be True or False"),
        ({"seed": None}, {}, ValueError, "set a seed"),
        ({"world_size": 2}, {}, ValueError, "the reader is rank 0 of 2, but leases replace ranks"),
        ({"batch_size": 500, "drop_last": True}, {}, ValueError, "there are no batches to lease"),
    ],
)
@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
def test_wrong_arguments(
    tmp_path: Path, options: dict[str, Any], arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    given = {"url": f"sqlite:///{tmp_path}/ledger.db"} | arguments
    with pytest.raises(error, match=match):
        reader(**options).lease(**given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"seed": 6}, "seed was 5 and is 6"),
        ({"batch_size": 20}, "batch_size was 10 and is 20"),
        ({"epochs": 2}, "epochs"),
    ],
)
def test_another_job_with_the_same_name_is_rejected(url: str, other: dict[str, Any], match: str) -> None:
    with reader().lease(url):
        pass
    with pytest.raises(fastpipe.errors.StateError, match=match):
        reader(**other).lease(url)
    with reader(**other).lease(url, job="another") as worker:
        assert worker.job == "another"
    assert fastpipe.leases.Ledger(url).jobs() == ["default", "another"]
    with pytest.raises(
        fastpipe.errors.StateError, match=r"choose one with job=\.\.\.: it contains 'default', 'another'"
    ):
        fastpipe.leases.Ledger(url).status()
    with pytest.raises(fastpipe.errors.StateError, match="the ledger has no job 'third'"):
        fastpipe.leases.Ledger(url, "third").status()


def test_workers_without_a_name_get_one(url: str) -> None:
    with reader().lease(url) as first, reader().lease(url) as second:
        assert first.worker_name != second.worker_name
        assert str(os.getpid()) in first.worker_name


def test_using_a_closed_worker_is_an_error(url: str) -> None:
    worker = reader().lease(url)
    next(worker)
    worker.close()
    worker.close()
    for act in (worker.commit, lambda: next(worker)):
        with pytest.raises(fastpipe.errors.PassClosedError, match="the worker was closed"):
            act()


def test_a_dropped_worker_releases_its_leases(url: str) -> None:
    worker = reader().lease(url, worker_name="gone", stretch=40, ttl=1000)
    next(worker)
    del worker
    with reader().lease(url, worker_name="next", stretch=40, copies=False) as other:
        assert len(used(other)) == 40


def _draw_in_child(worker: Any, results: Any) -> None:
    try:
        next(worker)
    except fastpipe.errors.PassClosedError as error:
        results.put(str(error))


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_child_cannot_draw(url: str) -> None:
    with reader().lease(url) as worker:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=_draw_in_child, args=(worker, results), daemon=True)
        child.start()
        assert "belongs to another process" in results.get(timeout=500)
        child.join(60)
        assert len(used(worker)) == 40


def test_an_unavailable_database(tmp_path: Path) -> None:
    nobody = f"postgresql://user:secret@127.0.0.1:{servers.free_port()}/none"
    with pytest.raises(fastpipe.errors.LedgerError, match=r"the ledger postgresql://user@127\.0\.0\.1") as caught:
        reader().lease(nobody, patience=0.2)
    assert "secret" not in str(caught.value)
    with pytest.raises(fastpipe.errors.MissingFileError, match=r"the ledger .*none\.db does not exist: reader"):
        fastpipe.leases.Ledger(f"sqlite:///{tmp_path}/none.db").status()
    with pytest.raises(fastpipe.errors.LedgerError, match="its folder must exist"):
        reader().lease(f"sqlite:///{tmp_path}/no/folder.db", patience=0.2)
    (tmp_path / "text.db").write_text("this is no database of SQLite" * 99)
    with pytest.raises(fastpipe.errors.LedgerError, match="the file is not an SQLite database"):
        reader().lease(f"sqlite:///{tmp_path}/text.db")


def test_a_worker_whose_patience_ends(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    worker = reader().lease(url, patience=0.3)
    next(worker)
    blocker = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(fastpipe.errors.LedgerError, match="retried for 0 seconds, this worker's patience"):
        worker.commit(wait=True)
    blocker.execute("ROLLBACK")
    blocker.close()
    worker.close()


def test_a_ledger_of_another_version(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with reader().lease(url):
        pass
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("UPDATE fastpipe_schema SET version = 9")
    connection.close()
    with pytest.raises(
        fastpipe.errors.UnsupportedError, match="the ledger has version 9, and this fastpipe uses version 2"
    ):
        reader().lease(url)


def test_ctrl_c_takes_effect_while_a_worker_waits(tmp_path: Path) -> None:
    script = """
import os, signal, threading, time
import numpy as np
import fastpipe
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=lambda: (time.sleep(80), os._exit(3)), daemon=True).start()
make = lambda: fastpipe.from_arrays({"id": np.arange(40)}, batch_size=10)
first = make().lease("sqlite:///ledger.db", worker_name="a", stretch=4)
next(first)
second = make().lease("sqlite:///ledger.db", worker_name="b", stretch=4, copies=False)
try:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    next(second)
except KeyboardInterrupt:
    os._exit(0)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=500, check=False)
    assert done.returncode == 0


def test_the_command_line_shows_the_status(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    from fastpipe.cli import main

    with reader().lease(url, worker_name="pod", stretch=8) as worker:
        used(worker, 5)
        worker.commit(wait=True)
        assert main(["ledger", "status", url]) == 0
        told = capsys.readouterr().out
        assert "job default, epoch 0 of 1: 5 of 40 batches done (12.5%)" in told
        assert "pod" in told
        used(worker)
    assert main(["ledger", "status", url, "--json", "--watch", "0.1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["finished"], found["workers"][0]["rows"], found["epochs"][0]["committed"]) == (True, 400, 40)
    assert main(["ledger", "status", url, "--job", "none"]) == 1
    assert "the ledger has no job 'none'" in capsys.readouterr().err
    assert main(["ledger", "status", "mysql://x"]) == 2


@given(st.integers(1, 10**7), st.integers(0, 5000))
def test_stretches_are_few_and_whole_windows(batches: int, window: int) -> None:
    length = default_stretch(batches, window)
    assert length >= 1
    assert -(-batches // length) <= 10_000
    if 0 < window <= batches // 128:
        assert length % window == 0


class Workers:
    """Workers of a job in one file, with a clock that the test controls."""

    def __init__(self, path: Path, batches: int, stretch: int, *, barrier: bool) -> None:
        self.now = 1000.0
        self.database = Sqlite(str(path), lambda: self.now)
        identity: dict[str, Any] = {"data": {}, "order": {}}
        self.job = Job("job", identity, batches, stretch, 0, 2, barrier)
        self.members: list[Member] = []
        self.numbers: Counter[int] = Counter()
        self.held: dict[int, list[list[Any]]] = {}
        # Batches that count according to the answers. Each must count exactly once.
        self.counted: Counter[tuple[int, int]] = Counter()
        self.finished = False

    def join(self) -> None:
        _, member = join(
            self.database, self.job, worker=f"w{len(self.members)}", ttl=10.0, stretch_given=True, patience=1.0
        )
        self.held[len(self.members)] = []
        self.members.append(member)

    def ask(self, index: int, request: Request) -> None:
        self.numbers[index] += 1
        request.number = self.numbers[index]
        with self.database.connected() as connection, connection.transaction():
            answer = exchange(connection, self.job, self.members[index], request)
        if self.numbers[index] % 3 == 0 and (request.used or answer.granted):
            # The answer is lost and the request is repeated, which must have no further effect.
            with self.database.connected() as connection, connection.transaction():
                assert exchange(connection, self.job, self.members[index], request) == answer
        for used_, done in zip(sorted(request.used, key=lambda each: each.lease), answer.committed, strict=True):
            first = max(used_.start, done.refused)
            for step in range(first, used_.stop):
                self.counted[used_.lease.epoch, step] += 1
        for granted in answer.granted:
            self.held[index].append([granted.lease, granted.start, granted.stop])
        self.finished = self.finished or answer.finished


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yields a folder in memory if possible. On disk, SQLite would wait for the disk in each transaction."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@settings(max_examples=60)
@given(st.data())
def test_any_interleaving_commits_each_batch_once(memory: Path, data: st.DataObject) -> None:
    batches, stretch = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    path = Path(tempfile.mkdtemp(dir=memory)) / "ledger.db"
    workers = Workers(path, batches, min(stretch, batches), barrier=data.draw(st.booleans()))
    workers.join()
    acts = st.sampled_from(["join", "lease", "use", "use", "use", "late", "wait", "renew", "return"])
    for _ in range(data.draw(st.integers(5, 40))):
        act = data.draw(acts)
        index = data.draw(st.integers(0, len(workers.members) - 1))
        held = workers.held[index]
        if act == "join" and len(workers.members) < 3:
            workers.join()
        elif act == "wait":
            workers.now += data.draw(st.sampled_from([1.0, 6.0, 11.0]))
        elif act == "lease":
            workers.ask(
                index, Request(0, wanted=data.draw(st.integers(1, 3)), copies=data.draw(st.booleans()), pace=0.001)
            )
        elif held:
            lease = data.draw(st.sampled_from(held))
            token, start, stop = lease
            if act == "renew":
                workers.ask(index, Request(0, renewed=[token], alive=True))
            elif act == "return":
                workers.ask(index, Request(0, returned=[token]))
                held.remove(lease)
            elif start < stop:
                if act == "late":
                    workers.now += 11.0
                until = data.draw(st.integers(start + 1, stop))
                workers.ask(index, Request(0, used=[Used(token, start, until, [1] * (until - start))]))
                lease[1] = until
    # One worker finishes the job with everything that the others left over.
    workers.join()
    last = len(workers.members) - 1
    for _ in range(200):
        workers.now += 11.0
        workers.ask(last, Request(0, wanted=3))
        for lease in workers.held[last]:
            token, start, stop = lease
            if start < stop:
                workers.ask(last, Request(0, used=[Used(token, start, stop, [1] * (stop - start))]))
                lease[1] = stop
        if workers.finished:
            break
    assert workers.finished
    assert workers.counted == {(epoch, step): 1 for epoch in range(2) for step in range(batches)}


def test_invalid_tokens_commit_nothing(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "ledger.db", 4, 2, barrier=True)
    workers.join()
    workers.ask(0, Request(0, wanted=1))
    (token, start, stop) = workers.held[0][0]
    for forged in (0, token.token + 1, -1):
        workers.ask(0, Request(0, used=[Used(Token(0, 0, forged), start, stop, [1, 1])]))
    assert not workers.counted
    with database_of(f"sqlite:///{tmp_path}/ledger.db").connected() as connection:
        assert connection.rows("SELECT sum(committed - start) FROM fastpipe_stretches") == [(0,)]
