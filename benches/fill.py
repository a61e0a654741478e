"""Compares filling devices at once with random rows of a CSV file to separate fills and to pandas.

The file has 20 float columns and is in the page cache. Each device gets a twentieth of the rows as float32. Ratios are
ratios of medians. By default, the devices are host memory. With `--gpus` they are GPUs.

- `ways`: four devices. With `--gpus`, also the time of a bare copy from page-locked memory, and how well copying
  overlaps with reading.
- `devices`: 1, 2, 4 and 8 devices, without an index, of which `plots.py` draws a picture. pandas reads the file in
  chunks, once for each device, as a program does that can't hold the rows of all devices.
- `large`: four devices from a file of 10 GB (`--large-megabytes`), once, with peak private memory above that at the
  start, without that of devices. pandas fills only one device. Runs only if named in `--parts`.
"""

from __future__ import annotations

import tempfile
import time
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
from harness.memory import MB, sampled

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


def in_chunks(path: Path, rows: int, total: int, parts: int) -> list[Any]:
    """Reads the file in chunks with pandas once per device, and keeps the drawn rows of each chunk."""
    drawn = np.random.default_rng(SEED).permutation(total)[: rows * parts].reshape(parts, rows)
    return [chunked(path, np.sort(part)) for part in drawn]


def chunked(path: Path, wanted: np.ndarray) -> np.ndarray:
    """Reads rows by their ascending indices, a chunk of the file at a time."""
    kept, at = [], 0
    for frame in pd.read_csv(path, dtype=np.float32, chunksize=100_000):
        first, last = np.searchsorted(wanted, (at, at + len(frame)))
        kept.append(frame.to_numpy()[wanted[first:last] - at])
        at += len(frame)
    return np.concatenate(kept)


def bare_copies(gpu: str, nbytes: int) -> Callable[[], None]:
    """Returns a function that copies page-locked memory to a GPU."""
    import torch

    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device=gpu)

    def copy() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize(gpu)

    return copy


def devices_of(bench: Bench, count: int) -> list[str]:
    """Returns the names of devices."""
    return [f"cuda:{i}" for i in range(count)] if bench.args.gpus else ["cpu"] * count


def ways(bench: Bench) -> None:
    """Compares ways to fill four devices."""
    with tempfile.TemporaryDirectory() as folder:
        path, cache, gpus = Path(folder, "rows.csv"), Path(folder, "index"), bench.args.gpus
        total = write(path, bench.args.megabytes)
        rows = int(total * bench.args.share)
        devices = devices_of(bench, gpus or 4)
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


def devices(bench: Bench) -> None:
    """Compares numbers of devices."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.csv")
        total = write(path, bench.args.chart_megabytes)
        rows = int(total * bench.args.share)
        fill = partial(fastpipe.cuda.fill, path, rows=rows, seed=SEED)
        counts = [count for count in (1, 2, 4, 8) if count <= (bench.args.gpus or 8)]
        sides: dict[tuple[str, int], Callable[[], Any]] = {}
        for count in counts:
            names = devices_of(bench, count)
            sides["fill", count] = partial(fill, names)
            sides["buffered", count] = partial(fill, names, method="buffered")
            sides["in turn", count] = lambda names=names: [fill([name]) for name in names]  # type: ignore[misc]
            sides["pandas", count] = partial(in_chunks, path, rows, total, count)
        turns = take_turns(sides, bench.rounds, warm=0)
        columns = ("`fill`, s", '`method="buffered"`, s', "one after the other, s", "pandas, s")
        row = bench.table(
            "devices",
            *(f"{column}|,.3f" for column in columns),
            "one after the other / `fill`|,.2f",
            "pandas / `fill`|,.1f",
            title="1 to 8 devices",
        )
        for count in counts:
            each = [turns.median((kind, count)) for kind in ("fill", "buffered", "in turn", "pandas")]
            ratios = [turns.ratio((kind, count), ("fill", count)).median for kind in ("in turn", "pandas")]
            row(str(count), *each, *ratios)


def large(bench: Bench) -> None:
    """Fills four devices once from a file that is larger than memory allows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.csv")
        total = write(path, bench.args.large_megabytes)
        bench.say(f"wrote {total:,} rows, {path.stat().st_size / 1e6:,.0f} MB")
        rows = int(total * bench.args.share)
        four = devices_of(bench, 4)
        fill = partial(fastpipe.cuda.fill, path, rows=rows, seed=SEED, memory_limit=bench.args.memory)
        sides: dict[str, Callable[[], Any]] = {
            "`fill`": partial(fill, four),
            '`method="buffered"`': partial(fill, four, method="buffered"),
            "one after the other": lambda: [fill([device]) for device in four],
            "pandas in chunks, one device": lambda: in_chunks(path, rows, total, 1),
        }
        row = bench.table("", "seconds|,.1f", "peak MB|,.0f", title="Four devices from a large file")
        for name, run in sides.items():
            with sampled() as peak:
                begun = time.perf_counter()
                filled = run()
                seconds = time.perf_counter() - begun
            row(name, seconds, (peak.bytes - peak.idle - len(filled) * rows * len(COLUMNS) * 4) / MB)
            del filled


PARTS = {"ways": ways, "devices": devices, "large": large}

if __name__ == "__main__":
    sizes: dict[str, Any] = {"megabytes": (1000, 20), "share": 0.05, "gpus": 0, "memory": "256MB"}
    sizes |= {"chart_megabytes": (300, 10), "large_megabytes": (10_000, 20), "parts": ["ways", "devices"]}
    Bench("fill", __doc__, rounds=(5, 2), packages=("pandas",), **sizes).run(PARTS)
