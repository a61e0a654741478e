"""Any other database, by SQLAlchemy: rows come as Python's objects, one connection reads them."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastpipe.errors import SchemaError, UnsupportedError
from fastpipe.sql._engines import Column, Engine, OneSession, Sessions
from fastpipe.sql._query import Parameters, Query, require

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Alchemy"]

# Rows whose values tell the types of columns.
_LOOKED_AT = 1000
# Rows that are read at a time where all are streamed.
_STREAMED = 1 << 16

# SQLAlchemy's names of dialects, and sqlglot's.
_DIALECTS = {"mysql": "mysql", "mariadb": "mysql", "mssql": "tsql", "oracle": "oracle"}


class Alchemy(Engine):
    """A database that SQLAlchemy knows. One transaction reads all partitions, one after the other.

    Args:
        url: of SQLAlchemy.
    """

    def __init__(self, url: str) -> None:
        alchemy = require("sqlalchemy", "sql")
        try:
            backend = alchemy.make_url(url).get_backend_name()
        except alchemy.exc.ArgumentError:
            reason = "SQLAlchemy doesn't understand the URL: write mysql+pymysql://user@host/database"
            raise UnsupportedError(reason, reason=reason) from None
        self._url = url
        if backend not in ("mysql", "mariadb"):
            reason = (
                f"{backend} isn't read: fastpipe reads PostgreSQL, SQLite, DuckDB, MySQL and MariaDB. Export the "
                "result as Parquet, and read it with read_parquet"
            )
            raise UnsupportedError(reason, reason=reason)
        self._engine = alchemy.create_engine(url, poolclass=alchemy.NullPool)
        self.name = "MariaDB" if backend == "mariadb" else "MySQL"  # type: ignore[misc]
        self.dialect = _DIALECTS[backend]  # type: ignore[misc]

    def quote(self, name: str) -> str:
        return "`" + name.replace("`", "``").replace("%", "%%") + "`"

    def literal(self, text: str, column: Column) -> str:
        alchemy = require("sqlalchemy", "sql")
        import pyarrow as pa

        if pa.types.is_binary(column.type):
            return f"x'{text}'"
        if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type) or pa.types.is_floating(column.type):
            # Text that the database made of a number.
            decimal.Decimal(text)
            return text
        processor = alchemy.String().literal_processor(self._engine.dialect)
        # Percent signs are doubled: the driver formats all queries.
        return str(processor(text))

    def key_text(self, column: str) -> str:
        return f"CASE WHEN {column} IS NULL THEN NULL ELSE CAST({column} AS CHAR) END"

    def quotient(self, dividend: str, divisor: str) -> str:
        return f"({dividend}) DIV ({divisor})"

    def bind(self, query: Query) -> Query:
        """The query as a driver takes it that formats: without parameters its percent signs are its own."""
        return query if query.parameters else Query(query.text.replace("%", "%%"))

    def _connect(self) -> Any:
        session = self._engine.connect()
        session = session.execution_options(isolation_level="REPEATABLE READ")
        session.exec_driver_sql("SET SESSION time_zone = '+00:00'")
        session.exec_driver_sql("SET SESSION sql_mode = CONCAT(@@sql_mode, ',NO_BACKSLASH_ESCAPES')")
        session.commit()
        session.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        return session

    def sessions(self, number: int, *, snapshot: bool) -> Sessions:
        with self.errors("connecting"):
            return OneSession(self._connect(), lambda session: session.close())

    def fetch(self, session: Any, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._run(session, sql, parameters)]

    def _run(self, session: Any, sql: str, parameters: Parameters) -> Any:
        """Runs a query as the driver takes it, so that colons in it are no placeholders."""
        if parameters:
            bound: Any = dict(parameters) if hasattr(parameters, "keys") else tuple(parameters)
            return session.exec_driver_sql(sql, bound)
        return session.exec_driver_sql(sql)

    def columns(self, session: Any, query: Query) -> list[Column]:
        result = self._run(session, f"SELECT * FROM {query.derived} LIMIT {_LOOKED_AT}", query.parameters)
        names, rows = list(result.keys()), result.fetchall()
        described = result.cursor.description if result.cursor is not None else None
        codes = [column[1] for column in described] if described else [None] * len(names)
        return [
            self._column(name, [row[i] for row in rows if row[i] is not None], codes[i]) for i, name in enumerate(names)
        ]

    def _column(self, name: str, values: list[Any], code: Any) -> Column:
        import pyarrow as pa

        kinds = {type(value) for value in values}
        text = ("{}", "BINARY {}")
        if kinds <= {int} and kinds:
            return Column(name, pa.int64())
        if kinds == {float}:
            return Column(name, pa.float64(), fitness=1)
        if kinds == {decimal.Decimal}:
            scale = max(0, *(-int(value.as_tuple().exponent) for value in values))
            return Column(name, pa.decimal128(38, scale))
        if kinds == {str} or not kinds:
            return Column(name, pa.string(), order=text, fitness=2)
        if kinds == {bytes}:
            return Column(name, pa.binary(), fitness=None)
        if kinds == {datetime.datetime}:
            return Column(name, pa.timestamp("us"))
        if kinds == {datetime.date}:
            return Column(name, pa.date32())
        if kinds == {datetime.timedelta}:
            return Column(name, pa.duration("us"))
        told = ", ".join(sorted(kind.__name__ for kind in kinds))
        reason = f"column {name!r} is {told}, which isn't read: write CAST({self.quote(name)} AS CHAR) in the query"
        raise UnsupportedError(reason, feature=name, reason=reason)

    def read(self, session: Any, sql: str, parameters: Parameters, columns: list[Column], rows: int) -> pa.Table:
        return _table(self._run(session, sql, parameters).fetchall(), columns)

    def stream(self, session: Any, sql: str, parameters: Parameters, columns: list[Column]) -> Iterator[pa.Table]:
        result = self._run(session, sql, parameters)
        while rows := result.fetchmany(_STREAMED):
            yield _table(rows, columns)

    def fingerprint(self) -> str:
        return f"{self._engine.url.get_backend_name()} {self._engine.url.database}"

    def cleaned(self, text: str) -> str:
        text = text.partition("\n[SQL:")[0]
        password = self._engine.url.password
        return text.replace(str(password), "***") if password else text

    def __reduce__(self) -> tuple[Any, ...]:
        return Alchemy, (self._url,)


def _table(rows: Any, columns: list[Column]) -> pa.Table:
    import pyarrow as pa

    values = list(zip(*rows, strict=True)) if rows else [()] * len(columns)
    arrays = []
    for column, each in zip(columns, values, strict=True):
        try:
            arrays.append(pa.array(each, column.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            reason = (
                f"column {column.name!r} is {column.type} in the first rows, and other rows don't fit: {error}. Write "
                "CAST(... AS ...) in the query"
            )
            raise SchemaError(reason, feature=column.name, reason=reason) from None
    return pa.table(arrays, names=[column.name for column in columns])
