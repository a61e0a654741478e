"""A thousand workers on leases against one PostgreSQL: how many exchanges a second it answers, for `leases.py`.

A worker talks to the ledger by exchanges: one transaction that commits what it used, and leases its next stretch. Here
each worker has its own connection and its own exchanges, as a real one has; what is left out is its data,
its consumer, and its waiting. A few processes let their workers take turns, each asking again as soon as the others of
its process have asked. So the server is as busy as it can be, and shares the processors with the askers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fastpipe
from fastpipe._reader.passes import passes_of
from fastpipe.leases._database import Database, database_of
from fastpipe.leases._exchange import Answer, Request, Used, exchange
from fastpipe.leases._job import Job, job_of
from fastpipe.leases._ledger import join
from harness import Bench

STRETCH = 8
"""Batches of a stretch. A worker commits them at once, with its next lease."""
PROCESSES, THREADS = 4, 8
TTL = 60.0
BUSIEST = 10
"""Exchanges a second of a worker whose batches never end: it groups its commits by a tenth of a second."""


class Measured(NamedTuple):
    """The measurements of a process.

    Attributes:
        leases: that its workers were given.
        commits: batches that they committed.
        seconds: that each exchange took.
        cpu: seconds of the process.
    """

    leases: int
    commits: int
    seconds: list[float]
    cpu: float


class Simulated:
    """A worker without data: commits its stretch, and leases the next one."""

    def __init__(self, database: Database, wanted: Job, name: str) -> None:
        self.job, self.member = join(database, wanted, worker=name, ttl=TTL, stretch_given=True, patience=60.0)
        self.connection = database.connect(create=False)
        self._number = 0
        self._used: list[Used] = []

    def ask(self) -> tuple[int, int]:
        """An exchange. Returns how many stretches it leased, and how many batches it committed."""
        self._number += 1
        request = Request(self._number, used=self._used, wanted=1, pace=0.01)
        with self.connection.transaction():
            answer: Answer = exchange(self.connection, self.job, self.member, request)
        committed = sum(used.stop - used.start for used in self._used)
        self._used = [Used(lease, start, stop, [1] * (stop - start)) for lease, start, stop, _ in answer.granted]
        return len(answer.granted), committed


def crowd(url: str, batches: int, names: list[str], orders: Connection) -> None:
    """Some of the workers, in a separate process: measures on request, for a number of seconds."""
    reader = fastpipe.from_arrays({"id": np.arange(batches)}, batch_size=1)
    database = database_of(url)
    wanted = job_of(passes_of(reader), name="crowd", stretch=STRETCH, barrier=True)
    workers = [Simulated(database, wanted, name) for name in names]
    for worker in workers:
        worker.ask()
    orders.send("there")
    end = time.monotonic() + orders.recv()
    found: list[tuple[int, int, float]] = []
    began = time.process_time()

    def take_turns(mine: list[Simulated]) -> None:
        while True:
            for worker in mine:
                begin = time.monotonic()
                if begin >= end:
                    return
                found.append((*worker.ask(), time.monotonic() - begin))

    threads = [threading.Thread(target=take_turns, args=(workers[number::THREADS],)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leases, commits, seconds = zip(*found, strict=True)
    orders.send(Measured(sum(leases), sum(commits), list(seconds), time.process_time() - began))
    # With the connections the server's processes would go, and what they took.
    orders.recv()


def cpu_of(database: str) -> Callable[[], float]:
    """Returns a function that returns the CPU seconds of the server's processes for a database so far."""
    mine = []
    for path in Path("/proc").glob("[0-9]*"):
        # Processes come and go.
        with contextlib.suppress(OSError):
            title = (path / "cmdline").read_text()
            if title.startswith("postgres:") and f" {database} " in title:
                # In nanoseconds: of ticks each process would lose up to one.
                mine.append(path / "schedstat")
    return lambda: sum(int(path.read_text().split()[0]) for path in mine) / 1e9


def measure(url: str, workers: int, seconds: float) -> tuple[list[Measured], float]:
    """Returns the measurements of the workers' processes, and the server's seconds."""
    # More than they can do, so that no worker is out of work.
    batches = STRETCH * (workers + int(20_000 * seconds))
    context = multiprocessing.get_context("spawn")
    names = [f"worker-{number}" for number in range(workers)]
    pipes = [context.Pipe() for _ in range(PROCESSES)]
    processes = [
        context.Process(target=crowd, args=(url, batches, names[number::PROCESSES], child))
        for number, (_, child) in enumerate(pipes)
    ]
    for process, (_, child) in zip(processes, pipes, strict=True):
        process.start()
        # So that a process that fails ends this one, too.
        child.close()
    for orders, _ in pipes:
        orders.recv()
    server = cpu_of(url.rpartition("/")[2])
    before = server()
    for orders, _ in pipes:
        orders.send(seconds)
    found: list[Measured] = [orders.recv() for orders, _ in pipes]
    took = server() - before
    for orders, _ in pipes:
        orders.send("leave")
    for process in processes:
        process.join()
    return found, took


def show(bench: Bench, new_url: Callable[[], str]) -> None:
    """Measures with ever more workers, and estimates what ten times more would take."""
    seconds = 3.0 if bench.quick else 20.0
    columns = (
        "leases/s|,",
        "commits/s|,",
        "median, ms|,.0f",
        "99 %, ms|,.0f",
        "server, µs an exchange|,",
        "asking, µs|,",
    )
    row = bench.table("workers", *columns, "processors used|.0%", title="A crowd on one PostgreSQL")
    costs: dict[int, float] = {}
    for workers in (32, 1000) if bench.quick else (32, 100, 320, 1000):
        found, server = measure(new_url(), workers, seconds)
        taken = sorted(each for process in found for each in process.seconds)
        leases, commits = sum(each.leases for each in found), sum(each.commits for each in found)
        costs[workers] = server / len(taken)
        asking = sum(each.cpu for each in found)
        times = statistics.median(taken) * 1e3, taken[len(taken) * 99 // 100] * 1e3
        spent = int(costs[workers] * 1e6), int(asking / len(taken) * 1e6)
        used = (server + asking) / seconds / (os.cpu_count() or 1)
        row(f"{workers:,}", int(leases / seconds), int(commits / seconds), *times, *spent, used)
    each, few = costs[1000], costs[32]
    more = each + (each - few) / (1000 - 32) * 9000
    print(
        f"\nA core of the server answers {1 / each:,.0f} exchanges a second of 1,000 workers, so it keeps up with one"
        f" from each worker every {1000 * each:.2f} s; a worker whose batches never end has {BUSIEST} a second.\n"
        f"If the cost of an exchange grows with the number of leases as it does from 32 to 1,000 workers, it is"
        f" {more * 1e6:,.0f} µs for 10,000: one exchange a second from each takes {10_000 * more:.0f} cores, and"
        f" {10_000 * BUSIEST * more:.0f} if their batches never end."
    )
