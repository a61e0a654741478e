"""Compares filling four devices at once with random rows of a CSV file to four separate fills and to pandas.

The file has 20 float columns and is in the page cache. Each device gets a twentieth of the rows as float32. Ratios are
ratios of medians. By default, the devices are host memory. With `--gpus` they are GPUs, and the bench also reports the
time of a bare copy from page-locked memory and how well copying overlaps with reading.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fastpipe
import fastpipe.cuda
from csv_files import COLUMNS, write
from harness import Bench, take_turns

SEED = 7


def with_pandas(path: Path, rows: int, total: int, parts: int) -> list[Any]:
    """Reads the whole file with pandas, then draws the rows and copies them for each device."""
    frame = pd.read_csv(path, dtype=np.float32)
    drawn = np.random.default_rng(SEED).permutation(total)[: rows * parts].reshape(parts, rows)
    return [np.ascontiguousarray(frame.to_numpy()[np.sort(part)]) for part in drawn]


def skipping(path: Path, rows: int, total: int, parts: int) -> list[Any]:
    """Reads the file once per device with pandas, and skips the lines that weren't drawn."""
    drawn = np.random.default_rng(SEED).permutation(total)[: rows * parts].reshape(parts, rows)

    def read(wanted: set[int]) -> Any:
        return pd.read_csv(path, dtype=np.float32, skiprows=lambda line: line > 0 and line - 1 not in wanted).to_numpy()

    return [read(set(part.tolist())) for part in drawn]


def bare_copies(gpu: str, nbytes: int) -> Callable[[], None]:
    """Returns a function that copies page-locked memory to a GPU."""
    import torch

    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device=gpu)

    def copy() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize(gpu)

    return copy


def main(bench: Bench) -> None:
    """Measures all variants."""
    with tempfile.TemporaryDirectory() as folder:
        path, cache, gpus = Path(folder, "rows.csv"), Path(folder, "index"), bench.args.gpus
        total = write(path, bench.args.megabytes)
        rows = int(total * bench.args.share)
        devices = [f"cuda:{i}" for i in range(gpus)] or ["cpu"] * 4
        options: dict[str, Any] = {"rows": rows, "seed": SEED, "index_cache": cache}
        fill = partial(fastpipe.cuda.fill, path)
        fill(devices, **options)
        sides: dict[str, Callable[[], Any]] = {
            "fill": partial(fill, devices, **options),
            "fill, columns": partial(fill, devices, order="F", **options),
            "fill, blocks": partial(fill, devices, method="block", **options),
            "fill, a quarter of blocks": partial(fill, devices, method="block", share=0.25, **options),
            "fill, no index": partial(fill, devices, rows=rows, seed=SEED),
            "one after the other": lambda: [fill([device], **options) for device in devices],
        }
        if not gpus:
            sides["pandas, all rows"] = lambda: with_pandas(path, rows, total, len(devices))
            sides["pandas, skiprows"] = lambda: skipping(path, rows, total, len(devices))
        turns = take_turns(sides, bench.rounds, warm=0)
        nbytes = rows * len(COLUMNS) * 4 * len(devices)
        title = f"{rows} rows for each of {len(devices)} devices, {nbytes / 1e6:.0f} MB in all, of {total}"
        row = bench.table("", "seconds|,.3f", "times as long as fill|,.2f", title=title)
        for name in sides:
            row(name, turns.median(name), turns.median(name) / turns.median("fill"))
        if gpus:
            each = nbytes // len(devices)
            bare = take_turns({"bare": bare_copies(devices[0], each)}, bench.rounds, warm=0).median("bare")
            row(f"a bare copy of {each / 1e6:.0f} MB to {devices[0]}", bare)
            print(fill(devices, **options).explain())


if __name__ == "__main__":
    sizes: dict[str, Any] = {"megabytes": (1000, 20), "share": 0.05, "gpus": 0}
    Bench("fill", __doc__, rounds=(5, 2), packages=("pandas",), **sizes).run(main)
