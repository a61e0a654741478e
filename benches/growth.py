"""Measures whether the time per record depends on the size of the dataset.

* `records`: Dataset (d) with 10^5 to 10^8 records (10^6 in a quick run). One file of 100,000 records is listed
  repeatedly.
* `files`: Dataset (d) in 1 to 10,000 files of 2,000 records each. The files are links with different paths to a few
  files.

Readers are created once and take turns. A turn repeats passes until it has read at least a million records, so that
small datasets aren't measured by a single short pass. `ratio` is relative to the first row of each part, and `grown` to
the fastest row so far. Opening a reader (finding all blocks) isn't included. `grown` may be at most 10 %. The time
includes the start of each pass, so a record takes longer in datasets of a few thousand records.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import fastpipe
import generate
from harness import Bench, take_turns
from harness.data import drain, open_reader

WITHIN = 0.10


def passes(reader: fastpipe.Reader, least: int) -> float:
    """Returns the nanoseconds per record."""
    begun, rows = time.perf_counter(), 0
    while rows < least:
        drain(reader)
        rows += reader.num_rows
    return 1e9 * (time.perf_counter() - begun) / rows


def compare(bench: Bench, what: str, lists: dict[int, list[str]], order: str) -> None:
    """Compares reading each list of files with reading the shortest list."""
    args = bench.args
    readers, opening = {}, {}
    for count, paths in lists.items():
        begun = time.perf_counter()
        options = {"batch_size": args.batch_size, "num_threads": args.threads or "auto"}
        readers[count] = open_reader(paths, "d", order, **options)
        opening[count] = time.perf_counter() - begun
    turns = take_turns({count: partial(passes, reader, args.least) for count, reader in readers.items()}, bench.rounds)
    columns = ("records|", "ns a record|,.1f", "ratio|,.3f", "grown|,.3f", "kept", "opening, ms|,.1f", "us a file|,.1f")
    row = bench.table(what, *columns, title=f"{what}, {order}")
    first = fastest = next(iter(readers))
    for count, reader in readers.items():
        grown = turns.ratio(count, fastest, "result").median
        mark = bench.bound(f"{count:,} {what}, {order}: time a record grown", grown, most=1 + WITHIN)
        fastest = min(fastest, count, key=lambda one: statistics.median(turns.values(one, "result")))
        each = [turns.median(count, "result"), turns.ratio(count, first, "result").median, grown]
        row(f"{count:,}", reader.num_rows, *each, mark, opening[count] * 1e3, opening[count] * 1e6 / len(reader.files))
        reader.close()


def main(bench: Bench) -> None:
    """Measures both parts. The bench fails if the time per record grows."""
    args = bench.args
    for order in args.orders:
        if "records" in args.parts:
            path = str(generate.generate("d", 100_000)[0])
            counts = [10**power for power in range(5, 12) if 10**power <= args.most]
            compare(bench, "records", {count: [path] * (count // 100_000) for count in counts}, order)
        if "files" in args.parts:
            few = [generate.generate("d", 2_000, seed=seed)[0] for seed in range(1, 9)]
            with tempfile.TemporaryDirectory(dir=generate.CACHE) as folder:
                paths = [str(Path(folder) / f"{i:05}.avro") for i in range(args.most_files)]
                for i, link in enumerate(paths):
                    os.link(few[i % len(few)], link)
                counts = [10**power for power in range(5) if 10**power <= args.most_files]
                compare(bench, "files", {count: paths[:count] for count in counts}, order)


if __name__ == "__main__":
    sizes: dict[str, Any] = {"most": (10**8, 10**6), "most_files": (10_000, 1_000), "least": 1_000_000}
    sizes |= {"batch_size": 1024, "threads": 0}
    Bench("growth", __doc__, rounds=(3, 3), parts=["records", "files"], orders=["sequential"], **sizes).run(main)
