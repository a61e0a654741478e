"""The interface to the ledger's database: transactions, a clock, and a classification of transient errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Row = tuple[Any, ...]


class Connection(ABC):
    """A database connection, used by one thread at a time."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Opens a write transaction. It commits at the end of the block and rolls back on an exception."""

    @abstractmethod
    def rows(self, statement: str, /, **parameters: Any) -> list[Row]:
        """Runs a statement of `_tables` and returns its rows."""

    @abstractmethod
    def create_tables(self) -> None:
        """Creates missing tables. Safe to call from several processes at once. Call it within a transaction."""

    @abstractmethod
    def has_tables(self) -> bool:
        """Returns whether the database contains the tables of a ledger."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connection. Calling it twice has no effect."""


class Database(ABC):
    """A database that contains a ledger.

    Attributes:
        shown: URL for messages, without the password.
    """

    shown: str

    @abstractmethod
    def connect(self, *, create: bool) -> Connection:
        """Connects to the database.

        Args:
            create: Whether to create the file of a file-based database if it doesn't exist.

        Raises:
            LedgerError: If the connection fails, with the message of `fault`.
            MissingFileError: If the database's file doesn't exist and `create` is False.
        """

    @abstractmethod
    def passes(self, error: BaseException) -> bool:
        """Returns whether an error is transient: the same transaction may succeed later on a new connection."""

    @abstractmethod
    def fault(self, error: BaseException) -> BaseException:
        """Converts an error of the driver to a fastpipe error without passwords. Returns any other error unchanged."""

    @contextmanager
    def connected(self, *, create: bool = False) -> Iterator[Connection]:
        """Opens a connection for the block, and converts errors of the driver to fastpipe errors."""
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
    """Returns the database for a URL.

    Raises:
        ImportError: If the database's driver isn't installed.
        TypeError: If the URL isn't a string.
        ValueError: If the URL isn't one of a supported database.
    """
    if not isinstance(url, str):
        raise TypeError(f"the URL of a ledger must be a string; got {type(url).__name__}")
    scheme, colon, _ = url.partition("://")
    if scheme == "sqlite" and colon:
        from fastpipe.leases._sqlite import Sqlite

        return Sqlite.of(url)
    if scheme in ("postgresql", "postgres") and colon:
        from fastpipe.leases._postgres import Postgres

        return Postgres.of(url)
    raise ValueError(
        f"a ledger needs PostgreSQL or SQLite: its URL must begin with postgresql:// or sqlite:///, but this one begins"
        f" with {scheme + colon if colon else scheme[:12]!r}. On one machine a file is enough: sqlite:///ledger.db"
    )
