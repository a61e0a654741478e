"""Unions of several types: codes, and a column for each type."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import fastpipe
import oracle
import wire
from avro_schemas import Values, check_orders, container, files, followed, read, schemas
from fastpipe import DenseSpec, RaggedSpec
from oracle import Branch
from strategies import SOME, orders

# The datasets are so small that an incomplete last batch is a large part of them.
pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")


@hypothesis.settings(max_examples=SOME)
@hypothesis.given(schemas(), st.integers(0, 2**32 - 1), st.integers(0, 60), orders(), st.booleans())
def test_any_schema_in_any_order(schema: Any, seed: int, count: int, order: dict[str, Any], logical: bool) -> None:
    root = oracle.resolve(schema)
    rows = Values(seed).rows(root, count)
    seen = root if logical else oracle.without_logical_types(root)
    leaves = [leaf for leaf in oracle.leaves(seen) if not leaf.refusal]
    hypothesis.assume(len(leaves) == len(oracle.leaves(seen)))
    with files(container(schema, rows, seed)) as paths:
        reader = fastpipe.read_avro(paths, batch_size=5, logical_types=logical)
        assert list(reader.features) == [leaf.name for leaf in leaves]
        for leaf in leaves:
            spec = reader.features[leaf.name]
            assert (spec.dtype, spec.scale, spec.on_null == "mask") == (leaf.dtype, leaf.scale, leaf.nullable)
        oracle.check(reader, rows, lambda name, row: oracle.follow(seen, row, name))
        names = [leaf.name for leaf in leaves]
        expected = followed(seen, rows, reader.categories, names)
        check_orders(paths, expected, order, logical_types=logical)
        # Ragged specs read any array lengths.
        ragged = {leaf.name: leaf.spec() for leaf in leaves if leaf.type.kind != "sparse"}
        check_orders(paths, expected, order, features=ragged, logical_types=logical)


@hypothesis.settings(max_examples=SOME // 2)
@hypothesis.given(schemas(), st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_lengths_of_arrays_of_any_schema(schema: Any, seed: int, count: int) -> None:
    root = oracle.resolve(schema)
    rows = Values(seed).rows(root, count)
    features: dict[str, Any] = {"id": DenseSpec((), "int64")}
    counted = {}
    for path, dims, nullable in oracle.arrays(root):
        nulls = "mask" if nullable else "error"
        make = RaggedSpec if dims else DenseSpec
        name = f"{path} {dims}"
        counted[name] = (path, dims)
        features[name] = make((None,) * dims, "int64", field=path, length=True, on_null=nulls)
    hypothesis.assume(counted and not any(leaf.refusal for leaf in oracle.leaves(root)))
    with files(container(schema, rows, seed)) as paths:
        reader = fastpipe.read_avro(paths, features=features, batch_size=7)
        oracle.check(
            reader, rows, lambda name, row: row["id"] if name == "id" else oracle.lengths(root, row, *counted[name])
        )


@hypothesis.settings(max_examples=SOME // 2)
@hypothesis.given(schemas(), st.integers(0, 2**32 - 1))
def test_the_oracle_decodes_what_it_encodes(schema: Any, seed: int) -> None:
    root = oracle.resolve(schema)
    rows = Values(seed).rows(root, 20)
    with files(container(schema, rows, seed, "deflate")) as paths:
        found = oracle.load(paths[0])
        assert found[0] == root
        assert all(oracle.same(a, b) for a, b in zip(plain(rows), plain(found[1]), strict=True))


def plain(value: Any) -> Any:
    """Returns a value whose branches are pairs."""
    if isinstance(value, Branch):
        return (value.index, plain(value.value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


# --- Edges ---

EITHER = ["null", "int", "string"]


def either(*values: Any) -> bytes:
    """Returns a file whose records contain an integer, a text or null."""
    rows = [{"f": Branch({type(None): 0, int: 1, str: 2}[type(value)], value)} for value in values]
    return container(wire.record("R", f=EITHER), rows)


def test_codes_and_columns() -> None:
    with files(either(None, 7, "x", 8)) as paths:
        reader = fastpipe.read_avro(paths, batch_size=4)
        assert reader.features == {
            "f": DenseSpec((), "int32"),
            "f:int": DenseSpec((), "int32", on_null="mask"),
            "f:string": DenseSpec((), "string", on_null="mask"),
        }
        assert reader.categories == {"f": EITHER}
        assert read(paths) == {"f": [0, 1, 2, 1], "f:int": [None, 7, None, 8], "f:string": [None, None, "x", None]}
        assert read(paths, columns=["f:string"]) == {"f:string": [None, None, "x", None]}
        # A name also selects all columns nested in it.
        assert list(fastpipe.infer_features(paths, columns=["f"])) == ["f", "f:int", "f:string"]


def test_all_null() -> None:
    with files(either(None, None, None)) as paths:
        assert read(paths) == {"f": [0] * 3, "f:int": [None] * 3, "f:string": [None] * 3}


def test_fill_values_replace_values_of_other_types() -> None:
    features = {
        "f:int": DenseSpec((), "int64", fill=-1),
        "f:string": DenseSpec((), "string", on_null="fill"),
        "text": DenseSpec((), "bytes", field="f:string", fill=b"-"),
        "small": DenseSpec((), "uint8", field="f"),
    }
    with files(either(None, 7, "x")) as paths:
        expected = {"f:int": [-1, 7, -1], "f:string": ["", "", "x"], "text": [b"-", b"-", b"x"], "small": [0, 1, 2]}
        assert read(paths, features=features) == expected
        with pytest.raises(fastpipe.errors.NullValueError, match="found null"):
            read(paths, features={"f:int": DenseSpec((), "int64")})
    for dtype, match in (("string", "for the codes of the types"), ("float32", "an integer dtype")):
        with files(either(1)) as paths, pytest.raises(fastpipe.errors.SchemaError, match="union") as caught:
            read(paths, features={"f": DenseSpec((), dtype)})
        assert match in str(caught.value) or "an integer dtype" in str(caught.value)


def test_errors_list_the_types_of_a_union() -> None:
    with (
        files(either(1)) as paths,
        pytest.raises(fastpipe.errors.SchemaError, match=r"request f:int, f:string") as caught,
    ):
        read(paths, features={"f:long": DenseSpec((), "int64")})
    assert caught.value.feature == "f:long"


def test_numbers_are_one_column() -> None:
    schema = wire.record("R", whole=["int", "null", "long"], any=["long", "float"])
    big = 2**53 + 1
    rows = [
        {"whole": Branch(0, -5), "any": Branch(0, big)},
        {"whole": Branch(1, None), "any": Branch(1, 0.5)},
        {"whole": Branch(2, 2**63 - 1), "any": Branch(0, -(2**63))},
    ]
    with files(container(schema, rows)) as paths:
        assert fastpipe.infer_features(paths) == {
            "whole": DenseSpec((), "int64", on_null="mask"),
            "any": DenseSpec((), "float64"),
        }
        assert read(paths) == {"whole": [-5, None, 2**63 - 1], "any": [float(big), 0.5, -(2.0**63)]}
        with pytest.raises(fastpipe.errors.ValueRangeError):
            read(paths, features={"whole": DenseSpec((), "int32", fill=0)})


def test_records_with_the_same_last_name_stay_distinct() -> None:
    schema = wire.record(
        "R", f=[wire.record("a.X", v="int"), wire.record("b.X", v="string"), wire.record("c.Y", v="int")]
    )
    rows = [{"f": Branch(1, {"v": "t"})}, {"f": Branch(0, {"v": 3})}, {"f": Branch(2, {"v": 4})}]
    with files(container(schema, rows)) as paths:
        assert fastpipe.read_avro(paths, batch_size=1).categories == {"f": ["a.X", "b.X", "Y"]}
        assert read(paths) == {
            "f": [1, 0, 2],
            "f:a.X.v": [None, 3, None],
            "f:b.X.v": ["t", None, None],
            "f:Y.v": [None, None, 4],
        }


def test_arrays_of_unions() -> None:
    schema = wire.record("R", f=wire.list_of(["int", wire.list_of("int"), "string"]))
    rows = [{"f": [Branch(0, 1), Branch(1, [1, 2])]}, {"f": []}, {"f": [Branch(2, "a")]}]
    features = {
        "count": DenseSpec((), "int64", field="f", length=True),
        "codes": RaggedSpec((None,), "int32", field="f"),
        "padded": DenseSpec((3,), "int32", field="f", pad=-1),
        "counts": RaggedSpec((None,), "int64", field="f:array", length=True, on_null="mask"),
        "inner": RaggedSpec((None, None), "int64", field="f:array", on_null="mask"),
        "square": DenseSpec((2, 2), "int64", field="f:array", pad=9, fill=0),
    }
    with files(container(schema, rows)) as paths:
        found = read(paths, features=features)
    assert found == {
        "count": [2, 0, 1],
        "codes": [[0, 1], [], [2]],
        "padded": [[0, 1, -1], [-1, -1, -1], [2, -1, -1]],
        "counts": [[None, 2], [], [None]],
        "inner": [[None, [1, 2]], [], [None]],
        "square": [[[0, 0], [1, 2]], [[9, 9], [9, 9]], [[0, 0], [9, 9]]],
    }


@pytest.mark.parametrize("length", [1, 3])
def test_arrays_of_one_length_are_dense_in_unions(length: int) -> None:
    schema = wire.record("R", f=["string", wire.list_of(["int", "string"])])
    rows = [{"f": Branch(1, [Branch(k % 2, k if k % 2 == 0 else "x") for k in range(length)])} for _ in range(20)]
    with files(container(schema, rows)) as paths:
        features = fastpipe.infer_features(paths)
        assert features["f:array"] == DenseSpec((length,), "int32", on_null="mask")
        assert features["f:array:string"] == RaggedSpec((None,), "string", on_null="mask")
        assert read(paths)["f:array"] == [[k % 2 for k in range(length)]] * 20
        more = container(schema, [{"f": Branch(0, "none")}, {"f": Branch(1, [])}])
        with files(more) as others:
            ragged = {"f:array": RaggedSpec((None,), "int32", on_null="mask")}
            assert read(paths + others, features=ragged)["f:array"][-2:] == [None, []]
            with pytest.raises(fastpipe.errors.ShapeError):
                read(others, features={"f:array": features["f:array"]})


def test_empty_unions_and_a_union_at_the_root() -> None:
    with files(container([], []), container(wire.record("R", a="int", f=[]), [])) as (only, field):
        assert read(only) == read(field) == {}
        assert fastpipe.infer_features(only) == {"value": DenseSpec((), "int32")}
        assert fastpipe.infer_features(field) == {"a": DenseSpec((), "int32"), "f": DenseSpec((), "int32")}
    # A value cannot have a type of an empty union.
    with files(wire.container([], [(1, wire.long(0))])) as paths, pytest.raises(fastpipe.errors.MalformedFileError):
        read(paths)
    rows = [Branch(0, None), Branch(1, 3), Branch(2, {"a": 4})]
    with files(container(["null", "int", wire.record("X", a="int")], rows)) as paths:
        expected = {"value": [0, 1, 2], "value:int": [None, 3, None], "value:X.a": [None, None, 4]}
        assert read(paths) == expected


def test_a_field_named_like_a_branch() -> None:
    """Avro names contain no colons, but some writers don't check names."""
    real = {"name": "a:string", "type": "int"}
    schema = {"type": "record", "name": "R", "fields": [real, {"name": "a", "type": ["int", "string"]}]}
    rows = [{"a": Branch(0, 1), "a:string": 7}, {"a": Branch(1, "q"), "a:string": 8}]
    with files(container(schema, rows)) as paths:
        with pytest.warns(
            fastpipe.errors.ColumnsLeftOutWarning, match=r"'a:string' \(another column has the same name"
        ):
            found = read(paths)
        assert found == {"a:string": [7, 8], "a": [0, 1], "a:int": [1, None]}


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_invalid_branch_indices(index: int) -> None:
    for rest in (wire.long(1), b""):
        with files(wire.container(wire.record("R", f=EITHER), [(1, wire.long(index) + rest)])) as paths:
            with pytest.raises(fastpipe.errors.MalformedFileError) as caught:
                read(paths)
            assert (caught.value.block, caught.value.record) == (0, 0)


