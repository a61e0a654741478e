"""PostgreSQL, by ADBC; psycopg tells the types of columns and binds parameters."""

from __future__ import annotations

import contextlib
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fastpipe.errors import StorageError, UnsupportedError
from fastpipe.sql._adbc import Statements
from fastpipe.sql._engines import Column, Engine, SessionPool, Sessions, fitted
from fastpipe.sql._infinite import finite
from fastpipe.sql._lineage import lone, plain
from fastpipe.sql._query import Parameters, Query, functions, require

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Postgres"]

# The same rows in the same order each time, whatever else the server does. Parallel workers of the server would add
# numbers up in any order; partitions are read at once instead.
_SETTINGS = {
    "max_parallel_workers_per_gather": "0",
    "synchronize_seqscans": "off",
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "IntervalStyle": "iso_8601",
    "bytea_output": "hex",
    "standard_conforming_strings": "on",
}

# The first day that PostgreSQL has, in days since 1970: in the year 4713 BC. ADBC counts from 1970 what the server
# counts from 2000, so what is infinite, or after the year 294246, wraps around to before.
_FIRST_DAY = -2_440_588

# Types by their names in pg_type: how they are read, and how fit they are as a key.
_AS_THEY_ARE = {
    "bool": ("bool_", 3),
    "int2": ("int16", 0),
    "int4": ("int32", 0),
    "int8": ("int64", 0),
    "float4": ("float32", 1),
    "float8": ("float64", 1),
    "text": ("string", 2),
    "varchar": ("string", 2),
    "bpchar": ("string", 2),
    "name": ("string", 2),
    "bytea": ("binary", 3),
    "date": ("date32", 0),
}
_AS_TEXT = frozenset({"uuid", "inet", "cidr", "macaddr", "macaddr8", "bit", "varbit", "citext", "tsvector", "money"})
_AS_TEXT_UNORDERED = frozenset({"json", "xml", "jsonb", "point", "jsonpath", "tsquery"})
# Arrays of several dimensions come as one, without a word. PostgreSQL appends to none of them: it raises an error.
_OF_ONE_DIMENSION = "CASE WHEN array_ndims({0}) > 1 THEN array_append({0}, NULL) ELSE {0} END"
_LISTS = {"_bool", "_int2", "_int4", "_int8", "_float4", "_float8", "_text", "_varchar"}


