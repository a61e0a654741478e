"""A thread that copies batches to page-locked memory ahead of the consumer, as torch's loader has it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import _utils

from fastpipe._fastpipe import ItemConsumer

# Seconds between checks whether the thread must end.
_LOOK = 0.05


def pinned(data: Any, device: str | None) -> Any:
    """Returns a batch in page-locked memory. Tensors that are page-locked already aren't copied."""
    try:
        return _utils.pin_memory.pin_memory(data, device)  # type: ignore[no-untyped-call]
    except TypeError:
        return _utils.pin_memory.pin_memory(data)  # type: ignore[no-untyped-call]


def first_ready(batches: list[int], consumer: ItemConsumer) -> int | None:
    """Returns the position of the first batch that can be taken, or None.

    The last batch is checked first. A worker makes its batches of a stream in order, so when a batch was ready, the
    same worker's earlier batches are, too.
    """
    found = None
    for place in reversed(range(len(batches))):
        if consumer.ready(batches[place]):
            found = place
    return found


class PinThread:
    """A thread that takes batches from the consumer of the workers' results, and copies them to page-locked memory.

    Args:
        consumer: Consumer of the workers' results.
        read: Function that builds a batch from a list with the result of `ItemConsumer.take`, the index of the batch,
            and the seed of its pass.
        device: Device for which batches are page-locked, as in torch.
        in_order: Whether batches are taken in the order in which they are added.
        most: Maximum number of copied batches that wait for the consumer.
    """

    def __init__(
        self,
        consumer: ItemConsumer,
        read: Callable[[list[Any], int, int], Any],
        device: str | None,
        in_order: bool,
        most: int,
    ) -> None:
        self._consumer = consumer
        self._read = read
        self._device = device
        self._in_order = in_order
        self._most = most
        self._process = os.getpid()
        # `with` uses the lock, not the condition: Ctrl-C in `Condition.__enter__` could leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ended = False
        # Batches that weren't taken yet: the id of the batch, its index, and the seed of its pass.
        self._jobs: list[tuple[int, int, int]] = []
        # Batches that were taken: the id of the batch, and a list with the batch or with None and the error.
        self._results: deque[tuple[int, list[Any]]] = deque()
        self._thread = threading.Thread(
            target=self._run, args=(_accelerator(),), name="fastpipe-pin-memory", daemon=True
        )
        self._thread.start()

    # Called by the consumer's thread.

    def add(self, batch: int, number: int, seed: int) -> None:
        """Adds a batch that was started."""
        with self._lock:
            self._jobs.append((batch, number, seed))
            self._changed.notify_all()

    def first(self) -> int | None:
        """Returns the first batch that is ready, or None."""
        with self._lock:
            return self._results[0][0] if self._results else None

    def wait(self, seconds: float) -> None:
        """Waits until a batch is ready, but no longer than `seconds`.

        Raises:
            RuntimeError: If the thread has ended.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._results, seconds)
            if not self._results and not self._thread.is_alive():
                raise RuntimeError("internal error: the thread that copies batches to page-locked memory has ended")

    def take(self) -> Any:
        """Returns the first batch that is ready, or raises its error."""
        with self._lock:
            _, outcome = self._results.popleft()
            self._changed.notify_all()
        if len(outcome) == 1:
            return outcome.pop()
        try:
            raise outcome[1]
        finally:
            # The error's traceback contains this frame.
            del outcome

    def end(self) -> set[int]:
        """Ends the thread and returns the batches that it took and the consumer didn't."""
        # A forked process has no such thread, and the lock may be held.
        if self._process != os.getpid():
            return set()
        with self._lock:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        taken = {batch for batch, _ in self._results}
        self._results.clear()
        return taken

    # Called by the thread.

    def _run(self, device: int | None) -> None:
        # torch would copy with all of its threads, which spin on the cores that workers need. This is set per thread.
        torch.set_num_threads(1)
        if device is not None:
            _set_accelerator(device)
        while (job := self._job()) is not None:
            if self._is_ready(job[0]):
                self._pin(*job)

    def _job(self) -> tuple[int, int, int] | None:
        """Returns the next batch to wait for, or None if the thread must end."""
        with self._lock:
            self._changed.wait_for(lambda: self._ended or (self._jobs and len(self._results) < self._most))
            if self._ended:
                return None
            if self._in_order:
                return self._jobs[0]
            place = first_ready([batch for batch, _, _ in self._jobs], self._consumer)
            return self._jobs[place or 0]

    def _is_ready(self, batch: int) -> bool:
        if self._in_order:
            return self._consumer.wait(batch, _LOOK)
        if not self._consumer.ready(batch):
            # The earliest batch must get its memory, no matter how much the consumer holds.
            self._consumer.need(batch)
            self._consumer.wait(None, _LOOK)
        return self._consumer.ready(batch)

    def _pin(self, batch: int, number: int, seed: int) -> None:
        outcome = self._outcome([self._consumer.take(batch)], number, seed)
        with self._lock:
            self._jobs.remove((batch, number, seed))
            self._results.append((batch, outcome))
            self._changed.notify_all()

    def _outcome(self, taken: list[Any], number: int, seed: int) -> list[Any]:
        """Returns a list with the copied batch, or with None and the error."""
        try:
            return [pinned(self._read(taken, number, seed), self._device)]
        except StopIteration as error:
            # StopIteration would silently end the consumer's loop over the loader.
            return [None, RuntimeError(f"a batch raised StopIteration while it was copied: {error}")]
        except BaseException as error:
            return [None, error]


def _accelerator() -> int | None:
    """Returns the index of the accelerator that this thread uses."""
    with suppress(Exception):
        if hasattr(torch, "accelerator"):
            return int(torch.accelerator.current_device_index())
        return torch.cuda.current_device()
    return None


def _set_accelerator(device: int) -> None:
    with suppress(Exception):
        if hasattr(torch, "accelerator"):
            torch.accelerator.set_device_index(device)
        else:
            torch.cuda.set_device(device)
