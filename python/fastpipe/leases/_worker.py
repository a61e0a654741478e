"""A worker: yields the batches of leased ranges and commits the batches that were used."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from fastpipe._private_constructor import private_constructor
from fastpipe._reader.passes import Passes, Started
from fastpipe.errors import LedgerError, PassClosedError
from fastpipe.leases._agent import Agent, Lease
from fastpipe.leases._checkpoints import checkpoint_of
from fastpipe.leases._database import Database

_LOG = logging.getLogger("fastpipe")

# Seconds that `close` waits until the ledger has released the worker's leases.
_CLOSING_SECONDS = 10.0
_WAKE_SECONDS = 0.2
# Weight of the latest batch in the moving average of the pace.
_RECENT = 0.2


class StepOfEpoch(NamedTuple):
    """The position of a batch in the order.

    Attributes:
        epoch: Index of the epoch, from 0.
        step: Index of the batch in its epoch, from 0.
    """

    epoch: int
    step: int


class _Reading(NamedTuple):
    """A pass over adjacent lease ranges of an epoch, from batch `begun` to `stop` (exclusive)."""

    epoch: int
    begun: int
    stop: int
    started: Started

    @property
    def next(self) -> int:
        """Step of the batch that the pass yields next."""
        return self.begun + self.started.position.delivered

    def continues(self, lease: Lease) -> bool:
        """Returns whether the next batch of the pass is the next batch of the lease."""
        return self.epoch == lease.token.epoch and self.next == lease.next < self.stop


class _Delivered(NamedTuple):
    lease: Lease
    step: int
    rows: int


class LeaseWorker:
    """Yields the batches of lease ranges. `Reader.lease` creates it.

    Iteration yields batches until all epochs of the job are done, by this worker or others. `commit()` reports that all
    batches yielded so far were used. Each batch is committed once per epoch, even if workers come, go, hang or are
    killed. If the worker has lost a lease, `commit()` raises `StaleLeaseError`, and the worker continues with its next
    lease.

    Iteration also ends when the only batches left are ones that the worker has yielded but not committed. If you commit
    every tenth batch, call `commit()` after the loop and iterate again until `finished` is true.

    Only one thread at a time may draw batches from a worker. Leaving a `with` block, or calling `close()`, releases its
    leases at once.
    """

    @private_constructor("reader.lease(url)")
    def _of(self, passes: Passes, database: Database, agent: Agent) -> None:
        self._passes, self._database, self._agent = passes, database, agent
        self._process = os.getpid()
        # Holds a token of the thread that draws. A lock could stay locked after an interrupt.
        self._drawing: list[object] = []
        self._current: Lease | None = None
        self._reading: _Reading | None = None
        self._upcoming: tuple[Lease, _Reading] | None = None
        self._delivered: deque[_Delivered] = deque()
        self._position: StepOfEpoch | None = None
        self._told = self._committed = False
        self._yielded = self._waited = 0.0
        self._ended = weakref.finalize(self, Agent.abandon, agent)
        agent.start()

    @property
    def worker_name(self) -> str:
        """Name of the worker."""
        return self._agent.member.worker

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._agent.job.name

    @property
    def finished(self) -> bool:
        """Whether all epochs of the job are done."""
        return self._agent.finished

    @property
    def position(self) -> StepOfEpoch | None:
        """Epoch and step of the last batch, or None before the first batch."""
        return self._position

    @property
    def epoch(self) -> int:
        """Epoch of the last batch, or the first epoch of the job before any batch."""
        return self._agent.job.first_epoch if self._position is None else self._position.epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Returns the next batch. Any error of reading the batch is raised unchanged.

        Raises:
            LedgerError: If the database was unavailable for longer than `patience`.
            PassClosedError: If the worker was closed or belongs to another process.
        """
        self._check()
        token, lease = object(), None
        try:
            try:
                self._drawing.append(token)
                if self._drawing[0] is not token:
                    raise RuntimeError(
                        "only one thread at a time may draw batches from a worker: create a worker for each thread"
                    )
                self._waited = 0.0
                drawn, batch = self._draw()
                self._pace()
                drawn.next += 1
                lease = drawn
            finally:
                if token in self._drawing:
                    self._drawing.remove(token)
        except BaseException:
            if lease is not None:
                lease.next -= 1
            raise
        # Nothing is called between here and the return, so no interrupt can keep the batch from the consumer.
        return batch

    def commit(self, *, wait: bool = False) -> None:
        """Marks all batches that were yielded so far as used.

        A background thread commits them about a quarter of a second later, together with batches that are used until
        then. The interval is longer if exchanges with the ledger are slow or the job has hundreds of workers.

        Args:
            wait: Whether to wait until the ledger has committed them. Defaults to False.

        Raises:
            StaleLeaseError: If this commit or an earlier one was refused because another worker holds the lease. The
                batches count for that worker. A refusal that isn't known yet is raised by a later call.
            LedgerError: If the database was unavailable for longer than `patience`.
            PassClosedError: If the worker was closed or belongs to another process.
        """
        self._commit(self._agent.flush if wait else None)

    def flush(self) -> None:
        """Commits like `commit(wait=True)`, and permits checkpoints until the next batch is drawn.

        A checkpoint requires a flush of every worker. Without it, a worker could commit batches after the checkpoint
        that were used before it. Drawing the next batch first informs the ledger, which takes as long as a commit.

        Raises:
            StaleLeaseError: If this commit or an earlier one was refused because another worker holds the lease.
            LedgerError: If the database was unavailable for longer than `patience`.
            PassClosedError: If the worker was closed or belongs to another process.
        """
        self._commit(self._agent.settle)

    def _commit(self, wait: Callable[[], None] | None) -> None:
        self._check()
        agent = self._agent
        with agent.lock:
            self._use()
            self._committed = True
            agent.left_uncommitted = 0
            if wait is not None:
                wait()
            if agent.refused:
                raise agent.refused.popleft()
            self._raise()

    def checkpoint(self) -> dict[str, Any]:
        """Flushes this worker and returns a checkpoint of the job, as `Ledger.checkpoint` does.

        Save the checkpoint with the model's weights. If there are other workers, flush each of them first.

        Raises:
            StateError: If other workers may have used batches that they haven't committed. The message lists these
                workers.
            StaleLeaseError: If this commit or an earlier one was refused because another worker holds the lease.
            LedgerError: If the database was unavailable for longer than `patience`.
        """
        self.flush()
        with self._database.connected() as connection, connection.transaction():
            return checkpoint_of(connection, self.job)

    def close(self) -> None:
        """Commits the used batches, releases all leases and leaves the job. Calling it twice has no effect.

        Used batches are the ones for which `commit` was called.

        Batches that were yielded but not committed are available to other workers at once.

        Raises:
            LedgerError: If there are batches to commit and the ledger can't be reached within ten seconds. Other
                workers will read these batches after the leases expire.
        """
        if self._process != os.getpid() or not self._ended.alive:
            return
        self._stop_reading()
        self._ended.detach()
        lost = self._agent.close(_CLOSING_SECONDS)
        self._agent.warn()
        for error in self._agent.refused:
            _LOG.warning("%s", error)
        if lost and not self._told:
            told = "" if self._agent.failed is None else f": {self._agent.failed}"
            raise LedgerError(
                f"{lost} batches that {self.worker_name!r} has used weren't committed to {self._database.shown}{told}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except LedgerError as failed:
            if error is None:
                raise
            _LOG.warning("%s", failed)

    def __repr__(self) -> str:
        return f"<LeaseWorker {self.worker_name!r} of the job {self.job!r} in {self._database.shown}>"

    def _check(self) -> None:
        if self._process != os.getpid():
            reason = "this worker belongs to another process: call reader.lease(...) in this process"
            raise PassClosedError(reason, reason=reason)
        if not self._ended.alive:
            raise PassClosedError("the worker was closed", reason="the worker was closed")

    def _raise(self) -> None:
        agent = self._agent
        if agent.failed is not None:
            self._told = True
            raise agent.failed

    def _use(self) -> None:
        while self._delivered:
            lease, step, rows = self._delivered[0]
            # A batch that an interrupt kept from the consumer doesn't count. It is read again.
            if lease.used <= step < lease.next:
                self._agent.use(lease, step, rows)
            self._delivered.popleft()

    def _pace(self) -> None:
        """Updates the average time between two batches, without time spent waiting for leases."""
        now, agent = time.monotonic(), self._agent
        if self._yielded:
            seconds = max(now - self._yielded - self._waited, 1e-9)
            agent.pace += (seconds - agent.pace) * (_RECENT if agent.pace else 1.0)
        self._yielded = now

    def _draw(self) -> tuple[Lease, dict[str, Any]]:
        """Reads the next batch. It counts as delivered once `next` of its lease is past it."""
        with self._agent.lock:
            self._agent.unsettle()
        while True:
            lease = self._readable()
            if lease is None:
                raise StopIteration
            batch = self._read(lease)
            step = lease.next
            if step + 1 == lease.stop:
                self._read_ahead()
            # If the lease was lost while the batch was read, the batch is dropped: the consumer hasn't seen it.
            if lease.held:
                self._delivered.append(_Delivered(lease, step, _rows_of(batch)))
                self._position = StepOfEpoch(lease.token.epoch, step)
                return lease, batch

    def _readable(self) -> Lease | None:
        """Returns the lease to read from, or None if no batches are left except uncommitted ones of this worker."""
        agent = self._agent
        with agent.lock:
            self._raise()
            lease = self._current
            if lease is None or not lease.has_more:
                self._current = None
                lease = self._current = self._next_lease()
            if lease is not None:
                # The range may have a second holder that has committed further batches.
                lease.next = max(lease.next, lease.committed)
            return lease

    def _next_lease(self) -> Lease | None:
        """Returns a lease with batches to read, and waits for one. The caller must hold `changed` of the agent."""
        agent = self._agent
        while True:
            self._raise()
            if self._upcoming is not None:
                self._close_pass()
                (lease, self._reading), self._upcoming = self._upcoming, None
                if lease.has_more:
                    return lease
            elif agent.waiting:
                lease = agent.waiting.popleft()
                if lease.has_more:
                    return lease
            elif (left := agent.left_over()) is not None:
                return left
            elif agent.finished:
                self._close_pass()
                agent.flush()
                if not self._committed:
                    # Without any commit, other workers have read all of these batches again.
                    agent.left_uncommitted = len(self._delivered)
                return None
            elif self._delivered and agent.idle:
                self._close_pass()
                # Warn if iteration ended this way before and no commit followed.
                agent.warn()
                agent.left_uncommitted = len(self._delivered)
                return None
            else:
                self._close_pass()
                agent.hungry = True
                agent.changed.notify_all()
                begun = time.monotonic()
                agent.changed.wait(_WAKE_SECONDS)
                self._waited += time.monotonic() - begun
                agent.hungry = False

    def _read(self, lease: Lease) -> dict[str, Any]:
        """Reads the next batch of a lease. Starts a new pass if the current one is at another position."""
        if self._reading is None or not self._reading.continues(lease):
            # Another holder was faster, or an interrupt came after a batch was read and before it was counted.
            self._close_pass()
            self._reading = self._begin(lease)
        try:
            return next(self._reading.started.batches)
        except StopIteration:
            raise RuntimeError(f"{self._passes!r} has no batch {lease.next} of epoch {lease.token.epoch}") from None

    def _begin(self, lease: Lease) -> _Reading:
        """Starts a pass over a lease and the adjacent leases that wait after it."""
        epoch, stop = lease.token.epoch, lease.stop
        with self._agent.lock:
            for waiting in self._agent.waiting:
                if waiting.token.epoch != epoch or waiting.next != stop or not waiting.held:
                    break
                stop = waiting.stop
        return _Reading(epoch, lease.next, stop, self._passes.batches(epoch, lease.next, stop))

    def _read_ahead(self) -> None:
        """Starts to read the next lease, so that its first batches are prepared while the consumer uses the last one.

        An error here is ignored. It recurs, and is raised, when the batches are needed.
        """
        agent = self._agent
        reading = self._reading
        if self._upcoming is not None or (reading is not None and reading.next < reading.stop):
            return
        with agent.lock:
            lease = agent.waiting.popleft() if agent.waiting else None
        if lease is None or not lease.has_more:
            return
        lease.next = max(lease.next, lease.committed)
        try:
            self._upcoming = lease, self._begin(lease)
        except BaseException as error:
            with agent.lock:
                agent.waiting.appendleft(lease)
            if not isinstance(error, Exception):
                raise

    def _close_pass(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.started.close()

    def _stop_reading(self) -> None:
        self._current = None
        self._close_pass()
        if self._upcoming is not None:
            self._upcoming[1].started.close()
            self._upcoming = None


def _rows_of(batch: Any) -> int:
    """Returns the number of rows of a batch, or 0 for the result of a map that isn't a dict."""
    if isinstance(batch, dict):
        for column in batch.values():
            return len(column)
    return 0
