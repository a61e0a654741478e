"""Invalid and malicious schemas are rejected or read quickly, in little memory, and with short messages."""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from hostile import EMPTY, GIB, I64_MAX, TYPED, Case, check, measured, one, outcomes
from wire import block, container, header, list_of, long, longs, record, schema_bytes


def test_types_that_contain_themselves(tmp_path: Path) -> None:
    """Such a type has no finite values, but reading a file must still end."""
    endless = record("Endless", self="Endless")
    twice = record("Twice", a="Twice", b="Twice")
    loop = record("A", b=record("B", a="A"))
    cases = []
    for schema in (endless, twice, loop, ["null", endless], list_of(endless), list_of(twice)):
        for data in (b"", long(0), long(1), long(2), bytes(100), long(1 << 20) + bytes(9)):
            for rows in (1, 1 << 20):
                outer = container(record("R", t=schema, x="int"), [(rows, data)])
                features = {"x": fastpipe.DenseSpec((), "int32")}
                name = f"{json.dumps(schema)} {data!r} {rows}"
                cases.append(Case(name, outer, features=features, count=True))
                cases.append(Case(name, outer, columns=("x",), count=True))
                cases.append(Case(f"root {name}", container(schema, [(rows, data)]), count=True))
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.seconds < 2, case.name


def doubling(levels: int, leaf: Any) -> Any:
    """Returns a record of two records, and so on: 2^levels leaves from a short schema."""
    inner = record("L0", a=leaf, b=leaf)
    for i in range(1, levels):
        inner = record(f"L{i}", a=inner, b=f"L{i - 1}")
    return inner


LEAVES = {
    "int": "int",
    "string": "string",
    "null": "null",
    "fixed": {"type": "fixed", "name": "F", "size": 0},
    "empty": EMPTY,
    "array": list_of("int"),
    "nullable": ["null", "int"],
}


@pytest.mark.parametrize("leaf", LEAVES)
def test_schemas_that_blow_up(leaf: str, tmp_path: Path) -> None:
    """A schema nested 36 levels deep has 2^36 leaves if every reference is expanded."""
    inner = LEAVES[leaf]
    if isinstance(inner, dict) and "name" in inner:
        schema = record("R", first=inner, x="int", big=doubling(36, inner["name"]))
    else:
        schema = record("R", x="int", big=doubling(36, inner))
    data = header(schema) + block(1, bytes(100))
    x = {"x": fastpipe.DenseSpec((), "int32")}
    deep = {"big" + ".a" * 36: fastpipe.DenseSpec((), "int32")}
    cases = [
        Case("inferred", data),
        Case("inferred, no blocks", header(schema)),
        Case("columns", data, columns=("x",)),
        Case("x", data, features=x),
        Case("x, no blocks", header(schema), features=x),
        Case("deep", data, features=deep),
    ]
    found, peak = measured(tmp_path, cases, memory=2 * GIB, patience=5)
    for case, seen in zip(cases, found, strict=True):
        check(case, seen, tmp_path)
        assert seen.seconds < 2, case.name
    if sys.platform.startswith("linux"):
        assert peak < GIB // 2


def test_schemas_nested_through_names(tmp_path: Path) -> None:
    """The JSON is hardly nested, but each type refers to the previous one."""
    n = 3000
    for leaf in ("int", "string"):
        fields = {"t0": record("T0", a=leaf)}
        fields |= {f"t{i}": record(f"T{i}", a=f"T{i - 1}") for i in range(1, n)}
        schema = record("R", x="int", **fields)
        data = header(schema) + block(1, bytes(2 * n))
        cases = [
            Case("inferred", data, count=True),
            Case("x", data, features={"x": fastpipe.DenseSpec((), "int32")}, count=True),
            Case("columns", data, columns=("x",), count=True),
            Case("no blocks", header(schema), count=True),
        ]
        for case, seen in outcomes(tmp_path, cases, memory=3 * GIB, patience=10):
            assert seen.seconds < 5, (case.name, leaf)


