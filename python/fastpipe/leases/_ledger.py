"""A ledger, for those who look at it and put it back; and workers of it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

from fastpipe._arguments import flag, shown
from fastpipe._reader.passes import passes_of
from fastpipe.errors import StateError
from fastpipe.leases._agent import Agent
from fastpipe.leases._checkpoints import checkpoint_of, restore
from fastpipe.leases._database import Connection, database_of
from fastpipe.leases._job import check_schema, job_names, job_of
from fastpipe.leases._membership import join
from fastpipe.leases._status import LedgerStatus, status_of
from fastpipe.leases._worker import LeaseWorker

__all__ = ["Ledger", "lease"]

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
