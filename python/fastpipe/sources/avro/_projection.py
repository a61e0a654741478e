"""The schema of a record with some of its fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["projection"]

_NAMED = ("record", "error", "enum", "fixed")


class _RefersToRootError(Exception):
    """A field contains the record itself, which is another type when it has fewer fields."""


def projection(schema: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """The schema of a record with only these of its fields, in this order.

    Args:
        schema: of a file.
        names: the fields.

    Returns:
        The schema, in which types that are defined in other fields are defined where they are used first; None if it
        isn't of a record, one of the names isn't its field's, or a field contains the record itself.
    """
    if not isinstance(schema, dict) or schema.get("type") not in ("record", "error"):
        return None
    fields = {field["name"]: field for field in schema["fields"]}
    if not set(names) <= fields.keys() or len(set(names)) < len(names):
        return None
    root, space = _full_name(schema, "")
    known: dict[str, Any] = {root: None}
    whole = {field: _resolved(fields[field], space, known, is_field=True) for field in fields}
    written: set[str] = set()
    try:
        return {**schema, "fields": [_defined(whole[name], known, written, is_field=True) for name in names]}
    except _RefersToRootError:
        return None


def _full_name(node: dict[str, Any], space: str) -> tuple[str, str]:
    """The full name of a type, and the namespace in it."""
    name = str(node["name"])
    if "." not in name:
        space = str(node.get("namespace", space) or "")
        name = f"{space}.{name}" if space else name
    return name, name.rpartition(".")[0]


def _resolved(node: Any, space: str, known: dict[str, Any], *, is_field: bool = False) -> Any:
    """A type in which names are full ones. Definitions are put into `known`."""
    if isinstance(node, str):
        return f"{space}.{node}" if space and f"{space}.{node}" in known else node
    if isinstance(node, list):
        return [_resolved(branch, space, known) for branch in node]
    made = dict(node)
    if not is_field and node["type"] in _NAMED:
        name, space = _full_name(node, space)
        made |= {"name": name} if space else {"name": name, "namespace": ""}
        if space:
            made.pop("namespace", None)
        known[name] = made
        if "fields" in node:
            made["fields"] = [_resolved(field, space, known, is_field=True) for field in node["fields"]]
        return made
    for part in ("type", "items", "values"):
        if part in node:
            made[part] = _resolved(node[part], space, known)
    return made


def _defined(node: Any, known: dict[str, Any], written: set[str], *, is_field: bool = False) -> Any:
    """A type in which each named type is defined where it is first, and goes by its name after that."""
    if isinstance(node, str):
        if node not in known or node in written:
            return node
        if known[node] is None:
            raise _RefersToRootError
        return _defined(known[node], known, written)
    if isinstance(node, list):
        return [_defined(branch, known, written) for branch in node]
    made = dict(node)
    if not is_field and node["type"] in _NAMED:
        if node["name"] in written:
            return node["name"]
        written.add(node["name"])
        if "fields" in node:
            made["fields"] = [_defined(field, known, written, is_field=True) for field in node["fields"]]
        return made
    for part in ("type", "items", "values"):
        if part in node:
            made[part] = _defined(node[part], known, written)
    return made
