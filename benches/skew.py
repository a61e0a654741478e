"""Measures how even the load of the threads is where blocks are uneven.

Four files, each with another codec (null, deflate, snappy, zstandard), whose blocks have log-normal sizes: from the 2nd
to the 98th percentile they span three decades, 1 KB to 1 MB. Passes record what every task took. From that:

* `engine` is the makespan of the pass, from its first task to the end of its last one, divided by its lower bound: the
  greater one of all work by the number of threads, and of the longest stretch that can't be split. Passing over
  records counts as time, but not as work that had to be done. Wanted: at most 1.1.
* `rows` and `blocks` are what the same tasks would have taken, with the costs that were measured, if the rows (the
  blocks) of the batches in flight were cut into as many contiguous shares of equal numbers as there are threads. (Only
  without shuffling: there every task's rows are known.)
* `longest` is the longest stretch, by the bound; `skipping` passing over records, by all work; `consumer` the part of
  the makespan in which the consumer, which only drops batches, had one in its hands: it needs a core as well.
* `model error`: what the model says of itself in `stats()`; `tasks off`: by how much tasks took another time than was
  expected of them when they were given out, as a fraction of what they took.

The median of the rounds. A machine on which other programs run adds to the makespan, and not to the bound.
"""

from __future__ import annotations

import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
import generate
from harness import Bench, take_turns
from harness.data import cores, drain, open_reader, recording

DATASETS = "cf"
MOST = 1.1
Tasks = list[tuple[str, int, int, int, int, int]]


def write(dataset: str, codec: str, blocks: int, seed: int) -> Path:
    """Writes a file of uneven blocks, unless it is there."""
    path = generate.CACHE / f"skew-{dataset}-{blocks}-{codec}-s{seed}-v1.avro"
    if path.exists():
        generate.page_in(path)
        return path
    rng = np.random.default_rng([seed, ord(dataset), len(codec)])
    # Median 32 KB; 2.05 deviations on each side are three decades.
    sizes = np.exp(rng.normal(np.log(32_768), np.log(1000) / 4.1, blocks))
    row = 200
    rows = np.maximum(sizes / row, 1).astype("i8")
    sync = rng.bytes(16)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    flat, ends = np.empty(0, "u1"), np.empty(0, "i8")
    with partial.open("wb") as file:
        file.write(generate._header(dataset, codec, sync))
        for count in rows:
            while ends.size < count:
                sums = generate.Sums()
                columns = [generate.encode(column, rng, generate.CHUNK, sums) for column in generate.DATASETS[dataset]]
                more, each = generate.weave(columns)
                ends = np.concatenate([ends, flat.size + np.cumsum(each)])
                flat = np.concatenate([flat, more])
            end = int(ends[count - 1])
            data = generate.CODECS[codec](flat[:end].tobytes())
            file.write(generate.varints(np.array([int(count), len(data)]))[0].tobytes() + data + sync)
            flat, ends = flat[end:], ends[count:] - end
    partial.replace(path)
    generate.page_in(path)
    return path


