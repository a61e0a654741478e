"""Measures batches that a server makes, beside what carries them and what others carry them with.

All take turns in one run, over loopback, with the server in a process of its own:

* `local`: the reader in the consumer's process;
* `flight`: a bare Flight `do_get` of the same batches as record batches, held in the server's memory;
* `service`: `fastpipe.connect` to a server of the reader.

Two tables: (a) 14 columns of 4 bytes, (b) 256 floats. Batches of 1,024 rows, in a shuffled order; the server has its
data in memory, so that it is the service that is measured. `first` is how soon the first batch is there, from
`connect`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import fastpipe
import kept

ROWS = {"a": 2_000_000, "b": 200_000}
ROUNDS = 7

CONFIG = """
import sys
sys.path.insert(0, {folder!r})
import service
a, b = (service.reader(kind, {quick}) for kind in "ab")
"""


def arrays(kind: str, quick: bool) -> dict[str, Any]:
    """A table: (a) of 14 columns of 4 bytes, (b) of 256 floats."""
    rows = ROWS[kind] // (10 if quick else 1)
    draw = np.random.default_rng(1)
    if kind == "b":
        return {"x": draw.random((rows, 256), "float32")}
    columns: dict[str, Any] = {f"f{i}": draw.random(rows, "float32") for i in range(10)}
    return columns | {f"i{i}": draw.integers(0, 1000, rows, "int32") for i in range(4)}


def reader(kind: str, quick: bool) -> fastpipe.Reader:
    """The reader of a table, which is served and read here."""
    return fastpipe.from_arrays(arrays(kind, quick), batch_size=1024, shuffle=True, seed=7)


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


def measure(quick: bool) -> dict[str, Any]:
    """Megabytes a second of each, by table, and milliseconds to the first batch."""
    import pyarrow.flight as flight

    with TemporaryDirectory() as folder:
        config = Path(folder) / "readers.py"
        config.write_text(CONFIG.format(folder=str(Path(__file__).parent), quick=quick))
        ours, said = started([sys.executable, "-m", "fastpipe", "serve", str(config), "--port", "0"])
        url = said.split()[-1]
        theirs, port = started([sys.executable, __file__, "--bare", *(["--quick"] if quick else [])])
        try:
            client = flight.FlightClient(f"grpc://127.0.0.1:{port.strip()}")
            return {kind: _measure(kind, url, client, quick) for kind in ROWS}
        finally:
            for process in (ours, theirs):
                process.kill()
                process.wait()


def _measure(kind: str, url: str, client: Any, quick: bool) -> dict[str, Any]:
    import pyarrow.flight as flight

    local = reader(kind, quick)
    remote = fastpipe.connect(url, kind)
    nbytes = sum(array.nbytes for array in arrays(kind, quick).values())

    def flight_get() -> None:
        stream = client.do_get(flight.Ticket(kind.encode()))
        rows = sum(chunk.data.num_rows for chunk in stream)
        assert rows == local.num_rows

    def read(from_: fastpipe.Reader) -> Callable[[], None]:
        def run() -> None:
            from_.set_epoch(0)
            rows = sum(len(next(iter(batch.values()))) for batch in from_)
            assert rows == local.num_rows

        return run

    ways = {"local": read(local), "flight": flight_get, "service": read(remote)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS + 1):
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            if round_:
                rates[name].append(nbytes / (time.perf_counter() - begun) / 1e6)
    first = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        batches = iter(fastpipe.connect(url, kind))
        next(batches)
        first.append((time.perf_counter() - begun) * 1e3)
        del batches
    ratios = [service / bare for service, bare in zip(rates["service"], rates["flight"], strict=True)]
    return {
        "MB/s": {name: statistics.median(found) for name, found in rates.items()},
        "service over flight": [min(ratios), statistics.median(ratios), max(ratios)],
        "first, ms": statistics.median(first),
    }


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bare", action="store_true", help="be the bare Flight server")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments.quick)
        return
    found = measure(arguments.quick)
    print(f"{'table':6} {'local MB/s':>11} {'flight':>8} {'service':>8}  service over flight  {'first ms':>9}")
    for kind, of in found.items():
        rates, (least, median, most) = of["MB/s"], of["service over flight"]
        print(
            f"({kind})    {rates['local']:11.0f} {rates['flight']:8.0f} {rates['service']:8.0f}"
            f"  {median:.2f} ({least:.2f} to {most:.2f})  {of['first, ms']:12.1f}"
        )
    kept.save("service", found, {"fastpipe-data": fastpipe.__version__}, arguments.quick)


if __name__ == "__main__":
    main()
