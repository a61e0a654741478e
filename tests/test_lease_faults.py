"""Leases under faults: unavailable or locked databases, interrupts, lack of memory, stragglers, and names in use."""

from __future__ import annotations

import linecache
import logging
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import fastpipe
import fixtures
import servers
from fastpipe._reader.passes import Passes, Started
from fastpipe.leases import _agent, _exchange, _postgres, _sqlite, _worker
from fastpipe.leases._postgres import Postgres

BATCHES = 20
LONGEST = 100.0
"""Time limit in seconds. On any machine, a thread that doesn't hang ends earlier."""

url = fixtures.url


def reader(batches: int = BATCHES, **options: Any) -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(batches)}, batch_size=1, **options)


@contextmanager
def locked(url: str) -> Iterator[Callable[[], None]]:
    """Locks a database against writes until the block ends or the yielded function is called."""
    if url.startswith("sqlite"):
        holder: Any = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False)
        holder.execute("BEGIN EXCLUSIVE")
    else:
        holder = pytest.importorskip("psycopg").connect(url)
        holder.execute("LOCK TABLE fastpipe_workers IN EXCLUSIVE MODE")
    try:
        yield holder.rollback
    finally:
        holder.rollback()
        holder.close()


def quick_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes statements wait only briefly for locks."""
    monkeypatch.setattr(_sqlite, "_BUSY_SECONDS", 0.05)
    monkeypatch.setattr(_postgres, "_STATEMENT_MS", 50)


def uses(worker: fastpipe.leases.LeaseWorker, most: int | None = None) -> list[tuple[int, int]]:
    """Uses and commits batches and continues after refusals. Returns the step and content of each batch."""
    found = []
    while most is None or len(found) < most:
        try:
            batch = next(worker, None)
            if batch is None:
                break
            assert worker.position is not None
            found.append((worker.position.step, int(batch["id"][0])))
            worker.commit()
        except fastpipe.errors.StaleLeaseError:
            pass
    return found


def in_thread(act: Callable[[], Any]) -> Any:
    """Returns the result of a function, which must not hang."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    thread.join(LONGEST)
    assert not thread.is_alive(), "the function hangs"
    return results[0]


def _until(there: Callable[[], bool]) -> None:
    while not there():
        time.sleep(0.01)


def counted(url: str) -> int:
    """Returns the number of batches that the ledger counts, over all workers."""
    status = fastpipe.leases.Ledger(url).status()
    return sum(worker.batches for worker in status.workers)


# --- Unavailable databases and temporary errors ---


@pytest.mark.parametrize("last", ["statement", "commit"])
def test_an_idle_session_that_ended_is_retried(postgres_url: str, last: str) -> None:
    database = Postgres.of(postgres_url)
    connection = database.connect(create=True)
    connection.rows("SET idle_in_transaction_session_timeout = 50")

    def slow() -> None:
        with connection.transaction():
            connection.rows("SELECT 1")
            time.sleep(0.5)
            if last == "statement":
                connection.rows("SELECT 2")

    with pytest.raises(database._psycopg.Error) as caught:
        slow()
    connection.close()
    assert database.passes(caught.value)


def test_a_worker_survives_the_end_of_its_idle_session(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_postgres, "_IDLE_MS", 300)
    stops = [1.0, 1.0]

    def stopping(*arguments: Any) -> Any:
        answer = _exchange.exchange(*arguments)
        if stops:
            time.sleep(stops.pop())
        return answer

    with reader().lease(postgres_url, worker_name="stopped", stretch=4) as worker:
        first = uses(worker, 1)
        monkeypatch.setattr(_agent, "exchange", stopping)
        found = in_thread(lambda: uses(worker))
    assert first + found == [(step, step) for step in range(BATCHES)]
    assert not stops
    assert counted(postgres_url) == BATCHES


