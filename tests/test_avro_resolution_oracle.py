"""Files that are read with a reader's schema, compared with the apache-avro crate.

The crate resolves values rather than types, so it accepts more than the specification allows. `agreed` leaves out the
types for which it differs.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

import fastpipe
import oracle
import wire
from avro_evolution import (
    ALIKE,
    NAMED,
    PROMOTED,
    Evolution,
    UnresolvedError,
    Writable,
    kind_of,
    matches,
    resolved,
    same_name,
)
from avro_schemas import PRIMITIVES, container, files, schemas
from oracle import Branch, Type
from strategies import SOME

# The datasets are so small that an incomplete last batch is a large part of them.
pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")

Rewriter = Callable[..., str]

# --- Types that apache-avro resolves as specified ---

# Types that it resolves in addition to promotions if the value happens to fit: a long within the range of an int, a
# string with the length of a fixed, an array of integers as bytes.
LENIENT = {
    "long": ("int",),
    "double": ("float",),
    "string": ("enum", "fixed"),
    "bytes": ("fixed",),
    "fixed": ("string", "bytes"),
    "array": ("bytes",),
    "map": ("record",),
}


class DepartureError(Exception):
    """A type for which apache-avro departs from the specification."""


def logical(schema: Any) -> str:
    """Returns the logical type; empty if there is none or it doesn't fit."""
    found: str = oracle.resolve(schema).logical if kind_of(schema) not in ("array", "map", "union", "record") else ""
    return found


def agreed(writer: Any, reader: Any) -> Any:
    """Returns the reader's schema without the record fields that apache-avro resolves differently.

    Raises:
        DepartureError: If it resolves the whole type differently.
    """
    if isinstance(writer, list):
        for branch in writer:
            reader = agreed(branch, reader)
        return reader
    if isinstance(reader, list):
        return _agreed_union(writer, reader)
    of, to = kind_of(writer), kind_of(reader)
    if of != to:
        # Values of logical types aren't promoted: a date is not a long. Strings are converted to decimals like the
        # bytes of a default.
        promoted = to in PROMOTED.get(of, ())
        if (promoted and (logical(writer) or logical(reader))) or to in LENIENT.get(of, ()):
            raise DepartureError
        return reader
    # apache-avro ignores names.
    if (of in NAMED and not same_name(writer, reader)) or logical(writer) != logical(reader):
        raise DepartureError
    match of:
        case "array":
            return reader | {"items": agreed(writer["items"], reader["items"])}
        case "map":
            return reader | {"values": agreed(writer["values"], reader["values"])}
        case "record":
            return reader | {"fields": list(_agreed_fields(writer, reader))}
    return reader


def _agreed_fields(writer: Any, reader: Any) -> Iterator[Any]:
    types = {field["name"]: field["type"] for field in writer["fields"]}
    for field in reader["fields"]:
        try:
            # apache-avro matches fields only by name, not by alias.
            if field["name"] in types:
                yield field | {"type": agreed(types[field["name"]], field["type"])}
            elif not any(alias in types for alias in field.get("aliases", [])):
                if "default" in field:
                    _check_default(field["type"], field["default"], of_field=True)
                yield field
        except DepartureError:
            continue


def _agreed_union(writer: Any, reader: list[Any]) -> list[Any]:
    of = kind_of(writer)
    kinds = [kind_of(branch) for branch in reader]
    # Decimals prefer a branch of bytes to one of fixed, even if they are fixed. UUIDs prefer a branch of strings.
    if logical(writer) in ("decimal", "uuid") and len({"bytes", "string", "fixed"} & set(kinds)) > 1:
        raise DepartureError
    takes = {of, *PROMOTED.get(of, ()), *LENIENT.get(of, ())}
    rivals = [k for k, branch in enumerate(reader) if kinds[k] in takes]
    if of == "fixed":
        # A fixed decimal matches in any size.
        other = lambda k: kinds[k] == of and reader[k]["size"] != writer["size"] and logical(reader[k]) != "decimal"  # noqa: E731
        rivals = [k for k in rivals if not other(k)]
    expected = next((k for alike in ALIKE for k, branch in enumerate(reader) if matches(writer, branch, alike)), None)
    if expected is None and not rivals:
        return reader
    # Among several records, enums or fixed types, the first one that accepts the value is used. A value that its own
    # type rejects, such as an unknown enum symbol, goes to any other branch that accepts it.
    alike = [k for k in rivals if kinds[k] == of]
    sure = of not in ("array", "map", *NAMED)
    first = alike[:1] if alike and sure else rivals if alike else rivals[:1]
    if first != [expected]:
        raise DepartureError
    assert expected is not None
    return [agreed(writer, branch) if k == expected else branch for k, branch in enumerate(reader)]


