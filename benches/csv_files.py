"""Compares CSV scanning, parsing, and sampling with polars, pyarrow, DuckDB, and pandas, in turn.

All readers use two threads and read from the page cache: a file of 20 float columns (`floats`), one of an integer, a
text, a time and a float (`mixed`), and one of 50,000 columns (`wide`). Ratios are ratios of medians. The peers parse to
a data frame, fastpipe to batches of 8,192 rows, or of 64 rows of 50,000 columns. In the last two files every reader
infers the types.
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


def floats(bench: Bench) -> None:
    """Measures a file of floats."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.csv"
        rows = write(path, bench.args.megabytes)
        print(f"{path.stat().st_size / 1e6:,.0f} MB, {rows:,} rows of {len(COLUMNS)} floats")
        measure(bench, path, rows)


def inferred(bench: Bench, title: str, table: pa.Table, batch_size: int, peers: tuple[str, ...], wanted: float) -> None:
    """Measures parsing of a table by readers that infer the types."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.csv"
        csv.write_csv(table, path, csv.WriteOptions(quoting_style="none"))
        os.utime(path, (1e9, 1e9))
        name, count = str(path), table.num_rows

        def parse() -> None:
            reader = fastpipe.read_csv(path, batch_size=batch_size, num_threads=2)
            assert sum(len(batch[table.column_names[0]]) for batch in reader) == count

        blocks = csv.ReadOptions(block_size=max(1 << 20, path.stat().st_size // 8))
        readers: dict[str, Callable[[], Any]] = {
            "fastpipe": parse,
            "pyarrow": lambda: csv.read_csv(name, read_options=blocks),
            "polars": lambda: pl.read_csv(name, try_parse_dates=True),
        }
        sides = {side: readers[side] for side in ("fastpipe", *peers)}
        compare(bench, title, sides, path.stat().st_size, wanted)


def mixed(bench: Bench) -> None:
    """Measures a file of four types."""
    rows, draw = bench.args.megabytes * 15_000, np.random.default_rng(1)
    words = pa.array([f"word {number}" for number in range(1000)])
    table = pa.table(
        {
            "integer": draw.integers(0, 1 << 30, rows),
            "text": words.take(pa.array(draw.integers(0, 1000, rows))),
            "time": pa.array(draw.integers(0, 1 << 31, rows), pa.timestamp("s")),
            "float": (draw.standard_normal(rows) * 10).round(5),
        }
    )
    inferred(bench, "An integer, a text, a time and a float", table, 8192, ("pyarrow", "polars"), 1.4)


def wide(bench: Bench) -> None:
    """Measures a file of many columns."""
    values = (np.random.default_rng(1).standard_normal((bench.args.columns, bench.args.wide_rows)) * 10).round(5)
    table = pa.table({f"c{number}": column for number, column in enumerate(values)})
    inferred(bench, f"{bench.args.columns:,} columns", table, 64, ("pyarrow", "polars"), 1.0)


if __name__ == "__main__":
    pa.set_cpu_count(2)
    duckdb.sql("set threads = 2")
    parts = {"floats": floats, "mixed": mixed, "wide": wide}
    sizes: dict[str, Any] = {"megabytes": (1000, 20), "rows": (100_000, 2_000)}
    sizes |= {"columns": (50_000, 5_000), "wide_rows": (500, 100), "parts": list(parts)}
    Bench("csv_files", __doc__, rounds=(5, 2), packages=("pyarrow", "polars", "duckdb", "pandas"), **sizes).run(parts)
