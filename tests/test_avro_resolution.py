"""Files that are read with a reader's schema."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import fastavro
import hypothesis
import hypothesis.strategies as st
import pytest

import fastpipe
import oracle
import wire
from avro_evolution import Evolution, UnresolvedError, Writable, kind_of, resolved
from avro_schemas import check_orders, container, files, followed, read, schemas
from fastpipe import DenseSpec, RaggedSpec
from oracle import Branch
from strategies import SOME, orders

# The datasets are so small that an incomplete last batch is a large part of them.
pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")


def plain(value: Any) -> Any:
    """Returns a value without union branches, with fields sorted by name."""
    if isinstance(value, Branch):
        return plain(value.value)
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    return [plain(item) for item in value] if isinstance(value, list) else value


evolutions = st.integers(0, 2**32 - 1)


@hypothesis.settings(max_examples=SOME)
@hypothesis.given(schemas(), evolutions, st.integers(0, 20), orders())
def test_any_change_of_any_schema(schema: Any, seed: int, count: int, order: dict[str, Any]) -> None:
    """Reads files of the old and the new schema with the new schema."""
    reader_schema = Evolution(random.Random(seed)).root(schema)
    writer, wanted = oracle.resolve(schema), oracle.resolve(reader_schema)
    values = Writable(seed)
    old, new = values.rows(writer, count), values.rows(wanted, count, count)
    more = values.rows(writer, 3, 2 * count)
    leaves = oracle.leaves(wanted)
    hypothesis.assume(not any(leaf.refusal for leaf in leaves))
    names = [leaf.name for leaf in leaves]
    blobs = [container(schema, old, seed), container(reader_schema, new, seed), container(schema, more, seed)]
    try:
        rows = [resolved(schema, reader_schema, row) for row in old] + new
        rows += [resolved(schema, reader_schema, row) for row in more]
    except UnresolvedError:
        # Bytes that are not UTF-8 are reported as damage.
        errors = fastpipe.errors.SchemaError, fastpipe.errors.MalformedFileError
        with files(*blobs) as paths, pytest.raises(errors, match=r"resolve|symbol|UTF-8"):
            read(paths, reader_schema=reader_schema)
        return
    with files(*blobs) as paths:
        reader = fastpipe.read_avro(paths, batch_size=5, reader_schema=reader_schema)
        assert list(reader.features) == names
        for leaf in leaves:
            spec = reader.features[leaf.name]
            assert (spec.dtype, spec.scale, spec.on_null == "mask") == (leaf.dtype, leaf.scale, leaf.nullable)
            if leaf.type.kind == "enum":
                assert reader.categories[leaf.name] == list(leaf.type.parts)
            elif leaf.type.kind == "union" and not oracle.numbers(leaf.type):
                assert reader.categories[leaf.name] == oracle.branches(leaf.type)
        oracle.check(reader, rows, lambda name, row: oracle.follow(wanted, row, name))
        expected = followed(wanted, rows, reader.categories, names)
        check_orders(paths, expected, order, reader_schema=json.dumps(reader_schema))
        ragged = {leaf.name: leaf.spec() for leaf in leaves}
        check_orders(paths, expected, order, reader_schema=reader_schema, features=ragged)


def bare(schema: Any) -> Any:
    """Returns a schema without logical types, because fastavro rejects logical types that don't fit."""
    if isinstance(schema, list):
        return [bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: bare(part) for key, part in schema.items() if key not in ("logicalType", "precision", "scale")}


