"""Schemas of several files, which must be one."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from fastpipe.errors import MalformedFileError, SchemaError, UnsupportedError, in_file

if TYPE_CHECKING:
    import pyarrow as pa


def chosen_columns(schema: pa.Schema, columns: list[str]) -> pa.Schema:
    """The schema of these columns only."""
    import pyarrow as pa

    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def with_certain(schema: pa.Schema, certain: Container[str]) -> pa.Schema:
    """The schema without nulls in these columns."""
    import pyarrow as pa

    fields = [without_nulls(field) if field.name in certain else field for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def without_nulls(field: pa.Field) -> pa.Field:
    """A field without nulls at any level."""
    return _nullable(field, False)


def with_nulls(field: pa.Field) -> pa.Field:
    """A field that may be null at any level."""
    return _nullable(field, True)


def _nullable(field: pa.Field, nullable: bool) -> pa.Field:
    import pyarrow as pa

    # Of a type that has nothing but nulls all are null.
    nullable = nullable or pa.types.is_null(field.type)
    return pa.field(field.name, _kind(field.type, nullable), nullable=nullable, metadata=field.metadata)


def _kind(kind: pa.DataType, nullable: bool) -> pa.DataType:
    """A type, in which fields at all levels may be null, or may not."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        # It is read as what it is stored as, and can't be made of another storage.
        return _kind(kind.storage_type, nullable)
    if types.is_struct(kind):
        return pa.struct([_nullable(kind.field(i), nullable) for i in range(kind.num_fields)])
    if types.is_map(kind):
        # A key is never null, though what is in it may be.
        key = _nullable(kind.key_field, nullable).with_nullable(False)
        return pa.map_(key, _nullable(kind.item_field, nullable), keys_sorted=kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(_nullable(kind.value_field, nullable), kind.list_size)
    # These have no field of their own for their values.
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
    """The one schema of files: what may be null in one of them may be null.

    Metadata is kept if all files have the same.

    Raises:
        SchemaError: if files have different columns, naming one and two files.
        MalformedFileError: if a name is no UTF-8.
        UnsupportedError: if a file has no columns, or one whose name can't be passed on.
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
    """Refuses names, at any level, that Arrow can't pass on whole."""
    import pyarrow as pa

    for field in fields:
        try:
            texts = [field.name, field.type.tz or "" if pa.types.is_timestamp(field.type) else ""]
        except UnicodeDecodeError as error:
            reason = f"the name of a column or of a time zone is no UTF-8: {error}"
            raise in_file(MalformedFileError, path, reason) from error
        if any("\0" in text for text in texts):
            reason = f"the name of a column or of a time zone has a NUL character in it: {texts}"
            raise in_file(UnsupportedError, path, reason)
        kind = field.type
        _check_names(path, [kind.field(i) for i in range(kind.num_fields)])


def _check_same(first_path: str, first: pa.Schema, path: str, schema: pa.Schema) -> None:
    mine, other = ({field.name: without_nulls(field).type for field in each} for each in (first, schema))
    for name in [*mine, *other]:
        one, another = mine.get(name), other.get(name)
        if one != another:
            reason = (
                f"files must have the same columns: {first_path} has {_told(name, one)}, and {path} has "
                f"{_told(name, another)}: read them one by one, or write them alike"
            )
            raise in_file(SchemaError, path, reason, feature=name)


def _told(name: str, kind: pa.DataType | None) -> str:
    return f"no column {name!r}" if kind is None else f"a column {name!r} of type {kind}"
