"""The thread of a worker that talks to the ledger: it leases ahead, renews, commits and reconnects.

The worker's consumer never waits for the database unless there is nothing to lease. What it used is committed by the
next exchange, together with whatever else was used since the last one.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fastpipe._reader.dropped_rows import stacklevel
from fastpipe.errors import LedgerError, StaleLeaseError
from fastpipe.leases._database import Connection, Database
from fastpipe.leases._exchange import Answer, Granted, Member, Request, Token, Used, exchange
from fastpipe.leases._job import Job

# Between exchanges that commit, unless somebody waits: at least, and at most.
_GROUPED_SECONDS = (0.25, 2.0)
# They are a small part of a worker's time, and all workers' exchanges leave the database time for others.
_EXCHANGES_SHARE = 0.05
_SECONDS_A_WORKER = 0.004
# How much the last exchange counts in what one takes.
_RECENT = 0.2
# Work that a worker has leased ahead, if its batches are that fast.
_AHEAD_SECONDS = 0.5
_MOST_AHEAD = 64
# Between questions for work where there was none.
_IDLE_SECONDS = (0.02, 0.5)
# Between attempts to reach a database that is away.
_AWAY_SECONDS = (0.05, 0.5)
_WAKE_SECONDS = 0.5
_NOT_USED = -1


@dataclass
class Lease:
    """A stretch that this worker holds, or has lost.

    Attributes:
        token: of the lease.
        next: the batch that is read next.
        stop: behind its last batch.
        copy: whether it is a second copy of another worker's.
        committed: the first batch that isn't done, as the ledger last said.
        sent: the first batch that no exchange was told of.
        held: False when the ledger has said that it is another's.
        rows: of each batch from `sent` that was used; negative for one that another holder has committed instead.
    """

    token: Token
    next: int
    stop: int
    copy: bool
    committed: int
    sent: int
    held: bool = True
    rows: list[int] = field(default_factory=list)

    @property
    def used(self) -> int:
        """The first batch that the consumer hasn't said it used."""
        return self.sent + len(self.rows)

    @property
    def has_more(self) -> bool:
        """Whether there are batches to read."""
        return self.held and self.next < self.stop and self.committed < self.stop

    def use(self, step: int, rows: int) -> None:
        """Notes that a batch was used. An interrupt finds that done or not done."""
        if step > self.used:
            if step > self.committed:
                raise AssertionError("batches of a stretch are used in their order")
            # The worker passed over what the other holder has committed.
            self.rows.extend([_NOT_USED] * (step - self.used))
        self.rows.append(rows)


@dataclass
class _Wishes:
    """What the consumer's side has for the next exchange."""

    used: dict[Token, Lease] = field(default_factory=dict)
    returned: list[Token] = field(default_factory=list)
    urgent: bool = False
    departing: bool = False