def _check_default(schema: Any, default: Any, *, of_field: bool = False, twice: bool = False) -> None:
    """Raises DepartureError if apache-avro interprets a default differently or rejects it."""
    match kind_of(schema):
        case "union" if of_field:
            # apache-avro resolves the default as a value of the first branch, and then resolves that value to the
            # union.
            _check_default(schema[0], default, twice=True)
            agreed(schema[0], schema)
        case "union":
            # Within arrays, maps and records it chooses the branch that is closest to the JSON.
            others = [branch for branch in schema if branch != "null"]
            if default is not None and len(others) > 1:
                raise DepartureError
            _check_default("null" if default is None else others[0], default, twice=twice)
        case "array":
            for item in default:
                _check_default(schema["items"], item, twice=twice)
        case "map":
            for item in default.values():
                _check_default(schema["values"], item, twice=twice)
        case "record":
            for field in schema["fields"]:
                given = field["name"] in default
                value = default[field["name"]] if given else field["default"]
                _check_default(field["type"], value, of_field=not given, twice=twice)
        case "bytes" | "fixed" if logical(schema) == "decimal":
            # A number needs at least one byte. If it is resolved twice, it needs as many bytes as its precision
            # requires.
            if len(default) < (least_bytes(schema["precision"]) if twice else 1):
                raise DepartureError
        case "bytes" | "fixed" as kind:
            # apache-avro encodes text as UTF-8, whereas the specification maps each code point to a byte. Of the
            # logical types, only fixed UUIDs accept text.
            plain = logical(schema) == "" or (kind, logical(schema)) == ("fixed", "uuid")
            if not plain or not default.isascii():
                raise DepartureError


def least_bytes(precision: int) -> int:
    """Returns the number of bytes that a decimal of a precision needs.

    apache-avro rejects fewer bytes, even if the value fits.
    """
    return next(size for size in itertools.count(1) if 10**precision <= 2 ** (8 * size - 1))


def names_of(schema: Any) -> Iterator[str]:
    """Yields the names that a schema defines."""
    if isinstance(schema, list):
        for branch in schema:
            yield from names_of(branch)
    elif isinstance(schema, dict):
        if schema["type"] in NAMED:
            yield schema["name"]
        inner = [schema[key] for key in ("items", "values") if key in schema]
        for part in [*inner, *(field["type"] for field in schema.get("fields", []))]:
            yield from names_of(part)


def once(schema: Any) -> Any:
    """Returns a record's schema without fields that define a name again, which `Evolution` sometimes makes."""
    seen: set[str] = set()
    fields = []
    for field in schema["fields"]:
        names = list(names_of(field["type"]))
        if len({*names, *seen}) == len(names) + len(seen):
            fields.append(field)
            seen |= set(names)
    return schema | {"fields": fields}


class Sound(Writable):
    """Values that apache-avro can read. It validates values of logical types."""

    def of(self, node: Type) -> Any:
        if node.kind == "bytes" and node.logical == "uuid":
            return self.rng.randbytes(16)
        if node.kind == "bytes" and node.logical == "big-decimal":
            return oracle.varint(1) + self.rng.randbytes(1) + oracle.varint(self.rng.randint(-3, 3))
        return super().of(node)

    def decimal(self, node: Type) -> bytes:
        value = super().decimal(node)
        return (b"\xff" if value[0] & 0x80 else b"\0") * (least_bytes(node.precision) - len(value)) + value


