"""Eight workers on leases whom chance kills, stops, slows and starts again, and databases that go away meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import leased
import servers

WORKERS = 8
# Seconds: short enough for leases to expire while their workers are stopped.
TTL = 0.6
# What happens to workers in a run, in an order that chance chooses.
ACTS = Counter(kill=8, stop=10, slow=10, twin=3)
# Within which a run that doesn't hang has ended many times over, on whatever machine.
LONGEST = 90.0


class Forks:
    """The server of `leased`, which forks workers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, leased.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        """Asks it, and returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it, with all workers that are left."""
        self._process.kill()
        self._process.communicate()


class Outage(NamedTuple):
    """How a database goes away, and how it comes back: it is there when `end` returns."""

    begin: Callable[[], None]
    end: Callable[[], None]


def crash(server: servers.Postgres) -> Outage:
    """PostgreSQL dies, with all its connections, and recovers."""
    return Outage(server.kill, server.start)


_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE fastpipe_stretches SET committed = stop, done = 1")
print("locked", flush=True)
sys.stdin.read()
"""


def lock(url: str) -> Outage:
    """A process locks SQLite's file, and dies in the midst of a transaction that marks everything as done."""
    processes: list[subprocess.Popen[str]] = []

    def begin() -> None:
        command = [sys.executable, "-c", _LOCK, url.removeprefix("sqlite:///")]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        if processes[-1].stdout.readline() != "locked\n":
            end()
            raise AssertionError("the file couldn't be locked")

    def end() -> None:
        processes[-1].kill()
        processes[-1].communicate()

    return Outage(begin, end)


def _is_locked(url: str) -> bool:
    """Whether a process holds the lock of SQLite's file, and keeps it."""
    if not url.startswith("sqlite"):
        return False
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=2, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return True
    finally:
        connection.close()
    return False


@dataclass
class _Worker:
    """A process that lives.

    Attributes:
        slot: its place among the workers.
        name: under which it leases; another process may take it over.
        process: its id.
        wakes: when it is continued, by the monotonic clock; None while it isn't stopped.
        killed: whether it was.
    """

    slot: int
    name: str
    process: int
    wakes: float | None = None
    killed: bool = False

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process, number)


