"""fastpipe alone, over batch sizes, orders, threads, codecs and block sizes.

Data set (a) has every combination. The others vary one setting at a time from the usual one (batches of 1,024, in the
file's order, one thread, codec null, blocks of 1 MB).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import kept
import plan
from peers import Peer
from peers.job import Job
from progress import Clock

BATCHES = (64, 256, 1024, 4096, 8192)
CODECS = ("null", "deflate", "snappy", "zstandard")
# A quarter of the comparison's: some 40 MB with (a), which is two windows of the shuffle, and more.
SHARE = 4


@dataclass(frozen=True)
class Setting:
    """How a data set is read."""

    dataset: str
    batch: int = 1024
    shuffled: bool = False
    threads: int = 1
    codec: str = "null"
    block: str = "1M"

    def __str__(self) -> str:
        order = "shuffled" if self.shuffled else "sequential"
        return f"{self.dataset}/{self.codec}/{self.block}/{order}/{self.threads}/{self.batch}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """The inverse of `str`."""
        dataset, codec, block, order, threads, batch = text.split("/")
        return cls(dataset, int(batch), order == "shuffled", int(threads), codec, block)


def settings(quick: bool) -> list[Setting]:
    """What is measured.

    Args:
        quick: One setting at a time, (a) and (b) alone.
    """
    found: list[Setting] = []
    if not quick:
        every = itertools.product(BATCHES, (False, True), (1, 2), CODECS, plan.BLOCKS)
        found += [Setting("a", *rest) for rest in every]
    for dataset in "ab" if quick else "bcdef":
        found += [Setting(dataset, batch) for batch in BATCHES]
        found += [Setting(dataset, shuffled=True), Setting(dataset, threads=2), Setting(dataset, block="16K")]
        found += [Setting(dataset, codec=codec) for codec in CODECS[1:]]
    return list(dict.fromkeys(found))


def usual(entries: dict[str, Any]) -> list[str]:
    """One setting at a time, as a Markdown table: a line a data set."""
    rates = {Setting.parse(name): statistics.median(entry["rates"]) for name, entry in entries.items()}
    ways: list[tuple[str, dict[str, Any]]] = [(f"batches of {batch:,}", {"batch": batch}) for batch in BATCHES]
    ways += [("shuffled", {"shuffled": True}), ("2 threads", {"threads": 2}), ("blocks of 16K", {"block": "16K"})]
    ways += [(codec, {"codec": codec}) for codec in CODECS[1:]]
    lines = [f"| | {' | '.join(label for label, _ in ways)} |", f"|---|{'--:|' * len(ways)}"]
    for dataset in plan.RECORDS:
        cells = [rates.get(Setting(dataset, **change)) for _, change in ways]
        if any(cells):
            lines.append(f"| ({dataset}) | {' | '.join('' if rate is None else f'{rate:,.0f}' for rate in cells)} |")
    return lines


def every(entries: dict[str, Any]) -> list[str]:
    """Every combination for (a), as a Markdown table: a line for all but the batch size."""
    rates = {Setting.parse(name): statistics.median(entry["rates"]) for name, entry in entries.items()}
    lines = [
        f"| codec | blocks | order | threads | {' | '.join(f'{batch:,}' for batch in BATCHES)} |",
        f"|---|---|---|--:|{'--:|' * len(BATCHES)}",
    ]
    for codec, block, shuffled, threads in itertools.product(CODECS, plan.BLOCKS, (False, True), (1, 2)):
        cells = [rates.get(Setting("a", batch, shuffled, threads, codec, block)) for batch in BATCHES]
        if all(rate is not None for rate in cells):
            order = "shuffled" if shuffled else "sequential"
            figures = " | ".join(f"{rate:,.0f}" for rate in cells if rate is not None)
            lines.append(f"| {codec} | {block} | {order} | {threads} | {figures} |")
    return lines


def run(rounds: int, quick: bool, clock: Clock, datasets: str = "abcdef") -> list[str]:
    """Measures all settings, prints tables and keeps what was measured.

    Args:
        rounds: How many turns each setting takes, all settings taking turns.
        quick: Fewer settings and half the data.
        clock: Told of progress.
        datasets: Which data sets.

    Returns:
        What failed.
    """
    cores = sorted(os.sched_getaffinity(0))[-2:]
    chosen = [setting for setting in settings(quick) if setting.dataset in datasets]
    entries: dict[str, Any] = {str(setting): {"rates": [], "rows": 0} for setting in chosen}
    failed: dict[str, None] = {}
    jobs: dict[Setting, Job] = {}
    clock.stage("sweep", len(chosen) * rounds)
    for setting in chosen:
        spec = plan.Spec(setting.dataset, setting.codec, setting.block)
        path, info = spec.file(plan.RECORDS[setting.dataset] // (plan.PART if quick else SHARE), clock.say)
        shuffle = plan.SHUFFLE_BUFFER if setting.shuffled else 0
        jobs[setting] = Job(str(path), setting.dataset, setting.batch, shuffle, setting.threads)
        entries[str(setting)]["rows"] = info["rows"]
        path.read_bytes()  # Into the page cache.
    peers = {1: Peer("fastpipe", None, cores[-1:]), 2: Peer("fastpipe", None, cores)}
    try:
        for _ in range(rounds):
            for setting, job in jobs.items():
                answer = peers[setting.threads].ask("read", job, 0.1)
                if "error" in answer or answer["rows"] != entries[str(setting)]["rows"]:
                    failed[f"sweep: {setting}: fastpipe: {answer.get('error', 'rows are missing')}"] = None
                else:
                    entries[str(setting)]["rates"].append(answer["rows"] / answer["seconds"])
                clock.step(f"sweep: {setting}")
    finally:
        for peer in peers.values():
            peer.close()
    entries = {name: entry for name, entry in entries.items() if entry["rates"]}
    kept.save("sweep", entries, peers[1].versions, quick)
    clock.clear()
    print("\n".join(["", "### One setting at a time, records/s", "", *usual(entries), ""]))
    if not quick and "a" in datasets:
        print("\n".join(["", "### (a), records/s by batch size", "", *every(entries), ""]), flush=True)
    return list(failed)


def main() -> int:
    """Runs the sweep."""
    quick = os.environ.get("QUICK", "") not in ("", "0")
    parser = argparse.ArgumentParser(
        description="Measure fastpipe over batch sizes, orders, threads, codecs and blocks."
    )
    parser.add_argument("--quick", action="store_true", default=quick, help="fewer settings, less data (QUICK=1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--datasets", default="abcdef")
    args = parser.parse_args()
    clock = Clock()
    failed = run(args.rounds, args.quick, clock, args.datasets)
    for problem in failed:
        clock.say(f"FAILED {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
