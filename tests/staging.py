"""A device of plain memory, whose copies are made when the test says so, and host memory that is used again at once.

A copy that was begun is made at the last moment: when somebody waits for it, or when the schedule lets it be done. So
host memory that was given back too early has been written with another batch by then, and a device batch that is looked
at before it has arrived holds nothing.
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
    """What a batch holds; no two have a value in common."""
    return list(range(number * WIDTH, (number + 1) * WIDTH))


class HostMemory:
    """Slabs. What is given back is taken again before anything else is."""

    def __init__(self) -> None:
        self.free: list[np.ndarray] = []
        self.made = 0
        # Numbers of batches in the order in which their memory came back.
        self.returned: list[int] = []

    def take(self) -> np.ndarray:
        if self.free:
            return self.free.pop()
        self.made += 1
        return np.full(WIDTH, NOTHING)


class HostBatch:
    """A batch in a slab, which is given back when it dies, as batches of readers do it."""

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
    """A copy engine and the stream that it copies on.

    Args:
        done: whether a copy is complete, for each time that this is asked without waiting.
        fails_at: the copy that can't be begun.
        breaks_at: the copy that never completes: waiting for it raises.
    """

    def __init__(
        self, done: list[bool] | None = None, fails_at: int | None = None, breaks_at: int | None = None
    ) -> None:
        self._done = itertools.cycle(done or [False])
        self._fails_at = fails_at
        self._breaks_at = breaks_at
        # Host memory, device memory; the batch itself isn't kept, as no GPU does.
        self._begun: list[tuple[np.ndarray, np.ndarray]] = []
        self.completed = 0
        self.arrived = 0

    @property
    def begun(self) -> int:
        """Copies that were begun."""
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
        """Makes the copies that were begun up to that one, in their order."""
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
    """Of the `number`-th copy, counted from 1."""

    def __init__(self, device: Device, number: int) -> None:
        self.device = device
        self.number = number

    def done(self) -> bool:
        return self.device.is_done(self.number)

    def wait(self) -> None:
        self.device.run(self.number)


class Arriving:
    """A device batch on a stream that waits for it: to look at it takes the copy to be made."""

    def __init__(self, memory: np.ndarray, completion: Completion) -> None:
        self._memory = memory
        self._completion = completion

    def tolist(self) -> list[int]:
        self._completion.wait()
        return self._memory.tolist()


class Batches(Iterator[Drawn]):
    """Batches 0 to `count - 1`, with their numbers as notes; looks at each draw whether too many are in flight."""

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
    """What a consumer finds in a batch. One that nobody waits for is looked at as it is."""
    found: list[int] = batch.tolist()
    return found
