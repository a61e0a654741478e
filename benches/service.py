"""Measures batches that a server makes, beside what carries them and what others carry them with.

All take turns in one run, over loopback, with the server in a process of its own. Parts (`--parts`):

* `flight`: a bare Flight `do_get` of the same batches as record batches, held in the server's memory;
* `tfdata`: tf.data service;
* `ray`: Ray Data's `iter_batches` (`service_peers.py` has both);
* `shared`: a `LocalService` beside local reading (`service_shared.py`);
* `three`: whether three servers make what three make alone, with batches that cost time (`service_three.py`).

Beside the first three stand `service`, `fastpipe.connect` to a server of the reader, and `local`, the reader in the
consumer's process. Two tables: (a) 14 columns of 4 bytes, (b) 256 floats. Batches of
1,024 rows, each pass another epoch; the server has its data in memory, and reads them as they stand, so that it is the
service that is measured: `--shuffle` shuffles them, for which a random row costs 14 misses of the cache in (a). The
first batch is timed from `connect`. A part whose framework isn't installed is said to be skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import fastpipe
import kept
import service_peers
import service_shared
import service_three

# And what each needs.
PARTS = {
    "flight": ["pyarrow"],
    "tfdata": ["tensorflow"],
    "ray": ["ray", "pandas", "pyarrow"],
    "shared": [],
    "three": ["pyarrow"],
}
# What is wanted of the service: at least so many times as fast.
WANTED = {"flight": 0.8, "tfdata": 5.0, "tfdata-ready": 5.0, "ray": 5.0}
ROWS = {"a": 2_000_000, "b": 200_000}
ROUNDS = 7

CONFIG = """
import sys
sys.path.insert(0, {folder!r})
import service
a, b = (service.reader(kind, {quick}, {shuffle}) for kind in "ab")
"""


def arrays(kind: str, quick: bool) -> dict[str, Any]:
    """A table: (a) of 14 columns of 4 bytes, (b) of 256 floats."""
    rows = ROWS[kind] // (10 if quick else 1)
    draw = np.random.default_rng(1)
    if kind == "b":
        return {"x": draw.random((rows, 256), "float32")}
    columns: dict[str, Any] = {f"f{i}": draw.random(rows, "float32") for i in range(10)}
    return columns | {f"i{i}": draw.integers(0, 1000, rows, "int32") for i in range(4)}


def reader(kind: str, quick: bool, shuffle: bool = False) -> fastpipe.Reader:
    """The reader of a table, which is served and read here."""
    return fastpipe.from_arrays(arrays(kind, quick), batch_size=1024, shuffle=shuffle, seed=7)


def bare(quick: bool) -> None:
    """A Flight server that has record batches in memory, until it is killed."""
    import pyarrow as pa
    import pyarrow.flight as flight

    batches = {kind: list(reader(kind, quick).to_reader()) for kind in ROWS}

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def do_get(self, context: Any, ticket: Any) -> Any:
            found = batches[ticket.ticket.decode()]
            return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(found[0].schema, found))

    server = Server("grpc://127.0.0.1:0")
    print(server.port, flush=True)
    server.serve()


def started(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server's process, and the first line that it says."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


def served(config: Path) -> tuple[subprocess.Popen[str], str]:
    """`fastpipe serve`, and its URL."""
    process, said = started([sys.executable, "-m", "fastpipe", "serve", str(config), "--port", "0"])
    return process, said.split()[-1]


def measure(parts: list[str], quick: bool, shuffle: bool) -> dict[str, Any]:
    """Megabytes a second of each, by table, milliseconds to the first batch, and what `three` says."""
    tables = {kind: arrays(kind, quick) for kind in ROWS}
    again = [sys.executable, __file__, *(["--quick"] if quick else [])]
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        found: dict[str, Any] = {}
        if set(parts) & WANTED.keys():
            config = Path(folder) / "readers.py"
            config.write_text(CONFIG.format(folder=str(Path(__file__).parent), quick=quick, shuffle=shuffle))
            process, url = served(config)
            stack.callback(process.wait)
            stack.callback(process.kill)
            peers: dict[str, service_peers.Peer] = {}
            if "flight" in parts:
                peers["flight"] = stack.enter_context(_flight([*again, "--bare"]))
            if "tfdata" in parts:
                peers |= stack.enter_context(service_peers.tf_data([*again, "--tf-data"], tables))
            if "ray" in parts:
                peers["ray"] = stack.enter_context(service_peers.ray_data(tables))
            for kind in ROWS:
                local = reader(kind, quick, shuffle)
                ways = {name: peer(kind) for name, peer in peers.items()}
                found[kind] = _measure(kind, url, tables[kind], local, ways)
        if "shared" in parts:
            found["shared"] = service_shared.measure(ROUNDS, quick)
        if "three" in parts:
            found["three"] = service_three.measure(Path(folder), served, 2 if quick else 5)
        return found


@contextlib.contextmanager
def _flight(command: list[str]) -> Iterator[service_peers.Peer]:
    """The bare Flight server."""
    import pyarrow.flight as flight

    process, port = started(command)
    try:
        client = flight.FlightClient(f"grpc://127.0.0.1:{port.strip()}")

        def peer(kind: str) -> service_peers.Way:
            def read() -> int:
                stream = client.do_get(flight.Ticket(kind.encode()))
                return sum(chunk.data.num_rows for chunk in stream)

            return lambda: read

        yield peer
    finally:
        process.kill()
        process.wait()


def _measure(
    kind: str,
    url: str,
    table: dict[str, Any],
    local: fastpipe.Reader,
    peers: dict[str, service_peers.Way],
) -> dict[str, Any]:
    row = sum(array.nbytes // len(array) for array in table.values())

    def read(from_: fastpipe.Reader) -> service_peers.Way:
        def run() -> int:
            return sum(len(next(iter(batch.values()))) for batch in from_)

        return lambda: run

    ways = {"local": read(local), "service": read(fastpipe.connect(url, kind))} | peers
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS + 1):
        for name, way in ways.items():
            run = way()
            begun = time.perf_counter()
            rows = run()
            took = time.perf_counter() - begun
            # Lets go of what an iteration still fetches.
            del run
            most = service_peers.MOST * 1024 if name == "tfdata" else local.num_rows
            assert min(most, local.num_rows) - rows < 1024, f"{name} has read {rows} rows"
            if round_:
                rates[name].append(rows * row / took / 1e6)
    first = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        batches = iter(fastpipe.connect(url, kind))
        next(batches)
        first.append((time.perf_counter() - begun) * 1e3)
        del batches

    def over(name: str, other: str) -> list[float]:
        found = [ours / theirs for ours, theirs in zip(rates[name], rates[other], strict=True)]
        return [min(found), statistics.median(found), max(found)]

    return {
        "MB/s": {name: statistics.median(found) for name, found in rates.items()},
        "service over": {name: over("service", name) for name in ways if name != "service"},
        "first, ms": statistics.median(first),
    }


def _met(found: float, wanted: float) -> str:
    return "met" if found >= wanted else "MISSED"


def show(found: dict[str, Any]) -> None:
    """Prints what was measured."""
    for kind in ROWS:
        if kind not in found:
            continue
        rates = found[kind]["MB/s"]
        print(f"({kind}) service: {rates['service']:.0f} MB/s; first batch after {found[kind]['first, ms']:.1f} ms")
        for name, (least, median, most) in found[kind]["service over"].items():
            line = (
                f"    {name:12} {rates[name]:6.0f} MB/s; the service {median:.2f} times it ({least:.2f} to {most:.2f})"
            )
            if name in WANTED:
                line += f", wanted {WANTED[name]:g}: {_met(median, WANTED[name])}"
            print(line)
    if "shared" in found:
        print(service_shared.table(found["shared"]))
    if "three" in found:
        print(service_three.table(found["three"]))


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tf-data", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--shuffle", action="store_true", help="in a shuffled order")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments.quick)
        return
    if arguments.tf_data:
        service_peers.serve_tf_data({kind: arrays(kind, arguments.quick) for kind in ROWS})
        return
    parts = arguments.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}, only {', '.join(PARTS)}")
    for part in list(parts):
        if missing := [name for name in PARTS[part] if importlib.util.find_spec(name) is None]:
            print(f"{part}: SKIPPED, {' and '.join(missing)} isn't installed")
            parts.remove(part)
    found = measure(parts, arguments.quick, arguments.shuffle)
    show(found)
    kept.save("service", found, {"fastpipe-data": fastpipe.__version__}, arguments.quick)


if __name__ == "__main__":
    main()
