"""Whether servers together make what each alone makes: batches that cost time and no processor.

A source waits for each batch, as one that is far away does; so any number of servers fit on a machine of few cores, and
what is measured is the sharing of the work: three servers beside three times one, and two of which one is ten times
slower beside their sum.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastpipe
from harness import HERE, Bench, Ratio, take_turns

ROWS, BATCHES = 1024, 400
# Seconds for a batch.
PACES = {"one": [0.02], "three": [0.02] * 3, "uneven": [0.02, 0.2]}

CONFIG = """
import sys
sys.path.insert(0, {folder!r})
import fastpipe
from harness.data import Waiting
reader = fastpipe.read_units(Waiting({batches}, {rows}, {pace}), batch_size={rows}, num_fetches=1, num_threads=1)
"""


def _rate(urls: list[str], epoch: int) -> float:
    """Batches a second of an epoch that servers haven't kept; each must be the right one."""
    remote = fastpipe.connect(urls)
    remote.set_epoch(epoch)
    begun = time.perf_counter()
    for number, batch in enumerate(remote):
        assert batch["x"][0] == ROWS * number
    assert number + 1 == BATCHES
    return BATCHES / (time.perf_counter() - begun)


def measure(bench: Bench, folder: Path, served: Callable[[Path], Any]) -> None:
    """Measures each set of servers by the sum of their paces; `served` starts the server of a file."""
    with contextlib.ExitStack() as stack:
        urls: dict[str, list[str]] = {}
        for name, paces in PACES.items():
            for number, pace in enumerate(paces):
                config = folder / f"{name}{number}.py"
                config.write_text(CONFIG.format(folder=str(HERE), batches=BATCHES, rows=ROWS, pace=pace))
                _, said = stack.enter_context(served(config))
                urls.setdefault(name, []).append(said.split()[-1])
        # The epoch of a round is one that servers haven't kept.
        epochs = {name: itertools.count() for name in PACES}
        ways = {name: lambda name=name: _rate(urls[name], next(epochs[name])) for name in PACES}
        turns = take_turns(ways, 2 if bench.quick else 5, warm=0)
    row = bench.table(
        "servers", "batches/s|,.1f", "over the sum of their paces (rounds)|", "wanted|g", "met", title="Three"
    )
    row("one", turns.median("one", "result"))
    for name, times in (("three", 3.0), ("uneven", 1.1)):
        ratio = Ratio(*(each / times for each in turns.ratio(name, "one", "result")))
        met = bench.target(f"{name} servers over the sum of their paces", ratio.median, least=0.9)
        row(name, turns.median(name, "result"), ratio, 0.9, met)
