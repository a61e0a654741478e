"""Readers of queries, whose partitions are read separately or whose result is written to files once."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Unpack, cast

from fastpipe._arguments import shown, within
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.ordering import digest
from fastpipe._reader.reader import Reader
from fastpipe._text import plural
from fastpipe.errors import FastpipeError, StorageError, in_file
from fastpipe.specs import Spec
from fastpipe.specs._requests import FeatureRequest
from fastpipe.sql._connecting import engine_of
from fastpipe.sql._engines import Column, Engine, Sessions, selected
from fastpipe.sql._plan import METHODS, Method, PlannedQuery, SqlPlan, columns_of, partition_text, planned
from fastpipe.sql._query import Parameters, Query, checked
from fastpipe.sql._result import check_features, schema_of
from fastpipe.units._data import fetches, reader_of, threads_of
from fastpipe.units._files import Files
from fastpipe.units._parquet import ParquetUnits

if TYPE_CHECKING:
    import pyarrow as pa


class SqlUnits:
    """The partitions of a query, as a source (see `Units`).

    Args:
        engine: The database.
        query: The query to read.
        plan: The partitions of the query.
        sessions: Open connections; None to open them on demand.
        number: The maximum number of connections.
        snapshot: Whether all connections read the same snapshot.
        columns: The names of the columns to read; None for all.
    """

    def __init__(
        self,
        engine: Engine,
        query: Query,
        planned: PlannedQuery,
        sessions: Sessions | None,
        number: int,
        *,
        snapshot: bool,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._engine, self._query, self._planned, self._sessions = engine, query, planned, sessions
        self._number, self._snapshot = number, snapshot
        self._lock = threading.Lock()
        self._partitions = planned.plan.partitions
        self.rows = [part.rows for part in self._partitions]
        self._choose(columns)

    def _choose(self, columns: Sequence[str] | None) -> None:
        self._names = columns
        wanted = self._planned.columns
        self._columns: list[Column] = wanted if columns is None else [c for c in wanted if c.name in set(columns)]
        self.schema = schema_of(self._columns)

    def select(self, columns: list[str]) -> SqlUnits:
        """Returns the same units with only the given columns."""
        chosen = copy.copy(self)
        chosen._choose(columns)
        # Both objects share the same connections, no matter which of them opens these first.
        chosen._open = self._open  # type: ignore[method-assign]
        return chosen

    def name(self, unit: int) -> str:
        """Returns the name of a unit: its partition and predicate."""
        return f"partition {unit} of {len(self.rows)} of the query, where {self._partitions[unit].predicate or 'all'}"

    def fingerprint(self) -> list[Any]:
        """Returns the database's name, the query, its parameters, and the predicates of the partitions."""
        predicates = [part.predicate for part in self._partitions]
        return [self._engine.fingerprint(), self._query.text, repr(self._query.parameters), predicates]

    def _open(self) -> Sessions:
        with self._lock:
            if self._sessions is None:
                self._sessions = self._engine.sessions(self._number, snapshot=self._snapshot)
            return self._sessions

    def read(self, unit: int) -> pa.Table:
        """Reads the rows of a partition."""
        names, planned = selected(self._engine, self._columns), self._planned
        text = partition_text(planned.source, names, self._partitions[unit].predicate, planned.order)
        name = self.name(unit)
        with self._engine.errors(name), self._open().borrow() as session:
            table = self._engine.read(session, text, self._query.parameters, self._columns, self.rows[unit])
        if table.num_rows != self.rows[unit]:
            reason = (
                f"the partition had {plural(self.rows[unit], 'row')} when the reader was made, and has "
                f"{table.num_rows:,} now: its tables changed, or the query returns other rows each time. Create a new "
                "reader, or read the query once into files (materialize='directory')"
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
        return made, (engine, self._query, self._planned, None, self._number)


_T = TypeVar("_T")


def interruptible(work: Callable[[], _T], cancel: Callable[[], None]) -> _T:
    """Calls a function in a thread, so that Ctrl-C is handled immediately.

    After Ctrl-C, the thread continues in the background and releases its resources when the function returns.

    Args:
        work: The function, which waits for a database.
        cancel: A function that is called on Ctrl-C and may shorten the wait.
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
        # The error, its traceback and this frame would form a cycle that keeps connections open.
        error = errors.pop()
        try:
            raise error
        finally:
            del error
    return results.pop()


def checked_split(method: object, preferred_rows: object) -> tuple[Method, int | None]:
    """Returns the arguments `method` and `preferred_rows`.

    Raises:
        TypeError: If the number of rows is not an integer.
        ValueError: If an argument is out of range.
    """
    if method not in METHODS:
        raise ValueError(f"method must be 'auto', 'range' or 'hash'; got {shown(method)}")
    rows: Any = preferred_rows
    return cast("Method", method), None if rows is None else within("preferred_rows", rows, 1, 2**32 - 1)


By: TypeAlias = "str | Sequence[str] | None"

_MOST = 1 << 16


def checked_by(by: object) -> tuple[str, ...] | None:
    """Returns the names of the columns that split the query; None to choose them automatically.

    Raises:
        TypeError: If the argument is not made of names.
        ValueError: If it contains no name, or the same name twice.
    """
    if by is None:
        return None
    names = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, Sequence) else (by,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"by must be a column's name, a list of names or None; got {shown(by)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"by must name at least one column, and no column twice; got {shown(by)}")
    return names


def checked_partitions(num_partitions: object) -> int | None:
    """Returns the number of partitions; None for "auto".

    Raises:
        TypeError: If the argument is not an integer.
        ValueError: If the argument is out of range.
    """
    if num_partitions == "auto":
        return None
    try:
        number = operator.index(num_partitions)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"num_partitions must be an integer or 'auto'; got {shown(num_partitions)}") from None
    if isinstance(num_partitions, bool) or not 1 <= number <= _MOST:
        raise ValueError(f"num_partitions must be from 1 to {_MOST}, or 'auto'; got {shown(num_partitions)}")
    return number


_GROUP_ROWS = 1 << 17


def written(engine: Engine, query: Query, directory: str, digest: str, request: FeatureRequest) -> str:
    """Writes a result to a Parquet file, unless the file already exists.

    Several processes may call this at the same time. Each process writes its own temporary file, and the first complete
    file is kept.

    Args:
        engine: The database.
        query: The query, which is run once.
        directory: The directory of the file, which is created if necessary.
        digest: The name of the file, without its suffix.
        request: The features to read, which are checked before the query is run.

    Returns:
        The path of the file.

    Raises:
        StorageError: If the database or the disk fails.
    """
    path = os.path.join(directory, f"{digest}.parquet")
    if os.path.exists(path):
        return path
    try:
        os.makedirs(directory, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix=f".{digest}-", suffix=".unfinished", dir=directory)
    except OSError as error:
        reason = f"the directory of materialize is not writable: {error.strerror}"
        raise in_file(StorageError, directory, reason) from error
    os.close(handle)
    try:
        _write(engine, query, unfinished, request)
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    except OSError as error:
        if isinstance(error, FastpipeError):
            raise
        reason = f"the result can't be written to the directory of materialize: {error.strerror or error}"
        raise in_file(StorageError, path, reason) from error
    finally:
        os.unlink(unfinished)
    return path


def _write(engine: Engine, query: Query, path: str, request: FeatureRequest) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    sessions = engine.sessions(1, snapshot=True)
    try:
        with engine.errors("materializing the query"), sessions.borrow() as session:
            columns = columns_of(engine, session, query)
            check_features(columns, request)
            schema = pa.schema([(column.name, column.type) for column in columns])
            sql = f"SELECT {selected(engine, columns)} FROM {query.derived}"
            with pyarrow.parquet.ParquetWriter(path, schema) as writer:
                for table in engine.stream(session, sql, query.parameters, columns):
                    writer.write_table(table, row_group_size=_GROUP_ROWS)
    finally:
        sessions.close()


# Concurrent queries. The database may run on another machine, with its own processors.
_FETCHES = 4


@takes_options()
def read_sql(
    query: str,
    connection: Any,
    *,
    parameters: Parameters = None,
    by: By = None,
    method: Literal["auto", "range", "hash"] = "auto",
    num_partitions: int | Literal["auto"] = "auto",
    preferred_rows: int | None = None,
    snapshot: bool = True,
    materialize: str | os.PathLike[str] | None = None,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    batch_size: int,
    num_fetches: int | None = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads the result of a query as batches of NumPy arrays (extras `postgresql`, `sqlite`, `duckdb`, or `sql`).

    The query is split into partitions: disjoint queries that together return the whole result. Each partition is
    `SELECT … FROM (query) AS q WHERE … ORDER BY …`. The query therefore keeps its meaning, and rows come in the same
    order each time. `partition_sql` shows the partitions. If a query reads one table and doesn't select its primary
    key, fastpipe adds the key as a column to split by, but doesn't read it.

    All partitions see the database as it was when the reader was created:

    - PostgreSQL: a snapshot, which one connection holds open for the lifetime of the reader. (Vacuum can't remove rows
      that the snapshot sees.) Readers that are pickled into other processes can use the snapshot as long as the first
      reader exists.
    - SQLite: in WAL mode, the transactions of all connections see the same state. In other modes, a change of the file
      raises an error at the next partition.
    - DuckDB, MySQL and MariaDB: one transaction reads the partitions one after another.

    If such a snapshot isn't available (after pickling a reader of SQLite, DuckDB or MySQL), a partition whose number of
    rows differs from the plan raises an error.

    Args:
        query: A SELECT statement in the database's dialect.
        connection: A URL (`postgresql://user@host/database`, `sqlite:///path.db`, `duckdb:///path.db`,
            `mysql+pymysql://…`), a SQLAlchemy Engine, a duckdb connection, or a function that returns an Engine or an
            ADBC connection of SQLite or PostgreSQL.
        parameters: The values of the query's placeholders, in the notation of the database's library: `?` or `:name`
            (SQLite), `%s` or `%(name)s` (PostgreSQL with psycopg, MySQL), `?` or `$name` (DuckDB). Defaults to None: no
            placeholders.
        by: The columns of the result whose ranges or hash split the query. Defaults to an integer primary key of the
            table, or else one or two columns with many distinct values.
        method: How the query is split. "range" gives each partition the rows between two values of `by`. "hash" gives
            it the rows whose hash of `by` has the same remainder: a row stays with the same predicate when rows are
            added. "auto" (the default) uses ranges of `by` or of a primary key, or else a hash.
        num_partitions: The maximum number of partitions, 1 to 65,536. There are fewer if large gaps between keys, or
            rows with equal values, leave some of them empty. "auto" (the default) chooses the number by
            `preferred_rows`; with a hash, it is a power of two.
        preferred_rows: The preferred number of rows of a partition if `num_partitions` is "auto", 1 to 2^32 - 1. By
            default, 131,072 rows if a primary key finds them, or else 1,048,576 rows, because each partition runs the
            whole query again.
        snapshot: Whether all partitions must see the same state of the database. If False, connections have no common
            snapshot. Defaults to True.
        materialize: A directory, to which the result is written once as Parquet files that are then read. An existing
            result of the same query, parameters and database is used without checking whether the data changed. A
            database in memory is the same only for the same connection. Defaults to None: the database is read.
        features: The spec of each feature, by name: the name of a column. By default, features are inferred from the
            column types. Columns that may contain NULLs, according to the database, have `on_null="mask"`.
        columns: The columns to read: a list of at least one name, or one name as a string. Defaults to None: all
            columns.
        overrides: Specs that replace some of the inferred specs, by name. Not allowed with `features`. Defaults to
            None: all specs are inferred.
        batch_size: Number of rows per batch.
        num_fetches: The number of queries that run concurrently, each on a separate connection, 1 to 1024. Defaults to
            4, and to `num_threads` for SQLite.
        **options: See `fastpipe.typing.Options`.

    Returns:
        The reader.

    Raises:
        ImportError: If a library isn't installed. The message names the package to install.
        MissingFileError: If the database is a file that does not exist.
        StorageError: If the database fails. While reading, also if rows changed and there is no snapshot.
        SchemaError: If a column does not exist, appears twice, or has values of several types (SQLite), if a spec
            doesn't fit its column, or if `overrides` names a column that isn't read. Columns and specs are checked
            before the query is planned.
        UnsupportedError: If the query may return other rows each time (random(), LIMIT without ORDER BY, the current
            time), or a type is not supported. The message suggests a replacement.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

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
    request = FeatureRequest.of(features, columns, overrides)
    require_pyarrow()
    keys, parts = checked_by(by), checked_partitions(num_partitions)
    how, preferred = checked_split(method, preferred_rows)
    engine = engine_of(connection)
    wanted = checked(query, parameters, engine.dialect, once=materialize is not None)
    at_once = fetches(num_fetches, threads_of(settings) if engine.dialect == "sqlite" else _FETCHES)
    bound = engine.bind(wanted)
    if materialize is not None:

        def write() -> str:
            key = f"{engine.identity()}\0{wanted.text}\0{wanted.parameters!r}"
            return written(engine, bound, os.fspath(materialize), digest(key.encode()), request)

        path = interruptible(write, engine.cancel)
        files = Files(None)
        units: Any = ParquetUnits(files, files.find(path, (".parquet",)), hive=False, parallel=True)
        return reader_of(settings, units, request, at_once)

    def plan() -> tuple[Sessions, PlannedQuery]:
        sessions = engine.sessions(at_once, snapshot=snapshot)
        try:
            sessions.prepare()
            with sessions.planner() as session:
                found = columns_of(engine, session, bound)
                check_features(found, request)
                return sessions, planned(engine, session, bound, found, keys, parts, preferred, how)
        except BaseException:
            sessions.close()
            raise

    sessions, made = interruptible(plan, engine.cancel)
    units = SqlUnits(engine, bound, made, sessions, at_once, snapshot=snapshot)
    try:
        return reader_of(settings, units, request, at_once)
    except BaseException:
        units.close()
        raise


def partition_sql(
    query: str,
    connection: Any,
    *,
    parameters: Parameters = None,
    by: By = None,
    method: Literal["auto", "range", "hash"] = "auto",
    num_partitions: int | Literal["auto"] = "auto",
    preferred_rows: int | None = None,
) -> SqlPlan:
    """Splits a query into disjoint queries that together return the whole result. Reads only the keys of rows.

    Args:
        query: A SELECT statement in the database's dialect.
        connection: A URL (`postgresql://user@host/database`, `sqlite:///path.db`, `duckdb:///path.db`,
            `mysql+pymysql://…`), a SQLAlchemy Engine, a duckdb connection, or a function that returns an Engine or an
            ADBC connection.
        parameters: The values of the query's placeholders. Defaults to None.
        by: The columns of the result whose ranges or hash split the query. By default, they are chosen automatically.
        method: "range", "hash" or "auto" (the default): ranges of `by` or of a primary key, or else a hash. See
            `read_sql`. SQLite hashes only integers.
        num_partitions: The number of partitions, 1 to 65,536. Defaults to "auto", which chooses it by `preferred_rows`.
            With a hash, it is then a power of two.
        preferred_rows: The preferred number of rows of a partition if `num_partitions` is "auto", 1 to 2^32 - 1. By
            default, 131,072 rows if a primary key finds them, or else 1,048,576 rows.

    Returns:
        The plan. `print(plan)` shows the number of rows of each partition, and where the query is split.

    Raises:
        UnsupportedError: If the database can't hash a column with `method="hash"`.
        ValueError: If an argument is out of range.
        FastpipeError: If the query can't be read; `read_sql` lists the errors.

    Example:
        >>> import fastpipe, sqlite3
        >>> with sqlite3.connect("users.db") as database:
        ...     _ = database.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, age INT)")
        ...     _ = database.executemany("INSERT INTO users (age) VALUES (?)", [(i % 50,) for i in range(1000)])
        >>> database.close()
        >>> plan = fastpipe.sql.partition_sql("SELECT age FROM users", "sqlite:///users.db", num_partitions=2)
        >>> print(plan)
        1,000 rows in 2 partitions, cut by id; largest over mean 1.01
        partition  rows  where
        ---------  ----  -----------
                0   496  "id" < 497
                1   504  "id" >= 497
        >>> plan = fastpipe.sql.partition_sql(
        ...     "SELECT age FROM users", "sqlite:///users.db", method="hash", num_partitions=4
        ... )
        >>> plan.by, [part.rows for part in plan.partitions]
        (('id',), [246, 250, 252, 252])
    """
    require_pyarrow()
    keys, parts = checked_by(by), checked_partitions(num_partitions)
    how, preferred = checked_split(method, preferred_rows)
    engine = engine_of(connection)
    bound = engine.bind(checked(query, parameters, engine.dialect))

    def plan() -> SqlPlan:
        sessions = engine.sessions(1, snapshot=True)
        try:
            with sessions.planner() as session:
                found = columns_of(engine, session, bound)
                return planned(engine, session, bound, found, keys, parts, preferred, how).plan
        finally:
            sessions.close()

    return interruptible(plan, engine.cancel)
