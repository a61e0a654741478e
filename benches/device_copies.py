"""Parts of `device.py` that measure how fast batches and random rows are copied to the device."""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device_machine import ROWS, Figures, Machine
from harness.data import features

if TYPE_CHECKING:
    import torch

    import fastpipe

HELD = 8
"""Number of decoded batches that are copied repeatedly."""


class Batches:
    """Decoded batches in page-locked memory, with the engine that copies them."""

    def __init__(self, device: Machine, dataset: str, batch_size: int, num_threads: int) -> None:
        import fastpipe
        from fastpipe import _fastpipe

        self.engine = device.engine()
        options: dict[str, Any] = {"features": features(dataset), "num_threads": num_threads}
        reader = fastpipe.read_avro(device.file(dataset), batch_size=batch_size, drop_last=True, epochs=None, **options)
        started = reader._start(_fastpipe.PassMemory(reader._data.handle, self.engine.allocate, HELD))
        self.batches = list(itertools.islice(started, HELD))
        self._reader, self._started = reader, started
        pieces = [[piece.nbytes for piece, _ in self._packed(batch).pieces] for batch in self.batches]
        self.nbytes = statistics.mean(map(sum, pieces))
        self.pieces = statistics.mean(map(len, pieces))

    def _packed(self, batch: dict[str, Any]) -> Any:
        from fastpipe.cuda._staging import PackedBatch

        return PackedBatch(batch, self.engine.allocate)

    def ring(self, count: int) -> Any:
        """Returns a staging ring, as `fastpipe.cuda` uses it, that yields `count` batches on the device."""
        from fastpipe.cuda._staging import Drawn, StagingRing

        source = (Drawn(self.batches[i % HELD], None) for i in range(count))
        return StagingRing(source, self.engine, 2, stop=lambda: None, name="copies")


def _product(device: Machine, longest: float) -> tuple[torch.Tensor, float]:
    """Returns the largest matrix that can be squared in `longest` seconds, or the smallest one, and its time."""
    import torch

    found: tuple[torch.Tensor, float] | None = None
    for size in (64,) if device.dry_run else (128, 256, 512, 1024, 2048, 4096):
        matrix = torch.randn(size, size, device=device.device)
        several = partial(lambda one: [torch.mm(one, one) for _ in range(10)], matrix)
        # The first product of a size also loads torch's kernels, so the minimum counts.
        seconds = min(device.seconds(several) for _ in range(3)) / 10
        if found is not None and seconds > longest:
            break
        found = matrix, seconds
    assert found is not None
    return found


def copies(device: Machine) -> Figures:
    """Compares copies by a ring with bare copies of the same size, and measures their overlap with compute."""
    import torch

    many = device.few(200, 4)
    for dataset, batch_size in itertools.product("ab", (1024, 8192)):
        # With one thread, a batch consists of many memory blocks. With several threads, it consists of two.
        for num_threads in (1, 2):
            batches = Batches(device, dataset, device.few(batch_size, 64), num_threads)
            nbytes = int(batches.nbytes)
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not device.dry_run)
            target = torch.empty(nbytes, dtype=torch.uint8, device=device.device)

            def bare(host: torch.Tensor = host, target: torch.Tensor = target) -> None:
                for _ in range(many):
                    target.copy_(host, non_blocking=True)

            def ring(batches: Batches = batches) -> None:
                for _ in batches.ring(many):
                    pass

            copying = min(device.seconds(ring) for _ in range(2)) / many
            # Size the products so that a few of them fill 1.5 times the time of a copy.
            matrix, one = _product(device, copying / 2)
            products = 1 if device.dry_run else max(1, round(1.5 * copying / one))

            def multiply(matrix: torch.Tensor = matrix, products: int = products) -> None:
                for _ in range(products):
                    torch.mm(matrix, matrix)

            def compute(multiply: Callable[[], None] = multiply) -> None:
                for _ in range(many):
                    multiply()

            def both(batches: Batches = batches, multiply: Callable[[], None] = multiply) -> None:
                for _ in batches.ring(many):
                    multiply()

            ways: dict[str, Callable[[], None]] = {"bare": bare, "ring": ring, "compute": compute, "both": both}
            found = device.medians({name: partial(device.seconds, way) for name, way in ways.items()})
            yield (
                f"({dataset}), {batch_size:,} rows, {num_threads} threads",
                {
                    "MB a batch": batches.nbytes / 1e6,
                    "pieces": batches.pieces,
                    "bare copy, GB/s": many * nbytes / found["bare"] / 1e9,
                    "ring, GB/s": many * batches.nbytes / found["ring"] / 1e9,
                    "ring / bare": found["bare"] / found["ring"],
                    "hidden": (found["ring"] + found["compute"] - found["both"]) / found["ring"],
                },
            )


