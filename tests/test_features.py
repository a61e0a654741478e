"""Inferred features, the features that error messages suggest, and several features of one field."""

from __future__ import annotations

import json
import pickle
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

import fastpipe
import oracle
import wire
from fastpipe import DenseSpec, RaggedSpec, SparseSpec


def write(path: Path, schema: Any, records: list[Any]) -> Path:
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), records, sync_interval=100)
    return path


def read(path: Path, features: Any, **options: Any) -> dict[str, list[Any]]:
    """Returns all rows of each feature as the oracle represents them."""
    return oracle.columns(fastpipe.read_avro(path, features=features, **{"batch_size": 7} | options))


# --- Inference ---


def nested(levels: int, item: Any) -> Any:
    for _ in range(levels):
        item = wire.list_of(item)
    return item


@pytest.mark.parametrize("levels", [31, 32, 33, 64, 120])
def test_deeply_nested_arrays(levels: int, tmp_path: Path) -> None:
    """All lengths are equal, but inference fixes no more dimensions than a NumPy array supports."""
    row = wire.float_(1.5)
    expected: Any = 1.5
    for _ in range(levels):
        row, expected = wire.array(row), [expected]
    path = tmp_path / "deep.avro"
    path.write_bytes(wire.container(wire.record("R", a=nested(levels, "float")), [(20, row * 20)]))
    features = fastpipe.infer_features(path)
    ragged = levels - 31
    if ragged:
        assert features == {"a": RaggedSpec((None,) * ragged + (1,) * 31, "float32")}
    else:
        assert features == {"a": DenseSpec((1,) * 31, "float32")}
    assert eval(repr(features), {"fastpipe": fastpipe}) == features
    for asked in (None, features, {"a": RaggedSpec((None,) * levels, "float32")}):
        with fastpipe.read_avro(path, features=asked, batch_size=20) as reader:
            form = next(iter(reader))["a"]
        assert form.tolist() if isinstance(form, np.ndarray) else form.to_list() == [expected] * 20
        if not isinstance(form, np.ndarray):
            assert pickle.loads(pickle.dumps(form)).to_list() == [expected] * 20
            if levels < 64:  # pyarrow doesn't import more.
                assert form.to_arrow().to_pylist() == [expected] * 20
            assert form[[3, -1]].to_list() == [expected] * 2
            assert len(repr(form)) < 1000


def test_arrays_that_are_too_deep(tmp_path: Path) -> None:
    """Named types allow arrays to be nested deeper than the JSON."""
    inner = wire.record("Inner", c=nested(70, "float"))
    path = tmp_path / "deep.avro"
    path.write_bytes(wire.container(wire.record("R", a=inner, b=nested(70, "Inner")), []))
    readable = {"a.c": RaggedSpec((None,) * 70, "float32")}
    with pytest.warns(
        fastpipe.errors.ColumnsLeftOutWarning, match=r"^1 column is .*: 'b.c' \(.* deeper than 128 levels"
    ):
        assert fastpipe.infer_features(path) == readable
    with pytest.raises(fastpipe.errors.UnsupportedError, match=r"'b.c'.* nested deeper than 128 levels"):
        fastpipe.infer_features(path, on_unsupported="error")
    with pytest.raises(fastpipe.errors.UnsupportedError, match="nested deeper than 128 levels") as caught:
        fastpipe.infer_features(path, columns=["b.c"])
    assert caught.value.feature == "b.c"
    assert fastpipe.infer_features(path, columns=["a.c"], on_unsupported="error") == readable


def test_records_with_too_many_indices_are_not_sparse(tmp_path: Path) -> None:
    """Inferred features must be valid specs, and a SparseSpec has at most 128 dimensions."""
    for dims, sparse in ((128, True), (129, False)):
        fields = {f"indices{k}": wire.list_of("long") for k in range(dims)}
        path = tmp_path / f"{dims}.avro"
        path.write_bytes(wire.container(wire.record("R", s=wire.record("S", **fields, values=wire.list_of("int"))), []))
        features = fastpipe.infer_features(path)
        assert (list(features) == ["s"]) == sparse
        assert fastpipe.read_avro(path, features=features, batch_size=1).num_rows == 0


