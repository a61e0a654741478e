"""Whether servers together make what each alone makes: batches that cost time and no processor.

A source waits for each batch, as one that is far away does; so any number of servers fit on a machine of few cores, and
what is measured is the sharing of the work: three servers beside three times one, and two of which one is ten times
slower beside their sum.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fastpipe

ROWS, BATCHES = 1024, 400
# Seconds for a batch.
PACES = {"one": [0.02], "three": [0.02] * 3, "uneven": [0.02, 0.2]}

CONFIG = """
import sys
sys.path.insert(0, {folder!r})
import service_three
reader = service_three.waiting({pace})
"""


class Waiting:
    """Units of a batch each, for which it waits.

    Args:
        pace: seconds for each.
    """

    def __init__(self, pace: float) -> None:
        import pyarrow as pa

        self.schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
        self.rows: Sequence[int] = [ROWS] * BATCHES
        self._pace = pace

    def read(self, unit: int) -> Any:
        """A unit, after a while."""
        import pyarrow as pa

        time.sleep(self._pace)
        return pa.table({"x": pa.array(range(ROWS * unit, ROWS * (unit + 1)), pa.int64())})

    def fingerprint(self) -> str:
        """The same at all paces."""
        return "waiting"


def waiting(pace: float) -> fastpipe.Reader:
    """A reader that makes a batch each `pace` seconds."""
    return fastpipe.read_units(Waiting(pace), batch_size=ROWS, num_fetches=1, num_threads=1)


def _rate(urls: list[str], epoch: int) -> float:
    """Batches a second of an epoch that servers haven't kept; each must be the right one."""
    remote = fastpipe.connect(urls)
    remote.set_epoch(epoch)
    begun = time.perf_counter()
    for number, batch in enumerate(remote):
        assert batch["x"][0] == ROWS * number
    assert number + 1 == BATCHES
    return BATCHES / (time.perf_counter() - begun)


def measure(
    folder: Path, started: Callable[[Path], tuple[subprocess.Popen[str], str]], rounds: int
) -> dict[str, list[float]]:
    """Rates of each set of servers by the sum of their paces, one a round.

    Args:
        folder: for the servers' files.
        started: starts `fastpipe serve` of one of these, and tells its process and its URL.
        rounds: how many.
    """
    with contextlib.ExitStack() as stack:
        urls: dict[str, list[str]] = {}
        for name, paces in PACES.items():
            for number, pace in enumerate(paces):
                config = folder / f"{name}{number}.py"
                config.write_text(CONFIG.format(folder=str(Path(__file__).parent), pace=pace))
                process, url = started(config)
                stack.callback(process.wait)
                stack.callback(process.kill)
                urls.setdefault(name, []).append(url)
        found: dict[str, list[float]] = {
            name: [] for name in ("one", "three over three times one", "uneven over the sum")
        }
        for epoch in range(rounds):
            one = _rate(urls["one"], epoch)
            found["one"].append(one)
            found["three over three times one"].append(_rate(urls["three"], epoch) / (3 * one))
            found["uneven over the sum"].append(_rate(urls["uneven"], epoch) / (1.1 * one))
        return found


def table(found: dict[str, list[float]]) -> str:
    """As lines to print."""
    one, *ratios = found.items()
    lines = [f"one server that waits: {statistics.median(one[1]):.1f} batches/s"]
    for name, values in ratios:
        median = statistics.median(values)
        met = "met" if median >= 0.9 else "MISSED"
        lines.append(f"{name}: {median:.2f} ({min(values):.2f} to {max(values):.2f}), wanted 0.9: {met}")
    return "\n".join(lines)
