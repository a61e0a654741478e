"""What is said where there is no memory for batches."""

from __future__ import annotations

import os

from fastpipe.errors import OutOfMemoryError

__all__ = ["no_address_space", "no_memory"]

# As `shared_slabs.rs` has it.
_LEAST_SPACE = 16 << 20


def no_address_space(error: Exception) -> OutOfMemoryError:
    """Of memory that can't even be mapped."""
    return OutOfMemoryError(
        f"there is no address space for batches, of which workers need {_LEAST_SPACE:,} bytes, several times over:"
        f" {error}. See what `ulimit -v` and `ulimit -f` allow"
    )


def no_memory(wanted: int, held: int, most: int, number: int | None, *, limited: bool) -> OutOfMemoryError:
    """Of a batch.

    Args:
        wanted: bytes that it needs.
        held: bytes that are in use.
        most: bytes that there may be.
        number: of the system's error; None if the limit is reached.
        limited: whether the program has set the limit.
    """
    why = f"{os.strerror(number)} (error {number})" if number else f"{most:,} may be in all"
    whose = "memory_limit" if limited else "what the machine, or its container, has left"
    return OutOfMemoryError(
        f"there is no shared memory for a batch: it needs {wanted:,} bytes beside the {held:,} in use, and {why}"
        f" ({whose}). A smaller batch_size or prefetch_factor needs less, and so does letting go of batches"
    )
