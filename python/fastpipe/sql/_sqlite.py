"""SQLite, through ADBC."""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import pairwise
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from fastpipe.errors import MissingFileError, SchemaError, StorageError, in_file
from fastpipe.sql._adbc import Statements, without_transaction
from fastpipe.sql._engines import Column, Engine, SessionPool, Sessions
from fastpipe.sql._lineage import Plain
from fastpipe.sql._query import Parameters, Query, require
from fastpipe.sql._range_predicates import Cut, between

if TYPE_CHECKING:
    import pyarrow as pa

# The number of rows whose values determine the types of columns.
_LOOKED_AT = 1000
_WAIT_MS = 30_000
# The first letter of keys that are text. Other keys are stored as literals.
_TEXT = "T"
# In a column that began with other types, the driver converts numbers to text and rounds integers. If a column's
# declaration allows several types, the database therefore checks its values with a call that fails. The error contains
# the text after this mark.
_FAILED = re.compile(r"bad JSON path: 'fastpipe: (.*)'", re.DOTALL)
_EXACT = 1 << 53
# Rows per batch when the whole result is streamed.
_STREAMED = 1 << 16


class Sqlite(Engine):
    """A SQLite file.

    In WAL mode, each session has a transaction with the same state. Writers wait briefly while these transactions
    begin. In other modes, a read transaction would block writers. Instead, fastpipe checks after each partition whether
    the file changed, and raises an error if it did.

    Args:
        path: The path of the file; with a factory, the name of the database in error messages.
        factory: A function that returns a connection of `adbc_driver_sqlite`.
    """

    name = "SQLite"
    dialect = "sqlite"

    def __init__(self, path: str, factory: Callable[[], Any] | None = None) -> None:
        self._path, self._factory, self._statements = path, factory, Statements()
        if factory is None:
            self._path = os.path.abspath(path)
            self.where = f" in file {self._path}"
            if not os.path.isfile(self._path):
                raise in_file(MissingFileError, path, "there is no such file")

    def literal(self, text: str, column: Column) -> str:
        if not text.startswith(_TEXT):
            return text
        # SQL text ends at a NUL character, and a cast would set an affinity, which changes comparisons.
        parts = ["'{}'".format(part.replace("'", "''")) for part in text.removeprefix(_TEXT).split("\0")]
        return parts[0] if len(parts) == 1 else f"({' || char(0) || '.join(parts)})"

    def key_text(self, column: str) -> str:
        return f"CASE typeof({column}) WHEN 'text' THEN '{_TEXT}' || {column} ELSE quote({column}) END"

    def widths(self, derived: str, column: str, low: int, width: int, number: int, *, joined: bool) -> str:
        if joined:
            ranges = f"SELECT ({column} - ({low})) / {width} AS s FROM q"
            return f"{derived} SELECT s, count(*) FROM ({ranges}) AS w GROUP BY s"
        # This takes a fifth of the time of GROUP BY, because rows are only skipped.
        cuts: list[Cut] = [(str(low + i * width),) for i in range(1, number)]
        bounds = (between([column], *edge, nulls=False) or "1" for edge in pairwise([None, *cuts, None]))
        counts = (f"SELECT {i} AS s, count(*) FROM q WHERE {bound}" for i, bound in enumerate(bounds))
        return f"{derived} {' UNION ALL '.join(counts)}"

    def bind(self, query: Query) -> Query:
        """Replaces named parameters by positions, because ADBC binds parameters by position."""
        if not isinstance(query.parameters, Mapping):
            return query
        with self.errors("binding parameters"), contextlib.closing(self._connect()) as session:
            names = self._statements.parameters(session, f"SELECT * FROM {query.derived}")
        given = {str(name).lstrip(":@$"): value for name, value in query.parameters.items()}
        bound = [name.lstrip(":@$?") for name in names]
        if missing := [name for name in bound if name not in given]:
            raise ValueError(f"the query has a placeholder {missing[0]!r}, but parameters doesn't: {sorted(given)}")
        return Query(query.text, [given[name] for name in bound])

    def _connect(self) -> Any:
        if self._factory is not None:
            session = without_transaction(self._factory())
        else:
            dbapi = require("adbc_driver_sqlite.dbapi", "sqlite")
            mode = "rw" if os.access(self._path, os.W_OK) else "ro"
            if not os.path.isfile(self._path):
                raise in_file(MissingFileError, self._path, "there is no such file")
            session = dbapi.connect(f"file:{urllib.parse.quote(self._path)}?mode={mode}", autocommit=True)
        try:
            self.fetch(session, f"PRAGMA busy_timeout = {_WAIT_MS}", None)
        except BaseException:
            _close(session)
            raise
        return session

    def sessions(self, number: int, *, snapshot: bool) -> Sessions:
        opened: list[Any] = []
        try:
            with self.errors("connecting"):
                opened.extend(self._connect() for _ in range(number))
                return self._pool(opened, snapshot=snapshot)
        except BaseException:
            for session in opened:
                _close(session)
            raise

    def _pool(self, opened: list[Any], *, snapshot: bool) -> SessionPool:
        mode = str(self.fetch(opened[0], "PRAGMA journal_mode", None)[0][0]).lower()
        if snapshot and mode == "wal" and self._begin(opened):
            pool: SessionPool = SessionPool(_none_left, _close, len(opened), one_state=True, reusable=True)
        else:
            pool = _Checked(self, len(opened), snapshot=snapshot)
            pool.versions = self._versions(opened)
        pool.give(opened)
        return pool

    def _begin(self, sessions: list[Any]) -> bool:
        """Begins a transaction on the same state in each session. Returns False if writers can't be blocked."""
        guard = self._connect()
        try:
            try:
                self.fetch(guard, "BEGIN IMMEDIATE", None)
            except Exception as error:
                if "readonly" in str(error).replace("-", ""):
                    return False
                raise
            for session in sessions:
                self.fetch(session, "BEGIN", None)
                self.fetch(session, "SELECT count(*) FROM sqlite_master", None)
            self.fetch(guard, "ROLLBACK", None)
            return True
        finally:
            guard.close()

    def _versions(self, sessions: list[Any]) -> dict[int, int]:
        """Returns the version that each session sees. Nothing changed in between, so all sessions see one file."""
        for _ in range(100):
            found = {id(session): self.version(session) for session in sessions}
            if self.version(sessions[0]) == found[id(sessions[0])]:
                return found
        raise in_file(StorageError, self._path, "the file kept changing: stop writers, or use WAL mode")

    def version(self, session: Any) -> int:
        """Returns a number that changes, for this session, when another connection changes the file."""
        return int(self.fetch(session, "PRAGMA data_version", None)[0][0])

    def fetch(self, session: Any, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        return self._statements.fetch(session, sql, parameters)

    def cancel(self) -> None:
        self._statements.cancel()

    def columns(self, session: Any, query: Query) -> list[Column]:
        import pyarrow as pa

        names = self._names(session, query, f"SELECT * FROM {query.derived} LIMIT 0")
        # A derived table adds numbers to names that appear twice.
        if any(re.search(r":\d+$", name) for name in names):
            names = self._names(session, query, query.text)
            lower = [name.lower() for name in names]
            if twice := [name for name in names if lower.count(name.lower()) > 1]:
                return [Column(twice[0], pa.null()) for _ in names]
        kinds = self._kinds(session, query, [self.quote(name) for name in names])
        declared = self._declared(session, query, names)
        found = [self._column(*each) for each in zip(names, kinds, declared, strict=True)]
        full = self._full(session, query)
        return [column._replace(nullable=column.name not in full) for column in found]

    def _names(self, session: Any, query: Query, sql: str) -> list[str]:
        with self._statements.run(session, sql, query.parameters, **_rows(1)) as reader:
            return list(reader.schema.names)

    def _full(self, session: Any, query: Query) -> set[str]:
        """Returns the columns that are declared NOT NULL or are the row ID."""
        if (found := self.table_of(session, query)) is None:
            return set()
        rows = self._pragma(session, "table_info", found)
        keys = self.unique_keys(session, found)
        named = [found.name_of(row[1]) for row in rows if row[3] or row[1] in keys]
        if (hidden := self.hidden_key(session, found)) is not None:
            named.append(found.listed_name_of(hidden))
        return {name for name in named if name is not None}

    def _pragma(self, session: Any, name: str, table: Plain) -> list[tuple[Any, ...]]:
        *schema, own = map(self.quote, table.table)
        return self.fetch(session, f"PRAGMA {'.'.join([*schema, name])}({own})", None)

    def _kinds(self, session: Any, query: Query, quoted: list[str]) -> list[set[str]]:
        """Returns the types of each column's values in the first rows, or of its first value if these are all NULL."""
        told = ", ".join(f"group_concat(DISTINCT typeof({column}))" for column in quoted)
        sql = f"SELECT {told} FROM (SELECT * FROM {query.derived} LIMIT {_LOOKED_AT}) AS q"
        found = [
            set((value or "").split(",")) - {"null", ""} for value in self.fetch(session, sql, query.parameters)[0]
        ]
        for i, column in enumerate(quoted):
            if not found[i]:
                sql = f"SELECT typeof({column}) FROM {query.derived} WHERE {column} IS NOT NULL LIMIT 1"
                found[i] = {row[0] for row in self.fetch(session, sql, query.parameters)}
        return found

    def _declared(self, session: Any, query: Query, names: list[str]) -> list[str]:
        """Returns the declared types of columns: from a view of the query, or from its table if it has parameters."""
        if query.parameters:
            table = self.table_of(session, query)
            rows = [] if table is None else self._pragma(session, "table_info", table)
            known = {str(table.name_of(row[1])).lower(): row[2].upper() for row in rows} if table is not None else {}
            return [known.get(name.lower(), "") for name in names]
        self.fetch(session, f"CREATE TEMP VIEW fastpipe_columns AS SELECT * FROM {query.derived}", None)
        try:
            return [row[2].upper() for row in self.fetch(session, "PRAGMA temp.table_info(fastpipe_columns)", None)]
        finally:
            self.fetch(session, "DROP VIEW temp.fastpipe_columns", None)

    def _column(self, name: str, kinds: set[str], declared: str) -> Column:
        import pyarrow as pa

        types = {"integer": pa.int64(), "real": pa.float64(), "text": pa.string(), "blob": pa.binary()}
        affinity = _affinity(declared)
        if (kinds <= {"integer", "real"} and len(kinds) == 2) or (
            kinds and affinity == "numeric" and "text" not in kinds
        ):
            chosen = "real"
        elif len(kinds) > 1:
            hint = f"CAST({self.quote(name)} AS TEXT)"
            reason = f"column {name!r} has values of several types ({', '.join(sorted(kinds))}): use {hint}"
            raise SchemaError(reason, feature=name, reason=reason)
        else:
            chosen = next(iter(kinds), affinity or "real")
            chosen = "real" if chosen == "numeric" else chosen
        order = ("{}", "{} COLLATE BINARY") if chosen == "text" else ("{}",)
        fitness = ["integer", "real", "text", "blob"].index(chosen)
        checked = chosen == "blob" or (chosen in ("text", "real") and chosen != affinity)
        return Column(name, types[chosen], _checked_read(name, chosen) if checked else "{}", order, fitness)

    def changes_rows(self, session: Any, calls: frozenset[str]) -> bool:
        names = ", ".join("'{}'".format(name.replace("'", "''")) for name in sorted(calls))
        sql = f"SELECT 1 FROM pragma_function_list WHERE lower(name) IN ({names}) AND type <> 's' LIMIT 1"
        return bool(self.fetch(session, sql, None))

    def unique_keys(self, session: Any, table: Plain) -> list[str]:
        """Returns the column of the row ID. Other keys have a separate index, and may contain NULLs, text and reals."""
        keys = [row for row in self._pragma(session, "table_info", table) if row[5]]
        if len(keys) != 1 or str(keys[0][2]).upper() != "INTEGER":
            return []
        return [] if any(row[3] == "pk" for row in self._pragma(session, "index_list", table)) else [keys[0][1]]

    def hidden_key(self, session: Any, table: Plain) -> str | None:
        """Returns the name of the row ID if no column has it. Views and tables WITHOUT ROWID have no row IDs."""
        tables = self._pragma(session, "table_list", table)
        if [(kind, without) for _, _, kind, _, without, *_ in tables] != [("table", 0)]:
            return None
        if self.unique_keys(session, table):
            return None
        # A column with one of these names hides the row ID under it. `table_xinfo` also lists generated columns.
        taken = {str(row[1]).lower() for row in self._pragma(session, "table_xinfo", table)}
        return next((name for name in ("rowid", "_rowid_", "oid") if name not in taken), None)

    def read(self, session: Any, sql: str, parameters: Parameters, columns: list[Column], rows: int) -> pa.Table:
        # The driver infers types from the first batch of rows. This batch size covers all rows.
        with _of_one_type(columns), self._statements.run(session, sql, parameters, **_rows(rows + 1)) as reader:
            return _typed(reader.read_all(), columns)

    def stream(self, session: Any, sql: str, parameters: Parameters, columns: list[Column]) -> Generator[pa.Table]:
        import pyarrow as pa

        # The first row has a value of each column's type, because columns may begin with any number of NULLs.
        zeros = {pa.int64(): "0", pa.float64(): "0.0", pa.string(): "''", pa.binary(): "x''"}
        sql = f"SELECT {', '.join(zeros[column.type] for column in columns)} UNION ALL {sql}"
        with _of_one_type(columns), self._statements.run(session, sql, parameters, **_rows(_STREAMED)) as reader:
            for i, batch in enumerate(reader):
                yield _typed(pa.Table.from_batches([batch.slice(not i)]), columns)

    def fingerprint(self) -> str:
        return f"sqlite {os.path.basename(self._path)}"

    def identity(self) -> list[Any]:
        if self._factory is None:
            return ["sqlite", os.path.realpath(self._path)]
        with self.errors("looking up the database's files"), contextlib.closing(self._connect()) as session:
            files = self.fetch(session, "PRAGMA database_list", None)
        # A database in memory belongs to its connection.
        return ["sqlite", *([name, os.path.realpath(file) if file else token_hex()] for _, name, file in files)]

    def __reduce__(self) -> tuple[Any, ...]:
        return Sqlite, (self._path, self._factory)


class _Checked(SessionPool):
    """Sessions without a transaction that detect changes of the file."""

    versions: dict[int, int]

    def __init__(self, engine: Sqlite, number: int, *, snapshot: bool) -> None:
        super().__init__(_none_left, _close, number, one_state=snapshot, reusable=True)
        self._engine, self._snapshot = engine, snapshot

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Any]:
        with super().borrow() as session:
            yield session
            if self._snapshot and self._engine.version(session) != self.versions[id(session)]:
                reason = (
                    "the file was changed since the reader was made: create a new reader. In WAL mode (PRAGMA "
                    "journal_mode=wal), readers would continue with the old state"
                )
                raise in_file(StorageError, self._engine._path, reason)


