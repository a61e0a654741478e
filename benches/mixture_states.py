"""Measures how long a mixture of 20 readers takes to resume at random steps of an epoch of 10^9 rows.

The readers have computed units. Their weights are 1 to 20, and their rows are in the same proportion, so an epoch has
each row once. A bench can't read to a random step, so it writes the step into the state of the beginning. `load` is
`load_state_dict`, `save` is the `state_dict` after it, and `plan` finds the rows of the next batch without reading
them. With a shuffled order, `plan` permutes one window of each reader.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

import fastpipe
from fastpipe._reader.state import checksum
from harness import Bench

READERS, BATCH_SIZE, STEPS = 20, 1024, 20
ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "windows of 16,384 rows": {"shuffle": True, "shuffle_buffer": 1 << 14},
    "windows of 1,048,576 rows": {"shuffle": True, "shuffle_buffer": 1 << 20},
}


class Numbers:
    """Units of numbers, which are computed when they are read.

    Args:
        rows: Number of rows.
        unit: Number of rows in a unit.
    """

    def __init__(self, rows: int, unit: int) -> None:
        self._unit = unit
        self.rows: Sequence[int] = [min(unit, rows - first) for first in range(0, rows, unit)]
        self.schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])

    def read(self, unit: int) -> pa.Table:
        """Returns the rows of a unit."""
        first = unit * self._unit
        return pa.table({"x": np.arange(first, first + self.rows[unit])}, schema=self.schema)

    def fingerprint(self) -> str:
        """Identifies the numbers."""
        return "numbers"


def resumed(mixed: fastpipe.Reader) -> np.ndarray:
    """Returns the milliseconds of loading, saving and planning, and the bytes of the state, `[steps, 4]`."""
    state, found = mixed.state_dict(), []
    for step in np.random.default_rng(1).integers(0, len(mixed), STEPS).tolist():
        state["progress"] |= {"step": step, "next": step}
        state["checksum"] = checksum({name: value for name, value in state.items() if name != "checksum"})
        times = [time.perf_counter()]
        mixed.load_state_dict(state)
        times.append(time.perf_counter())
        again = mixed.state_dict()
        times.append(time.perf_counter())
        mixed._order.rows(0, step)
        times.append(time.perf_counter())
        if again != state:
            raise RuntimeError(f"another state was restored at step {step}")
        found.append([*(np.diff(times) * 1e3), len(json.dumps(state))])
    return np.array(found)


def main(bench: Bench) -> None:
    """Measures each order with large and with small units."""
    times = (f"{name}, ms{most}|,.1f" for name in ("load", "save", "plan") for most in ("", " at most"))
    row = bench.table("rows in a unit|,", "order", *times, "bytes|,.0f", title="Resuming a mixture of 20 readers")
    shares = np.arange(1, READERS + 1)
    for unit in (1 << 20, 1 << 14, 1 << 10):
        for name, order in ORDERS.items():
            counts = (bench.args.rows * shares // shares.sum()).tolist()
            readers = [fastpipe.read_units(Numbers(count, unit), batch_size=BATCH_SIZE, **order) for count in counts]
            mixed = fastpipe.mix(readers, shares.tolist(), stop=bench.args.rows, seed=1)
            found = resumed(mixed)
            middle, most = np.median(found, axis=0), found.max(axis=0)
            row(unit, name, *(value for i in range(3) for value in (middle[i], most[i])), most[3])


if __name__ == "__main__":
    Bench("mixture_states", __doc__, packages=("numpy", "pyarrow"), rows=(10**9, 10**7)).run(main)
