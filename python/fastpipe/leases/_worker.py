"""A worker: batches of leased stretches, and commits of those that were used."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from fastpipe._reader.passes import Passes, Started
from fastpipe.errors import LedgerError, PassClosedError
from fastpipe.leases._agent import Agent, Lease
from fastpipe.leases._checkpoints import checkpoint_of
from fastpipe.leases._database import Database

_LOG = logging.getLogger("fastpipe")

# For which `close` waits until the ledger has its leases back.
_CLOSING_SECONDS = 10.0
_WAKE_SECONDS = 0.2
# How much the last batch counts in the pace.
_RECENT = 0.2


class StepOfEpoch(NamedTuple):
    """Which batch of the order it is.

    Attributes:
        epoch: from 0.
        step: of the epoch, from 0, as `Reader.batch_at` counts.
    """

    epoch: int
    step: int


class _Reading(NamedTuple):
    """A pass of adjacent stretches of an epoch, from batch `begun` to `stop`."""

    epoch: int
    begun: int
    stop: int
    started: Started

    @property
    def next(self) -> int:
        """The batch that it yields next."""
        return self.begun + self.started.position.delivered

    def continues(self, lease: Lease) -> bool:
        """Whether it yields a lease's next batch next."""
        return self.epoch == lease.token.epoch and self.next == lease.next < self.stop


class _Delivered(NamedTuple):
    lease: Lease
    step: int
    rows: int


