"""A ledger in PostgreSQL, for workers on any number of machines.

A worker skips ranges that another worker is leasing at the moment (`FOR UPDATE SKIP LOCKED`), so workers don't wait for
each other. Leases expire by the server's clock.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

from fastpipe.errors import LedgerError
from fastpipe.leases._database import Connection, Database, Row
from fastpipe.leases._tables import CREATE

_NAME = re.compile(r"(?<!:):([a-z_]+)")
_NOW = "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
# Key of the advisory lock that prevents two workers from creating the tables at once. The value is arbitrary, but
# unlikely to be used by other programs.
_CREATING = 0x66617374
_CONNECT_SECONDS = 5
# Time limit for a statement, including waits for locks. The worker retries after it.
_STATEMENT_MS = 10_000
# A worker that is stopped within a transaction holds locks that others wait for. The server ends such a transaction,
# and the worker retries it.
_IDLE_MS = 1_500
# Texts of a running server's errors about a wrong URL. libpq reports no SQLSTATE for these errors.
_WRONG = ("does not exist", "authentication failed", "no password supplied", "no pg_hba.conf entry")
# Classes of SQLSTATE that are transient: connections, resources, operator intervention, and deadlocks or serialization
# failures.
_PASSING = ("08", "53", "57", "40")
# Transient states: a lock timeout, a transaction that was idle for too long, and a server that is still read-only.
_PASSING_STATES = ("55P03", "25P03", "25006")


@cache
def _text(statement: str) -> str:
    text = statement.format(now=_NOW, skip_locked="FOR UPDATE SKIP LOCKED", for_update="FOR UPDATE")
    return _NAME.sub(r"%(\1)s", text)


class Postgres(Database):
    """A ledger in a PostgreSQL database.

    Args:
        url: Connection URL of libpq.
    """

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise ImportError(
                "a ledger in PostgreSQL requires psycopg: pip install 'fastpipe-data[postgresql]'"
            ) from error
        self._psycopg = psycopg
        self.url = url
        parts = urllib.parse.urlsplit(url)
        self._secret = parts.password
        user = f"{parts.username}@" if parts.username else ""
        port = f":{parts.port}" if parts.port else ""
        self.shown = f"{parts.scheme}://{user}{parts.hostname or ''}{port}{parts.path}"

    @classmethod
    def of(cls, url: str) -> Self:
        """Returns the database for a URL."""
        return cls(url)

    def connect(self, *, create: bool) -> PostgresConnection:
        # Client-side parameters send each statement as one message, and the server infers their types from the columns.
        try:
            found = self._psycopg.connect(
                self.url,
                autocommit=True,
                connect_timeout=_CONNECT_SECONDS,
                cursor_factory=self._psycopg.ClientCursor,
                application_name="fastpipe",
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                options=f"-c statement_timeout={_STATEMENT_MS} -c lock_timeout={_STATEMENT_MS} "
                f"-c idle_in_transaction_session_timeout={_IDLE_MS}",
            )
        except self._psycopg.OperationalError as error:
            # A worker that is joining need not wait for this error to go away. A worker in progress waits, because a
            # backup may be being restored.
            if create and any(wrong in str(error) for wrong in _WRONG):
                raise self.fault(error) from None
            raise
        return PostgresConnection(found)

    def passes(self, error: BaseException) -> bool:
        if not isinstance(error, self._psycopg.Error):
            return False
        state = error.sqlstate
        # Without a state, the connection was lost or couldn't be established.
        return (
            isinstance(error, self._psycopg.OperationalError)
            if state is None
            else (state[:2] in _PASSING or state in _PASSING_STATES)
        )

    def fault(self, error: BaseException) -> BaseException:
        if not isinstance(error, self._psycopg.Error):
            return error
        told = " ".join(str(error).split())
        if self._secret:
            told = told.replace(self._secret, "***")
        return LedgerError(f"the ledger {self.shown}: {told}")


class PostgresConnection(Connection):
    """A connection to PostgreSQL."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._connection.transaction():
            yield

    def rows(self, statement: str, /, **parameters: Any) -> list[Row]:
        with self._connection.cursor() as cursor:
            cursor.execute(_text(statement), parameters)
            return list(cursor.fetchall()) if cursor.description else []

    def create_tables(self) -> None:
        self.rows("SELECT pg_advisory_xact_lock(:number)", number=_CREATING)
        for statement in CREATE:
            self.rows(statement)

    def has_tables(self) -> bool:
        return bool(self.rows("SELECT 1 WHERE to_regclass('fastpipe_schema') IS NOT NULL"))

    def close(self) -> None:
        self._connection.close()