def agreed(schema: Any) -> bool:
    """Returns whether fastavro resolves a reader's schema as the specification requires."""
    if isinstance(schema, list):
        # fastavro uses the first branch that a type can be promoted to, even if an exact match comes later.
        kinds = {kind_of(branch) for branch in schema}
        alone = all(len(kinds & group) < 2 for group in ({"int", "long", "float", "double"}, {"string", "bytes"}))
        return alone and all(map(agreed, schema))
    if kind_of(schema) in ("array", "map"):
        return agreed(schema["items" if kind_of(schema) == "array" else "values"])
    if kind_of(schema) == "record":
        # fastavro keeps a default of bytes as text, and doesn't process defaults of unions and records.
        return all("default" not in field and agreed(field["type"]) for field in schema["fields"])
    # fastavro doesn't convert integers that are promoted to floats.
    return kind_of(schema) not in ("float", "double")


@hypothesis.settings(max_examples=SOME)
# fastavro uses the first branch with the last name, even if another branch has the full name.
@hypothesis.given(schemas(twins=False), evolutions)
def test_the_oracle_agrees_with_fastavro(schema: Any, seed: int) -> None:
    """Compares the oracle with fastavro in all fields that fastavro resolves correctly."""
    reader_schema = Evolution(random.Random(seed)).root(schema)
    fields = [field for field in reader_schema["fields"] if agreed(field["type"]) and "default" not in field]
    reader_schema["fields"] = fields
    for row in Writable(seed).rows(oracle.resolve(schema), 5):
        data = io.BytesIO(oracle.encode(oracle.resolve(schema), row, random.Random(seed)))
        try:
            expected = plain(resolved(schema, reader_schema, row))
        except UnresolvedError:
            with pytest.raises(fastavro.read.SchemaResolutionError):
                fastavro.schemaless_reader(data, bare(schema), bare(reader_schema))
            continue
        found = fastavro.schemaless_reader(data, bare(schema), bare(reader_schema))
        assert oracle.same(plain({name: found[name] for name in expected}), expected)


# --- Defaults ---

E = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
DEFAULTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "null": ("null", None, {"x": None}),
    "boolean": ("boolean", True, {"x": True}),
    "int": ("int", -7, {"x": -7}),
    "long": ("long", 2**62, {"x": 2**62}),
    "float": ("float", 0.1, {"x": 0.10000000149011612}),
    "double": ("double", 0.1, {"x": 0.1}),
    "whole double": ("double", 3, {"x": 3.0}),
    "bytes": ("bytes", "a\u00ff", {"x": b"a\xff"}),
    "string": ("string", "aÿ", {"x": "aÿ"}),
    "fixed": ({"type": "fixed", "name": "F", "size": 2}, "\u00ff\u0000", {"x": b"\xff\0"}),
    "enum": (E, "B", {"x": 1}),
    "first branch": (["int", "null"], 5, {"x": 5}),
    "null branch": (["null", "int"], None, {"x": None}),
    "other branch": (["null", "int"], 5, {"x": 5}),
    "several": (["int", "string"], "t", {"x": 1, "x:int": None, "x:string": "t"}),
    "array": (wire.list_of(["null", "int"]), [1, None], {"x": [1, None]}),
    "empty array": (wire.list_of(wire.list_of("int")), [], {"x": []}),
    "arrays": (wire.list_of(wire.list_of("int")), [[], [1, 2]], {"x": [[], [1, 2]]}),
    "map": ({"type": "map", "values": "int"}, {"k": 1, "l": 2}, {"x.keys": ["k", "l"], "x.values": [1, 2]}),
    "record": (wire.record("S", a="int", b=wire.list_of("string")), {"a": 1, "b": ["t"]}, {"x.a": 1, "x.b": ["t"]}),
    "null record": (["null", wire.record("S", a="int")], None, {"x.a": None}),
    "date": ({"type": "int", "logicalType": "date"}, 3, {"x": 3}),
    "decimal": ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, "\u0001\u0000", {"x": 256}),
    "float decimal": (
        {"type": "bytes", "logicalType": "decimal", "precision": 24, "scale": 2},
        "\u0001\u0000",
        {"x": 2.56},
    ),
    "duration": (
        {"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"},
        "\1\0\0\0\2\0\0\0\3\0\0\0",
        {"x": [1, 2, 3]},
    ),
    "uuid": ({"type": "string", "logicalType": "uuid"}, "t", {"x": "t"}),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    kind, default, expected = DEFAULTS[name]
    reader = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "x", "type": kind, "default": default}, {"name": "a", "type": "int"}],
    }
    with files(container(wire.record("R", a="int"), [{"a": 1}, {"a": 2}])) as paths:
        assert read(paths, reader_schema=reader) == {key: [value] * 2 for key, value in expected.items()} | {
            "a": [1, 2]
        }
        # Defaults of fields that aren't read aren't checked.
        reader["fields"][0]["default"] = {"no": "value"}
        assert read(paths, reader_schema=reader, columns=["a"]) == {"a": [1, 2]}
        if "map" not in name:
            with pytest.raises(fastpipe.errors.SchemaError, match="default of the reader's field 'x"):
                read(paths, reader_schema=reader)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_default_without_entries(layout: str) -> None:
    entries = wire.record("S", indices0=wire.list_of("long"), values=wire.list_of("float"))
    fields = [{"name": "a", "type": "int"}, {"name": "s", "type": entries, "default": {"indices0": [], "values": []}}]
    reader = {"type": "record", "name": "R", "fields": fields}
    other = container(reader, [{"a": 3, "s": {"indices0": [4, 1], "values": [0.5, 2.0]}}])
    features = {"s": fastpipe.SparseSpec((9,), "float32", layout=layout)}
    with files(container(wire.record("R", a="int"), [{"a": 1}, {"a": 2}]), other) as paths:
        (batch,) = fastpipe.read_avro(paths, reader_schema=reader, features=features, batch_size=3)
        assert oracle.rows(batch["s"], counted=True) == [[], [], [((4,), 0.5), ((1,), 2.0)]]
        assert list(fastpipe.infer_features(paths, reader_schema=reader)) == ["a", "s"]
        fields[1]["default"] = {"indices0": [1], "values": [2.0]}
        with pytest.raises(fastpipe.errors.SchemaError, match="a sparse record with entries, which is not supported"):
            fastpipe.read_avro(paths, reader_schema=reader, batch_size=3)


