"""The values that batches should contain, computed without fastpipe.

Three deliberately simple parts:

* `leaves` and `follow` walk a schema, and records as fastavro or `decode` reads them, along the paths that name
features.
* `rows` converts a batch's array types to Python values by their definition, without their `to_list`.
* `encode` and `container` write unusual but valid Avro: arrays and maps in several blocks, some with their size in
bytes. `decode` and `load` read it as stored, without logical types, and with the branch of each union value.
"""

from __future__ import annotations

import io
import json
import math
import random
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import fastavro
import numpy as np

import fastpipe

PRIMITIVES = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}

# --- Schemas ---


@dataclass(frozen=True)
class Type:
    """A schema with its names resolved."""

    kind: str
    name: str = ""
    parts: tuple[Any, ...] = ()  # Fields (name, type), items, values, branches or symbols.
    size: int = 0
    logical: str = ""  # Empty if it doesn't fit the type.
    precision: int = 0
    scale: int = 0


@dataclass(frozen=True)
class Branch:
    """A union value: the index of its branch and the value."""

    index: int
    value: Any


# The types that support each logical type except decimals, and the dtypes of times.
LOGICAL = {
    "date": ("int", "datetime64[D]"),
    "time-millis": ("int", "timedelta64[ms]"),
    "time-micros": ("long", "timedelta64[us]"),
    "timestamp-millis": ("long", "datetime64[ms]"),
    "timestamp-micros": ("long", "datetime64[us]"),
    "timestamp-nanos": ("long", "datetime64[ns]"),
    "local-timestamp-millis": ("long", "datetime64[ms]"),
    "local-timestamp-micros": ("long", "datetime64[us]"),
    "local-timestamp-nanos": ("long", "datetime64[ns]"),
    "big-decimal": ("bytes", ""),
    "uuid": ("string bytes fixed16", ""),
    "duration": ("fixed12", ""),
}


def _logical(schema: Mapping[str, Any], kind: str, size: int = 0) -> dict[str, Any]:
    """Returns the attributes that the schema's JSON object adds to its type."""
    logical = schema.get("logicalType", "")
    if logical == "decimal":
        precision, scale = schema.get("precision"), schema.get("scale", 0)
        most = math.inf if kind == "bytes" else len(str(2 ** (8 * size - 1) - 1)) - 1 if size else 0
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (precision, scale))
        if kind in ("bytes", "fixed") and whole and 1 <= precision <= most and scale <= precision:
            return {"logical": logical, "precision": precision, "scale": scale}
        return {}
    of = f"{kind}{size}" if kind == "fixed" else kind
    return {"logical": logical} if of in LOGICAL.get(logical, ("",))[0].split() else {}


def resolve(schema: Any, names: dict[str, Any] | None = None, space: str = "") -> Any:
    """Builds a `Type` from a schema. A type inside of itself is cut off with the kind `recursive`."""
    names = {} if names is None else names
    if isinstance(schema, list):
        return Type("union", parts=tuple(resolve(branch, names, space) for branch in schema))
    if isinstance(schema, str):
        if schema in PRIMITIVES:
            return Type(schema)
        return names[schema if "." in schema or not space else f"{space}.{schema}"]
    kind = schema["type"]
    if not isinstance(kind, str):
        return resolve(kind, names, space)
    if kind == "array":
        return Type(kind, parts=(resolve(schema["items"], names, space),))
    if kind == "map":
        return Type(kind, parts=(resolve(schema["values"], names, space),))
    if kind not in ("record", "enum", "fixed"):
        return Type(kind, **_logical(schema, kind)) if kind in PRIMITIVES else resolve(kind, names, space)
    name = schema["name"]
    if "." not in name and schema.get("namespace", space):
        name = f"{schema.get('namespace', space)}.{name}"
    inside = name.rpartition(".")[0]
    if kind == "enum":
        names[name] = Type(kind, name, tuple(schema["symbols"]))
    elif kind == "fixed":
        names[name] = Type(kind, name, size=schema["size"], **_logical(schema, kind, schema["size"]))
    else:
        names[name] = Type("recursive", name)
        fields = tuple((field["name"], resolve(field["type"], names, inside)) for field in schema["fields"])
        names[name] = Type(kind, name, fields)
    return names[name]


