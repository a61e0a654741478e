"""A ledger in a file of SQLite: for workers of one machine.

The file is in WAL mode, so that `status` doesn't wait for workers. Each transaction that writes takes the one lock of
the file first (`BEGIN IMMEDIATE`) and is synchronized to the disk: a commit that was acknowledged outlives a power cut.
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

# `UPDATE ... FROM`, `RETURNING` and `MATERIALIZED`.
_OLDEST = (3, 35, 0)
# Busy, locked, I/O error, disk full, can't be opened: SQLite's primary result codes.
_PASSING = {5, 6, 10, 13, 14}
_BUSY_SECONDS = 5.0
_BUSY_PAUSE = 0.01


@cache
def _text(statement: str) -> str:
    return statement.format(now=":now", skip_locked="", for_update="")


class Sqlite(Database):
    """A ledger in a file.

    Args:
        path: of the file.
        clock: seconds since 1970; this machine's clock, but in tests.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        if sqlite3.sqlite_version_info < _OLDEST:
            raise UnsupportedError(
                f"a ledger in a file needs SQLite 3.35 or newer, and Python's is {sqlite3.sqlite_version}:"
                " a newer Python brings one, and PostgreSQL holds ledgers, too"
            )
        self.path = os.path.abspath(path)
        self.clock = clock
        self.shown = f"sqlite:///{self.path}"

    @classmethod
    def of(cls, url: str) -> Self:
        """The database of a URL: `sqlite:///relative.db` or `sqlite:////absolute.db`, as SQLAlchemy has them."""
        host, slash, path = url.removeprefix("sqlite://").partition("/")
        if host or not slash or not path or path == ":memory:":
            raise ValueError(
                "the URL of a ledger in a file has three slashes and a path, sqlite:///ledger.db for one in the working"
                f" directory and sqlite:////data/ledger.db for /data/ledger.db; this one is {url!r}"
            )
        return cls(unquote(path.partition("?")[0]))

    def connect(self, *, create: bool) -> SqliteConnection:
        if not create and not os.path.exists(self.path):
            raise MissingFileError(f"there is no ledger {self.path}: reader.lease(...) makes one", path=self.path)
        if not os.path.isdir(os.path.dirname(self.path)):
            # No reason to wait: SQLite says the same where too many files are open.
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
            8: "the file or its folder is read-only, and workers write to it",
            11: "the file is damaged",
            13: "the disk is full",
            14: "the file can't be opened: its folder must exist, and be writable",
            26: "the file is no database of SQLite",
        }
        hint = hints.get(_code(error) & 0xFF)
        return LedgerError(f"the ledger {self.shown}: {error}{f' ({hint})' if hint else ''}", path=self.path)


def _set_wal(connection: sqlite3.Connection) -> None:
    """Puts a file into WAL mode. Where others do so at the same time SQLite fails at once, without waiting."""
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
    """What tells the file at a path from others; None if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _code(error: sqlite3.Error) -> int:
    # Errors of the module itself have none.
    return int(getattr(error, "sqlite_errorcode", 0) or 0)


class SqliteConnection(Connection):
    """A connection to a file."""

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
            # A full disk has rolled back already.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        self._check_file()

    def _check_file(self) -> None:
        """Whether the file is still where others look for it: a commit to one that was deleted is lost.

        Raises:
            LedgerError: if it was deleted or replaced.
        """
        found = _file_at(self._database.path)
        if found != self._file:
            what = "deleted" if found is None else "replaced by another file"
            raise LedgerError(
                f"the ledger {self._database.shown} was {what} while it was in use, and others don't see what was"
                " committed since. Put the file back and lease again, or Ledger.restore() a checkpoint",
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
