"""Measures `fastpipe.torch.DataLoader` beside torch's, which it is a sub-class of. Both take turns in one process.

Four parts, named by `--parts`:

* `grid`: batches a second, over sizes of items, NumPy arrays and tensors, numbers of workers, ways to collate, and ways
  to start workers. Items cost next to nothing, so it is the loaders that are measured. Workers are kept for all
  epochs, and are there before anything is timed. torch has no threads: beside ours stand its forked processes.
* `first`: how soon the first batch is there. Items are waited for, for 20 ms each, so two processors are enough for
  eight workers; the ideal is what eight of them take for a batch of 32.
* `slow`: an epoch in which one item in a hundred takes 2 seconds. Where these are is drawn anew each round.
* `memory`: the peak of shared and of private memory for 1 to 16 workers, see `dataloader_memory.py`.

What was measured is kept; `--show` prints it as tables for RESULTS.md and draws the picture. `--methods` and
`--workers` choose pieces of the grid, which takes about an hour. Each spawned worker imports torch, which takes two
seconds of a core: with 8 and 16 of them only default collation is measured. Those of a fork server start at once, since
the server has imported torch before. `QUICK=1` takes a part.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

import dataloader_items as items
import dataloader_memory
import kept
import loads

LEAST = 0.95
"""Wanted: never slower than torch's loader by more than chance."""
WANTED = {"numpy": {"100 B": 3.0, "4 KB": 4.0, "4 MB": 2.5}, "tensor": {"100 B": 2.0, "4 KB": 2.5, "4 MB": 2.0}}
"""Wanted with default collation and worker processes: so many times torch's batches a second."""
FIRST_MOST, SOONER_LEAST, SLOW_LEAST = 1.3, 5.0, 1.5

BOTH = ("torch", "fastpipe")


def save(part: str, entries: dict[str, Any], quick: bool) -> None:
    """Keeps what was measured of a part."""
    versions = {name: version(name) for name in ("torch", "numpy", "fastpipe-data")}
    kept.save(f"dataloader-{part}", entries, versions, quick)


# The grid.

METHODS = ("fork", "forkserver", "spawn", "thread")
SPAWNED_MOST = 4
"""Spawned workers with which each way to collate is measured."""