def _rows(number: int) -> dict[str, str]:
    """Returns the option that sets the number of rows per batch."""
    return {"adbc.sqlite.query.batch_rows": str(number)}


def _checked_read(name: str, kind: str) -> str:
    """Returns SQL that reads a column, and fails at a value of another type with advice on the query."""
    if kind == "real":
        wrong = f"typeof({{0}}) = 'integer' AND {{0}} NOT BETWEEN {-_EXACT} AND {_EXACT}"
        reason = (
            "is double in the first rows, and has integers that a double can't hold in others: use CAST(... AS TEXT)"
        )
    else:
        wrong = f"typeof({{0}}) NOT IN ('{kind}', 'null')"
        other = "numbers or blobs" if kind == "text" else "numbers or texts"
        reason = f"is {kind} in the first rows, and has {other} in others: use CAST(... AS {kind.upper()})"
    escaped = f"column {name!r} {reason} in the query".replace("'", "''").replace("{", "{{").replace("}", "}}")
    return f"CASE WHEN {wrong} THEN json_extract('[]', 'fastpipe: {escaped}') ELSE {{0}} END"


@contextlib.contextmanager
def _of_one_type(columns: list[Column]) -> Iterator[None]:
    """Converts the error of a checked column to a `SchemaError`."""
    try:
        yield
    except Exception as error:
        if (found := _FAILED.search(str(error))) is None:
            raise
        reason = found[1].replace("''", "'")
        feature = next((column.name for column in columns if reason.startswith(f"column {column.name!r} ")), None)
        raise SchemaError(reason, feature=feature, reason=reason) from None


