"""Passes over an iterable dataset."""

from __future__ import annotations

import math
import time
from typing import Any

from fastpipe.torch.loader._in_process import Beginning, Pass, check_timeout, stream_batch_size
from fastpipe.torch.loader._order import Order
from fastpipe.torch.loader._stream import Stream, StreamBatch
from fastpipe.torch.loader._structure import collate, is_default
from fastpipe.torch.loader._time_account import Account
from fastpipe.torch.loader._turns import StreamProgress, Turns
from fastpipe.torch.loader._with_workers import LOOK, WithWorkers, pickled


class _OverStreams(Pass):
    """The common part of passes over iterable datasets."""

    progress_class = StreamProgress
    progress: StreamProgress

    def _order_of(self, loader: Any, beginning: Beginning) -> Turns:
        is_next = hasattr(self, "progress") and not getattr(self, "_shutdown", False)
        return Turns(loader, beginning, self.progress.order if is_next else None)

    def _begin(self, order: Order, seed: int, resumed: dict[str, Any] | None) -> None:
        super()._begin(order, seed, resumed)
        self._num_yielded = self.progress.order.yielded


class StreamInProcess(_OverStreams):
    """A pass over an iterable dataset without workers. Its random numbers are the program's, as in torch's loader."""

    def __init__(self, loader: Any, beginning: Beginning) -> None:
        check_timeout(loader)
        super().__init__(loader, beginning)
        self.account = Account()
        collate_fn = collate if is_default(loader.collate_fn) else loader.collate_fn
        self._stream = Stream(loader.dataset, stream_batch_size(loader), collate_fn, loader.drop_last)
        self._stream.begin(*self.progress.order.start(0) or ())
        self.progress.order.inline = self._stream

    def _next_data(self) -> Any:
        self.account.wait()
        try:
            number, _ = self._drawn()
            self.progress.give(number)
            try:
                batch = StreamBatch(self._stream.fetch())
            except StopIteration:
                self.progress.ended, self.progress.order.inline = True, None
                raise
            self.progress.order.deliver(batch)
            return self._pinned(batch.data)
        finally:
            self.account.leave()


class StreamsWithWorkers(_OverStreams, WithWorkers):
    """A pass over an iterable dataset with workers, each of which makes whole batches of its own stream."""

    def _begin(self, order: Order, seed: int, resumed: dict[str, Any] | None) -> None:
        super()._begin(order, seed, resumed)
        self._are_open = False
        # The requests to start the pass whose results weren't taken yet, and their workers.
        self._openings: dict[int, int] = {}

    def _fill(self) -> None:
        if not self._are_open:
            self._are_open = True
            for worker in range(self._num_workers):
                opening = [self.progress.order.opening(worker)]
                # Without a layout, no memory is allocated in advance.
                self._openings[self._consumer.begin(opening, pickled, 0, 0, True, worker)] = worker
        for batch in list(filter(self._consumer.ready, self._openings)):
            self._take_opening(batch)
        super()._fill()

    def _take_opening(self, batch: int) -> None:
        worker, taken = self._openings.pop(batch), [self._consumer.take(batch)]
        if self.progress.order.is_later:
            self.progress.order.opened(worker, self._delivery.batch(taken, 0, 0))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        with self._lock:
            super()._reset(loader, first_iter)
            if self.progress.order.is_later:
                # As in torch. A state of the pass contains those with which the workers have started it.
                self._await_openings(self._timeout or math.inf)

    def _await_openings(self, seconds: float) -> None:
        """Waits until all workers have started the pass. If that takes too long, the first batch reports it."""
        deadline = time.monotonic() + seconds
        for batch in list(self._openings):
            while not self._consumer.wait(batch, LOOK):
                self._look_after()
                if time.monotonic() > deadline:
                    return
            self._take_opening(batch)

    def _give_up(self) -> None:
        super()._give_up()
        # Openings aren't canceled: a worker that starts a pass may wait for the other workers to do so.
        self._await_openings(math.inf)

    def _begin_one(self, *, later: bool = False) -> bool:
        begun = super()._begin_one(later=later)
        if not begun and self._trouble is not None:
            number, error = self._trouble
            if number is not None:
                # The worker hasn't received the turn.
                self.progress.order.withdraw(number)
                self._trouble = None, error
        return begun

    def _begin_for_idle(self) -> None:
        """Begins further turns while the consumer waits, as far as their batches use little memory."""
        while len(self._begun) < self._most_begun and self._consumer.has_slack(None, 1) and self._begin_one():
            pass

    def _wait(self) -> int:
        if self._ready_place() is None:
            self._begin_for_idle()
        return super()._wait()

    def _next_data(self) -> Any:
        while True:
            batch: StreamBatch = super()._next_data()
            self.progress.order.deliver(batch)
            if not batch.ended:
                return batch.data

    @property
    def next_seed(self) -> int:
        """Seed of new workers that replace persistent ones."""
        return int(self._base_seed)