LIST = wire.record("List", value="long", next=["null", "List"])
LISTS = [{"value": i, "next": {"value": -i, "next": None} if i % 2 else None} for i in range(20)]
ANSWER = "a recursive record.* leave it out, or request single fields in features="


def test_the_outermost_level_of_recursive_records_is_read(tmp_path: Path) -> None:
    root = write(tmp_path / "root.avro", LIST, LISTS)
    field = write(
        tmp_path / "field.avro", wire.record("R", id="int", list=LIST), [{"id": 1, "list": row} for row in LISTS]
    )
    items = write(tmp_path / "items.avro", wire.list_of(LIST), [LISTS[:3]] * 20)
    for path, name, others in ((root, "", []), (field, "list.", ["id"]), (items, "value.", [])):
        value, below = f"{name}value", f"{name}next"
        assert list(fastpipe.infer_features(path, columns=[value])) == [value]
        for call in (
            lambda path=path, below=below: fastpipe.infer_features(path, columns=[below]),
            lambda path=path, below=below: fastpipe.infer_features(path, columns=[f"{below}.value"]),
            lambda path=path, below=below: read(path, {below: DenseSpec((), "int64")}),
            lambda path=path, below=below: read(path, {below: RaggedSpec((None,), "int64")}),
            lambda path=path, below=below: read(path, {below: SparseSpec((3,), "int64")}),
        ):
            with pytest.raises(fastpipe.errors.UnsupportedError, match=ANSWER) as caught:
                call()
            assert caught.value.feature == below
            assert f"'{below}.<field>' (value, next)" in str(caught.value)
        columns = [*others, value]
        with pytest.warns(fastpipe.errors.ColumnsLeftOutWarning, match=f"'{below}' .*{ANSWER}"):
            assert list(fastpipe.infer_features(path)) == columns
        with pytest.warns(fastpipe.errors.ColumnsLeftOutWarning, match=f"'{below}' .*{ANSWER}"):
            assert list(fastpipe.read_avro(path, batch_size=1).features) == columns
        assert list(fastpipe.infer_features(path, on_unsupported="ignore")) == columns
        with pytest.raises(fastpipe.errors.UnsupportedError, match=f"'{below}' .*{ANSWER}"):
            fastpipe.read_avro(path, batch_size=1, on_unsupported="error")
        assert list(fastpipe.infer_features(path, columns=columns)) == columns
    asked = {"value": DenseSpec((), "int64"), "next.value": DenseSpec((), "int64", on_null="mask")}
    assert read(root, asked) == {"value": list(range(20)), "next.value": [-i if i % 2 else None for i in range(20)]}


# --- Hints ---

SCALARS: dict[str, Any] = {
    "boolean": "boolean",
    "int": "int",
    "long": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "bytes": "bytes",
    "fixed": {"type": "fixed", "size": 4},
    "enum": {"type": "enum", "symbols": ["A", "B"]},
    "date": {"type": "int", "logicalType": "date"},
    "micros": {"type": "long", "logicalType": "timestamp-micros"},
    "uuid": {"type": "string", "logicalType": "uuid"},
    "decimal": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
    "money": {"type": "fixed", "size": 4, "logicalType": "decimal", "precision": 8, "scale": 2},
}
SHAPES = (
    "plain",
    "nullable",
    "list",
    "nullable list",
    "list of nullable",
    "lists",
    "map",
    "nullable map",
    "record",
    "maybe",
)


