"""Compares fastpipe with fsspec and fastavro: Avro files from a web server, through slow and unreliable links.

The server (snailmail) runs in another process on the same machine and has one link. Every request waits for a time to
the first byte, and all responses share the link's rate. There are three links:

* `steady`: 50 ms for each request, 200 MB/s;
* `stalls`: log-normal times with a mode of 50 ms and sigma 0.5, but 5 seconds for 0.5 % of the requests, 200 MB/s;
* `free`: no delay and no limit, so that the processors are the limit.

The files have records of an integer and 256 floats, in blocks of 64 KiB without compression. A pass reads all rows in
batches of 1,024. fastpipe has an index cache, so it knows the blocks; `opening` is the rate at which it found them. A
wait is the time until the program has its next batch. "of the link" is the rate of the rows divided by the rate of the
link. The bench counts rows, and compares their sums with the data.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import fastpipe
from harness import Bench, CannotError, take_turns

BATCH_SIZE = 1024
FILES, WIDTH = 4, 256
RATE = 200.0
"""MB per second of the limited links."""
STALLED, STALL_MS = 0.005, 5000.0
FEATURES = {"id": fastpipe.DenseSpec((), "int64"), "x": fastpipe.DenseSpec((WIDTH,), "float32")}


class Pass(NamedTuple):
    """The rows and the sum of ids that a pass read, the wait for each batch, and the server's counts of requests."""

    rows: int
    total: int
    waits: list[float]
    requests: int
    sent: int
    methods: dict[str, int]


def serve(folder: str, orders: Connection) -> None:
    """Runs the server until the bench sends None."""
    from snailmail import Fixed, HTTPRangeServer, LogNormal

    def latency(link: str) -> Any:
        if link != "stalls":
            return Fixed(50 if link == "steady" else 0)
        found = LogNormal(50, sigma=0.5, seed=1)
        times = np.random.default_rng(2).lognormal(found.mu, 0.5, 1 << 14)
        times[np.random.default_rng(3).random(times.size) < STALLED] = STALL_MS
        found._fill(times)
        return found

    with HTTPRangeServer(folder) as server:
        orders.send(server.base)
        while (order := orders.recv()) is not None:
            if order == "stats":
                orders.send(server.stats())
            else:
                server.set_latency(latency(order))
                server.set_bandwidth_mbs(None if order == "free" else RATE)
                server.reset_counts()
                orders.send(None)


class Server:
    """The server in its process."""

    def __init__(self, orders: Connection, base: str) -> None:
        self._orders, self.base = orders, base

    def ask(self, order: str) -> Any:
        """Sends an order, and returns the answer."""
        self._orders.send(order)
        return self._orders.recv()


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Runs the server while the context lasts."""
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=serve, args=(str(folder), other), daemon=True)
    process.start()
    try:
        yield Server(own, own.recv())
        own.send(None)
    finally:
        process.join(5)
        process.terminate()


def write(folder: Path, rows: int) -> list[str]:
    """Writes the files, and returns their names."""
    names = [f"part-{number}.avro" for number in range(FILES)]
    for number, name in enumerate(names):
        values = np.random.default_rng(number).random(rows * WIDTH, "float32")
        x = pa.FixedSizeListArray.from_arrays(values, WIDTH)
        fastpipe.write_avro(
            folder / name, pa.table({"id": np.arange(number * rows, (number + 1) * rows), "x": x}), codec="null"
        )
    return names


def read(server: Server, link: str, reader: fastpipe.Reader) -> Pass:
    """Reads an epoch with fastpipe."""
    server.ask(link)
    rows, total, waits = 0, 0, []
    begun = time.perf_counter()
    for batch in reader:
        waits.append(time.perf_counter() - begun)
        rows, total = rows + len(batch["id"]), total + int(batch["id"].sum())
        begun = time.perf_counter()
    return finished(server, rows, total, waits)


def read_fsspec(server: Server, link: str, urls: list[str]) -> Pass:
    """Reads the rows with fsspec and fastavro, and stacks them as batches."""
    try:
        import fastavro
        import fsspec
    except ImportError as error:
        raise CannotError(str(error)) from None
    server.ask(link)
    rows, total, waits = 0, 0, []
    begun = time.perf_counter()
    for url in urls:
        with fsspec.open(url, block_size=8 << 20) as file:
            records: Iterator[Any] = fastavro.reader(file)
            while some := list(itertools.islice(records, BATCH_SIZE)):
                ids = np.array([record["id"] for record in some])
                np.array([record["x"] for record in some], "float32")
                waits.append(time.perf_counter() - begun)
                rows, total = rows + len(ids), total + int(ids.sum())
                begun = time.perf_counter()
    return finished(server, rows, total, waits)


def finished(server: Server, rows: int, total: int, waits: list[float]) -> Pass:
    """Returns a pass with the server's counts."""
    stats = server.ask("stats")
    return Pass(rows, total, waits, stats["n_requests"], stats["total_bytes"], stats["methods"])


