"""Nullability in the schemas of files, at any level of any type."""

from __future__ import annotations

from typing import Any

import pytest

import fastpipe

pa = pytest.importorskip("pyarrow")

from fastpipe.units._schemas import CommonSchema, with_nulls, without_nulls  # noqa: E402


def item(nullable: bool, kind: Any = None, name: str = "item") -> Any:
    return pa.field(name, kind or pa.int32(), nullable=nullable)


def struct(nullable: bool) -> Any:
    return pa.struct([item(nullable, name="a"), item(nullable, pa.list_(item(nullable)), "b")])


# Types as functions of the nullability of their inner levels.
KINDS: dict[str, Any] = {
    "plain": lambda nullable: pa.int32(),
    "struct": struct,
    "list": lambda nullable: pa.list_(item(nullable)),
    "large list": lambda nullable: pa.large_list(item(nullable)),
    "fixed-size list": lambda nullable: pa.list_(item(nullable), 3),
    "list view": lambda nullable: pa.list_view(item(nullable)),
    "large list view": lambda nullable: pa.large_list_view(item(nullable)),
    "list of structs": lambda nullable: pa.list_(item(nullable, struct(nullable))),
    "map": lambda nullable: pa.map_(pa.string(), item(nullable, name="value")),
    "sorted map of structs": lambda nullable: pa.map_(
        item(False, struct(nullable), "key"), item(nullable, struct(nullable), "value"), keys_sorted=True
    ),
    "run ends": lambda nullable: pa.run_end_encoded(pa.int16(), struct(nullable)),
    "dictionary": lambda nullable: pa.dictionary(pa.int8(), pa.list_(item(nullable)), ordered=True),
    "text": lambda nullable: pa.string_view(),
    "time": lambda nullable: pa.timestamp("ms", "UTC"),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def common_schema(paths: list[str], schemas: list[Any]) -> Any:
    """Returns the common schema of files with the same columns."""
    common = CommonSchema(paths, schemas)
    common.check(None)
    return common.schema


def exactly(one: Any, other: Any) -> bool:
    """Returns whether two fields are identical. Arrow's equality ignores the nullability of map keys."""
    return one.equals(other, check_metadata=True) and str(one.type) == str(other.type)


@kinds
def test_nullability_is_set_and_removed_at_all_levels(kind: Any) -> None:
    strict, loose = (
        pa.field("x", kind(nullable), nullable=nullable, metadata={"k": "v"}) for nullable in (False, True)
    )
    for field in (strict, loose):
        assert exactly(without_nulls(field), strict)
        assert exactly(with_nulls(field), loose)


@kinds
def test_fields_nullable_in_one_file_are_nullable(kind: Any) -> None:
    outer, inner, strict = (
        pa.schema([pa.field("x", kind(inner), nullable=outer)])
        for outer, inner in ((True, False), (False, True), (False, False))
    )
    loose = pa.field("x", kind(True))
    assert common_schema(["a", "b"], [strict, strict]).equals(strict)
    for other in (outer, inner):
        if other.equals(strict):
            continue
        for schemas in ([strict, other], [other, strict], [strict, other, strict]):
            assert exactly(common_schema(["a", "b", "c"][: len(schemas)], schemas).field("x"), loose)


def test_extension_types_are_read_as_their_storage_type() -> None:
    tensor = pa.field("x", pa.fixed_shape_tensor(pa.float32(), [2]))
    assert without_nulls(tensor).type == pa.list_(item(False, pa.float32()), 2)
    assert with_nulls(tensor).type == pa.list_(item(True, pa.float32()), 2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.int64())),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.binary(), pa.int32())),
        (pa.list_view(pa.int32()), pa.list_(pa.int32())),
        (pa.run_end_encoded(pa.int16(), pa.int32()), pa.int32()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
    ],
    ids=str,
)
def test_other_types_are_refused(one: Any, other: Any) -> None:
    for kinds in ((one, other), (other, one)):
        schemas = [pa.schema({"x": kind}) for kind in kinds]
        with pytest.raises(
            fastpipe.errors.SchemaError, match=r"a has a column 'x' of type .*, but b has a column 'x' of type"
        ):
            CommonSchema(["a", "b"], schemas).check(None)


def test_only_requested_columns_must_be_the_same() -> None:
    first, other = pa.struct({"y": pa.int32()}), pa.struct({"y": pa.int64()})
    schemas = [
        pa.schema({"same": pa.int32(), "s": first, "a.b": pa.int32(), "first": pa.int32()}),
        pa.schema({"same": pa.int32(), "s": other, "a.b": pa.int32(), "a": pa.int32()}),
        pa.schema({"same": pa.int32(), "s": other, "a.b": pa.int32(), "last": pa.int32()}),
    ]
    common = CommonSchema(["a", "b", "c"], schemas)
    assert common.schema.names == ["same", "a.b"]
    # A column that doesn't exist in any file is refused where features are compared with the schema.
    common.check(["same", "a.b", "none"])
    for path, name, file in [
        *(("s", "s", "b"), ("s.y", "s", "b"), ("first", "first", "b")),
        *(("a", "a", "b"), ("a.x", "a", "b"), ("last", "last", "c")),
    ]:
        with pytest.raises(fastpipe.errors.SchemaError, match=r"columns=\['same', 'a\.b'\] reads all files") as error:
            common.check(["same", path])
        assert (error.value.feature, error.value.path) == (name, file)
    with pytest.raises(fastpipe.errors.SchemaError, match="'s'"):
        common.check(None)
