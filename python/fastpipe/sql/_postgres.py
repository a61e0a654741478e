"""PostgreSQL: psycopg plans queries, finds column types and binds parameters; ADBC reads rows."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from fastpipe.errors import StorageError, UnsupportedError
from fastpipe.sql._adbc import SharedDatabase, Statements, without_transaction
from fastpipe.sql._engines import LEHMER, PRIME, Column, Engine, SessionPool, Sessions, finite, fitted, keep_for_other
from fastpipe.sql._lineage import Plain, lone
from fastpipe.sql._query import Parameters, Query, functions, require

if TYPE_CHECKING:
    import pyarrow as pa

# These settings make a query return the same rows in the same order each time. Parallel workers of the server would add
# numbers in any order, so fastpipe reads several partitions concurrently instead.
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

# PostgreSQL's first day, in the year 4713 BC, in days since 1970. ADBC converts the server's epoch, 2000, to 1970, so
# infinite times and times after the year 294246 wrap around to earlier days.
_FIRST_DAY = -2_440_588

# Connection parameters that decide which tables a query reads.
_IDENTIFYING = ("service", "host", "hostaddr", "port", "dbname", "user", "options")
# The same information from the server. Copies of a server share its system identifier.
_WHOSE_DATA = (
    "(SELECT system_identifier FROM pg_control_system())::text, inet_server_addr()::text, current_setting('port'), "
    "current_database()::text, session_user::text, current_user::text, current_setting('search_path')"
)

# Types by their names in pg_type: their Arrow type, and their rank as a key.
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
# ADBC silently flattens arrays of several dimensions. PostgreSQL can't append to such an array and raises an error.
_OF_ONE_DIMENSION = "CASE WHEN array_ndims({0}) > 1 THEN array_append({0}, NULL) ELSE {0} END"
_LISTS = {"_bool", "_int2", "_int4", "_int8", "_float4", "_float8", "_text", "_varchar"}


class Postgres(Engine):
    """A PostgreSQL database.

    An anchor connection exports the snapshot of its transaction, and each session imports it. The snapshot exists as
    long as the anchor is open. The anchor also plans: it is a psycopg connection, which opens five times faster than an
    ADBC connection. With a factory, the factory opens the anchor.

    Args:
        url: A libpq URL; with a factory, the name of the database in error messages.
        factory: A function that returns a connection of `adbc_driver_postgresql`.
        token: The token of another process's snapshot.
    """

    name = "PostgreSQL"
    dialect = "postgres"

    def __init__(self, url: str, factory: Callable[[], Any] | None = None, token: str | None = None) -> None:
        self._url, self._factory, self._token = url, factory, token
        self._database = SharedDatabase(functools.partial(_adbc_database, url))
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()
        self._statements = Statements()
        self._lock = threading.Lock()

    def hashed(self, column: Column) -> str | None:
        import pyarrow as pa

        if pa.types.is_integer(column.type):
            return LEHMER.format("CAST({} AS bigint)")
        # A digest such as md5 takes four times as long. With the collation "C", equal bytes have equal hashes.
        number = "hashfloat8({})" if pa.types.is_floating(column.type) else 'hashtext(CAST({} AS text) COLLATE "C")'
        return f"(CAST({number} AS bigint) & {PRIME})"

    def key_text(self, column: str) -> str:
        return f"CAST({column} AS text)"

    def quotient(self, dividend: str, divisor: str) -> str:
        return f"div(CAST({dividend} AS numeric), CAST({divisor} AS numeric))"

    def widths(self, derived: str, column: str, low: int, width: int, number: int, *, joined: bool) -> str:
        # Distances may exceed bigint, but numeric is slow.
        exact = "bigint" if width * number < 1 << 62 else "numeric"
        stretch = f"div({column}::numeric - ({low})::numeric, {width})" if exact == "numeric" else None
        stretch = stretch or f"({column}::bigint - ({low})::bigint) / {width}::bigint"
        return f"{derived} SELECT s, count(*) FROM (SELECT {stretch} AS s FROM q) AS w GROUP BY s"

    def bind(self, query: Query) -> Query:
        """Replaces parameters by literals, which psycopg formats, so that results can be read with COPY."""
        if query.parameters is None:
            return query
        psycopg = require("psycopg", "postgresql")
        if self._factory is not None:
            reason = "parameters need psycopg's connection: pass the database's URL instead of a connection factory"
            raise UnsupportedError(reason, reason=reason)
        with self.errors("binding parameters"), self._client() as connection:
            cursor = psycopg.ClientCursor(connection)
            parameters: Any = query.parameters
            return Query(cursor.mogrify(query.text, parameters))

    def _client(self) -> Any:
        """Opens a connection for planning."""
        if self._factory is not None:
            return without_transaction(self._factory())
        psycopg = require("psycopg", "postgresql")
        # With UTF-8, databases of any encoding return text.
        client = psycopg.connect(self._url, autocommit=True, connect_timeout=30, client_encoding="utf8")
        with self._lock:
            self._clients.add(client)
        return client

    def _connect(self) -> Any:
        if self._factory is not None:
            return without_transaction(self._factory())
        return self._database.session()

    def _open(self, begin: str | None, token: str | None, connect: Callable[[], Any]) -> Any:
        session = connect()
        try:
            self._set(session, _SETTINGS)
            if begin is not None:
                self.fetch(session, begin, None)
            if token is not None:
                try:
                    self.fetch(session, f"SET TRANSACTION SNAPSHOT '{token}'", None)
                except Exception as error:
                    reason = (
                        "the reader's snapshot no longer exists, because the process or the server that kept it has "
                        f"stopped: create a new reader ({self.cleaned(str(error)).strip()})"
                    )
                    raise StorageError(reason, reason=reason) from None
            return session
        except BaseException:
            session.close()
            raise

    def sessions(self, number: int, *, snapshot: bool) -> Sessions:
        with self.errors("connecting"):
            begin = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY" if snapshot else None
            anchor, token = None, self._token
            if snapshot and token is None:
                anchor = self._open(begin, None, self._client)
                token = str(self.fetch(anchor, "SELECT pg_export_snapshot()", None)[0][0])

            def opened(connect: Callable[[], Any] = self._connect) -> Any:
                with self.errors("connecting"):
                    return self._open(begin, token if snapshot else None, connect)

            return _Planned(opened, number, self._client, anchor, token)

    def _set(self, session: Any, settings: dict[str, str]) -> None:
        """Changes settings of a session with one query."""
        listed = (f"set_config('{name}', '{value}', false)" for name, value in settings.items())
        self.fetch(session, f"SELECT {', '.join(listed)}", None)

    @contextlib.contextmanager
    def counting(self, session: Any, query: Query) -> Iterator[None]:
        # Compiling takes longer than counting. The server may use its default number of workers, because counts don't
        # depend on their order, unless a nested query adds up floats.
        with self.errors("planning"):
            self.fetch(session, "SET jit = off", None)
            if lone(query.text, self.dialect):
                self.fetch(session, "SET max_parallel_workers_per_gather = DEFAULT", None)
        yield
        with self.errors("planning"):
            self.fetch(session, "RESET jit", None)
            self._set(session, _SETTINGS)

    def with_token(self, token: str | None) -> Postgres:
        """Returns an engine whose sessions see the snapshot of another process."""
        return Postgres(self._url, self._factory, token)

    def fetch(self, session: Any, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        if session not in self._clients:
            return self._statements.fetch(session, sql)
        cursor = session.execute(sql)
        return [] if cursor.description is None else list(cursor.fetchall())

    def cancel(self) -> None:
        self._statements.cancel()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(Exception):
                client.cancel()

    def columns(self, session: Any, query: Query) -> list[Column]:
        sql = f"SELECT * FROM {query.derived} LIMIT 0"
        described: list[tuple[str, int, int | None, int | None]]
        if self._factory is not None:
            described = self._described_by_adbc(session, sql)
        else:
            with contextlib.nullcontext(session) if session in self._clients else self._client() as client:
                found = client.execute(sql).description or []
            described = [(each.name, each.type_code, each.precision, each.scale) for each in found]
        oids = ", ".join(str(each[1]) for each in described) or "NULL"
        sql = f"SELECT oid::int8, typname::text, typtype::text, format_type(oid, -1) FROM pg_type WHERE oid IN ({oids})"
        known = {oid: rest for oid, *rest in self.fetch(session, sql, None)}
        full = self._full(session, query)
        columns = (self._column(name, known[oid], precision, scale) for name, oid, precision, scale in described)
        return [column._replace(nullable=column.name not in full) for column in columns]

    def _described_by_adbc(self, session: Any, sql: str) -> list[tuple[str, int, int | None, int | None]]:
        """Returns the names and types of columns. ADBC doesn't report the precision of decimals."""
        with self._statements.run(session, sql) as reader:
            names = reader.schema.names
        if not names:
            return []
        # The outer join returns one row of NULLs.
        renamed = ", ".join(f"c{i}" for i in range(len(names)))
        types = ", ".join(f"pg_typeof(c{i})::oid::int8" for i in range(len(names)))
        sql = f"SELECT {types} FROM (SELECT 1) AS one LEFT JOIN ({sql}) AS q ({renamed}) ON true"
        return [(name, oid, None, None) for name, oid in zip(names, self.fetch(session, sql, None)[0], strict=True)]

    def _full(self, session: Any, query: Query) -> set[str]:
        """Returns the columns that are declared NOT NULL."""
        if (found := self.table_of(session, query)) is None:
            return set()
        sql = f"SELECT attname FROM pg_attribute WHERE attrelid = {self._regclass(found.table)} AND attnotnull"
        named = (found.name_of(column) for (column,) in self.fetch(session, sql, None))
        return {name for name in named if name is not None}

    def _regclass(self, table: tuple[str, ...]) -> str:
        name = ".".join(map(self.quote, table)).replace("'", "''")
        return f"to_regclass('{name}')"

    def _column(self, name: str, known: list[str], precision: int | None, scale: int | None) -> Column:
        import pyarrow as pa

        kind, category, formatted = known

        collated = ("{}", '{} COLLATE "C"')
        if kind in _AS_THEY_ARE:
            arrow, fitness = _AS_THEY_ARE[kind]
            order = collated if arrow == "string" else ("{}",)
            # The type's name is needed for `name` and for lengths of characters. `text` doesn't truncate values.
            formatted = "text" if kind == "varchar" else formatted
            return Column(name, getattr(pa, arrow)(), order=order, fitness=fitness, kind=formatted)
        if kind in ("timestamp", "timestamptz"):
            zone = "UTC" if kind == "timestamptz" else None
            return Column(name, pa.timestamp("us", tz=zone), kind=formatted)
        if kind == "time":
            return Column(name, pa.time64("us"), kind=formatted)
        if kind == "numeric":
            if precision is None or precision > 38 or (scale or 0) < 0:
                # Sums of integers have this type. Other numbers don't fit Arrow's decimals.
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
            f"column {name!r} is {formatted}, which is not supported: use CAST({self.quote(name)} AS text) in the query"
        )
        if kind == "interval":
            reason = f"column {name!r} is an interval: use EXTRACT(EPOCH FROM {self.quote(name)}) in the query"
        raise UnsupportedError(reason, feature=name, reason=reason)

    def doubt(self, session: Any, query: Query) -> str | None:
        names = ", ".join(f"'{name}'" for name in functions(query.text, self.dialect))
        if not names:
            return None
        sql = f"SELECT proname FROM pg_proc WHERE lower(proname) IN ({names}) AND provolatile = 'v'"
        found = self.fetch(session, sql, None)
        return f"the function {found[0][0]} is declared VOLATILE" if found else None

    def changes_rows(self, session: Any, calls: frozenset[str]) -> bool:
        names = ", ".join("'{}'".format(name.replace("'", "''")) for name in sorted(calls))
        sql = (
            f"SELECT 1 FROM pg_proc WHERE lower(proname) IN ({names}) AND (proretset OR prokind IN ('a', 'w')) LIMIT 1"
        )
        return bool(self.fetch(session, sql, None))

    def unique_keys(self, session: Any, table: Plain) -> list[str]:
        sql = (
            "SELECT a.attname FROM pg_index i "
            "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
            f"JOIN pg_class c ON c.oid = i.indrelid WHERE i.indrelid = {self._regclass(table.table)} AND i.indisunique "
            "AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = 1 AND a.attnotnull "
            "AND (c.relkind = 'p' OR (c.relkind = 'r' AND NOT c.relhassubclass)) "
            "AND a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype) "
            "ORDER BY i.indisprimary DESC, a.attnum"
        )
        return [column for (column,) in self.fetch(session, sql, None)]

    def read(self, session: Any, sql: str, parameters: Parameters, columns: list[Column], rows: int) -> pa.Table:
        with self._statements.run(session, sql) as reader:
            return finite(fitted(reader.read_all(), columns), _FIRST_DAY)

    def stream(self, session: Any, sql: str, parameters: Parameters, columns: list[Column]) -> Generator[pa.Table]:
        import pyarrow as pa

        with self._statements.run(session, sql) as reader:
            for batch in reader:
                yield finite(fitted(pa.Table.from_batches([batch]), columns), _FIRST_DAY)

    def fingerprint(self) -> str:
        if self._factory is not None:
            return f"postgresql {self._url}"
        return f"postgresql {self._given().get('dbname', '')}"

    def identity(self) -> list[Any]:
        if self._factory is None:
            given = self._given()
            defaults = {option.keyword.decode(): option.val for option in _conninfo().get_defaults()}
            settled = {name: given.get(name, (defaults.get(name) or b"").decode()) for name in _IDENTIFYING}
            return ["postgresql", *settled.items()]
        with self.errors("looking up which server this is"), contextlib.closing(self._connect()) as session:
            return ["postgresql", *self.fetch(session, f"SELECT {_WHOSE_DATA}", None)]

    def _given(self) -> dict[str, str]:
        """Returns the parameters that the URL sets."""
        with self.errors("reading the URL"):
            options = _conninfo().parse(self._url.encode())
        return {option.keyword.decode(): option.val.decode() for option in options if option.val is not None}

    def cleaned(self, text: str) -> str:
        secrets = []
        with contextlib.suppress(ValueError):
            secrets.append(urllib.parse.urlsplit(self._url).password or "")
        with contextlib.suppress(Exception):
            secrets += [option.val.decode() for option in _conninfo().parse(self._url.encode()) if _is_secret(option)]
        for secret in filter(None, [*secrets, *map(urllib.parse.unquote, secrets)]):
            text = text.replace(secret, "***")
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return Postgres, (self._url, self._factory, self._token)


