"""Compares `ATDSDataset` with tensorflow-io's, end to end through `tf.data`: dataset (a), one core each, in turn.

fastpipe runs with the TensorFlow of the current environment, tensorflow-io in a separate environment with TensorFlow
2.16. Each library runs in two processes: one iterates over the dataset in Python (eager), the other in a graph, as
`model.fit` does. Each pass is one epoch, timed up to its last batch. The first pass is a warm-up and isn't counted.
"""

from __future__ import annotations

from typing import Any

import generate
from harness import Bench
from harness.children import Side, race, rate
from harness.data import cores
from peers.job import Job

LOADS = {"null": ("null", 0, 8.0), "null, shuffled": ("null", 10_000, 8.0), "deflate": ("deflate", 0, 5.0)}
"""Codec, shuffle buffer size in rows, and the target speedup of fastpipe."""
LOOPS = {"eager": ("fastpipe-atds", "atds-epochs"), "graph": ("fastpipe-atds-graph", "atds-graph")}


def main(bench: Bench) -> None:
    """Runs the comparison, and fails if a speedup is below its target."""
    args = bench.args
    columns = ("fastpipe, rows/s|,.0f", "tensorflow-io, rows/s|,.0f", "times as fast|", "by CPU time|,.1f", "wanted|g")
    row = bench.table("codec, order", "loop", *columns)
    for name, (codec, shuffle, goal) in LOADS.items():
        if args.load not in ("", name):
            continue
        path, known = generate.generate("a", args.rows, codec=codec)
        job = Job(str(path), "a", args.batch_size, shuffle)
        for loop in args.loops:
            ours, theirs = LOOPS[loop]
            sides = [Side(reader, job, known["plain" if shuffle else "sums"], rows=args.rows) for reader in LOOPS[loop]]
            turns = race(bench, sides, cores()[-1:], enough=0.25, budget=float("inf"), warm=1)
            if turns.errors:
                raise SystemExit("\n".join(turns.errors.values()))
            ratio, by_cpu = turns.ratio(theirs, ours), turns.ratio(theirs, ours, "cpu").median
            bench.bound(f"{name}, {loop}", ratio.median, least=goal)
            row(name, loop, rate(turns, ours), rate(turns, theirs), ratio, by_cpu, goal)


if __name__ == "__main__":
    what: dict[str, Any] = {"rows": (65_536, 4_096), "batch_size": 1024, "load": "", "loops": list(LOOPS)}
    Bench("atds", __doc__, **what).run(main)
