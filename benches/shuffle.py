"""Measures the cost of shuffling: the four orders in turn, on the same file, with one thread on one core.

The file is dataset (a): 6 scalars, 8 dense vectors, and 5 sparse features. All readers have the same features, batch
size, and prefetch. Each reader is created once and reused in every round, so that no measurement includes page faults
of new memory. Ratios are relative to sequential order.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import generate
from harness import Bench, take_turns
from harness.data import cores, drain, open_reader, order


def main(bench: Bench) -> None:
    """Measures all orders."""
    args = bench.args
    os.sched_setaffinity(0, cores()[:1])
    path, _ = generate.generate("a", args.rows, codec=args.codec)
    names = ("sequential", "window", "block", "buffer")
    readers = {
        name: open_reader(path, "a", batch_size=args.batch_size, num_threads=1, **order(name, args.shuffle_buffer))
        for name in names
    }
    turns = take_turns({name: partial(drain, reader) for name, reader in readers.items()}, bench.rounds)
    row = bench.table("order", "records/s|,.0f", "times as long|,.2f", "by CPU time|,.2f")
    for name in names:
        ratios = [turns.ratio(name, "sequential", figure).median for figure in ("seconds", "cpu")]
        row(name, args.rows / turns.median(name), *ratios)


if __name__ == "__main__":
    sizes: dict[str, Any] = {"rows": (65_536, 32_768), "batch_size": 1024, "shuffle_buffer": 16_384}
    Bench("shuffle", __doc__, rounds=(15, 3), codec="null", **sizes).run(main)
