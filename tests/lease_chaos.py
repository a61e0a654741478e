"""Randomly kills, stops, slows and restarts eight lease workers, and interrupts their database."""

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
# In seconds: short enough for leases to expire while their workers are stopped.
TTL = 0.6
# The actions of a run with their counts, executed in random order.
ACTS = Counter(kill=8, stop=10, slow=10, twin=3)
# Time limit in seconds, several times what a run takes on any machine.
LONGEST = 90.0


class Forks:
    """Client of the server in `leased`, which forks workers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, leased.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        """Sends a request and returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Kills the server and its remaining workers."""
        self._process.kill()
        self._process.communicate()


class Outage(NamedTuple):
    """Functions that interrupt a database and restore it. The database is available when `end` returns."""

    begin: Callable[[], None]
    end: Callable[[], None]


def crash(server: servers.Postgres) -> Outage:
    """Kills PostgreSQL with all its connections; it recovers when restarted."""
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
    """Locks SQLite's file from a process that dies in the middle of a transaction that marks all work as done."""
    processes: list[subprocess.Popen[str]] = []

    def begin() -> None:
        command = [sys.executable, "-c", _LOCK, url.removeprefix("sqlite:///")]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        if processes[-1].stdout.readline() != "locked\n":
            end()
            raise AssertionError("cannot lock the file")

    def end() -> None:
        processes[-1].kill()
        processes[-1].communicate()

    return Outage(begin, end)


def _is_locked(url: str) -> bool:
    """Returns whether a process holds SQLite's file lock for a long time."""
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
    """A running worker process.

    Attributes:
        slot: Index of the worker, 0 to 7.
        name: Name under which it leases. Another process may take it over.
        process: Process id.
        wakes: Monotonic time at which it is continued; None if it isn't stopped.
        killed: Whether it was killed.
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
    """A job that eight workers complete together.

    Attributes:
        forks: Starts workers.
        folder: Folder of the logs.
        request: Request for every worker, without its name and slot.
        chance: Random generator that chooses the actions.
        outage: Outage of the database, or None.
        did: Count of each action.
        away: Start and end of the outage, in seconds since 1970.
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
        """Starts the workers, applies random actions for a while, and waits for all workers to end.

        Raises:
            AssertionError: If a worker fails or doesn't end.
        """
        # The last epoch is held back, so the job can't finish before all actions have happened, however fast the
        # machine is.
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
            # A stopped worker holds the lock. It would never be continued, because the outage waits for the lock.
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
        """Applies one action to a random worker."""
        worker = self.chance.choice(self._workers)
        self.did[does] += 1
        if does == "kill":
            worker.send(signal.SIGKILL)
            worker.killed = True
            # Under its old name it recovers its leases at once; under a new name they must expire first.
            self._start(worker.slot, worker.name if self.chance.random() < 0.4 else None)
        elif does == "stop":
            worker.send(signal.SIGSTOP)
            worker.wakes = time.monotonic() + self.chance.uniform(0.05, 2 * TTL)
        elif does == "slow":
            self._pace[worker.slot] = self.chance.choice((0.0, 0.005, 0.02, 0.3))
        elif sum(other.slot == worker.slot for other in self._workers) == 1:
            # Two processes now use one name. The older one must lose its leases and report it.
            self._start(worker.slot, worker.name)

    def _reap(self, *, wake: bool = True) -> bool:
        """Continues workers whose pause is over and removes ended ones. Returns whether any worker is still running."""
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
        """Waits for the workers to end. One stays stopped until all others have ended."""
        deadline = time.monotonic() + LONGEST
        for worker in self._workers:
            self._pace[worker.slot] = 0.005
            # A stopped worker may hold SQLite's lock.
            worker.wakes = worker.wakes and 0.0
        self._reap()
        # Killed workers, and workers whose name another one has taken, are excluded: they end on their own.
        newest = {worker.slot: worker for worker in self._workers if not worker.killed}
        hanging = self.chance.choice(list(newest.values()))
        self._hang(hanging, deadline)
        self._pace.epochs = float("inf")
        while self._reap() and self._workers != [hanging]:
            self._check_time(deadline)
            time.sleep(0.01)
        assert hanging in self._workers, self._told(hanging, "ended even though it was stopped")
        self.did["outlasted"] += 1
        hanging.wakes = 0.0
        while self._reap():
            self._check_time(deadline)
            time.sleep(0.01)

    def _hang(self, worker: _Worker, deadline: float) -> None:
        """Stops a worker for as long as others run."""
        worker.wakes = float("inf")
        worker.send(signal.SIGSTOP)
        # No process can take a file lock from a process that was stopped within a transaction, so all others would
        # wait. A database server ends such sessions itself.
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
        raise AssertionError("\n".join(self._told(worker, "does not end") for worker in self._workers))

    def _told(self, worker: _Worker, what: str) -> str:
        errors = "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob(f"{worker.slot}.*.err")))
        return f"worker {worker.name} {what}, and the workers of its slot say:\n{errors}"
