"""Readers of queries: partitions that are read by themselves, or a result that is written once."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias, TypeVar, Unpack

from fastpipe._arguments import shown
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.ordering import digest, within
from fastpipe._reader.reader import Reader
from fastpipe._text import plural
from fastpipe.errors import FastpipeError, StorageError, in_file
from fastpipe.sources.sql._connecting import engine_of
from fastpipe.sources.sql._engines import Column, Engine, Sessions
from fastpipe.sources.sql._plan import SqlPlan, partition_text, planned
from fastpipe.sources.sql._query import Parameters, Query, checked
from fastpipe.sources.units._data import fetches, reader_of, threads_of
from fastpipe.sources.units._files import Files
from fastpipe.sources.units._parquet import ParquetUnits
from fastpipe.specs import Spec

if TYPE_CHECKING:
    import pyarrow as pa


class SqlUnits:
    """The partitions of a query, as a source (see `Units`).

    Args:
        engine: the database.
        query: what is read.
        plan: how it is cut.
        sessions: connections; None to open them when they are needed.
        number: connections at most.
        snapshot: whether all read one state.
        columns: that are read; None for all.
    """

    def __init__(
        self,
        engine: Engine,
        query: Query,
        plan: SqlPlan,
        sessions: Sessions | None,
        number: int,
        *,
        snapshot: bool,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._engine, self._query, self.plan, self._sessions = engine, query, plan, sessions
        self._number, self._snapshot = number, snapshot
        self._lock = threading.Lock()
        self.rows = [part.rows for part in plan.partitions]
        self._choose(columns)

    def _choose(self, columns: Sequence[str] | None) -> None:
        import pyarrow as pa

        self._names = columns
        wanted = self.plan.columns
        self._columns: list[Column] = wanted if columns is None else [c for c in wanted if c.name in set(columns)]
        self.schema: pa.Schema = pa.schema(
            [pa.field(column.name, column.type, column.nullable) for column in self._columns]
        )

    def select(self, columns: list[str]) -> SqlUnits:
        """The same units, of which only these columns are read."""
        chosen = copy.copy(self)
        chosen._choose(columns)
        # Both use the same connections, opened by either.
        chosen._open = self._open  # type: ignore[method-assign]
        return chosen

    def name(self, unit: int) -> str:
        """The partition and its predicate."""
        return f"partition {unit} of {len(self.rows)} of the query, where {self.plan.predicates[unit] or 'all'}"

    def fingerprint(self) -> list[Any]:
        """The database's name, the query, what is bound to it and how it is cut."""
        return [self._engine.fingerprint(), self._query.text, repr(self._query.parameters), self.plan.predicates]

    def _open(self) -> Sessions:
        with self._lock:
            if self._sessions is None:
                self._sessions = self._engine.sessions(self._number, snapshot=self._snapshot)
            return self._sessions

    def read(self, unit: int) -> pa.Table:
        """A partition's rows."""
        selected = ", ".join(column.read.format(self._engine.quote(column.name)) for column in self._columns)
        text = partition_text(self.plan.source, selected, self.plan.predicates[unit], self.plan.order)
        name = self.name(unit)
        with self._engine.errors(name), self._open().borrow() as session:
            table = self._engine.read(session, text, self._query.parameters, self._columns, self.rows[unit])
        if table.num_rows != self.rows[unit]:
            reason = (
                f"the partition had {plural(self.rows[unit], 'row')} when the reader was made, and has "
                f"{table.num_rows:,} now: others change its tables, or the query returns other rows each time. Make a "
                "new reader, or read it once into files (materialize='directory')"
            )
            raise StorageError(f"{reason} ({name})", reason=reason, unit=name)
        return table

    def close(self) -> None:
        """Closes the connections that aren't in use."""
        if self._sessions is not None:
            self._sessions.close()

    def __reduce__(self) -> tuple[Any, ...]:
        engine = self._engine
        token = None if self._sessions is None else self._sessions.token()
        if token is not None:
            engine = engine.with_token(token)
        made = functools.partial(SqlUnits, snapshot=self._snapshot, columns=self._names)
        return made, (engine, self._query, self.plan, None, self._number)


_T = TypeVar("_T")


