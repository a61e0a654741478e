"""ADBC: sessions that share a database, and statements, run so that Ctrl-C takes effect immediately."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fastpipe.sources.sql._query import Parameters, require

if TYPE_CHECKING:
    import pyarrow as pa


def without_transaction(connection: Any) -> Any:
    """A connection of a user's factory, which may have begun a transaction: sessions begin their own."""
    connection.adbc_connection.set_autocommit(True)
    return connection


class SharedDatabase:
    """A database as ADBC has it, opened with the first session, which takes fifteen times as long as the others.

    Clones of a connection share a database, too, but it is closed with the last of them, and the driver crashes where
    another is opened meanwhile. This one outlives its sessions.

    Args:
        connect: returns an `AdbcDatabase`.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._database: Any = None
        self.lock = threading.Lock()

    def session(self) -> _Session:
        """Opens a session."""
        manager = require("adbc_driver_manager", "sql")
        # The driver counts its connections without a lock.
        with self.lock:
            if self._database is None:
                self._database = self._connect()
            return _Session(manager.AdbcConnection(self._database), self)

    def __del__(self) -> None:
        if self._database is not None:
            # A process that was forked doesn't close its connections.
            with contextlib.suppress(Exception):
                self._database.close()


class _Session:
    """A session, with what of a connection of `adbc_driver_manager.dbapi` is used."""

    def __init__(self, connection: Any, database: SharedDatabase) -> None:
        self.adbc_connection, self._database = connection, database

    def close(self) -> None:
        with self._database.lock:
            self.adbc_connection.close()


class Statements:
    """Statements that are being run, of connections of one database.

    ADBC's cursors take Ctrl-C for themselves while they wait, and where a driver can't cancel a query (SQLite's) they
    wait until it ends. So statements are run without cursors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Any] = []

    @contextlib.contextmanager
    def run(
        self, session: Any, sql: str, parameters: Parameters = None, **options: str
    ) -> Iterator[pa.RecordBatchReader]:
        """Runs a query, and reads what it returns.

        Args:
            session: a connection of ADBC.
            sql: the query.
            parameters: bound to it, by position.
            options: of the statement.
        """
        import pyarrow as pa

        manager = require("adbc_driver_manager", "sql")
        statement = manager.AdbcStatement(session.adbc_connection)
        with self._lock:
            self._running.append(statement)
        try:
            statement.set_options(**options)
            statement.set_sql_query(sql)
            if parameters:
                statement.prepare()
                names = [str(i) for i in range(len(parameters))]
                row = pa.record_batch([pa.array([value]) for value in parameters], names=names)
                schema, array = row.__arrow_c_array__()
                statement.bind(array, schema)
            handle, _ = statement.execute_query()
            with pa.RecordBatchReader.from_stream(handle) as reader:
                yield reader
        finally:
            with self._lock:
                self._running.remove(statement)
            statement.close()

    def fetch(self, session: Any, sql: str, parameters: Parameters = None) -> list[tuple[Any, ...]]:
        """The few rows of a query."""
        with self.run(session, sql, parameters) as reader:
            table = reader.read_all()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def parameters(self, session: Any, sql: str) -> list[str]:
        """The names of a query's placeholders."""
        import pyarrow as pa

        manager = require("adbc_driver_manager", "sql")
        statement = manager.AdbcStatement(session.adbc_connection)
        try:
            statement.set_sql_query(sql)
            statement.prepare()
            return list(pa.schema(statement.get_parameter_schema()).names)
        finally:
            statement.close()

    def cancel(self) -> None:
        """Cancels what is run, where the driver can."""
        with self._lock:
            for statement in self._running:
                with contextlib.suppress(Exception):
                    statement.cancel()
