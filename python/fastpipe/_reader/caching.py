"""Caches: a reader of rows that were read once and kept."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fastpipe._reader.losses import refuse
from fastpipe._reader.sequential_reads import in_sequence

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
        """Returns a reader of rows in the order of a dataset, in batches of up to `rows` rows."""
        return in_sequence(reader, data, rows, **changes)

    return reader._like(cached(reader._data, read, _ROWS, directory, max_bytes))