def test_shapes_of_defaults() -> None:
    field = {"name": "x", "type": wire.list_of("int"), "default": [1, 2]}
    reader = {"type": "record", "name": "R", "fields": [field]}
    with files(container(wire.record("R", a="int"), [{"a": 1}, {"a": 2}])) as paths:
        features = {
            "x": RaggedSpec((None,), "int64"),
            "two": DenseSpec((2,), "int64", field="x"),
            "padded": DenseSpec((3,), "int8", field="x", pad=-1),
            "cut": DenseSpec((1,), "float32", field="x", pad=0),
            "count": DenseSpec((), "int64", field="x", length=True),
        }
        assert read(paths, reader_schema=reader, features=features) == {
            "x": [[1, 2]] * 2,
            "two": [[1, 2]] * 2,
            "padded": [[1, 2, -1]] * 2,
            "cut": [[1.0]] * 2,
            "count": [2, 2],
        }
        with pytest.raises(fastpipe.errors.SchemaError, match="has 2 items, but the shape requires 3"):
            read(paths, reader_schema=reader, features={"x": DenseSpec((3,), "int64")})
        field["default"] = [1, 300]
        with pytest.raises(fastpipe.FastpipeError, match="'x'"):
            read(paths, reader_schema=reader, features={"x": RaggedSpec((None,), "int8")})


# --- Types that don't resolve ---


