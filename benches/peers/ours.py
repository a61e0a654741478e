"""fastpipe: NumPy batches with explicit features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.data import features
from peers.batches import BatchWorker
from peers.job import Job


class FastpipeWorker(BatchWorker):
    """fastpipe, as its documentation reads a file."""

    packages = ("fastpipe-data", "numpy")

    def __init__(self) -> None:
        import fastpipe

        self._fastpipe = fastpipe

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        specs = features(job.dataset)
        order: dict[str, Any] = {"shuffle": True, "shuffle_buffer": job.shuffle, "seed": 1} if job.shuffle else {}
        reader = self._fastpipe.read_avro(
            job.path, features=specs, batch_size=job.batch, num_threads=job.threads, **order
        )
        with reader:
            for values in reader:
                yield len(values[next(iter(specs))]), values
