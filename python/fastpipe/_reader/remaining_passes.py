"""The passes of a reader without some of its steps, in the form that adapters use.

The reader makes all batches, and the batches of the steps that are left out are dropped. So each remaining batch has
the rows that it has in the reader, and a state is a state of the reader: its step counts all batches of the epoch. In
all other places, such as `batch_at` and `len`, only the remaining batches count.
"""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from fastpipe._arguments import integer, shown
from fastpipe._arrow import to_arrow
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.passes import BatchPlace, Passes, Position, Started
from fastpipe._reader.reader_passes import ReaderPasses
from fastpipe._reader.state import State
from fastpipe.errors import PassClosedError, StateError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from fastpipe._fastpipe import PassMemory, ReaderTotals, SharedSlabs
    from fastpipe.specs import Features


class LeftOut:
    """Steps of an epoch that are left out, and the numbering of the remaining steps.

    Args:
        steps: The steps, which must ascend.
        total: Number of steps of an epoch.
    """

    def __init__(self, steps: tuple[int, ...], total: int) -> None:
        self.steps, self.total = steps, total
        self._all = frozenset(steps)
        # Number of remaining steps before each step that is left out.
        self._before = [step - at for at, step in enumerate(steps)]

    @classmethod
    def checked(cls, steps: Iterable[int] | slice, total: int) -> Self:
        """Checks the steps that a user passes.

        Raises:
            TypeError: If it isn't an iterable of integers or a slice.
            ValueError: If a step doesn't exist, or if no step would remain.
        """
        if isinstance(steps, slice):
            start, stop, by = steps.start, steps.stop, steps.step
            steps = range(
                0 if start is None else integer("start of the slice", start),
                total if stop is None else integer("end of the slice", stop),
                1 if by is None else integer("step of the slice", by),
            )
        if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
            raise TypeError(f"steps must be a range, a slice or a list of integers; got {shown(steps)}")
        # The ends of a range are checked first, because it may be huge.
        ends = (steps[0], steps[-1]) if isinstance(steps, range) and len(steps) else ()
        found = {_existing(step, total) for step in itertools.chain(ends, steps)}
        if found and len(found) == total:
            raise ValueError(f"steps has all {total} batches of an epoch: keep at least one of them")
        return cls(tuple(sorted(found)), total)

    def __reduce__(self) -> tuple[Any, ...]:
        return LeftOut, (self.steps, self.total)

    def __contains__(self, step: int) -> bool:
        return step in self._all

    def __len__(self) -> int:
        """Returns the number of steps that remain in an epoch."""
        return self.total - len(self.steps)

    def original(self, number: int) -> int:
        """Returns the step of the `number`-th batch that remains."""
        return number + bisect_right(self._before, number)

    def remaining_before(self, step: int) -> int:
        """Returns the number of remaining steps before a step."""
        return step - bisect_left(self.steps, step)


def _existing(step: int, total: int) -> int:
    number = integer("each of the steps", step)
    if not 0 <= number < total:
        last = f", counted from 0 to {total - 1}" if total else ""
        raise ValueError(f"step {number} does not exist: an epoch has {total} batches{last}")
    return number


class _Mark(NamedTuple):
    """The position of the consumer.

    Attributes:
        drawn: Number of incoming batches that were returned or dropped.
        delivered: Number of batches that were returned.
        last: Place of the last batch that was returned.
        progress: What is left of the epoch.
    """

    drawn: int
    delivered: int
    last: BatchPlace | None
    progress: State


class RemainingPosition:
    """The position of a pass, which counts only remaining batches.

    Args:
        incoming: Position of the incoming pass.

    Attributes:
        incoming: Position of the incoming pass.
        mark: Position of the consumer. It is one attribute, because Ctrl-C may interrupt between two assignments.
        ended: Whether `next` has reported the end.
    """

    def __init__(self, incoming: Position) -> None:
        self.incoming = incoming
        self.mark = _Mark(0, 0, None, incoming.progress())
        self.ended = False
        self._first_epoch = incoming.epoch

    @property
    def epoch(self) -> int:
        if self.ended:
            return self.incoming.epoch
        return self._first_epoch if self.mark.last is None else self.mark.last.epoch

    @property
    def delivered(self) -> int:
        return self.mark.delivered

    @property
    def last_batch(self) -> BatchPlace | None:
        return self.mark.last

    def progress(self) -> State:
        return dict(self.mark.progress)

    def close(self) -> None:
        self.incoming.close()


