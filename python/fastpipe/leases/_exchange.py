"""One exchange of a worker with the ledger: what it did and wants, and what it is told, in one transaction.

An exchange has a number, and its answer is kept with the worker's row: if the connection is lost before the answer has
come, the same exchange is asked for again, and either is answered from that row or is done now. So a commit counts
once, whoever loses which message.
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

# A copy must promise to be this much faster than the holder of the lease, or both would do the same work for nothing.
_FASTER = 1.5
# Seconds until a copy's first batch is read.
_START = 0.1
# A holder that has committed nothing for so many seconds, batches, and times between exchanges, hangs.
_HANGING_SECONDS, _HANGING_BATCHES, _HANGING_GROUPS = 0.5, 3, 2


class Held(NamedTuple):
    """A stretch that isn't done.

    Attributes:
        number: of the stretch.
        committed: its first batch that isn't done.
        stop: behind its last batch.
        worker: who holds the lease; None if nobody does.
        token: of the lease.
        copied: whether there is a second copy.
        rate: batches a second of the holder; 0 if it isn't known.
        stalled: seconds since the holder's last commit, or since it was given work.
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
    """The stretches that a worker would end clearly sooner than their holders, the latest expected end first.

    A holder does its stretches one after the other. One that has been silent for longer than its rate explains is
    expected to stay silent for as long again.

    Args:
        held: all stretches of the epoch that aren't done, by number.
        worker: who asks; it copies nothing of its own.
        pace: its seconds for a batch; 0 if that isn't known yet, which is taken for the fastest holder's.
        group: seconds between exchanges that commit, which are about the same for all workers.
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
    """Seconds for which the holder is expected to go on doing nothing."""
    hangs = stretch.stalled > max(_HANGING_SECONDS, _HANGING_BATCHES * _pace(stretch, usual), _HANGING_GROUPS * group)
    return stretch.stalled if hangs else 0.0


# So many of the stretches that are worth a copy are tried; others may take them at the same time.
_TRIED_COPIES = 4


class Member(NamedTuple):
    """A worker of a job.

    Attributes:
        worker: its name.
        incarnation: what tells this process's worker from others of its name, before and after it.
        ttl: seconds until its leases expire.
    """

    worker: str
    incarnation: str
    ttl: float


class Token(NamedTuple):
    """A lease of a stretch."""

    epoch: int
    number: int
    token: int


class Used(NamedTuple):
    """Batches `start` to `stop` of a stretch that were used, and the rows of each."""

    lease: Token
    start: int
    stop: int
    rows: list[int]


class Committed(NamedTuple):
    """What became of batches that were used.

    Attributes:
        lease: of the stretch.
        refused: behind the last batch that the commit was refused for; its start if it was refused for none.
        committed: the stretch's first batch that isn't done.
        held: whether the lease still is one.
    """

    lease: Token
    refused: int
    committed: int
    held: bool


class Renewed(NamedTuple):
    """What became of a lease: whether it still is one, the first batch that isn't done, whether there is a copy."""

    lease: Token
    held: bool
    committed: int
    copied: bool


class Granted(NamedTuple):
    """A new lease: of the batches from `start` to `stop`."""

    lease: Token
    start: int
    stop: int
    copy: bool


@dataclass
class Request:
    """What a worker did, and what it wants.

    Attributes:
        number: of the exchange; larger than that of the one before.
        used: to be committed.
        renewed: leases to be renewed.
        returned: leases to be given up, once what was used of them is committed.
        wanted: how many stretches to lease.
        copies: whether a second copy of another worker's stretch will do, if none is free.
        pace: seconds for a batch; 0 if that isn't known.
        group: seconds between exchanges that commit.
        alive: whether to note that the worker is there, even if nothing else is to be noted.
        departed: whether it goes.
        settled: whether it has no batch that it yielded and that isn't committed with this; None for what it said last.
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
    """What a worker is told.

    Attributes:
        committed: of what was used, in the same order.
        renewed: of the leases to be renewed.
        granted: new leases.
        idle: whether there is nothing to lease now, though the job isn't done.
        finished: whether the job is done.
        workers: of the job; 0 if they weren't counted.
    """

    committed: list[Committed] = field(default_factory=list)
    renewed: list[Renewed] = field(default_factory=list)
    granted: list[Granted] = field(default_factory=list)
    idle: bool = False
    finished: bool = False
    workers: int = 0

    def text(self) -> str:
        """As JSON."""
        # Named tuples are arrays there; `asdict` would copy each of them first.
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Answer:
        """An answer that was stored as JSON."""
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
    """Does what a worker asks for, within a transaction.

    Raises:
        StateError: if another worker has taken this one's name, or the ledger doesn't know it any more.
    """
    kept = _lock_worker(connection, job, member, request.number)
    if kept is not None:
        return kept
    answer, batches, rows = Answer(), 0, 0
    # In the order of stretches, as everyone does, so that no two workers wait for each other.
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
    """Locks the worker's row; its answer, if this exchange was done before."""
    found = connection.rows(_tables.LOCK_WORKER, job=job.name, worker=member.worker)
    if not found:
        raise StateError(
            f"the ledger doesn't know the worker {member.worker!r} of the job {job.name!r} any more: its tables were"
            " emptied, or are those of an earlier backup. A new reader.lease(...) joins it"
        )
    incarnation, last, kept, *_ = found[0]
    if incarnation != member.incarnation:
        raise StateError(
            f"another worker of the job {job.name!r} has taken the name {member.worker!r}, and with it the leases: each"
            " worker needs a name of its own"
        )
    return Answer.of(kept) if last == number else None


