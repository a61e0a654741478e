"""Measures how much memory reading a large file takes.

A fresh process reads a generated file of about 1 GB (dataset a) in batches of 1,024 rows, while a thread of it samples
RssAnon, the anonymous memory that is really there: buffers, batches and the heap, but neither the pages of the file nor
shared libraries. The peak must not depend on the size of the file, and must stay below the limit.

`--held` is the number of batches that are held while the next one is asked for: 1 is what a `for` loop does, 0 drops
each batch first.
"""

from __future__ import annotations

import collections
import json
import resource
import time
from typing import Any

import generate
from harness import MB, Bench, sampled
from harness.children import call
from harness.data import open_reader

INTERVAL = 0.005


def child(path: str, batch: int, held: int, threads: int) -> dict[str, Any]:
    """Reads the file and reports what it took."""
    import fastpipe  # noqa: F401 - imported before memory is measured

    with sampled(INTERVAL) as peak:
        begun, rows = time.perf_counter(), 0
        with open_reader(path, "a", batch_size=batch, num_threads=threads or "auto") as reader:
            last: collections.deque[Any] = collections.deque(maxlen=held)
            # A `for` loop would hold a batch itself.
            batches = iter(reader)
            while (values := next(batches, None)) is not None:
                rows += len(values["user_id"])
                last.append(values)
                del values
        seconds = time.perf_counter() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"idle": peak.idle, "peak": peak.bytes, "samples": peak.samples}
    return found | {"rows": rows, "seconds": seconds, "max_rss": most}


def main(bench: Bench) -> None:
    """Measures a child; the bench fails if the peak is over the limit."""
    args = bench.args
    if args.child:
        print(json.dumps(child(**json.loads(args.child))))
        raise SystemExit
    path, info = generate.generate("a", args.records, codec=args.codec, log=bench.say)
    found = call(__file__, path=str(path), batch=args.batch_size, held=args.held, threads=args.threads)
    columns: tuple[str, ...] = (
        "file, MB|,.0f",
        "rows a batch|",
        "batches kept|",
        "idle, MB|,.0f",
        "peak of RssAnon, MB|,.0f",
    )
    columns += ("limit, MB|,.0f", "samples|", "seconds|,.1f", "greatest resident size with all file pages, MB|,.0f")
    sizes = {name: found[name] / MB for name in ("idle", "peak", "max_rss")}
    row = bench.table("codec", *columns)
    row(
        *(args.codec, info["bytes"] / MB, args.batch_size, args.held, sizes["idle"], sizes["peak"], args.limit_mb),
        *(found["samples"], found["seconds"], sizes["max_rss"]),
    )
    bench.bound("records read", found["rows"], least=info["rows"], most=info["rows"])
    bench.bound("peak of RssAnon in MB", sizes["peak"], most=args.limit_mb)


if __name__ == "__main__":
    numbers: dict[str, Any] = {"records": 400_000, "batch_size": 1024, "held": 1, "threads": 0, "limit_mb": 300.0}
    Bench("memory", __doc__, codec="null", child="", **numbers).run(main)
