"""Compares the data service with plain Arrow Flight and with the services of other frameworks.

All contenders take turns in one run over the loopback interface, with the server in a separate process. `--parts`
selects from five parts:

* `flight`: A plain Flight `do_get` of the same batches, which the server keeps in memory as record batches.
* `tfdata`: tf.data service (see `service_peers.py`).
* `ray`: `iter_batches` of Ray Data (see `service_peers.py`).
* `shared`: A `LocalService` compared with local reading of Avro files. In both cases, one thread decodes and the
  consumer has the second core.
* `three`: Whether several servers deliver as many batches per second as the sum of their individual rates. Batches
  sleep instead of computing, so few cores are enough. Three servers are compared with three times the rate of one, and
  two servers, one of them ten times slower, with the sum of their rates.

The first three parts are compared with `service`, which is `fastpipe.connect` to a server of the reader, and with
`local`, the reader in the consumer's process. There are two tables: (a) 14 columns of 4 bytes, (b) 256 floats. Batches
have 1,024 rows, and each pass is a new epoch. The server has its dataset in memory and reads it in order, so that the
service is measured and not the gather. `--shuffle` shuffles it; each row of (a) then costs 14 cache misses. The first
batch is timed from the call of `connect`. A part is skipped if its framework isn't installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import fastpipe
import generate
import service_peers
from harness import HERE, Bench, Ratio, Table, Turn, take_turns
from harness.children import program
from harness.data import drain

# The modules that each part needs.
PARTS = {
    "flight": ["pyarrow"],
    "tfdata": ["tensorflow"],
    "ray": ["ray", "pandas", "pyarrow"],
    "shared": [],
    "three": ["pyarrow"],
}
# Target speedups of the service over its peers.
WANTED = {"flight": 0.9, "tfdata": 5.0, "tfdata-ready": 5.0, "ray": 5.0}
ROWS, SHARED_ROWS = {"a": 2_000_000, "b": 200_000}, {"a": 300_000, "b": 6_000_000}

BATCHES = 400
# Seconds per batch of each server.
PACES = {"one": [0.02], "three": [0.02] * 3, "uneven": [0.02, 0.2]}

CONFIG = """
import sys
sys.path.insert(0, {folder!r})
import service
a, b = (service.reader(kind, {quick}, {shuffle}) for kind in "ab")
"""

WAITING = """
import sys
sys.path.insert(0, {folder!r})
import fastpipe
from harness.data import Waiting
reader = fastpipe.read_units(Waiting({batches}, 1024, {pace}), batch_size=1024, num_fetches=1, num_threads=1)
"""


def arrays(kind: str, quick: bool) -> dict[str, Any]:
    """Returns the columns of a table: (a) 14 columns of 4 bytes, (b) 256 floats."""
    rows = ROWS[kind] // (10 if quick else 1)
    draw = np.random.default_rng(1)
    if kind == "b":
        return {"x": draw.random((rows, 256), "float32")}
    columns: dict[str, Any] = {f"f{i}": draw.random(rows, "float32") for i in range(10)}
    return columns | {f"i{i}": draw.integers(0, 1000, rows, "int32") for i in range(4)}


def reader(kind: str, quick: bool, shuffle: bool = False) -> fastpipe.Reader:
    """Returns the reader of a table, which the server and the local side use."""
    return fastpipe.from_arrays(arrays(kind, quick), batch_size=1024, shuffle=shuffle, seed=7)


def bare(quick: bool) -> None:
    """Runs a Flight server with record batches in memory until it is killed."""
    import pyarrow as pa
    import pyarrow.flight as flight

    batches = {kind: list(reader(kind, quick).to_arrow_reader()) for kind in ROWS}

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def do_get(self, context: Any, ticket: Any) -> Any:
            found = batches[ticket.ticket.decode()]
            return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(found[0].schema, found))

    server = Server("grpc://127.0.0.1:0")
    print(server.port, flush=True)
    server.serve()


def served(config: Path) -> Any:
    """Starts `fastpipe serve`. The first line of its output ends with the URL."""
    return program([sys.executable, "-m", "fastpipe", "serve", str(config), "--port", "0"])


@contextlib.contextmanager
def flight_server(command: list[str]) -> Iterator[service_peers.Peer]:
    """Starts the plain Flight server. Yields its peer."""
    import pyarrow.flight as flight

    with program(command) as (_, port):
        client = flight.FlightClient(f"grpc://127.0.0.1:{port.strip()}")

        def peer(kind: str) -> service_peers.Way:
            def read() -> int:
                stream = client.do_get(flight.Ticket(kind.encode()))
                return sum(chunk.data.num_rows for chunk in stream)

            return lambda: read

        yield peer


def timed(way: service_peers.Way, name: str, rows: int) -> Turn:
    """Reads an epoch or a part of it. Returns the seconds per row without the preparation."""
    run = way()
    cpu, begun = time.process_time(), time.perf_counter()
    found = run()
    seconds, spent = time.perf_counter() - begun, time.process_time() - cpu
    # Release batches that the iterator is still prefetching.
    del run
    most = min(service_peers.MOST * 1024, rows) if name == "tfdata" else rows
    assert most - found < 1024, f"{name} has read {found} rows"
    return Turn(seconds / found, spent / found, found)


def first_batch(url: str, kind: str) -> Turn:
    """Returns the seconds from `connect` to the first batch."""
    begun = time.perf_counter()
    batches = iter(fastpipe.connect(url, kind))
    next(batches)
    return Turn(time.perf_counter() - begun, 0.0)


def compare(bench: Bench, row: Table, kind: str, url: str, peers: dict[str, service_peers.Peer]) -> None:
    """Measures one table with all sides."""
    local = reader(kind, bench.quick, bench.args.shuffle)
    nbytes = sum(array.nbytes // len(array) for array in arrays(kind, bench.quick).values())

    def read(from_: Any) -> service_peers.Way:
        return lambda: lambda: sum(len(next(iter(batch.values()))) for batch in from_)

    ways = {"local": read(local), "service": read(fastpipe.connect(url, kind))}
    ways |= {name: peer(kind) for name, peer in peers.items()}
    turns = take_turns({name: partial(timed, way, name, local.num_rows) for name, way in ways.items()}, bench.rounds)
    first = take_turns({"first": partial(first_batch, url, kind)}, bench.rounds, warm=0).median("first") * 1e3
    for name in ways:
        rate = nbytes / turns.median(name) / 1e6
        if name == "service":
            row(f"({kind})", name, rate, None, None, None, first)
            continue
        ratio, wanted = turns.ratio(name, "service"), WANTED.get(name)
        met = None if wanted is None else bench.target(f"({kind}) service over {name}", ratio.median, least=wanted)
        row(f"({kind})", name, rate, ratio, wanted, met)


def beside_peers(bench: Bench, parts: list[str], folder: Path) -> None:
    """Compares the service with Flight, tf.data service, and Ray Data."""
    tables = {kind: arrays(kind, bench.quick) for kind in ROWS}
    again = [sys.executable, __file__, *(["--quick"] if bench.quick else [])]
    config = folder / "readers.py"
    config.write_text(CONFIG.format(folder=str(HERE), quick=bench.quick, shuffle=bench.args.shuffle))
    columns = ("MB/s|,.0f", "service over it (rounds)|", "wanted|g", "met", "first batch, ms|,.1f")
    row = bench.table("table", "carried by", *columns, title="Beside others that carry batches")
    with contextlib.ExitStack() as stack:
        _, said = stack.enter_context(served(config))
        peers: dict[str, service_peers.Peer] = {}
        if "flight" in parts:
            peers["flight"] = stack.enter_context(flight_server([*again, "--bare"]))
        if "tfdata" in parts:
            peers |= stack.enter_context(service_peers.tf_data([*again, "--tf-data"], tables))
        if "ray" in parts:
            peers["ray"] = stack.enter_context(service_peers.ray_data(tables))
        for kind in ROWS:
            compare(bench, row, kind, said.split()[-1], peers)


def shared(bench: Bench) -> None:
    """Compares a `LocalService` with local reading for both Avro datasets."""
    row = bench.table("", "local, rows/s|,.0f", "shared|,.0f", "ratio (0.9 wanted)|", "met", title="Shared memory")
    for kind, rows in SHARED_ROWS.items():
        path, _ = generate.generate(kind, rows // (10 if bench.quick else 1))
        local = fastpipe.read_avro(path, batch_size=1024, num_threads=1)
        with fastpipe.service.LocalService(local) as service:
            turns = take_turns({"local": partial(drain, local), "shared": partial(drain, service.reader)}, bench.rounds)
        assert {*turns.values("local", "result"), *turns.values("shared", "result")} == {len(local)}
        ratio = turns.ratio("local", "shared")
        met = bench.target(f"({kind}) shared over local", ratio.median, least=0.9)
        row(f"({kind}) of Avro", *(local.num_rows / turns.median(side) for side in ("local", "shared")), ratio, met)


def rate(urls: list[str], epoch: int) -> float:
    """Returns the batches per second of an epoch that the servers haven't cached. Checks every batch."""
    remote = fastpipe.connect(urls)
    remote.set_epoch(epoch)
    begun = time.perf_counter()
    for number, batch in enumerate(remote):
        assert batch["x"][0] == 1024 * number
    assert number + 1 == BATCHES
    return BATCHES / (time.perf_counter() - begun)


