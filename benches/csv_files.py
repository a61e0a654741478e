"""CSV files: finding rows, parsing them, and samples of them, beside polars, pyarrow, DuckDB and pandas, in turn.

    python benches/csv_files.py [--megabytes 1000] [--rounds 5] [--rows 100000]

One file of 20 columns of floats, cached by the system; two threads each. Figures are medians over rounds, ratios those
of the medians. Peers parse to a frame, fastpipe to batches of 8,192 rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before they are imported: polars asks for it then.
os.environ.setdefault("POLARS_MAX_THREADS", "2")

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
from pyarrow import csv

import fastpipe

try:
    import pandas as pd
except ImportError:  # It is measured where it is at hand.
    pd = None

COLUMNS = [f"c{i}" for i in range(20)]


def write(path: Path, megabytes: int) -> int:
    """Writes the file. Returns its rows."""
    draw = np.random.default_rng(0)
    rows = 0
    with path.open("w") as file:
        file.write(",".join(COLUMNS) + "\n")
        while file.tell() < megabytes * 1_000_000:
            values = draw.standard_normal((20_000, len(COLUMNS))) * 10
            file.writelines(",".join(f"{value:.6g}" for value in row) + "\n" for row in values)
            rows += len(values)
    # Old enough for its index to be kept.
    os.utime(path, (1e9, 1e9))
    return rows


def timed(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds that each takes: the median of its turns."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            start = time.perf_counter()
            sides[name]()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def told(title: str, seconds: dict[str, float], size: float, wanted: float) -> None:
    """Prints a table, and how many times as fast as the fastest peer fastpipe is."""
    print(f"\n{title}\n\n| | seconds | MB/s |\n|---|--:|--:|")
    for name, taken in seconds.items():
        print(f"| {name} | {taken:.3f} | {size / taken / 1e6:,.0f} |")
    own = seconds["fastpipe"]
    peer = min((name for name in seconds if name != "fastpipe"), key=lambda name: seconds[name])
    ratio = seconds[peer] / own
    print(f"\n{ratio:.2f} times as fast as {peer}; wanted {wanted}, {'met' if ratio >= wanted else 'not met'}")


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000)
    arguments = parser.parse_args()
    pa.set_cpu_count(2)
    query: Any = duckdb.sql
    duckdb.sql("set threads = 2")
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder) / "x.csv", Path(folder) / "index"
        rows = write(path, arguments.megabytes)
        size = path.stat().st_size
        name = str(path)
        print(f"{size / 1e6:,.0f} MB, {rows:,} rows of {len(COLUMNS)} floats; {os.cpu_count()} cores")
        features = {column: fastpipe.DenseSpec((), "float64") for column in COLUMNS}

        def reader(**options: Any) -> fastpipe.Reader:
            return fastpipe.read_csv(path, features=features, batch_size=8192, num_threads=2, **options)

        scan = timed({"fastpipe": reader}, arguments.rounds)["fastpipe"]
        rate = size / scan / 1e9
        print(f"\nFinding all rows: {rate:.1f} GB/s by two threads; wanted 1.5 GB/s a core", end=", ")
        print("met" if rate >= 3 else "not met")

        def parse() -> None:
            assert sum(len(batch["c0"]) for batch in reader()) == rows

        parsers: dict[str, Callable[[], Any]] = {
            "fastpipe": parse,
            "pyarrow": lambda: csv.read_csv(name),
            "polars": lambda: pl.read_csv(name),
            "duckdb": lambda: query(f"from read_csv('{name}')").arrow().read_all(),
        }
        if pd is not None:
            parsers["pandas"] = lambda: pd.read_csv(name, engine="pyarrow")
        parsed = timed(parsers, arguments.rounds)
        told("Parsing all, the scan for rows included:", parsed, size, 1.5)

        count = arguments.rows
        seed = iter(range(1000))
        options: dict[str, Any] = {"rows": count, "columns": COLUMNS, "num_threads": 2}

        def skipped() -> None:
            keep = set(np.random.default_rng(next(seed)).choice(rows, count, replace=False).tolist())
            pd.read_csv(name, skiprows=lambda row: row > 0 and row - 1 not in keep)

        peers: dict[str, Callable[[], Any]] = {
            "duckdb": lambda: query(f"from read_csv('{name}') using sample reservoir({count} rows)").fetchnumpy(),
            "polars": lambda: pl.read_csv(name).sample(count, seed=next(seed)),
            "pyarrow": lambda: csv.read_csv(name).take(np.random.default_rng(next(seed)).choice(rows, count)),
        }
        fastpipe.sample_csv(path, **options, index_cache=cache)
        own = {"fastpipe": lambda: fastpipe.sample_csv(path, **options, seed=next(seed), index_cache=cache)}
        told(f"{count:,} rows, the index at hand:", timed(own | peers, arguments.rounds), size, 20)
        own = {"fastpipe": lambda: fastpipe.sample_csv(path, **options, seed=next(seed))}
        told(f"{count:,} rows, without an index:", timed(own | peers, arguments.rounds), size, 2)
        if pd is None:
            return
        start = time.perf_counter()
        skipped()
        print(f"\npandas with skiprows, once: {time.perf_counter() - start:.1f} seconds")


if __name__ == "__main__":
    main()