class _Told(logging.Handler):
    """Calls `act` when fastpipe logs that it retries."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act, self.times = act, 0

    def emit(self, record: logging.LogRecord) -> None:
        if "trying again" in record.getMessage():
            self.times += 1
            self.act()


@contextmanager
def told(act: Callable[[], None]) -> Iterator[_Told]:
    handler = _Told(act)
    logging.getLogger("fastpipe").addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger("fastpipe").removeHandler(handler)


def test_joining_waits_for_a_server_that_restarts() -> None:
    programs = servers.postgres_programs()
    if programs is None:
        pytest.skip("the PostgreSQL server is not installed (Debian package: postgresql)")
    server = servers.Postgres(programs)
    try:
        server.kill()
        with told(server.start) as handler, reader().lease(server.url(), patience=LONGEST) as worker:
            assert len(uses(worker)) == BATCHES
        assert handler.times == 1
    finally:
        server.stop()


def test_joining_waits_for_a_lock(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_to_give_up(monkeypatch)
    with reader().lease(url, job="another"):
        pass
    with locked(url) as release, told(release) as handler, reader().lease(url, patience=LONGEST) as worker:
        assert len(uses(worker)) == BATCHES
    assert handler.times == 1


def test_connecting_waits_for_a_file_being_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # If the file isn't in WAL mode yet, a lock already delays connecting, before any transaction.
    quick_to_give_up(monkeypatch)
    url = f"sqlite:///{tmp_path}/ledger.db"
    with locked(url) as release, told(release), reader().lease(url, patience=LONGEST) as worker:
        assert len(uses(worker)) == BATCHES


def test_joining_waits_no_longer_than_its_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_to_give_up(monkeypatch)
    url = f"sqlite:///{tmp_path}/ledger.db"
    with locked(url), pytest.raises(fastpipe.errors.LedgerError, match="another process holds its lock"):
        reader().lease(url, patience=0.2)


def test_a_wrong_url_is_reported_at_once(postgres: servers.Postgres, tmp_path: Path) -> None:
    with told(lambda: None) as handler:
        with pytest.raises(fastpipe.errors.LedgerError, match='database "none" does not exist'):
            reader().lease(postgres.url("none"))
        with pytest.raises(fastpipe.errors.LedgerError, match="its folder must exist"):
            reader().lease(f"sqlite:///{tmp_path}/no/ledger.db")
    assert handler.times == 0


def test_closing_reports_uncommitted_batches(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_worker, "_CLOSING_SECONDS", 0.3)
    quick_to_give_up(monkeypatch)
    worker = reader().lease(url, worker_name="closed", stretch=10, ttl=0.5)
    uses(worker, 3)
    worker.commit(wait=True)
    with locked(url):
        uses(worker, 2)
        with pytest.raises(
            fastpipe.errors.LedgerError, match=r"2 batches that 'closed' has used weren't committed to \w+://"
        ):
            worker.close()
        # The error was already raised.
        worker.close()
    with reader().lease(url, worker_name="other", stretch=10) as other:
        rest = in_thread(lambda: uses(other))
    # The exchange in progress may have completed when the lock was released.
    assert {step for step, _ in rest} >= set(range(5, BATCHES))
    assert counted(url) == BATCHES


# --- Second copies ---


def test_a_copy_whose_other_holder_advances(url: str) -> None:
    silent = reader().lease(url, worker_name="silent", stretch=BATCHES, ttl=1000)
    uses(silent, 1)
    silent.commit(wait=True)
    copy = reader().lease(url, worker_name="copy", stretch=BATCHES, ttl=1000)
    batch = in_thread(lambda: next(copy))
    assert (copy.position, batch["id"].tolist()) == ((0, 1), [1])
    assert uses(silent, 5) == [(step, step) for step in range(1, 6)]
    silent.commit(wait=True)
    with pytest.raises(fastpipe.errors.StaleLeaseError) as caught:
        copy.commit(wait=True)
    assert (caught.value.start, caught.value.stop) == (1, 2)
    silent.close()
    assert in_thread(lambda: uses(copy)) == [(step, step) for step in range(6, BATCHES)]
    copy.close()
    assert {each.worker_name: each.batches for each in fastpipe.leases.Ledger(url).status().workers} == {
        "silent": 6,
        "copy": 14,
    }


def test_a_copy_that_has_not_committed_when_it_learns_of_the_other(url: str) -> None:
    # The copy learns of it through a renewal, between two of its batches.
    silent = reader().lease(url, worker_name="silent", stretch=BATCHES, ttl=1000)
    uses(silent, 1)
    silent.commit(wait=True)
    copy = reader().lease(url, worker_name="copy", stretch=BATCHES, ttl=1000)
    in_thread(lambda: next(copy))
    uses(silent, 5)
    silent.commit(wait=True)
    with copy._agent.changed:
        copy._agent._renewed = 0.0
        copy._agent.flush()
    batch = in_thread(lambda: next(copy))
    assert (copy.position, batch["id"].tolist()) == ((0, 6), [6])
    # The earlier batch counts for the other holder, and this one for the copy.
    with pytest.raises(fastpipe.errors.StaleLeaseError) as caught:
        copy.commit(wait=True)
    assert (caught.value.start, caught.value.stop) == (1, 2)
    silent.close()
    assert in_thread(lambda: uses(copy)) == [(step, step) for step in range(7, BATCHES)]
    copy.close()
    found = {each.worker_name: (each.batches, each.rows) for each in fastpipe.leases.Ledger(url).status().workers}
    assert found == {"silent": (6, 6), "copy": (14, 14)}


# --- Events while a batch is read ---


class Slowly:
    """The batches of a pass, with a call of `act` after each."""

    def __init__(self, batches: Iterator[dict[str, Any]], act: Callable[[], None]) -> None:
        self._batches, self._act = batches, act

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        batch = next(self._batches)
        self._act()
        return batch


def reading(monkeypatch: pytest.MonkeyPatch, passes: Passes, act: Callable[[], None]) -> None:
    """Calls `act` after a batch was read and before it is counted."""
    begin = passes.batches

    def begun(epoch: int, start: int, stop: int) -> Started:
        started = begin(epoch, start, stop)
        return started._replace(batches=Slowly(started.batches, act))

    monkeypatch.setattr(passes, "batches", begun)


def test_an_interrupt_after_reading_a_batch_loses_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter(range(1000))

    def interrupt() -> None:
        if next(reads) % 4 == 3:
            raise KeyboardInterrupt

    with reader().lease(url, worker_name="one", stretch=3) as worker:
        reading(monkeypatch, worker._passes, interrupt)
        found: list[tuple[int, int]] = []
        interrupts = 0
        while not worker.finished:
            try:
                found += uses(worker, 1)
            except KeyboardInterrupt:
                interrupts += 1
    assert found == [(step, step) for step in range(BATCHES)]
    assert interrupts == 6
    assert counted(url) == BATCHES


class Interrupt:
    """Raises a KeyboardInterrupt before the n-th line that a worker's consumer runs, as Ctrl-C may.

    It skips lines at which Python handles no signal, because no function was called: these are between the count of a
    batch and its delivery, and at the end of a `with` block.
    """

    NEVER = ("return batch", "if token in self._drawing:", "self._drawing.remove(token)", "lease = drawn", "with ")

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        return self._line if code.co_filename == _worker.__file__ or code.co_name in ("use", "left_over") else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(self.NEVER):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


def interrupted(line: int, act: Callable[[], Any]) -> tuple[bool, Any]:
    """Interrupts the n-th line that a function runs.

    Returns whether that line was reached, and the function's result.
    """
    interrupt = Interrupt(line)
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        return False, act()
    except KeyboardInterrupt:
        return True, None
    finally:
        sys.settrace(before)


def used_despite_interrupts(worker: fastpipe.leases.LeaseWorker) -> list[int]:
    """Returns the content of each batch while each of its lines is interrupted in turn."""
    line, found = 1, []
    while True:
        stopped, batch = interrupted(line, lambda: next(worker, None))
        if stopped:
            line += 1
            continue
        if batch is None:
            return found
        found.append(int(batch["id"][0]))
        line = 1 if len(found) % 7 == 0 else line
        # An interrupted commit is called again. After a flush, the next draw first informs the ledger.
        commit, act = 1, worker.flush if len(found) % 5 == 0 else worker.commit
        while interrupted(commit, act)[0]:
            commit += 1


def test_an_interrupt_at_any_line_loses_nothing(tmp_path: Path) -> None:
    url, batches = f"sqlite:///{tmp_path}/ledger.db", 45
    with reader(batches).lease(url, worker_name="one", stretch=3) as worker:
        found = in_thread(lambda: used_despite_interrupts(worker))
    # Batches left over by an interrupt are read later.
    assert sorted(found) == list(range(batches))
    assert counted(url) == batches


def test_a_pass_that_cannot_begin_returns_its_lease(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader().lease(url, worker_name="one", stretch=3) as worker:
        begin, calls = worker._passes.batches, iter(range(1000))

        def failing(epoch: int, start: int, stop: int) -> Started:
            if next(calls) % 2:
                raise fastpipe.errors.OutOfMemoryError("the system refused 1 GB")
            return begin(epoch, start, stop)

        monkeypatch.setattr(worker._passes, "batches", failing)
        found: list[tuple[int, int]] = []

        def go_on() -> None:
            while not worker.finished:
                try:
                    found.extend(uses(worker, 1))
                except fastpipe.errors.OutOfMemoryError:
                    failures.append(len(found))

        failures: list[int] = []
        found.extend(uses(worker, 1))
        # Ensures that the next pass is started before it is needed.
        in_thread(lambda: _until(lambda: bool(worker._agent.waiting)))
        in_thread(go_on)
    assert sorted(found) == [(step, step) for step in range(BATCHES)]
    assert failures
    assert counted(url) == BATCHES


def test_the_pace_includes_reading_and_using(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader().lease(url, worker_name="one", stretch=20) as worker:
        reading(monkeypatch, worker._passes, lambda: time.sleep(0.02))
        for _ in range(8):
            next(worker)
            worker.commit()
            time.sleep(0.01)
        worker.commit(wait=True)
        assert worker._agent.pace >= 0.03
        assert fastpipe.leases.Ledger(url).status().workers[0].rate <= 1 / 0.03


def test_other_workers_take_over_from_a_slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, batches = f"sqlite:///{tmp_path}/ledger.db", 1500
    done: dict[int, list[tuple[int, int]]] = {}
    reads = [0] * 4

    def read(number: int) -> None:
        """The fourth worker reads one batch while the others read 25, for as long as the others have work."""
        reads[number] += 1
        time.sleep(0.002)
        while number == 3 and sum(reads[:3]) < 25 * reads[3] and len(done) < 3:
            time.sleep(0.002)

    def work(number: int) -> None:
        with reader(batches).lease(url, worker_name=f"w{number}") as worker:
            reading(monkeypatch, worker._passes, lambda: read(number))
            done[number] = uses(worker)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
        assert not thread.is_alive()
    assert counted(url) == batches
    # If the slow worker had to read its whole lease first, it and the others would wait for each other.
    (slow,) = (worker for worker in fastpipe.leases.Ledger(url).status().workers if worker.worker_name == "w3")
    assert 1 <= slow.batches <= batches // 20


def test_a_name_taken_over_during_an_exchange(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    granted, joining = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        answer = _exchange.exchange(*arguments)
        if arguments[2].worker == "pod" and answer.granted and not granted.is_set():
            # The lease was granted but not committed when the other worker joins.
            granted.set()
            joining.wait(LONGEST)
            time.sleep(0.3)
        return answer

    monkeypatch.setattr(_agent, "exchange", slow)
    old = reader().lease(url, worker_name="pod", stretch=BATCHES, ttl=1000)
    assert granted.wait(LONGEST)

    def take_over() -> list[tuple[int, int]]:
        joining.set()
        with reader().lease(url, worker_name="pod", stretch=BATCHES, copies=False) as new:
            return uses(new)

    assert in_thread(take_over) == [(step, step) for step in range(BATCHES)]
    with pytest.raises(fastpipe.errors.StateError, match="has taken the name 'pod'"):
        list(old)
    old.close()
    assert counted(url) == BATCHES
