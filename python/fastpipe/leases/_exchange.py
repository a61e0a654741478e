"""One exchange between a worker and the ledger: a request and its answer, in one transaction.

Each exchange has an index, and its answer is stored in the worker's row. If the connection is lost before the answer
arrives, the worker repeats the exchange. The ledger then returns the stored answer, or runs the exchange if it hadn't
run yet. Each commit therefore counts once, even if messages are lost.

A *second copy* is an additional lease of a range for a faster worker, near the end of an epoch. The first of the two
workers to commit a batch wins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastpipe.errors import StateError
from fastpipe.leases import _tables
from fastpipe.leases._database import Connection
from fastpipe.leases._job import Job, found_job

# A worker copies a range only if it is expected to finish this many times faster than the holder. Otherwise both would
# do the same work for nothing.
_FASTER = 1.5
# Seconds until the first batch of a copy is read.
_START = 0.1
# A holder counts as stalled when it has committed nothing for all three: this many seconds, this many of its batches,
# and this many intervals between exchanges.
_HANGING_SECONDS, _HANGING_BATCHES, _HANGING_GROUPS = 0.5, 3, 2


class Held(NamedTuple):
    """A lease range that isn't done.

    Attributes:
        number: Index of the range in its epoch.
        committed: First batch that isn't committed.
        stop: End of the range (exclusive).
        worker: Name of the worker that holds the lease, or None if the range is free.
        token: Token of the lease.
        copied: Whether another worker holds a second copy.
        rate: Batches per second of the holder, or 0 if unknown.
        stalled: Seconds since the holder last committed or was granted work.
    """

    number: int
    committed: int
    stop: int
    worker: str | None
    token: int
    copied: bool
    rate: float
    stalled: float


def worth_copying(held: Sequence[Held], worker: str, pace: float, group: float = 0.0) -> list[Held]:
    """Returns ranges that a worker would finish clearly sooner than their holders, latest expected end first.

    A holder processes its ranges one after another. If a holder has been silent for longer than its rate explains, it
    is expected to stay silent for as long again.

    Args:
        held: All unfinished ranges of the epoch, by index.
        worker: Name of the requesting worker. Its own ranges are never copied.
        pace: Seconds per batch of that worker. If 0 (unknown), the pace of the fastest holder is assumed.
        group: Seconds between exchanges that commit, about the same for all workers.
    """
    fastest = max((stretch.rate for stretch in held), default=0.0)
    usual = 1 / fastest if fastest else 0.0
    pace = pace or usual
    busy: dict[str, float] = {}
    found = []
    for stretch in held:
        if stretch.worker is None:
            continue
        left = stretch.stop - stretch.committed
        end = busy.get(stretch.worker, _silence(stretch, usual, group)) + left * _pace(stretch, usual)
        busy[stretch.worker] = end
        if not stretch.copied and stretch.worker != worker and end > _FASTER * left * pace + _START:
            found.append((end, stretch))
    return [stretch for _, stretch in sorted(found, key=lambda pair: -pair[0])]


def _pace(stretch: Held, usual: float) -> float:
    return 1 / stretch.rate if stretch.rate > 0 else usual


def _silence(stretch: Held, usual: float, group: float) -> float:
    """Returns how many more seconds the holder is expected to stay silent."""
    hangs = stretch.stalled > max(_HANGING_SECONDS, _HANGING_BATCHES * _pace(stretch, usual), _HANGING_GROUPS * group)
    return stretch.stalled if hangs else 0.0


# Maximum number of candidates to try to copy, because other workers may take them at the same time.
_TRIED_COPIES = 4


class Member(NamedTuple):
    """A worker of a job.

    Attributes:
        worker: Its name.
        incarnation: Random ID that distinguishes this process from earlier and later ones with the same name.
        ttl: Seconds until its leases expire.
    """

    worker: str
    incarnation: str
    ttl: float


class Token(NamedTuple):
    """Identifies one lease of a range: the epoch, the index of the range, and the fencing token."""

    epoch: int
    number: int
    token: int


class Used(NamedTuple):
    """Batches `start` to `stop` of a lease that were used, and the row count of each."""

    lease: Token
    start: int
    stop: int
    rows: list[int]


class Committed(NamedTuple):
    """The outcome of committing used batches.

    Attributes:
        lease: Token of the lease.
        refused: End (exclusive) of the batches whose commit was refused. Equals the start if none was refused.
        committed: First batch of the range that isn't committed.
        held: Whether the lease is still valid.
    """

    lease: Token
    refused: int
    committed: int
    held: bool


class Renewed(NamedTuple):
    """The outcome of renewing a lease: its validity, the first uncommitted batch, and whether a second copy exists."""

    lease: Token
    held: bool
    committed: int
    copied: bool


class Granted(NamedTuple):
    """A new lease of the batches from `start` to `stop` (exclusive)."""

    lease: Token
    start: int
    stop: int
    copy: bool


@dataclass
class Request:
    """The work that a worker reports and requests.

    Attributes:
        number: Index of the exchange. It increases with each exchange.
        used: Batches to commit.
        renewed: Leases to renew.
        returned: Leases to give up after their used batches are committed.
        wanted: Number of ranges to lease.
        copies: Whether to accept a second copy of another worker's range if none is free.
        pace: Seconds per batch, or 0 if unknown.
        group: Seconds between exchanges that commit.
        alive: Whether to update the worker's time stamp even if there is nothing else to record.
        departed: Whether the worker leaves the job.
        settled: Whether all batches that the worker has yielded are committed by this exchange. None keeps the last
            value.
    """

    number: int
    used: list[Used] = field(default_factory=list)
    renewed: list[Token] = field(default_factory=list)
    returned: list[Token] = field(default_factory=list)
    wanted: int = 0
    copies: bool = False
    pace: float = 0.0
    group: float = 0.0
    alive: bool = False
    departed: bool = False
    settled: bool | None = None


@dataclass
class Answer:
    """The ledger's answer to a worker.

    Attributes:
        committed: Outcomes of commits, one for each element of `Request.used`.
        renewed: Outcomes of renewals.
        granted: New leases.
        idle: Whether nothing can be leased now although the job isn't done.
        finished: Whether the job is done.
        workers: Number of workers of the job, or 0 if they weren't counted.
    """

    committed: list[Committed] = field(default_factory=list)
    renewed: list[Renewed] = field(default_factory=list)
    granted: list[Granted] = field(default_factory=list)
    idle: bool = False
    finished: bool = False
    workers: int = 0

    def text(self) -> str:
        """Returns the answer as JSON."""
        # JSON stores named tuples as arrays. `asdict` would copy each of them first.
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Answer:
        """Parses an answer that was stored as JSON."""
        stored = json.loads(text)
        return cls(
            [Committed(Token(*lease), *rest) for lease, *rest in stored["committed"]],
            [Renewed(Token(*lease), *rest) for lease, *rest in stored["renewed"]],
            [Granted(Token(*lease), *rest) for lease, *rest in stored["granted"]],
            stored["idle"],
            stored["finished"],
            stored.get("workers", 0),
        )


def exchange(connection: Connection, job: Job, member: Member, request: Request) -> Answer:
    """Runs a worker's request. Call it within a transaction.

    Raises:
        StateError: If another worker has taken this worker's name, or if the ledger no longer contains this worker.
    """
    kept = _lock_worker(connection, job, member, request.number)
    if kept is not None:
        return kept
    answer, batches, rows = Answer(), 0, 0
    # All workers lock ranges in the same sequence, which prevents deadlocks.
    for lease, act in sorted(_acts(request), key=lambda pair: pair[0]):
        if isinstance(act, Used):
            done, count, row_count = _commit(connection, job, act)
            answer.committed.append(done)
            batches, rows = batches + count, rows + row_count
        elif act == "renew":
            answer.renewed.append(_renew(connection, job, member, lease))
        else:
            key = {"job": job.name, "epoch": lease.epoch, "number": lease.number}
            connection.rows(_tables.ABANDON, token=lease.token, **key)
            connection.rows(_tables.PROMOTE, **key)
    if request.wanted > 0:
        _deal(connection, job, member, request, answer)
    if request.alive and not answer.workers:
        answer.workers = int(connection.rows(_tables.PRESENT, job=job.name, ttl=member.ttl)[0][0])
    told = request.alive or request.departed or request.settled is not None
    if _acts(request) or answer.granted or told:
        connection.rows(
            _tables.ANSWERED,
            job=job.name,
            worker=member.worker,
            exchange=request.number,
            answer=answer.text(),
            moved=int(batches > 0 or (bool(answer.granted) and not request.used)),
            batches=batches,
            row_count=rows,
            rate=1 / request.pace if request.pace > 0 else 0.0,
            departed=int(request.departed),
            settled=None if request.settled is None else int(request.settled),
        )
    return answer


def _lock_worker(connection: Connection, job: Job, member: Member, number: int) -> Answer | None:
    """Locks the worker's row. Returns the stored answer if this exchange has already run."""
    found = connection.rows(_tables.LOCK_WORKER, job=job.name, worker=member.worker)
    if not found:
        raise StateError(
            f"the ledger no longer contains the worker {member.worker!r} of the job {job.name!r}: its tables were"
            " emptied or restored from an earlier backup. Call reader.lease(...) again to rejoin"
        )
    incarnation, last, kept, *_ = found[0]
    if incarnation != member.incarnation:
        raise StateError(
            f"another worker of the job {job.name!r} has taken the name {member.worker!r} and its leases: each"
            " worker needs a unique name"
        )
    return Answer.of(kept) if last == number else None


