"""The staging ring: batches on their way from host memory to a device, copied while the consumer computes.

A thread of the ring draws batches from a source and has a *copy engine* begin to copy each. The consumer takes device
batches from the other end. What a copy engine is, the ring doesn't know: a stream of a GPU, or memory that a test
controls. A copy goes on by itself after it was begun, and says by its *completion* when it is over. Four rules:

1. A host batch is kept until its copy is complete. Dropped, its memory is written again with a later batch.
2. A device batch is handed out when the consumer has been made to wait for its arrival: `CopyEngine.arrive`, in the
   consumer's thread. That may well be before it has arrived; on a GPU it is the stream that waits, not the thread.
3. At most `depth` batches are in flight: drawn, and not both copied and handed out.
4. Whatever ends the ring (the end of the source, an error, a consumer who leaves, the interpreter's end), the copies
   that were begun are waited for, in their order, and their host batches dropped one after the other.

Copy engines copy a batch in a few pieces. The arrays of a batch lie in a few slabs: all that is of fixed size in the
first one, and all else in a second one, or in a separate one each if a single thread has made the batch. So a batch is
copied in as many pieces, to one stretch of memory elsewhere, and each array has its place there.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from fastpipe._fastpipe import Memory
from fastpipe.errors import PassClosedError

# Of pieces and arrays in the stretch, in bytes: what GPUs want for whatever reads them, and a multiple of any element.
_ALIGNMENT = 256


class PackedBatch:
    """The pieces of a batch, and where they and its arrays lie in one stretch of memory.

    `dense_shape` of sparse columns isn't data, and in no piece.

    Args:
        batch: arrays and forms by name. Who has this must keep that.
        allocate: makes an array of a number of bytes, or more, for arrays that aren't in a slab (which rows are valid,
            for example): they are copied to one piece.

    Attributes:
        pieces: the bytes of each, uint8 `[size]`, and where it begins in the stretch.
        nbytes: bytes of the stretch, a multiple of 256.
    """

    def __init__(self, batch: Mapping[str, Any], allocate: Callable[[int], np.ndarray]) -> None:
        arrays = [array for node in batch.values() for array in _arrays(node)]
        bases: list[Any] = [array.base for array in arrays]
        self._memory = next((base for base in bases if isinstance(base, Memory)), None)
        self.pieces: list[tuple[np.ndarray, int]] = [] if self._memory is None else self._memory.pieces()
        self.nbytes = 0
        if self.pieces:
            last, start = self.pieces[-1]
            self.nbytes = start + _aligned(last.nbytes)
        self._strays: dict[tuple[int, int], int] = {}
        strays = [a for a, base in zip(arrays, bases, strict=True) if base is not self._memory and a.size]
        if strays:
            self._gather(strays, allocate)

    def place(self, array: np.ndarray) -> int | None:
        """Where an array of the batch, or a view of one, begins in the stretch; None for others, and empty ones."""
        place = None if self._memory is None else self._memory.place(array)
        return self._strays.get(_extent(array)) if place is None else place

    def _gather(self, arrays: list[np.ndarray], allocate: Callable[[int], np.ndarray]) -> None:
        piece = allocate(sum(_aligned(array.nbytes) for array in arrays))
        end = 0
        for array in arrays:
            piece[end : end + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._strays[_extent(array)] = self.nbytes + end
            end += _aligned(array.nbytes)
        self.pieces.append((piece[:end], self.nbytes))
        self.nbytes += end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _extent(array: np.ndarray) -> tuple[int, int]:
    """Where an array lies in this process's memory, transposed or not: its address and bytes."""
    return array.__array_interface__["data"][0], array.nbytes


def _arrays(node: Any) -> Iterator[np.ndarray]:
    """The arrays of a form that have its data."""
    if isinstance(node, np.ndarray):
        yield node
        return
    for name in node._parts:
        if name in ("values", "offsets", "indices", "valid"):
            yield from _arrays(getattr(node, name))


# Seconds. A wait without an end would keep Ctrl-C waiting on Windows.
_PATIENCE = 0.1

# Host batches of which nobody will ever know whether they have been copied: the device failed. Their memory must not be
# written again.
_abandoned: list[Any] = []


class Completion(Protocol):
    """What a copy that was begun says of itself."""

    def done(self) -> bool:
        """Whether it is complete. Doesn't wait."""

    def wait(self) -> None:
        """Waits until it is complete, with the GIL released."""


class EventCompletion:
    """The completion of copies by an event after them, of PyTorch or CuPy.

    Args:
        event: the event.
        done: whether it has been reached.
        kept: host memory that must stay as it is until then.
    """

    def __init__(self, event: Any, done: Callable[[], bool], kept: Any) -> None:
        self.event, self.done, self._kept = event, done, kept

    def wait(self) -> None:
        self.event.synchronize()
        self._kept = None


class CopyEngine(Protocol):
    """Copies to a device, one batch after the other: a copy isn't complete before those that were begun earlier."""

    def copy(self, host: Any) -> tuple[Any, Completion]:
        """Begins to copy a host batch, and returns the device batch, which isn't there yet.

        The caller keeps `host` until the copy is complete. If this raises, nothing is being copied any more.
        """

    def arrive(self, device: Any, completion: Completion) -> Any:
        """Makes the consumer, whose thread calls it, wait for a device batch, and returns what he is given."""


class Drawn(NamedTuple):
    """What a source yields.

    Attributes:
        host: the batch in host memory.
        note: what is handed out beside its copy.
    """

    host: Any
    note: Any


