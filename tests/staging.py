"""A device of host memory whose copies run when the test decides, and host memory that is reused immediately.

A copy runs as late as possible: when something waits for it, or when the test's schedule completes it. So if host
memory is returned too early, another batch has overwritten it by then. A device batch that is read before it has
arrived is empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastpipe.cuda._staging import Drawn

WIDTH = 4
NOTHING = -1


def values(number: int) -> list[int]:
    """Returns the values of a batch. No two batches have a value in common."""
    return list(range(number * WIDTH, (number + 1) * WIDTH))


class HostMemory:
    """Host slabs. Returned slabs are reused before new ones are created."""

    def __init__(self) -> None:
        self.free: list[np.ndarray] = []
        self.made = 0
        # Indices of batches in the order in which their memory was returned.
        self.returned: list[int] = []

    def take(self) -> np.ndarray:
        if self.free:
            return self.free.pop()
        self.made += 1
        return np.full(WIDTH, NOTHING)


class HostBatch:
    """A batch in a slab. The slab is returned when the batch is freed, as for batches of a reader."""

    def __init__(self, memory: HostMemory, number: int) -> None:
        self.slab = memory.take()
        self.slab[:] = values(number)
        self._memory = memory
        self._number = number

    def __del__(self) -> None:
        self.slab[:] = NOTHING
        self._memory.returned.append(self._number)
        self._memory.free.append(self.slab)


class Device:
    """A copy engine and its stream.

    Args:
        done: Answers to successive non-blocking queries whether a copy is complete.
        fails_at: Index of the copy that can't be started.
        breaks_at: Index of the copy that never completes. Waiting for it raises.
    """

    def __init__(
        self, done: list[bool] | None = None, fails_at: int | None = None, breaks_at: int | None = None
    ) -> None:
        self._done = itertools.cycle(done or [False])
        self._fails_at = fails_at
        self._breaks_at = breaks_at
        # Pairs of host and device memory. As on a GPU, they don't keep the batch alive.
        self._begun: list[tuple[np.ndarray, np.ndarray]] = []
        self.completed = 0
        self.arrived = 0

    @property
    def begun(self) -> int:
        """Number of copies that were started."""
        return len(self._begun)

    def copy(self, host: HostBatch) -> tuple[np.ndarray, Completion]:
        if self.begun == self._fails_at:
            raise RuntimeError("no memory on the device")
        memory = np.full(WIDTH, NOTHING)
        self._begun.append((host.slab, memory))
        return memory, Completion(self, self.begun)

    def arrive(self, device: np.ndarray, completion: Completion) -> Arriving:
        self.arrived += 1
        return Arriving(device, completion)

    def run(self, until: int) -> None:
        """Runs the first `until` copies in order."""
        if self._breaks_at is not None and until > self._breaks_at:
            raise RuntimeError("the device is lost")
        for i in range(self.completed, until):
            host, device = self._begun[i]
            device[:] = host
        self.completed = max(self.completed, until)

    def is_done(self, number: int) -> bool:
        if self.completed < number and next(self._done):
            self.run(number)
        return self.completed >= number


class Completion:
    """The completion of copy `number`, counted from 1."""

    def __init__(self, device: Device, number: int) -> None:
        self.device = device
        self.number = number

    def done(self) -> bool:
        return self.device.is_done(self.number)

    def wait(self) -> None:
        self.device.run(self.number)


class Arriving:
    """A device batch on a stream that waits for it: reading it completes the copy."""

    def __init__(self, memory: np.ndarray, completion: Completion) -> None:
        self._memory = memory
        self._completion = completion

    def tolist(self) -> list[int]:
        self._completion.wait()
        return self._memory.tolist()


class Batches(Iterator[Drawn]):
    """Batches 0 to `count - 1`, with their indices as notes.

    Each draw checks that not too many batches are in flight.
    """

    def __init__(self, count: int, memory: HostMemory, device: Device, depth: int, error_at: int | None = None) -> None:
        self._count = count
        self._memory = memory
        self._device = device
        self._depth = depth
        self._error_at = error_at
        self.drawn = 0
        self.stopped = False
        self.most_in_flight = 0

    def __next__(self) -> Drawn:
        number = self.drawn
        if self.stopped:
            raise RuntimeError("interrupted")
        if number == self._error_at:
            raise ValueError("a damaged file")
        if number == self._count:
            raise StopIteration
        self.drawn += 1
        over = min(self._device.completed, self._device.arrived)
        self.most_in_flight = max(self.most_in_flight, self.drawn - over)
        return Drawn(HostBatch(self._memory, number), number)

    def stop(self) -> None:
        self.stopped = True


def content(batch: Any) -> list[int]:
    """Returns the values that a consumer reads from a batch, without waiting for host batches."""
    found: list[int] = batch.tolist()
    return found
