"""Measures the overhead of leases, and how well they balance work among workers that join, leave, and differ in speed.

`--parts` selects from three parts:

* `makespan`: The number of workers changes from 2 to 8 to 3 within an epoch. One worker is ten times slower than the
  others and stays to the end. The ideal is the time that the workers need at the sum of their speeds. Workers sleep for
  each batch instead of computing, so two cores are enough. Speeds are based on the measured sleep times.
* `overhead`: Batches that the consumer processes for a millisecond, leased and committed one at a time, compared with
  plain iteration of the same reader, in turn. The consumer either sleeps or spins. Background threads disturb a
  spinning consumer the most.
* `crowd`: Exchanges per second that one PostgreSQL server handles for up to a thousand workers. An exchange is one
  transaction that commits a worker's batches and leases its next ones. Each worker has its own connection but no
  dataset, no consumer, and no idle time. A few processes run the workers in turn without pauses, so the server is fully
  loaded. It shares the cores with the workers.

The ledgers are an SQLite file and a PostgreSQL server that the bench starts. Both wait for the disk on each commit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fastpipe
from fastpipe._reader.passes import passes_of
from fastpipe.leases._database import Database, database_of
from fastpipe.leases._exchange import Answer, Request, Used, exchange
from fastpipe.leases._job import Job, job_of
from fastpipe.leases._ledger import join
from harness import Bench, Ratio, take_turns
from harness.children import postgres
from harness.data import slept, spin

MAKESPAN_MOST, OVERHEAD_MOST = 1.3, 0.03
FAST = 0.004
"""Seconds that a fast worker of `makespan` sleeps per batch. The slow worker sleeps ten times longer."""


class Ledgers(NamedTuple):
    """Folder of the SQLite ledgers, and a PostgreSQL server or None if PostgreSQL isn't installed."""

    folder: Path
    postgres: Any

    def urls(self, name: str) -> dict[str, str]:
        """Returns the URL of a new ledger by database."""
        found = {"SQLite": f"sqlite:///{self.folder / name}.db"}
        return found | ({"PostgreSQL": self.postgres.new_database()} if self.postgres else {})


def reader_of(batches: int) -> fastpipe.Reader:
    """Returns a reader whose batches take almost no time."""
    return fastpipe.from_arrays({"id": np.arange(batches * 4)}, batch_size=4, shuffle=True, shuffle_buffer=400, seed=1)