def _acts(request: Request) -> list[tuple[Token, Any]]:
    return [
        *((used.lease, used) for used in request.used),
        *((lease, "renew") for lease in request.renewed),
        *((lease, "return") for lease in request.returned),
    ]


def _commit(connection: Connection, job: Job, used: Used) -> tuple[Committed, int, int]:
    """Commits used batches of a range, except batches that another holder has already committed.

    Returns:
        The outcome, and the numbers of batches and rows that were newly committed.
    """
    lease, start = used.lease, used.start
    key = {"job": job.name, "epoch": lease.epoch, "number": lease.number}
    while True:
        if connection.rows(_tables.COMMIT, token=lease.token, start=start, stop=used.stop, **key):
            rows = sum(used.rows[start - used.start :])
            return Committed(lease, start, used.stop, True), used.stop - start, rows
        found = connection.rows(_tables.HOLDERS, **key)
        # The ranges of a finished epoch are deleted after the next epoch is opened.
        committed, token, copy_token = found[0] if found else (used.stop, 0, 0)
        if lease.token < 1 or lease.token not in (token, copy_token):
            return Committed(lease, used.stop, committed, False), 0, 0
        if committed >= used.stop:
            return Committed(lease, used.stop, committed, True), 0, 0
        if committed <= start:
            # The committed position of a range never moves back while one of its leases is valid.
            raise StateError(
                f"the ledger lost commits: epoch {lease.epoch} is committed up to batch {committed}, but this worker"
                f" committed up to {start} (was an earlier backup restored?)."
                " Use Ledger.restore() to reset ledger and model to one checkpoint"
            )
        start = committed


