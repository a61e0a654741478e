"""Requests to a reader and its results, shared by drivers and workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import generate
from harness.turns import CannotError

__all__ = ["CannotError", "Job", "Pass"]


@dataclass(frozen=True)
class Job:
    """One pass over a file.

    Attributes:
        path: The path of the file.
        dataset: The generated dataset, a key of `generate.DATASETS`.
        batch: Number of rows per batch.
        shuffle: Number of rows in the shuffle buffer; 0 reads in file order.
        threads: Maximum number of decoding threads. 0 leaves the number to the reader (`"auto"`, `AUTOTUNE`).
        cold: Whether each pass begins without the file in the page cache.
        read_ahead: What is read ahead: fastpipe's `prefetch` in batches, `reader_buffer_size` of AvroTensorDataset in
            bytes, the size of a single read of the plain reader in bytes. 0 for the default.
        width: Width of the hidden layers of the model that is trained, for the readers in `training`.
    """

    path: str
    dataset: str
    batch: int = 1024
    shuffle: int = 0
    threads: int = 1
    cold: bool = False
    read_ahead: int = 0
    width: int = 0

    @property
    def columns(self) -> list[generate.Column]:
        """The columns of the dataset."""
        return generate.DATASETS[self.dataset]


@dataclass
class Pass:
    """The result of one pass.

    Attributes:
        rows: Number of rows read.
        held: An object to keep until the clock is stopped, because freeing a frame isn't timed.
        seconds: Wall time up to the last batch, if the reader measures it itself.
        cpu: CPU time up to the last batch, if the reader measures it itself.
        notes: Other figures.
    """

    rows: int
    held: Any = None
    seconds: float | None = None
    cpu: float | None = None
    notes: dict[str, float] = field(default_factory=dict)