class LeaseWorker:
    """Yields batches of stretches that it has leased; `Reader.lease` makes one.

    Iterating over it yields batches until all epochs of the job are done, by whomever. `commit()` says that all batches
    that it has yielded were used. Each batch is committed once an epoch, whichever workers come, go, hang or are
    killed: `commit()` of a worker that has lost a lease raises a `StaleLeaseError`, and it goes on with its next one.

    Iteration also ends where there is nothing to lease and batches that were yielded aren't committed: who commits
    every tenth batch calls `commit()` behind the loop, and iterates again until `finished`.

    One thread at a time draws from it. Leaving a `with` block, or `close()`, gives its leases up at once.
    """

    def __init__(self, passes: Passes, database: Database, agent: Agent) -> None:
        self._passes, self._database, self._agent = passes, database, agent
        self._process = os.getpid()
        # Who draws: one token. No lock, which an interrupt could leave taken.
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
    def worker(self) -> str:
        """Its name."""
        return self._agent.member.worker

    @property
    def job(self) -> str:
        """The job's name."""
        return self._agent.job.name

    @property
    def finished(self) -> bool:
        """Whether all epochs of the job are done."""
        return self._agent.finished

    @property
    def position(self) -> StepOfEpoch | None:
        """Epoch and step of the last batch; None before the first."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, or with which the job began."""
        return self._agent.job.first_epoch if self._position is None else self._position.epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch.

        Raises:
            LedgerError: if the database was away for longer than `patience`.
            PassClosedError: if the worker was closed, or is another process's.

            And whatever reading a batch raises.
        """
        self._check()
        token, lease = object(), None
        try:
            try:
                self._drawing.append(token)
                if self._drawing[0] is not token:
                    raise RuntimeError("one thread at a time draws from a worker: give each thread a worker of its own")
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
        # From here on the batch is the consumer's: no interrupt comes before it has it, since nothing is called.
        return batch

    def commit(self, *, wait: bool = False) -> None:
        """Says that all batches that were yielded were used.

        They are committed in the background, a quarter of a second later, together with what is used until then; less
        often where an exchange with the ledger takes long, or has hundreds of workers.

        Args:
            wait: whether to return when the ledger has them.

        Raises:
            StaleLeaseError: if a commit was refused, this one or an earlier one: another worker holds the lease, and
                the batches count for that one. A refusal that isn't known yet is raised by a later call.
            LedgerError: if the database was away for longer than `patience`.
            PassClosedError: if the worker was closed, or is another process's.
        """
        self._commit(self._agent.flush if wait else None)

    def flush(self) -> None:
        """Commits as `commit(wait=True)` does, and lets a checkpoint be made until the next batch is drawn.

        A checkpoint of the ledger needs this of each worker: what they commit otherwise may come after it. Drawing the
        next batch tells the ledger first, which takes as long as a commit.

        Raises:
            StaleLeaseError: as `commit`.
            LedgerError: as `commit`.
            PassClosedError: as `commit`.
        """
        self._commit(self._agent.settle)

    def _commit(self, wait: Callable[[], None] | None) -> None:
        self._check()
        agent = self._agent
        with agent.changed:
            self._use()
            self._committed = True
            agent.left_uncommitted = 0
            if wait is not None:
                wait()
            if agent.refused:
                raise agent.refused.popleft()
            self._raise()

    def checkpoint(self) -> dict[str, Any]:
        """Flushes this worker, and returns what `Ledger.checkpoint` does, to be kept with the model's weights.

        Where there are several workers, flush each of them before.

        Raises:
            StateError: if other workers may have used batches that they haven't committed; it names them.
            StaleLeaseError: as `commit`.
            LedgerError: as `commit`.
        """
        self.flush()
        with self._database.connected() as connection, connection.transaction():
            return checkpoint_of(connection, self.job)

    def close(self) -> None:
        """Commits what `commit` was called for, gives all leases up, and leaves the job. Twice does no harm.

        Batches that were yielded and not committed are other workers' at once.

        Raises:
            LedgerError: if the ledger can't be reached within ten seconds, and there is something to commit. The leases
                expire, and other workers do these batches.
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
                f"{lost} batches that {self.worker!r} has used weren't committed to {self._database.shown}{told}"
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
        return f"<LeaseWorker {self.worker!r} of the job {self.job!r} in {self._database.shown}>"

    def _check(self) -> None:
        if self._process != os.getpid():
            reason = "this worker is another process's: lease with a reader of this process"
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
            # What an interrupt kept from the consumer doesn't count; it is read again.
            if lease.used <= step < lease.next:
                self._agent.use(lease, step, rows)
            self._delivered.popleft()

    def _pace(self) -> None:
        """Learns how long a batch takes, from yield to yield, without waiting for leases."""
        now, agent = time.monotonic(), self._agent
        if self._yielded:
            seconds = max(now - self._yielded - self._waited, 1e-9)
            agent.pace += (seconds - agent.pace) * (_RECENT if agent.pace else 1.0)
        self._yielded = now

    def _draw(self) -> tuple[Lease, dict[str, Any]]:
        """A batch, which counts as delivered once its lease's `next` is behind it."""
        with self._agent.changed:
            self._agent.unsettle()
        while True:
            lease = self._readable()
            if lease is None:
                raise StopIteration
            batch = self._read(lease)
            step = lease.next
            if step + 1 == lease.stop:
                self._read_ahead()
            # Else it was lost while the batch was read; nobody has seen the batch.
            if lease.held:
                self._delivered.append(_Delivered(lease, step, _rows_of(batch)))
                self._position = StepOfEpoch(lease.token.epoch, step)
                return lease, batch

    def _readable(self) -> Lease | None:
        """The lease whose next batch is read now; None if the job is done, or waits for what was yielded here."""
        agent = self._agent
        with agent.changed:
            self._raise()
            lease = self._current
            if lease is None or not lease.has_more:
                self._current = None
                lease = self._current = self._next_lease()
            if lease is not None:
                # The other holder of a stretch of which there is a copy may have come further.
                lease.next = max(lease.next, lease.committed)
            return lease

    def _next_lease(self) -> Lease | None:
        """A lease that has batches to read; waits for one. With the agent's `changed` held."""
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
                    # Others did all of it again.
                    agent.left_uncommitted = len(self._delivered)
                return None
            elif self._delivered and agent.idle:
                self._close_pass()
                # It ended so before, and no commit followed.
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
        """Reads the next batch of a lease, by a new pass where the last one is elsewhere."""
        if self._reading is None or not self._reading.continues(lease):
            # Another holder was quicker, or an interrupt came between a batch and its count.
            self._close_pass()
            self._reading = self._begin(lease)
        try:
            return next(self._reading.started.batches)
        except StopIteration:
            raise RuntimeError(f"{self._passes!r} has no batch {lease.next} of epoch {lease.token.epoch}") from None

    def _begin(self, lease: Lease) -> _Reading:
        """Begins to read a lease, and those that wait to be read behind it where they are adjacent."""
        epoch, stop = lease.token.epoch, lease.stop
        with self._agent.changed:
            for waiting in self._agent.waiting:
                if waiting.token.epoch != epoch or waiting.next != stop or not waiting.held:
                    break
                stop = waiting.stop
        return _Reading(epoch, lease.next, stop, self._passes.batches(epoch, lease.next, stop))

    def _read_ahead(self) -> None:
        """Begins to read the next lease, whose first batches are made while the consumer uses the last one of this.

        What fails here fails again, and is raised, when the batches are needed.
        """
        agent = self._agent
        reading = self._reading
        if self._upcoming is not None or (reading is not None and reading.next < reading.stop):
            return
        with agent.changed:
            lease = agent.waiting.popleft() if agent.waiting else None
        if lease is None or not lease.has_more:
            return
        lease.next = max(lease.next, lease.committed)
        try:
            self._upcoming = lease, self._begin(lease)
        except BaseException as error:
            with agent.changed:
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


def _rows_of(batch: dict[str, Any]) -> int:
    for column in batch.values():
        return len(column)
    return 0
