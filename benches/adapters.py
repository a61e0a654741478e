"""Measures what adapters cost: batches of data set (a) as NumPy, Torch and JAX arrays, in turn.

On one core with one thread (`--cores 1`, the default) all that an adapter does is added to decoding; on several there
are as many threads as fastpipe chooses, as in a reader that is told nothing.

All ways read one reader, which is made once, so that none pays for fresh memory, and batches lie in the same memory for
all: where it happens to lie makes some 4 % of a difference. A round's ratio is the time of an adapter to that of plain
batches in the same round; shown are medians. Beside them Torch's `DataLoader`
over fastavro, which makes each record a dict and collates 1,024 of them to the same tensors; it reads a small part of
the file, and its rate is compared. Run it where torch, jax and fastavro are installed, as in `.venv` behind `make
deps`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import torch
from torch.utils.data import DataLoader

import fastpipe
import fastpipe.jax
import fastpipe.torch
import generate
import peers
from collated import Collate, Records


def timed(batches: Iterable[Any]) -> float:
    """Seconds that it takes to draw all batches."""
    start = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--loader-rows", type=int, default=2_048, help="that the loader over fastavro reads")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cores", type=int, default=1)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    torch.set_num_threads(1)
    # Else JAX has no int64, and has nothing to compare with.
    jax.config.update("jax_enable_x64", True)
    path, _ = generate.generate("a", arguments.rows)
    features = peers.FastpipeWorker().features("a")

    threads: Any = 1 if arguments.cores == 1 else "auto"
    reader = fastpipe.read_avro(path, features=features, batch_size=arguments.batch_size, num_threads=threads)
    records = Records(str(path), arguments.loader_rows)
    loader = DataLoader(records, batch_size=arguments.batch_size, collate_fn=Collate(reader.features))
    ways: dict[str, tuple[Callable[[], Iterable[Any]], int]] = {}
    for name, batches in {
        "NumPy": reader,
        "Torch": fastpipe.torch.IterableDataset(reader),
        "Torch, DataLoader(num_workers=0)": DataLoader(fastpipe.torch.IterableDataset(reader), batch_size=None),
    }.items():
        ways[name] = (lambda batches=batches: batches, arguments.rows)  # type: ignore[misc]
    ways["JAX"] = (lambda: fastpipe.jax.iterator(reader), arguments.rows)
    ways["DataLoader over fastavro"] = (lambda: loader, arguments.loader_rows)

    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(arguments.rounds + 1):
        for name, (batches, rows) in ways.items():
            rate = rows / timed(batches())
            if turn > 0:  # The first round fills the pools.
                rates[name].append(rate)
    print(f"{'':34} {'records/s':>12} {'time':>8}   (ratio to NumPy, medians of {arguments.rounds} rounds)")
    for name, found in rates.items():
        ratio = statistics.median(base / rate for base, rate in zip(rates["NumPy"], found, strict=True))
        print(f"{name:34} {statistics.median(found):12,.0f} {ratio:8.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
