"""Compares `fastpipe.rebatch` with NumPy's `take`.

What `rebatch` does to shuffle a row is to copy it into its buffer, unless it is wide, to draw it, and to copy it into
its batch. `take` does the last of these alone: `np.take(column, index, axis=0)` of batches of random rows, with indices
that were made before, from columns as long as the buffer. So there are two comparisons: of all that `rebatch` does,
while batches come in; and of drawing alone, when all rows are in the buffer already. Both sides make arrays for each
batch, and the batch before is still held meanwhile.

Each runs for a while in turn. A round's ratio is the rows per second of `rebatch` to those of `take`; shown are
medians. Batches come in that are there already, so making them isn't timed; nor is filling the buffer at first. They
have twice as many rows as the buffer, so that few are still in it when they come again: what is in the buffer takes
about as much memory as what `take` draws from, wherever `rebatch` has it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import fastpipe

INDICES = 64
"""Batches of indices that are made before; used in turn."""
CYCLE = 2
"""Batches that come in have this many times the rows of the buffer, and then come again."""

Batch = dict[str, Any]
clock = time.perf_counter


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


def timed(batches: Iterator[Batch], seconds: float) -> float:
    """Seconds a batch, of batches without end."""
    start, count = clock(), 0
    while (passed := clock() - start) < seconds or not count:
        for _batch in itertools.islice(batches, 10):
            pass
        count += 10
    return passed / count


def timed_drawing(case: Case, seconds: float) -> float:
    """Seconds a batch, when all rows are in the buffer."""
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


def measure(case: Case, rounds: int, seconds: float) -> list[float]:
    """Rows a second of `rebatch`, of drawing alone and of `take`, and ratios of the first two to the last: medians."""
    ours, theirs = rebatched(case), taken(case)
    for _ in range(2 * case.buffer // case.batch + 2):
        next(ours)
    times = [(timed(ours, seconds), timed_drawing(case, seconds), timed(theirs, seconds)) for _ in range(rounds + 1)]
    del times[0]
    rates = [statistics.median(case.batch / t for t in column) for column in zip(*times, strict=True)]
    ratios = [statistics.median(t[2] / t[side] for t in times) for side in range(2)]
    return [*rates, *ratios]


def main() -> None:
    """Measures all cases, on one processor and on all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.02, help="how long each runs in a round")
    parser.add_argument("--cases", default="", help="only those whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="processor time, where other programs run; one thread only")
    args = parser.parse_args()
    if args.cpu:
        global clock
        clock = time.process_time
    processors = os.sched_getaffinity(0)
    for pinned in [True] if args.cpu else [True, False]:
        os.sched_setaffinity(0, {max(processors)} if pinned else processors)
        print(f"\n{'one thread, pinned' if pinned else f'default threads, {len(processors)} processors'}")
        print(f"{'':40}{'million rows/s':>33} {'times take':>17}")
        print(f"{'':40}{'rebatch':>11}{'drawing':>11}{'take':>11} {'rebatch':>8} {'drawing':>8}")
        for case in CASES:
            if args.cases in case.name:
                *rates, whole, drawing = measure(case, args.rounds, args.seconds)
                millions = "".join(f"{rate / 1e6:11.3f}" for rate in rates)
                print(f"{case.name:40}{millions} {whole:8.2f} {drawing:8.2f}", flush=True)


if __name__ == "__main__":
    main()