class Agent:
    """The state that a worker's consumer and its thread share.

    Args:
        database: with the ledger.
        job: that is done.
        member: this worker.
        ahead: stretches to lease ahead at least.
        copies: whether to take second copies of others' stretches.
        patience: seconds for which the database may be away.
    """

    def __init__(
        self, database: Database, job: Job, member: Member, *, ahead: int, copies: bool, patience: float
    ) -> None:
        self._database, self.job, self.member = database, job, member
        self._ahead, self._copies, self._patience = ahead, copies, patience
        self.changed = threading.Condition()
        self.leases: dict[Token, Lease] = {}
        self.waiting: deque[Lease] = deque()
        self.refused: deque[StaleLeaseError] = deque()
        self.failed: BaseException | None = None
        self.finished = False
        # Whether the ledger had nothing to lease when it was asked last.
        self.idle = False
        self.pace = 0.0
        # Whether the consumer waits for work, which makes every exchange urgent.
        self.hungry = False
        # Whether nothing that was yielded is uncommitted: as the consumer says, and as the ledger was last told.
        self._settled = self._told_settled = False
        # Batches that were yielded and not committed when iteration ended, if no commit has followed.
        self.left_uncommitted = 0
        self._wishes = _Wishes()
        self._asking: list[Used] = []
        self._sent = 0
        self._answered = 0
        self._numbers = 0
        self._asked = self._renewed = 0.0
        self._took, self._workers = 0.0, 1
        self._idle_seconds = _IDLE_SECONDS[0]
        self._closed = self._forgotten = False
        self._thread = threading.Thread(target=self._run, name="fastpipe-lease", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # The consumer's side: all of it with `changed` held.

    def use(self, lease: Lease, step: int, rows: int) -> None:
        """Notes that a batch was used: it is to be committed. An interrupt finds that done or not done."""
        self._wishes.used[lease.token] = lease
        lease.use(step, rows)
        if lease.used == lease.stop:
            self.changed.notify_all()

    def left_over(self) -> Lease | None:
        """A lease that an interrupt took from the consumer before it began to read it.

        For when nothing waits, and the consumer reads nothing.
        """
        for lease in self.leases.values():
            if lease.has_more:
                return lease
        return None

    def give_back(self, lease: Lease) -> None:
        """Gives a lease up, once what was used of it is committed."""
        if self.leases.pop(lease.token, None) is not None and lease.held and lease.used < lease.stop:
            self._wishes.returned.append(lease.token)

    def flush(self) -> None:
        """Waits until the ledger has answered to all that was used."""
        self._wishes.urgent = True
        self._sent += 1
        mine = self._sent
        self.changed.notify_all()
        while self._answered < mine and self.failed is None and not self._closed:
            self.changed.wait(_WAKE_SECONDS)

    def settle(self) -> None:
        """Waits until the ledger has all that was used, and knows that nothing else was yielded."""
        self._settled = True
        self.flush()

    def unsettle(self) -> None:
        """Waits until the ledger knows that more batches are to be yielded, if it was told otherwise."""
        if self._settled or self._told_settled:
            self._settled = False
            self.flush()

    def close(self, seconds: float) -> int:
        """Gives all leases up and ends the thread; doesn't wait longer than that for the database.

        Returns:
            Batches that were used, and to whose commit the ledger hasn't answered.
        """
        with self.changed:
            if self._closed:
                return self._unanswered()
            self._depart()
            self.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        with self.changed:
            self._closed = True
            self.changed.notify_all()
            return self._unanswered()

    def _unanswered(self) -> int:
        used = [used.rows for used in self._asking] + [lease.rows for lease in self._wishes.used.values()]
        return sum(1 for rows in used for row_count in rows if row_count != _NOT_USED)

    def _depart(self) -> None:
        for lease in list(self.leases.values()):
            self.give_back(lease)
        self.waiting.clear()
        self._wishes.departing = self._wishes.urgent = True

    def abandon(self) -> None:
        """Ends the thread soon, without waiting: the worker was forgotten.

        Garbage collection calls it, in any thread at any moment: so it takes no lock.
        """
        self._forgotten = True
        self.warn()

    def warn(self) -> None:
        """Warns of batches that were left uncommitted when iteration ended."""
        left, self.left_uncommitted = self.left_uncommitted, 0
        if left:
            warnings.warn(
                f"the worker {self.member.worker!r} has used all its leases, and {left} batches that it yielded were"
                " never committed: they don't count as done, and are yielded again. Call worker.commit() after each"
                " batch",
                stacklevel=stacklevel(),
            )

    # The thread's side.

    def _run(self) -> None:
        connection: Connection | None = None
        try:
            while not self._closed:
                with self.changed:
                    request, sent = self._next_request()
                if request is None:
                    continue
                connection, answer = self._exchanged(connection, request)
                if answer is None:
                    return
                with self.changed:
                    self._apply(request, answer)
                    self._asking = []
                    self._answered = sent
                    self.changed.notify_all()
                if request.departed:
                    return
        except BaseException as error:
            with self.changed:
                self.failed = self._database.fault(error)
                self.changed.notify_all()
        finally:
            with self.changed:
                self._closed = True
                self.changed.notify_all()
            if connection is not None:
                with contextlib.suppress(Exception):
                    connection.close()

    def _next_request(self) -> tuple[Request | None, int]:
        """Waits until there is something to ask, and takes it. None to look again."""
        if self._forgotten:
            self._depart()
        now = time.monotonic()
        wishes, ttl = self._wishes, self.member.ttl
        renewing = now - self._renewed >= ttl / 3
        wanted = self._wanted() if not (self.finished or wishes.departing) else 0
        asking = wanted > 0 and now - self._asked >= self._idle_seconds
        committing = bool(wishes.used) and (self.hungry or now - self._asked >= self._group_seconds)
        if not (renewing or asking or committing or wishes.urgent or wishes.departing):
            due = [self._renewed + ttl / 3 - now, _WAKE_SECONDS]
            if wanted > 0:
                due.append(self._asked + self._idle_seconds - now)
            if wishes.used:
                due.append(self._asked + self._group_seconds - now)
            self.changed.wait(max(min(due), 0.001))
            return None, 0
        self._wishes = _Wishes()
        self._numbers += 1
        self._asked = now
        if renewing:
            self._renewed = now
        renewed = [lease.token for lease in self.leases.values() if lease.held] if renewing else []
        request = Request(
            self._numbers,
            used=[_taken(lease) for lease in wishes.used.values() if lease.rows],
            renewed=renewed,
            returned=wishes.returned,
            wanted=wanted,
            copies=self._copies,
            pace=self.pace,
            group=self._group_seconds,
            alive=renewing,
            departed=wishes.departing,
            settled=self._settled if self._settled != self._told_settled else None,
        )
        self._asking = request.used
        return request, self._sent

    @property
    def _group_seconds(self) -> float:
        least = max(_GROUPED_SECONDS[0], self._took / _EXCHANGES_SHARE, self._workers * _SECONDS_A_WORKER)
        return min(least, _GROUPED_SECONDS[1], self.member.ttl / 4)

    def _wanted(self) -> int:
        """How many stretches to lease now."""
        ahead = max(_AHEAD_SECONDS, 2 * self._group_seconds)
        left = sum(lease.stop - lease.next for lease in self.leases.values() if lease.held)
        seconds = left * self.pace
        if not self.waiting and (left <= 1 or seconds < ahead):
            a_stretch = max(self.job.stretch * self.pace, 1e-6)
            return max(1, min(int((2 * ahead - seconds) / a_stretch), _MOST_AHEAD) if self.pace else 1)
        return max(0, self._ahead - len(self.waiting)) if seconds < 2 * ahead else 0

    def _exchanged(self, connection: Connection | None, request: Request) -> tuple[Connection | None, Answer | None]:
        """Does an exchange, on a new connection if one was lost. The answer is None if the worker is closed."""
        deadline, pause = time.monotonic() + self._patience, _AWAY_SECONDS[0]
        while True:
            try:
                if connection is None:
                    connection = self._database.connect(create=False)
                begun = time.monotonic()
                with connection.transaction():
                    answer = exchange(connection, self.job, self.member, request)
                self._took += (time.monotonic() - begun - self._took) * _RECENT
                return connection, answer
            except Exception as error:
                if connection is not None:
                    with contextlib.suppress(Exception):
                        connection.close()
                    connection = None
                if not self._database.passes(error):
                    raise
                if time.monotonic() > deadline:
                    told = self._database.fault(error)
                    raise LedgerError(
                        f"{told} (for {self._patience:.0f} seconds, which is this worker's patience)"
                    ) from None
            if self._closed:
                return None, None
            time.sleep(pause)
            pause = min(2 * pause, _AWAY_SECONDS[1])

    def _apply(self, request: Request, answer: Answer) -> None:
        if request.settled is not None:
            self._told_settled = request.settled
        for used, done in zip(request.used, sorted_as(request.used, answer.committed), strict=True):
            lease = self.leases.get(used.lease)
            if done.refused > used.start:
                self._refuse(used, min(done.refused, used.stop))
            if lease is not None:
                lease.committed = max(lease.committed, done.committed)
                self._note(lease, held=done.held)
        for renewed in answer.renewed:
            if (lease := self.leases.get(renewed.lease)) is not None:
                lease.committed = max(lease.committed, renewed.committed)
                self._note(lease, held=renewed.held)
        for granted in answer.granted:
            self._take(granted)
        if request.wanted:
            self.idle = answer.idle
            self._idle_seconds = min(2 * self._idle_seconds, _IDLE_SECONDS[1]) if answer.idle else _IDLE_SECONDS[0]
        self._workers = answer.workers or self._workers
        self.finished = self.finished or answer.finished

    def _take(self, granted: Granted) -> None:
        lease = Lease(granted.lease, granted.start, granted.stop, granted.copy, granted.start, granted.start)
        self.leases[lease.token] = lease
        self.waiting.append(lease)

    def _note(self, lease: Lease, *, held: bool) -> None:
        """Notes what the ledger says of a lease; one that is done or lost is held no longer."""
        lease.held = lease.held and held
        if not lease.held or lease.committed >= lease.stop:
            self.leases.pop(lease.token, None)

    def _refuse(self, used: Used, stop: int) -> None:
        epoch = used.lease.epoch
        while used.rows[stop - 1 - used.start] == _NOT_USED:
            stop -= 1
        batches = f"batch {used.start}" if stop == used.start + 1 else f"batches {used.start} to {stop - 1}"
        self.refused.append(
            StaleLeaseError(
                f"the commit of {batches} of epoch {epoch} was refused: the lease of {self.member.worker!r} has passed "
                "to another worker, for which they count. The next batch is of another lease",
                worker=self.member.worker,
                epoch=epoch,
                start=used.start,
                stop=stop,
            )
        )


def _taken(lease: Lease) -> Used:
    """What was used of a lease and no exchange was told of; one is, now."""
    used = Used(lease.token, lease.sent, lease.used, lease.rows)
    lease.sent, lease.rows = lease.used, []
    return used


def sorted_as(used: list[Used], committed: list[Any]) -> list[Any]:
    """What became of what was used, in the order of what was used: answers come in the order of stretches."""
    by_lease = {done.lease: done for done in committed}
    return [by_lease[each.lease] for each in used]