@pytest.mark.parametrize(
    ("of", "to", "found", "wanted"),
    [
        ("long", "int", "long", "int"),
        ("double", "float", "double", "float"),
        ("string", "int", "string", "int"),
        ("boolean", "int", "boolean", "int"),
        ("null", "int", "null", "int"),
        (wire.list_of("int"), {"type": "map", "values": "int"}, "array<int>", "map<int>"),
        (wire.list_of("string"), wire.list_of("int"), "string", "int"),
        ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "F", "size": 3}, "fixed(2)", "fixed(3)"),
        ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "G", "size": 2}, "F", "G"),
        (wire.record("S", a="int"), wire.record("T", a="int"), "record S", "record T"),
        (E, {**E, "name": "Other"}, "enum E", "enum Other"),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            {"type": "long", "logicalType": "timestamp-micros"},
            "long (timestamp-millis)",
            "long (timestamp-micros)",
        ),
    ],
)
def test_types_that_do_not_resolve_are_named(of: Any, to: Any, found: str, wanted: str) -> None:
    within = lambda kind: wire.record("R", a="int", b=wire.record("Inner", c=kind))  # noqa: E731
    with files(container(within(of), [])) as paths:
        with pytest.raises(fastpipe.errors.SchemaError, match="resolve") as caught:
            fastpipe.read_avro(paths, batch_size=1, reader_schema=within(to))
        reason = str(caught.value)
        assert "'b.c'" in reason
        assert found in reason
        assert wanted in reason
        assert caught.value.path == paths[0]
        assert caught.value.feature is not None
        # Fields that aren't read need not resolve.
        assert read(paths, reader_schema=within(to), columns=["a"]) == {}


def test_a_field_without_a_default() -> None:
    schema = wire.record("R", a="int")
    with files(container(schema, [{"a": 1}])) as paths:
        reader = wire.record("R", a="int", b="int")
        with pytest.raises(
            fastpipe.errors.SchemaError, match=r"'b': the file's record 'R' has no such field.*fill="
        ) as caught:
            read(paths, reader_schema=reader)
        assert caught.value.feature == "b"
        found = read(paths, reader_schema=reader, features={"b": DenseSpec((), "int32", fill=-1)})
        assert found == {"b": [-1]}


def test_symbols_that_the_reader_does_not_know() -> None:
    reader = wire.record("R", e={"type": "enum", "name": "E", "symbols": ["C", "B"]})
    with files(container(wire.record("R", e=E), [{"e": "B"}])) as sound:
        assert read(sound, reader_schema=reader) == {"e": [1]}
        assert read(sound, reader_schema=reader, features={"e": DenseSpec((), "string")}) == {"e": ["B"]}
    with files(container(wire.record("R", e=E), [{"e": "B"}, {"e": "A"}])) as paths:
        for features in (None, {"e": DenseSpec((), "string")}):
            with pytest.raises(fastpipe.FastpipeError, match="not in the reader's enum") as caught:
                read(paths, reader_schema=reader, features=features)
            assert caught.value.feature == "e"
        reader["fields"][0]["type"]["default"] = "C"  # type: ignore[index]
        assert read(paths, reader_schema=reader) == {"e": [1, 0]}
        assert read(paths, reader_schema=reader, features={"e": DenseSpec((), "string")}) == {"e": ["B", "C"]}


def test_an_unresolved_branch_is_an_error_only_if_it_occurs() -> None:
    writer = wire.record("R", f=["int", "string"])
    reader = wire.record("R", f="long")
    with files(container(writer, [{"f": Branch(0, 3)}])) as paths:
        assert read(paths, reader_schema=reader) == {"f": [3]}
    with files(container(writer, [{"f": Branch(0, 3)}, {"f": Branch(1, "t")}])) as paths:
        with pytest.raises(fastpipe.errors.SchemaError, match="'f': the file has string, the reader long") as caught:
            read(paths, reader_schema=reader)
        assert caught.value.feature == "f"
        assert caught.value.block is not None


def test_no_matching_branch_in_the_readers_union() -> None:
    schema, reader = wire.record("R", f="int"), wire.record("R", f=["null", "string"])
    match = "'f': the file has int, the reader union<null, string>"
    with files(container(schema, [{"f": 3}])) as paths, pytest.raises(fastpipe.errors.SchemaError, match=match):
        read(paths, reader_schema=reader)