class Filled(Sound):
    """Values without empty arrays and maps, which have no item that a reader could reject."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.longest = 3

    def of(self, node: Type) -> Any:
        value = super().of(node)
        return self.of(node) if node.kind in ("array", "map") and not value else value


def with_rows(schema: Any, rows: list[Any]) -> bytes:
    """Returns a file in which every block has rows, because apache-avro treats an empty block as the end."""
    blobs = (container(schema, rows, number) for number in itertools.count())
    return next(blob for blob in blobs if all(count for count, _ in oracle.split(blob)[1]))


# --- Comparison ---


def stored(node: Type, value: Any) -> Any:
    """Returns a value as read back from a file, with floats rounded to float32."""
    return oracle.decode(node, oracle.encode(node, value, random.Random(0)), 0, {})[0]


def comparable(value: Any) -> Any:
    """Returns the value with branches as pairs and maps sorted by key, because apache-avro's maps have no order."""
    if isinstance(value, Branch):
        return value.index, comparable(value.value)
    if isinstance(value, dict):
        return {key: comparable(value[key]) for key in sorted(value)}
    return [comparable(item) for item in value] if isinstance(value, list) else value


def ordered(node: Type, value: Any) -> bool:
    """Returns whether no map in a value has several entries."""
    match node.kind:
        case "union":
            return ordered(node.parts[value.index], value.value)
        case "array":
            return all(ordered(node.parts[0], item) for item in value)
        case "map":
            return len(value) < 2 and all(ordered(node.parts[0], item) for item in value.values())
        case "record":
            return all(ordered(part, value[name]) for name, part in node.parts)
    return True


evolutions = st.integers(0, 2**32 - 1)


# Few types differ between the schemas, and each example is cheap.
@hypothesis.settings(max_examples=5 * SOME)
@hypothesis.given(schemas(), evolutions, st.integers(0, 12))
def test_the_oracle_agrees_with_apache_avro(rewriter: Rewriter, schema: Any, seed: int, count: int) -> None:
    check(rewriter, schema, once(Evolution(random.Random(seed)).root(schema)), Sound(seed), count)


KINDS: dict[str, Any] = {kind: kind for kind in PRIMITIVES} | {
    "enum": {"type": "enum", "name": "m.E", "symbols": ["A", "B"]},
    "enum of other symbols": {"type": "enum", "name": "m.E", "symbols": ["B", "C"]},
    "enum with a default": {"type": "enum", "name": "n.E", "symbols": ["C", "B"], "default": "B"},
    "other enum": {"type": "enum", "name": "O", "symbols": ["A", "B"]},
    "fixed": {"type": "fixed", "name": "F", "size": 2},
    "larger fixed": {"type": "fixed", "name": "F", "size": 3},
    "record": {"type": "record", "name": "S", "fields": [{"name": "a", "type": "int"}]},
    "record with a default": {
        "type": "record",
        "name": "S",
        "fields": [{"name": "b", "type": "string", "default": "ä"}, {"name": "a", "type": "double"}],
    },
    "array": {"type": "array", "items": "int"},
    "array of others": {"type": "array", "items": "float"},
    "map": {"type": "map", "values": "string"},
    "map of others": {"type": "map", "values": "bytes"},
    "date": {"type": "int", "logicalType": "date"},
    "timestamp": {"type": "long", "logicalType": "timestamp-millis"},
    "uuid": {"type": "string", "logicalType": "uuid"},
    "fixed uuid": {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"},
    "decimal": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
    "fixed decimal": {"type": "fixed", "name": "D", "size": 4, "logicalType": "decimal", "precision": 4, "scale": 2},
}
AROUND: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "nothing": (lambda of: of, lambda to: to),
    "the writer's union": (lambda of: [of, "null"] if of != "null" else [of], lambda to: to),
    "the reader's union": (lambda of: of, lambda to: ["null", to] if to != "null" else [to]),
    "both unions": (lambda of: [of], lambda to: [to]),
    "a union of promotions": (
        lambda of: of,
        lambda to: [to, *(kind for kind in ("double", "float", "bytes") if kind != kind_of(to))],
    ),
    "arrays": (lambda of: {"type": "array", "items": of}, lambda to: {"type": "array", "items": to}),
    "maps": (lambda of: {"type": "map", "values": of}, lambda to: {"type": "map", "values": to}),
}


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("around", AROUND)
def test_every_type_read_as_every_other(rewriter: Rewriter, of: str, around: str) -> None:
    writer, reader = AROUND[around]
    root = lambda kind: wire.record("Root", id="long", f=kind)  # noqa: E731
    for to, kind in KINDS.items():
        schema, reader_schema = root(writer(KINDS[of])), root(reader(kind))
        for row in check(rewriter, schema, reader_schema, Filled(len(to)), 4):
            with (
                files(container(schema, [row])) as paths,
                pytest.raises(fastpipe.errors.SchemaError, match=r"resolve|symbol"),
            ):
                list(fastpipe.read_avro(paths, batch_size=1, reader_schema=reader_schema))


