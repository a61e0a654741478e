"""What a ledger asks of its database: transactions of statements, a clock, and which faults pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Row = tuple[Any, ...]


class Connection(ABC):
    """A connection to a database, for one thread at a time."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """A transaction that writes: committed at the end of the block, rolled back by an exception."""

    @abstractmethod
    def rows(self, statement: str, /, **parameters: Any) -> list[Row]:
        """Runs a statement of `_tables`, and returns the rows that it yields."""

    @abstractmethod
    def create_tables(self) -> None:
        """Creates the tables where they are missing, however many do so at once. Within a transaction."""

    @abstractmethod
    def has_tables(self) -> bool:
        """Whether there are tables of a ledger."""

    @abstractmethod
    def close(self) -> None:
        """Closes it; twice does no harm."""


class Database(ABC):
    """A database that holds a ledger.

    Attributes:
        shown: its URL as messages show it, without a password.
    """

    shown: str

    @abstractmethod
    def connect(self, *, create: bool) -> Connection:
        """Connects.

        Args:
            create: whether a database that is a file may be created.

        Raises:
            LedgerError: as `fault` words it.
            MissingFileError: if the database is a file that isn't there, and isn't to be created.
        """

    @abstractmethod
    def passes(self, error: BaseException) -> bool:
        """Whether an error may go away by itself: the same transaction, on a new connection, may succeed later."""

    @abstractmethod
    def fault(self, error: BaseException) -> BaseException:
        """An error of the driver as an error of fastpipe, without passwords; any other one as it is."""

    @contextmanager
    def connected(self, *, create: bool = False) -> Iterator[Connection]:
        """A connection for the block; errors of the driver come out of it as errors of fastpipe."""
        connection = None
        try:
            connection = self.connect(create=create)
            yield connection
        except Exception as error:
            told = self.fault(error)
            if told is error:
                raise
            raise told from None
        finally:
            if connection is not None:
                connection.close()


def database_of(url: object) -> Database:
    """The database of a URL.

    Raises:
        ImportError: if its driver isn't installed.
        TypeError: if the URL is no string.
        ValueError: if it is of no database that can hold a ledger.
    """
    if not isinstance(url, str):
        raise TypeError(f"the URL of a ledger is a string, not {type(url).__name__}")
    scheme, colon, _ = url.partition("://")
    if scheme == "sqlite" and colon:
        from fastpipe.leases._sqlite import Sqlite

        return Sqlite.of(url)
    if scheme in ("postgresql", "postgres") and colon:
        from fastpipe.leases._postgres import Postgres

        return Postgres.of(url)
    raise ValueError(
        f"a ledger is in PostgreSQL or SQLite, and its URL begins with postgresql:// or sqlite:///; this one begins"
        f" with {scheme + colon if colon else scheme[:12]!r}. On one machine a file is enough: sqlite:///ledger.db"
    )
