"""Finds the columns of a table that a query returns unchanged, and adds a column to the query.

The table may be joined with other tables, if each row of the result has a row of it: it is the first table of FROM, and
no join is RIGHT or FULL.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from fastpipe.sql._query import readable, require

# Clauses of a SELECT, and parts of its table, that keep each row of the table unchanged or leave it out.
_HARMLESS = frozenset({"kind", "expressions", "from", "from_", "joins", "where", "order", "limit", "offset"})
_HARMLESS_OF_TABLE = frozenset({"this", "db", "catalog", "alias", "only"})
# Joins that keep the columns of the table before them. A LEFT join is `side`, others are `kind`.
_SIDES, _KINDS = frozenset({"", "LEFT"}), frozenset({"", "INNER", "CROSS", "OUTER"})


class Plain(NamedTuple):
    """A query whose rows each have a row of one table.

    Without joins, it reads each row of the table at most once, unless it calls a function that returns several rows.

    Attributes:
        text: The query.
        dialect: The dialect's name in sqlglot.
        table: The table's name, after the names of its database and schema if the query has them.
        columns: The table's column for each name in the result.
        star: Whether all columns of the table are in the result under their own names.
        calls: Names in lower case that may be functions which the result's columns call.
        reference: SQL that refers to the table in the query's columns.
        end: The offset in the text at which the list of columns ends.
        joined: Whether the table is joined with others, so that one of its rows may be in several rows of the result.
    """

    text: str
    dialect: str
    table: tuple[str, ...]
    columns: dict[str, str]
    star: bool
    calls: frozenset[str]
    reference: str
    end: int
    joined: bool

    def name_of(self, column: str) -> str | None:
        """Returns the name in the result of a column of the table; None if the result lacks the column."""
        return self.listed_name_of(column) or (column if self.star else None)

    def listed_name_of(self, column: str) -> str | None:
        """Returns the name in the result of a column that the query names; None if the query doesn't name it."""
        exact = self.dialect == "postgres"
        wanted = column if exact else column.lower()
        found = (name for name, own in self.columns.items() if (own if exact else own.lower()) == wanted)
        return next(found, None)

    def with_column(self, column: str, name: str) -> str:
        """Returns the query with one more column at the end. `column` is SQL, and `name` is quoted."""
        return f"{self.text[: self.end]}, {self.reference}.{column} AS {name} {self.text[self.end :]}"


def plain(text: str, dialect: str) -> Plain | None:
    """Returns a description of a query whose rows each have a row of one table; None for other queries."""
    sqlglot = require("sqlglot", "sql")
    expressions = require("sqlglot.expressions", "sql")
    if (tree := _parsed(text, dialect)) is None:
        return None
    if not isinstance(tree, expressions.Select) or _has_other(tree, _HARMLESS):
        return None
    joins = tree.args.get("joins") or []
    if any(str(each.side).upper() not in _SIDES or str(each.kind).upper() not in _KINDS for each in joins):
        return None
    source = tree.args.get("from_") or tree.args.get("from")
    table = None if source is None else source.this
    if not isinstance(table, expressions.Table) or not isinstance(table.this, expressions.Identifier):
        return None
    alias = table.args.get("alias")
    if _has_other(table, _HARMLESS_OF_TABLE) or (alias is not None and alias.args.get("columns")):
        return None
    reference = table.this if alias is None else alias.this
    columns: dict[str, str] = {}
    star = False
    for projection in tree.expressions:
        if not _is_of_one_row(projection, expressions):
            return None
        if projection.is_star:
            starred = projection
            inner = projection.this if isinstance(projection, expressions.Column) else projection
            if not isinstance(inner, expressions.Star) or any(inner.args.values()):
                return None
            star = star or not joins or _is_of(starred, reference, dialect)
            continue
        own: Any = projection.unalias()
        if isinstance(own, expressions.Column) and (not joins or _is_of(own, reference, dialect)):
            columns[_folded(projection.args.get("alias") or own.this, dialect)] = _folded(own.this, dialect)
    tokens = sqlglot.tokenize(text, dialect=dialect)
    if (end := _end_of_columns(tokens)) is None:
        return None
    names = [each for each in (table.args.get("catalog"), table.args.get("db"), table.this) if each]
    return Plain(
        text,
        dialect,
        tuple(_folded(name, dialect) for name in names),
        columns,
        star,
        _called(tokens, end),
        reference.sql(dialect=dialect),
        end,
        bool(joins),
    )


def _is_of(column: Any, reference: Any, dialect: str) -> bool:
    """Returns whether a column, or a star, names a table of a join."""
    table = column.args.get("table")
    if table is None:
        return False
    own, other = _folded(table, dialect), _folded(reference, dialect)
    return own == other if dialect == "postgres" else own.lower() == other.lower()


def _is_of_one_row(projection: Any, expressions: Any) -> bool:
    """Returns whether a column of the result has one value per row, unlike aggregates and unnested arrays."""
    several = (expressions.AggFunc, expressions.Window, expressions.UDTF, expressions.Explode, expressions.Subquery)
    return projection.find(*several) is None


def _has_other(node: Any, harmless: frozenset[str]) -> bool:
    return any(value and name not in harmless for name, value in node.args.items())


def _folded(identifier: Any, dialect: str) -> str:
    """Returns a name as the database stores it."""
    name: str = identifier.name
    return name.lower() if dialect == "postgres" and not identifier.args.get("quoted") else name


def _end_of_columns(tokens: list[Any]) -> int | None:
    """Returns the offset of the FROM clause, outside of parentheses and not part of IS DISTINCT FROM."""
    depth = 0
    for before, token in pairwise(tokens):
        kind = token.token_type.name
        depth += (kind == "L_PAREN") - (kind == "R_PAREN")
        if kind == "FROM" and not depth and before.token_type.name != "DISTINCT":
            start: int = token.start
            return start
    return None


def _called(tokens: list[Any], end: int) -> frozenset[str]:
    """Returns the words before parentheses in the list of columns: functions and keywords."""
    return frozenset(
        before.text.lower()
        for before, token in pairwise(tokens)
        if token.token_type.name == "L_PAREN"
        and token.start < end
        and (before.token_type.name == "IDENTIFIER" or before.text.isidentifier())
    )


def lone(text: str, dialect: str) -> bool:
    """Returns whether a query contains no other query."""
    tree = _parsed(text, dialect)
    return tree is not None and sum(1 for _ in tree.find_all(require("sqlglot.expressions", "sql").Query)) == 1


def streams(text: str, dialect: str) -> bool:
    """Returns whether a database can return the first rows of a query before it has computed all of them."""
    e = require("sqlglot.expressions", "sql")
    tree = _parsed(text, dialect)
    blocking = (e.Group, e.Distinct, e.Order, e.AggFunc, e.Window, e.SetOperation)
    return tree is not None and tree.find(*blocking) is None


def _parsed(text: str, dialect: str) -> Any:
    sqlglot = require("sqlglot", "sql")
    try:
        return sqlglot.parse_one(readable(text, dialect), dialect=dialect)
    except sqlglot.errors.SqlglotError:
        return None
