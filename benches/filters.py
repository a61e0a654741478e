"""Compares `Reader.filter` with reading all rows and masking each batch in NumPy.

Each file has an integer column, 20 columns of float32 and a text column. The condition is about the integer column and
keeps 10 % of the rows, either spread evenly over the file or together at its start. A pass reads all columns in batches
of 1,024 rows. The contenders take turns:

* `masking`: reads all rows of the file and indexes each array of each batch with a mask;
* `first epoch`: finds the rows with `filter`, and reads them. If they are together in a Parquet file, `filter` skips
  most row groups by their statistics;
* `later epoch`: reads rows that were found before.

Masking yields batches of about 102 rows, the others full batches. The rows of all contenders are checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

import fastpipe
from harness import Bench, take_turns

BATCH_SIZE = 1024
FLOATS = 20
KEYS = 100
KEPT = fastpipe.col("key") < KEYS // 10


def table_of(rows: int, spread: bool) -> pa.Table:
    """Returns the rows, in which a key occurs at random or together."""
    draw = np.random.default_rng(1)
    keys = draw.integers(0, KEYS, rows).astype("int32")
    columns: dict[str, Any] = {"key": keys if spread else np.sort(keys)}
    columns |= {f"x{i}": draw.random(rows, "float32") for i in range(FLOATS)}
    table = pa.table(columns | {"text": pa.array([f"the text of row {i}" for i in range(rows)])})
    return table.cast(pa.schema([field.with_nullable(False) for field in table.schema]))


def write(kind: str, table: pa.Table, path: Path) -> Callable[..., fastpipe.Reader]:
    """Writes a file, and returns a function that opens it."""
    if kind == "avro":
        fastpipe.write_avro(path, table, codec="null")
        return partial(fastpipe.read_avro, path)
    if kind == "csv":
        pyarrow.csv.write_csv(table, path)
        return partial(fastpipe.read_csv, path)
    pyarrow.parquet.write_table(table, path, row_group_size=50_000)
    return partial(fastpipe.read_parquet, path)


def count(reader: fastpipe.Reader) -> tuple[int, float]:
    """Reads a pass, and returns its number of rows and a sum."""
    rows, total = 0, 0.0
    for batch in reader:
        rows += len(batch["x0"])
        total += float(batch["x0"].sum(dtype="f8"))
    return rows, total


def masking(reader: fastpipe.Reader) -> tuple[int, float]:
    """Reads a pass and masks its batches."""
    rows, total = 0, 0.0
    for batch in reader:
        mask = batch["key"] < KEYS // 10
        few = {name: values[mask] for name, values in batch.items()}
        rows += len(few["x0"])
        total += float(few["x0"].sum(dtype="f8"))
    return rows, total


def main(bench: Bench) -> None:
    """Measures each kind of file."""
    columns = ("masking, ms|,.0f", "first epoch|,.0f", "later epoch|,.0f", "times as fast, first|,.2f", "later|,.2f")
    row = bench.table("file", "the rows that pass", *columns, title="10 % of the rows of a file")
    with tempfile.TemporaryDirectory() as folder:
        for kind in bench.args.kinds:
            for where in ("spread", "together"):
                table = table_of(bench.args.rows, where == "spread")
                opened = write(kind, table, Path(folder) / f"{where}.{kind}")
                reader = opened(batch_size=BATCH_SIZE)
                found = opened(batch_size=BATCH_SIZE).filter(KEPT)
                ways: dict[str, Callable[[], Any]] = {
                    "masking": partial(masking, reader),
                    "first": lambda reader=reader: count(reader.filter(KEPT)),  # type: ignore[misc]
                    "later": partial(count, found),
                }
                turns = take_turns(ways, bench.rounds)
                results = {name: turns.turns[name][0].result for name in ways}
                rows, total = results["masking"]
                if not all(each[0] == rows and np.isclose(each[1], total) for each in results.values()):
                    raise RuntimeError(f"the contenders read other rows: {results}")
                faster = [turns.ratio("masking", name).median for name in ("first", "later")]
                row(kind, where, *(turns.median(name) * 1e3 for name in ways), *faster)


if __name__ == "__main__":
    kinds = ["avro", "csv", "parquet"]
    Bench("filters", __doc__, packages=("numpy", "pyarrow"), rows=(2_000_000, 200_000), kinds=kinds).run(main)
