"""How a worker joins a job."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from fastpipe.leases import _tables
from fastpipe.leases._database import Connection, Database
from fastpipe.leases._exchange import Member
from fastpipe.leases._job import Job, check_schema, join_job

__all__ = ["join"]

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
