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

import fastpipe
from harness import Bench, take_turns
from harness.tables import count, keyed_table, write

BATCH_SIZE = 1024
KEYS = 100
KEPT = fastpipe.col("key") < KEYS // 10


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
                draw = np.random.default_rng(1)
                keys = draw.integers(0, KEYS, bench.args.rows)
                table = keyed_table(keys if where == "spread" else np.sort(keys), draw)
                opened = write(kind, table, Path(folder) / f"{where}.{kind}", unit_rows=50_000)
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
