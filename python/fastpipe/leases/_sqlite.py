"""A ledger in an SQLite file, for workers on one machine.

The file is in WAL mode, so that `status` doesn't wait for workers. Each write transaction first takes the file's only
write lock (`BEGIN IMMEDIATE`) and syncs the file to disk, so an acknowledged commit survives a power failure.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self
from urllib.parse import quote, unquote

from fastpipe.errors import LedgerError, MissingFileError, UnsupportedError
from fastpipe.leases._database import Connection, Database, Row
from fastpipe.leases._tables import CREATE

# The oldest SQLite that supports `UPDATE ... FROM`, `RETURNING` and `MATERIALIZED`.
_OLDEST = (3, 35, 0)
# Transient errors as primary result codes of SQLite: busy, locked, I/O error, disk full, and cannot open.
_PASSING = {5, 6, 10, 13, 14}
_BUSY_SECONDS = 5.0
_BUSY_PAUSE = 0.01


@cache
def _text(statement: str) -> str:
    return statement.format(now=":now", skip_locked="", for_update="")


class Sqlite(Database):
    """A ledger in an SQLite file.

    Args:
        path: Path of the file.
        clock: Function that returns seconds since 1970. Tests replace it. Defaults to this machine's clock.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        if sqlite3.sqlite_version_info < _OLDEST:
            raise UnsupportedError(
                f"a ledger in a file requires SQLite 3.35 or newer, but Python has {sqlite3.sqlite_version}:"
                " install a newer Python, or use PostgreSQL"
            )
        self.path = os.path.abspath(path)
        self.clock = clock
        self.shown = f"sqlite:///{self.path}"

    @classmethod
    def of(cls, url: str) -> Self:
        """Returns the database for a URL in SQLAlchemy's syntax: `sqlite:///relative.db` or `sqlite:////absolute.db`."""
        host, slash, path = url.removeprefix("sqlite://").partition("/")
        if host or not slash or not path or path == ":memory:":
            raise ValueError(
                "the URL of a ledger in a file needs three slashes and a path: sqlite:///ledger.db for one in the"
                f" working directory and sqlite:////data/ledger.db for /data/ledger.db; got {url!r}"
            )
        return cls(unquote(path.partition("?")[0]))

    def connect(self, *, create: bool) -> SqliteConnection:
        if not create and not os.path.exists(self.path):
            raise MissingFileError(
                f"the ledger {self.path} does not exist: reader.lease(...) creates one", path=self.path
            )
        if not os.path.isdir(os.path.dirname(self.path)):
            # Raise now instead of retrying: SQLite reports the same code when too many files are open, which is
            # transient.
            raise LedgerError(f"the ledger {self.shown} can't be opened: its folder must exist", path=self.path)
        mode = "rwc" if create else "rw"
        found = sqlite3.connect(
            f"file:{quote(self.path)}?mode={mode}",
            uri=True,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            _set_wal(found)
            found.execute("PRAGMA synchronous=FULL")
        except BaseException:
            found.close()
            raise
        return SqliteConnection(found, self)

    def passes(self, error: BaseException) -> bool:
        return isinstance(error, sqlite3.OperationalError) and _code(error) & 0xFF in _PASSING

    def fault(self, error: BaseException) -> BaseException:
        if not isinstance(error, sqlite3.Error):
            return error
        hints = {
            5: "another process holds its lock",
            8: "the file or its folder is read-only, but workers must write to it",
            11: "the file is damaged",
            13: "the disk is full",
            14: "the file can't be opened: its folder must exist and be writable",
            26: "the file is not an SQLite database",
        }
        hint = hints.get(_code(error) & 0xFF)
        return LedgerError(f"the ledger {self.shown}: {error}{f' ({hint})' if hint else ''}", path=self.path)


def _set_wal(connection: sqlite3.Connection) -> None:
    """Switches a file to WAL mode. Retries, because SQLite doesn't wait for other connections that switch it."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if _code(error) & 0xFF not in (5, 6) or time.monotonic() > deadline:
                raise
        time.sleep(_BUSY_PAUSE)


def _file_at(path: str) -> tuple[int, int] | None:
    """Returns the device and inode of a file, which identify it, or None if it doesn't exist."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _code(error: sqlite3.Error) -> int:
    # Errors raised by the `sqlite3` module itself have no code.
    return int(getattr(error, "sqlite_errorcode", 0) or 0)


class SqliteConnection(Connection):
    """A connection to an SQLite file."""

    def __init__(self, connection: sqlite3.Connection, database: Sqlite) -> None:
        self._connection, self._database = connection, database
        self._clock = database.clock
        self._file = _file_at(database.path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            # If the disk is full, SQLite has already rolled back.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        self._check_file()

    def _check_file(self) -> None:
        """Checks that the ledger's path still refers to the open file. A commit to a deleted file would be lost.

        Raises:
            LedgerError: If the file was deleted or replaced.
        """
        found = _file_at(self._database.path)
        if found != self._file:
            what = "deleted" if found is None else "replaced by another file"
            raise LedgerError(
                f"the ledger {self._database.shown} was {what} while it was in use: other workers don't see"
                " later commits. Put the file back and lease again, or restore a checkpoint with Ledger.restore()",
                path=self._database.path,
            )

    def rows(self, statement: str, /, **parameters: Any) -> list[Row]:
        return self._connection.execute(_text(statement), parameters | {"now": self._clock()}).fetchall()

    def create_tables(self) -> None:
        for statement in CREATE:
            self._connection.execute(statement)

    def has_tables(self) -> bool:
        return bool(self.rows("SELECT 1 FROM sqlite_master WHERE name = 'fastpipe_schema'"))

    def close(self) -> None:
        self._connection.close()
