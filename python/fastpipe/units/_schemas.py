"""Merges the schemas of several files. Only columns that are the same in all files can be read."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

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


# The maximum number of columns that a message lists.
_SHOWN = 10


class _Difference(NamedTuple):
    """A column that differs between the first file and another file.

    Attributes:
        first: Its type in the first file; None if the file lacks it.
        path: The other file.
        other: Its type in the other file; None if the file lacks it.
    """

    first: pa.DataType | None
    path: str
    other: pa.DataType | None


class CommonSchema:
    """The schema of the columns that are the same in all files.

    A column that is nullable in one file is nullable in this schema. Metadata is kept if all files have the same
    metadata.

    Args:
        paths: The paths of the files.
        schemas: The schema of each file.

    Attributes:
        schema: The schema.

    Raises:
        SchemaError: If several columns of a file have the same name.
        MalformedFileError: If a name isn't valid UTF-8.
        UnsupportedError: If a file has no columns, or a column whose name Arrow can't pass on.
    """

    def __init__(self, paths: Sequence[str], schemas: Sequence[pa.Schema]) -> None:
        self._first = paths[0]
        self.schema, self._differences = _merged(paths, schemas)

    def check(self, wanted: Iterable[str] | None) -> None:
        """Checks that columns are the same in all files.

        Args:
            wanted: The names of columns, or paths of fields within them; None for all columns of all files.

        Raises:
            SchemaError: If a column differs. The message names the column, two files, and the columns that are the
                same.
        """
        if not self._differences:
            return
        if wanted is None:
            raise self._error(next(iter(self._differences)))
        for path in wanted:
            name = next((name for name in _outer(path) if name in self._differences), None)
            if name is not None and self.schema.get_field_index(path) < 0:
                raise self._error(name)

    def _error(self, name: str) -> SchemaError:
        first, path, other = self._differences[name]
        hint = "read the files separately, or write them with the same columns"
        if same := self.schema.names:
            more = f", and so do {len(same) - _SHOWN} more columns" if len(same) > _SHOWN else ""
            hint = f"columns={same[:_SHOWN]} reads all files{more}; otherwise, {hint}"
        reason = (
            f"files must have the same columns: {self._first} has {_told(name, first)}, but {path} has "
            f"{_told(name, other)}: {hint}"
        )
        return in_file(SchemaError, path, reason, feature=name)


def _outer(path: str) -> Iterable[str]:
    """Yields the names of the columns that a path may refer to, since names may contain dots."""
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))


def _merged(paths: Sequence[str], schemas: Sequence[pa.Schema]) -> tuple[pa.Schema, dict[str, _Difference]]:
    import pyarrow as pa

    common, differences = schemas[0], dict[str, _Difference]()
    # Many files share few schemas. Each schema is compared once.
    compared: set[bytes] = set()
    for path, schema in zip(paths, schemas, strict=True):
        if len(schema) == 0:
            raise in_file(UnsupportedError, path, "the file has no columns")
        _check_names(path, schema)
        if len(set(schema.names)) < len(schema):
            name = next(name for name in schema.names if schema.names.count(name) > 1)
            raise in_file(SchemaError, path, f"several columns are called {name!r}", feature=name)
        if schema.equals(common, check_metadata=True) or (key := schema.serialize().to_pybytes()) in compared:
            continue
        compared.add(key)
        mine, other = ({field.name: without_nulls(field).type for field in each} for each in (common, schema))
        for name in [*mine, *other]:
            if mine.get(name) != other.get(name):
                differences.setdefault(name, _Difference(mine.get(name), path, other.get(name)))
        fields = [
            field if schema.field(field.name).equals(field) else with_nulls(field)
            for field in common
            if field.name not in differences
        ]
        same = schema.metadata == common.metadata
        common = pa.schema(fields, metadata=common.metadata if same else None)
    return common, differences


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


def _told(name: str, kind: pa.DataType | None) -> str:
    return f"no column {name!r}" if kind is None else f"a column {name!r} of type {kind}"
