"""Batches and rows of a reader, found by their numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, SupportsIndex

from fastpipe._reader import state as _state
from fastpipe._reader.ordering import integer, within

if TYPE_CHECKING:
    from fastpipe import _fastpipe
    from fastpipe._reader.data import Data
    from fastpipe._reader.ordering import Ordering
    from fastpipe._reader.running import Running

__all__ = ["Lookups"]


class Lookups(ABC):
    """What a reader can look up without a pass."""

    _data: Data
    _ordering: Ordering
    _order: _fastpipe.Order
    _running: Running

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last; before a pass, or after its end, that of the next pass."""

    def batch_at(self, step: SupportsIndex, epoch: SupportsIndex | None = None) -> dict[str, Any]:
        """Makes any batch, without reading those before.

        Args:
            step: its number within the epoch, as this rank counts them if no other number of ranks had a part in it.
            epoch: by default `epoch` of the reader.

        Raises:
            IndexError: if the epoch has no such batch; a negative number is none.
            TypeError: if a number is no integer.
            ValueError: if the epoch is out of range.
            LimitError: if its order takes more than `memory_limit`, or without one more than half of the memory of this
                machine or container; the message says which `shuffle_buffer` would fit.
            FastpipeError: if it can't be read.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
            >>> reader.batch_at(3)["label"].shape, reader.batch_at(3, epoch=1)["label"].shape
            ((1024,), (1024,))
        """
        at, running = self._step(step), self._running
        started = self._order.batches(
            self._at(epoch),
            at,
            at + 1,
            num_threads=running.num_threads,
            sharers=1,
            prefetch=1,
            memory_limit=running.memory_limit,
        )
        try:
            batch = next(started)
            # Its end says whether files changed while it was read.
            next(started, None)
            return batch
        finally:
            started.close()

    def locate(self, step: SupportsIndex, row: SupportsIndex, epoch: SupportsIndex | None = None) -> Any:
        """Says where a row of a batch comes from. Reads no data.

        Args:
            step: the batch, as in `batch_at`.
            row: the row of the batch.
            epoch: by default `epoch` of the reader.

        Returns:
            A named tuple of the source's own, whose fields say where the row comes from.

        Raises:
            IndexError: if there is no such batch or row; a negative number is none.
            TypeError: if a number is no integer.
            ValueError: if the epoch is out of range.
            LimitError: as `batch_at`.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024)
            >>> reader.locate(0, row=5)
            Location(file='data/part-0.avro', block=0, record=5)
        """
        at, slot = self._step(step), integer("row", row)
        if not 0 <= slot < self._ordering.batch_size:
            raise IndexError(
                f"there is no row {slot}: rows of a batch are counted from 0 to {self._ordering.batch_size - 1}"
            )
        return self._data.place(*self._order.locate(self._at(epoch), at, slot, self._running.memory_limit))

    def _step(self, step: SupportsIndex) -> int:
        at, steps = integer("step", step), self._order.steps
        if not 0 <= at < steps:
            last = f", counted from 0 to {steps - 1}" if steps else ""
            raise IndexError(f"an epoch has {steps} batches{last}: there is no batch {at}")
        return at

    def _at(self, epoch: SupportsIndex | None) -> int:
        return self.epoch if epoch is None else within("epoch", epoch, 0, _state.LARGEST_EPOCH)
