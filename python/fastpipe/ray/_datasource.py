"""A reader's order as a data source of Ray Data. Importing this imports Ray Data."""

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

# Batches are handed to Ray Data together, as many as have this many bytes: each time costs as much as copying these.
_TOGETHER = 4 << 20


class FastpipeDatasource(Datasource):  # type: ignore[misc]
    """An epoch of a reader.

    Args:
        reader: whose it is.
        epoch: which one.
        ends: of each read task, the step behind its last one.
        batch_size: rows of each batch but the last one.
        rows: of the epoch.
        row_bytes: bytes of a row, about.
        schema: of all blocks.
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
        """Bytes of all rows."""
        return int(self._rows * self._row_bytes)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """The read tasks: the same ones, however many Ray would like."""
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
    """The batches of a stretch; in a process of Ray's."""
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
