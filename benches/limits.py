"""Measures what limits of memory cost, and whether they are kept.

Four parts, named by `--parts`:

* `speed`: with 1.25 times the least possible memory_limit; the aim is 80 % of the speed without a limit. Data sets
  (a) to (c), null and deflate, in sequence and by windows. Readers with and without a limit take turns in one process,
  and the median of the ratios within rounds is shown.
* `kept`: RssAnon, beyond what the process has before the pass starts, stays below the limit plus a tenth plus what the
  consumer holds, which is counted as two batches. Each figure is of a process of its own; a thread of it samples. `by`
  is what there is beyond that, by the limit.
* `large`: reading 10 GB of (a), a file of 1 GB ten times, by windows of 16,384 rows without a limit stays below 600 MB.
* `epochs`: 1,000 epochs of a small file grow nothing from the 100th on.

The least limit is what the LimitError says.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import fastpipe
import generate
import loads

ROWS = {"a": 16_384, "b": 65_536, "c": 65_536, "d": 131_072, "e": 65_536, "f": 32_768}
ORDERS = ("sequential", "window")
SPEED_LEAST = 0.8
OVER = 0.10
SMALL = 1_000_000
"""Bytes that the process's own heap may grow by, whatever the limit: Python's, and the threads'."""


def open_reader(paths: list[str], dataset: str, order: str, batch: int = 1024, **options: Any) -> fastpipe.Reader:
    """A reader of a data set."""
    shuffle = {} if order == "sequential" else loads.window()
    return fastpipe.read_avro(paths, features=loads.features(dataset), batch_size=batch, **shuffle, **options)


def path_of(dataset: str, codec: str, rows: int | None = None) -> str:
    """The file of a data set."""
    rows = rows or ROWS[dataset] // (4 if loads.QUICK else 1)
    return str(generate.generate(dataset, rows, codec=codec)[0])


def speed(bounds: loads.Bounds, arguments: argparse.Namespace) -> None:
    """What a limit of 1.25 times the least takes."""
    columns = [("data", -4), ("codec", -8), ("order", -10), ("least", 9), ("limit", 9), ("speed", 6), ("", -6)]
    row = loads.table([*columns, ("most reserved", 13), ("unlimited", 9)])
    for dataset in [d for d in "abc" if d in arguments.datasets]:
        for codec in arguments.codecs.split(","):
            # Several times: shuffled data sets must be larger than their window.
            paths = [path_of(dataset, codec, ROWS[dataset])] * 3
            for order in ORDERS:
                plain = open_reader(paths, dataset, order, arguments.batch_size)
                least = loads.least_limit(plain)
                limit = least * 5 // 4
                limited = open_reader(paths, dataset, order, arguments.batch_size, memory_limit=limit)
                readers = {"plain": plain, "limited": limited}
                turns = loads.take_turns(
                    {name: partial(loads.drain, reader) for name, reader in readers.items()},
                    arguments.rounds,
                )
                seconds = {name: [time for time, _ in taken] for name, taken in turns.items()}
                relative = loads.ratio(seconds["plain"], seconds["limited"])
                mark = bounds.aim(f"({dataset}) {codec} {order}: speed at 1.25 x least", relative, least=SPEED_LEAST)
                most = [reader.stats()["memory"]["most_reserved"] / loads.MB for reader in (limited, plain)]
                cells = [f"{size / loads.MB:.1f} MB" for size in (least, limit)]
                row(f"({dataset})", codec, order, *cells, relative, mark, *(f"{size:.1f} MB" for size in most))
                for reader in readers.values():
                    reader.close()


