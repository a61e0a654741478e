"""DuckDB, through its own library."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Generator
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from fastpipe._arguments import shown
from fastpipe.errors import MissingFileError, UnsupportedError, in_file
from fastpipe.sql._engines import LEHMER, PRIME, Column, Engine, OneSession, Sessions, finite, fitted
from fastpipe.sql._lineage import Plain
from fastpipe.sql._query import Parameters, Query, require

if TYPE_CHECKING:
    import pyarrow as pa

# Generated names of connections to databases in memory.
_IN_MEMORY: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

# Rows per batch when the whole result is streamed.
_STREAMED = 1 << 16


class Duckdb(Engine):
    """A DuckDB database. One transaction reads partitions one after another, since DuckDB itself uses all processors.

    Args:
        path: The path of the file; None for a connection.
        connection: A duckdb connection; None for a file.
    """

    name = "DuckDB"
    dialect = "duckdb"

    def __init__(self, path: str | None, connection: Any = None) -> None:
        self._path = None if path is None else os.path.abspath(path)
        self._connection = connection
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        if path is not None and not os.path.isfile(path):
            raise in_file(MissingFileError, path, "there is no such file")
        self.where = "" if self._path is None else f" in file {self._path}"

    def hashed(self, column: Column) -> str | None:
        import pyarrow as pa

        if pa.types.is_integer(column.type):
            # The remainder of an unsigned or small integer has its type.
            return LEHMER.replace(f"{{}} % {PRIME}", f"CAST({{}} % {PRIME} AS BIGINT)")
        return f"CAST(hash({{}}) % {PRIME} AS BIGINT)"

    def key_text(self, column: str) -> str:
        return f"CAST({column} AS VARCHAR)"

    def quotient(self, dividend: str, divisor: str) -> str:
        return f"({dividend}) // ({divisor})"

    def bind(self, query: Query) -> Query:
        return query

    def sessions(self, number: int, *, snapshot: bool) -> Sessions:
        duckdb = require("duckdb", "duckdb")
        with self.errors("connecting"):
            if self._connection is not None:
                session = self._connection.cursor()
            else:
                session = duckdb.connect(self._path, read_only=True)
            # The transaction's snapshot is taken by its first query.
            for sql in ("SET TimeZone = 'UTC'", "BEGIN TRANSACTION", "SELECT count(*) FROM duckdb_tables()"):
                session.execute(sql).fetchall()
        self._sessions.add(session)
        return OneSession(session, lambda session: session.close())

    def fetch(self, session: Any, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = session.execute(sql, parameters).fetchall()
        return found

    def columns(self, session: Any, query: Query) -> list[Column]:
        result = session.sql(f"SELECT * FROM {query.derived} LIMIT 0", params=query.parameters)
        names, kinds = result.columns, [str(kind) for kind in result.dtypes]
        # A derived table adds numbers to names that appear twice.
        if any(re.search(r"_\d+$", name) for name in names):
            own = [str(row[0]) for row in self.fetch(session, f"DESCRIBE {query.text}", query.parameters)]
            lower = [name.lower() for name in own]
            names = next(([name] * len(own) for name in own if lower.count(name.lower()) > 1), names)
        types = result.to_arrow_table().schema.types
        full = self._full(session, query)
        found = (self._column(*each) for each in zip(names, kinds, types, strict=True))
        return [column._replace(nullable=column.name not in full) for column in found]

    def _full(self, session: Any, query: Query) -> set[str]:
        """Returns the columns that are declared NOT NULL."""
        if (found := self.table_of(session, query)) is None or not self._is_sole(session, found):
            return set()
        sql = (
            "SELECT column_name FROM duckdb_columns() WHERE table_name = ? AND NOT is_nullable "
            "AND schema_name = current_schema() AND database_name = current_database()"
        )
        named = (found.name_of(column) for (column,) in self.fetch(session, sql, [found.table[-1]]))
        return {name for name in named if name is not None}

    def _is_sole(self, session: Any, table: Plain) -> bool:
        """Returns whether a name can only mean a table of the current schema."""
        sql = (
            "SELECT count(*) FROM (SELECT table_name FROM duckdb_tables() UNION ALL SELECT view_name FROM "
            "duckdb_views()) WHERE lower(table_name) = lower(?)"
        )
        return len(table.table) == 1 and self.fetch(session, sql, [table.table[0]]) == [(1,)]

    def unique_keys(self, session: Any, table: Plain) -> list[str]:
        if not self._is_sole(session, table):
            return []
        sql = (
            "SELECT column_name FROM duckdb_constraints() AS k JOIN duckdb_columns() AS c ON k.table_oid = c.table_oid "
            "AND k.database_oid = c.database_oid AND constraint_column_names = [column_name] "
            "WHERE lower(k.table_name) = lower(?) AND constraint_type = 'PRIMARY KEY' "
            "AND data_type IN ('TINYINT', 'SMALLINT', 'INTEGER', 'BIGINT') "
            "AND k.schema_name = current_schema() AND k.database_name = current_database()"
        )
        return [name for (name,) in self.fetch(session, sql, [table.table[0]])]

    def widths(self, derived: str, column: str, low: int, width: int, number: int, *, joined: bool) -> str:
        ranges = f"SELECT (CAST({column} AS HUGEINT) - ({low})) // {width} AS s FROM q"
        return f"{derived} SELECT s, count(*) FROM ({ranges}) AS w GROUP BY s"

    def _column(self, name: str, kind: str, arrow: pa.DataType) -> Column:
        import pyarrow as pa

        types = pa.types
        if kind in ("UUID", "JSON", "TIME WITH TIME ZONE", "BIT", "VARINT", "BIGNUM") or kind.startswith("ENUM"):
            fitness = None if kind == "JSON" else 2
            return Column(name, pa.string(), read="CAST({} AS VARCHAR)", fitness=fitness, kind=kind)
        if kind in ("HUGEINT", "UHUGEINT"):
            return Column(name, pa.decimal128(38, 0), read="CAST({} AS DECIMAL(38, 0))", kind=kind)
        if types.is_nested(arrow):
            return Column(name, arrow, fitness=None, kind=kind)
        if types.is_interval(arrow):
            reason = f"column {name!r} is an interval: use EXTRACT(EPOCH FROM {self.quote(name)}) in the query"
            raise UnsupportedError(reason, feature=name, reason=reason)
        if types.is_string(arrow) or types.is_large_string(arrow):
            return Column(name, arrow, order=("{}", "{} COLLATE C"), fitness=2, kind=kind)
        fitness = 3 if types.is_boolean(arrow) or kind == "BLOB" else 1 if types.is_floating(arrow) else 0
        return Column(name, arrow, fitness=fitness, kind=kind)

    def read(self, session: Any, sql: str, parameters: Parameters, columns: list[Column], rows: int) -> pa.Table:
        return finite(fitted(session.sql(sql, params=parameters).to_arrow_table(), columns))

    def stream(self, session: Any, sql: str, parameters: Parameters, columns: list[Column]) -> Generator[pa.Table]:
        import pyarrow as pa

        for batch in session.sql(sql, params=parameters).to_arrow_reader(_STREAMED):
            yield finite(fitted(pa.Table.from_batches([batch]), columns))

    def cancel(self) -> None:
        for session in self._sessions:
            session.interrupt()

    def fingerprint(self) -> str:
        return f"duckdb {os.path.basename(self._path or 'connection')}"

    def identity(self) -> list[Any]:
        if self._connection is None:
            return ["duckdb", os.path.realpath(str(self._path))]
        with self.errors("looking up the database's files"), self._connection.cursor() as session:
            sql = "SELECT database_name, path, type FROM duckdb_databases() WHERE NOT internal ORDER BY ALL"
            attached = self.fetch(session, sql, None)
            ((current,),) = self.fetch(session, "SELECT current_database()", None)
        if not all(file for _, file, _ in attached):
            return ["duckdb", _IN_MEMORY.setdefault(self._connection, token_hex())]
        return ["duckdb", current, *([name, os.path.realpath(file), kind] for name, file, kind in attached)]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._connection is not None:
            raise TypeError(
                f"a reader of {shown(self._connection)} can't be pickled: open the database by its URL, duckdb:///path"
            )
        return Duckdb, (self._path,)