def uniform(tasks: Tasks, rows: list[int], batch: int, threads: int, ahead: int) -> dict[str, float]:
    """Nanoseconds that shares of equal numbers of rows, or of blocks, would have taken with what tasks took."""
    starts = np.concatenate([[0], np.cumsum(rows)])
    total = int(starts[-1])
    took: dict[int, list[tuple[int, int]]] = {}
    for activity, number, _, start, end, _ in tasks:
        if activity == "decoding":
            took.setdefault(number, []).append((start, end - start))
    found = {"rows": 0.0, "blocks": 0.0}
    flight: list[tuple[int, int]] = []
    batches = -(-total // batch)
    for number in range(batches):
        low, high = number * batch, min((number + 1) * batch, total)
        first, last = np.searchsorted(starts, [low, high - 1], side="right") - 1
        runs = [min(high, starts[i + 1]) - max(low, starts[i]) for i in range(first, last + 1)]
        spans = sorted(took.get(number, []))
        if len(spans) != len(runs):
            return {}  # A run was cut: which rows a task had isn't known.
        flight += [(int(run), span) for run, (_, span) in zip(runs, spans, strict=True)]
        if (number + 1) % ahead and number + 1 < batches:
            continue
        counts, costs = np.array(flight, "f8").T
        for name, weights in (("rows", counts), ("blocks", np.ones(len(flight)))):
            edges = np.concatenate([[0], np.cumsum(weights)])
            # Costs are spread evenly over the rows of a run.
            spent = np.interp(np.linspace(0, edges[-1], threads + 1), edges, np.concatenate([[0], np.cumsum(costs)]))
            found[name] += float(np.diff(spent).max())
        flight = []
    return found


def measure(reader: fastpipe.Reader, rows: list[int] | None, threads: int) -> dict[str, float]:
    """Reads a pass. Returns the ratios, and the model's error."""
    drain(reader)
    assert reader._cursor.position is not None
    tasks: Tasks = reader._cursor.position.tasks()
    stats = reader.stats()
    seconds = stats["seconds"]
    work = 1e9 * sum(seconds[name] for name in ("reading", "decompressing", "indexing", "decoding", "assembling"))
    work += 1e9 * seconds["planning"]
    longest = max(end - start for _, _, _, start, end, _ in tasks)
    bound = max(work / threads, longest)
    span = max(task[4] for task in tasks) - min(task[3] for task in tasks)
    errors = [(model["error"], model["predictions"]) for model in stats["model"] if model["error"] is not None]
    found = {
        "engine": span / bound,
        "longest": longest / bound,
        "skipping": 1e9 * seconds["skipping"] / work,
        "consumer": 1e9 * seconds["waiting_for_consumer"] / span,
        "error": sum(e * n for e, n in errors) / max(sum(n for _, n in errors), 1),
    }
    # All stretches that expected something, by what they took.
    known = [(end - start, expected) for _, _, _, start, end, expected in tasks if expected > 0]
    found["tasks off"] = sum(abs(t - e) for t, e in known) / sum(t for t, _ in known)
    if rows is not None:
        split = uniform(tasks, rows, reader.batch_size, threads, threads + 2)
        # Blocks that were opened to pass over records aren't in the stretches that decoded: spread over all of them.
        decoding = sum(end - start for activity, _, _, start, end, _ in tasks if activity == "decoding")
        others = 1e9 * (seconds["assembling"] + seconds["planning"])
        scale = (work - others) / decoding
        found |= {name: (nanos * scale + others / threads) / bound for name, nanos in split.items()}
    return found


def main(bench: Bench) -> None:
    """Measures all files. Ratios over the target fail nothing: they are times."""
    args = bench.args
    columns: tuple[str, ...] = (
        "threads|",
        "engine|,.3f",
        "met",
        "rows|,.3f",
        "blocks|,.3f",
        "longest|,.3f",
        "skipping|,.3f",
    )
    columns += ("consumer|,.3f", "model error|,.3f", "tasks off|,.3f")
    row = bench.table("data", "order", "batch", *columns)
    generate.CACHE.mkdir(parents=True, exist_ok=True)
    for dataset in args.datasets:
        files = [str(write(dataset, codec, args.blocks, args.seed)) for codec in args.codecs]
        for threads in [n for n in (2, 4, 8, 16) if n <= len(cores())]:
            readers = {
                (order, batch): recording(open_reader(files, dataset, order, batch_size=batch, num_threads=threads))
                for batch in args.batch_sizes
                for order in ("sequential", "window")
            }
            rows = [int(n) for n in next(iter(readers.values()))._data.handle.unit_rows()]
            ways = {
                key: partial(measure, reader, rows if key[0] == "sequential" else None, threads)
                for key, reader in readers.items()
            }
            turns = take_turns(ways, bench.rounds)
            for (order, batch), taken in turns.turns.items():
                found = [turn.result for turn in taken.values()]
                names = ("engine", "rows", "blocks", "longest", "skipping", "consumer", "error", "tasks off")
                values = {name: [one[name] for one in found if name in one] for name in names}
                engine, *others = (statistics.median(one) if one else None for one in values.values())
                assert engine is not None
                what = f"({dataset}) {order}, batches of {batch}, {threads} threads: makespan by its bound"
                row(
                    f"({dataset})", order, f"{batch:,}", threads, engine, bench.target(what, engine, most=MOST), *others
                )


if __name__ == "__main__":
    what: dict[str, Any] = {"datasets": list(DATASETS), "codecs": ["null", "deflate", "snappy", "zstandard"]}
    what |= {"blocks": (400, 100), "batch_sizes": ([256, 1024, 8192], [1024]), "seed": 1}
    Bench("skew", __doc__, rounds=(9, 3), **what).run(main)