def start(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> tuple[list[BaseProcess], list[Connection]]:
    """Starts a process per entry of `arguments`, passes it a pipe, and waits until it sends a message."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in arguments]
    processes = [
        context.Process(target=target, args=(*each, child)) for each, (_, child) in zip(arguments, pipes, strict=True)
    ]
    for process, (_, child) in zip(processes, pipes, strict=True):
        process.start()
        # Close our copy so that `recv` fails if the process exits.
        child.close()
    for orders, _ in pipes:
        orders.recv()
    return list(processes), [orders for orders, _ in pipes]


# The makespan.


def sleeper(url: str, batches: int, number: int, seconds: float, orders: Connection) -> None:
    """Runs a worker from the order "go" to the order "leave". Sends the number of batches it has processed."""
    reader = reader_of(batches)
    orders.send("there")
    orders.recv()
    done = 0
    with (
        contextlib.suppress(fastpipe.errors.StaleLeaseError),
        reader.lease(url, worker_name=f"w{number}", ttl=5.0) as worker,
    ):
        while not orders.poll():
            # A commit is refused if another worker has already committed a second copy of the batch.
            with contextlib.suppress(fastpipe.errors.StaleLeaseError):
                if next(worker, None) is None:
                    break
                time.sleep(seconds)
                done += 1
                worker.commit()
    orders.send((done, time.time()))


class Share(NamedTuple):
    """A worker of `makespan`: its seconds per batch, when it joins, and when it must leave or None."""

    seconds: float
    comes: float
    goes: float | None


def shares(phase: float) -> list[Share]:
    """Returns 2, then 8, then 3 workers, each for `phase` seconds. The first worker is slow and stays."""
    slow, fast = FAST * 10, FAST
    return [
        Share(slow, 0.0, None),
        Share(fast, 0.0, None),
        Share(fast, phase, None),
        *[Share(fast, phase, 2 * phase)] * 5,
    ]


def ideal(team: list[Share], batches: int) -> float:
    """Returns the seconds that the team needs for the batches at the sum of its speeds."""
    marks = sorted({mark for share in team for mark in (share.comes, share.goes, float("inf")) if mark is not None})
    left = float(batches)
    for begin, end in pairwise(marks):
        here = [share for share in team if share.comes <= begin and (share.goes is None or begin < share.goes)]
        speed = sum(1 / share.seconds for share in here)
        if left <= speed * (end - begin):
            return begin + left / speed
        left -= speed * (end - begin)
    raise AssertionError


def batches_of(team: list[Share], seconds: float) -> int:
    """Returns the number of batches that the team processes in `seconds`."""
    return int(sum((min(share.goes or seconds, seconds) - share.comes) / share.seconds for share in team))


def makespan(url: str, phase: float) -> tuple[float, float]:
    """Returns the seconds that an epoch takes, and the ideal."""
    plan = shares(phase)
    batches = batches_of(plan, 3 * phase)
    workers, pipes = start(sleeper, [(url, batches, number, share.seconds) for number, share in enumerate(plan)])
    begin = time.time()
    sent = [(share.comes, orders, "go") for share, orders in zip(plan, pipes, strict=True)]
    sent += [(share.goes, orders, "leave") for share, orders in zip(plan, pipes, strict=True) if share.goes]
    for when, orders, order in sorted(sent, key=lambda each: each[0]):
        time.sleep(max(0.0, begin + when - time.time()))
        orders.send(order)
    ends = [orders.recv() for orders in pipes]
    for worker in workers:
        worker.join()
    if sum(done for done, _ in ends) < batches:
        raise RuntimeError(f"{sum(done for done, _ in ends)} of {batches} batches were processed")
    really = {share.seconds: slept(share.seconds, 50) for share in plan}
    team = [share._replace(seconds=really[share.seconds]) for share in plan]
    return max(end for _, end in ends) - begin, ideal(team, batches)


def part_makespan(bench: Bench, found: Ledgers) -> None:
    row = bench.table("ledger", "run", "seconds|,.1f", "ideal|,.1f", "ratio|,.2f", "met", title="Makespan")
    for run in range(1 if bench.quick else 3):
        for name, url in found.urls(f"makespan{run}").items():
            took, least = makespan(url, 2.0 if bench.quick else 5.0)
            met = bench.target(f"makespan on {name}", took / least, most=MAKESPAN_MOST)
            row(name, str(run), took, least, took / least, met)


# The overhead.


def plain(reader: fastpipe.Reader, work: Callable[[], None]) -> int:
    """Reads an epoch without leases. Returns the number of batches."""
    done = 0
    for _ in reader:
        work()
        done += 1
    return done


def leased(reader: fastpipe.Reader, url: str, jobs: Iterator[int], work: Callable[[], None]) -> int:
    """Reads an epoch with leases, and commits each batch. This includes joining and leaving the job."""
    done = 0
    with reader.lease(url, job=f"job{next(jobs)}", worker_name="one") as worker:
        for _ in worker:
            work()
            done += 1
            worker.commit()
    return done


def part_overhead(bench: Bench, found: Ledgers) -> None:
    batches = 500 if bench.quick else 6000
    columns = ("plain, ms a batch|,.3f", "leased|,.3f", "more, median (rounds)|", "met")
    row = bench.table("the consumer", "ledger", *columns, title="Overhead")
    works: dict[str, Callable[[], None]] = {"spins": partial(spin, 0.001), "sleeps": partial(time.sleep, 0.001)}
    for name, work in works.items():
        reader, jobs = reader_of(batches), iter(range(1_000))
        tasks: dict[str, Callable[[], int]] = {"plain": partial(plain, reader, work)}
        urls = found.urls(f"overhead-{name}")
        tasks |= {kind: partial(leased, reader, url, jobs, work) for kind, url in urls.items()}
        turns = take_turns(tasks, bench.rounds)
        if {done for kind in tasks for done in turns.values(kind, "result")} != {batches}:
            raise RuntimeError("not all batches were processed")
        for kind in urls:
            more = Ratio(*(each - 1 for each in turns.ratio(kind, "plain")))
            met = bench.target(f"overhead on {kind}, {name}", more.median, most=OVERHEAD_MOST)
            each = [turns.median(side) / batches * 1e3 for side in ("plain", kind)]
            row(name, kind, *each, f"{more.median:.2%} ({more.low * 100:.2f} to {more.high * 100:.2f})", met)


# The crowd.

STRETCH = 8
"""Batches per lease. A worker commits all of them at once, together with its next lease."""
PROCESSES, THREADS = 4, 8
TTL = 60.0


class Measured(NamedTuple):
    """Granted leases and committed batches of a process's workers, with the seconds per exchange and the CPU time."""

    leases: int
    commits: int
    seconds: list[float]
    cpu: float


class Simulated:
    """A worker without a dataset that commits its leased batches and leases the next ones."""

    def __init__(self, database: Database, wanted: Job, name: str) -> None:
        self.job, self.member = join(database, wanted, worker=name, ttl=TTL, stretch_given=True, patience=60.0)
        self.connection = database.connect(create=False)
        self._number = 0
        self._used: list[Used] = []

    def ask(self) -> tuple[int, int]:
        """Runs an exchange. Returns the numbers of granted leases and committed batches."""
        self._number += 1
        request = Request(self._number, used=self._used, wanted=1, pace=0.01)
        with self.connection.transaction():
            answer: Answer = exchange(self.connection, self.job, self.member, request)
        committed = sum(used.stop - used.start for used in self._used)
        self._used = [Used(lease, start, stop, [1] * (stop - start)) for lease, start, stop, _ in answer.granted]
        return len(answer.granted), committed


def crowd(url: str, batches: int, names: list[str], orders: Connection) -> None:
    """Runs some of the workers in this process for the number of seconds that the bench requests."""
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
    # Keep the connections open: their server processes must exist until the bench has read their CPU times.
    orders.recv()


def cpu_of(database: str) -> Callable[[], float]:
    """Returns a function that reads the CPU seconds that the server has used for a database."""
    mine = []
    for path in Path("/proc").glob("[0-9]*"):
        # A process may exit at any time.
        with contextlib.suppress(OSError):
            title = (path / "cmdline").read_text()
            if title.startswith("postgres:") and f" {database} " in title:
                # schedstat counts nanoseconds. Ticks would be too coarse for short processes.
                mine.append(path / "schedstat")
    return lambda: sum(int(path.read_text().split()[0]) for path in mine) / 1e9


def measure(url: str, workers: int, seconds: float) -> tuple[list[Measured], float]:
    """Returns the measurements of the workers' processes, and the CPU seconds of the server."""
    # More batches than the workers can process, so that no worker runs out of work.
    batches = STRETCH * (workers + int(20_000 * seconds))
    names = [f"worker-{number}" for number in range(workers)]
    processes, pipes = start(crowd, [(url, batches, names[number::PROCESSES]) for number in range(PROCESSES)])
    server = cpu_of(url.rpartition("/")[2])
    before = server()
    for orders in pipes:
        orders.send(seconds)
    found: list[Measured] = [orders.recv() for orders in pipes]
    took = server() - before
    for orders in pipes:
        orders.send("leave")
    for process in processes:
        process.join()
    return found, took


def part_crowd(bench: Bench, found: Ledgers) -> None:
    if found.postgres is None:
        return
    seconds = 3.0 if bench.quick else 20.0
    columns = ["leases/s|,", "commits/s|,", "median, ms|,.0f", "99 %, ms|,.0f", "server, µs an exchange|,"]
    columns += ["asking, µs|,", "processors used|.0%"]
    row = bench.table("workers", *columns, title="A crowd on one PostgreSQL")
    for workers in (32, 1000) if bench.quick else (32, 100, 320, 1000):
        processes, server = measure(found.postgres.new_database(), workers, seconds)
        taken = sorted(each for process in processes for each in process.seconds)
        leases, commits = sum(each.leases for each in processes), sum(each.commits for each in processes)
        asking = sum(each.cpu for each in processes)
        times = statistics.median(taken) * 1e3, taken[len(taken) * 99 // 100] * 1e3
        spent = int(server / len(taken) * 1e6), int(asking / len(taken) * 1e6)
        used = (server + asking) / seconds / (os.cpu_count() or 1)
        row(f"{workers:,}", int(leases / seconds), int(commits / seconds), *times, *spent, used)


PARTS = {"makespan": part_makespan, "overhead": part_overhead, "crowd": part_crowd}


def main(bench: Bench) -> None:
    """Measures all parts."""
    with postgres("fsync=on", "max_connections=1200") as server, tempfile.TemporaryDirectory() as folder:
        for part in bench.args.parts:
            PARTS[part](bench, Ledgers(Path(folder), server))


if __name__ == "__main__":
    Bench("leases", __doc__, rounds=(5, 3), parts=list(PARTS)).run(main)