def test_deeply_nested_json(tmp_path: Path) -> None:
    deep = {
        "[": "[" * 10_000,
        "[]": "[" * 10_000 + "]" * 10_000,
        '{"type":': '{"type":' * 10_000 + '"int"' + "}" * 10_000,
        "arrays": '{"type":"array","items":' * 10_000 + '"int"' + "}" * 10_000,
        "maps": '{"type":"map","values":' * 200 + '"int"' + "}" * 200,
        "in a default": '{"type":"record","name":"R","fields":[{"name":"x","type":"int","default":' + "[" * 10_000,
        "in an attribute": '{"type":"int","doc":' + "[" * 5000 + "]" * 5000 + "}",
    }
    expected = dict.fromkeys(deep, "LimitError") | {
        "in a default": "SchemaError",
        "in an attribute": None,
        "maps": None,
    }
    for case, seen in outcomes(tmp_path, [Case(name, header(schema)) for name, schema in deep.items()]):
        if expected[case.name] is None:
            assert seen.error not in {"SchemaError", "LimitError"}, (case.name, seen)
            continue
        assert seen.error == expected[case.name], (case.name, seen)
        assert seen.opening
        assert len(seen.message) < 2000, case.name
    levels = 50
    schema = '{"type":"array","items":' * levels + '"int"' + "}" * levels
    data = container(schema, [(1, long(1) * levels + long(7) + long(0) * levels)])
    seen = one(tmp_path, Case("50 levels", data))
    assert seen.error is None or seen.error in TYPED


def deep_record(levels: int) -> str:
    """Returns the JSON of `levels` nested types, all records but the innermost.

    (Python's json module can't write it.)
    """
    schema = '"int"'
    for i in range(levels - 1):
        schema = f'{{"type":"record","name":"R{i}","fields":[{{"name":"f","type":{schema}}}]}}'
    return schema


@pytest.mark.parametrize("levels", [44, 128, 256])
def test_deeply_nested_records(levels: int, tmp_path: Path) -> None:
    """Up to the limit such schemas are read, also in threads, and AvroFile.schema parses them."""
    path = tmp_path / "x.avro"
    path.write_bytes(container(deep_record(levels), [(2, longs(7, -3))]))
    name = ".".join(["f"] * (levels - 1))
    for options in ({"features": {name: fastpipe.DenseSpec((), "int32")}}, {"columns": [name]}, {}):
        (batch,) = fastpipe.read_avro(path, batch_size=2, **options)
        assert batch[name].tolist() == [7, -3]
    schemas: list[Any] = []

    def look() -> None:
        schemas.append(fastpipe.avro.AvroFile(path).schema)

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    for schema in schemas:
        for _ in range(levels - 1):
            schema = schema["fields"][0]["type"]
        assert schema == "int"


def test_records_nested_too_deep(tmp_path: Path) -> None:
    for case, seen in outcomes(tmp_path, [Case(str(n), header(deep_record(n))) for n in (257, 400, 5000)]):
        assert seen.error == "LimitError", (case.name, seen)
        assert "nested deeper than" in seen.where["reason"]


def test_schemas_that_python_cannot_parse(tmp_path: Path) -> None:
    """Parts that reading doesn't need may be nested arbitrarily deep. Only Python's parser fails."""
    path = tmp_path / "x.avro"
    schema = '{"type":"int","doc":' + "[" * 5000 + "]" * 5000 + "}"
    path.write_bytes(container(schema, [(1, long(7))]))
    (batch,) = fastpipe.read_avro(path, batch_size=1)
    assert batch["value"].tolist() == [7]
    file = fastpipe.avro.AvroFile(path)
    assert file.schema_json == schema
    with pytest.raises(fastpipe.errors.LimitError, match="schema_json") as caught:
        _ = file.schema
    assert caught.value.path == str(path)