def prefetch(device: Machine) -> Figures:
    """Measures records per second from a file to the device with PyTorch and CuPy, and to NumPy arrays."""
    import fastpipe

    frameworks = ["torch"]
    if not device.dry_run and importlib.util.find_spec("cupy") is not None:
        frameworks.append("cupy")
    for dataset, num_threads in itertools.product("ab", device.threads()):
        options: dict[str, Any] = {"features": features(dataset), "num_threads": num_threads}
        path, rows = device.file(dataset), device.few(ROWS[dataset], 2048)

        def once(batches: Iterable[Any], rows: int = rows) -> float:
            return rows / device.seconds(lambda: [None for _ in batches])

        def reader(path: Path = path, options: dict[str, Any] = options) -> fastpipe.Reader:
            return fastpipe.read_avro(path, batch_size=1024, **options)

        ways: dict[str, Callable[[], float]] = {"numpy": partial(once, reader())}
        for framework in frameworks:
            ways[framework] = partial(once, device.prefetch(reader(), framework=framework))
        found = device.medians(ways)
        yield f"({dataset}), {num_threads} threads", {f"{name}, records/s": round(rate) for name, rate in found.items()}


def fill(device: Machine) -> Figures:
    """Times filling a device with random rows of a CSV file, and a bare copy of the same size."""
    import torch

    import fastpipe.cuda

    columns = 20
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder, "rows.csv"), Path(folder, "index")
        total = _write_csv(path, columns, chunks=device.few(64))
        rows = total // 2
        options: dict[str, Any] = {"rows": rows, "seed": 7, "index_cache": cache}
        fastpipe.cuda.fill(path, [device.device], **options)
        nbytes = rows * columns * 4
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not device.dry_run)
        target = torch.empty(nbytes, dtype=torch.uint8, device=device.device)
        found = device.medians(
            {
                "fill": lambda: device.seconds(lambda: fastpipe.cuda.fill(path, [device.device], **options)),
                "blocks": lambda: device.seconds(
                    lambda: fastpipe.cuda.fill(path, [device.device], method="block", **options)
                ),
                "bare": lambda: device.seconds(lambda: target.copy_(host, non_blocking=True)),
            }
        )
    yield f"{rows:,} rows, {nbytes / 1e6:.0f} MB", {f"{name}, s": seconds for name, seconds in found.items()}


def _write_csv(path: Path, columns: int, chunks: int) -> int:
    """Writes a CSV file of random floats in identical chunks of 3 MB. Returns the number of rows."""
    import numpy as np

    values = np.random.default_rng(0).standard_normal((16_384, columns)) * 10
    chunk = "".join(",".join(f"{value:.6g}" for value in row) + "\n" for row in values)
    with path.open("w") as file:
        file.write(",".join(f"c{i}" for i in range(columns)) + "\n")
        for _ in range(chunks):
            file.write(chunk)
    # fastpipe keeps no index of a file that was modified just now.
    os.utime(path, (1e9, 1e9))
    return chunks * len(values)
