"""Merges the schemas of several files, which must have the same columns."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from fastpipe.errors import MalformedFileError, SchemaError, UnsupportedError, in_file

if TYPE_CHECKING:
    import pyarrow as pa


def chosen_columns(schema: pa.Schema, columns: list[str]) -> pa.Schema:
    """Returns the schema with only the given columns."""
    import pyarrow as pa

    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def with_certain(schema: pa.Schema, certain: Container[str]) -> pa.Schema:
    """Returns the schema with the given columns marked as non-nullable."""
    import pyarrow as pa

    fields = [without_nulls(field) if field.name in certain else field for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def without_nulls(field: pa.Field) -> pa.Field:
    """Returns a field that is non-nullable at every level."""
    return _nullable(field, False)


def with_nulls(field: pa.Field) -> pa.Field:
    """Returns a field that is nullable at every level."""
    return _nullable(field, True)


def _nullable(field: pa.Field, nullable: bool) -> pa.Field:
    import pyarrow as pa

    # A column of the null type is always nullable.
    nullable = nullable or pa.types.is_null(field.type)
    return pa.field(field.name, _kind(field.type, nullable), nullable=nullable, metadata=field.metadata)


def _kind(kind: pa.DataType, nullable: bool) -> pa.DataType:
    """Returns a type whose fields, at every level, are nullable or non-nullable."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        # An extension type is read as its storage type, and its storage can't be replaced.
        return _kind(kind.storage_type, nullable)
    if types.is_struct(kind):
        return pa.struct([_nullable(kind.field(i), nullable) for i in range(kind.num_fields)])
    if types.is_map(kind):
        # A map's keys are never null, but the fields inside a key may be.
        key = _nullable(kind.key_field, nullable).with_nullable(False)
        return pa.map_(key, _nullable(kind.item_field, nullable), keys_sorted=kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(_nullable(kind.value_field, nullable), kind.list_size)
    # The values of these types are not fields.
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _kind(kind.value_type, nullable), kind.ordered)
    if types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, _kind(kind.value_type, nullable))
    lists = {
        pa.lib.Type_LIST: pa.list_,
        pa.lib.Type_LARGE_LIST: pa.large_list,
        pa.lib.Type_LIST_VIEW: pa.list_view,
        pa.lib.Type_LARGE_LIST_VIEW: pa.large_list_view,
    }
    make = lists.get(kind.id)
    return kind if make is None else make(_nullable(kind.value_field, nullable))


def common_schema(paths: list[str], schemas: list[pa.Schema]) -> pa.Schema:
    """Returns the common schema of files. A column that is nullable in one file is nullable in the result.

    Metadata is kept if all files have the same metadata.

    Raises:
        SchemaError: If files have different columns. The message names a column and two files.
        MalformedFileError: If a name isn't valid UTF-8.
        UnsupportedError: If a file has no columns, or a column whose name Arrow can't pass on.
    """
    import pyarrow as pa

    common = schemas[0]
    for path, schema in zip(paths, schemas, strict=True):
        if len(schema) == 0:
            raise in_file(UnsupportedError, path, "the file has no columns")
        _check_names(path, schema)
        if len(set(schema.names)) < len(schema):
            name = next(name for name in schema.names if schema.names.count(name) > 1)
            raise in_file(SchemaError, path, f"several columns are called {name!r}", feature=name)
        if schema.equals(common, check_metadata=True):
            continue
        _check_same(paths[0], common, path, schema)
        fields = [field if schema.field(field.name).equals(field) else with_nulls(field) for field in common]
        same = schema.metadata == common.metadata
        common = pa.schema(fields, metadata=common.metadata if same else None)
    return common


def _check_names(path: str, fields: Iterable[pa.Field]) -> None:
    """Rejects names, at any level, that Arrow can't pass on completely."""
    import pyarrow as pa

    for field in fields:
        try:
            texts = [field.name, field.type.tz or "" if pa.types.is_timestamp(field.type) else ""]
        except UnicodeDecodeError as error:
            reason = f"the name of a column or of a time zone isn't valid UTF-8: {error}"
            raise in_file(MalformedFileError, path, reason) from error
        if any("\0" in text for text in texts):
            reason = f"the name of a column or of a time zone contains a NUL character: {texts}"
            raise in_file(UnsupportedError, path, reason)
        kind = field.type
        _check_names(path, [kind.field(i) for i in range(kind.num_fields)])


def _check_same(first_path: str, first: pa.Schema, path: str, schema: pa.Schema) -> None:
    mine, other = ({field.name: without_nulls(field).type for field in each} for each in (first, schema))
    for name in [*mine, *other]:
        one, another = mine.get(name), other.get(name)
        if one != another:
            reason = (
                f"files must have the same columns: {first_path} has {_told(name, one)}, but {path} has "
                f"{_told(name, another)}: read the files separately, or write them with the same columns"
            )
            raise in_file(SchemaError, path, reason, feature=name)


def _told(name: str, kind: pa.DataType | None) -> str:
    return f"no column {name!r}" if kind is None else f"a column {name!r} of type {kind}"
