"""The 46 small benchmarks of tensorflow-io's `ATDSDataset`, for either library.

`CASES` follows tensorflow-io's own benchmarks: one feature of each kind, shape and dtype, then six features with each
codec, with shuffling, and unbatched and batched again. A turn builds a dataset once and iterates over it ten times. An
iteration is timed to its last batch, because after it tf.data waits for a timer.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.job import Job, Pass
from peers.tensors import AtdsWorker, FastpipeAtdsWorker

RECORDS, BATCH_SIZE, ITERATIONS = 1024, 128, 10
AVRO = {"int32": "int", "int64": "long", "float32": "float", "float64": "double", "string": "string", "bool": "boolean"}


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        features: Class, shape and dtype of each feature.
        codec: Codec of the file.
        shuffle: `shuffle_buffer_size`.
        rebatch: Buffer size of `tf.data`'s `shuffle` between `unbatch` and `batch`. 0 doesn't rebatch.
    """

    features: dict[str, tuple[str, list[int], str]]
    codec: str = "null"
    shuffle: int = 0
    rebatch: int = 0


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    shapes: dict[str, list[list[int]]] = {"Dense": [[], [128], [64, 64]], "Sparse": [[128], [64, 64]], "Varlen": [[-1]]}
    for kind, several in shapes.items():
        for shape in several:
            for dtype in AVRO:
                found[f"{kind.lower()} {dtype} {shape or ''}".strip()] = Case({"x": (f"{kind}Feature", shape, dtype)})
    mixed: dict[str, tuple[str, list[int], str]] = {
        "label": ("DenseFeature", [], "int32"),
        "ids": ("SparseFeature", [50000], "int32"),
        "embedding": ("DenseFeature", [128], "float32"),
        "image": ("DenseFeature", [32, 32], "float64"),
        "words": ("VarlenFeature", [-1], "string"),
        "wide": ("DenseFeature", [5], "bool"),
    }
    found |= {f"mixed, {codec}": Case(mixed, codec) for codec in ("null", "deflate", "snappy")}
    found |= {f"mixed, shuffle {n:,}": Case(mixed, shuffle=n) for n in (0, 64, 512, 1024)}
    return found | {f"mixed, unbatch, shuffle {n:,}": Case(mixed, rebatch=n) for n in (64, 512, 1024)}


CASES = _cases()


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    begun, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - cpu


class SmallWorker(AtdsWorker):
    """tensorflow-io. A job's `dataset` is a key of `CASES`."""

    def _build(self, job: Job) -> Any:
        case, (made, kinds) = CASES[job.dataset], map(importlib.import_module, self.homes)
        features = {
            name: getattr(kinds, kind)(shape, getattr(self._tf, dtype))
            for name, (kind, shape, dtype) in case.features.items()
        }
        options = {"shuffle_buffer_size": case.shuffle, "num_parallel_calls": self._tf.data.AUTOTUNE}
        dataset = made.ATDSDataset([job.path], BATCH_SIZE, features, **options)
        if case.rebatch:
            dataset = dataset.unbatch().shuffle(case.rebatch).batch(BATCH_SIZE)
        return dataset.prefetch(1)

    def read(self, job: Job) -> Pass:
        datasets: list[Any] = []

        def iterate() -> None:
            batches = iter(datasets[0])
            for _ in range(RECORDS // BATCH_SIZE):
                next(batches)

        building = _timed(lambda: datasets.append(self._build(job)))
        runs = [_timed(iterate) for _ in range(ITERATIONS)]
        wall, cpu = (statistics.median(figures) for figures in zip(*runs, strict=True))
        return Pass(RECORDS, None, wall, cpu, {"building": building[1]})


class FastpipeSmallWorker(SmallWorker):
    """`fastpipe.tf.atds` with the newest TensorFlow."""

    packages = FastpipeAtdsWorker.packages
    homes = FastpipeAtdsWorker.homes


class FastpipeSameSmallWorker(FastpipeSmallWorker):
    """`fastpipe.tf.atds` with tensorflow-io's TensorFlow."""

    def __init__(self) -> None:
        sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "python"))
        super().__init__()
