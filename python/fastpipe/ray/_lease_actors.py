"""What runs in Ray's processes for `fastpipe.ray`: workers on leases, and the collector of their results.

A worker hands in the result of a batch, and commits the batch when the collector has it. So each batch that is
committed has a result there. If a worker dies in between, another one uses the batch, too; the collector keeps the
first result.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

from fastpipe._reader.reader import Reader
from fastpipe.errors import StaleLeaseError

__all__ = ["Collector", "Outcome", "Result", "Worker"]


class Result(NamedTuple):
    """What `consume` returned for a batch.

    Attributes:
        epoch: of the batch.
        step: of the batch in its epoch, as `Reader.batch_at` counts.
        worker: that used it.
        value: that was returned.
    """

    epoch: int
    step: int
    worker: str
    value: Any


class Outcome(NamedTuple):
    """How a worker ended.

    Attributes:
        kind: "finished" if the job is done, "stopped" if it was told to, or "failed".
        refused: commits that were refused, since another worker does the batches.
        batch: the epoch and the step of the batch that `consume` failed with; None if something else failed.
        error: pickled by Ray; None if it can't be.
        told: the error with its traceback, as text.
    """

    kind: str
    refused: int = 0
    batch: tuple[int, int] | None = None
    error: bytes | None = None
    told: str = ""


class Collector:
    """Keeps results until they are taken, one for each batch.

    Args:
        limit: how many it keeps; then workers wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ready: deque[Result] = deque()
        # A byte for each step of an epoch: results are those of batches that weren't there before.
        self._seen: dict[int, bytearray] = {}
        self._changed = asyncio.Condition()

    async def add(self, result: Result) -> None:
        """Takes a result; returns when there was room for it."""
        seen = self._seen.setdefault(result.epoch, bytearray())
        if result.step >= len(seen):
            seen.extend(bytes(max(1024, result.step + 1 - len(seen), len(seen))))
        if seen[result.step]:
            return
        seen[result.step] = 1
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready) < self._limit)
            self._ready.append(result)
            self._changed.notify_all()

    async def take(self, seconds: float) -> list[Result]:
        """All results that are there; waits for the first one for so long."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._ready), seconds)
            taken = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        return taken


class Worker:
    """A worker on leases, in a process of Ray's. `run` and `stop` are called from different threads."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._refused = 0
        self._batch: tuple[int, int] | None = None

    def ready(self) -> None:
        """Answers when the process is there."""

    def stop(self) -> None:
        """Lets `run` end behind the batch that is being used."""
        self._stopped.set()

    def run(
        self, reader: Reader, url: str, name: str, consume: Callable[[Any], Any], collector: Any, lease: dict[str, Any]
    ) -> Outcome:
        """Uses batches until the job is done. Errors are returned, so that they reach the driver whatever they are."""
        try:
            finished = self._run(reader, url, name, consume, collector, lease)
            return Outcome("finished" if finished else "stopped", self._refused)
        except Exception as error:
            try:
                pickled = ray.cloudpickle.dumps(error)
                ray.cloudpickle.loads(pickled)
            except Exception:
                # It has a lock in it, or can't be built from its arguments: its text has to do.
                pickled = None
            return Outcome("failed", self._refused, self._batch, pickled, traceback.format_exc())

    def _run(
        self, reader: Reader, url: str, name: str, consume: Callable[[Any], Any], collector: Any, lease: dict[str, Any]
    ) -> bool:
        """Returns whether the job is done."""
        # As in Ray Data, a class is built once for each worker: a model is loaded once.
        use = consume() if isinstance(consume, type) else consume
        worker = reader.lease(url, worker=name, **lease)
        try:
            for batch in worker:
                assert worker.position is not None
                epoch, step = self._batch = worker.position
                value = use(batch)
                self._batch = None
                if value is not None:
                    ray.get(collector.add.remote(Result(epoch, step, name, value)))
                self._try(worker.commit)
                if self._stopped.is_set():
                    return False
            return True
        finally:
            self._try(worker.close)

    def _try(self, act: Callable[[], None]) -> None:
        """Commits; that another worker was quicker is no fault."""
        try:
            act()
        except StaleLeaseError:
            self._refused += 1
