"""Random changes of Avro schemas, and the values that result (Avro 1.12 specification, "Schema Resolution").

Schemas are JSON that never refers to a named type by its name.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from avro_schemas import SYMBOLS, Maker, Values
from oracle import Branch, Type

PROMOTED = {"int": ("long", "float", "double"), "long": ("float", "double"), "float": ("double",)}
PROMOTED |= {"string": ("bytes",), "bytes": ("string",)}
NAMED = ("record", "enum", "fixed")


class UnresolvedError(Exception):
    """A value that the reader's schema cannot represent."""


def kind_of(schema: Any) -> str:
    """Returns the kind of a type."""
    return "union" if isinstance(schema, list) else schema if isinstance(schema, str) else schema["type"]


def same_name(writer: Mapping[str, Any], reader: Mapping[str, Any]) -> bool:
    """Returns whether names match without their namespaces, or by an alias of the reader."""
    last = writer["name"].rpartition(".")[2]
    return any(name.rpartition(".")[2] == last for name in (reader["name"], *reader.get("aliases", [])))


# Degrees of similarity between types, best first. As in Java, and unlike the specification, a value takes the branch
# with its full name before one with only the same last name. It also takes a branch of exactly its type before one that
# it would be promoted to.
ALIKE = ("full names", "last names", "promoted")


def matches(writer: Any, reader: Any, alike: str) -> bool:
    """Returns whether a type resolves to another one, in the sense used to choose a branch. Neither type is a union."""
    of, to = kind_of(writer), kind_of(reader)
    if of != to:
        return alike == "promoted" and to in PROMOTED.get(of, ())
    if of in NAMED:
        same = writer["name"] == reader["name"] if alike == "full names" else same_name(writer, reader)
        return same and (of != "fixed" or writer["size"] == reader["size"])
    if of in ("array", "map"):
        inner = "items" if of == "array" else "values"
        either = "union" in (kind_of(writer[inner]), kind_of(reader[inner]))
        return either or matches(writer[inner], reader[inner], alike)
    return True


def resolved(writer: Any, reader: Any, value: Any) -> Any:
    """Returns a value of the writer's schema in the reader's schema.

    Raises:
        UnresolvedError: The reader's schema cannot represent the value.
    """
    if isinstance(writer, list):
        return resolved(writer[value.index], reader, value.value)
    if isinstance(reader, list):
        for alike in ALIKE:
            for index, branch in enumerate(reader):
                if matches(writer, branch, alike):
                    if kind_of(writer) in ("int", "long") and numbers(reader):
                        # One float64 column holds all branches, so a float keeps the digits that float32 would lose.
                        return Branch(index, float(value) if kind_of(branch) == "float" else value)
                    return Branch(index, resolved(writer, branch, value))
        raise UnresolvedError
    if not matches(writer, reader, "promoted"):
        raise UnresolvedError
    match kind_of(reader):
        case "record":
            return _record(writer, reader, value)
        case "array":
            return [resolved(writer["items"], reader["items"], item) for item in value]
        case "map":
            return {key: resolved(writer["values"], reader["values"], item) for key, item in value.items()}
        case "enum" if value not in reader["symbols"]:
            if "default" not in reader:
                raise UnresolvedError
            return reader["default"]
        case "float" if kind_of(writer) != "float":
            return float(np.float32(value))
        case "double":
            return float(value)
        case "bytes" if isinstance(value, str):
            return value.encode()
        case "string" if isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError:
                raise UnresolvedError from None
    return value


def _record(writer: Any, reader: Any, value: Any) -> dict[str, Any]:
    fields = {field["name"]: field for field in writer["fields"]}
    out = {}
    for field in reader["fields"]:
        names = [name for name in (field["name"], *field.get("aliases", [])) if name in fields]
        if names:
            out[field["name"]] = resolved(fields[names[0]]["type"], field["type"], value[names[0]])
        elif "default" in field:
            out[field["name"]] = of_default(field["type"], field["default"])
        else:
            raise UnresolvedError
    return out


def of_default(schema: Any, default: Any) -> Any:
    """Returns the value that a default represents. Defaults of unions here use the first branch."""
    match kind_of(schema):
        case "union":
            return Branch(0, of_default(schema[0], default))
        case "record":
            given = {field["name"]: default.get(field["name"], field.get("default")) for field in schema["fields"]}
            return {field["name"]: of_default(field["type"], given[field["name"]]) for field in schema["fields"]}
        case "array":
            return [of_default(schema["items"], item) for item in default]
        case "map":
            return {key: of_default(schema["values"], item) for key, item in default.items()}
        case "bytes" | "fixed":
            return default.encode("latin-1")
        case "float" | "double":
            return float(default)
    return default


def numbers(union: list[Any]) -> bool:
    """Returns whether all types of a union are numbers or null."""
    return all(branch in ("int", "long", "float", "double", "null") for branch in union)


