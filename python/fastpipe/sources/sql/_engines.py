"""What a database must offer so that results of its queries are read in partitions."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fastpipe.errors import FastpipeError, SchemaError, StorageError, UnsupportedError
from fastpipe.sources.sql._lineage import Plain, plain
from fastpipe.sources.sql._query import Parameters, Query

if TYPE_CHECKING:
    import pyarrow as pa


class Column(NamedTuple):
    """A column of a result.

    Attributes:
        name: as the result has it.
        type: in Arrow, as `Engine.read` returns it.
        read: SQL that reads it, in which {} is the quoted name.
        order: SQL by which only equal values tie; none if the type has no order.
        fitness: how fit it is as a key, 0 for the fittest; None if it can be none.
        kind: the database's own name of the type, of which literals of keys are.
        nullable: whether there may be NULLs, as the database says.
        key: SQL that is sorted and compared where the column is a key, in which {} is the quoted name.
    """

    name: str
    type: pa.DataType
    read: str = "{}"
    order: tuple[str, ...] = ("{}",)
    fitness: int | None = 0
    kind: str = ""
    nullable: bool = True
    key: str = "{}"


class Engine(ABC):
    """A database and its dialect. It is pickled into other processes.

    A session is a connection as the engine's library has it.
    """

    name: ClassVar[str]
    """As its users call it."""

    where: str = ""
    """Which of its databases, as an error tells it."""

    dialect: ClassVar[str]
    """As sqlglot calls it."""

    hash: ClassVar[str | None] = None
    """SQL for an integer of 0 to 2^31 - 1 that depends on all of a unique integer column, {}; None if there is none."""

    def quote(self, name: str) -> str:
        """An identifier."""
        return '"' + name.replace('"', '""') + '"'

    def literal(self, text: str, column: Column) -> str:
        """The literal of a key, of the text that `key_text` returned."""
        quoted = text.replace("'", "''")
        return f"CAST('{quoted}' AS {column.kind})"

    @abstractmethod
    def key_text(self, column: str) -> str:
        """SQL for a key's value as text."""

    def quotient(self, dividend: str, divisor: str) -> str:
        """SQL for the quotient of integers that aren't negative, rounded down."""
        return f"({dividend}) / ({divisor})"

    def widths(self, derived: str, column: str, low: int, width: int, number: int) -> str:
        """A query for how many rows stretches of equal width have: numbers, and rows; a stretch without any may lack.

        Args:
            derived: a WITH clause in which `q` is the result.
            column: of integers, each once, without NULLs.
            low: where the first stretch begins.
            width: of each.
            number: of stretches.
        """
        raise NotImplementedError

    @abstractmethod
    def bind(self, query: Query) -> Query:
        """The query as `read` and `fetch` take it."""

    @abstractmethod
    def columns(self, session: Any, query: Query) -> list[Column]:
        """The columns of a result."""

    def doubt(self, session: Any, query: Query) -> str | None:
        """Why the query may return other rows each time, as the database says; None if it says nothing."""
        return None

    def table_of(self, session: Any, query: Query) -> Plain | None:
        """What the query reads, if that is each row of one table at most once; else None."""
        found = plain(query.text, self.dialect)
        return None if found is None or (found.calls and self.changes_rows(session, found.calls)) else found

    def changes_rows(self, session: Any, calls: frozenset[str]) -> bool:
        """Whether one of these names, in lower case, may be an aggregate or a function that returns several rows."""
        return True

    def unique_keys(self, session: Any, table: Plain) -> list[str]:
        """Columns of a table that are integers by which rows are found, without NULLs, each value once; best first."""
        return []

    @contextlib.contextmanager
    def counting(self, session: Any, query: Query) -> Iterator[None]:
        """Readies a session for queries that only count rows of a query of one table."""
        yield

    @abstractmethod
    def fetch(self, session: Any, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        """The few rows of a query for planning."""

    @abstractmethod
    def read(self, session: Any, sql: str, parameters: Parameters, columns: list[Column], rows: int) -> pa.Table:
        """The rows of a query.

        Args:
            session: from a snapshot.
            sql: the query.
            parameters: bound to it.
            columns: that it returns.
            rows: how many it should return.
        """

    @abstractmethod
    def stream(self, session: Any, sql: str, parameters: Parameters, columns: list[Column]) -> Iterator[pa.Table]:
        """The rows of a query, some at a time."""

    @abstractmethod
    def sessions(self, number: int, *, snapshot: bool) -> Sessions:
        """Opens connections.

        Args:
            number: that may be used at once.
            snapshot: whether all are to see one state.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """The database's name: it is part of states, which a copy of the database elsewhere accepts."""

    @abstractmethod
    def identity(self) -> list[Any]:
        """The values that distinguish this database, as this connection sees it, from all others; no password."""

    def cancel(self) -> None:
        """Cancels queries that are being run; those that can't be are left."""
        return

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turns what the database raises into a `StorageError` that says what was done."""
        try:
            yield
        except (FastpipeError, ImportError, MemoryError):
            raise
        except Exception as error:
            import pyarrow

            if isinstance(error, pyarrow.ArrowMemoryError):
                raise
            # The text of these is only a name, or about Python.
            kind = f"{type(error).__name__}: " if isinstance(error, (LookupError, TypeError)) else ""
            reason = f"{self.name} failed{self.where}: {kind}{self.cleaned(str(error)).strip()}"
            raise StorageError(f"{reason} ({what})", reason=reason, unit=what) from None

    def cleaned(self, text: str) -> str:
        """A message of the database without what mustn't be shown."""
        return text

    def with_token(self, token: Any) -> Engine:
        """The same, whose sessions see the state of another process."""
        return self


# Connections that a fork has copied. They are kept, so that nobody closes them.
_of_others: list[Any] = []


def keep_for_other(connections: Any) -> None:
    """Keeps connections that another process uses: closing them here would end them there."""
    _of_others.append(connections)


def fitted(table: pa.Table, columns: list[Column]) -> pa.Table:
    """A result with the columns' types."""
    import pyarrow as pa

    found = [
        values if values.type == column.type else values.cast(column.type)
        for column, values in zip(columns, table.columns, strict=True)
    ]
    return pa.table(found, names=[column.name for column in columns])


class Sessions(ABC):
    """Connections of a process, and what they have in common."""

    one_state: bool
    """Whether all see one state."""

    @abstractmethod
    def borrow(self) -> contextlib.AbstractContextManager[Any]:
        """A session for a while. No other thread has it."""

    def planner(self) -> contextlib.AbstractContextManager[Any]:
        """A session for queries with few rows, by `Engine.fetch`."""
        return self.borrow()

    def prepare(self) -> None:
        """Begins to open a session that will be borrowed, where that takes a while."""
        return

    @abstractmethod
    def close(self) -> None:
        """Closes all that aren't borrowed."""

    def token(self) -> Any:
        """What lets another process see the same state; None if it can't."""
        return None


class SessionPool(Sessions):
    """Sessions that are opened when they are needed, and used again unless something failed on them.

    Args:
        connect: opens one that sees the state.
        disconnect: closes one.
        number: open at most.
        one_state: whether all see one state.
        reusable: whether a session on which a query failed is as good as new.
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
                "connections to a database can't be used in a forked process: pickle the reader into it (start it "
                "with spawn), or make the reader there"
            )
            raise UnsupportedError(reason, reason=reason)


class OneSession(SessionPool):
    """One session, used by one thread after the other: its transaction is the state that all see."""

    def __init__(self, session: Any, disconnect: Callable[[Any], None]) -> None:
        super().__init__(self._gone, disconnect, 1, one_state=True, reusable=True)
        self.give([session])

    @staticmethod
    def _gone() -> Any:
        reason = "the reader's connection was closed"
        raise StorageError(reason, reason=reason)


_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def finite(table: pa.Table, first_day: int | None = None) -> pa.Table:
    """The same table.

    Args:
        table: a result.
        first_day: in days since 1970; what is before it was no time of the database. None if infinite times come as the
            largest and the smallest numbers.

    Raises:
        SchemaError: if it has infinite times.
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
                f"column {field.name!r} has infinite times, which NumPy hasn't: write NULLIF({field.name}, 'infinity') "
                "in the query, or leave these rows out"
            )
            raise SchemaError(reason, feature=field.name, reason=reason)
    return table
