"""The base class of readers, and sums over batches of NumPy arrays."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import generate
from peers.job import Job, Pass


def add(sums: generate.Sums, column: generate.Column, value: Any) -> None:
    """Adds one column of a NumPy batch to the sums.

    fastpipe's ragged, sparse and masked arrays unpack like tuples, so other readers pass tuples of the same arrays.
    """
    name, dtype = column.name, generate.DTYPES.get(column.avro, "u1")
    if column.nullable:
        values, valid = value
        sums.add(name, np.asarray(values)[np.asarray(valid)], dtype)
        sums.add(f"{name}.valid", valid, "bool")
    elif column.kind in ("scalar", "dense"):
        sums.add(name, value, dtype)
    elif column.kind == "sparse":
        indices, values, dense_shape = value
        sums.add(f"{name}.indices0", indices[:, 1], "i8")
        sums.add(f"{name}.values", values, dtype)
        counts = np.bincount(indices[:, 0], minlength=int(dense_shape[0]))
        # Row indices must also ascend: the counts alone would not reveal swapped entries.
        assert (np.diff(indices[:, 0]) >= 0).all(), f"{name}: sparse entries out of row order"
        sums.add(f"{name}.count", counts, "i8")
    else:
        values, offsets = value
        if column.kind == "strings":
            sums.add(f"{name}.count", np.diff(offsets), "i8")
            values, offsets = values
        sums.add(name, values, dtype)
        sums.add(f"{name}.{'count' if column.kind == 'ragged' else 'size'}", np.diff(offsets), "i8")


class BatchWorker:
    """A reader of batches.

    Attributes:
        packages: Distributions whose versions are reported.
        modules: Modules that are imported before anything is timed.
        library: The first of these modules.
    """

    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def __init__(self) -> None:
        libraries: list[Any] = [importlib.import_module(module) for module in self.modules]
        self.library = libraries[0]

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        """Yields the number of rows and the batch, for each batch of one pass."""
        raise NotImplementedError

    def column(self, column: generate.Column, batch: Any) -> Any:
        """Returns a column of a batch as NumPy arrays."""
        return batch[column.name]

    def read(self, job: Job) -> Pass:
        """Reads the file and discards the batches. This is timed."""
        return Pass(sum(n for n, _ in self.batches(job)))

    def check(self, job: Job) -> tuple[int, generate.Sums | None]:
        """Returns the number of rows and the sums of all values, or None if the reader returns no values."""
        sums, rows = generate.Sums(), 0
        for n, batch in self.batches(job):
            rows += n
            for column in job.columns:
                add(sums, column, self.column(column, batch))
        return rows, sums
