"""Measures fastpipe by batch size, order, number of threads, codec, and block size.

Dataset (a) is measured with every combination. The other datasets change one of the default settings at a time. The
defaults are batches of 1,024 rows, sequential order, one thread, codec null, and blocks of 1 MB.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import plan
from harness import Bench, CannotError, take_turns
from harness.children import peers
from harness.data import cores
from peers.job import Job

BATCHES = (64, 256, 1024, 4096, 8192)
CODECS = ("null", "deflate", "snappy", "zstandard")
SHARE = 4
"""Divisor of the comparison's number of records. Dataset (a) then has about 40 MB, more than two shuffle windows."""


@dataclass(frozen=True)
class Setting:
    """Settings with which a dataset is read."""

    dataset: str
    batch: int = 1024
    shuffled: bool = False
    threads: int = 1
    codec: str = "null"
    block: str = "1M"


def usual(dataset: str) -> dict[str, Setting]:
    """Returns the settings that change one default, by name."""
    found = {f"batches of {batch:,}": Setting(dataset, batch) for batch in BATCHES}
    found |= {"shuffled": Setting(dataset, shuffled=True), "2 threads": Setting(dataset, threads=2)}
    return found | {"blocks of 16K": Setting(dataset, block="16K")} | {c: Setting(dataset, codec=c) for c in CODECS[1:]}


def job_of(bench: Bench, setting: Setting) -> Job:
    """Returns the job for a setting, and loads its file into the page cache."""
    cell = plan.Spec(setting.dataset, setting.codec, setting.block)
    path, _ = cell.file(plan.RECORDS[setting.dataset] // (plan.PART if bench.quick else SHARE), bench.say)
    path.read_bytes()
    shuffle = plan.SHUFFLE_BUFFER if setting.shuffled else 0
    return Job(str(path), setting.dataset, setting.batch, shuffle, setting.threads)


def main(bench: Bench) -> None:
    """Measures all settings in turn."""
    datasets = bench.args.datasets
    combinations = itertools.product(BATCHES, (False, True), (1, 2), CODECS, plan.BLOCKS)
    whole = "a" in datasets and not bench.quick
    settings = [Setting("a", *rest) for rest in combinations] if whole else []
    settings = list(dict.fromkeys([*settings, *(one for dataset in datasets for one in usual(dataset).values())]))
    with peers(bench, {str(threads): ("fastpipe", cores()[-threads:]) for threads in (1, 2)}) as readers:

        def read(setting: Setting, job: Job) -> float:
            answer = readers[str(setting.threads)].ask("read", job, 0.1)
            wanted = plan.RECORDS[setting.dataset] // (plan.PART if bench.quick else SHARE)
            if "error" in answer or answer["rows"] != wanted:
                raise CannotError(answer.get("error", "rows are missing"))
            return float(answer["rows"] / answer["seconds"])

        ways = {setting: partial(read, setting, job_of(bench, setting)) for setting in settings}
        turns = take_turns(ways, bench.rounds, warm=0)
    for setting, error in turns.errors.items():
        bench.fail(f"{setting}: {error}")

    def rate(setting: Setting) -> float | None:
        return None if setting in turns.errors else turns.median(setting, "result")

    names = [f"{name}|,.0f" for name in usual("a")]
    row = bench.table("", *names, title="One setting changed from the usual ones")
    for dataset in datasets:
        row(f"({dataset})", *map(rate, usual(dataset).values()))
    if whole:
        names = [f"{batch:,}|,.0f" for batch in BATCHES]
        row = bench.table(
            "codec", "blocks", "order", "threads", *names, title="Every combination for (a), by batch size"
        )
        for codec, block, shuffled, threads in itertools.product(CODECS, plan.BLOCKS, (False, True), (1, 2)):
            rates = [rate(Setting("a", batch, shuffled, threads, codec, block)) for batch in BATCHES]
            row(codec, block, "shuffled" if shuffled else "sequential", str(threads), *rates)


if __name__ == "__main__":
    Bench("sweep", __doc__, rounds=(3, 2), datasets=(list("abcdef"), list("ab"))).run(main)