def shaped(shape: str, scalar: Any) -> Any:
    nullable = ["null", scalar]
    return {
        "plain": scalar,
        "nullable": nullable,
        "list": wire.list_of(scalar),
        "nullable list": ["null", wire.list_of(scalar)],
        "list of nullable": wire.list_of(nullable),
        "lists": ["null", wire.list_of(wire.list_of(nullable))],
        "map": {"type": "map", "values": scalar},
        "nullable map": {"type": "map", "values": nullable},
        "record": wire.record("Record", x=scalar),
        "maybe": ["null", wire.record("Maybe", x=wire.list_of(nullable))],
    }[shape]


def value_of(node: oracle.Type, number: int) -> Any:
    """Returns a value of a type. Every third nullable value is null, and arrays have 0 to 3 items."""
    match node.kind:
        case "union":
            (only,) = [part for part in node.parts if part.kind != "null"]
            return None if number % 3 == 0 else value_of(only, number)
        case "record":
            return {name: value_of(part, number + k) for k, (name, part) in enumerate(node.parts)}
        case "array":
            return [value_of(node.parts[0], number + k) for k in range(number % 4)]
        case "map":
            return {f"key {k}": value_of(node.parts[0], number + k) for k in range(number % 4)}
        case "boolean":
            return number % 2 == 0
        case "float" | "double":
            return number / 2
        case "string":
            return f"text {number}"
        case "bytes" if node.logical == "decimal":
            return (number - 10).to_bytes(2, "big", signed=True)
        case "bytes":
            return b"bytes %d" % number
        case "fixed":
            return number.to_bytes(node.size, "big")
        case "enum":
            return node.parts[number % len(node.parts)]
    return number


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, oracle.Type, list[Any]]:
    """Returns a file with all types in all shapes, its schema, and its records."""
    fields: list[Any] = []
    for scalar, kind in SCALARS.items():
        for shape in SHAPES:
            name = f"{scalar}_{shape.replace(' ', '_')}"
            schema = shaped(shape, kind | {"name": f"T_{name}"} if isinstance(kind, dict) else kind)
            text = json.dumps(schema).replace('"Record"', f'"R_{name}"').replace('"Maybe"', f'"M_{name}"')
            fields.append({"name": name, "type": json.loads(text)})
    schema = {"type": "record", "name": "Everything", "fields": fields}
    root = oracle.resolve(schema)
    rows = [value_of(root, number) for number in range(30)]
    path = tmp_path_factory.mktemp("hints") / "everything.avro"
    path.write_bytes(oracle.container(schema, rows, random.Random(0)))
    return path, root, rows


HINT = re.compile(r"features=(\{.*?\)\})")


def wrong_calls(path: Path, leaf: oracle.Leaf) -> list[Any]:
    """Returns calls that fail with an error that suggests the right spec."""
    other = "string" if leaf.dtype == "bool" else "bool"
    shape = (None,) * leaf.dims
    asked = [RaggedSpec((None, *shape), leaf.dtype, scale=leaf.scale)]
    asked.append(RaggedSpec(shape, other) if shape else DenseSpec((), other))
    return [lambda spec=spec: read(path, {leaf.name: spec}) for spec in asked]


def test_hints_work_when_they_are_pasted(everything: tuple[Path, oracle.Type, list[Any]]) -> None:
    path, root, records = everything
    wanted = oracle.leaves(root)
    assert len(wanted) > len(SCALARS) * len(SHAPES)
    hints: dict[str, Any] = {}
    for leaf in wanted:
        for call in wrong_calls(path, leaf):
            with pytest.raises((fastpipe.errors.SchemaError, fastpipe.errors.UnsupportedError)) as caught:
                call()
            hint = HINT.search(str(caught.value))
            assert hint, str(caught.value)
            features = eval(hint[1], {"fastpipe": fastpipe})
            assert features == hints.setdefault(leaf.name, features) == {leaf.name: leaf.spec()}
    features = {name: spec for hint in hints.values() for name, spec in hint.items()}
    reader = fastpipe.read_avro(path, features=features, batch_size=8)
    oracle.check(reader, records, lambda name, record: oracle.follow(root, record, name))