@hypothesis.settings(max_examples=5 * SOME)
@hypothesis.given(evolutions)
def test_any_type_read_as_any_union(rewriter: Rewriter, seed: int) -> None:
    rng = random.Random(seed)
    root = lambda kind: wire.record("Root", id="long", f=kind)  # noqa: E731
    # Each additional type is another chance that apache-avro differs.
    writer = some_union(rng) if rng.random() < 0.3 else some_union(rng)[0]
    check(rewriter, root(writer), root(some_union(rng, "a default")), Sound(seed), 12)


def some_union(rng: random.Random, record: str = "") -> list[Any]:
    """Returns random types that a union can combine. Records are included only if their name is in `record`."""
    found: dict[str, Any] = {}
    kinds = [schema for name, schema in KINDS.items() if kind_of(schema) != "record" or record in name]
    for schema in rng.sample(kinds, rng.randint(1, 6)):
        found.setdefault(schema["name"] if kind_of(schema) in NAMED else kind_of(schema), schema)
    return list(found.values())


def check(rewriter: Rewriter, schema: Any, reader_schema: Any, values: Sound, count: int) -> list[Any]:
    """Compares rows field by field, and batches that fastpipe reads from the original and the resolved file.

    Returns:
        The rows that cannot be resolved and that apache-avro rejects.
    """
    reader_schema = agreed(schema, reader_schema)
    given = json.dumps(reader_schema)
    wanted = oracle.resolve(reader_schema)
    rows, expected, refused = [], [], []
    for row in values.rows(oracle.resolve(schema), count):
        try:
            expected.append(resolved(schema, reader_schema, row))
            rows.append(row)
        except UnresolvedError:
            refused.append(row)
    with files(with_rows(schema, rows), *(with_rows(schema, [row]) for row in refused)) as (path, *others):
        for other in others:
            assert rewriter(other, f"{other}.new", "null", 100, given).startswith("error: ")
        if others and not rows:
            return refused
        rewritten = f"{path}.new"
        assert rewriter(path, rewritten, "null", 100, given) == "ok"
        root, found = oracle.load(rewritten)
        assert root == wanted
        problem = oracle.difference([comparable(stored(wanted, row)) for row in expected], comparable(found), "rows")
        assert problem is None, problem
        compare_batches(path, rewritten, reader_schema, expected)
    return refused


def compare_batches(path: str, rewritten: str, reader_schema: Any, expected: list[Any]) -> None:
    """Compares a file that is read with a reader's schema with the file that apache-avro resolved to it."""
    fields = dict(oracle.resolve(reader_schema).parts)
    columns = []
    for leaf in oracle.leaves(oracle.resolve(reader_schema)):
        field, _ = oracle.step(fields, leaf.name)
        values = [(row[field], stored(fields[field], row[field])) for row in expected]
        # Maps lose their order. Integers in unions of numbers, which fastpipe reads as float64, lose digits.
        exact = all(ordered(fields[field], a) and oracle.same(comparable(a), comparable(b)) for a, b in values)
        if exact and not leaf.refusal:
            columns.append(leaf.name)
    one = fastpipe.read_avro(path, batch_size=5, drop_last=False, columns=columns, reader_schema=reader_schema)
    other = fastpipe.read_avro(rewritten, batch_size=5, drop_last=False, columns=columns)
    assert one.features == other.features
    assert one.categories == other.categories
    for batch, again in zip(one, other, strict=True):
        assert list(batch) == list(again) == columns
        for name in batch:
            a, b = (oracle.rows(node[name], counted=True) for node in (batch, again))
            problem = oracle.difference(a, b, name)
            assert problem is None, problem
