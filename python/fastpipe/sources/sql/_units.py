"""The partitions of a query as units of a reader."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastpipe._text import plural
from fastpipe.errors import StorageError
from fastpipe.sources.sql._engines import Column, Engine, Sessions
from fastpipe.sources.sql._plan import SqlPlan, partition_text
from fastpipe.sources.sql._query import Query

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SqlUnits"]


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
