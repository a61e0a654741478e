"""Measures what leases cost, and how well they share out work among workers that come, go and differ.

Three parts, named by `--parts`:

* `makespan`: workers 2 -> 8 -> 3 within an epoch, one of them ten times slower than the others, and still there at the
  end. Beside it the ideal: the batches, divided by the summed speed of the workers that were there. Batches take as
  long as their worker sleeps for each, so that two cores are enough; speeds are what sleeping really takes.
* `overhead`: batches that their consumer works on for a millisecond, leased and committed one by one, beside plain
  iteration of the same reader, in turn. The consumer spins, which a background thread disturbs most, or sleeps.
* `crowd`: how many exchanges a second one PostgreSQL answers a thousand workers. An exchange is one transaction that
  commits what a worker used, and leases its next stretch. Each has its own connection; what is left out is its data,
  its consumer, and its waiting. A few processes let their workers take turns, each asking again as soon as the others
  of its process have asked. So the server is as busy as it can be, and shares the processors with the askers.

Ledgers are a file of SQLite's, and a PostgreSQL server that is started for this; both wait for the disk at each commit.
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
"""Seconds that a worker of the makespan sleeps for each batch; the slow one ten times as long."""


class Ledgers(NamedTuple):
    """Where leases are kept: a folder for files of SQLite's, and a PostgreSQL server; None if it isn't installed."""

    folder: Path
    postgres: Any

    def urls(self, name: str) -> dict[str, str]:
        """A new ledger of each kind."""
        found = {"SQLite": f"sqlite:///{self.folder / name}.db"}
        return found | ({"PostgreSQL": self.postgres.new_database()} if self.postgres else {})


def reader_of(batches: int) -> fastpipe.Reader:
    """Returns a reader of batches that cost nothing."""
    return fastpipe.from_arrays({"id": np.arange(batches * 4)}, batch_size=4, shuffle=True, shuffle_buffer=400, seed=1)


def start(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> tuple[list[BaseProcess], list[Connection]]:
    """Starts processes, whose last argument is a pipe, and waits until each has sent something."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in arguments]
    processes = [
        context.Process(target=target, args=(*each, child)) for each, (_, child) in zip(arguments, pipes, strict=True)
    ]
    for process, (_, child) in zip(processes, pipes, strict=True):
        process.start()
        # So that a process that fails ends this one, too.
        child.close()
    for orders, _ in pipes:
        orders.recv()
    return list(processes), [orders for orders, _ in pipes]


# The makespan.


def sleeper(url: str, batches: int, number: int, seconds: float, orders: Connection) -> None:
    """A worker, in a separate process: begins at the order "go", ends at "leave". Sends how many batches it did."""
    reader = reader_of(batches)
    orders.send("there")
    orders.recv()
    done = 0
    with contextlib.suppress(fastpipe.StaleLeaseError), reader.lease(url, worker=f"w{number}", ttl=5.0) as worker:
        while not orders.poll():
            # Refused is what another worker was quicker with, by a second copy.
            with contextlib.suppress(fastpipe.StaleLeaseError):
                if next(worker, None) is None:
                    break
                time.sleep(seconds)
                done += 1
                worker.commit()
    orders.send((done, time.time()))


class Share(NamedTuple):
    """A worker of the makespan: its seconds for a batch, when it comes, and when it is asked to go, or None."""

    seconds: float
    comes: float
    goes: float | None


def shares(phase: float) -> list[Share]:
    """Workers 2 -> 8 -> 3, each number for `phase` seconds; the first one is the slow one, and stays."""
    slow, fast = FAST * 10, FAST
    return [
        Share(slow, 0.0, None),
        Share(fast, 0.0, None),
        Share(fast, phase, None),
        *[Share(fast, phase, 2 * phase)] * 5,
    ]


def ideal(team: list[Share], batches: int) -> float:
    """Seconds until their summed speed has done the batches."""
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
    """Returns the batches that they do in this time."""
    return int(sum((min(share.goes or seconds, seconds) - share.comes) / share.seconds for share in team))


def makespan(url: str, phase: float) -> tuple[float, float]:
    """Seconds of an epoch, and the ideal."""
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
        raise RuntimeError(f"{sum(done for done, _ in ends)} of {batches} batches were done")
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
    """Batches of an epoch."""
    done = 0
    for _ in reader:
        work()
        done += 1
    return done


def leased(reader: fastpipe.Reader, url: str, jobs: Iterator[int], work: Callable[[], None]) -> int:
    """The same, leased and committed one by one; from joining the job to having left it."""
    done = 0
    with reader.lease(url, job=f"job{next(jobs)}", worker="one") as worker:
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
            raise RuntimeError("not all batches were done")
        for kind in urls:
            more = Ratio(*(each - 1 for each in turns.ratio(kind, "plain")))
            met = bench.target(f"overhead on {kind}, {name}", more.median, most=OVERHEAD_MOST)
            each = [turns.median(side) / batches * 1e3 for side in ("plain", kind)]
            row(name, kind, *each, f"{more.median:.2%} ({more.low * 100:.2f} to {more.high * 100:.2f})", met)


# The crowd.

STRETCH = 8
"""Batches of a stretch. A worker commits them at once, with its next lease."""
PROCESSES, THREADS = 4, 8
TTL = 60.0


class Measured(NamedTuple):
    """How many leases the workers of a process were given, and batches they committed, and what that took."""

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
