"""Compares CSV scanning, parsing, and sampling with polars, pyarrow, DuckDB, and pandas, in turn.

All readers use two threads and read a file of 20 float columns from the page cache. Ratios are ratios of medians. The
peers parse to a data frame, fastpipe to batches of 8,192 rows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# polars reads this variable when it is imported.
os.environ.setdefault("POLARS_MAX_THREADS", "2")

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
from pyarrow import csv

import fastpipe
from harness import Bench, take_turns

COLUMNS = [f"c{i}" for i in range(20)]


def write(path: Path, megabytes: int) -> int:
    """Writes the CSV file. Returns the number of rows."""
    draw = np.random.default_rng(0)
    rows = 0
    with path.open("w") as file:
        file.write(",".join(COLUMNS) + "\n")
        while file.tell() < megabytes * 1_000_000:
            values = draw.standard_normal((20_000, len(COLUMNS))) * 10
            file.writelines(",".join(f"{value:.6g}" for value in row) + "\n" for row in values)
            rows += len(values)
    # fastpipe keeps no index of a file that was modified just now.
    os.utime(path, (1e9, 1e9))
    return rows


def compare(bench: Bench, title: str, sides: dict[str, Callable[[], Any]], size: float, wanted: float) -> None:
    """Prints a table of all sides and checks the speedup of fastpipe over the fastest peer."""
    turns = take_turns(sides, bench.rounds, warm=0)
    row = bench.table("", "seconds|,.3f", "MB/s|,.0f", "fastpipe is times as fast|,.2f", title=title)
    for name in sides:
        seconds = turns.median(name)
        row(name, seconds, size / seconds / 1e6, seconds / turns.median("fastpipe"))
    peer = min((name for name in sides if name != "fastpipe"), key=turns.median)
    bench.target(f"{title}, beside {peer}", turns.median(peer) / turns.median("fastpipe"), least=wanted)


def measure(bench: Bench, path: Path, rows: int) -> None:
    """Measures scanning, parsing, and sampling of one file."""
    name, size, count = str(path), path.stat().st_size, bench.args.rows
    query: Any = duckdb.sql
    features = {column: fastpipe.DenseSpec((), "float64") for column in COLUMNS}

    def reader() -> fastpipe.Reader:
        return fastpipe.read_csv(path, features=features, batch_size=8192, num_threads=2)

    scan = size / take_turns({"fastpipe": reader}, bench.rounds, warm=0).median("fastpipe") / 1e9
    row = bench.table("", "GB/s by two threads|,.1f", "wanted|g", "met", title="Finding all rows")
    row("fastpipe", scan, 3.0, bench.target("finding all rows, GB/s", scan, least=3))

    def parse() -> None:
        assert sum(len(batch["c0"]) for batch in reader()) == rows

    parsers: dict[str, Callable[[], Any]] = {
        "fastpipe": parse,
        "pyarrow": lambda: csv.read_csv(name),
        "polars": lambda: pl.read_csv(name),
        "duckdb": lambda: query(f"from read_csv('{name}')").arrow().read_all(),
        "pandas": lambda: pd.read_csv(name, engine="pyarrow"),
    }
    compare(bench, "Parsing all, the scan for rows included", parsers, size, 1.5)
    seed, cache = iter(range(1000)), path.with_suffix(".index")
    options: dict[str, Any] = {"rows": count, "columns": COLUMNS, "num_threads": 2}

    def skipped() -> None:
        keep = set(np.random.default_rng(next(seed)).choice(rows, count, replace=False).tolist())
        pd.read_csv(name, skiprows=lambda row: row > 0 and row - 1 not in keep)

    peers: dict[str, Callable[[], Any]] = {
        "duckdb": lambda: query(f"from read_csv('{name}') using sample reservoir({count} rows)").fetchnumpy(),
        "polars": lambda: pl.read_csv(name).sample(count, seed=next(seed)),
        "pyarrow": lambda: csv.read_csv(name).take(np.random.default_rng(next(seed)).choice(rows, count)),
    }
    fastpipe.csv.sample_csv(path, **options, index_cache=cache)
    indexed = {"fastpipe": lambda: fastpipe.csv.sample_csv(path, **options, seed=next(seed), index_cache=cache)}
    compare(bench, f"{count:,} rows, the index at hand", indexed | peers, size, 20)
    without = {"fastpipe": lambda: fastpipe.csv.sample_csv(path, **options, seed=next(seed))}
    compare(bench, f"{count:,} rows, without an index", without | peers, size, 2)
    once = take_turns({"pandas": skipped}, 1, warm=0).median("pandas")
    bench.table("", "seconds|,.1f", title=f"{count:,} rows by pandas with skiprows")("once", once)


def main(bench: Bench) -> None:
    """Writes a CSV file and measures it."""
    pa.set_cpu_count(2)
    duckdb.sql("set threads = 2")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.csv"
        rows = write(path, bench.args.megabytes)
        print(f"{path.stat().st_size / 1e6:,.0f} MB, {rows:,} rows of {len(COLUMNS)} floats")
        measure(bench, path, rows)


if __name__ == "__main__":
    packages, sizes = ("pyarrow", "polars", "duckdb", "pandas"), {"megabytes": (1000, 20), "rows": (100_000, 2_000)}
    Bench("csv_files", __doc__, rounds=(5, 2), packages=packages, **sizes).run(main)
