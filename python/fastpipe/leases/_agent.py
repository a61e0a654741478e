"""The background thread of a worker that talks to the ledger: it leases in advance, renews, commits and reconnects.

The consumer waits for the database only when there is nothing to lease. The next exchange commits all batches that the
consumer has used since the previous one.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fastpipe._omissions import stacklevel
from fastpipe.errors import LedgerError, StaleLeaseError
from fastpipe.leases._database import Connection, Database
from fastpipe.leases._exchange import Answer, Granted, Member, Request, Token, Used, exchange
from fastpipe.leases._job import Job

# Minimum and maximum seconds between exchanges that commit, unless the consumer is waiting.
_GROUPED_SECONDS = (0.25, 2.0)
# Exchanges take at most this fraction of a worker's time. The interval also grows with the number of workers, so that
# the database has time for all of them.
_EXCHANGES_SHARE = 0.05
_SECONDS_A_WORKER = 0.004
# Weight of the latest exchange in the moving average of exchange durations.
_RECENT = 0.2
# Seconds of work that a worker leases in advance, if its batches are fast enough.
_AHEAD_SECONDS = 0.5
_MOST_AHEAD = 64
# Minimum and maximum seconds before the worker asks for work again after it found none.
_IDLE_SECONDS = (0.02, 0.5)
# Minimum and maximum seconds between attempts to reach a database that is unavailable.
_AWAY_SECONDS = (0.05, 0.5)
_WAKE_SECONDS = 0.5
_NOT_USED = -1


@dataclass
class Lease:
    """A lease of a range of batches that this worker holds or has lost.

    Attributes:
        token: Token of the lease.
        next: Step of the batch that is read next.
        stop: End of the range (exclusive).
        copy: Whether this is a second copy: an additional lease of a range that a slower worker holds.
        committed: First batch that isn't committed, as last reported by the ledger.
        sent: First batch that hasn't been sent to the ledger in an exchange.
        held: False once the ledger has reported that another worker holds the range.
        rows: Row counts of the used batches from `sent` on. Negative for a batch that another holder has committed.
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
        """Step of the first batch that the consumer hasn't used yet."""
        return self.sent + len(self.rows)

    @property
    def has_more(self) -> bool:
        """Whether there are batches left to read."""
        return self.held and self.next < self.stop and self.committed < self.stop

    def use(self, step: int, rows: int) -> None:
        """Records that a batch was used. If it is interrupted, the record is either complete or absent."""
        if step > self.used:
            if step > self.committed:
                raise AssertionError("internal error: batches of a lease must be used in order; please report it")
            # The worker skipped batches that the other holder has committed.
            self.rows.extend([_NOT_USED] * (step - self.used))
        self.rows.append(rows)


@dataclass
class _Wishes:
    """Work that the consumer has queued for the next exchange."""

    used: dict[Token, Lease] = field(default_factory=dict)
    returned: list[Token] = field(default_factory=list)
    urgent: bool = False
    departing: bool = False


