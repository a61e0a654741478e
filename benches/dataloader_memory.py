"""Measures the memory of fastpipe's and torch's DataLoaders by the number of workers.

A separate program loads batches and pauses for 20 ms after each, so the workers prefetch as much as they may. This
process samples shared memory every 10 ms. It samples private memory every 100 ms because that requires a walk through
the page tables.

* Shared memory is the size of all open shared-memory files, each counted once. torch uses files in /dev/shm, fastpipe
  an anonymous file (`memfd`).
* Private memory is the anonymous memory of all processes. Pages that are shared after a fork count once. The memory of
  the interpreters is subtracted. It is the peak of the same program with the same workers and items of 1 KB.
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
    """Bytes per item, items per batch, and interval of the slow items that take 50 ms (0: no slow items)."""

    size: int
    rows: int
    slow: int = 0

    @property
    def batch(self) -> int:
        """Bytes per batch."""
        return self.size * self.rows

    @property
    def limit(self) -> int:
        """Maximum shared memory in bytes."""
        return (PREFETCH + 1) * self.batch + SLACK


LOADS = {
    "64 MiB": Load(4 * MiB, 16),
    # Fast workers start more batches while they wait for slow items, up to the slack.
    "4 MiB, some slow": Load(MiB // 4, 16, 50),
}
INTERPRETER = Load(1024, 16)
RUNS = (
    ("torch", "default"),
    ("fastpipe", "default"),
    ("fastpipe", "stack"),
    ("fastpipe", "identity"),
    # An iterable dataset with default collation.
    ("torch", "stream"),
    ("fastpipe", "stream"),
)


def children(process: int) -> Iterator[int]:
    """Yields the ids of a process and all its descendants."""
    yield process
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from children(int(child))
    except OSError:
        return


def shared(processes: list[int]) -> int:
    """Returns the bytes of all shared-memory files that the processes have open."""
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
    """Returns the bytes of anonymous memory of the processes. Shared pages count once."""
    kilobytes = 0
    for process in processes:
        try:
            found = re.search(r"^Pss_Anon: *(\d+) kB$", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
        except OSError:
            continue
        kilobytes += int(found[1]) if found else 0
    return kilobytes * 1024


def peaks(who: str, collation: str, workers: int, load: Load, quick: bool) -> tuple[int, int]:
    """Runs the loading program. Returns the peaks of its shared and private memory in bytes."""
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
    """Loads batches and checks their values. This is the program that `peaks` starts."""
    import dataloader_items as items

    kind = items.FilledStream if collation == "stream" else items.Filled
    dataset = kind(load.size, load.rows * batches, load.slow)
    loader = items.loader(who, dataset, "fork", workers, collation, batch_size=load.rows, prefetch_factor=PREFETCH)
    total = 0.0
    for batch in loader:
        # Read every page, as training would.
        total += sum(float(np.asarray(item)[::1024].sum()) for item in batch)
        time.sleep(0.02)
    expected = sum(range(len(dataset))) * len(range(0, load.size // 4, 1024))
    if abs(total / expected - 1) > 1e-3:
        raise RuntimeError(f"values sum up to {total}, not to {expected}")


def slope(values: dict[int, int]) -> float:
    """Returns the growth in bytes per worker by least squares."""
    return float(np.polyfit(list(values), list(values.values()), 1)[0])


@cache
def interpreters(who: str, collation: str, workers: int, quick: bool) -> int:
    """Returns the private memory of the program's processes with tiny items, in bytes."""
    return peaks(who, collation, workers, INTERPRETER, quick)[1]


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
                bare = interpreters(who, "stack" if collation == "identity" else collation, workers, bench.quick)
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
