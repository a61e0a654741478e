"""The turns of the workers of an iterable dataset, and the states from which a later pass resumes.

As in torch's loader, each worker makes whole batches of its own stream, and the batches are delivered in turns: one of
each worker whose stream hasn't ended. A turn is begun only if it is among the next turns that the memory allows.

A state contains, for each worker, the last known state of its stream and how many of its batches were delivered after
that. To resume, the worker restores the state and skips these batches. The state of a stream without states is its
beginning.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from fastpipe.torch.loader._in_process import Beginning, Progress
from fastpipe.torch.loader._order import Order
from fastpipe.torch.loader._stream import Opening, Stream, StreamBatch, Turn


@dataclasses.dataclass
class _WorkerProgress:
    """The progress of a worker's stream, as far as it was delivered.

    Attributes:
        state: A state of the stream. None is its beginning.
        skip: Number of batches that were delivered after this state.
        ended: Whether the stream has ended.
        unsent: Whether the worker must restore this state.
        turns: Number of turns that were begun.
    """

    state: dict[str, Any] | None = None
    skip: int = 0
    ended: bool = False
    unsent: bool = False
    turns: int = 0

    def next_pass(self) -> _WorkerProgress:
        """Returns the progress at the start of the next pass of the same worker."""
        # The state in which a worker abandons a stream isn't known before it starts the next pass.
        state = None
        if self.ended and self.state is not None:
            state = {name: self.state.get(name) for name in ("dataset", "generators")}
        return _WorkerProgress(state)


class Turns(Order):
    """The order in which workers make the batches of a pass.

    Args:
        loader: The loader.
        beginning: How the pass begins.
        before: Turns of the previous pass of the same workers.

    Attributes:
        yielded: Number of batches that were delivered.
        is_later: Whether the workers have made batches of earlier passes.
        inline: The stream of this process, if the pass has no workers.
    """

    def __init__(self, loader: Any, beginning: Beginning, before: Turns | None = None) -> None:
        resumed, starts = beginning.order, beginning.starts
        super().__init__(loader, resumed)
        self.yielded = 0
        self.inline: Stream | None = None
        self._every = loader.snapshot_every_n_steps
        self.is_later = before is not None
        self._counts_before = before is not None and before.yielded > 0
        # Worker of the next turn to begin, and worker after that of the last delivered turn.
        self._next_worker = self._next_delivered = 0
        # Workers of the turns that weren't delivered yet, and worker of the last delivered one.
        self._owners: dict[int, int] = {}
        self._delivered = 0
        self._workers: list[_WorkerProgress]
        if resumed is not None:
            self.yielded = resumed["yielded"]
            self._next_worker = self._next_delivered = resumed["next_worker"]
            self._workers = [_WorkerProgress(**each, unsent=True) for each in copy.deepcopy(resumed["workers"])]
        elif before is not None:
            self._workers = [each.next_pass() for each in before._workers]
        elif starts is not None:
            self._workers = [_WorkerProgress(each, unsent=True) for each in copy.deepcopy(starts)]
        else:
            self._workers = [_WorkerProgress() for _ in range(loader.num_workers or 1)]

    def draw(self) -> Any:
        """Begins the next turn: returns a list with the request.

        Raises:
            StopIteration: If all streams have ended.
        """
        count = len(self._workers)
        after = ((self._next_worker + step) % count for step in range(count))
        number = next(number for number in after if not self._workers[number].ended)
        worker = self._workers[number]
        self._owners[self.next] = number
        self.next += 1
        self._next_worker = (number + 1) % count
        worker.turns += 1
        return [Turn(bool(self._every) and worker.turns % self._every == 0)]

    def start(self, worker: int) -> tuple[dict[str, Any] | None, int] | None:
        """Returns the state that a worker must restore, and how many batches it must skip. None if nothing."""
        progress = self._workers[worker]
        return (progress.state, progress.skip) if progress.unsent else None

    def opening(self, worker: int) -> Opening:
        """Returns the request with which a worker starts the pass."""
        return Opening(self.is_later, self._counts_before, self.start(worker))

    def opened(self, worker: int, state: dict[str, Any] | None) -> None:
        """Records the state with which a worker has started a later pass."""
        self._workers[worker].state = state

    def owner(self, number: int) -> int | None:
        """Returns the worker that makes the batch of a turn."""
        return self._owners[number]

    def withdraw(self, number: int) -> None:
        """Withdraws the last turn, which couldn't be begun."""
        self._next_worker = self._owners.pop(number)
        self._workers[self._next_worker].turns -= 1

    def skip(self, batches: int) -> None:
        """Does nothing: the workers skip batches."""

    def give(self, number: int) -> None:
        """Records that the consumer receives the result of a turn, which may be an error."""
        self._delivered = self._owners.pop(number)
        worker = self._workers[self._delivered]
        worker.skip += 1
        self._next_delivered = (self._delivered + 1) % len(self._workers)

    def deliver(self, batch: StreamBatch) -> None:
        """Records the states that the last received result contains, which isn't an error."""
        worker = self._workers[self._delivered]
        if batch.ended:
            # Further turns that were begun before have no state.
            worker.state = batch.state or worker.state
            worker.ended, worker.skip = True, 0
            return
        if batch.state is not None:
            worker.state, worker.skip = batch.state, 0
        self.yielded += 1

    def state(self, batches: int) -> dict[str, Any]:
        """Returns the state after the delivered batches."""
        if self.inline is not None:
            found = self.inline.state()
            if found is not None:
                self._workers[0].state, self._workers[0].skip = found, 0
        # To resume, even a worker whose stream has ended begins a pass, as a dataset may count the passes.
        workers = [{"state": each.state, "skip": each.skip} for each in self._workers]
        return super().state(batches) | {
            "yielded": self.yielded,
            "next_worker": self._next_delivered,
            "workers": copy.deepcopy(workers),
        }

    def starts(self) -> list[dict[str, Any] | None]:
        """Returns, for each worker, the state from which the next pass of the same workers starts."""
        return [copy.deepcopy(each.next_pass().state) for each in self._workers]


class StreamProgress(Progress):
    """The progress of a pass over an iterable dataset."""

    order: Turns

    def give(self, number: int) -> None:
        self.order.give(number)

    def state(self) -> dict[str, Any]:
        return super().state() | {"batches": 0, "beyond": []}
