"""Measures the published figures of AvroTensorDataset, for both readers of tensorflow-io and for fastpipe.

https://www.linkedin.com/blog/engineering/open-source/open-sourcing-avrotensordataset reports milliseconds a step for a
schema of 6 scalars, 8 dense and 5 sparse features, as dataset (a) has. It also reports the throughput by the number of
threads, and how much training time was saved.

* `steps`: milliseconds a step at the published batch sizes. All readers have the same number of threads and cores.
  AvroRecordDataset reads fewer records, because it is slow.
* `threads`: records per second with codec deflate, by batch size and number of threads. "auto" is `AUTOTUNE` of
  AvroTensorDataset and `num_threads="auto"`. The process may use all cores.
* `training`: milliseconds a step of a small model on all cores. All readers run in the same TensorFlow. The time of the
  model is measured with a few batches that are held in memory.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import generate
from harness import Bench, CannotError, Turn, Turns, take_turns
from harness.children import Side, can, peers
from harness.data import cores
from peers.job import Job

PUBLISHED = {64: (40.0, 1.2, 33), 256: (160.0, 1.3, 123), 1024: (650.0, 4.0, 162)}
"""Batch size -> milliseconds a step of AvroRecordDataset and AvroTensorDataset, and the speedup."""
RECORD = "AvroRecordDataset"
ATDS = "AvroTensorDataset"
MODEL = "batches in memory"
AUTO = 0
"""Number of threads in a `Job` that leaves it to the reader."""
READERS = {
    RECORD: "avro-record-dataset",
    ATDS: "atds-epochs",
    "fastpipe.tf.atds": "fastpipe-atds",
    "fastpipe": "fastpipe",
}
TRAINERS = {
    MODEL: "train-held",
    RECORD: "train-avro-record",
    ATDS: "train-atds",
    "fastpipe.tf.atds": "train-fastpipe",
}


def rows_of(bench: Bench, name: str) -> int:
    """Returns the number of records that a reader reads."""
    rows: int = bench.args.rows
    return rows // 4 if name == RECORD else rows


def measure_steps(bench: Bench, threads: int) -> Turns:
    """Measures all readers with all batch sizes. Returns turns by reader and batch size."""
    sides: dict[Any, Side] = {}
    errors: dict[Any, str] = {}
    with peers(bench, {name: (reader, cores()[-threads:]) for name, reader in READERS.items()}) as started:
        for name, reader in READERS.items():
            path, info = generate.generate("a", rows_of(bench, name), codec=bench.args.codec, log=bench.say)
            for batch in PUBLISHED:
                job = Job(str(path), "a", batch, threads=threads)
                sides[name, batch] = Side(reader, job, info["sums"], name, rows=info["rows"])
                sides[name, batch].peer = started[name]
            try:
                # The values don't depend on the batch size.
                sides[name, min(PUBLISHED)].check(memory=False)
            except CannotError as error:
                errors |= {(name, batch): str(error) for batch in PUBLISHED}
        able = {key: side for key, side in sides.items() if key not in errors}
        turns = take_turns(able, bench.rounds, warm=1, budget=15)
    turns.errors |= errors
    for key, reason in turns.errors.items():
        bench.fail(f"{key}, {threads} threads: {reason}")
    return turns


def steps(bench: Bench) -> None:
    """Measures milliseconds a step."""
    counts = [count for count in bench.args.threads if count <= len(cores())]
    measured = {}
    for count in counts:
        bench.say(f"steps, {count} threads")
        measured[count] = measure_steps(bench, count)
    heads = [f"{figure}, {batch:,} rows|,.2f" for figure in ("ms", "CPU ms") for batch in PUBLISHED]
    row = bench.table("threads", "reader", *heads, title="A step")
    row("published", RECORD, *(times[0] for times in PUBLISHED.values()))
    row("published", ATDS, *(times[1] for times in PUBLISHED.values()))
    for count, turns in measured.items():
        for name in READERS:
            cells: list[float | None] = []
            for figure, batch in itertools.product(("seconds", "cpu"), PUBLISHED):
                key = (name, batch)
                cells.append(1e3 * batch * turns.median(key, figure) if can(turns, key) else None)
            row(str(count), name, *cells)
    faster = [name for name in READERS if name != RECORD]
    heads = [f"{ATDS}, published|g", *(f"{name}|,.0f" for name in faster)]
    heads += [f"{name}, by CPU time|,.0f" for name in faster]
    row = bench.table("batch", "threads", *heads, title=f"Times as fast as {RECORD}")
    for batch, (_, _, published) in PUBLISHED.items():
        for count, turns in measured.items():
            if not turns.errors:
                pairs = itertools.product(("seconds", "cpu"), faster)
                ratios = [turns.ratio((RECORD, batch), (name, batch), figure).median for figure, name in pairs]
                row(f"{batch:,}", str(count), published, *ratios)


def threads(bench: Bench) -> None:
    """Measures the number of threads."""
    counts = [count for count in (1, 2, 4, 8, 16) if count <= len(cores())]
    path, info = generate.generate("a", bench.args.rows, codec="deflate", log=bench.say)
    names = [name for name in READERS if name != RECORD]
    heads = [f"{count} {'thread' if count == 1 else 'threads'}|,.0f" for count in counts]
    row = bench.table("reader", "batch", *heads, "auto|,.0f", "auto / best|,.2f", title="Records per second, deflate")
    with peers(bench, {name: (READERS[name], []) for name in names}) as readers:

        def read(name: str, batch: int, count: int) -> Turn:
            answer = readers[name].ask("read", Job(str(path), "a", batch, threads=count), 0.2)
            if "error" in answer or answer["rows"] != info["rows"]:
                raise CannotError(answer.get("error", "rows are missing"))
            return Turn(answer["seconds"] / answer["rows"], answer["cpu"] / answer["rows"])

        cells = [(name, batch, count) for name in names for batch in bench.args.batches for count in (*counts, AUTO)]
        turns = take_turns({cell: partial(read, *cell) for cell in cells}, bench.rounds)
    for cell, error in turns.errors.items():
        bench.fail(f"{cell}: {error}")
    for name in names:
        for batch in bench.args.batches:
            if not any(cell[:2] == (name, batch) for cell in turns.errors):
                best = min(counts, key=lambda count: turns.median((name, batch, count)))
                ratio = turns.ratio((name, batch, best), (name, batch, AUTO)).median
                rates = [1 / turns.median((name, batch, count)) for count in (*counts, AUTO)]
                row(name, f"{batch:,}", *rates, ratio)


def training(bench: Bench) -> None:
    """Measures the time of training."""
    batch = bench.args.batch_size
    columns = ["ms a step|,.1f", "of it waiting for input|.0%"]
    columns += [f"saved, of {name}'s|.0%" for name in (RECORD, ATDS)]
    row = bench.table(
        "width of the model", "input", *columns, "CPU ms|,.1f", title=f"Training, batches of {batch:,} rows"
    )
    with peers(bench, {name: (reader, []) for name, reader in TRAINERS.items()}) as readers:

        def read(name: str, width: int) -> Turn:
            path, info = generate.generate("a", rows_of(bench, name), codec=bench.args.codec, log=bench.say)
            answer = readers[name].ask("read", Job(str(path), "a", batch, threads=AUTO, width=width), 0.3)
            if "error" in answer or answer["rows"] != info["rows"]:
                raise CannotError(answer.get("error", "rows are missing"))
            return Turn(answer["seconds"] / answer["rows"] * batch, answer["cpu"] / answer["rows"] * batch)

        for width in bench.args.widths:
            turns = take_turns({name: partial(read, name, width) for name in TRAINERS}, bench.rounds)
            for name, error in turns.errors.items():
                bench.fail(f"training, {name}: {error}")
            for name in [name for name in TRAINERS if not turns.errors]:
                waiting = None if name == MODEL else 1 - turns.ratio(MODEL, name).median
                # The readers are listed from the slowest to the fastest.
                slower = list(TRAINERS)[1 : list(TRAINERS).index(name)]
                saved = [1 - turns.ratio(name, other).median if other in slower else None for other in (RECORD, ATDS)]
                row(str(width), name, 1e3 * turns.median(name), waiting, *saved, 1e3 * turns.median(name, "cpu"))


PARTS = {"steps": steps, "threads": threads, "training": training}


if __name__ == "__main__":
    what: dict[str, Any] = {
        "rows": (16_384, 4_096),
        "threads": [1, 2],
        "codec": "null",
        "batches": [64, 256, 1024, 4096],
    }
    what |= {"batch_size": 1024, "widths": ([64, 256, 1024], [64]), "parts": list(PARTS)}
    Bench("published", __doc__, rounds=(5, 1), **what).run(PARTS)
