"""Measures the memory that reading needs.

A new process reads while one of its threads samples RssAnon, its resident anonymous memory: buffers, batches, and the
heap, but neither file pages nor shared libraries.

`--parts` selects from two parts:

* `file`: Reads a generated file of about 1 GB (dataset a) in batches of 1,024 rows. The peak must not depend on the
  size of the file and must stay below the limit. `--held` is the number of batches that the consumer keeps while it
  requests the next one: 1 corresponds to a `for` loop, 0 drops each batch first. `--times 10 --order window --limit-mb
  600` reads 10 GB in window order.
* `limits`: Reads with a memory_limit that is a multiple of the minimum, which the bench takes from the LimitError. The
  growth of RssAnon since the start of the pass must stay below 1.1 times the limit, plus two batches for the consumer
  and 1 MB for the heap. `by` is the growth without the two batches and the 1 MB, divided by the limit.
"""

from __future__ import annotations

import collections
import gc
import itertools
import json
import resource
import threading
import time
from typing import Any

import generate
from harness import MB, Bench, sampled
from harness.children import call
from harness.data import least_limit, nbytes, open_reader

INTERVAL = 0.005
ROWS = {"a": 16_384, "b": 65_536, "c": 65_536, "d": 131_072, "e": 65_536, "f": 32_768}
OVER = 0.10
SMALL = 1_000_000
"""Allowance in bytes for the heap of Python and of the threads, which doesn't depend on the limit."""


def file_child(paths: list[str], order: str, batch: int, held: int, threads: int) -> dict[str, Any]:
    """Reads files and reports the memory and time used."""
    import fastpipe  # noqa: F401 - imported before memory is measured

    with sampled(INTERVAL) as peak:
        begun, rows = time.perf_counter(), 0
        with open_reader(paths, "a", order, batch_size=batch, num_threads=threads or "auto") as reader:
            last: collections.deque[Any] = collections.deque(maxlen=held)
            # A `for` loop would keep a reference to the previous batch.
            batches = iter(reader)
            while (values := next(batches, None)) is not None:
                rows += len(values["user_id"])
                last.append(values)
                del values
        seconds = time.perf_counter() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"idle": peak.idle, "peak": peak.bytes, "samples": peak.samples}
    return found | {"rows": rows, "seconds": seconds, "max_rss": most}


def limits_child(dataset: str, codec: str, order: str, batch: int, times: int, factor: float) -> dict[str, Any]:
    """Reads with a memory limit and reports the memory used."""
    paths = [str(generate.generate(dataset, ROWS[dataset], codec=codec)[0])] * times
    limit = int(least_limit(open_reader(paths, dataset, order, batch_size=batch)) * factor)
    reader = open_reader(paths, dataset, order, batch_size=batch, memory_limit=limit)
    gc.collect()
    threading.Thread(target=int).start()  # Allocates the memory of the first thread before the pass.
    held = 0
    with sampled() as peak:
        for values in reader:
            held = max(held, nbytes(values))
    reserved = reader.stats()["memory"]["most_reserved"]
    return {"limit": limit, "beyond": peak.bytes - peak.idle, "held": held, "reserved": reserved}


def part_file(bench: Bench) -> None:
    args = bench.args
    path, info = generate.generate("a", args.records, codec=args.codec, log=bench.say)
    request = {"order": args.order, "batch": args.batch_size, "held": args.held, "threads": args.threads}
    found = call(__file__, do="file", paths=[str(path)] * args.times, **request)
    columns = ["file, MB|,.0f", "rows a batch|", "batches kept|", "idle, MB|,.0f", "peak of RssAnon, MB|,.0f"]
    columns += ["limit, MB|,.0f", "samples|", "seconds|,.1f", "greatest resident size with all file pages, MB|,.0f"]
    sizes = {name: found[name] / MB for name in ("idle", "peak", "max_rss")}
    row = bench.table("codec", *columns)
    row(
        *(args.codec, info["bytes"] / MB, args.batch_size, args.held, sizes["idle"], sizes["peak"], args.limit_mb),
        *(found["samples"], found["seconds"], sizes["max_rss"]),
    )
    rows = info["rows"] * args.times
    bench.bound("records read", found["rows"], least=rows, most=rows)
    bench.bound("peak of RssAnon in MB", sizes["peak"], most=args.limit_mb)


def part_limits(bench: Bench) -> None:
    args, orders = bench.args, ("sequential", "window")
    sizes = [f"{name}, MB|,.1f" for name in ("limit", "reserved", "beyond idle", "2 batches")]
    columns = ("data", "codec", "order", "times the least", *sizes, "by|,.3f", "kept")
    row = bench.table(*columns, title="Limits that are kept")
    for dataset, codec, order, factor in itertools.product(args.datasets, ("null", "deflate"), orders, args.factors):
        request = {"dataset": dataset, "codec": codec, "order": order, "factor": factor}
        found = call(__file__, do="limits", batch=args.batch_size, times=2 if bench.quick else 4, **request)
        by = (found["beyond"] - 2 * found["held"] - SMALL) / found["limit"]
        what = f"({dataset}) {codec} {order}, {factor} x least: RssAnon by the limit"
        mark = bench.bound(what, by, most=1 + OVER)
        each = found["limit"], found["reserved"], found["beyond"], 2 * found["held"]
        row(f"({dataset})", codec, order, f"{factor:g}", *(size / MB for size in each), by, mark)


PARTS = {"file": part_file, "limits": part_limits}
CHILDREN: dict[str, Any] = {"file": file_child, "limits": limits_child}


def main(bench: Bench) -> None:
    """Measures child processes. The bench fails if one exceeds its memory bound."""
    if bench.args.child:
        request = json.loads(bench.args.child)
        print(json.dumps(CHILDREN[request.pop("do")](**request)))
        raise SystemExit
    for part in bench.args.parts:
        PARTS[part](bench)


if __name__ == "__main__":
    what: dict[str, Any] = {
        "records": 400_000,
        "batch_size": 1024,
        "held": 1,
        "threads": 0,
        "limit_mb": 300.0,
        "times": 1,
    }
    what |= {
        "order": "sequential",
        "datasets": (list("abcdef"), list("ac")),
        "factors": ([1.02, 1.25, 2.0, 4.0], [1.25]),
    }
    Bench("memory", __doc__, parts=["file"], codec="null", child="", **what).run(main)