def interruptible(work: Callable[[], _T], cancel: Callable[[], None]) -> _T:
    """Calls a function in a thread. On Ctrl-C it is left to that, which ends with all that it holds when it can.

    Args:
        work: waits for a database.
        cancel: may shorten that; called on Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[_T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="fastpipe-sql", daemon=True).start()
    try:
        while not done.wait(0.1):
            pass
    except BaseException:
        cancel()
        raise
    if errors:
        # A cycle of the error, its traceback and this frame would keep connections open.
        error = errors.pop()
        try:
            raise error
        finally:
            del error
    return results.pop()


By: TypeAlias = "str | Sequence[str] | None"

_MOST = 1 << 16


def checked_by(by: object) -> tuple[str, ...] | None:
    """The names of the columns by which to cut; None for those that suit.

    Raises:
        TypeError: if they are no names.
        ValueError: if there is none, or one comes twice.
    """
    if by is None:
        return None
    names = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, Sequence) else (by,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"by is a column's name, a list of names or None, not {shown(by)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"by names at least one column, and each once: {shown(by)}")
    return names


def checked_partitions(partitions: object) -> int | None:
    """The number of partitions; None for "auto".

    Raises:
        TypeError: if it is no number.
        ValueError: if it is out of range.
    """
    if partitions == "auto":
        return None
    try:
        number = operator.index(partitions)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"partitions is a number or 'auto', not {shown(partitions)}") from None
    if isinstance(partitions, bool) or not 1 <= number <= _MOST:
        raise ValueError(f"partitions is from 1 to {_MOST}, or 'auto', not {shown(partitions)}")
    return number


_GROUP_ROWS = 1 << 17


def written(engine: Engine, query: Query, directory: str, digest: str) -> str:
    """Writes a result as a Parquet file, unless it is there already.

    Several processes may do so at once: each writes a file of its own, and the first that is finished stays.

    Args:
        engine: the database.
        query: run once.
        directory: is made if it isn't there.
        digest: names the file.

    Returns:
        The file's path.

    Raises:
        StorageError: if the database or the disk fails.
    """
    path = os.path.join(directory, f"{digest}.parquet")
    if os.path.exists(path):
        return path
    try:
        os.makedirs(directory, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix=f".{digest}-", suffix=".unfinished", dir=directory)
    except OSError as error:
        reason = f"the directory of materialize can't be written: {error.strerror}"
        raise in_file(StorageError, directory, reason) from error
    os.close(handle)
    try:
        _write(engine, query, unfinished)
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    except OSError as error:
        if isinstance(error, FastpipeError):
            raise
        reason = f"the result can't be written into the directory of materialize: {error.strerror or error}"
        raise in_file(StorageError, path, reason) from error
    finally:
        os.unlink(unfinished)
    return path


def _write(engine: Engine, query: Query, path: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    sessions = engine.sessions(1, snapshot=True)
    try:
        with engine.errors("materializing the query"), sessions.borrow() as session:
            columns = engine.columns(session, query)
            schema = pa.schema([(column.name, column.type) for column in columns])
            selected = ", ".join(column.read.format(engine.quote(column.name)) for column in columns)
            sql = f"SELECT {selected} FROM {query.derived}"
            with pyarrow.parquet.ParquetWriter(path, schema) as writer:
                for table in engine.stream(session, sql, query.parameters, columns):
                    writer.write_table(table, row_group_size=_GROUP_ROWS)
    finally:
        sessions.close()


# Queries at once: the server may be elsewhere, and has processors of its own.
_FETCHES = 4


@takes_options()
def read_sql(
    query: str,
    connection: Any,
    *,
    parameters: Parameters = None,
    by: By = None,
    partitions: SupportsIndex | Literal["auto"] = "auto",
    snapshot: bool = True,
    materialize: str | os.PathLike[str] | None = None,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: SupportsIndex,
    num_fetches: SupportsIndex | None = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads the result of a query as batches of NumPy arrays (extras `postgresql`, `sqlite`, `duckdb`, or `sql`).

    The query is cut into partitions: queries that are disjoint and make up the whole. Each is
    `SELECT … FROM (query) AS q WHERE … ORDER BY …`, so whatever the query does keeps its meaning, and its rows come in
    the same order each time. `partition_sql` shows them. A query of one table whose primary key it doesn't select gets
    this key as one more column, by which it is cut and which isn't read.

    All partitions see one state of the database, that in which the reader was made:

    - PostgreSQL: a snapshot, which a connection holds open as long as the reader lives. (Vacuum keeps what it sees.)
      Readers pickled into other processes use it as long as the first one lives.
    - SQLite: in WAL mode, transactions of all connections on one state. In other modes a change of the file is an error
      at the next partition.
    - DuckDB, MySQL and MariaDB: one transaction, in which partitions are read one after the other.

    Where that can't be had (a pickled reader of SQLite, DuckDB or MySQL), a partition with another number of rows than
    planned is an error.

    Args:
        query: a SELECT, as the database writes it.
        connection: a URL (`postgresql://user@host/database`, `sqlite:///path.db`, `duckdb:///path.db`,
            `mysql+pymysql://…`), an Engine of SQLAlchemy, a connection of duckdb, or a function that returns an ADBC
            connection of SQLite or PostgreSQL, or an Engine.
        parameters: bound to the query's placeholders, as the database's library writes them: `?` or `:name` (SQLite),
            `%s` or `%(name)s` (PostgreSQL by psycopg, MySQL), `?` or `$name` (DuckDB).
        by: columns of the result, in whose order it is cut. By default an integer primary key of the table, else the
            two columns that tell the most rows apart.
        partitions: how many; "auto" for about 131,072 rows each where they are found by a primary key, else 1,048,576:
            each partition computes the query again.
        snapshot: whether all partitions must see one state. Without, connections are used as they are.
        materialize: a directory, into which the result is written once as Parquet files, and from which it is read.
            An existing result of the same query, parameters and database is used again, as it is. A database in memory
            is the same only for the same connection.
        features: dict from name to spec, as in `from_arrow`. By default what follows from the types: columns that may
            have nulls, as the database says, have `nulls="mask"`.
        columns: only these, at least one.
        batch_size: rows a batch.
        num_fetches: queries that are run at once, each on a connection of its own; by default 4, and for SQLite as many
            as `num_threads`.
        **options: see `fastpipe.Options`.

    Returns:
        The reader.

    Raises:
        ImportError: if a library isn't installed; it says what to install.
        MissingFileError: if the database is a file, and isn't there.
        StorageError: if the database fails; while reading, also if rows have changed where there is no snapshot.
        SchemaError: if a column isn't there, comes twice, or has values of several types (SQLite).
        UnsupportedError: for a query that may return other rows each time (random(), LIMIT without ORDER BY, the
            present time), and for types that aren't read: it says what to write instead.
        TypeError: if an argument is of the wrong type.
        ValueError: for values out of range.

    Example:
        >>> import fastpipe, sqlite3
        >>> with sqlite3.connect("orders.db") as database:
        ...     _ = database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, price REAL NOT NULL)")
        ...     _ = database.executemany("INSERT INTO orders (price) VALUES (?)", [(i / 2,) for i in range(6)])
        >>> database.close()
        >>> query = "SELECT price FROM orders WHERE price > ?"
        >>> reader = fastpipe.read_sql(query, "sqlite:///orders.db", parameters=[0.5], batch_size=3)
        >>> [batch["price"].tolist() for batch in reader]
        [[1.0, 1.5, 2.0], [2.5]]
    """
    settings = Settings(read_sql, batch_size, options)
    require_pyarrow()
    keys, parts = checked_by(by), checked_partitions(partitions)
    engine = engine_of(connection)
    wanted = checked(query, parameters, engine.dialect, once=materialize is not None)
    at_once = fetches(num_fetches, threads_of(settings) if engine.dialect == "sqlite" else _FETCHES)
    bound = engine.bind(wanted)
    if materialize is not None:

        def write() -> str:
            key = f"{engine.identity()}\0{wanted.text}\0{wanted.parameters!r}"
            return written(engine, bound, os.fspath(materialize), digest(key.encode()))

        path = interruptible(write, engine.cancel)
        files = Files(None)
        units: Any = ParquetUnits(files, files.find(path, (".parquet",)), hive=False, parallel=True)
        return reader_of(settings, units, features, columns, at_once)

    def plan() -> tuple[Sessions, SqlPlan]:
        sessions = engine.sessions(at_once, snapshot=snapshot)
        try:
            sessions.prepare()
            with sessions.planner() as session:
                return sessions, planned(engine, session, bound, keys, parts, None)
        except BaseException:
            sessions.close()
            raise

    sessions, made = interruptible(plan, engine.cancel)
    units = SqlUnits(engine, bound, made, sessions, at_once, snapshot=snapshot)
    return reader_of(settings, units, features, columns, at_once)