class Postgres(Engine):
    """A database of PostgreSQL.

    An anchor exports the snapshot of its transaction, which lives as long as it does; each session takes it over.

    Args:
        url: of libpq; with a factory, what the database is called.
        factory: returns a connection of `adbc_driver_postgresql`.
        token: of a snapshot of another process.
    """

    name = "PostgreSQL"
    dialect = "postgres"
    hash = "(hashint8({}::int8)::int8 & 2147483647)"

    def __init__(self, url: str, factory: Callable[[], Any] | None = None, token: str | None = None) -> None:
        self._url, self._factory, self._token = url, factory, token
        self._cloned: Any = None
        self._statements = Statements()
        self._lock = threading.Lock()

    def literal(self, text: str, column: Column) -> str:
        if "\0" in text:
            raise ValueError(f"PostgreSQL has no text with NUL: {text!r}")
        quoted = text.replace("'", "''")
        return f"CAST('{quoted}' AS {column.kind})"

    def key_text(self, column: str) -> str:
        return f"CAST({column} AS text)"

    def quotient(self, dividend: str, divisor: str) -> str:
        return f"div(CAST({dividend} AS numeric), CAST({divisor} AS numeric))"

    def widths(self, derived: str, column: str, low: int, width: int, number: int) -> str:
        # Distances may exceed bigint, and numeric is slow.
        exact = "bigint" if width * number < 1 << 62 else "numeric"
        stretch = f"div({column}::numeric - ({low})::numeric, {width})" if exact == "numeric" else None
        stretch = stretch or f"({column}::bigint - ({low})::bigint) / {width}::bigint"
        return f"{derived} SELECT s, count(*) FROM (SELECT {stretch} AS s FROM q) AS w GROUP BY s"

    def bind(self, query: Query) -> Query:
        """Parameters become literals, as psycopg writes them: so results come as COPY sends them."""
        if query.parameters is None:
            return query
        psycopg = require("psycopg", "postgresql")
        with self.errors("binding parameters"), self._described() as connection:
            cursor = psycopg.ClientCursor(connection)
            parameters: Any = query.parameters
            return Query(cursor.mogrify(query.text, parameters))

    def _described(self) -> Any:
        if self._factory is not None:
            reason = (
                "parameters and decimals need psycopg's connection: give the database's URL instead of a connection "
                "factory"
            )
            raise UnsupportedError(reason, reason=reason)
        psycopg = require("psycopg", "postgresql")
        return psycopg.connect(self._url, connect_timeout=30)

    def _connect(self) -> Any:
        if self._factory is not None:
            return self._factory()
        # A clone costs a fifteenth of a connection of a new database object.
        with self._lock:
            if self._cloned is None:
                dbapi = require("adbc_driver_postgresql.dbapi", "postgresql")
                self._cloned = dbapi.connect(self._url, autocommit=True)
                return self._cloned
            session = self._cloned.adbc_clone()
        session.adbc_connection.set_autocommit(True)
        return session

    def _open(self, begin: str | None, token: str | None) -> Any:
        session = self._connect()
        try:
            self._set(session, _SETTINGS)
            if begin is not None:
                self.fetch(session, begin, None)
            if token is not None:
                try:
                    self.fetch(session, f"SET TRANSACTION SNAPSHOT '{token}'", None)
                except Exception as error:
                    reason = (
                        "the snapshot that the reader began with is gone, with the process or the server that kept "
                        f"it: make a new reader ({self.cleaned(str(error)).strip()})"
                    )
                    raise StorageError(reason, reason=reason) from None
            return session
        except BaseException:
            session.close()
            raise

    def sessions(self, number: int, *, snapshot: bool) -> Sessions:
        with self.errors("connecting"):
            if not snapshot:
                return SessionPool(lambda: self._open(None, None), _close, number, one_state=False)
            begin = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
            if self._token is not None:
                return _Shared(lambda: self._open(begin, self._token), number, None, self._token)
            anchor = self._open(begin, None)
            token = str(self.fetch(anchor, "SELECT pg_export_snapshot()", None)[0][0])
            return _Shared(lambda: self._open(begin, token), number, anchor, token)

    def _set(self, session: Any, settings: dict[str, str]) -> None:
        """Settings of a session, by one query."""
        listed = (f"set_config('{name}', '{value}', false)" for name, value in settings.items())
        self.fetch(session, f"SELECT {', '.join(listed)}", None)

    @contextlib.contextmanager
    def counting(self, session: Any, query: Query) -> Iterator[None]:
        # Compiling takes longer than counting. Workers are as many as the server allows: rows of a table are counted
        # the same by several, where the query has no other one in it that could add up floats.
        with self.errors("planning"):
            self.fetch(session, "SET jit = off", None)
            if lone(query.text, self.dialect):
                self.fetch(session, "SET max_parallel_workers_per_gather = DEFAULT", None)
        yield
        with self.errors("planning"):
            self.fetch(session, "RESET jit", None)
            self._set(session, _SETTINGS)

    def with_token(self, token: str | None) -> Postgres:
        """The same, whose sessions see the state of another process."""
        return Postgres(self._url, self._factory, token)

    def fetch(self, session: Any, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        return self._statements.fetch(session, sql)

    def cancel(self) -> None:
        self._statements.cancel()

    def columns(self, session: Any, query: Query) -> list[Column]:
        sql = f"SELECT * FROM {query.derived} LIMIT 0"
        if self._factory is not None:
            return self._columns_of_adbc(session, sql)
        with self._described() as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            described = list(cursor.description or [])
            oids = [column.type_code for column in described]
            rows = connection.execute(
                "SELECT oid, typname, typtype, format_type(oid, NULL) FROM pg_type WHERE oid = ANY(%s)", [oids]
            ).fetchall()
        known = {oid: rest for oid, *rest in rows}
        full = self._full(session, query)
        found = (self._column(each.name, known[each.type_code], each.precision, each.scale) for each in described)
        return [column._replace(nullable=column.name not in full) for column in found]

    def _full(self, session: Any, query: Query) -> set[str]:
        """Columns that are declared to have no NULLs."""
        if (found := plain(query.text, self.dialect)) is None:
            return set()
        sql = f"SELECT attname FROM pg_attribute WHERE attrelid = {self._regclass(found.table)} AND attnotnull"
        named = (found.name_of(column) for (column,) in self.fetch(session, sql, None))
        return {name for name in named if name is not None}

    def _regclass(self, table: str) -> str:
        name = self.quote(table).replace("'", "''")
        return f"to_regclass('{name}')"

    def _columns_of_adbc(self, session: Any, sql: str) -> list[Column]:
        with self._statements.run(session, sql) as reader:
            schema = reader.schema
        found = []
        for field in schema:
            kind = (field.metadata or {}).get(b"ADBC:postgresql:typname", b"").decode()
            found.append(Column(field.name, field.type, kind=kind or str(field.type), fitness=None if kind else 0))
        return found

    def _column(self, name: str, known: list[str], precision: int | None, scale: int | None) -> Column:
        import pyarrow as pa

        kind, category, formatted = known

        collated = ("{}", '{} COLLATE "C"')
        if kind in _AS_THEY_ARE:
            arrow, fitness = _AS_THEY_ARE[kind]
            order = collated if arrow == "string" else ("{}",)
            # For `name` and lengths of characters: without them nothing is cut off.
            formatted = "text" if kind == "varchar" else formatted
            return Column(name, getattr(pa, arrow)(), order=order, fitness=fitness, kind=formatted)
        if kind in ("timestamp", "timestamptz"):
            zone = "UTC" if kind == "timestamptz" else None
            return Column(name, pa.timestamp("us", tz=zone), kind=formatted)
        if kind == "time":
            return Column(name, pa.time64("us"), kind=formatted)
        if kind == "numeric":
            if precision is None or precision > 38 or (scale or 0) < 0:
                # Sums of integers are such numbers, too. Others don't fit decimals of Arrow.
                return Column(name, pa.float64(), read="CAST({} AS double precision)", kind="numeric")
            decimal = pa.decimal128(precision, scale or 0)
            return Column(name, decimal, read="CAST({} AS text)", kind="numeric")
        if category == "e" or kind in _AS_TEXT:
            return Column(name, pa.string(), read="CAST({} AS text)", fitness=2, kind=formatted)
        if kind in _AS_TEXT_UNORDERED:
            text = "CAST({} AS text)"
            return Column(name, pa.string(), read=text, order=(f'{text} COLLATE "C"',), fitness=None, kind=formatted)
        if kind in _LISTS:
            inner = getattr(pa, _AS_THEY_ARE[kind[1:]][0])()
            return Column(name, pa.list_(inner), read=_OF_ONE_DIMENSION, fitness=None, kind=formatted)
        reason = (
            f"column {name!r} is {formatted}, which isn't read: write CAST({self.quote(name)} AS text) in the query"
        )
        if kind == "interval":
            reason = f"column {name!r} is an interval: write EXTRACT(EPOCH FROM {self.quote(name)}) in the query"
        raise UnsupportedError(reason, feature=name, reason=reason)

    def doubt(self, session: Any, query: Query) -> str | None:
        names = ", ".join(f"'{name}'" for name in functions(query.text, self.dialect))
        if not names:
            return None
        sql = f"SELECT proname FROM pg_proc WHERE lower(proname) IN ({names}) AND provolatile = 'v'"
        found = self.fetch(session, sql, None)
        return f"the function {found[0][0]} is declared VOLATILE" if found else None

    def unique_key(self, session: Any, query: Query, columns: list[Column]) -> str | None:
        found = plain(query.text, self.dialect)
        if found is None:
            return None
        sql = (
            "SELECT a.attname FROM pg_index i "
            "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
            f"JOIN pg_class c ON c.oid = i.indrelid WHERE i.indrelid = {self._regclass(found.table)} AND i.indisunique "
            "AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = 1 AND a.attnotnull "
            "AND c.relkind = 'r' AND NOT c.relhassubclass AND a.atttypid IN ('int2'::regtype, 'int4'::regtype, "
            "'int8'::regtype) ORDER BY i.indisprimary DESC, a.attnum"
        )
        for (column,) in self.fetch(session, sql, None):
            if (name := found.name_of(column)) is not None:
                return name
        return None

    def read(self, session: Any, sql: str, parameters: Parameters, columns: list[Column], rows: int) -> pa.Table:
        with self._statements.run(session, sql) as reader:
            return finite(fitted(reader.read_all(), columns), _FIRST_DAY)

    def stream(self, session: Any, sql: str, parameters: Parameters, columns: list[Column]) -> Iterator[pa.Table]:
        import pyarrow as pa

        with self._statements.run(session, sql) as reader:
            for batch in reader:
                yield finite(fitted(pa.Table.from_batches([batch]), columns), _FIRST_DAY)

    def fingerprint(self) -> str:
        if self._factory is not None:
            return f"postgresql {self._url}"
        parts = urllib.parse.urlsplit(self._url)
        return f"postgresql {parts.path.lstrip('/')}"

    def cleaned(self, text: str) -> str:
        with contextlib.suppress(ValueError):
            password = urllib.parse.urlsplit(self._url).password
            if password:
                return text.replace(password, "***").replace(urllib.parse.unquote(password), "***")
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return Postgres, (self._url, self._factory, self._token)


class _Shared(SessionPool):
    """Sessions that see the snapshot of an anchor."""

    def __init__(self, connect: Callable[[], Any], number: int, anchor: Any, token: str) -> None:
        super().__init__(connect, _close, number, one_state=True)
        self._anchor, self._token = anchor, token

    def token(self) -> str:
        """The snapshot's name, for as long as this process keeps it."""
        return self._token

    def close(self) -> None:
        super().close()
        if self._anchor is not None:
            with contextlib.suppress(Exception):
                self._anchor.close()


def _close(session: Any) -> None:
    session.close()