def _typed(table: pa.Table, columns: list[Column]) -> pa.Table:
    import pyarrow as pa

    found = []
    for column, values in zip(columns, table.columns, strict=True):
        if values.type != column.type:
            wider = pa.types.is_floating(column.type) and pa.types.is_integer(values.type)
            if not wider and values.null_count < len(values):
                reason = (
                    f"column {column.name!r} is {column.type} in the first rows, and {values.type} in others: use "
                    "CAST(... AS ...) in the query"
                )
                raise SchemaError(reason, feature=column.name, reason=reason)
            values = values.cast(column.type) if wider else pa.chunked_array([pa.nulls(len(values), column.type)])
        found.append(values)
    return pa.table(found, names=[column.name for column in columns])


def _affinity(declared: str) -> str | None:
    """Returns the affinity of a declared type: the types of values that it prefers (SQLite: Datatypes, 3.1)."""
    for words, found in (
        (("INT", "BOOL"), "integer"),
        (("CHAR", "CLOB", "TEXT", "DATE", "TIME"), "text"),
        (("BLOB",), "blob"),
        (("REAL", "FLOA", "DOUB"), "real"),
        (("NUM", "DEC"), "numeric"),
    ):
        if any(word in declared for word in words):
            return found
    return None


def _none_left() -> Any:
    reason = "the reader's connections were closed"
    raise StorageError(reason, reason=reason)


def _close(session: Any) -> None:
    session.close()
