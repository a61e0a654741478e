"""Measures what limits of memory cost, and whether they are kept.

Four parts, named by `--parts`:

* `speed`: with 1.25 times the least possible memory_limit; the target is 80 % of the speed without a limit. Datasets
  (a) to (c), null and deflate, in sequence and by windows. Readers with and without a limit take turns in one process.
* `kept`: RssAnon, beyond what the process has before the pass starts, stays below the limit plus a tenth plus what the
  consumer holds, which is counted as two batches. Each figure is of a fresh process, which samples it in a thread.
  `by` is what exceeds that, by the limit.
* `large`: reading 10 GB of (a), a file of 1 GB ten times, by windows of 16,384 rows without a limit stays below 600 MB.
* `epochs`: 1,000 epochs of a small file grow nothing from the 100th on.

The least limit is taken from the LimitError.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import threading
from functools import partial
from typing import Any

import generate
from harness import MB, QUICK, Bench, rss_anon, sampled, take_turns
from harness.children import call
from harness.data import drain, least_limit, nbytes, open_reader

ROWS = {"a": 16_384, "b": 65_536, "c": 65_536, "d": 131_072, "e": 65_536, "f": 32_768}
ORDERS = ("sequential", "window")
SPEED_LEAST, OVER = 0.8, 0.10
SMALL = 1_000_000
"""Bytes that the heap of the process may grow by, whatever the limit: Python's, and the threads'."""


def path_of(dataset: str, codec: str, rows: int | None = None) -> str:
    """Returns the file of a dataset."""
    return str(generate.generate(dataset, rows or ROWS[dataset] // (4 if QUICK else 1), codec=codec)[0])


def speed(bench: Bench) -> None:
    """The cost of a limit of 1.25 times the least."""
    sizes = [f"{name}, MB|,.1f" for name in ("least", "limit", "most reserved", "most reserved without a limit")]
    row = bench.table(
        "data", "codec", "order", *sizes, "speed|,.3f", "met", title="Speed at 1.25 times the least limit"
    )
    datasets = [dataset for dataset in "abc" if dataset in bench.args.datasets]
    for dataset, codec, order in itertools.product(datasets, bench.args.codecs, ORDERS):
        # Several times: shuffled datasets must be larger than their window.
        paths = [path_of(dataset, codec, ROWS[dataset])] * 3
        plain = open_reader(paths, dataset, order, batch_size=bench.args.batch_size)
        least = least_limit(plain)
        limit = least * 5 // 4
        limited = open_reader(paths, dataset, order, batch_size=bench.args.batch_size, memory_limit=limit)
        turns = take_turns({"plain": partial(drain, plain), "limited": partial(drain, limited)}, bench.rounds)
        relative = turns.ratio("plain", "limited").median
        mark = bench.target(f"({dataset}) {codec} {order}: speed at 1.25 x least", relative, least=SPEED_LEAST)
        most = [reader.stats()["memory"]["most_reserved"] for reader in (limited, plain)]
        row(f"({dataset})", codec, order, *(size / MB for size in (least, limit, *most)), relative, mark)
        for reader in (plain, limited):
            reader.close()


def kept_child(dataset: str, codec: str, order: str, batch: int, times: int, factor: float) -> dict[str, Any]:
    """Reads with a limit and reports what memory that took."""
    paths = [path_of(dataset, codec, ROWS[dataset])] * times
    limit = int(least_limit(open_reader(paths, dataset, order, batch_size=batch)) * factor)
    reader = open_reader(paths, dataset, order, batch_size=batch, memory_limit=limit)
    gc.collect()
    threading.Thread(target=int).start()  # The first thread's memory isn't the pass's.
    held = 0
    with sampled() as peak:
        for values in reader:
            held = max(held, nbytes(values))
    reserved = reader.stats()["memory"]["most_reserved"]
    return {"limit": limit, "beyond": peak.bytes - peak.idle, "held": held, "reserved": reserved}


def kept(bench: Bench) -> None:
    """Whether limits are kept."""
    args = bench.args
    sizes = [f"{name}, MB|,.1f" for name in ("limit", "reserved", "beyond idle", "2 batches")]
    row = bench.table(
        "data", "codec", "order", "times the least", *sizes, "by|,.3f", "kept", title="Limits that are kept"
    )
    for dataset, codec, order, factor in itertools.product(args.datasets, args.codecs, ORDERS, args.factors):
        request = {"dataset": dataset, "codec": codec, "order": order, "factor": factor}
        found = call(__file__, do="kept", batch=args.batch_size, times=2 if bench.quick else 4, **request)
        by = (found["beyond"] - 2 * found["held"] - SMALL) / found["limit"]
        what = f"({dataset}) {codec} {order}, {factor} x least: RssAnon by the limit"
        mark = bench.bound(what, by, most=1 + OVER)
        each = found["limit"], found["reserved"], found["beyond"], 2 * found["held"]
        row(f"({dataset})", codec, order, f"{factor:g}", *(size / MB for size in each), by, mark)


def large_child(times: int, rows: int) -> dict[str, Any]:
    """Reads a large file several times by windows."""
    reader = open_reader([path_of("a", "null", rows)] * times, "a", "window")
    with sampled(0.005) as peak:
        drain(reader)
    return {"idle": peak.idle, "peak": peak.bytes, "reserved": reader.stats()["memory"]["most_reserved"]}


def large(bench: Bench) -> None:
    """Whether reading much takes little."""
    times = 1 if bench.quick else 10
    found = call(__file__, do="large", times=times, rows=400_000)
    sizes = [found[name] / MB for name in ("peak", "idle", "reserved")]
    mark = bench.bound("10 GB of (a) by windows: MB of RssAnon", sizes[0], most=600)
    columns = ("peak of RssAnon, MB|,.0f", "idle, MB|,.0f", "most reserved, MB|,.0f", "below 600 MB")
    row = bench.table("read", *columns, title="A large file by windows of 16,384 rows, no limit")
    row(f"(a) {times} GB", *sizes, mark)


def epochs_child(dataset: str, codec: str, order: str, epochs: int) -> list[int]:
    """Reads epoch after epoch."""
    reader = open_reader([path_of(dataset, codec, 4096)], dataset, order, batch_size=256)
    seen = []
    for epoch in range(1, epochs + 1):
        drain(reader)
        if epoch % 50 == 0:
            gc.collect()
            seen.append(rss_anon())
    return seen


def epochs(bench: Bench) -> None:
    """Whether memory grows with epochs."""
    count = 300 if bench.quick else 1000
    columns = ("after 100, MB|,.1f", f"after {count:,}, MB|,.1f", "kept")
    row = bench.table("data", "codec", "order", *columns, title="RssAnon by the number of epochs")
    for (dataset, codec), order in itertools.product((("c", "null"), ("f", "deflate")), ORDERS):
        seen = call(__file__, do="epochs", dataset=dataset, codec=codec, order=order, epochs=count)
        # Medians of three: a pool may hold a batch more at one time than at another.
        first, last = statistics.median(seen[1:4]) / MB, statistics.median(seen[-3:]) / MB
        mark = bench.bound(f"({dataset}) {codec} {order}: MB grown from epoch 100 to {count}", last - first, most=1.0)
        row(f"({dataset})", codec, order, first, last, mark)


PARTS = {"speed": speed, "kept": kept, "large": large, "epochs": epochs}
CHILDREN: dict[str, Any] = {"kept": kept_child, "large": large_child, "epochs": epochs_child}


def main(bench: Bench) -> None:
    """Measures all parts; the bench fails if a bound of memory is missed."""
    if bench.args.child:
        request = json.loads(bench.args.child)
        print(json.dumps(CHILDREN[request.pop("do")](**request)))
        raise SystemExit
    for part in bench.args.parts:
        PARTS[part](bench)


if __name__ == "__main__":
    what: dict[str, Any] = {
        "parts": list(PARTS),
        "datasets": (list("abcdef"), list("ac")),
        "batch_size": 1024,
        "child": "",
    }
    what |= {"codecs": ["null", "deflate"], "factors": ([1.02, 1.25, 2.0, 4.0], [1.25])}
    Bench("limits", __doc__, rounds=(9, 3), **what).run(main)