@dataclass
class Run:
    """A job that eight workers share, until it is done.

    Attributes:
        forks: starts workers.
        folder: of the logs.
        request: what each worker is asked for, beside its name and its slot.
        chance: chooses what happens.
        outage: of the database, if there is to be one.
        did: how often each thing was done.
        away: when the database went, and when it was there again, in seconds since 1970.
    """

    forks: Forks
    folder: Path
    request: dict[str, Any]
    chance: random.Random
    outage: Outage | None = None
    did: Counter[str] = field(default_factory=Counter)
    away: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self._workers: list[_Worker] = []
        self._lives: Counter[int] = Counter()
        self._pace = leased.Pace(self.folder / "pace", WORKERS)

    def play(self) -> Self:
        """Starts the workers, lets chance at them for a while, and sees all of them end.

        Raises:
            AssertionError: if a worker fails, or doesn't end.
        """
        # The last epoch waits, so that the job isn't done before all has happened, however fast or slow the machine is.
        self._pace.epochs = self.request["options"]["epochs"] - 1
        for slot in range(WORKERS):
            self._pace[slot] = self.chance.uniform(0.004, 0.04)
            self._start(slot)
        acts = list(ACTS.elements())
        self.chance.shuffle(acts)
        outage = self.chance.randrange(len(acts) // 2)
        for number, act in enumerate(acts):
            self._reap()
            if self.outage is not None and number == outage:
                self._lose_database(self.outage)
            self._act(act)
            time.sleep(self.chance.uniform(0.01, 0.08))
        self._finish()
        return self

    def _start(self, slot: int, name: str | None = None) -> None:
        self._lives[slot] += 1
        name = name or f"w{slot}.{self._lives[slot]}"
        waits = self.chance.random() < 0.5
        about = {"worker": name, "slot": slot, "life": f"{slot}.{self._lives[slot]}", "wait": waits}
        process = self.forks.ask(start={**self.request, **about, "folder": str(self.folder), "slots": WORKERS})
        self._workers.append(_Worker(slot, name, process))

    def _lose_database(self, outage: Outage) -> None:
        if _is_locked(self.request["url"]):
            # By a worker that is stopped: nothing would continue it while the outage waits for the lock.
            self.did["stop with the lock"] += 1
            for worker in self._workers:
                worker.send(signal.SIGCONT)
                worker.wakes = None
        outage.begin()
        went = time.time()
        try:
            time.sleep(self.chance.uniform(0.1, 1.0))
        finally:
            outage.end()
        self.away = went, time.time()
        self.did["outage"] += 1

    def _act(self, does: str) -> None:
        """Lets one thing happen, to one worker."""
        worker = self.chance.choice(self._workers)
        self.did[does] += 1
        if does == "kill":
            worker.send(signal.SIGKILL)
            worker.killed = True
            # Under its old name it takes over its leases at once; under another one they have to expire.
            self._start(worker.slot, worker.name if self.chance.random() < 0.4 else None)
        elif does == "stop":
            worker.send(signal.SIGSTOP)
            worker.wakes = time.monotonic() + self.chance.uniform(0.05, 2 * TTL)
        elif does == "slow":
            self._pace[worker.slot] = self.chance.choice((0.0, 0.005, 0.02, 0.3))
        elif sum(other.slot == worker.slot for other in self._workers) == 1:
            # Two live under one name: whoever came first must lose its leases, and say so.
            self._start(worker.slot, worker.name)

    def _reap(self, *, wake: bool = True) -> bool:
        """Continues workers whose time has come, and sees who has ended. Returns whether any worker lives."""
        for worker in list(self._workers):
            if wake and worker.wakes is not None and time.monotonic() > worker.wakes:
                worker.send(signal.SIGCONT)
                worker.wakes = None
            status = self.forks.ask(poll=worker.process)
            if status is not None:
                self._workers.remove(worker)
                assert status == 0 or worker.killed, self._told(worker, f"ended with {status}")
        return bool(self._workers)

    def _finish(self) -> None:
        """Lets the workers end, one of which stays stopped until the others are gone."""
        deadline = time.monotonic() + LONGEST
        for worker in self._workers:
            self._pace[worker.slot] = 0.005
            # Whoever is stopped now may hold SQLite's lock.
            worker.wakes = worker.wakes and 0.0
        self._reap()
        # Neither one that was killed nor one whose name another has taken: those end by themselves.
        newest = {worker.slot: worker for worker in self._workers if not worker.killed}
        hanging = self.chance.choice(list(newest.values()))
        self._hang(hanging, deadline)
        self._pace.epochs = float("inf")
        while self._reap() and self._workers != [hanging]:
            self._check_time(deadline)
            time.sleep(0.01)
        assert hanging in self._workers, self._told(hanging, "ended although it was stopped")
        self.did["outlasted"] += 1
        hanging.wakes = 0.0
        while self._reap():
            self._check_time(deadline)
            time.sleep(0.01)

    def _hang(self, worker: _Worker, deadline: float) -> None:
        """Stops a worker for as long as others live."""
        worker.wakes = float("inf")
        worker.send(signal.SIGSTOP)
        # Nobody can take a file's lock from a process that is stopped within a transaction: that holds up all others
        # until it is continued. A server ends such a session itself.
        while _is_locked(self.request["url"]):
            self._check_time(deadline)
            self.did["stop with the lock"] += 1
            worker.send(signal.SIGCONT)
            time.sleep(self.chance.uniform(0.001, 0.02))
            worker.send(signal.SIGSTOP)

    def _check_time(self, deadline: float) -> None:
        if time.monotonic() < deadline:
            return
        for worker in self._workers:
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGUSR1)
        time.sleep(1)
        raise AssertionError("\n".join(self._told(worker, "waits for ever") for worker in self._workers))

    def _told(self, worker: _Worker, what: str) -> str:
        errors = "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob(f"{worker.slot}.*.err")))
        return f"worker {worker.name} {what}, and the workers of its slot say:\n{errors}"
