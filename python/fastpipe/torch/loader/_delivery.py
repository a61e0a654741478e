"""Batches that are built from the results of workers."""

from __future__ import annotations

from typing import Any

from torch._utils import ExceptionWrapper

from fastpipe._fastpipe import ItemConsumer
from fastpipe.errors import WorkerError
from fastpipe.torch.loader import _messages
from fastpipe.torch.loader._in_process import InlineWorker
from fastpipe.torch.loader._messages import ThreadBatches
from fastpipe.torch.loader._structure import Layout
from fastpipe.torch.loader._workers import no_memory


class Delivery:
    """Builds the batches of a pass. It holds no reference to the workers.

    Args:
        loader: Loader whose batches are built.
        consumer: Consumer of the workers' results.

    Attributes:
        thread_batches: Copied batches on their way from worker threads. None for worker processes.
    """

    def __init__(self, loader: Any, consumer: ItemConsumer) -> None:
        self.thread_batches: ThreadBatches | None = None
        self._consumer = consumer
        self._is_limited = loader.memory_limit is not None
        self._inline = InlineWorker(loader)
        self._layouts: dict[int, Layout] = {}

    def layout(self, number: int, description: bytes | None = None) -> Layout:
        """Returns the compiled layout with this number."""
        found = self._layouts.get(number)
        if found is None:
            description = description or self._consumer.description(number)
            assert description is not None
            found = self._layouts[number] = Layout(description)
        return found

    def batch(self, result: list[Any], batch: int, seed: int) -> Any:
        """Returns a batch.

        Args:
            result: List with the result of `ItemConsumer.take`, which is removed: a traceback that keeps a frame of the
                caller must not keep the memory.
            batch: Index of the batch.
            seed: Seed of its pass.

        Raises:
            Exception: The error that an item raised.
        """
        taken = result.pop()
        match taken:
            case ("row", memory, row, offset, length):
                if not length:
                    raise WorkerError(f"the item in row {row} of a batch failed, and its worker couldn't report why")
                failure: ExceptionWrapper = _messages.read(memory, offset, length)
                del memory, taken
                return failure.reraise()  # type: ignore[no-untyped-call]
            case ("memory", wanted, held, most, number_of_error):
                raise no_memory(wanted, held, most, number_of_error, limited=self._is_limited)
        memory, rows, number, slab, result_of_join = taken
        if result_of_join is not None:
            read = _messages.read if self.thread_batches is None else self.thread_batches.read
            return read(memory, *result_of_join)
        if rows == 0:
            # Workers don't create batches without items.
            return self._inline.batch(batch, [], seed)
        layout = self.layout(number)
        return layout.batch(layout.rows.parts(memory, slab, rows))