def _acts(request: Request) -> list[tuple[Token, Any]]:
    return [
        *((used.lease, used) for used in request.used),
        *((lease, "renew") for lease in request.renewed),
        *((lease, "return") for lease in request.returned),
    ]


def _commit(connection: Connection, job: Job, used: Used) -> tuple[Committed, int, int]:
    """Commits what was used of a stretch, but for what another holder has committed before.

    Returns:
        What became of it, and the batches and rows that count now.
    """
    lease, start = used.lease, used.start
    key = {"job": job.name, "epoch": lease.epoch, "number": lease.number}
    while True:
        if connection.rows(_tables.COMMIT, token=lease.token, start=start, stop=used.stop, **key):
            rows = sum(used.rows[start - used.start :])
            return Committed(lease, start, used.stop, True), used.stop - start, rows
        found = connection.rows(_tables.HOLDERS, **key)
        # A finished epoch's stretches are deleted, once the next one is open.
        committed, token, copy_token = found[0] if found else (used.stop, 0, 0)
        if lease.token < 1 or lease.token not in (token, copy_token):
            return Committed(lease, used.stop, committed, False), 0, 0
        if committed >= used.stop:
            return Committed(lease, used.stop, committed, True), 0, 0
        if committed <= start:
            # Nobody goes back in a stretch while a lease of it holds.
            raise StateError(
                f"the ledger has epoch {lease.epoch} committed up to batch {committed}, and this worker had"
                f" committed it up to {start}: its database has lost commits (an earlier backup was restored?)."
                " Ledger.restore() puts ledger and model back to one checkpoint"
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
    """Leases stretches: of the oldest epoch that has free ones, of the next epoch, or copies of others' stretches."""
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
        # None if someone else has opened it, and others have taken it all.
        answer.idle = not answer.granted
        return
    if not undone:
        answer.finished = True
        return
    if request.copies:
        answer.granted = _copy(connection, job, member, undone[0], request)
    answer.idle = not answer.granted


def _fair(connection: Connection, job: Job, member: Member, wanted: int) -> tuple[int, int]:
    """How many stretches to lease at once: half an equal share of what is free, so that all end an epoch together.

    Returns:
        That, and the number of workers.
    """
    free, workers = (int(count) for count in connection.rows(_tables.SHARES, job=job.name, ttl=member.ttl)[0])
    return max(1, min(wanted, free // (2 * max(workers, 1)))), workers


def _free(connection: Connection, job: Job, member: Member, wanted: int) -> list[Granted]:
    found = connection.rows(_tables.DEAL, job=job.name, worker=member.worker, ttl=member.ttl, count=wanted)
    return [
        Granted(Token(epoch, number, token), start, stop, False) for epoch, number, token, start, stop in sorted(found)
    ]


def _epochs(connection: Connection, job: Job) -> tuple[list[int], int | None]:
    """The epochs that aren't done, and the one that may be opened now, if any."""
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
    # Without a barrier two epochs may be under way: whoever hangs in the older one is waited for then.
    ready = not undone or (not job.barrier and undone == [last])
    more = job.end_epoch is None or last + 1 < job.end_epoch
    return undone, last + 1 if ready and more else None


def _open(connection: Connection, job: Job) -> None:
    """Opens the next epoch, if it still is to be opened, and forgets the stretches of those that are done."""
    # Whoever restores a checkpoint holds this lock, too.
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
    """A second copy of the stretch of an epoch that would be done last, if this worker is likely to do it sooner."""
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
