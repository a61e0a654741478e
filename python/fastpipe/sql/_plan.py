"""Plans split a query into disjoint queries that together return the whole result.

A plan depends only on the data, so another process, or a later run, makes the same plan for the same data. The method
depends on the key:

- If an integer column is unique and indexed (a primary key), a query counts the rows of key ranges of equal width. If
  these ranges are too uneven to be joined, a query reads a sample of keys, those with a small hash. The ranges between
  the sampled keys are then counted by another query.
- If such a key seems to have no gaps, one count of all rows, which is cheaper, confirms that and gives the number of
  rows in each range.
- If there is no such key, one query counts the rows by a hash of one or two columns with many distinct values. It
  computes the user's query once, and groups rows by small numbers, which is several times faster than grouping them by
  values.
- If such columns don't exist, have no hash, or divide the rows unevenly, and if the user names columns for ranges, one
  query counts the rows of each key value, adds up the counts in key order, and returns the starts of several thousand
  ranges of equal size.
"""

from __future__ import annotations

import operator
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from fastpipe._text import plural, table
from fastpipe.errors import SchemaError, StorageError, UnsupportedError
from fastpipe.sql._engines import Column, Engine, selected
from fastpipe.sql._lineage import streams
from fastpipe.sql._query import Query, not_repeatable
from fastpipe.sql._range_predicates import Cut, between, chosen, part_number

if TYPE_CHECKING:
    import pyarrow as pa

# Preferred rows of a partition: if rows are found by an indexed key, or else, if each partition computes the query
# again.
_PREFERRED_INDEXED = 1 << 17
_PREFERRED = 1 << 20
_MOST_BY_ITSELF = 1024

# Minimum number of pieces per partition. The largest partition is at most 1/64 larger than with arbitrary cuts.
_PIECES = 64
_LEAST_PIECES = 4096
_SAMPLED = 512
# Ranges of a unique column per partition, and the maximum in total: SQLite joins up to 500 queries.
_WIDTHS = 32
_MOST_WIDTHS = 448
# Keys to check for gaps at each end of a unique column, and the range of key counts for which the check pays off.
_LOOKED_AT_ENDS = 1 << 12
_DENSE_FROM, _DENSE_UP_TO = 1 << 16, 1 << 40
# The keys of a join are divided by their difference from the least key, which must not overflow.
_WIDEST = 1 << 62
# Maximum size of the largest partition relative to the mean, unless equal values force a larger one.
_SKEW = 1.15
# The number of rows from which a key is chosen if there is no primary key.
_LOOKED_AT = 2000
# The number of distinct values in these rows from which a column is hashed: fewer values are soon counted one by one.
_MANY = 256
# The number of columns to hash of a query whose first rows aren't looked at.
_MOST_HASHED = 8

Method: TypeAlias = Literal["auto", "range", "hash"]
METHODS = get_args(Method)


class SqlPartition(NamedTuple):
    """A query for a part of a result.

    Attributes:
        number: The index of the part, from 0.
        query: The text of the query, which returns its rows in a fixed order.
        parameters: The parameters of its placeholders, as in the whole query.
        rows: The number of rows that it returned when the plan was made.
        predicate: The condition that selects the rows of the part; None for all rows.
    """

    number: int
    query: str
    parameters: Any
    rows: int
    predicate: str | None