class RemainingBatches(Iterator[dict[str, Any]]):
    """A pass that drops the batches of some steps.

    Args:
        started: The incoming pass.
        left_out: Steps whose batches are dropped.
    """

    def __init__(self, started: Started, left_out: LeftOut) -> None:
        self._batches, self.position = started.batches, RemainingPosition(started.position)
        self._left_out = left_out
        self._process = os.getpid()
        # Has the batch that `next` has drawn and not yet returned or dropped.
        self._held: deque[dict[str, Any]] = deque()
        # A signal handler may call `next` while the same thread is in it.
        self._lock = threading.RLock()
        self._drawing = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        if os.getpid() != self._process:
            # Another thread of the parent may hold the lock.
            next(self._batches)
            raise PassClosedError("the pass belongs to another process")
        with self._lock:
            if self._drawing:
                raise RuntimeError("next() was called while the same thread is in next() of this pass")
            self._drawing = True
            try:
                return self._next()
            finally:
                self._drawing = False

    def _next(self) -> dict[str, Any]:
        position, left_out, held = self.position, self._left_out, self._held
        incoming = position.incoming
        while True:
            mark = position.mark
            if incoming.delivered == mark.drawn:
                # The batch is drawn and stored in one call, so Ctrl-C can't lose it in between.
                held.clear()
                held.extend(itertools.islice(self._batches, 1))
                if not held:
                    position.mark = mark._replace(progress=incoming.progress())
                    position.ended = True
                    raise StopIteration
            place, progress = incoming.last_batch, incoming.progress()
            kept = place is not None and place[1] not in left_out
            last = BatchPlace(*place) if place is not None and kept else mark.last
            batch, mark = held[0], _Mark(mark.drawn + 1, mark.delivered + kept, last, progress)
            # A signal handler runs either before the mark is set or after the batch is removed.
            position.mark = mark
            del held[0]
            if kept:
                return batch


