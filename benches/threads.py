"""Compares two threads of fastpipe on two cores with two single-threaded processes, each pinned to one core.

The two processes share nothing, so their total rate is the most that two cores can achieve. A program without threads
could reach this rate with twice the memory and a dataset that is split by hand. Both processes read the same file.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import plan
from harness import Bench, CannotError, take_turns
from harness.children import peers
from harness.data import cores
from peers.job import Job

CELLS = [f"{dataset}/{codec}" for codec in ("null", "deflate") for dataset in "abcd"]


def rate(answer: dict[str, Any]) -> float:
    """Returns records per second."""
    if "error" in answer:
        raise CannotError(answer["error"])
    return float(answer["rows"] / answer["seconds"])


def main(bench: Bench) -> None:
    """Measures all cells."""
    cpus = cores()[-2:]
    if len(cpus) < 2:
        bench.say("threads can't be compared because there is only one core")
        return
    columns = ("one thread, records/s|,.0f", "two threads|,.0f", "two processes|,.0f", "threads / one|,.2f")
    row = bench.table("cell", *columns, "threads / processes (rounds)|")
    pins = {"left": cpus[:1], "right": cpus[1:], "both": cpus}
    enough = 0.15 if bench.quick else 0.4
    with peers(bench, {name: ("fastpipe", pin) for name, pin in pins.items()}) as readers:

        def alone(who: str, job: Job) -> float:
            return rate(readers[who].ask("read", job, enough))

        def pair(job: Job) -> float:
            # Send both requests before receiving an answer, so that the processes run concurrently.
            for side in ("left", "right"):
                readers[side].send("read", job, enough)
            return sum([rate(readers[side].receive()) for side in ("left", "right")])

        for text in bench.args.cells:
            cell = plan.Spec.parse(text)
            path, _ = cell.file(plan.RECORDS[cell.dataset] // (plan.PART if bench.quick else 1), bench.say)
            job = Job(str(path), cell.dataset, bench.args.batch_size)
            two = dataclasses.replace(job, threads=2)
            ways = {"one": partial(alone, "left", job), "two": partial(alone, "both", two), "pair": partial(pair, job)}
            turns = take_turns(ways, bench.rounds)
            for error in turns.errors.values():
                bench.fail(f"{text}: {error}")
            if not turns.errors:
                rates = [turns.median(name, "result") for name in ("one", "two", "pair")]
                scale = turns.ratio("two", "one", "result").median
                row(text, *rates, scale, turns.ratio("two", "pair", "result"))


if __name__ == "__main__":
    Bench("threads", __doc__, rounds=(5, 3), cells=CELLS, batch_size=1024).run(main)