@dataclass(frozen=True)
class SqlPlan:
    """The partitions of a query. `print(plan)` shows them as a table.

    Attributes:
        text: The query.
        by: The columns whose ranges or hash split the query; empty if it isn't split. A primary key need not be in the
            result.
        rows: The number of rows of the whole result.
        partitions: The queries. Each of them returns at least one row.
        heaviest: The maximum number of rows that share one value of `by` and can't be separated. 1 for a unique column,
            None if the rows of each value weren't counted.
        queries: The queries that were run to make the plan.
        schema: The Arrow schema of the result.
    """

    text: str
    by: tuple[str, ...]
    rows: int
    partitions: list[SqlPartition]
    heaviest: int | None
    queries: list[str]
    schema: pa.Schema = field(repr=False)
    hashed: bool = field(default=False, repr=False)

    @property
    def method(self) -> str:
        """`range` or `hash`, as the query is split, or `whole` if there is at most one partition."""
        return "whole" if len(self.partitions) < 2 else "hash" if self.hashed else "range"

    @property
    def skew(self) -> float:
        """The number of rows of the largest partition divided by the mean; 1.0 without rows."""
        rows = [part.rows for part in self.partitions]
        return max(rows) * len(rows) / sum(rows) if rows else 1.0

    @property
    def skew_bound(self) -> float:
        """The minimum of `skew`, since rows with equal values of `by` can't be separated. 1.0 if it isn't known."""
        if not self.rows or self.heaviest is None:
            return 1.0
        return max(1.0, self.heaviest * len(self.partitions) / self.rows)

    def __str__(self) -> str:
        width = max(shutil.get_terminal_size((120, 24)).columns, 60)
        parts = plural(len(self.partitions), "partition")
        how = {"whole": "", "range": ", cut by ", "hash": ", by a hash of "}[self.method]
        how += ", ".join(self.by) if how else ""
        text = f"{plural(self.rows, 'row')} in {parts}{how}; largest over mean {self.skew:.2f}"
        if self.heaviest is not None and self.skew_bound > 1.0:
            text += f" (not below {self.skew_bound:.2f}: {plural(self.heaviest, 'row')} have one value)"
        rows = [[str(part.number), f"{part.rows:,}", part.predicate or "all rows"] for part in self.partitions]
        if len(rows) > 20:
            rows = [*rows[:10], ["…", "…", "…"], *rows[-9:]]
        return f"{text}\n{table(['partition', 'rows', 'where'], rows, width, right=[0, 1])}"


class PlannedQuery(NamedTuple):
    """A plan, and how to read columns of its partitions.

    Attributes:
        plan: The plan.
        columns: The columns of the result.
        order: The sort order of a partition.
        source: The query.
    """

    plan: SqlPlan
    columns: list[Column]
    order: str
    source: Query


def columns_of(engine: Engine, session: Any, query: Query) -> list[Column]:
    """Returns the columns of a result.

    Raises:
        SchemaError: If the result has no columns, or two columns with the same name.
        StorageError: If the database fails.
        UnsupportedError: If a type is not supported.
    """
    with engine.errors("looking at the columns of the query"):
        columns = engine.columns(session, query)
    names = [column.name for column in columns]
    if not names:
        raise SchemaError("the query returns no columns")
    if twice := [name for name in names if names.count(name) > 1]:
        reason = f"the query returns two columns named {twice[0]!r}: name one of them with AS"
        raise SchemaError(reason, feature=twice[0], reason=reason)
    return columns


def planned(
    engine: Engine,
    session: Any,
    query: Query,
    columns: list[Column],
    by: tuple[str, ...] | None = None,
    partitions: int | None = None,
    preferred_rows: int | None = None,
    method: Method = "auto",
) -> PlannedQuery:
    """Plans a query with the columns of `columns_of`, with a session that sees the snapshot that will be read."""
    with engine.errors("looking at the functions of the query"):
        doubt = engine.doubt(session, query)
    if doubt is not None:
        raise not_repeatable(doubt)
    return _Planner(engine, session, query, columns, partitions, preferred_rows).plan(by, method)


