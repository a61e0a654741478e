"""Requests to a reader, and its answers: shared by drivers and workers."""

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
        path: The file.
        dataset: What is in it, a key of `generate.DATASETS`.
        batch: Rows a batch.
        shuffle: Rows of the shuffle buffer; 0: in the file's order.
        threads: Threads that may decode.
    """

    path: str
    dataset: str
    batch: int = 1024
    shuffle: int = 0
    threads: int = 1

    @property
    def columns(self) -> list[generate.Column]:
        """The columns of the data set."""
        return generate.DATASETS[self.dataset]


@dataclass
class Pass:
    """The result of one pass.

    Attributes:
        rows: How many it read.
        held: What to keep until the clock is stopped: freeing a frame isn't timed.
        seconds: Wall time to the last batch, where the reader took it itself.
        cpu: CPU time up to there.
        notes: Further figures.
    """

    rows: int
    held: Any = None
    seconds: float | None = None
    cpu: float | None = None
    notes: dict[str, float] = field(default_factory=dict)