class RemainingPasses(Passes):
    """The passes of a reader without some steps of each epoch.

    Args:
        incoming: Passes of the reader, which must have one rank.
        left_out: Steps that are left out.
    """

    def __init__(self, incoming: ReaderPasses, left_out: LeftOut) -> None:
        self.incoming, self.left_out = incoming, left_out
        self._position: RemainingPosition | None = None

    def __repr__(self) -> str:
        return f"<{len(self.left_out)} of {self.left_out.total} batches of {self.incoming!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return RemainingPasses, (self.incoming, self.left_out)

    @property
    def origin(self) -> Any:
        return self.incoming.origin

    @property
    def features(self) -> Features:
        return self.incoming.features

    @property
    def batch_size(self) -> int:
        return self.incoming.batch_size

    @property
    def drop_last(self) -> bool:
        return self.incoming.drop_last

    @property
    def on_uneven(self) -> str:
        return self.incoming.on_uneven

    @property
    def epochs(self) -> int | None:
        return self.incoming.epochs

    def __len__(self) -> int:
        if self.epochs is None:
            return len(self.incoming)  # Raises the error.
        return self.steps * self.epochs

    @property
    def steps(self) -> int:
        return len(self.left_out)

    @property
    def shows_progress(self) -> bool:
        return self.incoming.shows_progress

    @property
    def rank(self) -> int:
        return self.incoming.rank

    @property
    def world_size(self) -> int:
        return self.incoming.world_size

    def shard(self, num_shards: int, index: int) -> Passes:
        return self if num_shards == 1 else self._refuse(f"{num_shards} ranks")

    def share(self, processes: int, index: int) -> Passes:
        return self if processes == 1 else self._refuse(f"{processes} ranks")

    def worker(self, workers: int, worker: int) -> Passes:
        return self if workers == 1 else self._refuse(f"{workers} workers of a DataLoader")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(several_ranks(what))

    def rebuilt(self) -> RemainingPasses:
        return RemainingPasses(ReaderPasses(self.incoming.origin._rebuilt()), self.left_out)

    @property
    def sharers(self) -> int:
        return self.incoming.sharers

    def share_processors(self, sharers: int) -> None:
        self.incoming.share_processors(sharers)

    @property
    def epoch(self) -> int:
        position = self._current()
        return self.incoming.epoch if position is None else position.epoch

    @property
    def pass_epoch(self) -> int:
        return self.incoming.pass_epoch

    @property
    def loaded(self) -> bool:
        return self.incoming.loaded

    @property
    def next_epoch(self) -> int:
        return self.incoming.next_epoch

    def set_epoch(self, epoch: int) -> None:
        self.incoming.set_epoch(epoch)

    def _current(self) -> RemainingPosition | None:
        position = self._position
        return position if position is not None and self.incoming.is_current(position.incoming) else None

    def is_current(self, position: Position) -> bool:
        return position is self._position and self._current() is not None

    def go_back(self, progress: State) -> None:
        self.incoming.go_back(progress)

    def state(self, *, ended_stays: bool) -> dict[str, Any]:
        position = self._current()
        if position is None:
            return self.incoming.state(ended_stays=ended_stays)
        return self.incoming.state_at(position.progress(), ended=position.ended and not ended_stays)

    def state_at(self, progress: State, *, ended: bool) -> dict[str, Any]:
        return self.incoming.state_at(progress, ended=ended)

    def start_state(self) -> Callable[[], State]:
        return self.incoming.start_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        reader = self.incoming.origin
        # A state that doesn't fit must not close the pass of this reader.
        tried = reader._like(reader._data)
        tried.load_state_dict(state_dict)
        self._check_position(tried.state_dict()["progress"])
        self.incoming.load_state_dict(state_dict)

    def _check_position(self, progress: State) -> None:
        """Checks that a state's position is a step of the order.

        Raises:
            StateError: If several ranks have read parts of the epoch, so that the remaining steps have gaps.
        """
        step, ordering = progress["step"], self.incoming.parts.ordering
        chunk = max(1, self.incoming.parts.order.shuffle_buffer // self.batch_size)
        done = progress["next"] * (chunk if ordering.shard_by == "window" else 1) + progress["taken"]
        gaps = progress["world_size"] != 1 or progress["open"] or progress["late"]
        if step and (gaps or step != done):
            raise StateError(
                "cannot resume from this state without some steps: several ranks have read a part of its epoch, so its"
                " step isn't a step of the whole order. Resume with the reader, and leave out steps from the next"
                " epoch on"
            )

    def start(self, memory: PassMemory | None = None) -> Started:
        started = self.incoming.start(memory)
        batches = RemainingBatches(started, self.left_out)
        self._position = batches.position
        return Started(batches, batches.position, started.close)

    def batches(self, epoch: int, start: int, stop: int) -> Started:
        if not 0 <= start < stop:
            return self.incoming.batches(epoch, start, stop)  # Raises the error.
        self.step_in_order(stop - 1)
        first, last = self.left_out.original(start), self.left_out.original(stop - 1)
        started = self.incoming.batches(epoch, first, last + 1)
        batches = RemainingBatches(started, self.left_out)
        return Started(batches, batches.position, started.close)

    def batch_at(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        return self.incoming.batch_at(self.step_in_order(step), epoch)

    def step_in_order(self, step: int) -> int:
        """Returns the step of the reader of a batch that remains."""
        at, steps = integer("step", step), self.steps
        if not 0 <= at < steps:
            last = f", counted from 0 to {steps - 1}" if steps else ""
            raise IndexError(f"batch {at} does not exist: {steps} batches of an epoch remain{last}")
        return self.left_out.original(at)

    def place_of(self, epoch: int, step: int) -> BatchPlace:
        return self.incoming.place_of(epoch, self.step_in_order(step))

    def rows_of(self, epoch: int, step: int) -> int:
        return self.incoming.rows_of(epoch, self.step_in_order(step))

    def record_batches(self, epoch: int, start: int, stop: int) -> pa.RecordBatchReader:
        return self.arrow_reader(lambda: self.batches(epoch, start, stop).batches)

    def arrow_reader(self, start: Callable[[], Iterator[Any]]) -> pa.RecordBatchReader:
        """Returns batches as Arrow record batches.

        Args:
            start: Function that starts their pass. It isn't called if the features have no schema.
        """
        pyarrow, features, schema = require_pyarrow(), self.features, self.arrow_schema()
        # A generator would hold a batch while the next one is made.
        return pyarrow.RecordBatchReader.from_batches(schema, map(partial(to_arrow, features=features), start()))

    def close(self) -> None:
        self.incoming.close()

    @property
    def totals(self) -> ReaderTotals:
        return self.incoming.totals

    def limit_threads(self, most: int) -> None:
        self.incoming.limit_threads(most)

    @property
    def together(self) -> int:
        return self.incoming.together

    @property
    def drawn(self) -> bool:
        return self.incoming.drawn

    def memory(self, allocate: Callable[[int], np.ndarray], held: int) -> PassMemory:
        return self.incoming.memory(allocate, held)

    def shared_memory(self, slabs: SharedSlabs, held: int) -> PassMemory:
        return self.incoming.shared_memory(slabs, held)


def several_ranks(what: str) -> str:
    """Returns the reason why steps can't be left out for several ranks or workers."""
    return (
        f"without(steps=...) counts the batches of one rank, and there are {what}, whose batches would no longer be"
        " divided evenly. Leave out rows instead, without(rows=...), or skip the steps in the training loop of each"
        " rank"
    )