def inner(node: Type) -> Type | None:
    """Returns the only type of a union besides null; None if there are several."""
    if len(node.parts) == 1:
        return node.parts[0]
    nulls = [branch for branch in node.parts if branch.kind == "null"]
    return next(b for b in node.parts if b.kind != "null") if len(nulls) == 1 and len(node.parts) == 2 else None


def numbers(node: Type) -> str:
    """Returns the dtype of a union of several numeric types, possibly with null; empty for other unions."""
    others = [branch for branch in node.parts if branch.kind != "null"]
    if len(others) < 2 or any(b.logical or b.kind not in ("int", "long", "float", "double") for b in others):
        return ""
    return "float64" if any(branch.kind in ("float", "double") for branch in others) else "int64"


def branches(node: Type) -> list[str]:
    """Returns the names that columns use for a union's branches."""
    short = [branch.name.rpartition(".")[2] or branch.kind for branch in node.parts]
    full = [branch.name or branch.kind for branch in node.parts]
    return [long if short.count(name) > 1 else name for name, long in zip(short, full, strict=True)]


def without_logical_types(node: Any) -> Any:
    """Returns a type whose values represent only what is stored."""
    if isinstance(node, tuple):  # A field.
        return node[0], without_logical_types(node[1])
    if not isinstance(node, Type):
        return node
    return replace(node, parts=tuple(map(without_logical_types, node.parts)), logical="", precision=0, scale=0)


def recursive(node: Type, name: str) -> bool:
    """Returns whether a type contains the type with this name."""
    if node.kind == "recursive":
        return node.name == name
    parts = (part[1] if node.kind == "record" else part for part in node.parts if not isinstance(part, str))
    return any(recursive(part, name) for part in parts)


