"""All rows of a reader, once, beside its passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastpipe._reader.ordering import Ordering
from fastpipe._reader.reader import Reader

__all__ = ["rows_once"]

_LEAST_BATCH = 4096


def rows_once(reader: Reader, *, progress: bool) -> Iterator[dict[str, Any]]:
    """Yields a reader's rows of an epoch, of its rank if it is one of several, without rows that fill batches up.

    Batches have at least 4,096 rows. The reader's own pass and epoch aren't touched.
    """
    ordering = reader._ordering
    rows = max(ordering.batch_size, _LEAST_BATCH)
    if ordering.world_size == 1 and not ordering.is_sample:
        chosen = Ordering.checked(batch_size=rows)
    else:
        chosen = replace(ordering, drop_last=False, uneven="allow")
    options = reader._options() | {"ordering": chosen, "epochs": 1, "progress": progress}
    once = Reader(reader._data, **options)
    once.set_epoch(reader.epoch)
    with once:
        yield from once
