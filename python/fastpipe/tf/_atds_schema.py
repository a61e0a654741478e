"""Whether a file has what `ATDSDataset` is asked for: no dtype is promoted, no rank changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from fastpipe.errors import SchemaError
from fastpipe.tf._atds_features import Feature, SparseFeature

__all__ = ["check"]

_DTYPES = {
    "int": tf.int32,
    "long": tf.int64,
    "float": tf.float32,
    "double": tf.float64,
    "boolean": tf.bool,
    "string": tf.string,
    "bytes": tf.string,
}


def check(path: str, schema_json: str, features: Mapping[str, Feature]) -> None:
    """Holds features to a file's schema.

    Raises:
        SchemaError: if a feature isn't a field of its records, or of another type or rank.
    """
    schema = json.loads(schema_json)
    names: dict[str, Any] = {}
    _collect(schema, "", names)
    if not (isinstance(schema, dict) and schema.get("type") == "record"):
        raise SchemaError(f"the records of a file aren't of a record type (file {path})", path=path)
    fields = {field["name"]: field["type"] for field in schema["fields"]}
    space = _space(schema, "")
    for name, feature in features.items():
        if name not in fields:
            reason = f"the schema has no field {name!r}; it has {', '.join(fields)}"
        else:
            found = _problem(_Types(names, space), fields[name], feature)
            if found is None:
                continue
            reason = f"{found}, but {feature} was asked for"
        raise SchemaError(f"feature {name!r}: {reason} (file {path})", path=path, feature=name, reason=reason)


class _Types:
    """The named types of a schema, as seen from the fields of its records."""

    def __init__(self, names: dict[str, Any], space: str) -> None:
        self._names = names
        self._space = space

    def resolve(self, schema: Any) -> Any:
        """The type behind `{"type": ...}` and a name; primitives are strings."""
        while True:
            if isinstance(schema, str):
                if schema in _DTYPES or schema == "null":
                    return schema
                found = self._names.get(f"{self._space}.{schema}" if self._space else schema, self._names.get(schema))
                if found is None or found is schema:
                    return schema
                schema = found
            elif isinstance(schema, dict) and (isinstance(schema["type"], (dict, list)) or schema["type"] in _DTYPES):
                schema = schema["type"]
            else:
                return schema


def _problem(types: _Types, schema: Any, feature: Feature) -> str | None:
    schema = types.resolve(schema)
    if isinstance(schema, list):
        branches = [branch for branch in schema if types.resolve(branch) != "null"]
        if len(branches) != 1 or len(schema) > 2:
            return f"it is a union of {len(schema)} types, which isn't read: one type, and null beside it"
        schema = types.resolve(branches[0])
    if isinstance(feature, SparseFeature):
        return _sparse_problem(types, schema, feature)
    rank = 0
    while isinstance(schema, dict) and schema["type"] == "array":
        schema, rank = types.resolve(schema["items"]), rank + 1
    if (problem := _dtype_problem(schema, feature.dtype)) is not None:
        return problem
    if rank != len(feature.shape):
        return f"it has {rank} dimensions, not {len(feature.shape)}"
    return None


def _sparse_problem(types: _Types, schema: Any, feature: SparseFeature) -> str | None:
    if not (isinstance(schema, dict) and schema["type"] == "record"):
        return f"it is of type {_name(schema)}, not a record"
    fields = {field["name"]: types.resolve(field["type"]) for field in schema["fields"]}
    rank = len(feature.shape)
    wanted = [f"indices{axis}" for axis in range(rank)]
    if fields.keys() != {*wanted, "values"}:
        return f"its record has the fields {', '.join(fields)}, not {', '.join(wanted)} and values"
    for name, kind in fields.items():
        if not (isinstance(kind, dict) and kind["type"] == "array"):
            return f"its {name} is of type {_name(kind)}, not an array"
        items = types.resolve(kind["items"])
        if name != "values" and items not in ("int", "long"):
            return f"its {name} are of type {_name(items)}, neither int nor long"
        if name == "values" and (problem := _dtype_problem(items, feature.dtype)) is not None:
            return problem
    return None


def _dtype_problem(schema: Any, dtype: tf.DType) -> str | None:
    found = _DTYPES.get(schema) if isinstance(schema, str) else None
    return None if found == dtype else f"its values are of type {_name(schema)}, not {dtype.name}"


def _name(schema: Any) -> str:
    if isinstance(schema, list):
        return "union"
    return str(schema["type"] if isinstance(schema, dict) else schema)


def _space(schema: Any, outer: str) -> str:
    name = schema.get("name", "")
    return name.rpartition(".")[0] if "." in name else str(schema.get("namespace", outer))


def _collect(schema: Any, space: str, names: dict[str, Any]) -> None:
    """Notes all types that have names, which can be used where they don't stand."""
    if isinstance(schema, list):
        for branch in schema:
            _collect(branch, space, names)
    elif isinstance(schema, dict):
        if schema["type"] in ("record", "error", "enum", "fixed"):
            space = _space(schema, space)
            name = schema["name"].rpartition(".")[2]
            names[f"{space}.{name}" if space else name] = schema
        for inner in (schema.get("items"), schema.get("values"), schema["type"]):
            if isinstance(inner, (dict, list)):
                _collect(inner, space, names)
        for field in schema.get("fields", ()):
            _collect(field["type"], space, names)