class Agent:
    """The state that the consumer of a worker shares with its background thread.

    Args:
        database: The database of the ledger.
        job: The job that this worker has joined.
        member: The identity of this worker.
        ahead: Minimum number of ranges to lease in advance.
        copies: Whether to take second copies of ranges that other workers hold.
        patience: Seconds to keep retrying while the database is unavailable.
    """

    def __init__(
        self, database: Database, job: Job, member: Member, *, ahead: int, copies: bool, patience: float
    ) -> None:
        self._database, self.job, self.member = database, job, member
        self._ahead, self._copies, self._patience = ahead, copies, patience
        # `with` uses the lock, not the condition: Ctrl-C in `Condition.__enter__` could leave it locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.leases: dict[Token, Lease] = {}
        self.waiting: deque[Lease] = deque()
        self.refused: deque[StaleLeaseError] = deque()
        self.failed: BaseException | None = None
        self.finished = False
        # Whether the ledger had nothing to lease at the last request.
        self.idle = False
        self.pace = 0.0
        # Whether the consumer is waiting for work. If so, every exchange is urgent.
        self.hungry = False
        # Whether all yielded batches are committed: the consumer's view, and the value that was last sent to the
        # ledger.
        self._settled = self._told_settled = False
        # Number of batches that were yielded but not committed when iteration ended. A later commit resets it.
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

    # Methods for the consumer. The caller must hold `changed`.

    def use(self, lease: Lease, step: int, rows: int) -> None:
        """Records that a batch was used, so that the next exchange commits it.

        If it is interrupted, the record is either complete or absent.
        """
        self._wishes.used[lease.token] = lease
        lease.use(step, rows)
        if lease.used == lease.stop:
            self.changed.notify_all()

    def left_over(self) -> Lease | None:
        """Returns a lease that was lost to an interrupt before the consumer began to read it.

        Only call it when no lease is waiting and the consumer isn't reading one.
        """
        for lease in self.leases.values():
            if lease.has_more:
                return lease
        return None

    def give_back(self, lease: Lease) -> None:
        """Gives up a lease after its used batches are committed."""
        if self.leases.pop(lease.token, None) is not None and lease.held and lease.used < lease.stop:
            self._wishes.returned.append(lease.token)

    def flush(self) -> None:
        """Waits until the ledger has answered for all used batches."""
        self._wishes.urgent = True
        self._sent += 1
        mine = self._sent
        self.changed.notify_all()
        while self._answered < mine and self.failed is None and not self._closed:
            self.changed.wait(_WAKE_SECONDS)

    def settle(self) -> None:
        """Waits until the ledger has all used batches and knows that no other batch is outstanding."""
        self._settled = True
        self.flush()

    def unsettle(self) -> None:
        """Waits until the ledger knows that more batches will be yielded, if it had recorded the worker as settled."""
        if self._settled or self._told_settled:
            self._settled = False
            self.flush()

    def close(self, seconds: float) -> int:
        """Gives up all leases and ends the thread. Waits at most `seconds` for the database.

        Returns:
            Number of used batches whose commit the ledger hasn't acknowledged.
        """
        with self.lock:
            if self._closed:
                return self._unanswered()
            self._depart()
            self.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        with self.lock:
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
        """Ends the thread soon, without waiting, because the worker was garbage collected.

        The garbage collector may call it in any thread at any time, so it takes no lock.
        """
        self._forgotten = True
        self.warn()

    def warn(self) -> None:
        """Warns about batches that weren't committed when iteration ended."""
        left, self.left_uncommitted = self.left_uncommitted, 0
        if left:
            warnings.warn(
                f"the worker {self.member.worker!r} has used all its leases, and {left} batches that it yielded were"
                " never committed: they don't count as done, and are yielded again. Call worker.commit() after each"
                " batch",
                stacklevel=stacklevel(),
            )

    # Methods for the background thread.

    def _run(self) -> None:
        connection: Connection | None = None
        try:
            while not self._closed:
                with self.lock:
                    request, sent = self._next_request()
                if request is None:
                    continue
                connection, answer = self._exchanged(connection, request)
                if answer is None:
                    return
                with self.lock:
                    self._apply(request, answer)
                    self._asking = []
                    self._answered = sent
                    self.changed.notify_all()
                if request.departed:
                    return
        except BaseException as error:
            with self.lock:
                self.failed = self._database.fault(error)
                self.changed.notify_all()
        finally:
            with self.lock:
                self._closed = True
                self.changed.notify_all()
            if connection is not None:
                with contextlib.suppress(Exception):
                    connection.close()

    def _next_request(self) -> tuple[Request | None, int]:
        """Waits until a request is due and returns it. Returns None if the caller must check again."""
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
        """Returns the number of ranges to lease now."""
        ahead = max(_AHEAD_SECONDS, 2 * self._group_seconds)
        left = sum(lease.stop - lease.next for lease in self.leases.values() if lease.held)
        seconds = left * self.pace
        if not self.waiting and (left <= 1 or seconds < ahead):
            a_stretch = max(self.job.stretch * self.pace, 1e-6)
            return max(1, min(int((2 * ahead - seconds) / a_stretch), _MOST_AHEAD) if self.pace else 1)
        return max(0, self._ahead - len(self.waiting)) if seconds < 2 * ahead else 0

    def _exchanged(self, connection: Connection | None, request: Request) -> tuple[Connection | None, Answer | None]:
        """Runs one exchange, and reconnects if the connection was lost. Returns no answer if the worker was closed."""
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
                        f"{told} (retried for {self._patience:.0f} seconds, this worker's patience)"
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
        """Updates a lease from the ledger's answer, and drops it if it is done or lost."""
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
                "to another worker, and they count for that worker. The next batch comes from another lease",
                worker_name=self.member.worker,
                epoch=epoch,
                start=used.start,
                stop=stop,
            )
        )


def _taken(lease: Lease) -> Used:
    """Removes and returns the batches of a lease that haven't been sent to the ledger yet."""
    used = Used(lease.token, lease.sent, lease.used, lease.rows)
    lease.sent, lease.rows = lease.used, []
    return used


def sorted_as(used: list[Used], committed: list[Any]) -> list[Any]:
    """Sorts the outcomes of commits like `used`. The ledger answers in the order of ranges."""
    by_lease = {done.lease: done for done in committed}
    return [by_lease[each.lease] for each in used]