@dataclass(frozen=True)
class Leaf:
    """A feature that can be inferred from a schema."""

    name: str
    type: Type
    dims: int = 0
    nullable: bool = False

    taken: bool = False

    @property
    def refusal(self) -> str:
        """A keyword of the reason why the feature isn't inferred; empty if it is."""
        if self.type.kind == "recursive":
            return "recursive"
        return "same name" if self.taken else ""

    @property
    def dtype(self) -> str:
        """The inferred dtype."""
        logical = self.type.logical
        if logical == "decimal":
            return "int64" if self.type.precision <= 18 else "float64"
        if logical == "duration":
            return "uint32"
        return LOGICAL.get(logical, ("", ""))[1] or self.stored

    @property
    def stored(self) -> str:
        """The dtype of the stored values, without logical types."""
        kinds = {"null": "bool", "boolean": "bool", "int": "int32", "enum": "int32", "long": "int64"}
        kinds |= {"float": "float32", "double": "float64", "string": "string", "sparse": self.type.name}
        if self.type.kind == "union":
            return numbers(self.type) or "int32"
        return kinds.get(self.type.kind, "bytes")

    @property
    def scale(self) -> int | None:
        """The number of decimal places, if decimals are read as integers."""
        return self.type.scale if self.type.logical == "decimal" and self.dtype == "int64" else None

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The inferred shape, without fixed array lengths."""
        return (None,) * self.dims + ((3,) if self.type.logical == "duration" else ())

    def spec(self) -> fastpipe.DenseSpec | fastpipe.RaggedSpec:
        """Returns a spec that reads the feature for any array lengths."""
        nulls = "mask" if self.nullable else "error"
        make = fastpipe.RaggedSpec if self.dims else fastpipe.DenseSpec
        return make(self.shape, self.dtype, on_null=nulls, scale=self.scale)


def leaves(root: Type) -> list[Leaf]:
    """Returns the features of a schema in order."""
    found: list[Leaf] = []
    for leaf in _leaves(root, "" if root.kind == "record" else "value", 0, False):
        taken = any(leaf.name == other.name for other in found)
        found.append(Leaf(leaf.name, leaf.type, leaf.dims, leaf.nullable, taken))
    return found


def _leaves(
    node: Type, name: str, dims: int, nullable: bool, around: tuple[str, ...] = (), inside: bool = False
) -> Iterator[Leaf]:
    """Yields the features below a type. `around` names the enclosing records; `inside` is true if one is recursive."""
    if node.kind == "union":
        only = inner(node)
        null = any(branch.kind == "null" for branch in node.parts)
        if only is None and numbers(node):
            yield Leaf(name, node, dims, nullable or null)
        elif only is None:
            yield Leaf(name, node, dims, nullable)
            for branch, of in zip(branches(node), node.parts, strict=True):
                if of.kind != "null":
                    yield from _leaves(of, f"{name}:{branch}", dims, True, around, inside)
        else:
            yield from _leaves(only, name, dims, nullable or len(node.parts) == 2, around, inside)
    elif node.kind == "record" and inside and any(recursive(node, outer) for outer in (*around, node.name)):
        yield Leaf(name, Type("recursive"), dims)
    elif node.kind == "record":
        sparse = _sparse(node) if dims == 0 else None
        if sparse is not None:
            yield Leaf(name, Type("sparse", sparse, node.parts), dims, nullable)
            return
        inside = inside or recursive(node, node.name)
        for field, part in node.parts:
            path = f"{name}.{field}" if name else field
            yield from _leaves(part, path, dims, nullable, (*around, node.name), inside)
    elif node.kind == "array":
        yield from _leaves(node.parts[0], name, dims + 1, nullable, around, inside)
    elif node.kind == "map":
        name = f"{name}." if name else ""
        yield Leaf(f"{name}keys", Type("string"), dims + 1, nullable)
        yield from _leaves(node.parts[0], f"{name}values", dims + 1, nullable, around, inside)
    else:
        yield Leaf(name, node, dims, nullable or node.kind == "null")


def _sparse(node: Type) -> str | None:
    """Returns the dtype of the values if a record has the form of a sparse array."""
    items = {}
    for name, part in node.parts:
        part = (inner(part) or part) if part.kind == "union" else part
        if part.kind != "array":
            return None
        items[name] = part.parts[0]
    if set(items) != {"values", *(f"indices{k}" for k in range(len(items) - 1))} or len(items) < 2:
        return None
    values = items.pop("values")
    plain = PRIMITIVES - {"null"} | {"enum"}
    if values.kind not in plain or values.logical or any(i.kind not in ("int", "long") for i in items.values()):
        return None
    return Leaf("", values).dtype


def follow(root: Type, record: Any, name: str) -> Any:
    """Returns the value of a feature in a record as nested lists, with None for null.

    A map's keys are a list, as are its values. A sparse record is a list of (index tuple, value).
    """
    return _follow(root, record, name if root.kind == "record" else name.removeprefix("value").removeprefix("."))


def _follow(node: Type, value: Any, path: str) -> Any:
    if node.kind == "union" and isinstance(value, Branch):
        return _follow_branch(node, value, path)
    if node.kind == "union":
        only = inner(node)
        assert only is not None, "a value of a union of several types must be a Branch"
        return None if value is None else _follow(only, value, path)
    if node.kind == "record" and not path:
        return entries(value)
    if node.kind == "record":
        field, rest = step(dict(node.parts), path)
        return _follow(dict(node.parts)[field], value[field], rest)
    if node.kind == "array":
        return [_follow(node.parts[0], item, path) for item in value]
    if node.kind == "map" and path == "keys":
        return list(value)
    if node.kind == "map":
        assert path.startswith("values")
        below = path.removeprefix("values").removeprefix(".")
        return [_follow(node.parts[0], item, below) for item in value.values()]
    assert not path, path
    return meaning(node, value)


def _follow_branch(node: Type, value: Branch, path: str) -> Any:
    of = node.parts[value.index]
    if inner(node) is not None:
        return None if of.kind == "null" else _follow(of, value.value, path)
    if numbers(node):
        return float(value.value) if numbers(node) == "float64" and value.value is not None else value.value
    if not path:
        return value.index
    branch, rest = step(branches(node), path.removeprefix(":"))
    return _follow(of, value.value, rest) if branches(node)[value.index] == branch and of.kind != "null" else None


def step(names: Iterable[str], path: str) -> tuple[str, str]:
    """Splits a path into its longest known first name and the rest."""
    found = [name for name in names if path == name or path.startswith((f"{name}.", f"{name}:"))]
    name = max(found, key=len)
    return name, path[len(name) :].removeprefix(".")


def meaning(node: Type, value: Any) -> Any:
    """Returns the value that a leaf's stored value represents in the inferred dtype, with times as numbers."""
    if node.logical == "decimal" and isinstance(value, bytes):
        unscaled = int.from_bytes(value, "big", signed=True)
        return unscaled if node.precision <= 18 else float(Fraction(unscaled, 10**node.scale))
    if node.logical == "duration" and isinstance(value, bytes):
        return list(struct.unpack("<III", value))
    return value


