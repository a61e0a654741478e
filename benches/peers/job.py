"""What a reader is asked to do, and what it answers: shared by drivers and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import generate


class CannotError(Exception):
    """The reader has no way to do this; the text says what is missing."""


@dataclass(frozen=True)
class Job:
    """One pass over a file.

    Attributes:
        path: The file.
        dataset: What lies in it, a key of `generate.DATASETS`.
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
    """What came of one pass.

    Attributes:
        rows: How many it gave.
        held: What to keep until the clock is stopped: freeing a frame isn't timed.
        seconds: Wall time to the last batch, where the reader took it itself.
        cpu: CPU time up to there.
    """

    rows: int
    held: Any = None
    seconds: float | None = None
    cpu: float | None = None


class Worker(Protocol):
    """What a reader's class does; its constructor imports the library."""

    packages: tuple[str, ...]
    """Distributions whose versions are told."""

    def read(self, job: Job) -> Pass:
        """Reads the file and makes nothing of it: this is timed."""
        ...

    def check(self, job: Job) -> tuple[int, generate.Sums | None]:
        """Reads the file and sums up every value; None where the reader makes nothing that could be."""
        ...
