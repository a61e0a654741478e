"""Passes over an iterable dataset."""

from __future__ import annotations

from typing import Any

from fastpipe.torch.loader._in_process import Pass, stream_batch_size
from fastpipe.torch.loader._stream import Stream, StreamBatch
from fastpipe.torch.loader._structure import collate, is_default
from fastpipe.torch.loader._time_account import Account
from fastpipe.torch.loader._turns import StreamProgress, Turns
from fastpipe.torch.loader._with_workers import LOOK, WithWorkers, pickled


class _OverStreams(Pass):
    """The common part of passes over iterable datasets.

    Args:
        loader: Loader of the pass.
        resumed: State within a pass to resume from.
        seed: Seed of the pass, if it is known.
        starts: For each worker, the state from which its stream starts.
    """

    progress_class = StreamProgress
    progress: StreamProgress

    def __init__(
        self,
        loader: Any,
        resumed: dict[str, Any] | None,
        seed: int | None,
        starts: list[dict[str, Any]] | None,
    ) -> None:
        self._starts = starts
        super().__init__(loader, resumed, seed)
        self._num_yielded = self.progress.order.yielded

    def _order_of(self, loader: Any, state: dict[str, Any] | None) -> Turns:
        starts, self._starts = self._starts, None
        is_next = hasattr(self, "progress") and not getattr(self, "_shutdown", False)
        return Turns(loader, state, starts, self.progress.order if is_next else None)


class StreamInProcess(_OverStreams):
    """A pass over an iterable dataset without workers. Its random numbers are the program's, as in torch's loader."""

    def __init__(
        self,
        loader: Any,
        resumed: dict[str, Any] | None,
        seed: int | None,
        starts: list[dict[str, Any]] | None,
    ) -> None:
        if loader.timeout != 0:
            raise ValueError("timeout has no effect with num_workers=0: set timeout=0 or use workers")
        super().__init__(loader, resumed, seed, starts)
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

    def __init__(
        self,
        loader: Any,
        resumed: dict[str, Any] | None,
        seed: int | None,
        starts: list[dict[str, Any]] | None,
    ) -> None:
        # The pass that workers were asked to start, and the requests whose results weren't taken yet.
        self._opened: StreamProgress | None = None
        self._openings: list[int] = []
        super().__init__(loader, resumed, seed, starts)

    def _fill(self) -> None:
        if self._opened is not self.progress:
            self._opened = self.progress
            self._openings = [
                # Without a layout, no memory is allocated in advance.
                self._consumer.begin([self.progress.order.opening(worker)], pickled, 0, 0, True, worker)
                for worker in range(self._num_workers)
            ]
        for batch in [batch for batch in self._openings if self._consumer.ready(batch)]:
            self._openings.remove(batch)
            self._consumer.take(batch)
        super()._fill()

    def _give_up(self) -> None:
        super()._give_up()
        # Openings aren't canceled: a worker that starts a pass may wait for the other workers to do so.
        for batch in self._openings:
            while not self._consumer.wait(batch, LOOK):
                self._look_after()
            self._consumer.take(batch)
        self._openings.clear()

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
