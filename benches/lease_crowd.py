"""A thousand workers on one ledger in PostgreSQL: how many leases and commits a second it serves.

Each worker has a connection of its own, and does what a worker's thread does: it commits the stretch that it has, and
leases the next one, in one transaction. Some processes do this for all of them, in turn and without a pause, so that
the server is never idle: a thousand processes would need more than two cores just to be there.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from typing import Any

import psycopg

from fastpipe.leases._database import database_of
from fastpipe.leases._exchange import Request, Used, exchange
from fastpipe.leases._job import Job
from fastpipe.leases._membership import join

PROCESSES = 4
STRETCH = 8


def show(url: str, quick: bool) -> None:
    """Measures, and prints what came out."""
    workers, seconds = (100, 3.0) if quick else (1000, 20.0)
    job = Job("crowd", {"data": {}, "order": {}}, 10_000_000 // 1000 * STRETCH, STRETCH, 0, None, True)
    context = multiprocessing.get_context("spawn")
    gate, results = context.Barrier(PROCESSES + 1), context.Queue()
    shares = [range(first, workers, PROCESSES) for first in range(PROCESSES)]
    processes = [
        context.Process(target=_crowd, args=(url, job, list(share), seconds, gate, results)) for share in shares
    ]
    for process in processes:
        process.start()
    gate.wait()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    times = sorted(value for each in found for value in each["times"])
    leases = sum(each["leases"] for each in found)
    used = sum(each["cpu"] for each in found)
    cores, late = os.cpu_count() or 1, times[-len(times) // 100]
    print(f"{workers} workers, one PostgreSQL, {cores} cores for both: {leases / seconds:,.0f} leases a second, each")
    print(f"  with the commit of the stretch before it ({leases / seconds * STRETCH:,.0f} batches a second)")
    print(f"  an exchange takes {statistics.median(times) * 1e3:.1f} ms (median), {late * 1e3:.1f} ms (99 of 100)")
    print(f"  the workers themselves took {used / seconds / cores:.0%} of the cores")
    with psycopg.connect(url) as connection:
        size = connection.execute("SELECT pg_total_relation_size('fastpipe_stretches')").fetchone()
    print(f"  the table of stretches has {0 if size is None else size[0] / 1e6:.1f} MB")


def _crowd(url: str, job: Job, names: list[int], seconds: float, gate: Any, results: Any) -> None:
    database = database_of(url)
    members = [join(database, job, worker=f"w{n}", ttl=600.0, stretch_given=True, patience=60.0)[1] for n in names]
    connections = [database.connect(create=False) for _ in members]
    held: list[Any] = [None] * len(members)
    gate.wait()
    times: list[float] = []
    leases, number, end, cpu = 0, 0, time.monotonic() + seconds, time.process_time()
    while time.monotonic() < end:
        number += 1
        for i, member in enumerate(members):
            done = held[i]
            used = [] if done is None else [Used(done.lease, done.start, done.stop, [1] * (done.stop - done.start))]
            begin = time.monotonic()
            with connections[i].transaction():
                answer = exchange(connections[i], job, member, Request(number, used=used, wanted=1))
            times.append(time.monotonic() - begin)
            held[i] = answer.granted[0] if answer.granted else None
            leases += len(answer.granted)
            if times[-1] and time.monotonic() > end:
                break
    results.put({"times": times, "leases": leases, "cpu": time.process_time() - cpu})
    for connection in connections:
        connection.close()
