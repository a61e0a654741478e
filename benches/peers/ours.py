"""fastpipe: NumPy batches with explicit features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.data import open_reader
from peers.batches import BatchWorker
from peers.job import Job


class FastpipeWorker(BatchWorker):
    """Reads batches as fastpipe's documentation shows."""

    packages = ("fastpipe-data", "numpy")
    modules = ("fastpipe",)

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        with self.open(job) as reader:
            for values in reader:
                yield len(next(iter(values.values()))), values

    def open(self, job: Job) -> Any:
        """Returns the reader of a job."""
        options: dict[str, Any] = {"shuffle": True, "shuffle_buffer": job.shuffle, "seed": 1} if job.shuffle else {}
        options |= {"prefetch": job.read_ahead} if job.read_ahead else {}
        return open_reader(job.path, job.dataset, batch_size=job.batch, num_threads=job.threads or "auto", **options)
