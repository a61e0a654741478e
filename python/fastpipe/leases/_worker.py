"""A worker: batches of leased stretches, and commits of those that were used."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from fastpipe._passes import Passes, Started
from fastpipe.errors import PassClosedError
from fastpipe.leases._agent import Agent, Lease
from fastpipe.leases._checkpoints import checkpoint_of
from fastpipe.leases._database import Database

__all__ = ["LeaseWorker", "StepOfEpoch"]

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
        self._drawing = threading.Lock()
        self._current: Lease | None = None
        self._started: Started | None = None
        self._upcoming: tuple[Lease, Started] | None = None
        self._delivered: deque[_Delivered] = deque()
        self._position: StepOfEpoch | None = None
        self._yielded = 0.0
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
        if not self._drawing.acquire(blocking=False):
            raise RuntimeError("one thread at a time draws from a worker: give each thread a worker of its own")
        try:
            self._pace()
            return self._draw()
        finally:
            self._yielded = time.monotonic()
            self._drawing.release()

    def commit(self, *, wait: bool = False) -> None:
        """Says that all batches that were yielded were used.

        They are committed in the background, some milliseconds later, together with what is used until then.

        Args:
            wait: whether to return when the ledger has them.

        Raises:
            StaleLeaseError: if a commit was refused, this one or an earlier one: another worker holds the lease, and
                the batches count for that one. A refusal that isn't known yet is raised by a later call.
            LedgerError: if the database was away for longer than `patience`.
            PassClosedError: if the worker was closed, or is another process's.
        """
        self._check()
        agent = self._agent
        with agent.changed:
            self._use()
            if wait:
                agent.flush()
            if agent.refused:
                raise agent.refused.popleft()
            self._raise()

    def checkpoint(self) -> dict[str, Any]:
        """Commits what was yielded, and returns what `Ledger.checkpoint` does, to be kept with the model's weights.

        Raises:
            StaleLeaseError: as `commit`.
            LedgerError: as `commit`.
        """
        self.commit(wait=True)
        with self._database.connected() as connection, connection.transaction():
            return checkpoint_of(connection, self.job)

    def close(self) -> None:
        """Commits what `commit` was called for, gives all leases up, and leaves the job. Twice does no harm.

        Batches that were yielded and not committed are other workers' at once.
        """
        if self._process != os.getpid():
            return
        self._stop_reading()
        if self._ended.detach() is not None:
            self._agent.close(_CLOSING_SECONDS)
            for error in self._agent.refused:
                _LOG.warning("%s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

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
            raise agent.failed

    def _use(self) -> None:
        while self._delivered:
            self._agent.use(*self._delivered.popleft())

    def _pace(self) -> None:
        """Learns how long the consumer takes for a batch, from the last one until it asks for the next."""
        if self._yielded:
            seconds, agent = time.monotonic() - self._yielded, self._agent
            agent.pace += (seconds - agent.pace) * (_RECENT if agent.pace else 1.0)

    def _draw(self) -> dict[str, Any]:
        while True:
            lease = self._readable()
            if lease is None:
                raise StopIteration
            assert self._started is not None
            batch = next(self._started.batches)
            step, rows = lease.next, _rows_of(batch)
            with self._agent.changed:
                lease.next += 1
                if not lease.held:
                    # It was lost while the batch was read; nobody has seen the batch.
                    self._stop_current()
                    continue
            self._delivered.append(_Delivered(lease, step, rows))
            self._position = StepOfEpoch(lease.token.epoch, step)
            if lease.next == lease.stop:
                self._read_ahead()
            return batch

    def _readable(self) -> Lease | None:
        """The lease whose next batch is read now; None if the job is done, or waits for what was yielded here."""
        agent = self._agent
        with agent.changed:
            self._raise()
            lease = self._current
            if lease is not None and lease.held and lease.next < lease.stop and lease.committed <= lease.next:
                return lease
            self._stop_current()
            while True:
                self._raise()
                found, started = self._upcoming or (agent.waiting.popleft() if agent.waiting else None, None)
                self._upcoming = None
                if found is not None and found.held and found.committed < found.stop:
                    break
                if started is not None:
                    started.close()
                if found is not None:
                    continue
                if agent.finished:
                    agent.flush()
                    return None
                if self._delivered and agent.idle:
                    return None
                agent.hungry = True
                agent.changed.notify_all()
                agent.changed.wait(_WAKE_SECONDS)
                agent.hungry = False
            if found.committed > found.next:
                # A copy's other holder has come further.
                found.next = found.used = found.committed
                if started is not None:
                    started.close()
                    started = None
        self._started = started or self._passes.batches(found.token.epoch, found.next, found.stop)
        self._current = found
        return found

    def _read_ahead(self) -> None:
        """Begins to read the next lease, whose first batches are made while the consumer uses the last one of this."""
        agent = self._agent
        with agent.changed:
            found = agent.waiting.popleft() if agent.waiting and self._upcoming is None else None
        if found is not None and found.held and found.committed < found.stop:
            found.next = found.used = max(found.next, found.committed)
            self._upcoming = found, self._passes.batches(found.token.epoch, found.next, found.stop)

    def _stop_current(self) -> None:
        self._current = None
        if self._started is not None:
            self._started.close()
            self._started = None

    def _stop_reading(self) -> None:
        self._stop_current()
        if self._upcoming is not None:
            self._upcoming[1].close()
            self._upcoming = None


def _rows_of(batch: dict[str, Any]) -> int:
    for column in batch.values():
        return len(column)
    return 0