# --- Several files ---


def test_codes_are_those_of_the_first_file() -> None:
    first = either(1, "a", None)
    other = container(
        wire.record("R", f=["string", "null", "int"]),
        [{"f": Branch(0, "b")}, {"f": Branch(1, None)}, {"f": Branch(2, 2)}],
    )
    fewer = container(wire.record("R", f=["string", "int"]), [{"f": Branch(0, "c")}, {"f": Branch(1, 3)}])
    with files(first, other, fewer) as paths:
        assert read(paths) == {
            "f": [1, 2, 0, 2, 0, 1, 2, 1],
            "f:int": [1, None, None, None, None, 2, None, 3],
            "f:string": [None, "a", None, "b", None, None, "c", None],
        }
        with pytest.raises(
            fastpipe.errors.SchemaError, match=r"type 'null' is not in the union of the first file.*\"union\""
        ):
            read(paths[::-1])
        merged = read(paths[::-1], reader_schema="union")
        assert merged["f:int"] == [None, 3, None, None, 2, 1, None, None]
        assert merged["f"] == [0, 1, 0, 2, 1, 1, 0, 2]


def test_columns_of_one_type_skip_the_others() -> None:
    """A column of one type doesn't decode the other types, which may even be damaged."""
    schema = wire.record("R", f=["string", "int"])
    damaged = wire.long(0) + wire.long(2) + b"\xff\xfe"
    with files(wire.container(schema, [(2, wire.long(1) + wire.long(5) + damaged)])) as paths:
        assert read(paths, columns=["f:int"]) == {"f:int": [5, None]}
        with pytest.raises(fastpipe.errors.MalformedFileError, match="UTF-8") as caught:
            read(paths)
        assert caught.value.record == 1


