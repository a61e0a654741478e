"""The staging ring: copies batches from host memory to a device while the consumer computes.

A thread of the ring draws batches from a source and has a *copy engine* begin copying each batch. The consumer takes
device batches from the other end. The ring doesn't know the kind of copy engine: it may be a stream of a GPU, or memory
that a test controls. After a copy was started, it runs without the ring, and its *completion* reports when it is
complete. Four rules apply:

1. A host batch is kept until its copy is complete. After it is dropped, its memory is overwritten with a later batch.
2. A device batch is delivered after `CopyEngine.arrive`, called in the consumer's thread, has made the consumer wait
   for its arrival. The batch may not have arrived by then: on a GPU, the stream waits instead of the thread.
3. At most `depth` batches are in flight, that is drawn, but not yet both copied and delivered.
4. However the ring ends (the source ends, an error occurs, the consumer leaves, the interpreter exits), it waits for
   the started copies, in order, and drops their host batches one by one.

Copy engines copy a batch in a few pieces, because the arrays of a batch are stored in a few slabs. The first slab
contains everything of fixed size. The second slab contains everything else, or each array has its own slab if a single
thread created the batch. Each slab is copied as one piece to one contiguous region of device memory, in which each
array has a fixed place.
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

# Alignment of pieces and arrays in the region, in bytes: GPUs require it for efficient access, and it is a multiple of
# any element size.
_ALIGNMENT = 256


class PackedBatch:
    """The pieces of a batch, and the places of pieces and arrays in one contiguous memory region.

    The `dense_shape` of sparse features isn't data and is not part of any piece.

    Args:
        batch: Arrays and batch types by name. The owner of this object must keep the batch alive.
        allocate: Function that allocates an array of at least the given number of bytes. It is used for arrays that
            aren't in a slab, such as validity masks, which are gathered into one piece.

    Attributes:
        pieces: The bytes of each piece, uint8 `[size]`, and the offset of the piece in the region.
        nbytes: Size of the region in bytes, a multiple of 256.
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
        """Returns the offset of an array of the batch, or a view of one. None for empty and unknown arrays."""
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
    """Returns the address and size of an array's memory, whether the array is transposed or not."""
    return array.__array_interface__["data"][0], array.nbytes


def _arrays(node: Any) -> Iterator[np.ndarray]:
    """Yields the arrays that contain the data of a batch type."""
    if isinstance(node, np.ndarray):
        yield node
        return
    for name in node._parts:
        if name in ("values", "offsets", "indices", "valid"):
            yield from _arrays(getattr(node, name))


# Timeout in seconds. A wait without a timeout would block Ctrl-C on Windows.
_PATIENCE = 0.1

# Host batches of failed devices. It is unknown whether they were copied, so their memory must never be overwritten.
_abandoned: list[Any] = []


class Completion(Protocol):
    """The completion of a started copy."""

    def done(self) -> bool:
        """Whether the copy is complete. Doesn't wait."""

    def wait(self) -> None:
        """Waits until the copy is complete, with the GIL released."""


class EventCompletion:
    """The completion of copies, signaled by an event of PyTorch or CuPy after them.

    Args:
        event: The event.
        done: Function that returns whether the event has been reached.
        kept: Host memory that must stay unchanged until then.
    """

    def __init__(self, event: Any, done: Callable[[], bool], kept: Any) -> None:
        self.event, self.done, self._kept = event, done, kept

    def wait(self) -> None:
        self.event.synchronize()
        self._kept = None


class CopyEngine(Protocol):
    """Copies batches to a device in order: a copy completes only after all copies that were started earlier."""

    def copy(self, host: Any) -> tuple[Any, Completion]:
        """Begins copying a host batch, and returns the device batch, which hasn't arrived yet.

        The caller keeps `host` until the copy is complete. If this method raises, no copy is running anymore.
        """

    def arrive(self, device: Any, completion: Completion) -> Any:
        """Makes the consumer, whose thread calls this, wait for a device batch, and returns the batch to deliver."""


class Drawn(NamedTuple):
    """A batch drawn from a source.

    Attributes:
        host: The batch in host memory.
        note: A value to deliver with the copy.
    """

    host: Any
    note: Any


