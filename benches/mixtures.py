"""Compares mixtures with reading the same rows from the readers, or from one reader.

Files have an integer column, 20 columns of float32 and a text column, and are read shuffled or in order, in batches of
1,024 rows, on the same number of threads. `--parts` selects from two parts:

* `time`: Compares a mixture of four readers of a file each with reading one reader after the other. The weights are 4,
  3, 2 and 1, and the files have rows in this proportion, so both contenders read each row once. They take turns. The
  sums of a column are compared. `unlike kinds` mixes Avro, CSV, Parquet and Arrow files.
* `memory`: Compares a mixture of 100 readers of an Avro file each, which all begin new blocks and windows at the same
  time, with one reader of the 100 files. Each reads an epoch in a new process, where a thread samples RssAnon. `opened`
  is the growth up to the start of the pass, and `peak` the growth up to the maximum, in which `opened` is included.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
from harness import MB, Bench, sampled, take_turns
from harness.children import call
from harness.tables import FLOATS, count, keyed_table, write

BATCH_SIZE = 1024
WEIGHTS = (4, 3, 2, 1)
FEATURES: dict[str, Any] = {"key": fastpipe.DenseSpec((), "int32")}
FEATURES |= {f"x{i}": fastpipe.DenseSpec((), "float32") for i in range(FLOATS)}
FEATURES |= {"text": fastpipe.DenseSpec((), "string")}


READERS, MOST = 100, 1.2
"""Number of readers whose memory is measured, and the wanted ratio to one reader."""


def time_part(bench: Bench) -> None:
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


def child(paths: list[str], order: str, threads: int, mixed: bool) -> dict[str, Any]:
    """Reads an epoch of a mixture or of one reader, and returns its rows, memory in bytes, and number of threads."""
    options: dict[str, Any] = {"features": FEATURES, "batch_size": BATCH_SIZE, "num_threads": threads}
    options |= {"shuffle": True, "seed": 1} if order == "shuffled" else {}
    gc.collect()
    with sampled() as peak:
        before = most = len(os.listdir("/proc/self/task"))
        if mixed:
            readers = [fastpipe.read_avro(path, **options) for path in paths]
            reader = fastpipe.mix(readers, stop="all_exhausted", num_threads=threads)
        else:
            reader = fastpipe.read_avro(paths, **options)
        peak.sample()
        opened, rows = peak.bytes, 0
        for batch in reader:
            rows += len(batch["key"])
            most = max(most, len(os.listdir("/proc/self/task")))
    return {"rows": rows, "opened": opened - peak.idle, "peak": peak.bytes - peak.idle, "threads": most - before}


def memory_part(bench: Bench) -> None:
    """Measures the memory of a mixture of many readers."""
    columns = ("reader", "opened, MB|,.1f", "peak, MB|,.1f", "threads|", "over one|,.2f")
    row = bench.table("codec", "order", *columns, title=f"{READERS} Avro readers")
    with tempfile.TemporaryDirectory() as folder:
        for codec in ("null", "deflate"):
            paths = [str(Path(folder) / f"{codec} {number}.avro") for number in range(READERS)]
            for number, path in enumerate(paths):
                draw = np.random.default_rng(number)
                table = keyed_table(draw.integers(0, 100, bench.args.many_rows // READERS), draw)
                fastpipe.write_avro(path, table, codec=codec)
            for order in ("in order", "shuffled"):
                one, many = (
                    call(__file__, paths=paths, order=order, threads=bench.args.threads, mixed=mixed)
                    for mixed in (False, True)
                )
                if one["rows"] != many["rows"]:
                    raise RuntimeError(f"the contenders read {one['rows']} and {many['rows']} rows")
                for name, found in (("one", one), ("mixed", many)):
                    ratio = None if found is one else many["peak"] / one["peak"]
                    sizes = found["opened"] / MB, found["peak"] / MB
                    row(codec, order, name, *sizes, found["threads"], ratio)
                bench.target(f"memory over one reader, {codec}, {order}", many["peak"] / one["peak"], most=MOST)


PARTS = {"time": time_part, "memory": memory_part}


def main(bench: Bench) -> None:
    """Runs the selected parts, or a child."""
    if bench.args.child:
        print(json.dumps(child(**json.loads(bench.args.child))))
        raise SystemExit
    for part in bench.args.parts:
        PARTS[part](bench)


if __name__ == "__main__":
    what: dict[str, Any] = {"kinds": ["avro", "csv", "parquet", "arrow", "unlike kinds"], "parts": list(PARTS)}
    what |= {"rows": (2_000_000, 20_000), "many_rows": (1_000_000, 20_000), "threads": 1, "child": ""}
    Bench("mixtures", __doc__, packages=("numpy", "pyarrow"), **what).run(main)
