"""Which columns of a table a query hands on as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastpipe.sql._query import readable, require

__all__ = ["Plain", "lone", "plain"]

# Parts of a SELECT that leave each row of its table as it is, or out.
_HARMLESS = frozenset({"kind", "expressions", "from", "from_", "where", "order", "limit", "offset"})


class Plain(NamedTuple):
    """A query that reads each row of one table at most once.

    Attributes:
        table: its name.
        columns: columns of the table by their names in the result.
        star: whether all columns of the table are in the result by their own names.
    """

    table: str
    columns: dict[str, str]
    star: bool

    def name_of(self, column: str) -> str | None:
        """What the result calls a column of the table; None if it hasn't it."""
        found = (name for name, own in self.columns.items() if own.lower() == column.lower())
        return next(found, column if self.star else None)


def plain(text: str, dialect: str) -> Plain | None:
    """What a query reads, if that is one table, each row at most once; else None, also for names with a schema."""
    sqlglot = require("sqlglot", "sql")
    expressions = require("sqlglot.expressions", "sql")
    try:
        tree = sqlglot.parse_one(readable(text, dialect), dialect=dialect)
    except sqlglot.errors.SqlglotError:
        return None
    if not isinstance(tree, expressions.Select) or any(
        value and name not in _HARMLESS for name, value in tree.args.items()
    ):
        return None
    source = tree.args.get("from_") or tree.args.get("from")
    table = None if source is None else source.this
    if not isinstance(table, expressions.Table) or not isinstance(table.this, expressions.Identifier):
        return None
    if table.db or table.catalog or table.args.get("joins"):
        return None
    columns: dict[str, str] = {}
    star = False
    for projection in tree.expressions:
        # Functions may return several rows.
        if projection.find(expressions.Func, expressions.Subquery, expressions.Unnest) is not None:
            return None
        star |= bool(projection.is_star)
        own: Any = projection.unalias()
        if isinstance(own, expressions.Column) and not projection.is_star:
            columns[projection.alias_or_name] = own.name
    return Plain(table.name, columns, star)


def lone(text: str, dialect: str) -> bool:
    """Whether a query has no other query in it."""
    sqlglot = require("sqlglot", "sql")
    expressions = require("sqlglot.expressions", "sql")
    try:
        tree = sqlglot.parse_one(readable(text, dialect), dialect=dialect)
    except sqlglot.errors.SqlglotError:
        return False
    return sum(1 for _ in tree.find_all(expressions.Query)) == 1
