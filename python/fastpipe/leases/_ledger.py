"""A ledger, for programs that inspect or restore it, and how workers join a job of it."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex, TypeVar

from fastpipe._arguments import flag, shown
from fastpipe._reader.passes import passes_of
from fastpipe.errors import StateError
from fastpipe.leases import _tables
from fastpipe.leases._agent import Agent
from fastpipe.leases._checkpoints import checkpoint_of, restore
from fastpipe.leases._database import Connection, Database, database_of
from fastpipe.leases._exchange import Member
from fastpipe.leases._job import Job, check_schema, job_names, job_of, join_job
from fastpipe.leases._status import LedgerStatus, status_of
from fastpipe.leases._worker import LeaseWorker

_LOG = logging.getLogger("fastpipe")
Joined = TypeVar("Joined")

# Between attempts to reach a database that is away.
_PAUSE = 0.1
# Workers that haven't been seen for a week are forgotten.
_FORGOTTEN_SECONDS = 7 * 86_400.0


def join(
    database: Database, wanted: Job, *, worker: str | None, ttl: float, stretch_given: bool, patience: float
) -> tuple[Job, Member]:
    """Joins a job, which is made if there is none.

    A worker that is named takes the name over from whoever has it, and the leases with it: so a process that was killed
    and comes back under its name goes on at once. One without a name gets the host's and the process's number, and a
    further number if that is taken.

    Raises:
        LedgerError: if the ledger can't be written, or was away for longer than `patience`.
        StateError: if the job is of other data, or another order.
        UnsupportedError: if the ledger is of another version.
    """

    def joined(connection: Connection) -> tuple[Job, Member]:
        if not check_schema(connection):
            connection.create_tables()
            connection.rows(_tables.STORE_VERSION, version=_tables.SCHEMA_VERSION)
        job = join_job(connection, wanted, stretch_given=stretch_given)
        member = Member(worker or _free_name(connection, job, ttl), secrets.token_hex(8), ttl)
        key = {"job": job.name, "worker": member.worker}
        # First, so that an exchange of the name's former holder is either done, or refused.
        connection.rows(_tables.LOCK_WORKER, **key)
        connection.rows(_tables.ABANDON_ALL, **key)
        connection.rows(_tables.FORGET_WORKERS, job=job.name, seconds=_FORGOTTEN_SECONDS)
        connection.rows(_tables.JOIN_WORKER, incarnation=member.incarnation, **key)
        return job, member

    def once() -> tuple[Job, Member]:
        connection = database.connect(create=True)
        try:
            with connection.transaction():
                return joined(connection)
        finally:
            connection.close()

    return _patiently(database, once, patience)


def _patiently(database: Database, act: Callable[[], Joined], patience: float) -> Joined:
    """Does something until it succeeds, while what goes wrong may go away by itself, for so many seconds."""
    deadline, told = time.monotonic() + patience, False
    while True:
        try:
            return act()
        except Exception as error:
            fault = database.fault(error)
            if not database.passes(error) or time.monotonic() >= deadline:
                if fault is error:
                    raise
                raise fault from None
        if not told:
            _LOG.warning("%s; trying again for up to %.0f seconds", fault, patience)
            told = True
        time.sleep(_PAUSE)


def _free_name(connection: Connection, job: Job, ttl: float) -> str:
    """A name of this process that no worker has that is at work."""
    name = f"{socket.gethostname()}-{os.getpid()}"
    for number in itertools.count(1):
        found = name if number == 1 else f"{name}-{number}"
        taken = connection.rows(_tables.LOCK_WORKER, job=job.name, worker=found)
        if not taken or taken[0][3] or taken[0][4] > ttl:
            return found
    raise AssertionError


_LEAST_TTL = 0.5


class Ledger:
    """A ledger of leases: which batches of a job are done, and by whom the others are held.

    Workers make it: see `Reader.lease`.

    Args:
        url: of its database, `postgresql://…` or `sqlite:///…`.
        job: which of its jobs; None if it has one.

    Raises:
        ImportError: if the database's driver isn't installed; it says what to install.
        TypeError: if an argument is no string.
        ValueError: if the URL is of no database that can hold a ledger.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_csv("rides.csv", batch_size=256, shuffle=True, seed=7)
        >>> with reader.lease("sqlite:///status.db", worker="one") as worker:
        ...     for batch in worker:
        ...         worker.commit()
        >>> fastpipe.Ledger("sqlite:///status.db").status().finished
        True
    """

    def __init__(self, url: str, job: str | None = None) -> None:
        if job is not None and not isinstance(job, str):
            raise TypeError(f"job is a name or None, not {shown(job)}")
        self._database, self._job = database_of(url), job

    def jobs(self) -> list[str]:
        """The names of its jobs, oldest first.

        Raises:
            LedgerError: if the database fails.
            MissingFileError: if there is no such file.
        """
        with self._database.connected() as connection:
            return job_names(connection) if check_schema(connection) else []

    def status(self) -> LedgerStatus:
        """How far the job is, and what its workers do.

        Raises:
            LedgerError: if the database fails.
            MissingFileError: if there is no such file.
            StateError: if there is no such job, or none was named and there are several.
        """
        with self._database.connected() as connection:
            return status_of(connection, self._name(connection))

    def checkpoint(self) -> dict[str, Any]:
        """What is committed, fit for JSON. Keep it with the model's weights of that moment.

        It has all batches that were used, or it isn't made: each worker that holds leases must have been flushed
        (`LeaseWorker.flush`) since it yielded its last batch.

        Raises:
            LedgerError: if the database fails.
            MissingFileError: if there is no such file.
            StateError: if workers may have used batches that they haven't committed; it names them. Also if there is
                no such job, or none was named and there are several.
        """
        with self._database.connected() as connection, connection.transaction():
            return checkpoint_of(connection, self._name(connection))

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Puts the job back to a checkpoint: what was committed since is to be done again.

        All leases that are held now become stale: their commits are refused, and their workers lease anew.

        Args:
            checkpoint: what `checkpoint` returned, of this job.

        Raises:
            LedgerError: if the database fails.
            MissingFileError: if there is no such file.
            StateError: if the checkpoint is of another job, or damaged. Nothing changes then.
            TypeError: if it is no mapping.
        """
        with self._database.connected() as connection, connection.transaction():
            restore(connection, self._name(connection), checkpoint)

    def _name(self, connection: Connection) -> str:
        names = job_names(connection) if check_schema(connection) else []
        if self._job is None and len(names) == 1:
            return names[0]
        known = f": it has {', '.join(map(repr, names))}" if names else ": no worker has joined one"
        if self._job is None:
            raise StateError(
                "name the job of the ledger (job=...)" + known if names else "the ledger has no job" + known
            )
        if self._job not in names:
            raise StateError(f"the ledger has no job {self._job!r}{known}")
        return self._job

    def __repr__(self) -> str:
        return f"<Ledger {self._database.shown}>"


