"""Rows of files as Arrow data that keep their types, for `fastpipe convert`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from fastpipe._arrow.schema import require_pyarrow, schema_of
from fastpipe._reader.reader import Reader
from fastpipe.errors import SchemaError, UnsupportedError
from fastpipe.sources.avro._encoded import avro_tables
from fastpipe.sources.units._arrow_files import ArrowFileUnits, read_arrow
from fastpipe.sources.units._files import Files
from fastpipe.sources.units._parquet import ParquetUnits, read_parquet

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Tables", "tables_of"]


class Tables(NamedTuple):
    """Arrow data of files.

    Attributes:
        schema: of all tables.
        rows: how many there are.
        open: starts reading; its value yields record batches or tables of any size.
    """

    schema: pa.Schema
    rows: int
    open: Callable[[], AbstractContextManager[Iterator[Any]]]


def tables_of(
    origin: str, files: list[str], columns: list[str] | None, order: dict[str, Any], batch_size: int
) -> Tables:
    """The rows of files, in their order or shuffled.

    Args:
        origin: the format, "avro", "parquet" or "arrow".
        files: their paths.
        columns: the columns; None for all. `a.b` is a field of a record or struct.
        order: options of readers that shuffle; none to keep the order.
        batch_size: rows that are read at once, where rows are decoded.

    Raises:
        UnsupportedError: if the type of a column can't be kept, which the message names.
        SchemaError: if a column isn't there, or files have other columns.
    """
    require_pyarrow()
    if origin == "avro":
        schema, reader, tables = avro_tables(files, columns, batch_size=batch_size, **order)
        return Tables(schema, reader.num_rows, lambda: _Closing(reader, tables))
    parquet = origin == "parquet"
    kind, storage = ParquetUnits if parquet else ArrowFileUnits, Files(None)
    how: dict[str, Any] = {"hive": True, "parallel": True} if parquet else {}
    units: Any = kind(storage, storage.find(files, kind.suffixes), **how)
    whole: pa.Schema = units.schema
    names = whole.names if columns is None else columns
    schema = _chosen(whole, names)
    if order:
        read = read_parquet if parquet else read_arrow
        reader = read(files, columns=columns, batch_size=batch_size, **order)
        _check_kept(schema, schema_of(reader.features))
        return Tables(schema, sum(units.rows), lambda: _Closing(reader, _cast(reader.to_reader(), schema)))
    units = units.select(list(dict.fromkeys(_root(whole, name) for name in names)))
    return Tables(schema, sum(units.rows), lambda: nullcontext(_of_units(units, names, schema)))


class _Closing(AbstractContextManager[Iterator[Any]]):
    """Tables of a reader, which is closed after the last one."""

    def __init__(self, reader: Reader, tables: Iterator[Any]) -> None:
        self._reader, self._tables = reader, tables

    def __enter__(self) -> Iterator[Any]:
        return self._tables

    def __exit__(self, *exception: object) -> None:
        self._reader.close()


def _root(schema: pa.Schema, name: str) -> str:
    """The column that a path begins with."""
    return name if name in schema.names else name.partition(".")[0]


def _chosen(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """The fields with these paths."""
    import pyarrow as pa

    fields = []
    for name in names:
        found, *rest = _steps(schema, name)
        if found not in schema.names:
            raise _missing(name, found, schema.names)
        field, nullable = schema.field(found), schema.field(found).nullable
        for step in rest:
            if not pa.types.is_struct(field.type):
                reason = f"column {name!r} is within a value of type {field.type}: name the whole column, {found!r}"
                raise SchemaError(reason, feature=name, reason=reason)
            steps = [field.type.field(i).name for i in range(field.type.num_fields)]
            if step not in steps:
                raise _missing(name, step, steps)
            field = field.type.field(steps.index(step))
            nullable |= field.nullable
        fields.append(field.with_name(name).with_nullable(nullable))
    return pa.schema(fields, metadata=schema.metadata)


def _steps(schema: pa.Schema, name: str) -> list[str]:
    return [name] if name in schema.names else name.split(".")


def _missing(name: str, step: str, names: Sequence[str]) -> SchemaError:
    reason = f"column {name!r}: there is no field {step!r}, but {', '.join(names)}"
    return SchemaError(reason, feature=name, reason=reason)


def _of_units(units: Any, names: Sequence[str], schema: pa.Schema) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.compute

    slices = getattr(units, "read_slices", None)
    for unit, rows in enumerate(units.rows):
        for table in [units.read(unit)] if slices is None else slices(unit, 0, min(rows, 1 << 16)):
            columns = []
            for name in names:
                first, *rest = _steps(units.schema, name)
                column = table.column(table.schema.names.index(first))
                columns.append(pyarrow.compute.struct_field(column, rest) if rest else column)
            yield _as(pa.table(columns, names=list(names)), schema)


def _cast(batches: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[Any]:
    import pyarrow as pa

    for batch in batches:
        yield _as(pa.table(batch), schema)


def _as(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with these types: dictionaries, which readers may make of text, are cast."""
    import pyarrow as pa

    columns = zip(table.columns, schema, strict=True)
    arrays = [column if column.type == field.type else column.cast(field.type) for column, field in columns]
    return pa.table(arrays, schema=schema)


def _check_kept(schema: pa.Schema, read: pa.Schema) -> None:
    """Refuses columns that batches have as other types."""
    for field in schema:
        if field.name not in read.names or _plain(read.field(field.name).type) != _plain(field.type):
            reason = (
                f"batches, which are shuffled, don't keep the type of column {field.name!r}, {field.type}: convert "
                "without --shuffle to Avro, and shuffle that file, or name the other columns with --columns"
            )
            raise UnsupportedError(reason, feature=field.name, reason=reason)


def _plain(kind: pa.DataType) -> pa.DataType:
    """A type with offsets of 32 bits, and without names and nulls of items."""
    import pyarrow as pa

    types = pa.types
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    return kind
