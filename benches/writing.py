"""Compares writing Avro with fastavro's writer, and with polars' writer if it supports the types, in turn.

Each library writes the same rows from its native input: fastpipe an Arrow table, polars a data frame, fastavro Python
dicts. Creating the inputs isn't timed. All files are written to the same directory; fastpipe also waits until its file
is on disk. polars uses a different block size and doesn't support every type, so some of its cells are empty.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import fastavro
import numpy as np
import polars as pl
import pyarrow as pa

import fastpipe
from harness import Bench, CannotError, take_turns

WANTED = 3.0
NAMES = ("fastpipe", "fastavro", "polars")


def cases(rows: int) -> dict[str, pa.Table]:
    """Returns the tables: flat columns, an embedding, and nested columns with nulls."""
    draw = np.random.default_rng(1)
    words = np.array([f"word{i}" for i in range(1000)])
    flat = {f"i{i}": draw.integers(0, 10**6, rows) for i in range(6)} | {f"f{i}": draw.random(rows) for i in range(6)}
    embedding = draw.random((rows // 4, 64), dtype="float32")
    nulls = draw.random(rows // 2) < 0.2
    nested = {
        "id": pa.array(draw.integers(0, 10**9, rows // 2), mask=nulls),
        "word": pa.array(words[draw.integers(0, 1000, rows // 2)].tolist()),
        "items": pa.array([draw.integers(0, 500, size).tolist() for size in draw.integers(0, 10, rows // 2)]),
        "user": pa.array([{"age": int(age), "country": "NL"} for age in draw.integers(18, 90, rows // 2)]),
    }
    return {
        "12 numbers": pa.table(flat | {"word": words[draw.integers(0, 1000, rows)].tolist()}),
        "float[64]": pa.table({"x": pa.FixedSizeListArray.from_arrays(embedding.ravel(), 64)}),
        "nested, nulls": pa.table(nested),
    }


def writers(table: pa.Table, codec: Any, threads: int, folder: str) -> dict[str, Callable[[], object]]:
    """Returns the functions that write the table, by library."""
    paths = {name: os.path.join(folder, f"{name}.avro") for name in NAMES}
    frame, records = pl.DataFrame(table), table.to_pylist()
    ours = partial(fastpipe.write_avro, paths["fastpipe"], table, codec=codec, num_threads=threads)
    ours()
    with open(paths["fastpipe"], "rb") as file:
        for expected, found in zip(records, fastavro.reader(file), strict=True):
            assert expected == found, f"{found!r} was written for {expected!r}"
    schema = fastavro.parse_schema(fastpipe.avro.AvroFile(paths["fastpipe"]).schema)

    def by_fastavro() -> None:
        with open(paths["fastavro"], "wb") as file:
            # The same block size as fastpipe's.
            fastavro.writer(file, schema, records, codec=codec, sync_interval=64 << 10)

    def by_polars() -> None:
        compression: Any = "uncompressed" if codec == "null" else codec
        try:
            frame.write_avro(paths["polars"], compression=compression)
        except Exception as error:
            raise CannotError(str(error).splitlines()[0][:100]) from error

    return {"fastpipe": ours, "fastavro": by_fastavro, "polars": by_polars}


def main(bench: Bench) -> None:
    """Measures all tables and codecs. Fails if the speedup of fastpipe over fastavro is below its target."""
    columns = [f"{name}, rows/s|,.0f" for name in NAMES]
    row = bench.table("rows", "codec", *columns, "times fastavro|,.2f", "times polars|,.2f")
    for (title, table), codec in itertools.product(cases(bench.args.rows).items(), bench.args.codecs):
        with tempfile.TemporaryDirectory() as folder:
            turns = take_turns(writers(table, codec, bench.args.threads, folder), bench.rounds)
        for name, error in turns.errors.items():
            bench.say(f"{name}: {error}")
        able = [name if name not in turns.errors else None for name in NAMES]
        rates = [table.num_rows / turns.median(name) if name else None for name in able]
        ratios = [turns.ratio(name, "fastpipe").median if name else None for name in able[1:]]
        row(title, codec, *rates, *ratios)
        bench.bound(f"{title}, {codec}: times fastavro's rate", ratios[0] or 0.0, least=WANTED)


if __name__ == "__main__":
    codecs = ["null", "deflate", "snappy", "zstandard"]
    sizes = {"rows": (100_000, 4_000), "threads": 1}
    Bench("writing", __doc__, rounds=(5, 2), packages=("fastavro", "polars"), codecs=codecs, **sizes).run(main)