def three(bench: Bench, folder: Path) -> None:
    """Compares the rate of each set of servers with the sum of their individual rates."""
    with contextlib.ExitStack() as stack:
        urls: dict[str, list[str]] = {}
        for name, paces in PACES.items():
            for number, pace in enumerate(paces):
                config = folder / f"{name}{number}.py"
                config.write_text(WAITING.format(folder=str(HERE), batches=BATCHES, pace=pace))
                _, said = stack.enter_context(served(config))
                urls.setdefault(name, []).append(said.split()[-1])
        # Each round reads an epoch that the servers haven't cached.
        epochs = {name: itertools.count() for name in PACES}
        ways = {name: lambda name=name: rate(urls[name], next(epochs[name])) for name in PACES}
        turns = take_turns(ways, 2 if bench.quick else 5, warm=0)
    row = bench.table(
        "servers", "batches/s|,.1f", "over the sum of their paces (rounds)|", "wanted|g", "met", title="Three"
    )
    row("one", turns.median("one", "result"))
    for name, times in (("three", 3.0), ("uneven", 1.1)):
        ratio = Ratio(*(each / times for each in turns.ratio(name, "one", "result")))
        met = bench.target(f"{name} servers over the sum of their paces", ratio.median, least=0.9)
        row(name, turns.median(name, "result"), ratio, 0.9, met)


def main(bench: Bench) -> None:
    """Measures all parts whose frameworks are installed."""
    if bench.args.bare:
        bare(bench.quick)
    if bench.args.tf_data:
        service_peers.serve_tf_data({kind: arrays(kind, bench.quick) for kind in ROWS})
        raise SystemExit
    parts = bench.args.parts
    for part in list(parts):
        if missing := [name for name in PARTS[part] if importlib.util.find_spec(name) is None]:
            print(f"{part}: SKIPPED, {' and '.join(missing)} isn't installed")
            parts.remove(part)
    with TemporaryDirectory() as folder:
        if set(parts) & WANTED.keys():
            beside_peers(bench, parts, Path(folder))
        if "shared" in parts:
            shared(bench)
        if "three" in parts:
            three(bench, Path(folder))


if __name__ == "__main__":
    Bench("service", __doc__, parts=list(PARTS), shuffle=False, bare=False, tf_data=False).run(main)
