"""The fields of an Avro schema, named as features are, with their types in a few words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastpipe._text import clean, plural

PRIMITIVES = {
    "null": None,
    "boolean": "bool",
    "int": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "bytes": "bytes",
    "string": "string",
}
COMPLEX = ("record", "error", "enum", "fixed", "array", "map")


class Names:
    """The named types of a schema, and how to get through names, nested `type`s and unions to what stands there."""

    def __init__(self, schema: Any) -> None:
        self._types: dict[str, Any] = {}
        self._collect(schema, "")

    def _collect(self, schema: Any, namespace: str) -> None:
        if isinstance(schema, list):
            for branch in schema:
                self._collect(branch, namespace)
        elif isinstance(schema, dict):
            name = schema.get("name")
            if name and schema.get("type") in COMPLEX[:4]:
                namespace = name.rpartition(".")[0] if "." in name else schema.get("namespace") or namespace
                # Both names are kept: a reference may be short within the namespace. A clash across namespaces only
                # blurs a table.
                short = name.rpartition(".")[2]
                self._types.setdefault(short, schema)
                self._types[f"{namespace}.{short}" if namespace else short] = schema
            for inner in (schema.get("type"), schema.get("items"), schema.get("values")):
                if isinstance(inner, (dict, list)):
                    self._collect(inner, namespace)
            for inner in schema.get("fields", ()):
                self._collect(inner["type"], namespace)

    def resolve(self, schema: Any) -> Any:
        """The schema with names looked up: a dict with a `type` that is a word, or a list for a union."""
        while True:
            if isinstance(schema, str):
                if schema in PRIMITIVES:
                    return {"type": schema}
                schema = self._types.get(schema, {"type": "null", "name": schema})
            elif isinstance(schema, dict) and isinstance(schema["type"], (dict, list)):
                schema = schema["type"]
            elif isinstance(schema, dict) and schema["type"] not in PRIMITIVES and schema["type"] not in COMPLEX:
                schema = self._types.get(schema["type"], {"type": "null", "name": schema["type"]})
            else:
                return schema

    def value(self, schema: Any) -> tuple[Any, bool]:
        """What stands there apart from null, and whether null may; a union of several types stays a list."""
        schema = self.resolve(schema)
        if not isinstance(schema, list):
            return schema, schema["type"] == "null"
        branches = [branch for branch in map(self.resolve, schema) if branch != {"type": "null"}]
        nullable = len(branches) < len(schema)
        return (branches[0] if len(branches) == 1 else branches or {"type": "null"}), nullable


@dataclass(frozen=True)
class Field:
    """A line of the table of a schema."""

    path: str
    parent: str
    type: str
    nullable: bool
    doc: str

    @property
    def full_type(self) -> str:
        """The type, marked if null is allowed."""
        return self.type + "?" * self.nullable


def schema_fields(schema: Any) -> list[Field]:
    """The fields of a schema from the outside inwards, named as features are."""
    names = Names(schema)
    fields: list[Field] = []

    def walk(schema: Any, path: str, parent: str, doc: str, around: tuple[int, ...]) -> None:
        inner, nullable = names.value(schema)
        fields.append(Field(path, parent, type_text(names, inner, around), nullable, doc))
        below, prefix = inner, path
        while isinstance(below, dict) and below["type"] in ("array", "map"):
            prefix = f"{prefix}.values" if below["type"] == "map" else prefix
            below = names.value(below.get("items") or below.get("values"))[0]
        if isinstance(below, dict) and "fields" in below and id(below) not in around:
            record(below, prefix, path, (*around, id(below)))

    def record(schema: Any, prefix: str, parent: str, around: tuple[int, ...]) -> None:
        for entry in schema["fields"]:
            path = f"{prefix}.{entry['name']}" if prefix else entry["name"]
            walk(entry["type"], path, parent, str(entry.get("doc") or ""), around)

    root = names.resolve(schema)
    if "fields" in root:
        record(root, "", "", (id(root),))
    else:
        walk(schema, "value", "", "", ())
    return fields


def type_text(names: Names, schema: Any, around: tuple[int, ...] = ()) -> str:
    """An Avro type in a few words: `array<record Item>`, `long (timestamp-millis)`; `?` stands for nullable."""
    schema = names.resolve(schema)
    if isinstance(schema, list):
        inner, nullable = names.value(schema)
        if not isinstance(inner, list):
            return type_text(names, inner, around) + "?" * nullable
        return f"union<{', '.join(type_text(names, branch, around) for branch in schema)}>"
    kind, name = schema["type"], str(schema.get("name", "")).rpartition(".")[2]
    if kind in ("array", "map"):
        return f"{kind}<{type_text(names, schema.get('items') or schema.get('values') or 'null', around)}>"
    notes = []
    if "fields" in schema and id(schema) in around:
        notes.append("recursive")
    if kind == "enum":
        notes.append(plural(len(schema.get("symbols", ())), "symbol"))
    if kind == "fixed":
        notes.append(plural(schema.get("size", 0), "byte"))
    if logical := _logical_text(schema):
        notes.append(logical)
    return clean(f"{kind} {name}".strip() + (f" ({', '.join(notes)})" if notes else ""))


def _logical_text(schema: Any) -> str:
    """The logical type of a resolved schema, empty if it has none."""
    logical = schema.get("logicalType")
    if not logical:
        return ""
    digits = f"({schema.get('precision')}, {schema.get('scale', 0)})" if logical == "decimal" else ""
    return clean(f"{logical}{digits}")