NAMES: dict[str, Any] = {
    "a nested Java class": {
        **record("Outer", x={"type": "enum", "name": "Inner", "namespace": "org.x.Outer$", "symbols": ["A", "B"]}),
        "namespace": "org.x",
    },
    "a dollar in a name": record("org.x.Outer$Inner", x="int"),
    "a leading dot": record(".global", x="int"),
    "an empty namespace": {**record("R", x="int"), "namespace": ""},
    "a hyphen": record("a-b.c-d", x="int"),
    "a leading digit": record("1st", x="int"),
    "a type without a namespace within one": {
        **record("R", y=record("ns.S", z={"type": "fixed", "name": ".F", "size": 0}), w="F", x="int"),
        "namespace": "other",
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_names_outside_the_specification(name: str, tmp_path: Path) -> None:
    """The specification doesn't allow these names, but files contain them."""
    path = tmp_path / "x.avro"
    path.write_bytes(container(NAMES[name], [(2, longs(1, 0))]))
    (batch,) = fastpipe.read_avro(path, features={"x": fastpipe.DenseSpec((), "int32")}, batch_size=2)
    assert batch["x"].tolist() == [1, 0]


def test_wide_schemas(tmp_path: Path) -> None:
    wide = container(record("R", **{f"f{i}": "int" for i in range(20_000)}), [(1, long(1) * 20_000)])
    union = [record(f"U{i}", a="int") for i in range(3000)]
    enums = {n: {"type": "enum", "name": "E", "symbols": [f"S{i}" for i in range(n)]} for n in (10_000, 50_000)}
    cases = [
        Case("fields", wide, count=True),
        Case("one of many fields", wide, features={"f19999": fastpipe.DenseSpec((), "int32")}),
        Case("union", container(record("R", u=union, x="int"), [(1, long(2999) + longs(1, 3))]), columns=("x",)),
        Case("symbols", container(enums[10_000], [(1, long(9999))])),
        Case("more symbols", container(enums[50_000], [(1, long(9999))])),
        Case("fields of 5 MB", header(record("R", **{f"f{i}": "int" for i in range(160_000)}))),
        Case("documentation of 5 MB", header({"type": "int", "doc": "x" * 5_000_000})),
    ]
    found = {case.name: seen for case, seen in outcomes(tmp_path, cases, memory=2 * GIB)}
    assert all(seen.seconds < 3 for seen in found.values())
    assert found["one of many fields"].batches == [repr({"f19999": [1]})]
    assert found["union"].batches == [repr({"x": [3]})]
    assert found["symbols"].batches == [repr({"value": [9999]})]
    for name in ("fields", "more symbols", "fields of 5 MB", "documentation of 5 MB"):
        assert found[name].error == "LimitError", (name, found[name])


def opened(folder: Path, schemas: dict[str, Any]) -> None:
    """Opens schemas and reads only the field `x`.

    They must be accepted or rejected quickly and in little memory.
    """
    features = {"x": fastpipe.DenseSpec((), "int32")}
    cases = [Case(name, header(schema), features=features) for name, schema in schemas.items()]
    cases += [Case(f"{name}, inferred", header(schema), columns=("x",)) for name, schema in schemas.items()]
    found, peak = measured(folder, cases, memory=4 * GIB, patience=8)
    for case, seen in zip(cases, found, strict=True):
        check(case, seen, folder)
        assert seen.seconds < 2, case.name
    if sys.platform.startswith("linux"):
        assert peak < GIB


def test_schemas_of_many_aliases(tmp_path: Path) -> None:
    aliases = [f"A{i}" for i in range(8000)]
    wide = record("R", x="int", **{f"f{i}": "int" for i in range(8000)})
    enum = {"type": "enum", "name": "E", "symbols": [f"S{i}" for i in range(8000)]}
    opened(
        tmp_path,
        {
            "of a record": record("R", x="int") | {"aliases": aliases},
            "of a wide record": wide | {"aliases": aliases[:500]},
            "of an enum": record("R", x="int", e=enum | {"aliases": aliases[:500]}),
            "of a field": {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int", "aliases": aliases}]},
        },
    )


def nested(name: str, levels: int, inner: Any) -> Any:
    """Returns a schema nested within `levels` records, in fields named `name`."""
    for i in range(levels):
        inner = record(f"N{i}", **{name: inner})
    return inner


def test_schemas_of_long_names(tmp_path: Path) -> None:
    """Nested types inherit the names."""
    fixed = {f"f{i}": {"type": "fixed", "name": f"F{i}", "size": 1} for i in range(200)}
    ints = record("S", **{f"f{i}": "int" for i in range(400)})
    name = "n" * 1_000_000
    opened(
        tmp_path,
        {
            "a namespace": record("R", x="int", **fixed) | {"namespace": name},
            "a full name": record(f"{name}.R", x="int", **fixed),
            "a field": record("R", **{"x": "int", name: ints}),
            "fields on the way": record("R", x="int", y=nested("n" * 4000, 30, ints)),
        },
    )


def test_messages_are_short(tmp_path: Path) -> None:
    """A message doesn't quote arbitrarily much of a file."""
    path = record("R", **{"y" * 4000: nested("n" * 4000, 20, "int")})
    union = [record(f"U{i}", a="int") for i in range(3000)]
    cases = [
        Case("a path", header(path) + block(1, long(1 << 40))),
        Case("an only path", header(nested("n" * 4000, 20, union))),
        Case("many branches", header(union), features={"value": fastpipe.DenseSpec((), "string")}),
        Case("no branch", header(union), features={"value:None": fastpipe.DenseSpec((), "int32")}),
        Case("a codec", header('"int"', "x" * 100_000)),
        Case("a type", header(json.dumps("x" * 100_000))),
        Case("a name", header(record("?" * 100_000))),
        Case("a symbol", header({"type": "enum", "name": "E", "symbols": ["?" * 100_000]})),
        Case("names", header(record("R", **{f"f{i}": "int" for i in range(9000)})), columns=("missing",)),
        Case("text", header('"int"') + block(1, b"\xff" * 100_000)),
    ]
    for case, seen in outcomes(tmp_path, cases):
        assert seen.error in {"SchemaError", "UnsupportedError", "LimitError", "MalformedFileError"}, (case.name, seen)
        assert len(seen.message) < 5000, (case.name, len(seen.message))


def test_defaults_are_not_checked(tmp_path: Path) -> None:
    """Reading doesn't need defaults. Some files have invalid ones, and checking a default may never end."""

    def of(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
        return {"type": "record", "name": name, "fields": list(fields)}

    def empty(name: str, schema: str) -> dict[str, Any]:
        return {"name": name, "type": schema, "default": {}}

    wrong: dict[str, tuple[Any, Any, bytes]] = {
        "of another type": ("int", "none", long(7)),
        "of another branch": (["null", "int"], 7, longs(1, 7)),
        "no symbol": ({"type": "enum", "name": "E", "symbols": ["A"], "default": "B"}, 0, long(0)),
    }
    for name, (schema, default, data) in wrong.items():
        outer = of("R", {"name": "x", "type": schema, "default": default})
        seen = one(tmp_path, Case(name, header(outer) + block(1, data)))
        assert (seen.error, seen.rows) == (None, 1), (name, seen)
    # Each type contains the previous one twice. The other case contains itself, because its name is defined again.
    twice = {f"t{i}": of(f"T{i}", empty("a", f"T{i - 1}"), empty("b", f"T{i - 1}")) for i in range(1, 60)}
    again = of("T", empty("t", "T"))
    endless = of("R", {"name": "a", "type": record("T")}, {"name": "b", "type": again}, empty("c", "T"))
    cases = [
        Case("twice", header(record("R", x="int", t0=record("T0"), **twice)), columns=("x",)),
        Case("endless", header(endless)),
    ]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.error == {"twice": "LimitError", "endless": "SchemaError"}[case.name], (case.name, seen)


def test_types_named_like_kinds(tmp_path: Path) -> None:
    """A type "record" without fields is not a reference to a type with that name. Copies of it would exhaust memory."""
    fields: dict[str, Any] = {"a": record("record", x="int")}
    for i in range(40):
        name, other = ("enum", "record") if i % 2 == 0 else ("record", "enum")
        fields[f"f{i}"] = record(name, a={"type": other}, b={"type": other})
    cases = [
        Case("references", header(record("R", a=record("record", x="int"), b="record")) + block(1, longs(3, 4))),
        Case("copies", header(record("R", **fields))),
    ]
    references, copies = (seen for _, seen in outcomes(tmp_path, cases, memory=2 * GIB))
    assert references.batches == [repr({"a.x": [3], "b.x": [4]})]
    assert copies.error == "SchemaError"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "record", "name": "R"},
        {"type": "record", "fields": []},
        {"type": "record", "name": "R", "fields": [{"name": "x"}]},
        {"type": "record", "name": "R", "fields": [{"type": "int"}]},
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}, {"name": "x", "type": "int"}]},
        {"type": "record", "name": "R", "fields": {"x": "int"}},
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": "Missing"}]},
        {"type": "enum", "name": "E", "symbols": [1, 2]},
        {"type": "enum", "name": "E", "symbols": ["A", "A"]},
        {"type": "fixed", "name": "F"},
        {"type": "fixed", "name": "F", "size": -1},
        {"type": "fixed", "name": "F", "size": "8"},
        {"type": "array"},
        {"type": "map"},
        {"type": 3},
        {"type": None},
        ["int", "int"],
        ["int", ["null", "long"]],
        [{"type": "array", "items": "int"}, {"type": "array", "items": "long"}],
        {
            "type": "record",
            "name": "R",
            "fields": [{"name": "R", "type": {"type": "record", "name": "R", "fields": []}}],
        },
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_invalid_schemas(schema: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.avro"
    path.write_bytes(header(schema))
    with pytest.raises(fastpipe.errors.SchemaError) as caught:
        fastpipe.read_avro(path, batch_size=1)
    assert caught.value.path == str(path)
    assert caught.value.reason


def test_odd_schemas(tmp_path: Path) -> None:
    """Unusual schemas never cause a crash, or memory use in proportion to declared sizes."""
    schemas: list[Any] = [
        [],
        ["null"],
        "null",
        {"type": "enum", "name": "E", "symbols": []},
        {"type": "fixed", "name": "F", "size": 0},
        *({"type": "fixed", "name": "F", "size": n} for n in (1 << 31, 1 << 40, I64_MAX, (1 << 64) - 1, 1 << 70, 1e30)),
        list_of({"type": "fixed", "name": "F", "size": I64_MAX}),
        record("R", a={"type": "fixed", "name": "F", "size": I64_MAX}, b="F", c="F"),
        record("R", a=["null", {"type": "fixed", "name": "F", "size": I64_MAX}]),
        {"type": "bytes", "logicalType": "decimal", "precision": -1},
        {"type": "bytes", "logicalType": "decimal", "precision": 1 << 62, "scale": 1 << 63},
        {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 40},
        {"type": "fixed", "name": "F", "size": 3, "logicalType": "duration"},
        {"type": "fixed", "name": "F", "size": 3, "logicalType": "uuid"},
        {"type": "int", "logicalType": "unheard-of"},
        {"type": "int", "logicalType": 7},
        {"type": "string", "logicalType": "timestamp-millis"},
        {"type": {"type": {"type": "int"}}},
        {"type": "error", "name": "R", "fields": []},
        record("ns.with..dots", x="int"),
        record("", x="int"),
        record("R", **{"": "int"}),
        record("R", **{"a.b": "int", "a": record("S", b="int")}),
        record("R", **{"ü": "int", "x y": "int", "\0": "int"}),
        {"type": "record", "name": "R", "aliases": ["R", "R"], "fields": []},
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int", "default": "no number"}]},
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": ["null", "int"], "default": 3}]},
        {"type": "record", "name": "int", "fields": []},
        {"type": "record", "name": "R" * 100_000, "fields": []},
    ]
    cases = [
        Case(schema_bytes(schema).decode()[:80], header(schema) + body)
        for schema in schemas
        for body in (b"", block(1, bytes(40)), block(1, b""), block(3, bytes(3)))
    ]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.seconds < 1, case.name


def test_random_schemas(tmp_path: Path) -> None:
    """Parts of schemas in random order."""
    chance = random.Random(3)
    words = ["type", "name", "fields", "items", "values", "symbols", "size", "record", "array", "map", "enum", "fixed"]
    words += ["null", "int", "R", "default", "namespace", "aliases", "logicalType", "decimal", "precision", "uuid"]

    def piece(depth: int) -> Any:
        kind = chance.randrange(6 if depth < 4 else 3)
        if kind == 0:
            return chance.choice((None, True, -1, 0, 3, 1.5, 1 << 62))
        if kind <= 2:
            return chance.choice(words)
        if kind == 3:
            return [piece(depth + 1) for _ in range(chance.randrange(4))]
        whole = {"type": chance.choice(words), "name": chance.choice(("R", "S", "T"))} if kind == 4 else {}
        if whole.get("type") == "record":
            names = iter("abcd")
            whole["fields"] = [{"name": next(names), "type": piece(depth + 1)} for _ in range(chance.randrange(4))]
        return whole | {chance.choice(words): piece(depth + 1) for _ in range(chance.randrange(4))}

    cases = []
    for i in range(1500):
        schema = json.dumps(piece(0))
        cases.append(Case(f"{i}: {schema}", header(schema) + block(1, bytes(30)), count=True))
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.seconds < 1, case.name
