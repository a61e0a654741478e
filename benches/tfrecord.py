"""Reads TFRecord files beside tf.data, in turn: `TFRecordDataset`, batched, then `parse_example` of each batch.

Both read the same file from the page cache in batches of 1,024 rows with the same number of threads, in sequence and
shuffled. tf.data shuffles records in a buffer, fastpipe all rows in windows, with as many rows. The walk for records is
part of fastpipe's time. Both verify the checksums of records.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import fastpipe
from harness import Bench, take_turns

BATCH = 1024
BUFFER = 32 * BATCH


class Table(NamedTuple):
    """A dataset: its batch, and the features of both readers."""

    batch: Callable[[np.random.Generator, int], dict[str, Any]]
    features: dict[str, Any]
    parsed: dict[str, Any]


def scalars(draw: np.random.Generator, rows: int) -> dict[str, Any]:
    floats = {f"x{i}": draw.standard_normal(rows).astype("float32") for i in range(8)}
    return floats | {f"n{i}": draw.integers(0, 1 << 20, rows) for i in range(8)}


def ragged(draw: np.random.Generator, rows: int) -> dict[str, Any]:
    offsets = np.r_[0, np.cumsum(draw.integers(0, 65, rows))]
    tokens = fastpipe.Ragged(draw.integers(0, 50_000, offsets[-1]), offsets)
    return {"label": draw.integers(0, 2, rows), "tokens": tokens}


def vectors(draw: np.random.Generator, rows: int) -> dict[str, Any]:
    return {"label": draw.integers(0, 2, rows), "x": draw.standard_normal((rows, 128)).astype("float32")}


_LABEL = fastpipe.DenseSpec((), "int64")
_FIXED = tf.io.FixedLenFeature
TABLES = {
    "8 floats and 8 integers": Table(
        scalars,
        {f"x{i}": fastpipe.DenseSpec((), "float32") for i in range(8)} | {f"n{i}": _LABEL for i in range(8)},
        {f"x{i}": _FIXED([], tf.float32) for i in range(8)} | {f"n{i}": _FIXED([], tf.int64) for i in range(8)},
    ),
    "float32[128] and a label": Table(
        vectors,
        {"label": _LABEL, "x": fastpipe.DenseSpec((128,), "float32")},
        {"label": _FIXED([], tf.int64), "x": _FIXED([128], tf.float32)},
    ),
    "0 to 64 integers and a label": Table(
        ragged,
        {"label": _LABEL, "tokens": fastpipe.RaggedSpec((None,), "int64")},
        {"label": _FIXED([], tf.int64), "tokens": tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64)},
    ),
}


def contenders(path: Path, table: Table, rows: int, threads: int, shuffled: bool) -> dict[str, Callable[[], Any]]:
    """Returns functions that read all batches of a file."""
    order: dict[str, Any] = {"shuffle": True, "shuffle_buffer": BUFFER, "seed": 1} if shuffled else {}

    def ours() -> None:
        options: dict[str, Any] = {"features": table.features, "batch_size": BATCH, "num_threads": threads}
        with fastpipe.read_tfrecord(path, **options, **order) as reader:
            assert sum(len(batch["label" if "label" in batch else "n0"]) for batch in reader) == rows

    def theirs() -> None:
        data = tf.data.TFRecordDataset(str(path))
        data = data.shuffle(BUFFER, seed=1) if shuffled else data
        parse = lambda records: tf.io.parse_example(records, table.parsed)  # noqa: E731
        data = data.batch(BATCH).map(parse, num_parallel_calls=threads, deterministic=True).prefetch(2)
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        found = 0
        for batch in data.with_options(options):
            found += len(batch["label" if "label" in batch else "n0"].numpy())
        assert found == rows

    return {"fastpipe": ours, "tf.data": theirs}


def main(bench: Bench) -> None:
    """Measures both readers on each dataset."""
    draw = np.random.default_rng(0)
    columns = ("fastpipe, rows/s|,.0f", "tf.data, rows/s|,.0f", "fastpipe is times as fast")
    row = bench.table("dataset", "order", "threads", *columns, title="Rows per second")
    with tempfile.TemporaryDirectory(prefix="fastpipe-bench-") as folder:
        for name, table in TABLES.items():
            path, rows = Path(folder) / f"{len(name)}.tfrecord", bench.args.rows
            counts = [min(10_000, rows - at) for at in range(0, rows, 10_000)]
            fastpipe.tfrecord.write_tfrecord(path, (table.batch(draw, count) for count in counts))
            for shuffled in (False, True):
                for threads in (1, 2):
                    turns = take_turns(contenders(path, table, rows, threads, shuffled), bench.rounds)
                    speeds = [rows / turns.median(side) for side in ("fastpipe", "tf.data")]
                    ratio = turns.ratio("tf.data", "fastpipe")
                    row(name, "shuffled" if shuffled else "sequential", str(threads), *speeds, str(ratio))


if __name__ == "__main__":
    Bench("tfrecord", __doc__, rounds=(5, 3), packages=("tensorflow", "tensorflow-cpu"), rows=(200_000, 20_000)).run(
        main
    )
