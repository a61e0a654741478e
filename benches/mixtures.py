"""Compares a mixture of four readers with reading the same rows from one reader after the other.

Each reader has a file with an integer column, 20 columns of float32 and a text column, and reads it shuffled or in
order, in batches of 1,024 rows. The weights are 4, 3, 2 and 1, and the files have rows in this proportion, so both
contenders read each row once. They take turns, on the same number of threads. The sums of a column are compared.
`unlike kinds` mixes Avro, CSV, Parquet and Arrow files.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
from harness import Bench, take_turns
from harness.tables import FLOATS, count, keyed_table, write

BATCH_SIZE = 1024
WEIGHTS = (4, 3, 2, 1)
FEATURES: dict[str, Any] = {"key": fastpipe.DenseSpec((), "int32")}
FEATURES |= {f"x{i}": fastpipe.DenseSpec((), "float32") for i in range(FLOATS)}
FEATURES |= {"text": fastpipe.DenseSpec((), "string")}


def main(bench: Bench) -> None:
    """Measures each kind of file."""
    columns = ("apart, ms|,.0f", "mixed, ms|,.0f", "mixed over apart|,.2f")
    options = {"features": FEATURES, "batch_size": BATCH_SIZE, "num_threads": bench.args.threads}
    row = bench.table("files", "order", *columns, title="Four readers")
    with tempfile.TemporaryDirectory() as folder:
        for kind in bench.args.kinds:
            each = ("avro", "csv", "parquet", "arrow") if kind == "unlike kinds" else (kind,) * len(WEIGHTS)
            opened = []
            for number, (own, weight) in enumerate(zip(each, WEIGHTS, strict=True)):
                draw = np.random.default_rng(number)
                keys = draw.integers(0, 100, bench.args.rows * weight // sum(WEIGHTS))
                opened.append(write(own, keyed_table(keys, draw), Path(folder) / f"{kind} {number}", unit_rows=20_000))
            for order in ("in order", "shuffled"):
                shuffle: dict[str, Any] = {"shuffle": True, "seed": 1} if order == "shuffled" else {}
                readers = [make(**options, **shuffle) for make in opened]
                mixed = fastpipe.mix(readers, WEIGHTS, stop="all_exhausted", num_threads=bench.args.threads)
                ways = {"apart": partial(count, *readers), "mixed": partial(count, mixed)}
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