def kept_child(request: dict[str, Any]) -> dict[str, Any]:
    """Reads with a limit and says what memory that took."""
    dataset, order, batch = request["dataset"], request["order"], request["batch"]
    paths = [path_of(dataset, request["codec"], ROWS[dataset])] * request["times"]
    reader = open_reader(paths, dataset, order, batch)
    limit = None
    if request["factor"] is not None:
        limit = int(loads.least_limit(reader) * request["factor"])
        reader = open_reader(paths, dataset, order, batch, memory_limit=limit)
    gc.collect()
    threading.Thread(target=int).start()  # What the first thread takes isn't the pass's.
    held = 0
    idle = loads.rss_anon()
    with loads.sampled() as peak:
        for values in reader:
            held = max(held, loads.nbytes(values))
    stats = reader.stats()["memory"]
    result = {"limit": limit, "idle": idle, "peak": peak.bytes, "held": held, "samples": peak.samples}
    return result | {"reserved": stats["most_reserved"], "free": stats["free"]}


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Has a process of its own do something."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kept(bounds: loads.Bounds, arguments: argparse.Namespace) -> None:
    """Whether limits are kept."""
    columns = [("data", -4), ("codec", -8), ("order", -10), ("limit", -18), ("reserved", 9), ("beyond idle", 11)]
    row = loads.table([*columns, ("2 batches", 9), ("by", 6), ("", -6)])
    for dataset in arguments.datasets:
        for codec in arguments.codecs.split(","):
            for order in ORDERS:
                for factor in arguments.factors:
                    request: dict[str, Any] = {"do": "kept", "dataset": dataset, "codec": codec, "order": order}
                    request |= {"factor": factor, "batch": arguments.batch_size, "times": 2 if loads.QUICK else 4}
                    found = ask(request)
                    beyond, limit = found["peak"] - found["idle"], found["limit"]
                    by = (beyond - 2 * found["held"] - SMALL) / limit
                    what = f"({dataset}) {codec} {order}, {factor} x least = {limit / loads.MB:.1f} MB: RssAnon by it"
                    mark = bounds.check(what, by, most=1 + OVER)
                    cells = [found["reserved"], beyond, 2 * found["held"]]
                    limit_text = f"{factor} x = {limit / loads.MB:.1f} MB"
                    sizes = [f"{size / loads.MB:.1f} MB" for size in cells]
                    row(f"({dataset})", codec, order, limit_text, *sizes, by, mark)


def large_child(request: dict[str, Any]) -> dict[str, Any]:
    """Reads a large file several times by windows."""
    path = path_of("a", "null", request["rows"])
    reader = open_reader([path] * request["times"], "a", "window")
    idle = loads.rss_anon()
    with loads.sampled(0.005) as peak:
        batches = loads.drain(reader)
    memory = reader.stats()["memory"]
    return {"idle": idle, "peak": peak.bytes, "rows": batches * 1024, "reserved": memory["most_reserved"]}


def large(bounds: loads.Bounds, _: argparse.Namespace) -> None:
    """Whether reading much takes little."""
    times = 1 if loads.QUICK else 10
    found = ask({"do": "large", "rows": 400_000, "times": times})
    mark = bounds.check("10 GB of (a) by windows: MB of RssAnon", found["peak"] / loads.MB, most=600)
    print(
        f"\n(a) {times} GB by windows of 16,384 rows, no limit: peak {found['peak'] / loads.MB:.0f} MB of RssAnon, "
        f"idle {found['idle'] / loads.MB:.0f} MB, most reserved {found['reserved'] / loads.MB:.0f} MB: {mark}"
    )


def epochs_child(request: dict[str, Any]) -> dict[str, Any]:
    """Reads epoch after epoch."""
    path = path_of(request["dataset"], request["codec"], 4096)
    reader = open_reader([path], request["dataset"], request["order"], 256)
    seen = []
    for epoch in range(1, request["epochs"] + 1):
        loads.drain(reader)
        if epoch % 50 == 0:
            gc.collect()
            seen.append(loads.rss_anon())
    return {"seen": seen}


def epochs(bounds: loads.Bounds, _: argparse.Namespace) -> None:
    """Whether epochs leave anything behind."""
    count = 300 if loads.QUICK else 1000
    row = loads.table([("data", -4), ("codec", -8), ("order", -10), ("100 epochs", 11), (f"{count:,}", 10), ("", -6)])
    for dataset, codec in (("c", "null"), ("f", "deflate")):
        for order in ORDERS:
            request: dict[str, Any] = {"do": "epochs", "dataset": dataset, "codec": codec, "order": order}
            seen = ask(request | {"epochs": count})["seen"]
            # Medians of three: a pool may hold a batch more at one time than at another.
            first, last = statistics.median(seen[1:4]), statistics.median(seen[-3:])
            grown = (last - first) / loads.MB
            mark = bounds.check(f"({dataset}) {codec} {order}: MB grown from epoch 100 to {count}", grown, most=1.0)
            row(f"({dataset})", codec, order, *(f"{size / loads.MB:.1f} MB" for size in (first, last)), mark)


PARTS = {"speed": speed, "kept": kept, "large": large, "epochs": epochs}
CHILDREN = {"kept": kept_child, "large": large_child, "epochs": epochs_child}


def main() -> int:
    """Runs the measurements; the exit status is 1 where a bound of memory is missed. Speeds fail nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--datasets", default="abcdef")
    parser.add_argument("--codecs", default="null,deflate")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--factors", type=lambda text: [float(f) for f in text.split(",")], default=[1.02, 1.25, 2, 4])
    parser.add_argument("--rounds", type=int, default=3 if loads.QUICK else 9)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        request = json.loads(arguments.child)
        print(json.dumps(CHILDREN[request["do"]](request)))
        return 0
    bounds = loads.Bounds()
    for part in arguments.parts.split(","):
        PARTS[part](bounds, arguments)
    return bounds.status()


if __name__ == "__main__":
    raise SystemExit(main())