@pytest.mark.parametrize(
    "reader",
    [
        ["null", "int", "string"],
        ["null", "string", "int"],
        ["int", "null", "string"],
        ["int", "string"],
        ["null", "int", "long"],
        ["null", "int"],
        ["null", wire.record("S", a="int"), "int"],
        [],
    ],
    ids=str,
)
def test_a_branch_missing_in_the_readers_union_is_an_error(reader: list[Any]) -> None:
    """The value is never read as null, for any selection of columns. fastavro also raises an error."""
    schema, reader_schema = wire.record("R", f=["null", "int", "boolean"]), wire.record("R", f=reader)
    rows = [{"f": Branch(1, 3)}, {"f": Branch(2, True)}] if "int" in reader else [{"f": Branch(2, True)}]
    data = io.BytesIO(oracle.encode(oracle.resolve(schema), rows[-1], random.Random(1)))
    if reader:  # fastavro accepts an empty union.
        with pytest.raises(fastavro.read.SchemaResolutionError):
            fastavro.schemaless_reader(data, schema, reader_schema)
    with files(container(schema, rows)) as paths:
        names = list(fastpipe.infer_features(paths, reader_schema=reader_schema))
        for columns in ([name] for name in names):
            with pytest.raises(
                fastpipe.errors.SchemaError, match="'f': the file has the branch boolean, the reader"
            ) as caught:
                read(paths, reader_schema=reader_schema, columns=columns)
            error = caught.value
            assert (error.path, error.feature) == (paths[0], "f")
            assert None not in (error.block, error.record)
            assert all(kind in str(error) for kind in ("union<", *map(kind_of, reader)) if reader)
    with files(container(schema, rows[:-1])) as paths:
        found = read(paths, reader_schema=reader_schema)
        assert set(found) == (set(names) if len(rows) > 1 else set())


@pytest.mark.parametrize("kind", ["same", "union"])
def test_types_with_the_same_last_name_stay_distinct(kind: str) -> None:
    schema = wire.record("R", f=[{"type": "fixed", "name": f"{space}.F", "size": 1} for space in "mn"])
    with files(container(schema, [{"f": Branch(0, b"a")}, {"f": Branch(1, b"b")}])) as paths:
        expected = {"f": [0, 1], "f:m.F": [b"a", None], "f:n.F": [None, b"b"]}
        assert read(paths, reader_schema=schema if kind == "same" else "union") == expected


