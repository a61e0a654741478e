"""Other databases through SQLAlchemy, whose rows are Python objects. One connection reads all partitions."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import re
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from fastpipe._arguments import shown
from fastpipe.errors import SchemaError, UnsupportedError
from fastpipe.sql._engines import PRIME, Column, Engine, OneSession, Sessions
from fastpipe.sql._query import Parameters, Query, require

if TYPE_CHECKING:
    import pyarrow as pa

# The number of rows whose values determine the types of columns.
_LOOKED_AT = 1000
# Rows per fetch when the whole result is streamed.
_STREAMED = 1 << 16

# Type codes in the MySQL protocol, which all drivers report: FLOAT, BIGINT and DECIMAL; then JSON and STRING. STRING
# covers CHAR, ENUM, SET and UUID. MySQL sorts ENUM, SET and UUID by other values than it uses to compare them with
# text.
_FLOAT, _BIGINT, _DECIMAL = 4, 8, 246
_COMPARED_AS_TEXT = (245, 254)
# TINYINT, SMALLINT, INT, BIGINT and MEDIUMINT, and the kind of their columns.
_INTEGERS, _INTEGER = (1, 2, 3, 8, 9), "integer"
_PLAIN_TEXT = re.compile(r"[\w .,:;/+-]*", re.ASCII)

# SQLAlchemy's names of dialects, with sqlglot's names.
_DIALECTS = {"mysql": "mysql", "mariadb": "mysql", "mssql": "tsql", "oracle": "oracle"}


class Alchemy(Engine):
    """A database that SQLAlchemy supports. One transaction reads all partitions, one after another.

    Args:
        url: The SQLAlchemy URL.
        engine: The user's engine, which opens connections; None to create one from the URL.
        factory: The user's function that returned the engine. It is called again in other processes.
    """

    def __init__(self, url: str, engine: Any = None, factory: Callable[[], Any] | None = None) -> None:
        alchemy = require("sqlalchemy", "sql")
        try:
            backend = alchemy.make_url(url).get_backend_name()
        except (alchemy.exc.ArgumentError, ValueError):
            reason = "SQLAlchemy doesn't understand the URL: use mysql+pymysql://user@host/database"
            raise UnsupportedError(reason, reason=reason) from None
        self._url = url
        if backend not in ("mysql", "mariadb"):
            reason = (
                f"{backend} is not supported: fastpipe reads PostgreSQL, SQLite, DuckDB, MySQL and MariaDB. Export the "
                "result as Parquet, and read it with read_parquet"
            )
            raise UnsupportedError(reason, reason=reason)
        self._of_user, self._factory = engine is not None, factory
        self._engine = engine if self._of_user else _made(url)
        self.name = "MariaDB" if backend == "mariadb" else "MySQL"  # type: ignore[misc]
        self.dialect = _DIALECTS[backend]  # type: ignore[misc]
        # Drivers that format queries need doubled percent signs.
        self._percent = "%%" if self._engine.dialect.paramstyle in ("format", "pyformat") else "%"

    def quote(self, name: str) -> str:
        return "`" + name.replace("`", "``").replace("%", self._percent) + "`"

    def literal(self, text: str, column: Column) -> str:
        import pyarrow as pa

        if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type) or pa.types.is_floating(column.type):
            # The database converted a number to this text.
            decimal.Decimal(text)
            return text
        # sql_mode decides whether backslashes are escapes, so text with backslashes or quotes is written in
        # hexadecimal.
        return f"'{text}'" if _PLAIN_TEXT.fullmatch(text) else f"_utf8mb4 x'{text.encode().hex()}'"

    def hashed(self, column: Column) -> str | None:
        if column.kind == _INTEGER:
            return f"MOD(ABS(MOD({{}}, {PRIME})) * 1583458089, {PRIME})"
        return f"MOD(CRC32({{}}), {PRIME})"

    def remainder(self, dividend: str, divisor: int) -> str:
        # Drivers that format queries would need a doubled percent sign.
        return f"MOD({dividend}, {divisor})"

    def key_text(self, column: str) -> str:
        return f"CASE WHEN {column} IS NULL THEN NULL ELSE CAST({column} AS CHAR) END"

    def quotient(self, dividend: str, divisor: str) -> str:
        return f"({dividend}) DIV ({divisor})"

    def bind(self, query: Query) -> Query:
        """Returns the query for a driver that formats it. Without parameters, percent signs are literal."""
        return query if query.parameters else Query(query.text.replace("%", self._percent))

    def _connect(self) -> Any:
        session = self._engine.connect().execution_options(isolation_level="REPEATABLE READ")
        # The session is closed and not returned to a pool, where its settings would affect other users.
        session.detach()
        session.exec_driver_sql("SET SESSION time_zone = '+00:00'")
        session.commit()
        session.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        return session

    def sessions(self, number: int, *, snapshot: bool) -> Sessions:
        with self.errors("connecting"):
            return OneSession(self._connect(), lambda session: session.close())

    def fetch(self, session: Any, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._run(session, sql, parameters)]

    def _run(self, session: Any, sql: str, parameters: Parameters) -> Any:
        """Runs a query with the driver's own placeholders, so that colons are not placeholders."""
        if parameters:
            bound: Any = dict(parameters) if hasattr(parameters, "keys") else tuple(parameters)
            return session.exec_driver_sql(sql, bound)
        # Some drivers format a query without parameters unless this option is set, and some don't.
        return session.exec_driver_sql(sql.replace(self._percent, "%"), execution_options={"no_parameters": True})

    def columns(self, session: Any, query: Query) -> list[Column]:
        import pyarrow as pa

        result = self._run(session, f"SELECT * FROM {query.derived} LIMIT {_LOOKED_AT}", query.parameters)
        names, codes = list(result.keys()), [column[1] for column in result.cursor.description]
        rows = result.fetchall()
        unsigned = self._unsigned(session, query, [n for n, code in zip(names, codes, strict=True) if code == _BIGINT])
        values = [[row[i] for row in rows if row[i] is not None] for i in range(len(names))]
        for i, name in enumerate(names):
            if not values[i]:
                column = self.quote(name)
                sql = f"SELECT {column} FROM {query.derived} WHERE {column} IS NOT NULL LIMIT 1"
                values[i] = [row[0] for row in self._run(session, sql, query.parameters)]
        columns = [self._column(*each) for each in zip(names, values, codes, strict=True)]
        # Hashes depend on the declared type, because the first rows may change.
        found = [c._replace(kind=_INTEGER if code in _INTEGERS else "") for c, code in zip(columns, codes, strict=True)]
        return [c._replace(type=pa.uint64()) if c.name in unsigned else c for c in found]

    def _unsigned(self, session: Any, query: Query, names: list[str]) -> set[str]:
        """Returns the BIGINT columns that are unsigned. With a negative number, the database makes them DECIMAL."""
        if not names:
            return set()
        selected = ", ".join(f"IFNULL({self.quote(name)}, -1)" for name in names)
        result = self._run(session, f"SELECT {selected} FROM {query.derived} LIMIT 0", query.parameters)
        codes = [column[1] for column in result.cursor.description]
        result.close()
        return {name for name, code in zip(names, codes, strict=True) if code == _DECIMAL}

    def _column(self, name: str, values: list[Any], code: Any) -> Column:
        import pyarrow as pa

        kinds = {type(value) for value in values}
        text = ("{}", "BINARY {}")
        if kinds <= {int} and kinds:
            return Column(name, pa.int64())
        if kinds == {float}:
            # The text of a FLOAT has fewer digits than its value.
            return Column(name, pa.float64(), fitness=1, key="({} + 0E0)" if code == _FLOAT else "{}")
        if kinds == {decimal.Decimal}:
            scale = max(0, *(-int(value.as_tuple().exponent) for value in values))
            return Column(name, pa.decimal128(38, scale))
        if kinds == {str} or not kinds:
            key = "CAST({} AS CHAR)" if code in _COMPARED_AS_TEXT else "{}"
            return Column(name, pa.string(), order=text, fitness=2, key=key)
        if kinds == {bytes}:
            return Column(name, pa.binary(), fitness=None)
        if kinds == {datetime.datetime}:
            return Column(name, pa.timestamp("us"))
        if kinds == {datetime.date}:
            return Column(name, pa.date32())
        if kinds == {datetime.timedelta}:
            return Column(name, pa.duration("us"))
        told = ", ".join(sorted(kind.__name__ for kind in kinds))
        reason = f"column {name!r} is {told}, which is not supported: use CAST({self.quote(name)} AS CHAR) in the query"
        raise UnsupportedError(reason, feature=name, reason=reason)

    def read(self, session: Any, sql: str, parameters: Parameters, columns: list[Column], rows: int) -> pa.Table:
        return _table(self._run(session, sql, parameters).fetchall(), columns)

    def stream(self, session: Any, sql: str, parameters: Parameters, columns: list[Column]) -> Generator[pa.Table]:
        result = self._run(session, sql, parameters)
        while rows := result.fetchmany(_STREAMED):
            yield _table(rows, columns)

    def fingerprint(self) -> str:
        return f"{self._engine.url.get_backend_name()} {self._engine.url.database}"

    def identity(self) -> list[Any]:
        url = self._engine.url.render_as_string(hide_password=True)
        if not self._of_user:
            return [url]
        sql = "SELECT @@hostname, @@port, @@datadir, DATABASE(), CURRENT_USER(), @@sql_mode"
        with self.errors("looking up which server this is"), contextlib.closing(self._connect()) as session:
            return [url, *self.fetch(session, sql, None)]

    def cleaned(self, text: str) -> str:
        text = text.partition("\n[SQL:")[0]
        password = self._engine.url.password
        return text.replace(str(password), "***") if password else text

    def __reduce__(self) -> tuple[Any, ...]:
        if self._factory is not None:
            return _of_factory, (self._factory,)
        if self._of_user:
            raise TypeError(
                f"a reader of {shown(self._engine)} can't be pickled: pass the database's URL, mysql+pymysql://…, or a "
                "function that returns the Engine"
            )
        return Alchemy, (self._url,)


