"""Sequential passes over all rows, for methods that read some columns once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastpipe._reader.ordering import Ordering
from fastpipe.errors import LimitError

if TYPE_CHECKING:
    from fastpipe._reader.dataset import Dataset
    from fastpipe._reader.reader import Reader

# Number of rows in a batch, and the maximum if a caller asks for more.
_ROWS, _MOST_ROWS = 1 << 16, 1 << 20
# Factor between the batch sizes that are tried with a memory limit.
_STEP = 4


def columns_of(reader: Reader, names: Sequence[str], most: int = 0, data: Dataset | None = None) -> Reader:
    """Returns a reader of some features of all rows, or of the rows of `data`, a selection of them.

    Its batches have at least `most` rows if memory allows it.
    """
    data = reader._data if data is None else data
    return in_sequence(reader, data.narrowed(names), min(max(_ROWS, most), _MOST_ROWS))


def in_sequence(reader: Reader, data: Dataset, rows: int, **changes: Any) -> Reader:
    """Returns a reader of one pass over a dataset, in batches of `rows` rows.

    With a memory limit, batches have fewer rows if batches with twice as many rows don't fit, but not fewer than the
    reader's own batches. The engine estimates the memory of rows from a sample, and other rows may be larger.

    Args:
        reader: The reader.
        data: Its dataset, or one of the same source.
        rows: Number of rows in a batch.
        changes: Options of the reader that differ.
    """
    running = replace(reader._running.strict, prefetch=None)

    def made(rows: int) -> Reader:
        ordering = Ordering.checked(batch_size=rows, seed=reader.seed)
        return reader._like(data, ordering=ordering, running=running, epochs=1, **changes)

    while running.memory_limit is not None and rows > reader.batch_size:
        try:
            # A pass without epochs checks the limit and reads nothing.
            made(2 * rows)._order.start(running, 0, 0).close()
            break
        except LimitError:
            rows = max(rows // _STEP, reader.batch_size)
    return made(rows)
