"""ADBC: sessions that share a database, and statements that Ctrl-C can interrupt immediately."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fastpipe.sql._query import Parameters, require

if TYPE_CHECKING:
    import pyarrow as pa


def without_transaction(connection: Any) -> Any:
    """Enables autocommit on a connection of a user's factory. Sessions begin their own transactions."""
    connection.adbc_connection.set_autocommit(True)
    return connection


class SharedDatabase:
    """An ADBC database that outlives its sessions. Its first session is 15 times slower to open than later ones.

    Clones of a connection also share a database. That database is closed with the last clone, and the driver crashes if
    another clone is opened at the same time.

    Args:
        connect: A function that returns an `AdbcDatabase`.
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
            # A forked process doesn't close the connections of its parent.
            with contextlib.suppress(Exception):
                self._database.close()


class _Session:
    """A session, with the attributes of a connection of `adbc_driver_manager.dbapi` that are used."""

    def __init__(self, connection: Any, database: SharedDatabase) -> None:
        self.adbc_connection, self._database = connection, database

    def close(self) -> None:
        with self._database.lock:
            self.adbc_connection.close()


class Statements:
    """Running statements of the connections of one database.

    ADBC's cursors handle Ctrl-C themselves while they wait. If a driver can't cancel a query (SQLite's can't), they
    wait until the query ends. Statements are therefore run without cursors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Any] = []

    @contextlib.contextmanager
    def run(
        self, session: Any, sql: str, parameters: Parameters = None, **options: str
    ) -> Iterator[pa.RecordBatchReader]:
        """Runs a query and yields a reader of its result.

        Args:
            session: An ADBC connection.
            sql: The query.
            parameters: The values of its placeholders, by position.
            options: Options of the statement.
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
        """Returns the rows of a small query."""
        with self.run(session, sql, parameters) as reader:
            table = reader.read_all()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def parameters(self, session: Any, sql: str) -> list[str]:
        """Returns the names of a query's placeholders."""
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
        """Cancels running statements, if the driver supports it."""
        with self._lock:
            for statement in self._running:
                with contextlib.suppress(Exception):
                    statement.cancel()
