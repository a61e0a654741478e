"""Compares a mixture of four readers with reading the same rows from one reader after the other.

Each reader has a file with an integer column, 20 columns of float32 and a text column, and reads it shuffled or in
order, in batches of 1,024 rows. The weights are 4, 3, 2 and 1, and the files have rows in this proportion, so both
contenders read each row once. They take turns, on the same number of threads. The sums of a column are compared.
`unlike kinds` mixes Avro, CSV, Parquet and Arrow files.
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
import pyarrow.feather
import pyarrow.parquet

import fastpipe
from harness import Bench, take_turns

BATCH_SIZE = 1024
FLOATS = 20
WEIGHTS = (4, 3, 2, 1)
FEATURES: dict[str, Any] = {"key": fastpipe.DenseSpec((), "int32")}
FEATURES |= {f"x{i}": fastpipe.DenseSpec((), "float32") for i in range(FLOATS)}
FEATURES |= {"text": fastpipe.DenseSpec((), "string")}


def table_of(rows: int, seed: int) -> pa.Table:
    """Returns random rows."""
    draw = np.random.default_rng(seed)
    columns: dict[str, Any] = {"key": draw.integers(0, 100, rows).astype("int32")}
    columns |= {f"x{i}": draw.random(rows, "float32") for i in range(FLOATS)}
    table = pa.table(columns | {"text": pa.array([f"the text of row {i}" for i in range(rows)])})
    return table.cast(pa.schema([field.with_nullable(False) for field in table.schema]))


def write(kind: str, table: pa.Table, path: Path) -> Callable[..., fastpipe.Reader]:
    """Writes a file, and returns a function that opens it."""
    if kind == "avro":
        fastpipe.write_avro(path, table, codec="null")
        return partial(fastpipe.read_avro, path, features=FEATURES)
    if kind == "csv":
        pyarrow.csv.write_csv(table, path)
        return partial(fastpipe.read_csv, path, features=FEATURES)
    if kind == "arrow":
        pyarrow.feather.write_feather(table, path, chunksize=20_000, compression="uncompressed")
        return partial(fastpipe.read_arrow, path, features=FEATURES)
    pyarrow.parquet.write_table(table, path, row_group_size=20_000)
    return partial(fastpipe.read_parquet, path, features=FEATURES)


def count(readers: list[fastpipe.Reader]) -> tuple[int, float]:
    """Reads a pass of each reader, and returns the number of rows and a sum."""
    rows, total = 0, 0.0
    for reader in readers:
        for batch in reader:
            rows += len(batch["x0"])
            total += float(batch["x0"].sum(dtype="f8"))
    return rows, total


def main(bench: Bench) -> None:
    """Measures each kind of file."""
    columns = ("apart, ms|,.0f", "mixed, ms|,.0f", "mixed over apart|,.2f")
    row = bench.table("files", "order", *columns, title="Four readers")
    with tempfile.TemporaryDirectory() as folder:
        for kind in bench.args.kinds:
            each = ("avro", "csv", "parquet", "arrow") if kind == "unlike kinds" else (kind,) * len(WEIGHTS)
            opened = []
            for number, (own, weight) in enumerate(zip(each, WEIGHTS, strict=True)):
                table = table_of(bench.args.rows * weight // sum(WEIGHTS), number)
                opened.append(write(own, table, Path(folder) / f"{kind} {number}"))
            for order in ("in order", "shuffled"):
                shuffle: dict[str, Any] = {"shuffle": True, "seed": 1} if order == "shuffled" else {}
                readers = [make(batch_size=BATCH_SIZE, num_threads=bench.args.threads, **shuffle) for make in opened]
                mixed = fastpipe.mix(readers, WEIGHTS, stop="all_exhausted", num_threads=bench.args.threads)
                ways = {"apart": partial(count, readers), "mixed": partial(count, [mixed])}
                turns = take_turns(ways, bench.rounds)
                apart, together = (turns.turns[name][0].result for name in ways)
                if apart[0] != together[0] or not np.isclose(apart[1], together[1]):
                    raise RuntimeError(f"the contenders read other rows: {apart} and {together}")
                row(kind, order, *(turns.median(name) * 1e3 for name in ways), turns.ratio("mixed", "apart").median)


if __name__ == "__main__":
    kinds = ["avro", "csv", "parquet", "arrow", "unlike kinds"]
    Bench("mixtures", __doc__, packages=("numpy", "pyarrow"), rows=(2_000_000, 20_000), kinds=kinds, threads=1).run(
        main
    )