def arrays(root: Type) -> list[tuple[str, int, bool]]:
    """Returns the arrays and maps of a schema: path, number of enclosing ones, and whether they can be null."""
    return list(_arrays(root, "" if root.kind == "record" else "value", 0, False))


def _arrays(node: Type, name: str, dims: int, nullable: bool) -> Iterator[tuple[str, int, bool]]:
    if node.kind == "union":
        only = inner(node)
        if only is not None:
            yield from _arrays(only, name, dims, nullable or len(node.parts) == 2)
        elif not numbers(node):
            for branch, of in zip(branches(node), node.parts, strict=True):
                yield from _arrays(of, f"{name}:{branch}", dims, True)
    elif node.kind == "record":
        for field, part in node.parts:
            yield from _arrays(part, f"{name}.{field}" if name else field, dims, nullable)
    elif node.kind in ("array", "map"):
        yield name, dims, nullable
        below = f"{name}.values" if node.kind == "map" else name
        yield from _arrays(node.parts[0], below, dims + 1, nullable)


def lengths(root: Type, record: Any, name: str, dims: int) -> Any:
    """Returns the lengths of an array or map that is nested in `dims` others, for each of their items."""
    path = name if root.kind == "record" else name.removeprefix("value").removeprefix(".")
    return _lengths(root, record, path, dims)


def _lengths(node: Type, value: Any, path: str, dims: int) -> Any:
    if node.kind == "union" and isinstance(value, Branch):
        of = node.parts[value.index]
        if inner(node) is not None:
            return None if of.kind == "null" else _lengths(of, value.value, path, dims)
        branch, rest = step(branches(node), path.removeprefix(":"))
        return _lengths(of, value.value, rest, dims) if branches(node)[value.index] == branch else None
    if node.kind == "union":
        only = inner(node)
        assert only is not None
        return None if value is None else _lengths(only, value, path, dims)
    if node.kind == "record":
        field, rest = step(dict(node.parts), path)
        return _lengths(dict(node.parts)[field], value[field], rest, dims)
    if dims == 0:
        return len(value)
    if node.kind == "array":
        return [_lengths(node.parts[0], item, path, dims - 1) for item in value]
    below = path.removeprefix("values").removeprefix(".")
    return [_lengths(node.parts[0], item, below, dims - 1) for item in value.values()]


