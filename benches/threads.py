"""Two threads of fastpipe on two cores, beside two processes of one thread each, pinned to a core each.

The two processes are what a program can have without threads, at twice the memory and with the data split by hand: they
share nothing, so what they do together is as much as two cores give. Both read the same file, each for itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

import kept
import plan
from peers import Peer
from peers.job import Job
from progress import Clock

CELLS = [f"{dataset}/{codec}" for codec in ("null", "deflate") for dataset in "abcd"]


def _rate(answer: dict[str, Any]) -> float:
    if "error" in answer:
        raise RuntimeError(answer["error"])
    rate: float = answer["rows"] / answer["seconds"]
    return rate


def _turns(job: Job, rounds: int, enough: float, peers: dict[str, Peer]) -> dict[str, list[float]]:
    """Records a second of each way, a figure a round."""
    rates: dict[str, list[float]] = {"one": [], "two": [], "pair": []}
    both = Job(job.path, job.dataset, job.batch, threads=2)
    for _ in range(rounds):
        rates["one"].append(_rate(peers["left"].ask("read", job, enough)))
        rates["two"].append(_rate(peers["both"].ask("read", both, enough)))
        # Sent to both before either is waited for: they run side by side.
        peers["left"].send("read", job, enough)
        peers["right"].send("read", job, enough)
        rates["pair"].append(sum(_rate(peers[side].receive()) for side in ("left", "right")))
    return rates


def table(entries: dict[str, Any]) -> list[str]:
    """The measurements as a Markdown table."""
    lines = [
        "| cell | one thread, records/s | two threads | two processes | threads / one | threads / processes (rounds) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, rates in entries.items():
        one, two, pair = (statistics.median(rates[way]) for way in ("one", "two", "pair"))
        shares = [ours / theirs for ours, theirs in zip(rates["two"], rates["pair"], strict=True)]
        scale = statistics.median([ours / alone for ours, alone in zip(rates["two"], rates["one"], strict=True)])
        lines.append(
            f"| {name} | {one:,.0f} | {two:,.0f} | {pair:,.0f} | {scale:.2f}x | {statistics.median(shares):.2f}x "
            f"({min(shares):.2f} to {max(shares):.2f}) |"
        )
    return lines


def run(cells: list[str], rounds: int, batch: int, quick: bool, clock: Clock) -> list[str]:
    """Measures the cells, prints a table and keeps what was measured.

    Args:
        cells: As `plan.Spec.parse` takes them.
        rounds: How many turns each way takes.
        batch: Rows a batch.
        quick: An eighth of the data, shorter turns.
        clock: Told of progress.

    Returns:
        What failed.
    """
    cores = sorted(os.sched_getaffinity(0))[-2:]
    if len(cores) < 2:
        clock.say("one core alone: threads aren't compared")
        return []
    entries: dict[str, Any] = {}
    failed = []
    clock.stage("threads", len(cells))
    peers = {
        "left": Peer("fastpipe", None, cores[:1]),
        "right": Peer("fastpipe", None, cores[1:]),
        "both": Peer("fastpipe", None, cores),
    }
    try:
        for text in cells:
            spec = plan.Spec.parse(text)
            path, _ = spec.file(plan.RECORDS[spec.dataset] // (plan.PART if quick else 1), clock.say)
            job = Job(str(path), spec.dataset, batch)
            try:
                _turns(job, 1, 0.0, peers)  # Warm-up.
                entries[text] = _turns(job, rounds, 0.15 if quick else 0.4, peers)
            except RuntimeError as error:
                failed.append(f"threads: {text}: fastpipe: {error}")
            clock.step(f"threads: {text}")
    finally:
        for peer in peers.values():
            peer.close()
    kept.save("threads", entries, peers["both"].versions, quick)
    clock.clear()
    print("\n".join(["", "### Two threads", "", *table(entries), ""]), flush=True)
    return failed


def main() -> int:
    """Runs the measurement."""
    quick = os.environ.get("QUICK", "") not in ("", "0")
    parser = argparse.ArgumentParser(description="Compare two threads with two processes.")
    parser.add_argument("--quick", action="store_true", default=quick, help="an eighth of the data, 3 rounds (QUICK=1)")
    parser.add_argument("--cells", default=",".join(CELLS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=0, help="default: 7, or 3")
    parser.add_argument("--batch-size", type=int, default=1024)
    args = parser.parse_args()
    clock = Clock()
    rounds = args.rounds or (3 if args.quick else 7)
    failed = run(args.cells.split(","), rounds, args.batch_size, args.quick, clock)
    for problem in failed:
        clock.say(f"FAILED {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