def lease(
    reader: Any,
    url: str,
    *,
    worker: str | None,
    job: str,
    stretch: SupportsIndex | None,
    ttl: float,
    ahead: SupportsIndex,
    barrier: bool,
    copies: bool,
    patience: float,
) -> LeaseWorker:
    """Joins a job. See `Reader.lease`."""
    passes = passes_of(reader)
    for name, given in (("worker", worker), ("job", job)):
        if not (isinstance(given, str) or (name == "worker" and given is None)):
            raise TypeError(f"{name} is a name, not {shown(given)}")
        if given is not None and (not 0 < len(given) <= 200 or "\0" in given):
            raise ValueError(f"{name} is a name of 1 to 200 characters, not {shown(given)}")
    length = None if stretch is None else _integer("stretch", stretch, 1)
    seconds = _seconds("ttl", ttl, _LEAST_TTL), _seconds("patience", patience, 0.0)
    waiting = _integer("ahead", ahead, 1)
    flag("copies", copies)
    database = database_of(url)
    wanted = job_of(passes, name=job, stretch=length, barrier=flag("barrier", barrier))
    joined, member = join(
        database, wanted, worker=worker, ttl=seconds[0], stretch_given=length is not None, patience=seconds[1]
    )
    agent = Agent(database, joined, member, ahead=waiting, copies=copies, patience=seconds[1])
    return LeaseWorker(passes, database, agent)


def _integer(name: str, given: SupportsIndex, least: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} is a number, not {shown(given)}") from None
    if isinstance(given, bool) or not least <= number < 2**31:
        raise ValueError(f"{name} is from {least} to 2147483647, not {shown(given)}")
    return number


def _seconds(name: str, given: float, least: float) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name} is a number of seconds, not {shown(given)}")
    if not least <= given <= 1e9:
        raise ValueError(f"{name} is {least} seconds or more, not {shown(given)}")
    return float(given)
