"""Options of passes that do not affect the rows that they yield."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from fastpipe._arguments import integer, memory_size, within

if TYPE_CHECKING:
    from fastpipe._fastpipe import PassMemory, ReaderTotals
    from fastpipe._reader.losses import LostUnits, Skip


@dataclass(frozen=True, slots=True)
class PassOptions:
    """Run-time options of a reader's passes.

    Attributes:
        num_threads: Number of threads that decode. None chooses the number automatically.
        prefetch: Number of batches decoded in advance. None keeps all threads busy.
        memory_limit: Maximum number of bytes. None sets no limit.
        sharers: Number of readers that share the processors with this one. Used only with automatic `num_threads`.
        memory: Memory in which batches are stored. None selects the dataset's own memory.
        csr: Whether sparse columns have the layout "csr".
        bounded: Whether another program has chosen the order. `memory_limit` then also applies to a single batch that
            is requested by its step. Its default is half of the machine's memory.
        totals: Counters of batches and work. None counts nothing.
        on_error: How much may be lost to damage. None raises an error.
        lost: The damaged units that passes have found. None if passes raise an error for damage.
    """

    num_threads: int | None = None
    prefetch: int | None = None
    memory_limit: int | None = None
    sharers: int = 1
    memory: PassMemory | None = None
    csr: bool = False
    bounded: bool = False
    totals: ReaderTotals | None = None
    on_error: Skip | None = None
    lost: LostUnits | None = None

    @classmethod
    def checked(
        cls,
        *,
        num_threads: int | Literal["auto"] | None,
        prefetch: int | None,
        memory_limit: int | str | None,
    ) -> Self:
        """Checks the options that a user passed.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If a number is out of range, or if a size can't be parsed.
        """
        if isinstance(num_threads, str):
            if num_threads != "auto":
                raise ValueError(f'num_threads must be a number or "auto"; got {num_threads!r}')
            num_threads = None
        return cls(
            num_threads=None if num_threads is None else within("num_threads", num_threads, 1, 4096),
            prefetch=None if prefetch is None else _prefetch(prefetch),
            memory_limit=None if memory_limit is None else memory_size("memory_limit", memory_limit),
        )

    @property
    def strict(self) -> PassOptions:
        """These options for a pass whose rows are counted, so that damage is an error."""
        return replace(self, on_error=None)

    @property
    def unfilled(self) -> PassOptions:
        """These options for a pass that leaves lost rows out."""
        return self if self.on_error is None else replace(self, on_error=replace(self.on_error, fill=False))


def available_processors() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _prefetch(prefetch: int) -> int:
    if integer("prefetch", prefetch) == 0:
        raise ValueError(
            "prefetch must be at least 1: a batch is decoded before it is yielded; None keeps the threads busy"
        )
    return within("prefetch", prefetch, 1, 1 << 20)