class StagingRing(Iterator[tuple[Any, Any]]):
    """Yields (device batch, note) for each batch of a source, in the source's order.

    Several threads may draw from it, and each batch goes to one of them. An error of the source or the engine is raised
    after the batches before it, and again by each further `next`. The ring's thread ends with the source, after
    `close`, when the ring is dropped, and when the interpreter exits.

    Args:
        source: The batches. Only the ring's thread may draw from it.
        engine: Copy engine.
        depth: Maximum number of batches in flight, at least 1.
        stop: Function that ends a wait for the source's next batch, which may then raise. Any thread may call it,
            repeatedly.
        name: Name of the thread.
    """

    def __init__(
        self, source: Iterator[Drawn], engine: CopyEngine, depth: int, *, stop: Callable[[], None], name: str
    ) -> None:
        self._belt = _Belt(source, engine, depth, stop)
        self._belt.start(name)
        # Also called when the interpreter exits, while threads can still run.
        self._finalizer = weakref.finalize(self, self._belt.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, Any]:
        try:
            return self._belt.take()
        except BaseException:
            if self._belt.failed:
                # The error is kept so that it can be raised again, and its traceback references all frames, including
                # this one. The finalizer would keep the error alive, and thereby the ring and the pass with its
                # threads.
                self._finalizer.detach()
                self._belt.stop()
            raise

    def close(self) -> None:
        """Ends the ring, and waits for its thread and the started copies.

        Batches that were delivered stay valid.
        """
        self._belt.close()
        self._finalizer.detach()


class _Slot:
    """A batch in flight.

    The ring's thread changes `host`. The thread that takes the batch changes the other attributes.
    """

    __slots__ = ("completion", "device", "handed_out", "host", "note")

    def __init__(self, host: Any, device: Any, completion: Completion, note: Any) -> None:
        # None after the copy.
        self.host = host
        self.device = device
        self.completion = completion
        self.note = note
        self.handed_out = False


class _Belt:
    """State shared by the ring's thread and its consumers.

    It doesn't reference the ring, so that the ring can be dropped.
    """

    def __init__(self, source: Iterator[Drawn], engine: CopyEngine, depth: int, stop: Callable[[], None]) -> None:
        self._source: Iterator[Drawn] | None = source
        self._engine = engine
        self._depth = depth
        self._stop = stop
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        # Reentrant, because garbage collection while it is held may close a ring. `with` uses the lock, not the
        # condition: Ctrl-C in `Condition.__enter__` could leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Only the ring's thread changes it.
        self._in_flight: deque[_Slot] = deque()
        # Batches in flight that wait for delivery.
        self._ready: deque[_Slot] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closing = False

    def start(self, name: str) -> None:
        # A daemon thread, because the interpreter waits for other threads before it calls finalizers.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self) -> tuple[Any, Any]:
        """Returns the next batch when it is available."""
        if self._process != os.getpid():
            raise PassClosedError("the pass was started by another process; call iter() to start one in this process")
        slot = self._next()
        try:
            return self._hand_out(slot), slot.note
        finally:
            # From now on, only the consumer keeps the device batch alive.
            slot.device = None
            with self._lock:
                slot.handed_out = True
                self._changed.notify_all()

    def _next(self) -> _Slot:
        with self._lock:
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
        """Whether an error has ended the ring, and thereby its thread."""
        return self._error is not None

    def stop(self) -> None:
        """Ends waiting for the source's next batch."""
        if self._process == os.getpid():
            self._stop()

    def close(self) -> None:
        if self._process != os.getpid():
            return
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        self._stop()
        # Garbage collection in this very thread may have dropped the ring.
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
        """Begins copying the next batch. Returns False if the source has ended."""
        drawn = None if self._source is None else next(self._source, None)
        if drawn is None:
            return False
        device, completion = self._engine.copy(drawn.host)
        slot = _Slot(drawn.host, device, completion, drawn.note)
        with self._lock:
            self._in_flight.append(slot)
            self._ready.append(slot)
            self._changed.notify_all()
        return True

    def _make_room(self) -> bool:
        """Waits until one more batch may be in flight. Returns False if the ring is closing."""
        while not self._closing:
            while self._in_flight and self._in_flight[0].handed_out and self._in_flight[0].host is None:
                self._in_flight.popleft()
            if len(self._in_flight) < self._depth:
                return True
            oldest = self._in_flight[0]
            self._settle(oldest)
            for slot in islice(self._in_flight, 1, None):
                # The consumer may take long to come back, so free the host memory of copied batches now.
                if not slot.completion.done():
                    break
                self._settle(slot)
            with self._lock:
                while not (oldest.handed_out or self._closing):
                    self._changed.wait()
        return False

    def _settle(self, slot: _Slot) -> None:
        """Waits until a batch is copied, and releases its host memory."""
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
        with self._lock:
            self._ended = True
            if self._closing:
                # Cleared only now: until the copies are complete, the device memory must not be reused.
                self._ready.clear()
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            # Closing the ring interrupts the source, so the resulting error is ignored.
            if not self._closing and self._error is None:
                self._error = error
            self._changed.notify_all()
