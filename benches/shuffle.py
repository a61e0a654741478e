"""Measures what shuffling costs: the four orders in turn, over the same file, with one thread on one core.

The file is data set (a): 6 scalars, 8 dense vectors and 5 sparse features. All readers have the same features, batch
size and look-ahead; each is made once, and read as often as there are rounds, so that none pays for fresh memory. A
round's ratio is the time of an order to that of sequential order in the same round; shown are medians. CPU time is
that of the process, for machines on which other programs run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import fastpipe
import generate
import peers

ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "window": {"shuffle": "window"},
    "block": {"shuffle": "block"},
    "buffer": {"shuffle": "buffer"},
}


def measure(reader: fastpipe.Reader) -> tuple[float, float]:
    """Seconds of a pass, by the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    rows = sum(len(next(iter(batch.values()))) for batch in reader)
    assert rows == reader.num_rows
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--codec", default="null")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--shuffle-buffer", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    path, _ = generate.generate("a", arguments.rows, codec=arguments.codec)
    features = peers.FastpipeWorker().features("a")
    readers = {}
    for name, order in ORDERS.items():
        options = order and {**order, "shuffle_buffer": arguments.shuffle_buffer, "seed": 1}
        readers[name] = fastpipe.read_avro(
            path, features=features, batch_size=arguments.batch_size, num_threads=1, **options
        )
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for turn in range(arguments.rounds + 1):
        for name, reader in readers.items():
            taken = measure(reader)
            if turn > 0:  # The first round fills the pools.
                times[name].append(taken)
    print(f"{'order':12} {'records/s':>12} {'time':>8} {'CPU time':>9}   (ratios to sequential, medians of rounds)")
    for name, rounds in times.items():
        pairs = list(zip(rounds, times["sequential"], strict=True))
        wall, cpu = (statistics.median(mine[i] / base[i] for mine, base in pairs) for i in (0, 1))
        rate = arguments.rows / statistics.median(seconds for seconds, _ in rounds)
        print(f"{name:12} {rate:12,.0f} {wall:8.2f} {cpu:9.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