def entries(record: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Any]]:
    """Returns the entries of a sparse record. A null array counts as empty."""
    rank = len(record) - 1
    names = [f"indices{k}" for k in range(rank)] if "indices" not in record else ["indices"]
    columns = [bare(record[name]) or [] for name in names]
    values = [bare(value) for value in bare(record["values"]) or []]
    return list(zip(zip(*([bare(i) for i in column] for column in columns), strict=True), values, strict=True))


def bare(value: Any) -> Any:
    """Returns a value without its union branch."""
    return value.value if isinstance(value, Branch) else value


# --- Batches ---


def rows(node: Any, *, counted: bool = False) -> list[Any]:
    """Returns the rows of a batch value as Python values, after checking that its arrays are consistent.

    Times are returned as Python's types, or as numbers of their unit if `counted` is set.
    """
    if isinstance(node, np.ndarray):
        _check_array(node)
        return (node.view(np.int64) if counted and node.dtype.kind in "mM" else node).tolist()
    if isinstance(node, fastpipe.Strings):
        return _strings(node)
    if isinstance(node, fastpipe.Ragged):
        items = rows(node.values, counted=counted)
        return [items[a:b] for a, b in _spans(node.offsets, len(items))]
    if isinstance(node, fastpipe.Masked):
        _check_array(node.valid)
        assert node.valid.dtype == np.bool_
        assert isinstance(node.values, (np.ndarray, fastpipe.Strings)) or node.valid.ndim == 1
        if not isinstance(node.values, (np.ndarray, fastpipe.Strings)):
            assert len(node.values) == len(node.valid)
        else:
            assert node.values.shape[: node.valid.ndim] == node.valid.shape
        return _blank(rows(node.values, counted=counted), node.valid.tolist())
    if isinstance(node, fastpipe.Sparse):
        indices, values, shape = node
        found: list[list[Any]] = [[] for _ in range(int(shape[0]))]
        _check_sparse(indices, shape, indices.shape[1])
        assert (np.diff(indices[:, 0]) >= 0).all()
        for (row, *index), value in zip(indices.tolist(), rows(values, counted=counted), strict=True):
            found[row].append((tuple(index), value))
        return found
    assert isinstance(node, fastpipe.batch.SparseCSR), type(node)
    offsets, indices, values, shape = node
    _check_sparse(indices, shape, len(shape) - 1)
    assert len(offsets) == shape[0] + 1
    pairs = [
        (tuple(index) if isinstance(index, list) else (index,), value)
        for index, value in zip(indices.tolist(), rows(values, counted=counted), strict=True)
    ]
    return [pairs[a:b] for a, b in _spans(offsets, len(pairs))]


def _check_array(array: np.ndarray) -> None:
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert array.flags.writeable
    assert array.dtype.isnative
    assert array.size == 0 or array.ctypes.data % 64 == 0


def _check_sparse(indices: np.ndarray, shape: np.ndarray, width: int) -> None:
    assert indices.dtype == shape.dtype == np.int64
    assert shape.ndim == 1
    assert indices.ndim == (1 if width == 1 else 2)
    assert indices.ndim == 1 or indices.shape[1] == width


def _spans(offsets: np.ndarray, items: int) -> Iterable[tuple[int, int]]:
    _check_array(offsets)
    assert offsets.dtype == np.int64
    assert offsets[0] == 0
    assert offsets[-1] == items
    assert (np.diff(offsets) >= 0).all()
    return pairwise(offsets.tolist())


def _strings(node: fastpipe.Strings) -> list[Any]:
    _check_array(node.values)
    assert node.values.dtype == np.uint8
    assert len(node.offsets) == math.prod(node.shape) + 1
    data = bytes(node.values)
    found: list[Any] = [data[a:b] for a, b in _spans(node.offsets, len(data))]
    if not node.binary:
        found = [entry.decode() for entry in found]
    for size in reversed(node.shape[1:]):
        found = [found[i : i + size] for i in range(0, len(found), size)]
    return found


