"""A query as the user wrote it. It is parsed and wrapped, but never edited."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from fastpipe._arguments import shown
from fastpipe.errors import UnsupportedError

# Includes functions of the current time, because partitions are read in several transactions, and again in later
# epochs.
VOLATILE = frozenset(
    {
        "any_value",
        "arbitrary",
        "benchmark",
        "changes",
        "clock_timestamp",
        "connection_id",
        "curdate",
        "current_date",
        "current_datetime",
        "current_localtime",
        "current_localtimestamp",
        "current_time",
        "current_timestamp",
        "currval",
        "curtime",
        "gen_random_uuid",
        "get_current_time",
        "get_current_timestamp",
        "getdate",
        "last_insert_id",
        "last_insert_rowid",
        "lastval",
        "localtime",
        "localtimestamp",
        "newid",
        "nextval",
        "now",
        "pg_backend_pid",
        "pg_current_xact_id",
        "pg_sleep",
        "rand",
        "randn",
        "random",
        "randomblob",
        "randstr",
        "row_count",
        "setseed",
        "setval",
        "sleep",
        "statement_timestamp",
        "sysdate",
        "timeofday",
        "today",
        "total_changes",
        "transaction_timestamp",
        "txid_current",
        "unix_timestamp",
        "utc_date",
        "utc_time",
        "utc_timestamp",
        "uuid",
        "uuid_generate_v1",
        "uuid_generate_v4",
        "uuidv4",
        "uuidv7",
    }
)


# Window functions whose result depends only on the order of rows.
_RANKING = frozenset({"row_number", "ntile", "lag", "lead", "first_value", "last_value", "nth_value"})
# Aggregates that keep values in row order, with their names in databases and in sqlglot.
_COLLECTING = frozenset(
    {
        "array_agg",
        "first",
        "group_concat",
        "json_agg",
        "json_array_agg",
        "json_arrayagg",
        "json_group_array",
        "jsonb_agg",
        "jsonb_group_array",
        "last",
        "list",
        "listagg",
        "string_agg",
        "xmlagg",
    }
)


def unordered(node: Any, names: set[str], expressions: Any) -> str | None:
    """Returns why the result of a node depends on the order of rows; None if it doesn't.

    Args:
        node: A node of the parsed query.
        names: The names of the function, if the node is a function; otherwise empty.
        expressions: The module of sqlglot's expressions.
    """
    if isinstance(node, expressions.Window):
        function = node.this
        called = set() if function is None else {function.key, *_names(function, expressions)}
        rows = node.args.get("spec") is not None and str(node.args["spec"].args.get("kind")).upper() == "ROWS"
        if (called & _RANKING or rows) and not _window_order(node, expressions):
            return f"{_shown(function)} OVER a window without ORDER BY reads rows in any order"
    elif names & _COLLECTING and not _ordered(node, expressions):
        return f"{_shown(node)} without ORDER BY reads rows in any order"
    return None


def _names(node: Any, expressions: Any) -> set[str]:
    if isinstance(node, expressions.Anonymous):
        return {node.name.lower()}
    return {name.lower() for name in type(node).sql_names()} if isinstance(node, expressions.Func) else set()


def _shown(node: Any) -> str:
    return (getattr(node, "name", "") if node.key == "anonymous" else node.sql_name()).upper()


def _ordered(node: Any, expressions: Any) -> bool:
    if node.find(expressions.Order) is not None:
        return True
    parent = node.parent
    if isinstance(parent, expressions.Filter):
        parent = parent.parent
    if isinstance(parent, expressions.WithinGroup):
        return parent.find(expressions.Order) is not None
    return isinstance(parent, expressions.Window) and _window_order(parent, expressions)


def _window_order(window: Any, expressions: Any) -> bool:
    """Returns whether a window, or the named window that it refers to, has an order."""
    if window.args.get("order"):
        return True
    if not (name := window.args.get("alias")):
        return False
    select = window.find_ancestor(expressions.Select)
    named = (select.args.get("windows") if select else None) or []
    return any(
        other.this.name == name.name and other is not window and _window_order(other, expressions) for other in named
    )


Parameters: TypeAlias = "Sequence[Any] | Mapping[str, Any] | None"


class Query(NamedTuple):
    """A query and its parameters.

    Attributes:
        text: The query as the user wrote it.
        parameters: The values of its placeholders.
        limit: The number of rows to read, the first ones that the database returns; None for all rows.
    """

    text: str
    parameters: Parameters = None
    limit: int | None = None

    @property
    def derived(self) -> str:
        """The query as a derived table named q. It is on separate lines because it may end with a comment."""
        whole = f"(\n{self.text}\n) AS q"
        return whole if self.limit is None else f"(SELECT * FROM {whole} LIMIT {self.limit}) AS q"


def require(module: str, extra: str) -> Any:
    """Imports a module of an extra.

    Raises:
        ImportError: If the module isn't installed. The message names the package to install.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"this needs {package}: pip install 'fastpipe-data[{extra}]'") from error


