"""Which columns of a table a query returns as they are, and the query with one more of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from fastpipe.sources.sql._query import readable, require

# Parts of a SELECT, and of the table that it reads, that keep each row of the table as it is, or leave it out.
_HARMLESS = frozenset({"kind", "expressions", "from", "from_", "where", "order", "limit", "offset"})
_HARMLESS_OF_TABLE = frozenset({"this", "db", "catalog", "alias", "only"})


class Plain(NamedTuple):
    """A query that reads each row of one table at most once, unless a function that it calls returns several.

    Attributes:
        text: the query.
        dialect: sqlglot's name of it.
        table: its name, after those of its schema and its database where the query has them.
        columns: columns of the table by their names in the result.
        star: whether all columns of the table are in the result by their own names.
        calls: names that may be functions which the result's columns call, in lower case.
        reference: SQL that names the table in the query's columns.
        end: where the list of the result's columns ends in the text.
    """

    text: str
    dialect: str
    table: tuple[str, ...]
    columns: dict[str, str]
    star: bool
    calls: frozenset[str]
    reference: str
    end: int

    def name_of(self, column: str) -> str | None:
        """The name of the table's column in the result; None if the result doesn't have it."""
        exact = self.dialect == "postgres"
        wanted = column if exact else column.lower()
        found = (name for name, own in self.columns.items() if (own if exact else own.lower()) == wanted)
        return next(found, column if self.star else None)

    def with_column(self, column: str, name: str) -> str:
        """The query with one more column at the end, of SQL, by a quoted name."""
        return f"{self.text[: self.end]}, {self.reference}.{column} AS {name} {self.text[self.end :]}"


def plain(text: str, dialect: str) -> Plain | None:
    """Returns what a query reads if it reads each row of one table at most once; else None."""
    sqlglot = require("sqlglot", "sql")
    expressions = require("sqlglot.expressions", "sql")
    if (tree := _parsed(text, dialect)) is None:
        return None
    if not isinstance(tree, expressions.Select) or _has_other(tree, _HARMLESS):
        return None
    source = tree.args.get("from_") or tree.args.get("from")
    table = None if source is None else source.this
    if not isinstance(table, expressions.Table) or not isinstance(table.this, expressions.Identifier):
        return None
    alias = table.args.get("alias")
    if _has_other(table, _HARMLESS_OF_TABLE) or (alias is not None and alias.args.get("columns")):
        return None
    columns: dict[str, str] = {}
    star = False
    for projection in tree.expressions:
        if not _is_of_one_row(projection, expressions):
            return None
        if projection.is_star:
            starred = projection.this if isinstance(projection, expressions.Column) else projection
            if not isinstance(starred, expressions.Star) or any(starred.args.values()):
                return None
            star = True
            continue
        own: Any = projection.unalias()
        if isinstance(own, expressions.Column):
            columns[_folded(projection.args.get("alias") or own.this, dialect)] = _folded(own.this, dialect)
    tokens = sqlglot.tokenize(text, dialect=dialect)
    if (end := _end_of_columns(tokens)) is None:
        return None
    names = [each for each in (table.args.get("catalog"), table.args.get("db"), table.this) if each]
    reference = table.this if alias is None else alias.this
    return Plain(
        text,
        dialect,
        tuple(_folded(name, dialect) for name in names),
        columns,
        star,
        _called(tokens, end),
        reference.sql(dialect=dialect),
        end,
    )


def _is_of_one_row(projection: Any, expressions: Any) -> bool:
    """Whether a column of the result has a value for each row: aggregates have one for all, unnested arrays several."""
    several = (expressions.AggFunc, expressions.Window, expressions.UDTF, expressions.Explode, expressions.Subquery)
    return projection.find(*several) is None


def _has_other(node: Any, harmless: frozenset[str]) -> bool:
    return any(value and name not in harmless for name, value in node.args.items())


def _folded(identifier: Any, dialect: str) -> str:
    """A name as the database has it."""
    name: str = identifier.name
    return name.lower() if dialect == "postgres" and not identifier.args.get("quoted") else name


def _end_of_columns(tokens: list[Any]) -> int | None:
    """Where FROM is, outside of parentheses, which isn't that of IS DISTINCT FROM."""
    depth = 0
    for before, token in pairwise(tokens):
        kind = token.token_type.name
        depth += (kind == "L_PAREN") - (kind == "R_PAREN")
        if kind == "FROM" and not depth and before.token_type.name != "DISTINCT":
            start: int = token.start
            return start
    return None


def _called(tokens: list[Any], end: int) -> frozenset[str]:
    """The words before parentheses in the list of columns: functions, and keywords."""
    return frozenset(
        before.text.lower()
        for before, token in pairwise(tokens)
        if token.token_type.name == "L_PAREN"
        and token.start < end
        and (before.token_type.name == "IDENTIFIER" or before.text.isidentifier())
    )


def lone(text: str, dialect: str) -> bool:
    """Whether a query has no other query in it."""
    tree = _parsed(text, dialect)
    return tree is not None and sum(1 for _ in tree.find_all(require("sqlglot.expressions", "sql").Query)) == 1


def _parsed(text: str, dialect: str) -> Any:
    sqlglot = require("sqlglot", "sql")
    try:
        return sqlglot.parse_one(readable(text, dialect), dialect=dialect)
    except sqlglot.errors.SqlglotError:
        return None
