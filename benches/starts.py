"""Measures small Avro files: the time from opening a file to its last batch.

Each file has dataset (a). Files of one and of 1,024 records fit one batch, so the costs of starting decide; the file
with blocks of 16 KB has many small blocks. Each pass opens a new reader, in a separate process with one thread on one
core. A peer may take two thirds of fastpipe's time.
"""

from __future__ import annotations

import plan
from harness import Bench
from harness.children import Side, can, race
from harness.data import cores
from peers.job import Job

MOST = 1.5
"""Maximum time relative to that of the fastest peer."""
PEERS = {"tensorflow-io": ("atds", "atds-numpy"), "polars": ("polars", "polars-avro", "polars-avro-batches")}
FILES = {"1 record": (1, "1M"), "1,024 records": (1024, "1M"), "blocks of 16K": (8192, "16K")}


def main(bench: Bench) -> None:
    """Measures each file."""
    peers = {peer: PEERS[peer] for peer in bench.args.peers}
    heads = ("fastpipe, ms|,.3f", *(f"{peer}|,.3f" for peer in peers), "times as long as the fastest|,.2f", "met")
    row = bench.table("file", *heads, title="The first batch")
    for name, (records, block) in FILES.items():
        path, info = plan.Spec("a", block=block).file(records, bench.say)
        job = Job(str(path), "a", 1024)
        readers = ("fastpipe", *(reader for readers in peers.values() for reader in readers))
        sides = [Side(reader, job, info["sums"]) for reader in readers]
        turns = race(bench, sides, cores()[-1:], rounds=bench.rounds)
        if not can(turns, "fastpipe"):
            bench.fail(f"{name}: {turns.errors.get('fastpipe')}")
            continue
        ours = turns.median("fastpipe") * records * 1e3
        times = {
            peer: min((turns.median(one) * records * 1e3 for one in names if can(turns, one)), default=None)
            for peer, names in peers.items()
        }
        known = [time for time in times.values() if time is not None]
        longer = ours / min(known) if known else None
        met = "" if longer is None else bench.target(f"{name}, beside the fastest peer", longer, most=MOST)
        row(name, ours, *times.values(), longer, met)


if __name__ == "__main__":
    Bench("starts", __doc__, rounds=(7, 3), peers=list(PEERS)).run(main)