class Cell(NamedTuple):
    """A cell of the grid."""

    method: str
    workers: int
    collation: str
    kind: str
    size: str

    @property
    def wanted(self) -> float:
        """How many times as fast it is meant to be, at least."""
        if self.workers and self.method != "thread" and self.collation == "default":
            return WANTED[self.kind][self.size]
        return LEAST

    def shape(self, quick: bool) -> tuple[int, int]:
        """Rows of a batch, and batches of an epoch: more than workers have at once."""
        large, slow = self.size == "4 MB", self.workers and self.collation == "identity"
        # Where torch sends arrays through pipes, or tensors as a file each, an epoch of as many takes too long.
        batches = max(16 if slow else 24, (2 if slow else 3) * self.workers)
        if not large:
            batches = 40 if slow and self.kind == "tensor" else 300
        return (8 if large else 32), (max(8, batches // 4) if quick else batches)


def cells(methods: list[str], workers: list[int]) -> Iterator[Cell]:
    """The grid. Without workers nothing is started, so that is one method.

    Left out are many spawned workers with a `collate_fn`: to start them for one cell takes up to a minute.
    """
    for method in methods:
        for number in workers:
            for collation in items.COLLATIONS:
                if number == 0 and method != methods[0]:
                    continue
                if method == "spawn" and number > SPAWNED_MOST and collation != "default":
                    continue
                for kind in WANTED:
                    for size in items.SIZES:
                        yield Cell(method if number else "none", number, collation, kind, size)


def epoch(loader: Any) -> int:
    """Batches of an epoch."""
    return sum(1 for _ in loader)


def checked_epoch(loader: Any, dataset: items.Copies, rows: int) -> None:
    """An epoch whose first and last batches are looked at.

    Raises:
        RuntimeError: if values differ from the data set's.
    """
    last = len(loader) - 1
    for number, batch in enumerate(loader):
        if number in (0, 1, last):
            found = np.stack([np.asarray(item) for item in batch])
            if not np.array_equal(found, dataset.expected(number * rows, rows)):
                raise RuntimeError(f"batch {number} isn't what the data set has")


def measure(cell: Cell, quick: bool) -> dict[str, list[float]]:
    """Seconds of epochs in turn: three, and six more where the two are about as fast."""
    rows, batches = cell.shape(quick)
    dataset = items.Copies(cell.kind, items.SIZES[cell.size], rows * batches)
    more = {"persistent_workers": True} if cell.workers else {}
    loaders = {
        who: items.loader(who, dataset, cell.method, cell.workers, cell.collation, batch_size=rows, **more)
        for who in BOTH
    }
    for loader in loaders.values():
        checked_epoch(loader, dataset, rows)
    tasks: dict[Any, Callable[[], int]] = {who: partial(epoch, loader) for who, loader in loaders.items()}
    seconds: dict[str, list[float]] = {who: [] for who in BOTH}
    for rounds in (1,) if quick else (3, 6):
        if seconds["torch"] and loads.ratio(seconds["torch"], seconds["fastpipe"]) > 1.4:
            break
        for who, turns in loads.take_turns(tasks, rounds, warm=0 if seconds["torch"] else 1).items():
            seconds[who] += [taken for taken, _ in turns]
    return seconds


def part_grid(bounds: loads.Bounds, quick: bool, methods: list[str], workers: list[int]) -> None:
    columns = [("method", -7), ("workers", 7), ("collation", -9), ("items", -6), ("size", -6)]
    row = loads.table(
        [*columns, ("torch ms", 9), ("fastpipe", 9), ("times as fast", 13), ("of rounds", -16), ("wanted", 6), ("", -6)]
    )
    for cell in cells(methods, workers):
        seconds = measure(cell, quick)
        gc.collect()
        save("grid", {",".join(map(str, cell)): seconds}, quick)
        ratios = [a / b for a, b in zip(seconds["torch"], seconds["fastpipe"], strict=True)]
        found = statistics.median(ratios)
        each = [statistics.median(seconds[who]) / cell.shape(quick)[1] * 1e3 for who in BOTH]
        mark = bounds.aim(f"grid, {' '.join(map(str, cell))}", found, least=cell.wanted)
        row(*cell, *each, f"{found:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", f"{cell.wanted:g}", mark)


# The first batch.

EIGHT, ROWS, WAIT = 8, 32, 0.02


def new_first(make: Callable[[], Any]) -> float:
    """Seconds from `iter` to the first batch, of workers that are started for it. What is behind isn't timed."""
    loader = make()
    begin = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    taken = time.perf_counter() - begin
    del iterator, loader
    gc.collect()
    return taken


def kept_first(loader: Any) -> float:
    """The same, of workers that are there."""
    begin = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    taken = time.perf_counter() - begin
    for _ in iterator:
        pass
    return taken


def slept(seconds: float) -> float:
    """What sleeping for so long really takes."""
    begin = time.perf_counter()
    for _ in range(20):
        time.sleep(seconds)
    return (time.perf_counter() - begin) / 20


def part_first(bounds: loads.Bounds, quick: bool) -> None:
    ideal = slept(WAIT) * ROWS / EIGHT
    print(f"\nideal: {ideal * 1e3:.1f} ms")
    dataset = items.Waiting(ROWS * EIGHT, WAIT)
    row = loads.table(
        [("workers", -28), ("torch ms", 9), ("fastpipe", 9), ("of ideal", 8), ("", -6), ("sooner", 7), ("", -6)]
    )
    cases = [("fork", "default"), ("fork", "stack"), ("thread", "default"), ("spawn", "default")]
    for method, collation in cases:
        make = partial(
            items.loader, dataset=dataset, method=method, workers=EIGHT, collation=collation, batch_size=ROWS
        )
        held = {who: make(who, persistent_workers=True) for who in BOTH}
        ways: dict[str, dict[Any, Callable[[], float]]] = {
            "new": {who: partial(new_first, partial(make, who)) for who in BOTH},
            "kept": {who: partial(kept_first, loader) for who, loader in held.items()},
        }
        for way, tasks in ways.items():
            imports = (method, way) == ("spawn", "new")
            turns = loads.take_turns(tasks, 1 if quick else 2 if imports else 9)
            seconds = {who: [found for _, found in taken] for who, taken in turns.items()}
            save("first", {f"{way},{method},{collation}": {**seconds, "ideal": [ideal]}}, quick)
            of_ideal = statistics.median(seconds["fastpipe"]) / ideal
            sooner = loads.ratio(seconds["torch"], seconds["fastpipe"])
            name, marks = f"first batch, {way} workers by {method}, {collation} collation", ("", "")
            if not imports:
                marks = (
                    bounds.aim(f"{name}, of the ideal", of_ideal, most=FIRST_MOST),
                    bounds.aim(f"{name}, sooner than torch's", sooner, least=SOONER_LEAST),
                )
            each = [statistics.median(seconds[who]) * 1e3 for who in BOTH]
            row(f"{way}, {method}, {collation}", *each, of_ideal, marks[0], sooner, marks[1])
        del held
        gc.collect()


# Slow items.

SLOW_SHARE, SLOW_SECONDS = 0.01, 2.0


def part_slow(bounds: loads.Bounds, quick: bool) -> None:
    length, rounds = 1600, 1 if quick else 5
    row = loads.table(
        [("others ms", 9), ("ideal s", 8), ("torch", 8), ("fastpipe", 8), ("faster", 7), ("of rounds", -14), ("", -6)]
    )
    for milliseconds in (1, 5, 20):
        seconds: dict[str, list[float]] = {who: [] for who in (*BOTH, "ideal")}
        for seed in range(rounds):
            dataset = items.Waiting(length, milliseconds / 1e3, SLOW_SHARE, SLOW_SECONDS, seed)
            seconds["ideal"].append(float(dataset.seconds.sum()) / EIGHT)
            tasks: dict[Any, Callable[[], int]] = {
                who: partial(epoch, items.loader(who, dataset, "fork", EIGHT, "default", batch_size=ROWS))
                for who in BOTH[:: -1 if seed % 2 else 1]
            }
            for who, turns in loads.take_turns(tasks, 1, warm=0).items():
                seconds[who] += [taken for taken, _ in turns]
        save("slow", {str(milliseconds): seconds}, quick)
        ratios = [a / b for a, b in zip(seconds["torch"], seconds["fastpipe"], strict=True)]
        found = statistics.median(ratios)
        mark = bounds.aim(f"slow items, the others of {milliseconds} ms", found, least=SLOW_LEAST)
        each = [statistics.median(seconds[who]) for who in ("ideal", *BOTH)]
        row(milliseconds, *each, found, f"{min(ratios):.2f} to {max(ratios):.2f}", mark)


def main() -> int:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="grid,first,slow,memory")
    methods = "fork,thread" if loads.QUICK else ",".join(METHODS)
    parser.add_argument("--methods", default=methods, help="of the grid; %(default)s")
    parser.add_argument("--workers", default="0,2" if loads.QUICK else "0,1,2,4,8,16", help="of the grid; %(default)s")
    parser.add_argument("--show", action="store_true", help="measure nothing: print what is kept, draw the picture")
    arguments = parser.parse_args()
    bounds, quick = loads.Bounds(), loads.QUICK
    if arguments.show:
        import dataloader_tables

        dataloader_tables.show(quick)
        return 0
    parts: dict[str, Callable[[], None]] = {
        "grid": lambda: part_grid(
            bounds, quick, arguments.methods.split(","), [int(each) for each in arguments.workers.split(",")]
        ),
        "first": lambda: part_first(bounds, quick),
        "slow": lambda: part_slow(bounds, quick),
        "memory": lambda: save("memory", dataloader_memory.part(bounds, quick), quick),
    }
    for part in arguments.parts.split(","):
        parts[part]()
    return bounds.status()


if __name__ == "__main__":
    raise SystemExit(main())
