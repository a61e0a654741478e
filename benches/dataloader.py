"""Compares `fastpipe.torch.DataLoader` with its base class, torch's DataLoader. Both take turns in one process.

`--parts` selects from four parts:

* `grid`: Batches per second by item size, item type (NumPy array or tensor), number of workers, collation, and start
  method. Items are almost free to create, so the figures show the overhead of the loaders. Workers are persistent and
  have started before timing begins. torch has no worker threads, so ours are compared with its forked processes.
* `first`: Time to the first batch. Each item sleeps for 20 ms, so two cores are enough for eight workers. The ideal is
  the time that eight workers need for a batch of 32 items.
* `slow`: Time of an epoch in which one item in a hundred takes 2 seconds. Each round draws different slow items.
* `memory`: Peaks of shared and private memory for 1 to 16 workers; see `dataloader_memory.py`.

The full grid takes about an hour; `--methods` and `--workers` select parts of it. Each spawned worker imports torch,
which takes two seconds of CPU time, so 8 and 16 spawned workers are only measured with default collation. Workers of a
fork server start quickly because the server has already imported torch.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import dataloader_items as items
import dataloader_memory
from harness import Bench, Turns, take_turns
from harness.data import drain, slept

LEAST = 0.95
WANTED = {"numpy": {"100 B": 3.0, "4 KB": 4.0, "4 MB": 2.5}, "tensor": {"100 B": 2.0, "4 KB": 2.5, "4 MB": 2.0}}
"""Target speedups with default collation and worker processes. The target of other cells is `LEAST`."""
FIRST_MOST, SOONER_LEAST, SLOW_LEAST = 1.3, 5.0, 1.5

BOTH = ("torch", "fastpipe")


# The grid.

METHODS = ("fork", "forkserver", "spawn", "thread")
TITLES = {
    "none": "Times as fast as torch's loader, without workers",
    "fork": "Times as fast, by the number of forked workers",
    "forkserver": "Times as fast, by the number of workers of a fork server, which has imported torch",
    "spawn": "Times as fast, by the number of spawned workers",
    "thread": "Times as fast, by the number of threads (torch's workers are forked)",
}
SPAWNED_MOST = 4
"""Maximum number of spawned workers for which all collations are measured."""


class Cell(NamedTuple):
    """A cell of the grid."""

    method: str
    workers: int
    collation: str
    kind: str
    size: str

    @property
    def wanted(self) -> float:
        """Target speedup over torch's loader."""
        if self.workers and self.method != "thread" and self.collation == "default":
            return WANTED[self.kind][self.size]
        return LEAST

    def shape(self, quick: bool) -> tuple[int, int]:
        """Returns the batch size, and a number of batches per epoch that exceeds what the workers prefetch."""
        large, slow = self.size == "4 MB", self.workers and self.collation == "identity"
        # torch is slow if it sends arrays through pipes or each tensor as a file, so these epochs are shorter.
        batches = max(16 if slow else 24, (2 if slow else 3) * self.workers)
        if not large:
            batches = 40 if slow and self.kind == "tensor" else 300
        return (8 if large else 32), (max(8, batches // 4) if quick else batches)


def cells(methods: list[str], workers: list[int]) -> Iterator[Cell]:
    """Yields the cells of the grid. The start method is irrelevant without workers, so that case appears once.

    Cells with many spawned workers and a `collate_fn` are omitted: starting the workers takes up to a minute per cell.
    """
    for method, number, *what in itertools.product(methods, workers, items.COLLATIONS, WANTED, items.SIZES):
        left_out = method == "spawn" and number > SPAWNED_MOST and what[0] != "default"
        if not left_out and (number or method == methods[0]):
            yield Cell(method if number else "none", number, *what)


def checked_epoch(loader: Any, dataset: items.Copies, rows: int) -> None:
    """Runs an epoch and checks the values of its first two batches and its last batch."""
    last = len(loader) - 1
    for number, batch in enumerate(loader):
        if number in (0, 1, last):
            found = np.stack([np.asarray(item) for item in batch])
            assert np.array_equal(found, dataset.expected(number * rows, rows)), f"batch {number} has other values"


def measure(cell: Cell, quick: bool) -> Turns:
    """Times three epochs of each loader in turn, and six more if the loaders are about equally fast."""
    rows, batches = cell.shape(quick)
    dataset = items.Copies(cell.kind, items.SIZES[cell.size], rows * batches)
    more = {"persistent_workers": True} if cell.workers else {}
    loaders = {
        who: items.loader(who, dataset, cell.method, cell.workers, cell.collation, batch_size=rows, **more)
        for who in BOTH
    }
    for loader in loaders.values():
        checked_epoch(loader, dataset, rows)
    tasks = {who: partial(drain, loader) for who, loader in loaders.items()}
    turns = take_turns(tasks, 1 if quick else 3)
    if not quick and turns.ratio("torch", "fastpipe").median <= 1.4:
        turns.add(take_turns(tasks, 6, warm=0))
    return turns


def part_grid(bench: Bench) -> None:
    found: dict[Cell, Turns] = {}
    columns = ("torch, ms a batch|,.3f", "fastpipe|,.3f", "times as fast (rounds)|", "wanted|g", "met")
    row = bench.table("method", "workers", "collation", "items", "size", *columns, title="All cells of the grid")
    for cell in cells(bench.args.methods, bench.args.workers):
        turns = found[cell] = measure(cell, bench.quick)
        gc.collect()
        ratio = turns.ratio("torch", "fastpipe")
        each = [turns.median(who) / cell.shape(bench.quick)[1] * 1e3 for who in BOTH]
        met = bench.target(f"grid, {' '.join(map(str, cell))}", ratio.median, least=cell.wanted)
        row(*map(str, cell), *each, ratio, cell.wanted, met)
    for method, title in TITLES.items():
        mine = {cell[1:]: turns for cell, turns in found.items() if cell.method == method}
        numbers = sorted({cell[0] for cell in mine})
        if numbers:
            row = bench.table("collation, items, size", *(f"{number}|" for number in numbers), title=title)
        for kinds in dict.fromkeys(cell[1:] for cell in mine):
            known = [mine.get((number, *kinds)) for number in numbers]
            told = ["" if one is None else f"{one.ratio('torch', 'fastpipe').median:.2f}" for one in known]
            row(", ".join(kinds), *told)
    least(bench, found)


def least(bench: Bench, found: dict[Cell, Turns]) -> None:
    """Prints the speedups with default collation and worker processes by item size and type."""
    columns = ("torch, ms a batch|,.3f", "fastpipe|,.3f", "times as fast, 2 workers|,.1f", "any number of workers|")
    title = "Batches a second, default collation, worker processes"
    row = bench.table("items", *columns, "wanted|g", title=title)
    for kind, wanted in WANTED.items():
        for size in items.SIZES:
            two = Cell("fork", 2, "default", kind, size)
            if two not in found:
                continue
            same = [c for c in found if c[2:] == two[2:] and c.method in ("fork", "forkserver", "spawn")]
            ratios = [found[cell].ratio("torch", "fastpipe").median for cell in same]
            each = [found[two].median(who) / two.shape(bench.quick)[1] * 1e3 for who in BOTH]
            told = f"{min(ratios):.1f} to {max(ratios):.1f}"
            row(f"{kind}, {size}", *each, found[two].ratio("torch", "fastpipe").median, told, wanted[size])


# The first batch.

EIGHT, ROWS, WAIT = 8, 32, 0.02


def first(make: Callable[[], Any], kept: bool) -> float:
    """Returns the seconds from `iter` to the first batch. With `kept`, the workers are persistent."""
    loader = make()
    begin = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    taken = time.perf_counter() - begin
    if kept:
        drain(iterator)
    else:
        del iterator, loader
        gc.collect()
    return taken


def part_first(bench: Bench) -> None:
    ideal = slept(WAIT) * ROWS / EIGHT
    dataset = items.Waiting(ROWS * EIGHT, WAIT)
    columns = ("torch, ms|,.0f", "fastpipe|,.0f", "of the ideal|,.2f", "met", "times as soon|,.1f", "met")
    row = bench.table("workers", *columns, title="The first batch")
    for method, collation in (("fork", "default"), ("fork", "stack"), ("thread", "default"), ("spawn", "default")):
        options: dict[str, Any] = {"method": method, "workers": EIGHT, "collation": collation, "batch_size": ROWS}
        make: Callable[..., Any] = partial(items.loader, dataset=dataset, **options)
        held = {who: make(who, persistent_workers=True) for who in BOTH}
        ways = {
            "new": {who: partial(first, partial(make, who), False) for who in BOTH},
            "kept": {who: partial(first, partial(held.get, who), True) for who in BOTH},
        }
        for way, tasks in ways.items():
            imports = (method, way) == ("spawn", "new")
            turns = take_turns(tasks, 1 if bench.quick else 2 if imports else 9)
            of_ideal = turns.median("fastpipe", "result") / ideal
            sooner = turns.ratio("torch", "fastpipe", "result").median
            name, marks = f"first batch, {way} workers by {method}, {collation} collation", ["", ""]
            if not imports:
                marks[0] = bench.target(f"{name}, of the ideal", of_ideal, most=FIRST_MOST)
                marks[1] = bench.target(f"{name}, sooner than torch's", sooner, least=SOONER_LEAST)
            each = [turns.median(who, "result") * 1e3 for who in BOTH]
            row(f"{way}, {method}, {collation}", *each, of_ideal, marks[0], sooner, marks[1])
        del held, ways
        gc.collect()


# Slow items.

SLOW_SHARE, SLOW_SECONDS = 0.01, 2.0


def part_slow(bench: Bench) -> None:
    columns = ("ideal, s|,.1f", "torch|,.1f", "fastpipe|,.1f", "times as fast (rounds)|", "met")
    row = bench.table("the other items", *columns, title="Slow items")
    for milliseconds in (1, 5, 20):
        turns, ideals = Turns([*BOTH]), []
        for seed in range(1 if bench.quick else 5):
            dataset = items.Waiting(1600, milliseconds / 1e3, SLOW_SHARE, SLOW_SECONDS, seed)
            ideals.append(float(dataset.seconds.sum()) / EIGHT)
            loaders = {who: items.loader(who, dataset, "fork", EIGHT, "default", batch_size=ROWS) for who in BOTH}
            order = BOTH[:: -1 if seed % 2 else 1]
            turns.add(take_turns({who: partial(drain, loaders[who]) for who in order}, 1, warm=0))
        ratio = turns.ratio("torch", "fastpipe")
        met = bench.target(f"slow items, the others of {milliseconds} ms", ratio.median, least=SLOW_LEAST)
        row(f"{milliseconds} ms", statistics.median(ideals), *(turns.median(who) for who in BOTH), ratio, met)


if __name__ == "__main__":
    parts = {"grid": part_grid, "first": part_first, "slow": part_slow, "memory": dataloader_memory.part}
    what: dict[str, Any] = {"methods": (list(METHODS), ["fork", "thread"]), "workers": ([0, 1, 2, 4, 8, 16], [0, 2])}
    Bench("dataloader", __doc__, packages=("torch", "numpy"), parts=list(parts), **what).run(parts)
