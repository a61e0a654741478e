"""Memory of DataLoaders by the number of workers: fastpipe's, and torch's.

A separate program loads batches and takes 20 ms for each, so workers get as far ahead as they may. All its processes
are looked at from outside: each 10 ms at shared memory, and ten times less often at private memory, which is a walk
through their page tables.

* Shared memory is what the files take that the processes have open, each counted once: of torch those in /dev/shm, of
  fastpipe the one without a name (`memfd`).
* Private memory is the anonymous memory of all processes; pages that several share since a fork are counted once. What
  the interpreters take is subtracted: the peak of the same program with the same workers and items of 1 KB.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness import Bench

MiB = 1 << 20
PREFETCH = 2
SLACK = 64 * MiB
WORKERS = (1, 2, 4, 8, 12, 16)


class Load(NamedTuple):
    """Bytes of an item, rows of a batch, and how seldom an item takes 50 ms: every so-manieth one; 0 for none."""

    size: int
    rows: int
    slow: int = 0

    @property
    def batch(self) -> int:
        """Bytes of a batch."""
        return self.size * self.rows

    @property
    def limit(self) -> int:
        """Bytes of shared memory that there may be."""
        return (PREFETCH + 1) * self.batch + SLACK


LOADS = {
    "64 MiB": Load(4 * MiB, 16),
    # Workers wait for each other, so more batches are begun, up to the slack.
    "4 MiB, some slow": Load(MiB // 4, 16, 50),
}
INTERPRETER = Load(1024, 16)
RUNS = (("torch", "default"), ("fastpipe", "default"), ("fastpipe", "stack"), ("fastpipe", "identity"))


def children(process: int) -> Iterator[int]:
    """A process, and all that it has started."""
    yield process
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from children(int(child))
    except OSError:
        return


def shared(processes: list[int]) -> int:
    """Bytes of the shared memory whose files they have open."""
    found: dict[tuple[int, int], int] = {}
    for process in processes:
        try:
            for file in os.scandir(f"/proc/{process}/fd"):
                if os.readlink(file.path).startswith(("/dev/shm/", "/memfd:")):
                    about = os.stat(file.path)
                    found[about.st_dev, about.st_ino] = about.st_blocks * 512
        except OSError:
            continue
    return sum(found.values())


def private(processes: list[int]) -> int:
    """Bytes of anonymous memory of the processes, counting shared pages once."""
    kilobytes = 0
    for process in processes:
        try:
            found = re.search(r"^Pss_Anon: *(\d+) kB$", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
        except OSError:
            continue
        kilobytes += int(found[1]) if found else 0
    return kilobytes * 1024


def peaks(who: str, collation: str, workers: int, load: Load, quick: bool) -> tuple[int, int]:
    """Lets the program load, and returns the most bytes of shared and of private memory that were seen."""
    batches = 12 if quick else 24 + PREFETCH * workers
    program = subprocess.Popen([sys.executable, __file__, json.dumps([who, collation, workers, load, batches])])
    most_shared = most_private = 0
    for looked in itertools.count():
        if program.poll() is not None:
            break
        processes = list(children(program.pid))
        most_shared = max(most_shared, shared(processes))
        if looked % 10 == 0:
            most_private = max(most_private, private(processes))
        time.sleep(0.01)
    if program.returncode:
        raise RuntimeError(f"the program that loads ended with {program.returncode}")
    return most_shared, most_private


def run(who: str, collation: str, workers: int, load: Load, batches: int) -> None:
    """The program that loads."""
    import dataloader_items as items

    dataset = items.Filled(load.size, load.rows * batches, load.slow)
    loader = items.loader(who, dataset, "fork", workers, collation, batch_size=load.rows, prefetch_factor=PREFETCH)
    total = 0.0
    for batch in loader:
        # Each page is looked at, as who trains does.
        total += sum(float(np.asarray(item)[::1024].sum()) for item in batch)
        time.sleep(0.02)
    expected = sum(range(len(dataset))) * len(range(0, load.size // 4, 1024))
    if abs(total / expected - 1) > 1e-3:
        raise RuntimeError(f"values sum up to {total}, not to {expected}")


def slope(values: dict[int, int]) -> float:
    """Bytes a worker, by least squares."""
    return float(np.polyfit(list(values), list(values.values()), 1)[0])


@cache
def interpreters(who: str, custom: bool, workers: int, quick: bool) -> int:
    """Private memory of the program's processes without items worth mentioning."""
    return peaks(who, "stack" if custom else "default", workers, INTERPRETER, quick)[1]


def part(bench: Bench) -> None:
    """Measures all loads."""
    numbers = (1, 4) if bench.quick else WORKERS
    for name, load in LOADS.items():
        title = f"Memory, batches of {name} (bound {load.limit / MiB:.0f})"
        found: dict[str, dict[int, int]] = {}
        for who, collation in RUNS:
            what = f"batches of {name}, {collation} collation"
            mine: list[dict[int, int]] = [{}, {}]
            for workers in numbers:
                in_files, own = peaks(who, collation, workers, load, bench.quick)
                bare = interpreters(who, collation != "default", workers, bench.quick)
                mine[0][workers], mine[1][workers] = in_files, own - bare
                bench.say(f"{who}, {what}, {workers} workers: {in_files / MiB:.0f} MiB shared")
                if who == "fastpipe":
                    most = f"shared memory in MiB, {what}, {workers} workers"
                    bench.bound(most, in_files / MiB, most=load.limit / MiB)
            for kind, values in zip(("shared", "private"), mine, strict=True):
                found[f"{kind}, {who}, {collation}"] = values
            if who == "fastpipe" and not load.slow:
                most = f"growth of shared memory with each worker in MiB, {what}"
                bench.bound(most, slope(mine[0]) / MiB, most=load.batch / MiB / 100)
        row = bench.table("MiB", *(f"{number}|,.0f" for number in numbers), "each worker adds|,.2f", title=title)
        for label in sorted(found, key=lambda label: label.startswith("private")):
            row(label, *(size / MiB for size in found[label].values()), slope(found[label]) / MiB)


if __name__ == "__main__":
    who, collation, workers, load, batches = json.loads(sys.argv[1])
    run(who, collation, workers, Load(*load), batches)
