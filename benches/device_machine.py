"""The GPU that `device_parts.py` measures, or plain memory in its place."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import generate
from harness import take_turns

if TYPE_CHECKING:
    import fastpipe
    from fastpipe.cuda._torch import TorchEngine

Figures = Iterator[tuple[str, dict[str, Any]]]

TESTS = Path(__file__).resolve().parent.parent / "tests"
ROWS = {"a": 32_768, "b": 131_072, "c": 131_072, "d": 262_144}
"""Rows of the data sets: 40 to 230 MB."""


class Machine:
    """The GPU, or plain memory in its place.

    Args:
        dry_run: Whether plain memory replaces the GPU, and the data is small.

    Attributes:
        dry_run: As above.
        device: Torch's name of where batches are copied to.
        rounds: How often ways take turns.
    """

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.device = "cpu" if dry_run else "cuda:0"
        self.rounds = 1 if dry_run else 5

    def few(self, number: int, fewest: int = 1) -> int:
        """The number, or a small share of it in a dry run."""
        return max(fewest, number // 64) if self.dry_run else number

    def file(self, dataset: str, codec: str = "null") -> Path:
        """An Avro file of a data set."""
        path, _ = generate.generate(dataset, self.few(ROWS[dataset], 2048), codec=codec)
        return path

    def threads(self) -> list[int]:
        """1, 2, 4, ... up to the processors that may be used, and 16 at most."""
        available = min(2 if self.dry_run else 16, len(os.sched_getaffinity(0)))
        return sorted({available, *(2**k for k in range(5) if 2**k <= available)})

    def engine(self) -> TorchEngine:
        """Returns the engine that copies batches."""
        from fastpipe._interop.tensors import Forms
        from fastpipe.cuda._torch import TorchEngine

        if not self.dry_run:
            return TorchEngine(self.device, Forms(sparse="coo"))
        sys.path.append(str(TESTS))
        plain: Any = importlib.import_module("plain_gpu")
        engine: TorchEngine = plain.PlainEngine("cpu", Forms(sparse="coo"))
        return engine

    def prefetch(self, reader: fastpipe.Reader, **options: Any) -> Iterable[Any]:
        """The reader's batches on the device."""
        import fastpipe.cuda

        if not self.dry_run:
            return fastpipe.cuda.prefetch(reader, self.device, **options)
        return fastpipe.cuda.Prefetcher(reader, [self.engine()], 2, several=False)

    def synchronize(self) -> None:
        """Waits for all that was started on the device."""
        import torch

        if not self.dry_run:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds until all is done on the device, too."""
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started

    def medians(self, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
        """Medians of several ways, which take turns; the first turn warms up."""
        turns = take_turns(ways, self.rounds)
        return {name: turns.median(name, "result") for name in ways}
