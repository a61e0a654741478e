"""Caches: a reader of rows that were read once and kept."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastpipe._reader.losses import refuse
from fastpipe._reader.ordering import Ordering

if TYPE_CHECKING:
    from fastpipe._reader.dataset import Dataset
    from fastpipe._reader.reader import Reader

# Number of rows that are read at once.
_ROWS = 1 << 14


def cache(reader: Reader, directory: str | os.PathLike[str] | None, max_bytes: int | str | None) -> Reader:
    """Keeps the rows of a reader. See `Reader.cache`."""
    from fastpipe.units._cache import cached

    refuse(reader._lost, "caching a reader", 'cache a reader with on_error="raise"')

    def read(data: Dataset, rows: int, **changes: Any) -> Reader:
        """Returns a reader of rows in the order of a dataset, in batches of `rows` rows."""
        ordering = Ordering.checked(batch_size=rows, seed=reader.seed)
        running = replace(reader._running.strict, prefetch=None)
        return reader._like(data, ordering=ordering, running=running, epochs=1, **changes)

    # With a limit, batches have the size for which the limit was chosen.
    rows = _ROWS if reader._running.memory_limit is None else reader.batch_size
    return reader._like(cached(reader._data, read, rows, directory, max_bytes))