def main(bench: Bench) -> None:
    """Measures each link."""
    columns = ("MB/s|,.0f", "of the link|.2f", "requests|,", "bytes by size|.3f", "wait, median ms|,.1f", "p99|,.1f")
    row = bench.table("link", "loader", *columns, "times fsspec's speed|.1f", title="Avro from a web server")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        names = write(folder, bench.args.rows // FILES)
        size = sum((folder / name).stat().st_size for name in names)
        expected = bench.args.rows, bench.args.rows * (bench.args.rows - 1) // 2
        with serving(folder) as server, tempfile.TemporaryDirectory() as cache:
            urls = [server.base + name for name in names]
            opened = partial(fastpipe.read_avro, urls, features=FEATURES, batch_size=BATCH_SIZE, index_cache=cache)
            time.sleep(2)  # fastpipe doesn't index files that were modified within the last two seconds.
            server.ask("steady")
            begun = time.perf_counter()
            opened()
            bench.say(f"opening: {size / 1e6 / (time.perf_counter() - begun):,.0f} MB/s")
            for link in bench.args.links:
                ways = {
                    "fastpipe": lambda link=link: read(server, link, opened()),
                    "fastpipe, shuffled": lambda link=link: read(server, link, opened(shuffle=True, seed=1)),
                    "fsspec, fastavro": lambda link=link: read_fsspec(server, link, urls),
                }
                turns = take_turns(ways, bench.rounds)
                for name in ways:
                    if name in turns.errors:
                        row(link, f"{name}: {turns.errors[name]}")
                        continue
                    found: Pass = turns.turns[name][max(turns.turns[name])].result
                    if (found.rows, found.total) != expected:
                        raise RuntimeError(f"{name} read other rows: {found[:2]}, not {expected}")
                    if set(found.methods) != {"GET"} and name.startswith("fastpipe"):
                        bench.fail(f"{name} sent requests other than GET: {found.methods}")
                    rate = size / 1e6 / turns.median(name)
                    share = None if link == "free" else rate / RATE
                    waits = np.percentile(found.waits, [50, 99]) * 1e3
                    faster = None
                    if "fsspec, fastavro" in turns.turns and not turns.errors and name.startswith("fastpipe"):
                        faster = turns.ratio("fsspec, fastavro", name).median
                    row(link, name, rate, share, found.requests, found.sent / size, *waits, faster)
                    wanted = {"fastpipe": {"steady": 0.95, "stalls": 0.9}, "fastpipe, shuffled": {"steady": 0.92}}
                    if share is not None and (least := wanted.get(name, {}).get(link)):
                        bench.target(f"{name}, {link}: share of the link", share, least=least)


if __name__ == "__main__":
    packages = ("fastavro", "fsspec", "numpy", "pyarrow", "snailmail")
    links = ["steady", "stalls", "free"]
    Bench("remote", __doc__, rounds=(3, 3), packages=packages, rows=(400_000, 40_000), links=links).run(main)