def _blank(values: list[Any], valid: list[Any]) -> list[Any]:
    return [
        _blank(value, flag) if isinstance(flag, list) else value if flag else None
        for value, flag in zip(values, valid, strict=True)
    ]


def same(a: Any, b: Any) -> bool:
    """Returns whether two values have the same types and are equal. NaN equals NaN, and 0.0 differs from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return math.isnan(a) if math.isnan(b) else a == b and math.copysign(1, a) == math.copysign(1, b)
    return bool(a == b)


def difference(expected: Any, found: Any, where: str) -> str | None:
    """Describes where two nested values differ; None if they are the same."""
    if same(expected, found):
        return None
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            if not same(a, b):
                return difference(a, b, f"{where}[{i}]")
    return f"{where}: expected {expected!r}, found {found!r}"


def check(reader: fastpipe.Reader, records: Sequence[Any], expected: Callable[[str, Any], Any]) -> None:
    """Reads a pass and compares each batch with `expected(feature name, record)` of its records.

    Symbols of enums that are read as codes are expected as codes.
    """
    assert reader.num_rows == len(records)
    start = 0
    for batch in reader:
        assert list(batch) == list(reader.features)
        stop = min(start + reader.batch_size, len(records))
        for name, node in batch.items():
            assert same(rows(node), _rows_of(node)), f"to_list of {name!r} disagrees"
            found = rows(node, counted=True)
            wanted = [expected(name, record) for record in records[start:stop]]
            if name in reader.categories:
                wanted = codes(wanted, reader.categories[name])
            problem = difference(wanted, found, f"{name} from row {start}")
            assert problem is None, problem
            _check_spec(node, reader.features[name], stop - start)
        start = stop
    assert start == len(records)


def columns(reader: fastpipe.Reader) -> dict[str, list[Any]]:
    """Returns all rows of each feature in a pass, in order."""
    found: dict[str, list[Any]] = {}
    with reader:
        for batch in reader:
            for name, node in batch.items():
                found.setdefault(name, []).extend(rows(node, counted=True))
    return found


def _rows_of(node: Any) -> list[Any]:
    return node.tolist() if isinstance(node, np.ndarray) else node.to_list()


def codes(wanted: Any, symbols: list[str]) -> Any:
    """Replaces symbols of enums by their codes."""
    if isinstance(wanted, list):
        return [codes(item, symbols) for item in wanted]
    if isinstance(wanted, tuple):  # An entry of a sparse array.
        return wanted[0], codes(wanted[1], symbols)
    return symbols.index(wanted) if isinstance(wanted, str) else wanted


def _check_spec(node: Any, spec: Any, count: int) -> None:
    """Checks that array types, shapes and dtypes match the spec."""
    if isinstance(spec, fastpipe.SparseSpec):
        node = node.values if isinstance(node, fastpipe.Masked) else node
        assert isinstance(node, fastpipe.Sparse if spec.layout == "coo" else fastpipe.batch.SparseCSR)
        assert len(node.dense_shape) == len(spec.shape) + 1
        assert node.dense_shape[0] == count
        coordinates = node.indices[:, np.newaxis] if node.indices.ndim == 1 else node.indices[:, -len(spec.shape) :]
        for k, size in enumerate(spec.shape):
            greatest = int(coordinates[:, k].max()) + 1 if len(coordinates) else 0
            assert node.dense_shape[k + 1] == (greatest if size is None else size)
        _check_values(node.values, spec, (len(coordinates),))
        return
    shape: tuple[int | None, ...] = (count, *spec.shape)
    while isinstance(spec, fastpipe.RaggedSpec) and None in shape[1:]:
        if isinstance(node, fastpipe.Masked):
            assert spec.on_null == "mask"
            node = node.values
        assert type(node) is fastpipe.Ragged
        assert len(node) == shape[0]
        node = node.values
        shape = (len(node), *shape[2:])
    _check_values(node, spec, shape)


def _check_values(node: Any, spec: Any, shape: tuple[int | None, ...]) -> None:
    if isinstance(node, fastpipe.Masked):
        assert spec.on_null == "mask"
        node = node.values
    assert node.shape == shape
    if spec.dtype in ("string", "bytes"):
        assert type(node) is fastpipe.Strings
        assert node.binary == (spec.dtype == "bytes")
    else:
        assert type(node) is np.ndarray
        assert node.dtype == spec.dtype


# --- Writing and reading Avro ---


def varint(number: int) -> bytes:
    """Encodes a long: zigzag, seven bits per byte, lowest bits first."""
    rest = number << 1 if number >= 0 else ~(number << 1)
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decodes a long. Returns it and its end."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number >> 1 ^ -(number & 1), at


def encode(node: Type, value: Any, rng: random.Random) -> bytes:
    """Encodes a value as Avro, with arrays and maps split into random blocks."""
    match node.kind:
        case "null":
            return b""
        case "boolean":
            return b"\x01" if value else b"\x00"
        case "int" | "long":
            return varint(value)
        case "float":
            return struct.pack("<f", value)
        case "double":
            return struct.pack("<d", value)
        case "bytes" | "string":
            data = value.encode() if isinstance(value, str) else value
            return varint(len(data)) + data
        case "fixed":
            assert len(value) == node.size
            return value
        case "enum":
            return varint(node.parts.index(value))
        case "union" if isinstance(value, Branch):
            return varint(value.index) + encode(node.parts[value.index], value.value, rng)
        case "union":
            kinds = [branch.kind for branch in node.parts]
            branch = kinds.index("null") if value is None else next(i for i, k in enumerate(kinds) if k != "null")
            return varint(branch) + encode(node.parts[branch], value, rng)
        case "record":
            return b"".join(encode(part, value[name], rng) for name, part in node.parts)
        case "array":
            return items([encode(node.parts[0], item, rng) for item in value], rng)
        case "map":
            text = Type("string")
            pairs = [encode(text, key, rng) + encode(node.parts[0], item, rng) for key, item in value.items()]
            return items(pairs, rng)
    raise AssertionError(node)


def items(encoded: Sequence[bytes], rng: random.Random) -> bytes:
    """Encodes the items of an array or map in blocks.

    A negative item count is followed by the block's size in bytes.
    """
    out = bytearray()
    at = 0
    while at < len(encoded):
        count = rng.randint(1, len(encoded) - at)
        data = b"".join(encoded[at : at + count])
        out += varint(count) if rng.random() < 0.5 else varint(-count) + varint(len(data))
        out += data
        at += count
    return bytes(out + b"\x00")


def container(schema: Any, records: Sequence[Any], rng: random.Random, codec: str = "null") -> bytes:
    """Returns a container file with blocks of random sizes, some without records.

    Supports the codecs null and deflate.
    """
    root = resolve(schema)
    text = Type("string")
    metadata = {"avro.schema": json.dumps(schema).encode(), "avro.codec": codec.encode(), "note": bytes(range(256))}
    pairs = [encode(text, key, rng) + varint(len(value)) + value for key, value in metadata.items()]
    rng.shuffle(pairs)
    sync = rng.randbytes(16)
    out = bytearray(b"Obj\x01" + items(pairs, rng) + sync)
    at = 0
    while at < len(records):
        count = rng.randint(0, min(len(records) - at, 20))
        data = b"".join(encode(root, record, rng) for record in records[at : at + count])
        if codec == "deflate":
            squeeze = zlib.compressobj(wbits=-15)
            data = squeeze.compress(data) + squeeze.flush()
        out += varint(count) + varint(len(data)) + data + sync
        at += count
    return bytes(out)


def decode(node: Type, data: bytes, at: int, names: Mapping[str, Type]) -> tuple[Any, int]:
    """Decodes a value as stored. Returns it and its end. Union values are `Branch`es; `names` maps names to types."""
    match node.kind:
        case "null":
            return None, at
        case "boolean":
            assert data[at] in (0, 1)
            return data[at] == 1, at + 1
        case "int" | "long":
            return read_varint(data, at)
        case "float":
            return struct.unpack_from("<f", data, at)[0], at + 4
        case "double":
            return struct.unpack_from("<d", data, at)[0], at + 8
        case "bytes" | "string" | "fixed":
            size, at = (node.size, at) if node.kind == "fixed" else read_varint(data, at)
            value = data[at : at + size]
            assert len(value) == size
            return value.decode() if node.kind == "string" else value, at + size
        case "enum":
            index, at = read_varint(data, at)
            return node.parts[index], at
        case "union":
            index, at = read_varint(data, at)
            assert index >= 0
            value, at = decode(node.parts[index], data, at, names)
            return Branch(index, value), at
        case "record":
            record = {}
            for name, part in node.parts:
                record[name], at = decode(part, data, at, names)
            return record, at
        case "array":
            return _decode_items(node.parts[0], data, at, names)
        case "map":
            pair = Type("record", parts=(("key", Type("string")), ("value", node.parts[0])))
            pairs, at = _decode_items(pair, data, at, names)
            return {entry["key"]: entry["value"] for entry in pairs}, at
        case "recursive":
            return decode(names[node.name], data, at, names)
    raise AssertionError(node)


def _decode_items(node: Type, data: bytes, at: int, names: Mapping[str, Type]) -> tuple[list[Any], int]:
    found = []
    while True:
        count, at = read_varint(data, at)
        if count == 0:
            return found, at
        if count < 0:
            _, at = read_varint(data, at)
        for _ in range(abs(count)):
            value, at = decode(node, data, at, names)
            found.append(value)


def load(path: str | Path) -> tuple[Type, list[Any]]:
    """Returns the schema of a file and its records as stored."""
    metadata, blocks = split(Path(path).read_bytes())
    names: dict[str, Any] = {}
    root = resolve(json.loads(metadata["avro.schema"]), names)
    records = []
    for count, data in blocks:
        at = 0
        for _ in range(count):
            record, at = decode(root, data, at, names)
            records.append(record)
        assert at == len(data)
    return root, records


def split(data: bytes) -> tuple[dict[str, bytes], list[tuple[int, bytes]]]:
    """Returns the metadata and the decompressed blocks (records, bytes) of a container file.

    Supports fastavro's codecs.
    """
    assert data[:4] == b"Obj\x01"
    at = 4
    metadata: dict[str, bytes] = {}
    while True:
        count, at = read_varint(data, at)
        if count == 0:
            break
        if count < 0:
            _, at = read_varint(data, at)
        for _ in range(abs(count)):
            pair = []
            for _ in range(2):
                size, at = read_varint(data, at)
                pair.append(data[at : at + size])
                at += size
            metadata[pair[0].decode()] = pair[1]
    sync = data[at : at + 16]
    at += 16
    blocks = []
    while at < len(data):
        count, at = read_varint(data, at)
        size, at = read_varint(data, at)
        block = data[at : at + size]
        at += size
        assert data[at : at + 16] == sync
        at += 16
        blocks.append((count, _decompress(metadata.get("avro.codec", b"null"), block)))
    return metadata, blocks


def _decompress(codec: bytes, block: bytes) -> bytes:
    if codec == b"null":
        return block
    if codec == b"deflate":
        return zlib.decompress(block, wbits=-15)
    # fastavro decompresses the other codecs.
    pair = [b"avro.schema", b'"null"', b"avro.codec", codec]
    header = b"Obj\x01\x04" + b"".join(varint(len(part)) + part for part in pair) + b"\x00" + bytes(16)
    file = header + varint(1) + varint(len(block)) + block + bytes(16)
    (found,) = fastavro.block_reader(io.BytesIO(file))
    return found.bytes_.read()