def _renew(connection: Connection, job: Job, member: Member, lease: Token) -> Renewed:
    key = {"job": job.name, "epoch": lease.epoch, "number": lease.number}
    found = connection.rows(_tables.RENEW, token=lease.token, ttl=member.ttl, **key)
    if not found:
        held = connection.rows(_tables.HOLDERS, **key)
        return Renewed(lease, False, held[0][0] if held else job.batches, False)
    committed, copy_token = found[0]
    if copy_token == lease.token:
        connection.rows(_tables.PROMOTE, **key)
    return Renewed(lease, True, committed, copy_token not in (0, lease.token))


def _deal(connection: Connection, job: Job, member: Member, request: Request, answer: Answer) -> None:
    """Leases ranges: first from the oldest epoch with free ranges, then from the next epoch, then as second copies."""
    wanted = request.wanted
    if wanted > 1:
        wanted, answer.workers = _fair(connection, job, member, wanted)
    answer.granted = _free(connection, job, member, wanted)
    if answer.granted:
        return
    undone, openable = _epochs(connection, job)
    if openable is not None:
        _open(connection, job)
        wanted, answer.workers = _fair(connection, job, member, wanted)
        answer.granted = _free(connection, job, member, wanted)
        # Nothing is granted if another worker opened the epoch and others have leased all of it.
        answer.idle = not answer.granted
        return
    if not undone:
        answer.finished = True
        return
    if request.copies:
        answer.granted = _copy(connection, job, member, undone[0], request)
    answer.idle = not answer.granted