def test_unions_round_trip_through_arrow() -> None:
    pytest.importorskip("pyarrow")
    with files(either(None, 7, "x")) as paths:
        (batch,) = fastpipe.read_avro(paths, batch_size=3)
        assert batch["f"].dtype == np.int32
        assert batch["f:string"].to_arrow().to_pylist() == [None, None, "x"]


@pytest.mark.parametrize(("first", "second"), [("int", "union"), ("union", "int"), ("int", "enum"), ("enum", "int")])
def test_codes_are_not_mixed_with_values(first: str, second: str) -> None:
    kinds: dict[str, tuple[Any, Any]] = {
        "int": ("int", 4),
        "union": (["int", "string"], Branch(0, 9)),
        "enum": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B"),
    }
    blobs = [container(wire.record("R", f=kind), [{"f": value}]) for kind, value in (kinds[first], kinds[second])]
    with files(*blobs) as paths, pytest.raises(fastpipe.errors.SchemaError) as caught:
        read(paths, features={"f": DenseSpec((), "int32")})
    assert (caught.value.feature, caught.value.path) == ("f", paths[1])


def test_a_record_named_array() -> None:
    schema = wire.record("R", f=[wire.list_of("int"), wire.record("array", x="string")])
    with files(container(schema, [{"f": Branch(0, [1])}, {"f": Branch(1, {"x": "t"})}])) as paths:
        found = read(paths)
    assert found["f"] == [0, 1]
    assert found["f:array"] == [[1], None]


def test_a_later_field_named_like_a_branch() -> None:
    schema = wire.record("R", **{"a": ["int", "string"], "a:string": "int"})
    with files(container(schema, [{"a": Branch(0, 1), "a:string": 7}])) as paths:
        with pytest.warns(fastpipe.errors.ColumnsLeftOutWarning, match="'a:string'"):
            found = read(paths)
        assert found["a"] == [0]


def test_errors_name_the_column_of_a_type() -> None:
    with files(either(None)) as paths, pytest.raises(fastpipe.errors.NullValueError) as caught:
        read(paths, features={"f:int": DenseSpec((), "int64")})
    assert caught.value.feature == "f:int"
