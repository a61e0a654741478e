"""The batches of a map: a pass whose batches a function changes, in the consumer's thread or in several threads.

Threads draw from the incoming pass under a lock, which numbers the batches, and call the function without the lock. The
consumer takes the results by number. So batches are yielded in order, and Ctrl-C, which only interrupts the consumer,
loses none: the number of the next batch follows from the mark that the consumer sets when it returns one.

Tasks refer to the `_Feed` and not to the iterator. So the iterator can be dropped while functions are running, and the
threads end after their current call.
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias

import numpy as np

from fastpipe._reader.passes import BatchPlace, Position, Started
from fastpipe._reader.state import State
from fastpipe.errors import PassClosedError

# The feeds whose functions the current thread is running.
_running = threading.local()


class OwnFunction(abc.ABC):
    """A function of a batch that fastpipe provides.

    Attributes:
        marks_valid: Whether it adds the entry `valid`.
    """

    marks_valid = False

    @abc.abstractmethod
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the result for a batch."""

    @property
    def stage(self) -> tuple[str, str] | None:
        """The name and description of the stage in a plan. None if the dataset's stages describe it."""
        return None


@dataclass(frozen=True, slots=True)
class MapFunction:
    """The function of a map.

    Attributes:
        function: The user's function.
        seed: Seed of the random numbers. None for a function without random numbers.
        depth: Number of maps before this one. Maps with the same seed draw different numbers.
    """

    function: Callable[..., Any]
    seed: int | None
    depth: int

    def __call__(self, batch: dict[str, Any], place: BatchPlace, rank: int) -> Any:
        """Returns the result for a batch. A note of an error names the batch."""
        try:
            if self.seed is None:
                return self.function(batch)
            return self.function(batch, self._generator(place))
        except StopIteration as error:
            # The caller of `next` would take it for the end of the pass.
            failed = RuntimeError("the function of map() raised StopIteration")
            failed.add_note(_note(place, rank))
            raise failed from error
        except Exception as error:
            error.add_note(_note(place, rank))
            raise

    def _generator(self, place: BatchPlace) -> np.random.Generator:
        """Returns the generator of a batch. It doesn't depend on the rank, because the index of the batch doesn't."""
        key = np.array([self.seed, self.depth], np.uint64)
        # Draws count in the first word.
        counter = np.array([0, place.batch, 0, place.epoch], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _note(place: BatchPlace, rank: int) -> str:
    where = f"epoch {place.epoch}, step {place.step}, rank {rank}"
    return f"The function of map() raised this error for the batch of {where}."


Call: TypeAlias = Callable[[Any, BatchPlace, int], Any]
"""A `MapFunction`, or the processes that call it: a function of a batch, its place, and the rank."""


class Mark(NamedTuple):
    """The position of the consumer.

    Attributes:
        delivered: Number of batches that `next` has returned.
        epoch: Epoch of the last batch. Before the first batch its epoch, and after the end the following epoch.
        progress: What is left of the epoch.
        ended: Whether `next` has reported the end.
        last: Place of the last batch. None before the first batch, and after the end.
    """

    delivered: int
    epoch: int
    progress: State
    ended: bool
    last: BatchPlace | None = None


class MappedPosition:
    """The position of a map's pass, which counts only batches that `next` returned.

    Args:
        batches: The pass. The position doesn't keep it alive.
        incoming: Position of the incoming pass.

    Attributes:
        incoming: Position of the incoming pass.
        base: Number of batches that were delivered before the incoming pass began, because Ctrl-C restarted it.
        mark: Position of the consumer. It is one attribute, because Ctrl-C may interrupt between two assignments.
    """

    def __init__(self, batches: MappedBatches, incoming: Position) -> None:
        self.incoming = incoming
        self.base = 0
        self.mark = Mark(0, incoming.epoch, incoming.progress(), False)
        self._batches = weakref.ref(batches)

    @property
    def epoch(self) -> int:
        return self.mark.epoch

    @property
    def delivered(self) -> int:
        return self.mark.delivered

    @property
    def ended(self) -> bool:
        return self.mark.ended

    @property
    def last_batch(self) -> BatchPlace | None:
        return self.mark.last

    @property
    def in_step(self) -> bool:
        """Whether the incoming pass is where the consumer is."""
        incoming, mark = self.incoming, self.mark
        return mark.ended or (self.base == 0 and incoming.delivered == mark.delivered and not incoming.ended)

    @property
    def active(self) -> bool:
        """Whether the pass is running."""
        batches = self._batches()
        return batches is not None and not batches.stopped and not self.mark.ended

    def progress(self) -> State:
        return dict(self.mark.progress)

    def close(self) -> None:
        batches = self._batches()
        if batches is not None:
            batches.close()


class _Drawn(NamedTuple):
    """An incoming batch, or the end.

    Attributes:
        batch: The batch. A map before this one may return any object.
        epoch: Its epoch. At the end, the following epoch.
        place: Its place. None at the end.
        progress: Progress after it.
    """

    batch: Any
    epoch: int
    place: BatchPlace | None
    progress: State


class _Feed:
    """The incoming pass, and the results by number of the batch.

    Args:
        started: The incoming pass.
        function: Function of the batches.
        rank: Rank whose batches they are.
    """

    def __init__(self, started: Started, function: Call, rank: int) -> None:
        self.batches, self.position, self.end = started
        self._function, self._rank = function, rank
        self.lock = threading.Lock()
        self.stopped = False
        self.results: dict[int, Future[tuple[_Drawn, Any]]] = {}
        # Number of batches that the threads have requested.
        self._requested = 0

    def result(self, number: int) -> Future[tuple[_Drawn, Any]]:
        """Returns the future result for a batch."""
        return self.results.setdefault(number, Future())

    def draw(self) -> _Drawn:
        """Returns the next incoming batch. Only one thread may call it at a time."""
        position = self.position
        try:
            batch = next(self.batches)
        except StopIteration:
            return _Drawn(None, position.epoch, None, position.progress())
        place = position.last_batch
        if place is None:
            raise RuntimeError("internal error: a batch has no place in its epoch; please report this")
        return _Drawn(batch, position.epoch, BatchPlace(*place), position.progress())

    def apply(self, drawn: _Drawn) -> Any:
        """Calls the function."""
        if drawn.place is None:
            return None
        outer = getattr(_running, "feeds", ())
        _running.feeds = (*outer, self)
        try:
            return self._function(drawn.batch, drawn.place, self._rank)
        finally:
            _running.feeds = outer

    @property
    def runs_here(self) -> bool:
        """Whether the current thread is running the function of this pass."""
        return self in getattr(_running, "feeds", ())

    def work(self) -> None:
        """Draws a batch and calls the function, in a thread of the map."""
        with self.lock:
            if self.stopped:
                return
            result = self.result(self._requested)
            self._requested += 1
            try:
                drawn = self.draw()
            except BaseException as error:
                _fail(result, error)
                return
        try:
            value = self.apply(drawn)
        except BaseException as error:
            _fail(result, error)
        else:
            with contextlib.suppress(InvalidStateError):  # The pass was closed.
                result.set_result((drawn, value))

    def stop(self) -> None:
        """Wakes up consumers. They see that the pass was stopped."""
        self.stopped = True
        for result in list(self.results.values()):
            result.cancel()


def _fail(result: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        result.set_exception(error)


class MappedBatches(Iterator[Any]):
    """A pass whose batches a function changes.

    An error of the incoming pass or of the function ends it, and each further `next` raises the error again. Ctrl-C
    doesn't end it.

    Args:
        started: The incoming pass.
        again: Function that starts the incoming pass again at the mark of the consumer, after Ctrl-C lost a batch.
        function: Function of the batches.
        rank: Rank whose batches they are.
        num_threads: Number of threads that call the function. With 0, `next` calls it.
        prefetch: Number of further results that may be waiting for the consumer.
    """

    def __init__(
        self,
        started: Started,
        again: Callable[[MappedPosition], Started],
        function: Call,
        *,
        rank: int,
        num_threads: int,
        prefetch: int,
    ) -> None:
        self._again, self._function, self._rank = again, function, rank
        self._feed = _Feed(started, function, rank)
        self.position = MappedPosition(self, started.position)
        self._most = num_threads + prefetch
        self._submitted = 0
        self._process = os.getpid()
        self._error: Exception | None = None
        # A signal handler may call `next` while the same thread is in it.
        self._lock = threading.RLock()
        self._drawing = False
        self._threads: ThreadPoolExecutor | None = None
        if num_threads:
            self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="fastpipe-map")
            weakref.finalize(self, _drop, self._feed, self._threads, self._process).atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        # In a forked child, a thread of the parent may hold the lock.
        if os.getpid() != self._process or (self._feed.stopped and self._error is None):
            self._closed()
        if self._feed.runs_here:
            raise RuntimeError("the function of map() must not draw from the pass that calls it")
        with self._lock:
            if self._error is not None:
                # Removes the traceback entries that were added each time the error was raised.
                raise self._error.with_traceback(None)
            if self._drawing:
                raise RuntimeError("next() was called while the same thread is in next() of this pass")
            self._drawing = True
            try:
                return self._next() if self._threads is None else self._next_of(self._threads)
            except StopIteration:
                raise
            except Exception as error:
                self._error = error
                self._stop()
                self._feed.position.close()
                raise
            finally:
                self._drawing = False

    def _next(self) -> Any:
        position = self.position
        if self._feed.position.delivered != position.delivered - position.base and not position.ended:
            # Ctrl-C lost a batch after it was drawn. The function may have changed it, so it is read again.
            started = self._again(position)
            self._feed = _Feed(started, self._function, self._rank)
            position.incoming, position.base = started.position, position.delivered
        drawn = self._feed.draw()
        value = self._feed.apply(drawn)
        mark = self._marked(drawn)
        if mark is None:
            raise StopIteration
        position.mark = mark
        return value

    def _next_of(self, threads: ThreadPoolExecutor) -> Any:
        position, feed = self.position, self._feed
        if position.ended:
            return next(feed.batches)  # Raises the right error if the pass was closed after its end.
        number = position.delivered
        result = feed.result(number)
        try:
            while self._submitted < number + self._most:
                threads.submit(feed.work)
                self._submitted += 1
            if feed.stopped:
                raise CancelledError
            drawn, value = result.result()
        except (CancelledError, RuntimeError):
            # Threads can't be started after the end of the interpreter or of the pass.
            if not feed.stopped:
                raise
            self._closed()
        if feed.stopped:
            self._closed()
        mark = self._marked(drawn)
        if mark is None:
            threads.shutdown()
            raise StopIteration
        results = feed.results
        # Nothing is called until the lock is released, so a signal handler runs either before the mark is set or after
        # the result is deleted. Ctrl-C while the lock is released loses this batch: the mark counts it.
        position.mark = mark
        del results[number]
        return value

    def _marked(self, drawn: _Drawn) -> Mark | None:
        """Returns the mark after a batch. Sets the mark at the end, and returns None."""
        last = self.position.mark
        if drawn.place is not None:
            return Mark(last.delivered + 1, drawn.epoch, drawn.progress, False, drawn.place)
        if not last.ended:
            self.position.mark = Mark(last.delivered, drawn.epoch, drawn.progress, True)
        return None

    @property
    def stopped(self) -> bool:
        """Whether the pass was closed, or belongs to another process."""
        return self._feed.stopped or os.getpid() != self._process

    def _closed(self) -> NoReturn:
        """Raises the error of the incoming pass, which says what closed it."""
        next(self._feed.batches)
        raise PassClosedError("the pass was closed")

    def _stop(self) -> None:
        if os.getpid() != self._process:
            return
        self._feed.stop()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def end(self) -> None:
        """Ends the pass, and waits for its threads unless the function of this pass calls it.

        The incoming pass must have been closed, which wakes up threads that wait for its batches. Its error then says
        what closed it.
        """
        self._stop()
        if self._threads is not None and os.getpid() == self._process and not self._feed.runs_here:
            self._threads.shutdown()

    def close(self) -> None:
        """Ends the pass and the incoming pass, and waits for their threads."""
        self._feed.end()
        self.end()


def _drop(feed: _Feed, threads: ThreadPoolExecutor, process: int) -> None:
    """Ends the threads of a pass that was dropped. They end after their current call."""
    if os.getpid() == process:
        feed.stop()
        threads.shutdown(wait=False, cancel_futures=True)