class Evolution(Maker):
    """Changes schemas so that old values convert to the new schema, except for some values of unions and enums."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.count = 0

    def chance(self, of: float) -> bool:
        return self.rng.random() < of

    def root(self, schema: Any) -> Any:
        """Returns a reader's schema for the writer's schema."""
        return self.record_of(copy.deepcopy(schema), keep=("id",))

    def of(self, schema: Any) -> Any:
        """Returns another type for a field."""
        if isinstance(schema, list):
            return self.union_of(schema)
        schema = self.single_of(schema)
        if self.chance(0.15):
            others = [other for other in ("null", "boolean") if other != kind_of(schema)]
            schema = [schema, *self.rng.sample(others, self.rng.randint(1, len(others)))]
            self.rng.shuffle(schema)
        return schema

    def single_of(self, schema: Any) -> Any:
        kind = kind_of(schema)
        if isinstance(schema, str) or kind in PROMOTED:
            plain = isinstance(schema, str)
            return self.rng.choice(PROMOTED[kind]) if plain and kind in PROMOTED and self.chance(0.3) else schema
        if kind in NAMED and self.chance(0.2):
            schema["name"] = f"other.{schema['name'].rpartition('.')[2]}"
        elif kind in NAMED and self.chance(0.2):
            self.count += 1
            schema |= {"aliases": [schema["name"]], "name": f"Renamed{self.count}"}
        match kind:
            case "record":
                return self.record_of(schema)
            case "array":
                schema["items"] = self.of(schema["items"])
            case "map":
                schema["values"] = self.of(schema["values"])
            case "enum" if self.chance(0.5):
                schema["symbols"] = self.rng.sample(SYMBOLS, self.rng.randint(1, 4))
                if self.chance(0.7):
                    schema["default"] = self.rng.choice(schema["symbols"])
        return schema

    def union_of(self, schema: list[Any]) -> Any:
        # Names within a union must stay distinct, so only unnamed branches are changed.
        branches = [branch if kind_of(branch) in NAMED else self.inside(branch) for branch in schema]
        others = [branch for branch in branches if branch != "null"]
        if len(others) == 1 and self.chance(0.1):
            return others[0]
        if "null" not in branches and self.chance(0.3):
            branches.append("null")
        elif len(branches) > 1 and self.chance(0.1):
            branches.pop()
        self.rng.shuffle(branches)
        return branches

    def inside(self, schema: Any) -> Any:
        """Returns a branch of the same kind."""
        if kind_of(schema) == "array":
            schema["items"] = self.of(schema["items"])
        elif kind_of(schema) == "map":
            schema["values"] = self.of(schema["values"])
        return schema

    def record_of(self, schema: Any, keep: tuple[str, ...] = ()) -> Any:
        fields = []
        for field in schema["fields"]:
            if field["name"] in keep:
                fields.append(field)
                continue
            if self.chance(0.15):
                continue
            field["type"] = self.of(field["type"])
            if self.chance(0.2):
                self.count += 1
                field |= {"aliases": ["nobody", field["name"]], "name": f"renamed{self.count}"}
            fields.append(field)
        while self.chance(0.3):
            self.count += 1
            added = self.unnamed(self.any(2))
            fields.append({"name": f"added{self.count}", "type": added, "default": self.default(added)})
        self.rng.shuffle(fields)
        schema["fields"] = fields
        return schema

    def unnamed(self, schema: Any) -> Any:
        """Returns the schema with unique names."""
        if isinstance(schema, list):
            return [self.unnamed(branch) for branch in schema]
        if not isinstance(schema, dict):
            return schema
        if schema["type"] in NAMED:
            self.count += 1
            schema["name"] = f"added.Added{self.count}"
        for inner in ("items", "values"):
            if inner in schema:
                schema[inner] = self.unnamed(schema[inner])
        for field in schema.get("fields", []):
            field["type"] = self.unnamed(field["type"])
        return schema

    def default(self, schema: Any) -> Any:
        """Returns JSON that represents a value of a type as a default."""
        rng = self.rng
        match kind_of(schema):
            case "union":
                return self.default(schema[0])
            case "null":
                return None
            case "boolean":
                return self.chance(0.5)
            case "int" | "long":
                return rng.choice([0, -1, 2**31 - 1, rng.randint(-99, 99)])
            case "float" | "double":
                return rng.choice([0.5, -1.25, 3.0, 2])
            case "string" if not isinstance(schema, str) and schema.get("logicalType") == "uuid":
                return "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
            case "string":
                return rng.choice(["", "text", "ä漢"])
            case "bytes":
                return rng.choice(["", "\x05", "\xff\x00"])
            case "fixed":
                # Keeps decimals small.
                return "\x00" * (schema["size"] - 1) + rng.choice("\x00\x07")
            case "enum":
                return rng.choice(schema["symbols"])
            case "array":
                return [self.default(schema["items"]) for _ in range(rng.randint(0, 2))]
            case "map":
                return {f"k{k}": self.default(schema["values"]) for k in range(rng.randint(0, 2))}
        fields = {field["name"]: self.default(field["type"]) for field in schema["fields"]}
        for field in schema["fields"]:
            if self.chance(0.3):
                field["default"] = fields.pop(field["name"])
        return fields


class Writable(Values):
    """Generates values whose bytes are also valid UTF-8."""

    def of(self, node: Type) -> Any:
        if node.kind == "bytes" and not node.logical:
            return self.rng.choice([b"", b"abc", "ä".encode()])
        return super().of(node)
