"""Compares `fastpipe.rebatch` with NumPy's `take`.

To shuffle a row, `rebatch` copies it into its buffer, unless it is wide, draws it, and copies it into its batch. `take`
does only the last of these: `np.take(column, index, axis=0)` of batches of random rows, with indices
that were made before, from columns as long as the buffer. So there are two comparisons: of all that `rebatch` does,
while batches come in; and of only drawing, when all rows are in the buffer already. Both sides make arrays for each
batch, and still hold the batch before.

Each runs for a while in turn. Ratios divide rows per second of `rebatch` by `take`'s. Incoming batches have been
made before, so making them isn't timed; nor is filling the buffer at first. They
have twice the rows of the buffer, so that few are still in it when they come again: what is in the buffer takes
about as much memory as what `take` draws from, wherever `rebatch` has it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import fastpipe
from harness import Bench, take_turns
from harness.data import cores

INDICES = 64
"""Batches of indices that are made before; used in turn."""
CYCLE = 2
"""Incoming batches have this many times the rows of the buffer, and then come again."""

Batch = dict[str, Any]
Clock = Callable[[], float]


class Case(NamedTuple):
    """Columns of a number of bytes a row, and how they are shuffled."""

    name: str
    widths: list[int]
    buffer: int
    batch: int
    chunk: int = 1000


NARROW = [4] * 4 + [8] * 4
CASES = [
    Case("8 columns of 4 or 8 B", NARROW, 16_384, 1024),
    Case("8 columns of 4 or 8 B, large chunks", NARROW, 16_384, 1024, 8192),
    Case("8 columns of 4 or 8 B, large buffer", NARROW, 400_000, 1024),
    Case("8 columns of 4 or 8 B, small batches", NARROW, 16_384, 128),
    Case("1 column of 4 B", [4], 16_384, 1024),
    Case("1 column of 64 B", [64], 16_384, 1024),
    Case("1 column of 512 B", [512], 16_384, 1024),
    Case("4 columns of 512 B", [512] * 4, 16_384, 1024),
    Case("1 column of 512 B, large buffer", [512], 200_000, 1024),
    Case("1 column of 4 KB", [4096], 16_384, 1024),
    Case("4 columns of 4 KB", [4096] * 4, 4096, 512),
]


def table(widths: list[int], rows: int) -> Batch:
    """Columns of random numbers: float32 of one dimension, float64 of one, or float32 of two."""
    rng = np.random.default_rng(rows)
    shapes = [(rows,) if width <= 8 else (rows, width // 4) for width in widths]
    dtypes = ["f8" if width == 8 else "f4" for width in widths]
    return {f"c{i}": rng.random(s, "f4").astype(t) for i, (s, t) in enumerate(zip(shapes, dtypes, strict=True))}


def taken(case: Case) -> Iterator[Batch]:
    """Batches by NumPy, without end."""
    rows = case.buffer + case.batch - 1
    columns = table(case.widths, rows)
    rng = np.random.default_rng(1)
    for index in itertools.cycle([rng.integers(0, rows, case.batch) for _ in range(INDICES)]):
        yield {name: np.take(column, index, axis=0) for name, column in columns.items()}


def rebatched(case: Case) -> Iterator[Batch]:
    """Batches by fastpipe, without end."""
    count = -(-CYCLE * (case.buffer + case.batch) // case.chunk)
    whole = table(case.widths, count * case.chunk)
    cuts = range(0, count * case.chunk, case.chunk)
    chunks = [{name: column[i : i + case.chunk].copy() for name, column in whole.items()} for i in cuts]
    del whole
    return fastpipe.rebatch(itertools.cycle(chunks), case.batch, shuffle_buffer=case.buffer, seed=0)


def timed(batches: Iterator[Batch], seconds: float, clock: Clock) -> float:
    """Returns the seconds a batch, of batches without end."""
    start, count = clock(), 0
    while (passed := clock() - start) < seconds or not count:
        for _batch in itertools.islice(batches, 10):
            pass
        count += 10
    return passed / count


def timed_drawing(case: Case, seconds: float, clock: Clock) -> float:
    """Returns the seconds a batch, when all rows are in the buffer."""
    rows = case.buffer + case.batch - 1
    columns = table(case.widths, rows)
    passed, count = 0.0, 0
    while passed < seconds:
        batches = fastpipe.rebatch([columns], case.batch, shuffle_buffer=rows, seed=count, drop_last=True)
        next(batches)
        start = clock()
        for _batch in batches:
            count += 1
        passed += clock() - start
    return passed / count


def measure(bench: Bench, case: Case, clock: Clock) -> list[float]:
    """Returns million rows a second of `rebatch`, of only drawing and of `take`, and the ratios of the first two."""
    seconds, ours, theirs = bench.args.seconds, rebatched(case), taken(case)
    for _ in range(2 * case.buffer // case.batch + 2):
        next(ours)
    ways = {
        "rebatch": lambda: timed(ours, seconds, clock),
        "drawing": lambda: timed_drawing(case, seconds, clock),
        "take": lambda: timed(theirs, seconds, clock),
    }
    turns = take_turns(ways, bench.rounds)
    rates = [case.batch / turns.median(name, "result") / 1e6 for name in ways]
    return rates + [turns.ratio("take", name, "result").median for name in ("rebatch", "drawing")]


def main(bench: Bench) -> None:
    """Measures all cases, on one processor and on all."""
    args, processors = bench.args, cores()
    clock = time.process_time if args.cpu else time.perf_counter
    for pinned in [True] if args.cpu else [True, False]:
        os.sched_setaffinity(0, processors[-1:] if pinned else processors)
        title = "one thread, pinned" if pinned else f"default threads, {len(processors)} processors"
        names = ("rebatch, million rows/s|,.3f", "drawing|,.3f", "take|,.3f", "rebatch, times take|,.2f")
        row = bench.table("columns", *names, "drawing, times take|,.2f", title=title)
        for case in CASES:
            if args.cases in case.name:
                row(case.name, *measure(bench, case, clock))


if __name__ == "__main__":
    # By CPU time one thread is measured, for machines on which other programs run.
    Bench("rebatch", __doc__, rounds=(11, 3), packages=("numpy",), seconds=0.02, cases="", cpu=False).run(main)