def test_decimals_of_other_scales() -> None:
    """The reader's scale applies to the column. The specification only resolves decimals of equal scale."""
    of = lambda scale: {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": scale}  # noqa: E731
    blobs = [container(wire.record("R", f=of(scale)), [{"f": b"\x04"}]) for scale in (2, 1, 3)]
    with files(*blobs) as paths:
        reader = wire.record("R", f=of(3))
        assert fastpipe.infer_features(paths, reader_schema=reader) == {"f": DenseSpec((), "int64", scale=3)}
        assert read(paths, reader_schema=reader) == {"f": [40, 400, 4]}
        with pytest.raises(fastpipe.errors.SchemaError, match="3 decimal places"):
            read(paths[2:], reader_schema=wire.record("R", f=of(2)))


# --- The schemas of all files ---


def one(schema: Any, *rows: Any) -> bytes:
    return container(wire.record("R", **schema), list(rows))


def test_fields_that_are_missing() -> None:
    inner = wire.record("S", x="int", y=wire.list_of("int"))
    counts = {"type": "map", "values": "float"}
    blobs = (
        one({"a": "int", "f": inner}, {"a": 1, "f": {"x": 4, "y": [1]}}),
        one({"g": counts, "a": "int"}, {"a": 2, "g": {"k": 1.5}}),
    )
    with files(*blobs) as paths:
        expected = {
            "a": [1, 2],
            "f.x": [4, None],
            "f.y": [[1], None],
            "g.keys": [None, ["k"]],
            "g.values": [None, [1.5]],
        }
        assert read(paths, reader_schema="union") == expected
        back = read(paths[::-1], reader_schema="union")
        assert back == {name: column[::-1] for name, column in expected.items()}
        with pytest.raises(fastpipe.errors.SchemaError, match="has no field 'f'"):
            read(paths)


def test_types_that_differ() -> None:
    blobs = (
        one({"a": "int"}, {"a": 1}),
        one({"a": "string"}, {"a": "x"}),
        one({"a": "double"}, {"a": 1.5}),
        one({"a": ["null", "long"]}, {"a": Branch(0, None)}, {"a": Branch(1, 2**53 + 1)}),
    )
    with files(*blobs) as paths:
        assert read([paths[0], *paths[2:]], reader_schema="union") == {"a": [1.0, 1.5, None, float(2**53)]}
        found = read(paths, reader_schema="union")
        assert found["a:string"] == [None, "x", None, None, None]
        assert found["a:double"] == [1.0, None, 1.5, None, float(2**53)]
        names = fastpipe.read_avro(paths, batch_size=1, reader_schema="union").categories["a"]
        assert [names[code] for code in found["a"]] == ["double", "string", "double", "null", "double"]


def test_symbols_of_all_files() -> None:
    other = {**E, "name": "n.E", "symbols": ["C", "B"]}
    with files(one({"e": E}, {"e": "A"}), one({"e": other}, {"e": "B"}, {"e": "C"})) as paths:
        assert read(paths, reader_schema="union") == {"e": [0, 1, 2]}
        assert fastpipe.read_avro(paths, batch_size=1, reader_schema="union").categories == {"e": ["A", "B", "C"]}


def test_schemas_that_cannot_be_merged() -> None:
    millis, micros = ({"type": "long", "logicalType": f"timestamp-{unit}"} for unit in ("millis", "micros"))
    with files(one({"a": millis}, {"a": 1}), one({"a": micros}, {"a": 1})) as paths:
        with pytest.raises(
            fastpipe.errors.SchemaError, match=r"merged at 'a': long \(timestamp-millis\) and long"
        ) as caught:
            read(paths, reader_schema="union")
        assert caught.value.path == paths[1]


def test_decimals_merged() -> None:
    """Decimals of several scales are read as one column with one scale, or raise an error."""
    of = lambda scale: {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": scale}  # noqa: E731
    with files(*(one({"f": of(scale)}, {"f": b"\x04"}) for scale in (2, 3))) as paths:
        try:
            found = read(paths, reader_schema="union")
        except fastpipe.errors.SchemaError as error:
            assert "'f'" in str(error)  # noqa: PT017
        else:
            assert found == {"f": [40, 4]}


@hypothesis.settings(max_examples=SOME // 2)
@hypothesis.given(schemas(), evolutions, orders())
def test_any_two_schemas_merged(schema: Any, seed: int, order: dict[str, Any]) -> None:
    """Checks that a common column has the values of both files, and that all fields of each file are present."""
    maker = Evolution(random.Random(seed))
    dropped = {**schema, "fields": [field for field in schema["fields"] if field["name"] == "id" or maker.chance(0.5)]}
    values = Writable(seed)
    root, fewer = oracle.resolve(schema), oracle.resolve(dropped)
    rows, others = values.rows(root, 9), values.rows(fewer, 7, 9)
    leaves = oracle.leaves(root)
    hypothesis.assume(not any(leaf.refusal for leaf in leaves))
    top = lambda name: name.replace(":", ".").split(".")[0]  # noqa: E731
    with files(container(schema, rows, seed), container(dropped, others, seed)) as paths:
        reader = fastpipe.read_avro(paths, batch_size=5, reader_schema="union")
        both = {field["name"] for field in dropped["fields"]}
        expected = followed(root, rows, reader.categories, [leaf.name for leaf in leaves])
        # If null is added to a union, it has one more type, which may change the branch indices.
        names = [leaf.name for leaf in leaves if top(leaf.name) in both or leaf.type.kind != "union"]
        expected = [{name: row[name] for name in names} for row in expected]
        some = [leaf.name for leaf in leaves if top(leaf.name) in both]
        expected += [dict.fromkeys(names) | row for row in followed(fewer, others, reader.categories, some)]
        known = {leaf.name for leaf in leaves}
        missing = [name for name in reader.features if name not in known and top(name) in both]
        assert not missing
        seen = [name for name in names if name in reader.features]
        assert set(seen) == set(names)
        expected = [{name: row[name] for name in seen} for row in expected]
        features = {leaf.name: leaf.spec() for leaf in leaves if leaf.name in seen and leaf.type.kind != "union"}
        for name, spec in features.items():
            if top(name) not in both:
                features[name] = type(spec)(spec.shape, spec.dtype, on_null="mask", scale=spec.scale)
        expected = [{name: row[name] for name in features} for row in expected]
        check_orders(paths, expected, order, reader_schema="union", features=features)


# --- Fields that a later file lacks ---


def test_fill_values_replace_missing_fields_of_later_files() -> None:
    inner = wire.record("S", x="int")
    full = {"a": "int", "f": "int", "t": "string", "v": wire.list_of("int"), "s": inner, "u": ["int", "string"]}
    row = {"a": 1, "f": 4, "t": "t", "v": [4], "s": {"x": 4}, "u": Branch(0, 3)}
    features = {
        "a": DenseSpec((), "int32"),
        "f": DenseSpec((), "int32", fill=-9),
        "t": DenseSpec((), "string", fill="-"),
        "v": RaggedSpec((None,), "int32", fill=3),
        "w": DenseSpec((1,), "int32", field="v", fill=3),
        "s.x": DenseSpec((), "float64", fill=0.5),
        "u:string": DenseSpec((), "string", fill="none"),
    }
    with files(one(full, row), one({"a": "int"}, {"a": 2})) as paths:
        assert read(paths, features=features) == {
            "a": [1, 2],
            "f": [4, -9],
            "t": ["t", "-"],
            "v": [[4], []],
            "w": [[4], [3]],
            "s.x": [4.0, 0.5],
            "u:string": ["none", "none"],
        }
        with pytest.raises(fastpipe.errors.SchemaError, match="has no field 'f'") as caught:
            read(paths)
        assert caught.value.path == paths[1]
        # The first file determines the features.
        with pytest.raises(fastpipe.errors.SchemaError, match="has no field 'f'"):
            read(paths[::-1], features=features)


# --- The argument ---


def test_forms_of_a_schema(tmp_path: Path) -> None:
    schema = wire.record("R", b={"type": "long"})
    schema["fields"][0]["aliases"] = ["a"]  # type: ignore[index]
    stored = tmp_path / "R.avsc"
    stored.write_text(json.dumps(schema))
    with files(one({"a": "int"}, {"a": 1})) as paths:
        for given in (schema, json.dumps(schema), stored):
            assert read(paths, reader_schema=given) == {"b": [1]}
            assert fastpipe.infer_features(paths, reader_schema=given) == {"b": DenseSpec((), "int64")}
        assert read(paths, reader_schema=["null", schema]) == {"value.b": [1]}
        with pytest.raises(fastpipe.errors.SchemaError, match="expected an Avro schema"):
            read(paths, reader_schema="")
        with pytest.raises(fastpipe.errors.StorageError, match="can't be read"):
            read(paths, reader_schema=tmp_path / "none.avsc")
        with pytest.raises(TypeError, match='or "union"; got 5'):
            read(paths, reader_schema=5)
        with pytest.raises(TypeError, match="logical_types"):
            read(paths, logical_types="yes")
        with pytest.raises(ValueError, match='"warn", "error" or "ignore"'):
            read(paths, on_unsupported="never")
