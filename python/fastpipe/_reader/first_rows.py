"""The first rows of a reader, as a table to look at."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fastpipe._arguments import within
from fastpipe._reader.reader_passes import arrow_streams

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe._reader.reader import Reader


def head(reader: Reader, n: int) -> pa.Table:
    """Returns the first rows of the current epoch. `Reader.head` describes it."""
    rows, order = within("n", n, 0, 2**31 - 1), reader._order
    stop = min(-(-rows // reader.batch_size), order.steps)
    if not stop:
        return reader._passes.arrow_schema().empty_table()
    options = replace(reader._running, csr=True, sharers=1, prefetch=1)
    batches = arrow_streams(reader, partial(order.batches, options, reader.epoch, 0, stop)).record_batches()
    # Only the last batch of an epoch may be shorter than the others.
    return batches.read_all().slice(0, rows)
