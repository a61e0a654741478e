"""A Ray Data data source that reads batches in a reader's order. Importing this module imports Ray Data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from fastpipe._reader.passes import passes_of
from fastpipe._reader.reader import Reader
from fastpipe.ray._arguments import shipped, take_given_processors

# Batches are passed to Ray Data in tables of at least this many bytes. The overhead of a table is about the cost of
# copying this much.
_TOGETHER = 4 << 20


class FastpipeDatasource(Datasource):  # type: ignore[misc]
    """An epoch of a reader.

    Args:
        reader: The reader.
        epoch: Index of the epoch.
        ends: End step (exclusive) of each read task.
        batch_size: Rows per batch, except the last one.
        rows: Number of rows in the epoch.
        row_bytes: Approximate bytes per row.
        schema: Schema of all blocks.
    """

    def __init__(
        self,
        reader: Reader,
        epoch: int,
        ends: list[int],
        batch_size: int,
        rows: int,
        row_bytes: float,
        schema: pa.Schema,
    ) -> None:
        super().__init__()
        self._reader = shipped(reader)
        self._epoch, self._ends, self._batch_size = epoch, ends, batch_size
        self._rows, self._row_bytes, self._schema = rows, row_bytes, schema

    def estimate_inmemory_data_size(self) -> int:
        """Returns the size of all rows in bytes."""
        return int(self._rows * self._row_bytes)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Returns the read tasks. They are the same for any `parallelism`."""
        tasks = []
        start = 0
        for stop in self._ends or [0]:
            rows = min(stop * self._batch_size, self._rows) - start * self._batch_size
            size = int(rows * self._row_bytes)
            metadata = BlockMetadata(num_rows=rows, size_bytes=size, input_files=None, exec_stats=None)
            read = partial(_read, self._reader, self._epoch, start, stop, self._schema)
            tasks.append(ReadTask(read, metadata, schema=self._schema, per_task_row_limit=per_task_row_limit))
            start = stop
        return tasks


def _read(reference: Any, epoch: int, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.Table]:
    """Reads the batches of a task in a Ray process."""
    if start == stop:
        yield schema.empty_table()
        return
    passes = passes_of(ray.get(reference))
    take_given_processors(passes)
    held: list[pa.RecordBatch] = []
    nbytes = 0
    for batch in passes.record_batches(epoch, start, stop):
        held.append(batch)
        nbytes += batch.nbytes
        if nbytes >= _TOGETHER:
            yield pa.Table.from_batches(held, schema)
            held, nbytes = [], 0
    if held:
        yield pa.Table.from_batches(held, schema)
