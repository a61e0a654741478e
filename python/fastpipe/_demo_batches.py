"""Batches as the demo draws them: with a progress bar, and counted by rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastpipe._progress import progress_bar

Batch = dict[str, Any]


def counted(reader: Any, what: str) -> Iterator[Batch]:
    """The batches, with a progress bar while they come."""
    with progress_bar(reader.num_rows, desc=what, leave=False, disable=None) as bar:
        for batch in reader:
            yield batch
            bar.update(row_count(batch))


def row_count(batch: Batch) -> int:
    return len(next(iter(batch.values())))
