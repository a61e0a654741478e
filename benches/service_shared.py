"""A local server beside local reading: Avro files, decoded by one thread, in this process or in the other one.

So the consumer has the other core in both cases. (With all cores busy decoding, copying batches out takes some of that,
wherever it is.)
"""

from __future__ import annotations

from functools import partial

import fastpipe
import generate
from harness import Bench, take_turns
from harness.data import drain

WANTED = 0.9
ROWS = {"a": 300_000, "b": 6_000_000}


def measure(bench: Bench) -> None:
    """Measures both datasets."""
    row = bench.table("", "local, rows/s|,.0f", "shared|,.0f", "ratio (0.9 wanted)|", "met", title="Shared memory")
    for kind, rows in ROWS.items():
        path, _ = generate.generate(kind, rows // (10 if bench.quick else 1))
        reader = fastpipe.read_avro(path, batch_size=1024, num_threads=1)
        with fastpipe.LocalService(reader) as remote:
            turns = take_turns({"local": partial(drain, reader), "shared": partial(drain, remote)}, bench.rounds)
        assert {*turns.values("local", "result"), *turns.values("shared", "result")} == {len(reader)}
        ratio = turns.ratio("local", "shared")
        met = bench.target(f"({kind}) shared over local", ratio.median, least=WANTED)
        row(f"({kind}) of Avro", *(reader.num_rows / turns.median(side) for side in ("local", "shared")), ratio, met)
