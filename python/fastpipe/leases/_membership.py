"""How a worker joins a job."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastpipe.leases import _tables
from fastpipe.leases._database import Connection, Database
from fastpipe.leases._exchange import Member
from fastpipe.leases._job import Job, check_schema, join_job

__all__ = ["join"]

# A database that is restarting is there again within this; one that isn't there at all shouldn't take long to say so.
_JOIN_SECONDS = 5.0
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
        LedgerError: if the ledger can't be reached, or written.
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

    deadline = time.monotonic() + min(_JOIN_SECONDS, patience)
    while True:
        try:
            with database.connected(create=True) as connection, _again(database, deadline), connection.transaction():
                return joined(connection)
        except _AgainError:
            time.sleep(_PAUSE)


class _AgainError(Exception):
    """What went wrong may go away by itself."""


@contextmanager
def _again(database: Database, deadline: float) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if database.passes(error) and time.monotonic() < deadline:
            raise _AgainError from error
        raise


def _free_name(connection: Connection, job: Job, ttl: float) -> str:
    """A name of this process that no worker has that is at work."""
    name = f"{socket.gethostname()}-{os.getpid()}"
    for number in itertools.count(1):
        found = name if number == 1 else f"{name}-{number}"
        taken = connection.rows(_tables.LOCK_WORKER, job=job.name, worker=found)
        if not taken or taken[0][3] or taken[0][4] > ttl:
            return found
    raise AssertionError
