"""Statements of ADBC, run so that Ctrl-C takes effect immediately."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastpipe.sql._query import Parameters, require

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Statements"]


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
