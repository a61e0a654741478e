"""Compares `ATDSDataset` with tensorflow-io's, end to end through `tf.data`: data set (a), one core each, in turn.

fastpipe runs with the TensorFlow of the environment that this is started in, tensorflow-io in one of its own with
TensorFlow 2.16. Each has a process for a loop of Python's over the dataset (eager) and for one in a graph, as
`model.fit` runs; its passes are epochs of one dataset, of which the first isn't counted. A pass is timed to its last
batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass

import generate
from peers import READERS, Peer
from peers.job import Job


@dataclass(frozen=True)
class Load:
    """What is read, and by what factor fastpipe is meant to be faster."""

    name: str
    codec: str
    shuffle: int
    goal: float


LOADS = [
    Load("null", "null", 0, 8),
    Load("null, shuffled", "null", 10_000, 8),
    Load("deflate", "deflate", 0, 5),
]
LOOPS = {"eager": ("fastpipe-atds", "atds-epochs"), "graph": ("fastpipe-atds-graph", "atds-graph")}


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loads", default="", help=f"of {', '.join(repr(load.name) for load in LOADS)}, with ;")
    parser.add_argument("--loops", default="", help=f"of {', '.join(LOOPS)}")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="default: the last one")
    arguments = parser.parse_args()
    loads = [load for load in LOADS if not arguments.loads or load.name in arguments.loads.split(";")]
    loops = {loop: names for loop, names in LOOPS.items() if not arguments.loops or loop in arguments.loops.split(",")}
    heads = "codec, order | loop | fastpipe, rows/s | tensorflow-io, rows/s | times as fast | by CPU time | wanted"
    print(f"| {heads} |\n|{'---|' * 7}")
    versions: dict[str, str] = {}
    missed = False
    for load in loads:
        path, _ = generate.generate("a", arguments.rows, codec=load.codec)
        job = Job(str(path), "a", arguments.batch_size, load.shuffle)
        for loop, names in loops.items():
            rates, work = _rates(names, job, arguments.rounds, arguments.core, arguments.rows, versions)
            ratios = [ours / theirs for ours, theirs in zip(*rates, strict=True)]
            ratio = statistics.median(ratios)
            by_work = statistics.median(theirs / ours for ours, theirs in zip(*work, strict=True))
            missed |= ratio < load.goal
            ours, theirs = map(statistics.median, rates)
            spread = f"{ratio:.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
            print(
                f"| {load.name} | {loop} | {ours:,.0f} | {theirs:,.0f} | {spread} | {by_work:.1f} | {load.goal:g} |",
                flush=True,
            )
    print("\n" + ", ".join(f"{package} {version}" for package, version in versions.items()))
    return 1 if missed else 0


def _rates(
    names: tuple[str, ...], job: Job, rounds: int, core: int, rows: int, versions: dict[str, str]
) -> tuple[list[list[float]], list[list[float]]]:
    """Rows a second and CPU seconds of each reader in each round; the first fills memory and isn't counted."""
    peers = [Peer(name, READERS[name].env, [core], lambda text: print(text, file=sys.stderr)) for name in names]
    rates: list[list[float]] = [[] for _ in peers]
    work: list[list[float]] = [[] for _ in peers]
    try:
        for turn in range(rounds + 1):
            for peer, found, spent in zip(peers, rates, work, strict=True):
                answer = peer.ask("read", job, 0.25 if turn else 0.0)
                if "error" in answer or answer["rows"] != rows:
                    raise SystemExit(f"{peer.name}: {answer}")
                if turn:
                    found.append(answer["rows"] / answer["seconds"])
                    spent.append(answer["cpu"])
            for peer in peers:
                versions.update((f"{package} ({peer.name})", version) for package, version in peer.versions.items())
    finally:
        for peer in peers:
            peer.close()
    return rates, work


if __name__ == "__main__":
    sys.exit(main())