class _Planner:
    def __init__(
        self,
        engine: Engine,
        session: Any,
        query: Query,
        columns: list[Column],
        partitions: int | None,
        preferred: int | None,
    ) -> None:
        self._engine, self._session, self._query, self._columns = engine, session, query, columns
        self._partitions, self._preferred = partitions, preferred
        self._queries: list[str] = []
        self._known = {column.name: column for column in columns}
        self._is_unique = False
        self._distinct: dict[str, int] = {}

    def plan(self, by: tuple[str, ...] | None, method: Method) -> PlannedQuery:
        """Returns the plan."""
        for name in by or ():
            if name not in self._known:
                reason = f"by contains {name!r}, which isn't a column of the result: {', '.join(self._known)}"
                raise SchemaError(reason, feature=name, reason=reason)
            if self._known[name].fitness is None:
                reason = f"column {name!r} has no order, so it can't split the query: name another column in by"
                raise UnsupportedError(reason, feature=name, reason=reason)
            if method == "hash" and self._engine.hashed(self._known[name]) is None:
                reason = (
                    f"{self._engine.name} has no hash of {self._known[name].type}, so {name!r} can't split the query "
                    "by hash: name columns of integers in by, or use method='range'"
                )
                raise UnsupportedError(reason, feature=name, reason=reason)
        with self._engine.errors("looking for a primary key"):
            key = self._key_of_table(add=by is None)
        if key is not None and by in (None, (key,)):
            with self._engine.counting(self._session, self._query):
                if self._partitions == 1:
                    return self._whole((key,), self._count(), unique=self._is_unique)
                return self._by_hash((key,), unique=self._is_unique) if method == "hash" else self._by_widths(key)
        if self._partitions == 1:
            return self._whole((), self._count())
        if method == "hash":
            keys = by or self._suitable(hashed=True)[0]
            if not keys:
                reason = (
                    f"the query returns no column that {self._engine.name} can hash: add a column of integers, or use "
                    "method='range'"
                )
                raise UnsupportedError(reason, reason=reason)
            return self._by_hash(keys)
        if by is None and method == "auto":
            keys, distinct = self._suitable(hashed=True)
            if distinct >= _MANY and self._is_even((plan := self._by_hash(keys)).plan):
                return plan
        keys = by or self._suitable()[0]
        if not keys:
            return self._whole((), self._count())
        return self._by_counts(keys, indexed=key == keys[0])

    def _key_of_table(self, *, add: bool) -> str | None:
        """Returns a table's indexed, unique integer column without NULLs; None if there is none.

        A table that is joined with other tables may have several rows with one key in the result.

        Args:
            add: Whether the query may be extended by a column that the user's query doesn't return.
        """
        if (table := self._engine.table_of(self._session, self._query)) is None:
            return None
        self._is_unique = not table.joined
        keys = self._engine.unique_keys(self._session, table)
        found = [table.name_of(key) for key in keys]
        if not keys and (hidden := self._engine.hidden_key(self._session, table)) is not None:
            keys, found = [hidden], [table.listed_name_of(hidden)]
        self._is_unique = not table.joined
        names = {name if self._engine.dialect == "postgres" else name.lower(): name for name in self._known}
        for name in found:
            if name is not None:
                return names.get(name if self._engine.dialect == "postgres" else name.lower())
        if not keys or not add:
            return None
        name = keys[0]
        while name.lower() in map(str.lower, names):
            name += "_"
        text = table.with_column(self._engine.quote(keys[0]), self._engine.quote(name))
        wider = self._query._replace(text=text)
        *own, key_column = self._engine.columns(self._session, wider)
        if [column.name for column in own] != list(self._known) or key_column.name != name:
            return None
        self._query, self._known[name] = wider, key_column
        return name

    def _fetch(self, sql: str) -> list[tuple[Any, ...]]:
        self._queries.append(sql)
        with self._engine.errors(f"planning: {sql}"):
            return self._engine.fetch(self._session, sql, self._query.parameters)

    def _count(self) -> int:
        return int(self._fetch(f"SELECT count(*) FROM {self._query.derived}")[0][0])

    def _wanted(self, rows: int, indexed: bool) -> int:
        """Returns the number of partitions."""
        if self._partitions is not None:
            return self._partitions
        preferred = self._preferred or (_PREFERRED_INDEXED if indexed else _PREFERRED)
        return min(max(-(-rows // operator.index(preferred)), 1), _MOST_BY_ITSELF)

    def _suitable(self, *, hashed: bool = False) -> tuple[tuple[str, ...], int]:
        """Returns columns with many distinct values in the first rows, and the largest number of distinct values.

        Args:
            hashed: Whether the columns must have hashes.
        """
        found = sorted((column for column in self._columns if column.fitness is not None), key=_fitness)[:16]
        names = [column.name for column in found if not hashed or self._engine.hashed(column)]
        if not names or (len(names) == 1 and not hashed):
            return tuple(names), 0
        if hashed and not streams(self._query.text, self._engine.dialect):
            # The first rows take as long as all rows, and aggregates are distinct in all columns together.
            return tuple(names[:_MOST_HASHED]), _MANY
        if not self._distinct:
            distinct = ", ".join(f"count(DISTINCT {self._key(column.name)})" for column in found)
            quoted = ", ".join(self._engine.quote(column.name) for column in found)
            sql = f"SELECT {distinct} FROM (SELECT {quoted} FROM {self._query.derived} LIMIT {_LOOKED_AT}) AS q"
            counts = map(int, self._fetch(sql)[0])
            self._distinct = dict(zip((column.name for column in found), counts, strict=True))
        best = sorted(names, key=lambda name: -self._distinct[name])
        most = self._distinct[best[0]]
        # One column with only distinct values is enough for a hash.
        return tuple(best[: 1 if hashed and most >= _LOOKED_AT else 2]), most

    def _is_even(self, plan: SqlPlan) -> bool:
        """Returns whether no partition is much larger than if all of them had the same size."""
        largest = max((part.rows for part in plan.partitions), default=0)
        return largest * self._wanted(plan.rows, indexed=False) <= _SKEW * plan.rows

    def _by_hash(self, keys: tuple[str, ...], *, unique: bool = False) -> PlannedQuery:
        """Splits the query by the remainder of a hash, with one query that counts the rows of each remainder.

        If the number of partitions isn't given, it is a power of two. Each partition is then divided into two when the
        number of partitions doubles.
        """
        hashed = self._engine.hash_of([self._known[key] for key in keys])
        most = self._partitions or _MOST_BY_ITSELF
        sql = (
            f"SELECT h, count(*) FROM (SELECT {self._engine.remainder(hashed, most)} AS h FROM {self._query.derived}) "
            "AS s GROUP BY h"
        )
        counts = np.zeros(most, np.int64)
        for remainder, rows in self._fetch(sql):
            counts[int(remainder)] = int(rows)
        if self._partitions is None:
            wanted = self._wanted(int(counts.sum()), indexed=False)
            most = 1 << (wanted - 1).bit_length()
            counts = counts.reshape(-1, most).sum(axis=0)
        if most == 1:
            return self._whole(keys, int(counts[0]), unique=unique)
        predicates = [f"{self._engine.remainder(hashed, most)} = {part}" for part in range(most)]
        return self._plan(keys, predicates, counts.tolist(), None, unique=unique, hashed=True)

    def _by_counts(self, keys: tuple[str, ...], *, indexed: bool) -> PlannedQuery:
        """Splits the query by the number of rows with each value of the key."""
        names = [f"k{i}" for i in range(len(keys))]
        selected = ", ".join(f"{self._key(key)} AS {name}" for key, name in zip(keys, names, strict=True))
        order = ", ".join(f"CASE WHEN {name} IS NULL THEN 1 ELSE 0 END, {name}" for name in names)
        texts = ", ".join(self._engine.key_text(name) for name in names)
        pieces = max(_LEAST_PIECES, _PIECES * (self._partitions or 1))
        sql = (
            f"WITH g AS (SELECT {', '.join(names)}, count(*) AS n FROM (SELECT {selected} FROM {self._query.derived}) "
            f"AS s GROUP BY {', '.join(names)}), "
            f"o AS (SELECT {', '.join(names)}, n, sum(n) OVER (ORDER BY {order} ROWS BETWEEN UNBOUNDED PRECEDING AND "
            "CURRENT ROW) - n AS b, sum(n) OVER () AS t, max(n) OVER () AS h FROM g), "
            f"p AS (SELECT {', '.join(names)}, b, t, h, {self._engine.quotient(f'b * {pieces}', 't')} AS f FROM o), "
            f"l AS (SELECT {', '.join(names)}, b, t, h, f, lag(f) OVER (ORDER BY b) AS e FROM p) "
            f"SELECT {texts}, b, t, h FROM l WHERE e IS NULL OR e <> f ORDER BY b"
        )
        found = self._fetch(sql)
        if not found:
            return self._whole(keys, 0)
        total, heaviest = int(found[0][-2]), int(found[0][-1])
        starts = np.array([int(row[-3]) for row in found] + [total], np.int64)
        cuts = [self._cut(keys, row) for row in found]
        at = chosen(np.diff(starts), self._wanted(total, indexed))
        bounds = [0, *at, len(found)]
        rows = [int(starts[end] - starts[start]) for start, end in pairwise(bounds)]
        return self._ranges(keys, [cuts[i] for i in at], rows, heaviest)

    def _by_widths(self, key: str) -> PlannedQuery:
        """Splits a unique column by the number of rows in ranges of equal width."""
        column = self._engine.quote(key)
        # The clause lets the database find each bound with an index, and parameters are bound only once.
        derived = f"WITH q AS NOT MATERIALIZED (SELECT * FROM {self._query.derived})"
        ends = [f"(SELECT {column} FROM q ORDER BY {column} {way} LIMIT 1)" for way in ("ASC", "DESC")]
        found = self._fetch(f"{derived} SELECT {', '.join(ends)}")[0]
        if found[0] is None:
            return self._whole((key,), 0, unique=self._is_unique)
        low, high = map(int, found)
        if not self._is_unique and high - low >= _WIDEST:
            return self._by_counts((key,), indexed=True)
        most = min(_WIDTHS * (self._partitions or _MOST_WIDTHS), _MOST_WIDTHS, high - low + 1)
        # Without gaps, partitions of equally many ranges have the same size.
        most -= most % min(self._partitions or 1, most)
        width = -(-(high - low + 1) // most)
        if self._is_unique and self._looks_dense(derived, column, low, high):
            # Each key occurs at most once, so there are no gaps if the number of rows equals the number of possible
            # keys.
            counts = np.minimum(width, high - low + 1 - width * np.arange(most)).clip(0)
            total = self._count()
        else:
            counts = np.zeros(most, np.int64)
            joined = not self._is_unique
            for stretch, rows in self._fetch(self._engine.widths(derived, column, low, width, most, joined=joined)):
                counts[int(stretch)] = int(rows)
            total = int(counts.sum())
        parts = self._wanted(total, indexed=True)
        if parts == 1:
            return self._whole((key,), total, unique=self._is_unique)
        if counts.sum() != total:
            return self._by_sample(key, total, parts)
        present = np.flatnonzero(counts)
        begins = [0, *chosen(counts[present], parts)]
        sizes = np.add.reduceat(counts[present], begins)
        if sizes.max() * min(parts, total) > _SKEW * total and total > 1:
            return self._by_sample(key, total, parts) if self._is_unique else self._by_counts((key,), indexed=True)
        cuts: list[Cut] = [(self._literal(key, str(low + int(present[at]) * width)),) for at in begins[1:]]
        return self._ranges((key,), cuts, sizes.tolist(), 1 if self._is_unique else None, unique=self._is_unique)

    def _looks_dense(self, derived: str, column: str, low: int, high: int) -> bool:
        """Returns whether a unique column with many values has no gaps at both ends."""
        if not _DENSE_FROM <= high - low < _DENSE_UP_TO:
            return False
        ends = (f"{column} < {low + _LOOKED_AT_ENDS}", f"{column} > {high - _LOOKED_AT_ENDS}")
        found = self._fetch(f"{derived} SELECT {', '.join(f'(SELECT count(*) FROM q WHERE {end})' for end in ends)}")
        return [int(count) for count in found[0]] == [_LOOKED_AT_ENDS] * 2

    def _by_sample(self, key: str, total: int, parts: int) -> PlannedQuery:
        """Splits a unique column at sampled values, whose hash is small."""
        column, keys = self._engine.quote(key), (key,)
        hashed = self._engine.hash_of([self._known[key]])
        share = min(1.0, _SAMPLED * parts / total)
        sql = (
            f"SELECT {self._engine.key_text('k')} FROM (SELECT {column} AS k FROM {self._query.derived} "
            f"WHERE {hashed} <= {int(share * (2**31 - 1))}) AS s ORDER BY s.k LIMIT {2 * _SAMPLED * parts}"
        )
        sample = [self._cut(keys, row) for row in self._fetch(sql)]
        at = [len(sample) * i // parts for i in range(1, parts)]
        cuts = list(dict.fromkeys(sample[i] for i in at if i < len(sample)))
        number = part_number([column], cuts)
        counts = {
            int(part): int(rows)
            for part, rows in self._fetch(
                f"SELECT p, count(*) FROM (SELECT {number} AS p FROM {self._query.derived}) AS s GROUP BY p"
            )
        }
        if sum(counts.values()) != total:
            self._changed(total, sum(counts.values()))
        return self._ranges(keys, cuts, [counts.get(i, 0) for i in range(len(cuts) + 1)], 1, unique=True)

    def _changed(self, before: int, now: int) -> None:
        reason = (
            f"the query returned {plural(before, 'row')} first and {now:,} rows later: its tables change, or it "
            "returns other rows each time. Read it in a snapshot, or once into files (materialize='directory')"
        )
        raise StorageError(reason, reason=reason)

    def _key(self, name: str) -> str:
        """Returns SQL for a column of a key."""
        return self._known[name].key.format(self._engine.quote(name))

    def _cut(self, keys: tuple[str, ...], row: tuple[Any, ...]) -> Cut:
        pairs = zip(keys, row, strict=False)
        return tuple(None if self._is_null(text) else self._literal(name, text) for name, text in pairs)

    def _is_null(self, text: Any) -> bool:
        return text is None or (self._engine.dialect == "sqlite" and text == "NULL")

    def _literal(self, name: str, text: Any) -> str:
        return self._engine.literal(str(text), self._known[name])

    def _whole(self, keys: tuple[str, ...], rows: int, *, unique: bool = False) -> PlannedQuery:
        return self._plan(keys, [None], [rows], 1 if unique else None if keys else rows, unique=False)

    def _ranges(
        self, keys: tuple[str, ...], cuts: list[Cut], rows: list[int], heaviest: int | None, *, unique: bool = False
    ) -> PlannedQuery:
        quoted = list(map(self._key, keys))
        nulls = not unique and any(self._known[name].nullable for name in keys[:1])
        edges: list[Cut | None] = [None, *cuts, None]
        predicates = [between(quoted, *edge, nulls=nulls) for edge in pairwise(edges)]
        return self._plan(keys, predicates, rows, heaviest, unique=unique)

    def _plan(
        self,
        keys: tuple[str, ...],
        predicates: Sequence[str | None],
        rows: list[int],
        heaviest: int | None,
        *,
        unique: bool,
        hashed: bool = False,
    ) -> PlannedQuery:
        import pyarrow as pa

        order = ", ".join(self._order(keys, unique=unique))
        predicates = [predicate for predicate, n in zip(predicates, rows, strict=True) if n]
        names = selected(self._engine, self._columns)
        texts = [partition_text(self._query, names, predicate, order) for predicate in predicates]
        counted = [count for count in rows if count]
        parts = [
            SqlPartition(number, text, self._query.parameters, count, predicate)
            for number, (text, count, predicate) in enumerate(zip(texts, counted, predicates, strict=True))
        ]
        schema = pa.schema([(column.name, column.type) for column in self._columns])
        plan = SqlPlan(self._query.text, keys, sum(rows), parts, heaviest, self._queries, schema, hashed)
        return PlannedQuery(plan, self._columns, order, self._query)

    def _order(self, keys: tuple[str, ...], *, unique: bool) -> list[str]:
        """Returns the sort order of a partition, in which only equal rows tie. The key comes first to use its index."""
        first = list(map(self._key, keys))
        if unique:
            return first
        rest = [order.format(self._engine.quote(column.name)) for column in self._columns for order in column.order]
        return list(dict.fromkeys(first + rest))


def partition_text(query: Query, selected: str, predicate: str | None, order: str) -> str:
    """Returns the text of a partition's query."""
    where = "" if predicate is None else f" WHERE {predicate}"
    return f"SELECT {selected} FROM {query.derived}{where}" + (f" ORDER BY {order}" if order else "")


def _fitness(column: Column) -> int:
    return 9 if column.fitness is None else column.fitness
