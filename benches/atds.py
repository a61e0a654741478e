"""Compares `ATDSDataset` with tensorflow-io's, end to end through `tf.data`: dataset (a), one core each, in turn.

fastpipe runs with the TensorFlow of the environment that this is started in, tensorflow-io in a separate one with
TensorFlow 2.16. Each has a process for a Python loop over the dataset (eager) and for a loop in a graph, as `model.fit`
runs; its passes are epochs of one dataset, and the first one isn't counted. A pass is timed to its last batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import generate
from harness import Bench, CannotError, Turn, take_turns
from harness.data import cores
from peers import READERS, Peer
from peers.job import Job


@dataclass(frozen=True)
class Load:
    """The dataset's codec and order, and by what factor fastpipe is meant to be faster."""

    codec: str
    shuffle: int
    goal: float


LOADS = {"null": Load("null", 0, 8), "null, shuffled": Load("null", 10_000, 8), "deflate": Load("deflate", 0, 5)}
LOOPS = {"eager": ("fastpipe-atds", "atds-epochs"), "graph": ("fastpipe-atds-graph", "atds-graph")}


def read(peer: Peer, job: Job, rows: int) -> Turn:
    """Takes a turn."""
    answer = peer.ask("read", job, 0.25)
    if "error" in answer or answer["rows"] != rows:
        raise CannotError(f"{peer.name}: {answer}")
    return Turn(answer["seconds"], answer["cpu"])


def main(bench: Bench) -> None:
    """Runs the comparison, and fails if a factor is less than what is wanted."""
    args = bench.args
    columns = ("fastpipe, rows/s|,.0f", "tensorflow-io, rows/s|,.0f", "times as fast|", "by CPU time|,.1f", "wanted|g")
    row = bench.table("codec, order", "loop", *columns)
    for name, load in LOADS.items():
        if args.load not in ("", name):
            continue
        path, _ = generate.generate("a", args.rows, codec=load.codec)
        job = Job(str(path), "a", args.batch_size, load.shuffle)
        for loop in args.loops:
            peers = {reader: Peer(reader, READERS[reader].env, cores()[-1:], bench.say) for reader in LOOPS[loop]}
            try:
                ways = {reader: partial(read, peer, job, args.rows) for reader, peer in peers.items()}
                turns = take_turns(ways, bench.rounds)
            finally:
                for peer in peers.values():
                    bench.versions |= {f"{package} ({peer.name})": one for package, one in peer.versions.items()}
                    peer.close()
            if turns.errors:
                raise SystemExit("\n".join(turns.errors.values()))
            ours, theirs = LOOPS[loop]
            ratio, by_cpu = turns.ratio(theirs, ours), turns.ratio(theirs, ours, "cpu").median
            bench.bound(f"{name}, {loop}", ratio.median, least=load.goal)
            row(name, loop, *(args.rows / turns.median(side) for side in (ours, theirs)), ratio, by_cpu, load.goal)


if __name__ == "__main__":
    what: dict[str, Any] = {"rows": (65_536, 4_096), "batch_size": 1024, "load": "", "loops": list(LOOPS)}
    Bench("atds", __doc__, **what).run(main)
