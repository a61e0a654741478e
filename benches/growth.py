"""Measures whether the time a record takes depends on how many there are.

* `records`: data set (d), from 10^5 to 10^8 records (QUICK=1: to 10^7): a file of 100,000 records, listed repeatedly.
* `files`: data set (d) in 1 to 10,000 files of 2,000 records each: links to a few files, so that every path is
  another one.

Readers are made once and take turns; a turn is as many passes as it takes to read at least a million records, so that
small data sets aren't measured by a single pass. Shown are medians: `ratio` to the first row of each part, `grown` to
the fastest row so far, both within rounds; and beside them what opening took (finding all blocks; not part of the
ratios). Wanted: at most 10 % grown. The start of a pass is part of the time, so with a few thousand records each takes
longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import fastpipe
import generate
import loads

WITHIN = 0.10


def opened(paths: list[str], threads: int | None, order: str, batch: int) -> tuple[fastpipe.Reader, float]:
    """A reader, and the seconds until it was there."""
    begun = time.perf_counter()
    options: dict[str, Any] = {} if order == "sequential" else loads.window()
    reader = fastpipe.read_avro(
        paths,
        features=loads.features("d"),
        batch_size=batch,
        num_threads="auto" if threads is None else threads,
        **options,
    )
    return reader, time.perf_counter() - begun


def compare(
    bounds: loads.Bounds, what: str, lists: dict[int, list[str]], arguments: argparse.Namespace, order: str
) -> None:
    """Measures lists of files against the shortest one."""
    readers = {count: opened(paths, arguments.threads, order, arguments.batch_size) for count, paths in lists.items()}

    def passes(reader: fastpipe.Reader) -> float:
        """Nanoseconds a record."""
        begun, rows = time.perf_counter(), 0
        while rows < arguments.least:
            loads.drain(reader)
            rows += reader.num_rows
        return 1e9 * (time.perf_counter() - begun) / rows

    turns = loads.take_turns(
        {count: partial(passes, reader) for count, (reader, _) in readers.items()}, arguments.rounds
    )
    took = {count: [nanos for _, nanos in taken] for count, taken in turns.items()}
    columns = [(what, 10), ("records", 12), ("order", -10), ("ns a record", 11), ("ratio", 6), ("grown", 6), ("", -6)]
    row = loads.table([*columns, ("opening", 10), ("us a file", 9)])
    first = fastest = next(iter(took.values()))
    for count, (reader, seconds) in readers.items():
        relative = loads.ratio(took[count], first)
        grown = loads.ratio(took[count], fastest)
        mark = bounds.check(f"{count:,} {what}, {order}: time a record grown", grown, most=1 + WITHIN)
        fastest = min(fastest, took[count], key=statistics.median)
        files = len(reader.files)
        nanos = f"{statistics.median(took[count]):.1f}"
        opening = f"{seconds * 1e3:.1f} ms"
        row(count, reader.num_rows, order, nanos, relative, grown, mark, opening, f"{seconds * 1e6 / files:.1f}")
        reader.close()


def main() -> int:
    """Runs the measurements; the exit status is 1 where time grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="records,files")
    parser.add_argument("--orders", default="sequential")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--most", type=int, default=10**7 if loads.QUICK else 10**8, help="records")
    parser.add_argument("--most-files", type=int, default=1_000 if loads.QUICK else 10_000)
    parser.add_argument("--least", type=int, default=1_000_000, help="records a turn")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    bounds = loads.Bounds()
    for order in arguments.orders.split(","):
        if "records" in arguments.parts:
            path = str(generate.generate("d", 100_000)[0])
            counts = [10**power for power in range(5, 12) if 10**power <= arguments.most]
            lists = {count: [path] * (count // 100_000) for count in counts}
            compare(bounds, "records", lists, arguments, order)
        if "files" in arguments.parts:
            few = [generate.generate("d", 2_000, seed=seed)[0] for seed in range(1, 9)]
            with tempfile.TemporaryDirectory(dir=generate.CACHE) as folder:
                paths = []
                for i in range(arguments.most_files):
                    link = Path(folder) / f"{i:05}.avro"
                    os.link(few[i % len(few)], link)
                    paths.append(str(link))
                counts = [10**power for power in range(5) if 10**power <= arguments.most_files]
                compare(bounds, "files", {count: paths[:count] for count in counts}, arguments, order)
    return bounds.status()


if __name__ == "__main__":
    raise SystemExit(main())
