"""Filling four devices with random rows of a CSV file, beside four fills one after the other, and beside pandas.

    python benches/fill.py [--megabytes 1000] [--rounds 5] [--share 0.05] [--gpus 0]

One file of 20 columns of floats, cached by the system; each device gets a twentieth of the rows as float32. Figures are
medians over rounds, ratios those of the medians. Devices are memory of this process, or GPUs with `--gpus`; then it is
also shown how fast a bare copy from page-locked memory is, and how much of copying is hidden.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
import fastpipe.cuda
from csv_files import COLUMNS, timed, write

try:
    import pandas as pd
except ImportError:  # It is measured where it is at hand.
    pd = None

SEED = 7


def with_pandas(path: Path, rows: int, total: int, parts: int) -> list[Any]:
    """What one does without fastpipe: read all, draw, and copy each part."""
    frame = pd.read_csv(path, dtype=np.float32)
    drawn = np.random.default_rng(SEED).permutation(total)[: rows * parts].reshape(parts, rows)
    return [np.ascontiguousarray(frame.to_numpy()[np.sort(part)]) for part in drawn]


def skipping(path: Path, rows: int, total: int, parts: int) -> list[Any]:
    """The same by a pass of pandas for each device, which passes over the lines that weren't drawn."""
    drawn = np.random.default_rng(SEED).permutation(total)[: rows * parts].reshape(parts, rows)
    arrays = []
    for part in drawn:
        wanted = set(part.tolist())

        def passed_over(line: int, wanted: set[int] = wanted) -> bool:
            return line > 0 and line - 1 not in wanted

        arrays.append(pd.read_csv(path, dtype=np.float32, skiprows=passed_over).to_numpy())
    return arrays


def bare_copies(gpu: str, nbytes: int) -> Callable[[], None]:
    """Copies of page-locked memory to a GPU, with nothing else to do."""
    import torch

    host, device = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(nbytes, dtype=torch.uint8, device=gpu),
    )

    def copy() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize(gpu)

    return copy


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--gpus", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder, "rows.csv"), Path(folder, "index")
        total = write(path, arguments.megabytes)
        rows = int(total * arguments.share)
        devices = [f"cuda:{i}" for i in range(arguments.gpus)] or ["cpu"] * 4
        options: dict[str, Any] = {"rows": rows, "seed": SEED, "index_cache": cache}
        fastpipe.cuda.fill(path, devices, **options)
        sides: dict[str, Callable[[], Any]] = {
            "fill": lambda: fastpipe.cuda.fill(path, devices, **options),
            "fill, columns": lambda: fastpipe.cuda.fill(path, devices, order="F", **options),
            "fill, blocks": lambda: fastpipe.cuda.fill(path, devices, method="block", **options),
            "fill, a quarter of blocks": lambda: fastpipe.cuda.fill(
                path, devices, method="block", share=0.25, **options
            ),
            "fill, no index": lambda: fastpipe.cuda.fill(path, devices, rows=rows, seed=SEED),
            "one after the other": lambda: [fastpipe.cuda.fill(path, [device], **options) for device in devices],
        }
        if pd is not None and not arguments.gpus:
            sides["pandas, all rows"] = lambda: with_pandas(path, rows, total, len(devices))
            sides["pandas, skiprows"] = lambda: skipping(path, rows, total, len(devices))
        seconds = timed(sides, arguments.rounds)
        nbytes = rows * len(COLUMNS) * 4 * len(devices)
        print(f"\n{rows} rows for each of {len(devices)} devices, {nbytes / 1e6:.0f} MB in all, of {total}\n")
        print("| | seconds | times as long as fill |\n|---|--:|--:|")
        for name, taken in seconds.items():
            print(f"| {name} | {taken:.3f} | {taken / seconds['fill']:.2f} |")
        if arguments.gpus:
            each = nbytes // len(devices)
            bare = timed({"bare": bare_copies(devices[0], each)}, arguments.rounds)["bare"]
            filled = fastpipe.cuda.fill(path, devices, **options)
            print(f"\na bare copy of {each / 1e6:.0f} MB to {devices[0]}: {bare:.3f} s\n{filled.explain()}")


if __name__ == "__main__":
    main()