def test_all_types_are_read(everything: tuple[Path, oracle.Type, list[Any]]) -> None:
    path, root, records = everything
    reader = fastpipe.read_avro(path, batch_size=7, on_unsupported="error")
    assert list(reader.features) == [leaf.name for leaf in oracle.leaves(root)]
    oracle.check(reader, records, lambda name, record: oracle.follow(root, record, name))


def test_hints_of_maps_and_records(everything: tuple[Path, oracle.Type, list[Any]]) -> None:
    path = everything[0]
    for name, paths in (("int_map", ["int_map.keys", "int_map.values"]), ("int_record", ["int_record.<field>"])):
        with pytest.raises(fastpipe.errors.SchemaError) as caught:
            read(path, {name: DenseSpec((), "int32")})
        assert all(f"'{path}'" in str(caught.value) for path in paths)


# --- Several features of one field ---

CLICKS = wire.record(
    "R",
    clicks=wire.list_of("long"),
    tags=["null", wire.list_of("string")],
    counts={"type": "map", "values": "int"},
    pairs=wire.list_of(wire.list_of("int")),
    label="int",
    terms=wire.record("T", indices0=wire.list_of("long"), values=wire.list_of("float")),
)
ROWS = [
    {
        "clicks": list(range(i % 6)),
        "tags": None if i % 4 == 3 else [f"tag {k}" for k in range(i % 3)],
        "counts": {f"key {k}": k * i for k in range(i % 3)},
        "pairs": [[i] * k for k in range(i % 4)],
        "label": i,
        "terms": {"indices0": [i % 5], "values": [float(i)]},
    }
    for i in range(40)
]


