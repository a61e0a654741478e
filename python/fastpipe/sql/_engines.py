"""The interface of databases whose query results can be read in partitions."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fastpipe.errors import FastpipeError, SchemaError, StorageError, UnsupportedError
from fastpipe.sql._lineage import Plain, plain
from fastpipe.sql._query import Parameters, Query

if TYPE_CHECKING:
    import pyarrow as pa


class Column(NamedTuple):
    """A column of a result.

    Attributes:
        name: Its name in the result.
        type: Its Arrow type, as `Engine.read` returns it.
        read: SQL that reads it, in which {} is the quoted name.
        order: SQL expressions by which only equal values tie; empty if the type has no order.
        fitness: The rank of the column as a key, 0 for the best; None if it can't be a key.
        kind: The database's name of the type, to which literals of keys are cast.
        nullable: Whether the column may contain NULLs, according to the database.
        key: SQL that sorts and compares the column if it is a key, in which {} is the quoted name.
    """

    name: str
    type: pa.DataType
    read: str = "{}"
    order: tuple[str, ...] = ("{}",)
    fitness: int | None = 0
    kind: str = ""
    nullable: bool = True
    key: str = "{}"


# The largest prime below 2^31. Hashes are remainders of it, and their products are below 2^63, above which SQLite would
# continue with floats.
PRIME = 2**31 - 1
# Lehmer's generator, with a multiplier of P. L'Ecuyer, Tables of Linear Congruential Generators, Math. Comp. 1999.
LEHMER = f"((abs({{}} % {PRIME}) * 1583458089) % {PRIME})"
_MULTIPLIER = 48271


class Engine(ABC):
    """A database and its dialect. It can be pickled into other processes.

    A session is a connection object of the engine's library.
    """

    name: ClassVar[str]
    """The database's common name."""

    where: str = ""
    """The part of an error message that names the database."""

    dialect: ClassVar[str]
    """The dialect's name in sqlglot."""

    def quote(self, name: str) -> str:
        """Returns a quoted identifier."""
        return '"' + name.replace('"', '""') + '"'

    def literal(self, text: str, column: Column) -> str:
        """Returns the literal of a key from the text that `key_text` returned."""
        quoted = text.replace("'", "''")
        return f"CAST('{quoted}' AS {column.kind})"

    def hashed(self, column: Column) -> str | None:
        """Returns SQL that hashes a column to an integer of 0 to 2^31 - 1, or NULL; None if the database has no hash.

        The SQL contains {} for the column. Integers are hashed by arithmetic, which is the same in all versions.
        """
        import pyarrow as pa

        return LEHMER if pa.types.is_integer(column.type) else None

    def remainder(self, dividend: str, divisor: int) -> str:
        """Returns SQL for the remainder of two non-negative integers."""
        return f"({dividend} % {divisor})"

    def hash_of(self, keys: Sequence[Column]) -> str:
        """Returns SQL for the common hash of columns that have hashes: 0 to 2^31 - 1, and never NULL.

        The hash of NULL is 0. A predicate that is NULL would leave out the row.
        """
        known = [str(self.hashed(key)).format(key.key.format(self.quote(key.name))) for key in keys]
        first, *rest = (f"COALESCE({each}, 0)" for each in known)
        for each in rest:
            first = self.remainder(f"({first} * {_MULTIPLIER} + {each})", PRIME)
        return first

    @abstractmethod
    def key_text(self, column: str) -> str:
        """Returns SQL for the value of a key as text."""

    def quotient(self, dividend: str, divisor: str) -> str:
        """Returns SQL for the quotient of two non-negative integers, rounded down."""
        return f"({dividend}) / ({divisor})"

    def widths(self, derived: str, column: str, low: int, width: int, number: int, *, joined: bool) -> str:
        """Returns a query that counts the rows in ranges of equal width, as pairs of range index and row count.

        Ranges without rows may be missing.

        Args:
            derived: A WITH clause that defines the result as `q`.
            column: A column of integers without NULLs.
            low: The start of the first range.
            width: The width of each range.
            number: The number of ranges.
            joined: Whether the query joins tables, which should be computed once.
        """
        raise NotImplementedError

    @abstractmethod
    def bind(self, query: Query) -> Query:
        """Returns the query in the form that `read` and `fetch` expect."""

    @abstractmethod
    def columns(self, session: Any, query: Query) -> list[Column]:
        """Returns the columns of a result."""

    def doubt(self, session: Any, query: Query) -> str | None:
        """Returns the reason why the query may return other rows each time; None if the database reports no reason."""
        return None

    def table_of(self, session: Any, query: Query) -> Plain | None:
        """Returns a description of the query if it reads each row of one table at most once, otherwise None."""
        found = plain(query.text, self.dialect)
        return None if found is None or (found.calls and self.changes_rows(session, found.calls)) else found

    def changes_rows(self, session: Any, calls: frozenset[str]) -> bool:
        """Returns whether a name, in lower case, may be an aggregate or a function that returns several rows."""
        return True

    def unique_keys(self, session: Any, table: Plain) -> list[str]:
        """Returns a table's indexed, unique integer columns without NULLs, best first."""
        return []

    def hidden_key(self, session: Any, table: Plain) -> str | None:
        """Returns an indexed, unique integer column without NULLs that `*` doesn't select; None if there is none."""
        return None

    @contextlib.contextmanager
    def counting(self, session: Any, query: Query) -> Iterator[None]:
        """Prepares a session for queries that only count rows of a query of one table."""
        yield

    @abstractmethod
    def fetch(self, session: Any, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        """Returns the rows of a small query for planning."""

    @abstractmethod
    def read(self, session: Any, sql: str, parameters: Parameters, columns: list[Column], rows: int) -> pa.Table:
        """Returns the rows of a query.

        Args:
            session: A session of the snapshot.
            sql: The query.
            parameters: The values of its placeholders.
            columns: The columns that it returns.
            rows: The number of rows that it is expected to return.
        """

    @abstractmethod
    def stream(self, session: Any, sql: str, parameters: Parameters, columns: list[Column]) -> Generator[pa.Table]:
        """Yields the rows of a query in chunks."""

    @abstractmethod
    def sessions(self, number: int, *, snapshot: bool) -> Sessions:
        """Opens connections.

        Args:
            number: The maximum number of connections in use at the same time.
            snapshot: Whether all connections must see the same state.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns the database's name, which is part of states. Copies of the database have the same name."""

    @abstractmethod
    def identity(self) -> list[Any]:
        """Returns values that distinguish this database, as this connection sees it, from others. Omits passwords."""

    def cancel(self) -> None:
        """Cancels running queries, if the database supports it."""
        return

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Converts exceptions of the database to a `StorageError` that names the failed operation."""
        try:
            yield
        except (FastpipeError, ImportError, MemoryError):
            raise
        except Exception as error:
            import pyarrow

            if isinstance(error, pyarrow.ArrowMemoryError):
                raise
            # The text of these exceptions is only a name, or describes a Python problem.
            kind = f"{type(error).__name__}: " if isinstance(error, (LookupError, TypeError)) else ""
            reason = f"{self.name} failed{self.where}: {kind}{self.cleaned(str(error)).strip()}"
            raise StorageError(f"{reason} ({what})", reason=reason, unit=what) from None

    def cleaned(self, text: str) -> str:
        """Returns a message of the database without secrets."""
        return text

    def with_token(self, token: Any) -> Engine:
        """Returns an engine whose sessions see the snapshot of another process."""
        return self


# Connections of a parent process. They are kept alive, so that they are never closed in this process.
_of_others: list[Any] = []


def keep_for_other(connections: Any) -> None:
    """Keeps connections of another process alive: closing them here would end them there."""
    _of_others.append(connections)


def fitted(table: pa.Table, columns: list[Column]) -> pa.Table:
    """Returns a result cast to the columns' types."""
    import pyarrow as pa

    found = [
        values if values.type == column.type else values.cast(column.type)
        for column, values in zip(columns, table.columns, strict=True)
    ]
    return pa.table(found, names=[column.name for column in columns])


def selected(engine: Engine, columns: list[Column]) -> str:
    """Returns the SQL that reads columns of a result, for the list of a SELECT."""
    return ", ".join(column.read.format(engine.quote(column.name)) for column in columns)


class Sessions(ABC):
    """The connections of one process to a database."""

    one_state: bool
    """Whether all sessions see the same state of the database."""

    @abstractmethod
    def borrow(self) -> contextlib.AbstractContextManager[Any]:
        """Lends a session to the calling thread."""

    def planner(self) -> contextlib.AbstractContextManager[Any]:
        """Lends a session for small queries with `Engine.fetch`."""
        return self.borrow()

    def prepare(self) -> None:
        """Starts to open a session that will be borrowed, if opening it takes time."""
        return

    @abstractmethod
    def close(self) -> None:
        """Closes all sessions that aren't borrowed."""

    def token(self) -> Any:
        """Returns a token that lets another process see the same state; None if that is not possible."""
        return None


class SessionPool(Sessions):
    """Sessions that are opened on demand, and reused unless they failed.

    Args:
        connect: A function that opens a session with the pool's state.
        disconnect: A function that closes a session.
        number: The maximum number of open sessions.
        one_state: Whether all sessions see the same state.
        reusable: Whether a session can be reused after a failed query.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        disconnect: Callable[[Any], None],
        number: int,
        *,
        one_state: bool,
        reusable: bool = False,
    ) -> None:
        self._connect: Callable[..., Any] = connect
        self._disconnect, self.one_state, self._reusable = disconnect, one_state, reusable
        self._free: list[Any] = []
        self._room = threading.BoundedSemaphore(number)
        self._process = os.getpid()

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Any]:
        self._check_process()
        with self._room:
            session = self._free.pop() if self._free else self._connect()
            try:
                yield session
            except BaseException:
                if self._reusable:
                    self._free.append(session)
                else:
                    with contextlib.suppress(Exception):
                        self._disconnect(session)
                raise
            self._free.append(session)

    def give(self, sessions: list[Any]) -> None:
        """Adds sessions that were opened elsewhere."""
        self._free += sessions

    def close(self) -> None:
        if os.getpid() != self._process:
            keep_for_other(self._free)
            self._free = []
        while self._free:
            with contextlib.suppress(Exception):
                self._disconnect(self._free.pop())

    def __del__(self) -> None:
        self.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            reason = (
                "connections to a database can't be used in a forked process: pickle the reader into a spawned "
                "process, or create the reader there"
            )
            raise UnsupportedError(reason, reason=reason)


class OneSession(SessionPool):
    """One session that one thread uses at a time. Its transaction is the common state."""

    def __init__(self, session: Any, disconnect: Callable[[Any], None]) -> None:
        super().__init__(self._gone, disconnect, 1, one_state=True, reusable=True)
        self.give([session])

    @staticmethod
    def _gone() -> Any:
        reason = "the reader's connection was closed"
        raise StorageError(reason, reason=reason)


_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def finite(table: pa.Table, first_day: int | None = None) -> pa.Table:
    """Returns a table after checking that it has no infinite times.

    Args:
        table: The result of a query.
        first_day: The first day that the database supports, in days since 1970. Earlier times stand for infinity. None
            if infinite times are the largest and smallest numbers.

    Raises:
        SchemaError: If the table has infinite times.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for field, values in zip(table.schema, table.columns, strict=True):
        if pa.types.is_date32(field.type):
            counted, most, day = pa.int32(), 2**31 - 1, 1
        elif pa.types.is_timestamp(field.type):
            counted, most, day = pa.int64(), 2**63 - 1, _A_DAY[field.type.unit]
        else:
            continue
        ends = pc.min_max(values.cast(counted)).as_py()
        if ends["min"] is None:
            continue
        first, last = (-most + 1, most - 1) if first_day is None else (first_day * day, most)
        if ends["min"] < first or ends["max"] > last:
            reason = (
                f"column {field.name!r} has infinite times, which NumPy doesn't support: use NULLIF({field.name}, "
                "'infinity') in the query, or leave these rows out"
            )
            raise SchemaError(reason, feature=field.name, reason=reason)
    return table
