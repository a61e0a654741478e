"""Measures what leases cost, and how well they share out work among workers that come, go and differ.

Three parts, named by `--parts`:

* `makespan`: workers 2 -> 8 -> 3 within an epoch, one of them ten times slower than the others, and still there at the
  end. Beside it the ideal: the batches, divided by the summed speed of the workers that were there. Batches take as
  long as their worker sleeps for each, so that two cores are enough; speeds are what sleeping really takes.
* `overhead`: batches that their consumer works on for a millisecond, leased and committed one by one, beside plain
  iteration of the same reader, in turn. The consumer spins, which a background thread disturbs most, or sleeps.
* `crowd`: a thousand workers against one PostgreSQL, see `lease_crowd.py`.

Ledgers are a file of SQLite's, and a PostgreSQL server that is started for this; both wait for the disk at each commit.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fastpipe
import lease_crowd
from harness import Bench, Ratio, take_turns
from harness.data import slept, spin

MAKESPAN_MOST = 1.3
OVERHEAD_MOST = 0.03
FAST = 0.004
"""Seconds that a worker of the makespan sleeps for each batch; the slow one ten times as long."""


class Ledgers(NamedTuple):
    """Where leases are kept.

    Attributes:
        folder: for files of SQLite's.
        postgres: a server, with a method `new_database`; None if it isn't installed.
    """

    folder: Path
    postgres: Any

    def urls(self, name: str) -> dict[str, str]:
        """A new ledger of each kind."""
        found = {"SQLite": f"sqlite:///{self.folder / name}.db"}
        return found | ({"PostgreSQL": self.postgres.new_database()} if self.postgres else {})


@contextmanager
def ledgers() -> Iterator[Ledgers]:
    """Starts a PostgreSQL server, if it is installed."""
    # The tests know how to start one.
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    servers: Any = importlib.import_module("servers")

    programs = servers.postgres_programs()
    server = servers.Postgres(programs, "fsync=on", "max_connections=1200") if programs else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Ledgers(Path(folder), server)
    finally:
        if server is not None:
            server.stop()


def reader_of(batches: int) -> fastpipe.Reader:
    """Returns a reader of batches that cost nothing."""
    return fastpipe.from_arrays({"id": np.arange(batches * 4)}, batch_size=4, shuffle=True, shuffle_buffer=400, seed=1)


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
    """A worker of the makespan.

    Attributes:
        seconds: that it takes for a batch.
        comes: when, in seconds from the first one.
        goes: when it is asked to; None if it stays to the end.
    """

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
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in plan]
    workers = [
        context.Process(target=sleeper, args=(url, batches, number, share.seconds, child))
        for number, (share, (_, child)) in enumerate(zip(plan, pipes, strict=True))
    ]
    for worker, (orders, child) in zip(workers, pipes, strict=True):
        worker.start()
        # So that a process that fails ends this one, too.
        child.close()
        orders.recv()
    begin = time.time()
    sent = [(share.comes, orders, "go") for share, (orders, _) in zip(plan, pipes, strict=True)]
    sent += [(share.goes, orders, "leave") for share, (orders, _) in zip(plan, pipes, strict=True) if share.goes]
    for when, orders, order in sorted(sent, key=lambda each: each[0]):
        time.sleep(max(0.0, begin + when - time.time()))
        orders.send(order)
    ends = [orders.recv() for orders, _ in pipes]
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


def main(bench: Bench) -> None:
    """Measures all parts."""
    with ledgers() as found:
        for part in bench.args.parts:
            if part == "makespan":
                part_makespan(bench, found)
            elif part == "overhead":
                part_overhead(bench, found)
            elif part == "crowd" and found.postgres is not None:
                lease_crowd.show(bench, found.postgres.new_database)


if __name__ == "__main__":
    Bench("leases", __doc__, rounds=(5, 3), parts=["makespan", "overhead", "crowd"]).run(main)