def checked(text: object, parameters: object, dialect: str, *, once: bool = False) -> Query:
    """Returns a query that can be split into partitions.

    Args:
        text: The query.
        parameters: The values of its placeholders.
        dialect: The dialect's name in sqlglot.
        once: Whether the query is run only once, so that it may return other rows each time.

    Raises:
        TypeError: If the query is not text, or the parameters are not a sequence or mapping.
        UnsupportedError: If the text is not a single query, can't be parsed, or may return other rows each time.
    """
    if not isinstance(text, str):
        raise TypeError(f"query must be a str; got {shown(text)}")
    if parameters is not None and (
        isinstance(parameters, (str, bytes)) or not isinstance(parameters, (Sequence, Mapping))
    ):
        raise TypeError(f"parameters must be a sequence, a mapping or None; got {shown(parameters)}")
    expressions = require("sqlglot.expressions", "sql")
    text = _without_end(text.strip(), dialect)
    try:
        tree = _parsed(text, dialect)
        if not isinstance(tree, (expressions.Query, expressions.Values)):
            raise _refused(f"{tree.key.upper()} is not a query: use a SELECT")
        reason = None if once else next(_doubts(tree, expressions), None)
    except RecursionError:
        raise _refused("the query is nested too deeply for sqlglot: create a view of it, and read the view") from None
    if reason is not None:
        raise not_repeatable(reason)
    return Query(text, parameters)


def not_repeatable(reason: str) -> UnsupportedError:
    """Returns the error for a query that may return other rows each time."""
    return _refused(
        f"the query may return other rows each time it is run: {reason}. Its partitions could overlap or miss rows. "
        "Remove that part of the query, or read it once into files: materialize='directory'. Statistics of the first "
        "rows don't need partitions: fastpipe.sql.describe(query, connection, rows=10_000)"
    )


def functions(text: str, dialect: str) -> list[str]:
    """Returns the functions of a query that sqlglot doesn't know (user-defined ones), as plain lower-case names."""
    found = {
        node.name.lower() for node in _parsed(text, dialect).find_all(require("sqlglot.expressions", "sql").Anonymous)
    }
    return sorted(name for name in found if name.isidentifier())


def readable(text: str, dialect: str) -> str:
    """Returns the query for sqlglot, with NULL in place of drivers' placeholders, which belong to no dialect."""
    return re.sub(r"%s|%\(\w+\)s", "NULL", text).replace("%%", "%") if dialect in ("postgres", "mysql") else text


def _refused(reason: str) -> UnsupportedError:
    return UnsupportedError(reason, reason=reason)


def _without_end(text: str, dialect: str) -> str:
    """Returns a statement without the semicolons at its end and the comments after them."""
    sqlglot = require("sqlglot", "sql")
    try:
        tokens = sqlglot.tokenize(text, dialect=dialect)
    except sqlglot.errors.SqlglotError:
        return text  # The parser will report the error.
    end = len(text)
    while tokens and tokens[-1].token_type.name == "SEMICOLON":
        end = tokens.pop().start
    return text[:end].rstrip()


def _parsed(text: str, dialect: str) -> Any:
    sqlglot = require("sqlglot", "sql")
    if not text:
        raise _refused("the query is empty")
    try:
        trees = [tree for tree in sqlglot.parse(readable(text, dialect), dialect=dialect) if tree is not None]
    except sqlglot.errors.SqlglotError as error:
        told = str(error).splitlines()[0]
        raise _refused(
            f"sqlglot can't parse the query in the dialect {dialect}, so it is unknown whether it returns the same "
            f"rows each time: {told}. Read it once into files: materialize='directory'"
        ) from None
    if len(trees) != 1:
        raise _refused(f"there are {len(trees)} statements, but only one query can be read")
    return trees[0]


def _doubts(tree: Any, expressions: Any) -> Iterator[str]:
    """Yields reasons why a query may return other rows each time."""
    for node in tree.walk():
        if isinstance(node, (expressions.Insert, expressions.Update, expressions.Delete, expressions.Lock)):
            yield f"it changes or locks rows ({node.key.upper()})"
        elif isinstance(node, expressions.Func):
            names = {node.name.lower()} if isinstance(node, expressions.Anonymous) else _sql_names(node)
            if names & VOLATILE:
                name = node.name if isinstance(node, expressions.Anonymous) else node.sql_name()
                yield f"{name.upper()} isn't the same each time"
            elif _is_present(node, expressions):
                yield "'now' isn't the same each time: pass the time as a parameter"
            elif reason := unordered(node, names, expressions):
                yield reason
        elif isinstance(node, expressions.Window):
            if reason := unordered(node, set(), expressions):
                yield reason
        elif isinstance(node, expressions.TableSample):
            yield "TABLESAMPLE returns other rows each time"
        elif isinstance(node, (expressions.Limit, expressions.Offset, expressions.Fetch)):
            if node.parent is None or not node.parent.args.get("order"):
                yield f"{node.key.upper()} without ORDER BY returns any rows"
        elif isinstance(node, expressions.Distinct) and node.args.get("on") and not node.parent.args.get("order"):
            yield "DISTINCT ON without ORDER BY returns any rows"


def _sql_names(node: Any) -> set[str]:
    return {name.lower() for name in type(node).sql_names()} | {node.key.lower()}


def _is_present(node: Any, expressions: Any) -> bool:
    """Returns whether a date function has the argument 'now', or no argument (SQLite's date functions)."""
    texts = [text for text in node.find_all(expressions.Literal) if text.is_string]
    if any(text.name.strip().lower() == "now" for text in texts):
        return True
    dates = {"date", "time", "datetime", "julianday", "unixepoch"}
    if isinstance(node, expressions.Anonymous):
        return node.name.lower() in dates and not node.expressions
    return bool(_sql_names(node) & dates) and not any(node.args.values())
