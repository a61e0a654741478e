"""Options of passes that do not affect the rows that they yield."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from fastpipe._reader.ordering import integer, within

if TYPE_CHECKING:
    from fastpipe._fastpipe import PassMemory, ReaderTotals

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([KMGT]?i?B?)\s*", re.IGNORECASE)
_NAMES = {name.lower(): size for name, size in _UNITS.items()}


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
    """

    num_threads: int | None = None
    prefetch: int | None = None
    memory_limit: int | None = None
    sharers: int = 1
    memory: PassMemory | None = None
    csr: bool = False
    bounded: bool = False
    totals: ReaderTotals | None = None

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


def _prefetch(prefetch: int) -> int:
    if integer("prefetch", prefetch) == 0:
        raise ValueError(
            "prefetch must be at least 1: a batch is decoded before it is yielded; None keeps the threads busy"
        )
    return within("prefetch", prefetch, 1, 1 << 20)


def memory_size(name: str, size: int | str) -> int:
    """Returns the number of bytes of a size given as a number or with a unit: `"512MB"` (10^6), `"1.5 GiB"` (2^30).

    Raises:
        TypeError: If the size is neither an integer nor a string.
        ValueError: If the size can't be parsed or isn't positive.
    """
    if isinstance(size, float):
        raise TypeError(f'{name} must be a whole number of bytes or a size such as "512MB" or "1.5GiB"; got {size!r}')
    if not isinstance(size, str):
        return within(name, size, 1, 2**63 - 1)
    found = _SIZE.fullmatch(size)
    unit = None if found is None else _NAMES.get(found[2].lower())
    if found is None or unit is None:
        raise ValueError(f'{name} must be a number of bytes or a size such as "512MB" or "1.5GiB"; got {size!r}')
    # Integer arithmetic is exact: a float would turn 2.3 MB into 2,299,999 bytes.
    digits, _, decimals = found[1].partition(".")
    return within(name, int(digits + decimals) * unit // 10 ** len(decimals), 1, 2**63 - 1)