def test_a_padded_array_and_its_length(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks.avro", CLICKS, ROWS)
    features = {
        "clicks": DenseSpec((3,), "int64", pad=-1),
        "length": DenseSpec((), "int64", field="clicks", length=True),
        "all": RaggedSpec((None,), "float64", field="clicks"),
        "more": DenseSpec((5,), "int32", field="clicks", pad=0),
        "tags": DenseSpec((), "int64", field="tags", length=True, on_null="mask"),
        "filled": DenseSpec((), "int64", field="tags", length=True, fill=-1),
        "words": RaggedSpec((None,), "string", field="tags", on_null="mask"),
        "entries": DenseSpec((), "int64", field="counts", length=True),
        "keys": RaggedSpec((None,), "string", field="counts.keys"),
        "raw": RaggedSpec((None,), "bytes", field="counts.keys"),
        "values": RaggedSpec((None,), "int32", field="counts.values"),
        "outer": DenseSpec((), "int64", field="pairs", length=True),
        "inner": RaggedSpec((None,), "int64", field="pairs", length=True),
        "label": DenseSpec((), "int32"),
        "score": DenseSpec((), "int64", field="label"),
        "coo": SparseSpec((5,), "float32", field="terms"),
        "csr": SparseSpec((8,), "float64", field="terms", layout="csr"),
        "places": RaggedSpec((None,), "int64", field="terms.indices0"),
    }
    expected = {
        "clicks": [(row["clicks"] + [-1] * 3)[:3] for row in ROWS],
        "length": [len(row["clicks"]) for row in ROWS],
        "all": [row["clicks"] for row in ROWS],
        "more": [(row["clicks"] + [0] * 5)[:5] for row in ROWS],
        "tags": [None if row["tags"] is None else len(row["tags"]) for row in ROWS],
        "filled": [-1 if row["tags"] is None else len(row["tags"]) for row in ROWS],
        "words": [row["tags"] for row in ROWS],
        "entries": [len(row["counts"]) for row in ROWS],
        "keys": [list(row["counts"]) for row in ROWS],
        "raw": [[key.encode() for key in row["counts"]] for row in ROWS],
        "values": [list(row["counts"].values()) for row in ROWS],
        "outer": [len(row["pairs"]) for row in ROWS],
        "inner": [[len(pair) for pair in row["pairs"]] for row in ROWS],
        "label": [row["label"] for row in ROWS],
        "score": [row["label"] for row in ROWS],
        "coo": [[((i % 5,), float(i))] for i in range(40)],
        "csr": [[((i % 5,), float(i))] for i in range(40)],
        "places": [[i % 5] for i in range(40)],
    }
    assert read(path, features) == expected
    for names in (
        list(features)[::-1],
        ["length"],
        ["tags", "filled"],
        ["keys", "raw"],
        ["entries"],
        ["inner", "clicks"],
    ):
        assert read(path, {name: features[name] for name in names}) == {name: expected[name] for name in names}
    reader = fastpipe.read_avro(path, features=features, batch_size=7, shuffle=True, seed=1)
    seen = {int(label): int(n) for b in reader for label, n in zip(b["label"], b["length"], strict=True)}
    assert seen == {row["label"]: len(row["clicks"]) for row in ROWS}
    again = pickle.loads(pickle.dumps(fastpipe.read_avro(path, features=features, batch_size=40)))
    assert next(iter(again))["length"].tolist() == expected["length"]


def test_invalid_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks.avro", CLICKS, ROWS)
    for spec, match in (
        (DenseSpec((), "int64", field="label", length=True), "counts the items of an array.* of type int"),
        (RaggedSpec((None,), "int64", field="clicks", length=True), "below the 1 dimensions .* of type long"),
        (DenseSpec((), "int64", field="counts.values", length=True), 'use field="counts"'),
        (DenseSpec((), "int64", field="counts.keys", length=True), 'use field="counts"'),
        (DenseSpec((), "int64", field="clikcs", length=True), "did you mean 'clicks'"),
    ):
        with pytest.raises(fastpipe.errors.SchemaError, match=match) as caught:
            read(path, {"x": spec})
        assert caught.value.feature == "x"
    with pytest.raises(fastpipe.errors.NullValueError):
        read(path, {"x": DenseSpec((), "int64", field="tags", length=True)})
    with pytest.raises(fastpipe.errors.ShapeError):
        read(path, {"x": DenseSpec((2,), "int64", field="pairs", length=True)})


# --- Errors ---

MANY: dict[str, Any] = {
    "number": ["null", "long"],
    "list": {"type": "array", "items": "long"},
    "text": "string",
    "inner": {"type": "record", "name": "Inner", "fields": [{"name": "n", "type": "long"}]},
}


@pytest.mark.parametrize(
    ("field", "spec", "error"),
    [
        ("number", DenseSpec((), "int64"), fastpipe.errors.NullValueError),
        ("list", DenseSpec((2,), "int64"), fastpipe.errors.ShapeError),
        ("list", RaggedSpec((None,), "int8"), fastpipe.errors.ValueRangeError),
        ("text", fastpipe.VocabularySpec(["a"]), fastpipe.errors.ValueRangeError),
        ("inner.n", DenseSpec((), "int8"), fastpipe.errors.ValueRangeError),
    ],
)
def test_errors_name_the_feature_and_its_field(
    field: str, spec: Any, error: type[fastpipe.FastpipeError], tmp_path: Path
) -> None:
    fields = [{"name": name, "type": kind} for name, kind in MANY.items()]
    row = {"number": None, "list": [1000, 2, 3], "text": "b", "inner": {"n": 1000}}
    path = write(tmp_path / "many.avro", {"type": "record", "name": "R", "fields": fields}, [row])
    renamed = replace(spec, field=field)
    with pytest.raises(error, match=f"feature 'mine'.*in the field '{field}") as caught:
        read(path, {"mine": renamed})
    assert caught.value.feature == "mine"
    with pytest.raises(error) as caught:
        read(path, {field: spec})
    assert str(caught.value.feature).startswith(field)
    assert "in the field" not in str(caught.value)