class _Planned(SessionPool):
    """Sessions for reading, and one session for planning.

    Args:
        connect: A function that opens a session with the connection that another function returns, by default for
            reading.
        number: The maximum number of sessions for reading.
        client: A function that opens a connection for planning.
        anchor: A session for planning that keeps the snapshot open. None if another process keeps it, or there is none.
        token: The snapshot's name; None without a snapshot.
    """

    def __init__(
        self, connect: Callable[..., Any], number: int, client: Callable[[], Any], anchor: Any, token: str | None
    ) -> None:
        super().__init__(connect, _close, number, one_state=token is not None)
        self._client, self._anchor, self._token = client, anchor, token

    def token(self) -> str | None:
        """Returns the snapshot's name, which is valid while this process keeps the snapshot open."""
        return self._token

    @contextlib.contextmanager
    def planner(self) -> Iterator[Any]:
        session = self._anchor or self._connect(self._client)
        try:
            yield session
        finally:
            if session is not self._anchor:
                session.close()

    def prepare(self) -> None:
        # ADBC asks the server for all of its types when it opens the first session, so it is opened in advance.
        threading.Thread(target=self._try, name="fastpipe-sql", daemon=True).start()

    def _try(self) -> None:
        # The error is raised again when a session is needed.
        with contextlib.suppress(Exception), self.borrow():
            pass

    def close(self) -> None:
        super().close()
        anchor, self._anchor = self._anchor, None
        if anchor is None:
            return
        if os.getpid() != self._process:
            keep_for_other(anchor)
            return
        with contextlib.suppress(Exception):
            anchor.close()


def _conninfo() -> Any:
    return require("psycopg.pq", "postgresql").Conninfo


def _is_secret(option: Any) -> bool:
    return option.val is not None and option.keyword in (b"password", b"sslpassword")


def _adbc_database(url: str) -> Any:
    return require("adbc_driver_postgresql", "postgresql").connect(url)


def _close(session: Any) -> None:
    session.close()
