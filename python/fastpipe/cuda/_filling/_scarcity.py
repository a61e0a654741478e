"""Memory that runs out, as an error of fastpipe's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastpipe.errors import OutOfMemoryError

__all__ = ["memory_errors"]


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises OutOfMemoryError for what NumPy and Python's threads raise where the system has no more memory."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"filling devices: {error}; fewer rows, or a smaller memory=, need less") from error
    except RuntimeError as error:
        # Python has no type of its own for it.
        if "can't start new thread" not in str(error):
            raise
        raise OutOfMemoryError(
            "filling devices: the system has no memory for another thread, or allows no more of them"
        ) from error
