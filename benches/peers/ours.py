"""fastpipe: NumPy batches with explicit features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import generate
from peers import batches
from peers.job import Job, Pass


class FastpipeWorker:
    """fastpipe, as its documentation reads a file."""

    packages: tuple[str, ...] = ("fastpipe-data", "numpy")

    def __init__(self) -> None:
        import fastpipe

        self._fastpipe = fastpipe

    def _spec(self, column: generate.Column) -> Any:
        fp = self._fastpipe
        dtype = generate.DTYPES.get(column.avro, "string")
        nulls: dict[str, Any] = {"nulls": "mask"} if column.nullable else {}
        if column.kind in ("ragged", "strings"):
            return fp.RaggedSpec((None,), dtype, **nulls)
        if column.kind == "sparse":
            return fp.SparseSpec((generate.SPARSE_SIZE,), dtype, **nulls)
        return fp.DenseSpec((column.size,) if column.kind == "dense" else (), dtype, **nulls)

    def features(self, dataset: str) -> dict[str, Any]:
        """The specs of a data set's columns."""
        return {column.name: self._spec(column) for column in generate.DATASETS[dataset]}

    def batches(self, job: Job) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the batches of one pass, each with its number of rows."""
        features = self.features(job.dataset)
        first = next(iter(features))
        order: dict[str, Any] = {"shuffle": True, "shuffle_buffer": job.shuffle, "seed": 1} if job.shuffle else {}
        reader = self._fastpipe.read_avro(
            job.path, features=features, batch_size=job.batch, num_threads=job.threads, **order
        )
        with reader:
            for values in reader:
                yield len(values[first]), values

    def read(self, job: Job) -> Pass:
        """Reads the file to batches and drops them."""
        return Pass(sum(n for n, _ in self.batches(job)))

    def check(self, job: Job) -> tuple[int, generate.Sums | None]:
        """Sums up every value of the batches."""
        sums, rows = generate.Sums(), 0
        for n, values in self.batches(job):
            rows += n
            for column in job.columns:
                batches.add(sums, column, values[column.name])
        return rows, sums
