"""The ledger as a public class for programs that inspect or restore it, and the code with which workers join a job."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastpipe._arguments import flag, shown, within
from fastpipe._reader.losses import refuse
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

# Seconds between attempts to reach a database that is unavailable.
_PAUSE = 0.1
# Workers that haven't contacted the ledger for a week are deleted from it.
_FORGOTTEN_SECONDS = 7 * 86_400.0


def join(
    database: Database, wanted: Job, *, worker: str | None, ttl: float, stretch_given: bool, patience: float
) -> tuple[Job, Member]:
    """Joins a job, and creates it if it doesn't exist.

    A worker with a given name takes over that name and its leases from any worker that holds them. A process that was
    killed and restarts under its name therefore resumes at once. The default name consists of the host name and the
    process ID, with a numeric suffix if that name is taken.

    Raises:
        LedgerError: If the ledger can't be written, or was unavailable for longer than `patience`.
        StateError: If the job has another dataset or order.
        UnsupportedError: If the ledger has another schema version.
    """

    def joined(connection: Connection) -> tuple[Job, Member]:
        if not check_schema(connection):
            connection.create_tables()
            connection.rows(_tables.STORE_VERSION, version=_tables.SCHEMA_VERSION)
        job = join_job(connection, wanted, stretch_given=stretch_given)
        member = Member(worker or _free_name(connection, job, ttl), secrets.token_hex(8), ttl)
        key = {"job": job.name, "worker": member.worker}
        # This comes first, so that an exchange of the name's former holder has either finished or is refused.
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
    """Calls `act` until it succeeds. Retries after transient errors for up to `patience` seconds."""
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
    """Returns a name for this process that no active worker has."""
    name = f"{socket.gethostname()}-{os.getpid()}"
    for number in itertools.count(1):
        found = name if number == 1 else f"{name}-{number}"
        taken = connection.rows(_tables.LOCK_WORKER, job=job.name, worker=found)
        if not taken or taken[0][3] or taken[0][4] > ttl:
            return found
    raise AssertionError


_LEAST_TTL = 0.5


class Ledger:
    """A ledger of leases. It records which batches of a job are done, and which workers hold the others.

    Workers create the ledger: see `Reader.lease`.

    Args:
        url: URL of its database, `postgresql://…` or `sqlite:///…`.
        job: Name of the job to use. Defaults to the only job of the ledger.

    Raises:
        ImportError: If the database's driver isn't installed. The message says what to install.
        TypeError: If an argument isn't a string.
        ValueError: If the URL isn't one of a supported database.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_csv("rides.csv", batch_size=256, shuffle=True, seed=7)
        >>> with reader.lease("sqlite:///status.db", worker_name="one") as worker:
        ...     for batch in worker:
        ...         worker.commit()
        >>> fastpipe.leases.Ledger("sqlite:///status.db").status().finished
        True
    """

    def __init__(self, url: str, job: str | None = None) -> None:
        if job is not None and not isinstance(job, str):
            raise TypeError(f"job must be a string or None; got {shown(job)}")
        self._database, self._job = database_of(url), job

    def jobs(self) -> list[str]:
        """Returns the names of the ledger's jobs, oldest first.

        Raises:
            LedgerError: If the database fails.
            MissingFileError: If the database file doesn't exist.
        """
        with self._database.connected() as connection:
            return job_names(connection) if check_schema(connection) else []

    def status(self) -> LedgerStatus:
        """Returns the progress of the job and the activity of its workers.

        Raises:
            LedgerError: If the database fails.
            MissingFileError: If the database file doesn't exist.
            StateError: If the job doesn't exist, or if the ledger has several jobs and `job` isn't given.
        """
        with self._database.connected() as connection:
            return status_of(connection, self._name(connection))

    def checkpoint(self) -> dict[str, Any]:
        """Returns the committed batches as a dict that can be stored as JSON. Save it with the model's weights.

        A checkpoint contains every used batch. Each worker that holds leases must therefore have called
        `LeaseWorker.flush` since it yielded its last batch.

        Raises:
            LedgerError: If the database fails.
            MissingFileError: If the database file doesn't exist.
            StateError: If workers may have used batches that they haven't committed. The message lists these workers.
                Also if the job doesn't exist, or if `job` is None and the ledger has several.
        """
        with self._database.connected() as connection, connection.transaction():
            return checkpoint_of(connection, self._name(connection))

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the job to a checkpoint. Batches that were committed later will be read again.

        All current leases are invalidated: their commits are refused, and their workers lease new ranges.

        Args:
            checkpoint: A checkpoint of this job, as returned by `checkpoint`.

        Raises:
            LedgerError: If the database fails.
            MissingFileError: If the database file doesn't exist.
            StateError: If the checkpoint belongs to another job or is damaged. The ledger isn't changed then.
            TypeError: If the checkpoint isn't a mapping.
        """
        with self._database.connected() as connection, connection.transaction():
            restore(connection, self._name(connection), checkpoint)

    def _name(self, connection: Connection) -> str:
        names = job_names(connection) if check_schema(connection) else []
        if self._job is None and len(names) == 1:
            return names[0]
        known = f": it contains {', '.join(map(repr, names))}" if names else ": no worker has joined yet"
        if self._job is None:
            raise StateError(
                "the ledger has several jobs; choose one with job=..." + known
                if names
                else "the ledger has no job" + known
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
    worker_name: str | None,
    job: str,
    stretch: int | None,
    ttl: float,
    prefetch: int,
    barrier: bool,
    copies: bool,
    patience: float,
) -> LeaseWorker:
    """Joins a job as a worker. See `Reader.lease` for the arguments."""
    passes = passes_of(reader)
    refuse(getattr(passes.origin, "_lost", None), "leasing a reader", 'lease a reader with on_error="raise"')
    for name, given in (("worker_name", worker_name), ("job", job)):
        if not (isinstance(given, str) or (name == "worker_name" and given is None)):
            raise TypeError(f"{name} must be a string; got {shown(given)}")
        if given is not None and (not 0 < len(given) <= 200 or "\0" in given):
            raise ValueError(f"{name} must have 1 to 200 characters and no NUL; got {shown(given)}")
    length = None if stretch is None else within("stretch", stretch, 1, 2**31 - 1)
    seconds = _seconds("ttl", ttl, _LEAST_TTL), _seconds("patience", patience, 0.0)
    waiting = within("prefetch", prefetch, 1, 2**31 - 1)
    flag("copies", copies)
    database = database_of(url)
    wanted = job_of(passes, name=job, stretch=length, barrier=flag("barrier", barrier))
    joined, member = join(
        database, wanted, worker=worker_name, ttl=seconds[0], stretch_given=length is not None, patience=seconds[1]
    )
    agent = Agent(database, joined, member, ahead=waiting, copies=copies, patience=seconds[1])
    return LeaseWorker._of(passes, database, agent)


def _seconds(name: str, given: float, least: float) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name} must be a number of seconds; got {shown(given)}")
    if not least <= given <= 1e9:
        raise ValueError(f"{name} must be at least {least} seconds; got {shown(given)}")
    return float(given)
