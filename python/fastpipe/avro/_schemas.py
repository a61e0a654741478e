"""The schemas of Avro files: how they are interpreted, and their fields."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fastpipe._arguments import flag, shown
from fastpipe._files._later_columns import report_later_columns
from fastpipe._omissions import report
from fastpipe._text import clean, plural
from fastpipe.errors import ColumnsLeftOutWarning, StorageError, UnsupportedError, in_file

ReaderSchema: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any] | None
Unsupported: TypeAlias = Literal["warn", "error", "ignore"]

# The maximum number of columns that a warning names.
_SHOWN = 20


@dataclass(frozen=True)
class Resolution:
    """How the schemas of files are interpreted.

    Attributes:
        schema: The JSON of the reader's schema; None to read each file with its own schema.
        merged: Whether the reader's schema is the merged schema of all files.
        logical_types: Whether values are read as their logical types.
    """

    schema: str | None = None
    merged: bool = False
    logical_types: bool = True

    @classmethod
    def of(cls, reader_schema: ReaderSchema, logical_types: bool) -> Resolution:
        """Returns the resolution for the arguments of `read_avro`.

        Raises:
            TypeError: If an argument has the wrong type.
            StorageError: If the file of a schema can't be read.
        """
        logical_types = flag("logical_types", logical_types)
        if reader_schema is None:
            return cls(None, False, logical_types)
        if isinstance(reader_schema, str) and reader_schema == "union":
            return cls(None, True, logical_types)
        return cls(_json(reader_schema), False, logical_types)

    def described(self) -> list[Any]:
        """Returns a JSON value that is equal for two resolutions that read the same values."""
        schema: Any = self.schema
        if schema is not None:
            # The layout of the JSON doesn't matter. Text that isn't JSON is the name of a type.
            with suppress(ValueError, RecursionError):
                schema = json.loads(schema)
        return [schema, self.merged, self.logical_types]

    def lowered(self) -> tuple[str | None, bool, bool]:
        """Returns the arguments of the extension module."""
        return self.schema, self.merged, self.logical_types


AS_WRITTEN = Resolution()
"""The resolution that reads each file with its own schema."""


def _json(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    if isinstance(schema, os.PathLike):
        path = os.fspath(schema)
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise in_file(StorageError, path, f"the reader's schema can't be read: {error}") from None
    if isinstance(schema, (Mapping, list, tuple)):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"reader_schema can't be written as JSON: {error}") from None
    raise TypeError(
        f'reader_schema must be a schema (JSON text, a dict or a list), the path of a schema file, or "union"; got '
        f"{shown(schema)}"
    )


def tell_left_out(left_out: Mapping[str, str], on_unsupported: str) -> None:
    """Reports columns that are left out, with a warning unless `on_unsupported` is "ignore", or raises an error.

    Raises:
        UnsupportedError: If `on_unsupported` is "error" and columns are left out.
        ValueError: If `on_unsupported` has another value than "warn", "error" and "ignore".
    """
    if on_unsupported not in ("warn", "error", "ignore"):
        raise ValueError(f'on_unsupported must be "warn", "error" or "ignore"; got {shown(on_unsupported)}')
    if not left_out:
        return
    named = [f"{name!r} ({reason})" for name, reason in list(left_out.items())[:_SHOWN]]
    more = f"; and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
    what = "1 column is" if len(left_out) == 1 else f"{len(left_out)} columns are"
    text = f"{what} left out, of types that are not read: {'; '.join(named)}{more}"
    if on_unsupported == "error":
        hint = 'on_unsupported="warn" reads the other columns'
        raise UnsupportedError(f"{text}. {hint}", reason=text)
    report(text, None if on_unsupported == "ignore" else ColumnsLeftOutWarning)


def tell_later(later: Sequence[tuple[str, str, int]], mergeable: bool) -> None:
    """Reports columns that the first file lacks, with a warning.

    Args:
        later: For each column, its name, the first file that has it, and the number of files that have it.
        mergeable: Whether `reader_schema="union"` can read the files.
    """
    hint = 'reader_schema="union" reads them, with null in files that lack them'
    if not mergeable:
        hint = "the files' schemas can't be merged: pass reader_schema= a schema that contains these columns"
    report_later_columns(later, hint, "the first file with rows")


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
    """The named types of a schema, with methods that resolve names, nested `type`s and unions."""

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
                # A reference may use the short name within the namespace, so both names are kept. If names clash across
                # namespaces, only the printed table is less exact.
                short = name.rpartition(".")[2]
                self._types.setdefault(short, schema)
                self._types[f"{namespace}.{short}" if namespace else short] = schema
            for inner in (schema.get("type"), schema.get("items"), schema.get("values")):
                if isinstance(inner, (dict, list)):
                    self._collect(inner, namespace)
            for inner in schema.get("fields", ()):
                self._collect(inner["type"], namespace)

    def resolve(self, schema: Any) -> Any:
        """Returns a resolved schema: a dict whose `type` names a primitive or complex type, or a list for a union."""
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
        """Returns the type without null and whether null is allowed; a union of several types stays a list."""
        schema = self.resolve(schema)
        if not isinstance(schema, list):
            return schema, schema["type"] == "null"
        branches = [branch for branch in map(self.resolve, schema) if branch != {"type": "null"}]
        nullable = len(branches) < len(schema)
        return (branches[0] if len(branches) == 1 else branches or {"type": "null"}), nullable


@dataclass(frozen=True)
class Field:
    """A row in the table of a schema's fields."""

    path: str
    parent: str
    type: str
    nullable: bool
    doc: str

    @property
    def full_type(self) -> str:
        """The type, with a `?` if null is allowed."""
        return self.type + "?" * self.nullable


def schema_fields(schema: Any) -> list[Field]:
    """Returns the fields of a schema from the outside in, named like features."""
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


def type_text(names: Names, schema: Any, around: tuple[int, ...]) -> str:
    """Describes an Avro type briefly: `array<record Item>`, `long (timestamp-millis)`; `?` means nullable."""
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
    """Returns the logical type of a resolved schema, or an empty string."""
    logical = schema.get("logicalType")
    if not logical:
        return ""
    digits = f"({schema.get('precision')}, {schema.get('scale', 0)})" if logical == "decimal" else ""
    return clean(f"{logical}{digits}")