def _of_factory(factory: Callable[[], Any]) -> Alchemy:
    engine = factory()
    return Alchemy(engine.url.render_as_string(hide_password=False), engine, factory)


def _made(url: str) -> Any:
    """Creates an engine that keeps no connections."""
    alchemy = require("sqlalchemy", "sql")
    try:
        return alchemy.create_engine(url, poolclass=alchemy.NullPool)
    except ImportError as error:
        driver = alchemy.make_url(url).get_driver_name()
        raise ImportError(
            f"SQLAlchemy can't import {driver}, the driver in the URL: install it, or use mysql+pymysql:// and run "
            "pip install pymysql"
        ) from error
    except alchemy.exc.SQLAlchemyError as error:
        reason = f"SQLAlchemy doesn't accept the URL: {error}. Use mysql+pymysql://user@host/database"
        raise UnsupportedError(reason, reason=reason) from None


def _table(rows: Any, columns: list[Column]) -> pa.Table:
    import pyarrow as pa

    values = list(zip(*rows, strict=True)) if rows else [()] * len(columns)
    arrays = []
    for column, each in zip(columns, values, strict=True):
        try:
            arrays.append(pa.array(each, column.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            reason = (
                f"column {column.name!r} is {column.type} in the first rows, but other rows don't fit: {error}. Use "
                "CAST(... AS ...) in the query"
            )
            raise SchemaError(reason, feature=column.name, reason=reason) from None
    return pa.table(arrays, names=[column.name for column in columns])
