"""Compares writing Avro with fastavro's writer, and polars' where it can: the same rows, in turns.

    python benches/writing.py [--rows 100000] [--rounds 5] [--threads 1] [--codecs null,deflate]

fastpipe is given an Arrow table, polars its frame of it, fastavro Python's dicts of it: what each takes. Making these
isn't measured. Each writes to the same directory; fastpipe also waits until the file is on its disk. polars writes
blocks of its own size, and not every type, so that it has fewer cells.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import fastavro
import numpy as np
import polars as pl
import pyarrow as pa

import fastpipe

WANTED = 3.0


def cases(rows: int) -> dict[str, pa.Table]:
    """The tables: flat columns, an embedding, and what is nested and null."""
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
    """By name, what writes the table."""
    paths = {name: os.path.join(folder, f"{name}.avro") for name in ("fastpipe", "fastavro", "polars")}
    found: dict[str, Callable[[], object]] = {}

    def fastpipes() -> None:
        fastpipe.write_avro(paths["fastpipe"], table, codec=codec, num_threads=threads)

    found["fastpipe"] = fastpipes
    fastpipes()
    schema = fastavro.parse_schema(fastpipe.AvroFile(paths["fastpipe"]).schema)
    records = table.to_pylist()

    def fastavros() -> None:
        with open(paths["fastavro"], "wb") as file:
            # Blocks of the same size.
            fastavro.writer(file, schema, records, codec=codec, sync_interval=64 << 10)

    found["fastavro"] = fastavros
    if codec in ("null", "deflate", "snappy"):
        frame = pl.DataFrame(table)

        def polars() -> None:
            compression: Any = "uncompressed" if codec == "null" else codec
            frame.write_avro(paths["polars"], compression=compression)

        try:
            polars()
        except Exception as error:
            print(f"polars: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        else:
            found["polars"] = polars
    fastavros()
    check(paths["fastpipe"], records)
    return found


def check(path: str, records: list[dict[str, object]]) -> None:
    """Whether fastavro reads what was given."""
    with open(path, "rb") as file:
        for expected, found in zip(records, fastavro.reader(file), strict=True):
            if expected != found:
                raise AssertionError(f"{found!r} was written for {expected!r}")


def main() -> int:
    """Runs the comparison; fails where fastpipe isn't as much faster than fastavro as it is meant to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--codecs", default="null,deflate,snappy,zstandard")
    arguments = parser.parse_args()
    print("| rows | codec | fastpipe, rows/s | fastavro, rows/s | polars, rows/s | times fastavro | times polars |")
    print("|---|---|---|---|---|---|---|")
    least = float("inf")
    for name, table in cases(arguments.rows).items():
        for codec in arguments.codecs.split(","):
            with tempfile.TemporaryDirectory() as folder:
                sides = writers(table, codec, arguments.threads, folder)
                times: dict[str, list[float]] = {side: [] for side in sides}
                for number in range(arguments.rounds):
                    for side in sorted(sides, reverse=bool(number % 2)):
                        start = time.perf_counter()
                        sides[side]()
                        times[side].append(time.perf_counter() - start)
            rates = {side: f"{table.num_rows / statistics.median(seconds):,.0f}" for side, seconds in times.items()}

            def ratio(other: str, times: dict[str, list[float]] = times) -> float | None:
                if other not in times:
                    return None
                pairs = zip(times["fastpipe"], times[other], strict=True)
                return statistics.median(b / a for a, b in pairs)

            over, polars = ratio("fastavro"), ratio("polars")
            assert over is not None
            least = min(least, over)
            shown = "" if polars is None else f"{polars:.2f}"
            cells = (name, codec, rates["fastpipe"], rates["fastavro"], rates.get("polars", ""), f"{over:.2f}", shown)
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nat least {least:.2f} times as fast as fastavro; wanted: {WANTED}")
    return 0 if least >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
