"""What depends on the order of rows, of which a query says nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["unordered"]

# Functions of a window that tell its rows apart by their order alone.
_RANKING = frozenset({"row_number", "ntile", "lag", "lead", "first_value", "last_value", "nth_value"})
# Aggregates that keep values in the order of their rows, by the names of databases and those that sqlglot gives them.
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
    """Why what a node returns depends on the order in which rows come; None if it doesn't.

    Args:
        node: of a query.
        names: of the function that it is; none if it is no function.
        expressions: sqlglot's.
    """
    if isinstance(node, expressions.Window):
        function = node.this
        called = set() if function is None else {function.key, *_names(function, expressions)}
        rows = node.args.get("spec") is not None and str(node.args["spec"].args.get("kind")).upper() == "ROWS"
        if (called & _RANKING or rows) and not _window_order(node, expressions):
            return f"{_shown(function)} OVER a window without ORDER BY takes rows in any order"
    elif names & _COLLECTING and not _ordered(node, expressions):
        return f"{_shown(node)} without ORDER BY takes rows in any order"
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
    """Whether a window, or the named one that it is, has an order."""
    if window.args.get("order"):
        return True
    if not (name := window.args.get("alias")):
        return False
    select = window.find_ancestor(expressions.Select)
    named = (select.args.get("windows") if select else None) or []
    return any(
        other.this.name == name.name and other is not window and _window_order(other, expressions) for other in named
    )
