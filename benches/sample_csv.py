"""Compares ways to draw random rows of a CSV file that isn't indexed, with the file in the page cache and without it.

The file has 20 float columns. `--path` takes another file instead of writing one. Without the page cache, each run
begins with an empty cache (`POSIX_FADV_DONTNEED`), so it reads from storage. `--limit 100` limits the storage to 100
MB/s with a control group, which needs root. Peak memory is private memory above that at the start, without the sample.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fastpipe
from csv_files import write
from harness import Bench, take_turns
from harness.storage import empty_cache, limited, read_bytes

SEED = 7


def private() -> int:
    """Returns the private memory of this process in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


class Costs:
    """Runs functions. Keeps the seconds of each one's runs, and bytes read and peak memory of the last run."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.read: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    def of(self, name: str, run: Callable[[], Any], before: Callable[[], None]) -> None:
        """Runs a function after `before`."""
        before()
        ended, start, most = threading.Event(), private(), 0
        there, begun = read_bytes(), time.perf_counter()

        def watch() -> None:
            nonlocal most
            while not ended.wait(0.005):
                most = max(most, private())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            values = run().values.nbytes
            self.seconds.setdefault(name, []).append(time.perf_counter() - begun)
        finally:
            ended.set()
            watcher.join()
        self.read[name] = read_bytes() - there
        self.peak[name] = max(most - start - values, 0)


def compare(bench: Bench, path: Path, total: int, title: str, before: Callable[[], None]) -> None:
    """Prints a table of all methods."""
    draw = partial(fastpipe.csv.sample_csv, path, seed=SEED, num_threads=2, memory_limit=bench.args.memory)
    rows = int(total * bench.args.fraction)
    ways = {
        "exact": partial(draw, rows),
        "block": partial(draw, rows, method="block"),
        "buffered": partial(draw, rows, method="buffered"),
        "buffered, share=0.05": partial(draw, rows, method="buffered", share=0.05),
        "buffered, 1,000 rows": partial(draw, 1000, method="buffered"),
        "estimate, 1,000 rows": partial(draw, 1000, method="estimate"),
    }
    costs = Costs()
    sides = {name: partial(costs.of, name, run, before) for name, run in ways.items()}
    take_turns(sides, bench.rounds, warm=0)
    medians = {name: statistics.median(seconds) for name, seconds in costs.seconds.items()}
    row = bench.table("", "seconds|,.3f", "of exact|,.3f", "MB read|,.0f", "peak MB|,.0f", title=title)
    for name in ways:
        seconds = medians[name]
        row(name, seconds, seconds / medians["exact"], costs.read[name] / 1e6, costs.peak[name] / 1e6)


def main(bench: Bench) -> None:
    """Measures one file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(bench.args.path or Path(folder, "rows.csv"))
        if not bench.args.path:
            write(path, bench.args.megabytes)
        started = time.perf_counter()
        total = fastpipe.read_csv(path, columns=["c0"], batch_size=1).num_rows
        size = path.stat().st_size / 1e6
        bench.say(f"{total:,} rows, {size:,.0f} MB; finding them took {time.perf_counter() - started:.1f} s")
        title = f"{bench.args.fraction:.0%} of the rows of {size:,.0f} MB"
        if not bench.args.cold:
            compare(bench, path, total, f"{title}, in the page cache", lambda: None)
        limit = bench.args.limit
        with limited(path, limit) if limit else nullcontext():
            where = f"from storage limited to {limit:g} MB/s" if limit else "from storage"
            compare(bench, path, total, f"{title}, {where}", partial(empty_cache, path))


if __name__ == "__main__":
    sizes: dict[str, Any] = {
        "path": "",
        "megabytes": (1000, 20),
        "fraction": 0.02,
        "memory": "256MB",
        "cold": False,
        "limit": 0.0,
    }
    Bench("sample_csv", __doc__, rounds=(3, 1), **sizes).run(main)