def partition_sql(
    query: str,
    connection: Any,
    *,
    parameters: Parameters = None,
    by: By = None,
    partitions: SupportsIndex | Literal["auto"] = "auto",
    preferred_rows: SupportsIndex | None = None,
) -> SqlPlan:
    """Cuts a query into queries that are disjoint and make up the whole, and shows them. Reads no rows but keys.

    Args:
        query: as in `read_sql`.
        connection: as in `read_sql`.
        parameters: as in `read_sql`.
        by: as in `read_sql`.
        partitions: as in `read_sql`.
        preferred_rows: of a partition where their number is "auto".

    Returns:
        The plan: `print(plan)` shows how many rows each partition has, and where it is cut.

    Raises:
        ValueError: if a number is out of range.

        And what `read_sql` raises.

    Example:
        >>> import fastpipe, sqlite3
        >>> with sqlite3.connect("users.db") as database:
        ...     _ = database.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, age INT)")
        ...     _ = database.executemany("INSERT INTO users (age) VALUES (?)", [(i % 50,) for i in range(1000)])
        >>> database.close()
        >>> plan = fastpipe.partition_sql("SELECT age FROM users", "sqlite:///users.db", partitions=2)
        >>> print(plan)
        1,000 rows in 2 partitions, cut by id; largest over mean 1.01
        partition  rows  where
        ---------  ----  -----------
                0   496  "id" < 497
                1   504  "id" >= 497
    """
    require_pyarrow()
    keys, parts = checked_by(by), checked_partitions(partitions)
    if preferred_rows is not None:
        within("preferred_rows", preferred_rows, 1, 2**32 - 1)
    engine = engine_of(connection)
    bound = engine.bind(checked(query, parameters, engine.dialect))

    def plan() -> SqlPlan:
        sessions = engine.sessions(1, snapshot=True)
        try:
            with sessions.planner() as session:
                return planned(engine, session, bound, keys, parts, preferred_rows)
        finally:
            sessions.close()

    return interruptible(plan, engine.cancel)