class StagingRing(Iterator[tuple[Any, Any]]):
    """Yields (device batch, note) of each batch of a source, in its order.

    Several threads may draw from it: each batch goes to one of them. An error of the source or of the engine comes
    after the batches before it; it is raised again by each further `next`. The thread ends with the source, with
    `close`, when the ring is dropped, and at the interpreter's end.

    Args:
        source: the batches. The thread of the ring draws from it, and nobody else may.
        engine: what copies.
        depth: batches in flight at most, at least 1.
        stop: ends a wait for the source's next batch, which may then raise. Called by any thread, more than once.
        name: of the thread.
    """

    def __init__(
        self, source: Iterator[Drawn], engine: CopyEngine, depth: int, *, stop: Callable[[], None], name: str
    ) -> None:
        self._belt = _Belt(source, engine, depth, stop)
        self._belt.start(name)
        # Also called at the interpreter's end, while threads can still run.
        self._finalizer = weakref.finalize(self, self._belt.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, Any]:
        try:
            return self._belt.take()
        except BaseException:
            if self._belt.failed:
                # The error is kept to be raised again, and knows the frames that it went through, this one too: what
                # the finalizer keeps alive would keep the ring alive, and the pass with its threads.
                self._finalizer.detach()
                self._belt.stop()
            raise

    def close(self) -> None:
        """Ends the ring, and waits for its thread and for the copies that were begun.

        Batches that were handed out stay as they are.
        """
        self._belt.close()
        self._finalizer.detach()


class _Slot:
    """A batch in flight. The thread of the ring changes `host`; who takes the batch, the others."""

    __slots__ = ("completion", "device", "handed_out", "host", "note")

    def __init__(self, host: Any, device: Any, completion: Completion, note: Any) -> None:
        # None when it is copied.
        self.host = host
        self.device = device
        self.completion = completion
        self.note = note
        self.handed_out = False


class _Belt:
    """What the thread of a ring and its consumers share. It doesn't know the ring, which can therefore be dropped."""

    def __init__(self, source: Iterator[Drawn], engine: CopyEngine, depth: int, stop: Callable[[], None]) -> None:
        self._source: Iterator[Drawn] | None = source
        self._engine = engine
        self._depth = depth
        self._stop = stop
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        # Reentrant: whatever is collected while it is held may close a ring.
        self._changed = threading.Condition(threading.RLock())
        # Only the thread changes it.
        self._in_flight: deque[_Slot] = deque()
        # Those of them that wait to be handed out.
        self._ready: deque[_Slot] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closing = False

    def start(self, name: str) -> None:
        # A daemon, since the interpreter waits for others before it asks anyone to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self) -> tuple[Any, Any]:
        """The next batch, when there is one."""
        if self._process != os.getpid():
            raise PassClosedError("the pass was started by another process, which has its thread; start one here")
        slot = self._next()
        try:
            return self._hand_out(slot), slot.note
        finally:
            # From now on the consumer keeps it alive, or nobody.
            slot.device = None
            with self._changed:
                slot.handed_out = True
                self._changed.notify_all()

    def _next(self) -> _Slot:
        with self._changed:
            while not (self._closing or self._ready):
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise StopIteration
                self._changed.wait(_PATIENCE)
            if self._closing:
                raise PassClosedError("the pass was closed; iter() starts a new one")
            return self._ready.popleft()

    def _hand_out(self, slot: _Slot) -> Any:
        return self._engine.arrive(slot.device, slot.completion)

    @property
    def failed(self) -> bool:
        """Whether an error has ended it, and so its thread."""
        return self._error is not None

    def stop(self) -> None:
        """Ends what it draws from."""
        if self._process == os.getpid():
            self._stop()

    def close(self) -> None:
        if self._process != os.getpid():
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._stop()
        # The thread itself may be the one that collects a dropped ring.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._make_room():
                if not self._draw():
                    break
        except BaseException as error:
            self._fail(error)
        finally:
            self._source = None
            self._drain()

    def _draw(self) -> bool:
        """Begins to copy the next batch; False if there is none."""
        drawn = None if self._source is None else next(self._source, None)
        if drawn is None:
            return False
        device, completion = self._engine.copy(drawn.host)
        slot = _Slot(drawn.host, device, completion, drawn.note)
        with self._changed:
            self._in_flight.append(slot)
            self._ready.append(slot)
            self._changed.notify_all()
        return True

    def _make_room(self) -> bool:
        """Waits until one more batch may be in flight; False if none may any more."""
        while not self._closing:
            while self._in_flight and self._in_flight[0].handed_out and self._in_flight[0].host is None:
                self._in_flight.popleft()
            if len(self._in_flight) < self._depth:
                return True
            oldest = self._in_flight[0]
            self._settle(oldest)
            for slot in islice(self._in_flight, 1, None):
                # The consumer may be long in coming, and the memory is of use.
                if not slot.completion.done():
                    break
                self._settle(slot)
            with self._changed:
                while not (oldest.handed_out or self._closing):
                    self._changed.wait()
        return False

    def _settle(self, slot: _Slot) -> None:
        """Waits until a batch is copied, and lets go of its host memory."""
        if slot.host is None:
            return
        try:
            slot.completion.wait()
        except BaseException:
            _abandoned.append(slot.host)
            raise
        finally:
            slot.host = None

    def _drain(self) -> None:
        for slot in self._in_flight:
            try:
                self._settle(slot)
            except BaseException as error:
                self._fail(error)
        self._in_flight.clear()
        with self._changed:
            self._ended = True
            if self._closing:
                # Not before they are copied: nobody else may have their memory until then.
                self._ready.clear()
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            # Whoever closes the ring interrupts it.
            if not self._closing and self._error is None:
                self._error = error
            self._changed.notify_all()