def _fair(connection: Connection, job: Job, member: Member, wanted: int) -> tuple[int, int]:
    """Limits the ranges to lease to half an equal share of the free ones, so that all workers finish an epoch together.

    Returns:
        The number of ranges to lease, and the number of workers.
    """
    free, workers = (int(count) for count in connection.rows(_tables.SHARES, job=job.name, ttl=member.ttl)[0])
    return max(1, min(wanted, free // (2 * max(workers, 1)))), workers


def _free(connection: Connection, job: Job, member: Member, wanted: int) -> list[Granted]:
    found = connection.rows(_tables.DEAL, job=job.name, worker=member.worker, ttl=member.ttl, count=wanted)
    return [
        Granted(Token(epoch, number, token), start, stop, False) for epoch, number, token, start, stop in sorted(found)
    ]


def _epochs(connection: Connection, job: Job) -> tuple[list[int], int | None]:
    """Returns the unfinished epochs, and the epoch that may be opened now, if any."""
    undone, last = [], job.first_epoch - 1
    for epoch, finished, left in connection.rows(_tables.OPEN_EPOCHS, job=job.name):
        last = epoch
        if left:
            undone.append(epoch)
        elif finished is None:
            connection.rows(
                "UPDATE fastpipe_epochs SET finished = {now} WHERE job = :job AND epoch = :epoch AND finished IS NULL",
                job=job.name,
                epoch=epoch,
            )
    # Without a barrier, at most two epochs are in progress. Workers wait for a straggler in the older one.
    ready = not undone or (not job.barrier and undone == [last])
    more = job.end_epoch is None or last + 1 < job.end_epoch
    return undone, last + 1 if ready and more else None


def _open(connection: Connection, job: Job) -> None:
    """Opens the next epoch unless another worker has, and deletes the ranges of finished epochs."""
    # Restoring a checkpoint takes the same lock.
    current = found_job(connection, job.name, lock=True)
    undone, epoch = _epochs(connection, job)
    if current is None or epoch is None:
        return
    if connection.rows(_tables.OPEN_EPOCH, job=job.name, epoch=epoch):
        connection.rows(
            _tables.INSERT_STRETCHES,
            job=job.name,
            epoch=epoch,
            stretch=current.stretch,
            batches=current.batches,
            tokens=current.base_token,
        )
        oldest = min([*undone, epoch])
        connection.rows(_tables.DELETE_DONE, job=job.name, epoch=oldest)


def _copy(connection: Connection, job: Job, member: Member, epoch: int, request: Request) -> list[Granted]:
    """Leases a second copy of the range that would finish last, if this worker is likely to finish it sooner."""
    held = [Held(*row) for row in connection.rows(_tables.LEASED, job=job.name, epoch=epoch)]
    for stretch in worth_copying(held, member.worker, request.pace, request.group)[:_TRIED_COPIES]:
        granted = connection.rows(
            _tables.COPY,
            job=job.name,
            epoch=epoch,
            number=stretch.number,
            worker=member.worker,
            ttl=member.ttl,
            seen=stretch.token,
        )
        if granted:
            (_, number, token, start, stop) = granted[0]
            return [Granted(Token(epoch, number, token), start, stop, True)]
    return []
