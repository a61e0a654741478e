"""Encoded Avro records with a selection of fields, and their conversion to Arrow data that keeps their types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from fastpipe._arrow.export import Capsules
from fastpipe._fastpipe import AvroColumns
from fastpipe._files._in_memory_files import File
from fastpipe._files._partition_columns import Partitions
from fastpipe._reader.options import Options, Settings
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import arrow_streams
from fastpipe.avro._file import AvroFile
from fastpipe.avro._reading import AvroData, read_avro
from fastpipe.errors import SchemaError, UnsupportedError, in_file
from fastpipe.specs import DenseSpec, Features, Spec

if TYPE_CHECKING:
    import pyarrow as pa

_NAMED = ("record", "error", "enum", "fixed")


class _RefersToRootError(Exception):
    """A field contains the record itself, whose type changes when fields are removed."""


def projection(schema: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """Returns the schema of a record with only the named fields, in the given order.

    Args:
        schema: The schema of a file, as parsed JSON.
        names: The names of the fields.

    Returns:
        The schema, in which each named type is defined at its first use. None if the schema isn't a record, a name
        isn't the name of a field or appears twice, or a field contains the record itself.
    """
    if not isinstance(schema, dict) or schema.get("type") not in ("record", "error"):
        return None
    fields = {field["name"]: field for field in schema["fields"]}
    if not set(names) <= fields.keys() or len(set(names)) < len(names):
        return None
    root, space = _full_name(schema, "")
    known: dict[str, Any] = {root: None}
    whole = {field: _resolved(fields[field], space, known, is_field=True) for field in fields}
    written: set[str] = set()
    try:
        return {**schema, "fields": [_defined(whole[name], known, written, is_field=True) for name in names]}
    except _RefersToRootError:
        return None


def _full_name(node: dict[str, Any], space: str) -> tuple[str, str]:
    """Returns the full name of a type, and the namespace inside it."""
    name = str(node["name"])
    if "." not in name:
        space = str(node.get("namespace", space) or "")
        name = f"{space}.{name}" if space else name
    return name, name.rpartition(".")[0]


def _resolved(node: Any, space: str, known: dict[str, Any], *, is_field: bool = False) -> Any:
    """Returns a type in which all names are full names. Adds definitions to `known`."""
    if isinstance(node, str):
        return f"{space}.{node}" if space and f"{space}.{node}" in known else node
    if isinstance(node, list):
        return [_resolved(branch, space, known) for branch in node]
    made = dict(node)
    if not is_field and node["type"] in _NAMED:
        name, space = _full_name(node, space)
        made |= {"name": name} if space else {"name": name, "namespace": ""}
        if space:
            made.pop("namespace", None)
        known[name] = made
        if "fields" in node:
            made["fields"] = [_resolved(field, space, known, is_field=True) for field in node["fields"]]
        return made
    for part in ("type", "items", "values"):
        if part in node:
            made[part] = _resolved(node[part], space, known)
    return made


def _defined(node: Any, known: dict[str, Any], written: set[str], *, is_field: bool = False) -> Any:
    """Returns a type in which each named type is defined at its first use and referenced by name afterwards."""
    if isinstance(node, str):
        if node not in known or node in written:
            return node
        if known[node] is None:
            raise _RefersToRootError
        return _defined(known[node], known, written)
    if isinstance(node, list):
        return [_defined(branch, known, written) for branch in node]
    made = dict(node)
    if not is_field and node["type"] in _NAMED:
        if node["name"] in written:
            return node["name"]
        written.add(node["name"])
        if "fields" in node:
            made["fields"] = [_defined(field, known, written, is_field=True) for field in node["fields"]]
        return made
    for part in ("type", "items", "values"):
        if part in node:
            made[part] = _defined(node[part], known, written)
    return made


# Rows of a batch: large enough to amortize its cost, and small because a record may be large.
_BATCH_SIZE = 256


@dataclass(frozen=True, repr=False)
class _EncodedSpec(DenseSpec):
    """The encoded bytes of a field, or of the whole record if the feature's name is empty."""

    def _lower(self) -> Any:
        return ("encoded", *super()._lower()[1:])


def encoded_records(
    files: Sequence[File],
    names: Sequence[str],
    *,
    check: Callable[[str, str], None] | None = None,
    **options: Unpack[Options],
) -> Reader:
    """Returns a reader of the encoded bytes of records, or of some of their fields.

    Args:
        files: Files that all have the same schema.
        names: The fields, which are encoded one after another in this order. `("",)` reads whole records as a feature
            with an empty name.
        check: A function that checks the path and the schema of each file with another schema: see `AvroData`.
        **options: See `fastpipe.typing.Options`.
    """
    features = Features({name: _EncodedSpec((), "bytes") for name in names})
    return Settings(read_avro, _BATCH_SIZE, options).reader(AvroData(files, features, check=check))


def avro_tables(
    files: Sequence[File], columns: Sequence[str] | None, *, batch_size: int, **options: Unpack[Options]
) -> tuple[pa.Schema, Reader, Iterator[pa.RecordBatch]]:
    """Returns the rows of files as Arrow data that keeps their types.

    Args:
        files: The files.
        columns: Fields of the record, fields of nested records as `a.b`, or partition columns; None for all.
        batch_size: Number of rows per record batch.
        **options: See `fastpipe.typing.Options`.

    Returns:
        The schema, a reader, and the reader's record batches.

    Raises:
        UnsupportedError: If Arrow has no counterpart of a column's type, or the records have no fields.
        SchemaError: If a column does not exist, or has another type in another file.
    """
    import pyarrow as pa

    first = AvroFile._from(files[0])
    fields = first.schema.get("fields") if isinstance(first.schema, dict) else None
    own = ["value"] if fields is None else [field["name"] for field in fields]
    folders = Partitions(list(map(str, files)), own, columns).integers
    wanted = None if columns is None else [name for name in columns if name not in folders]
    chosen = AvroColumns(first.path, first.schema_json, wanted)

    def check(path: str, schema: str) -> None:
        if schema != first.schema_json and not AvroColumns(path, schema, chosen.names()).decode_as(chosen):
            reason = f"its columns have other types than those of {first.path}: convert each file, or pass --columns"
            raise in_file(SchemaError, path, reason)

    features: dict[str, Spec] = {name: _EncodedSpec((), "bytes", on_null="mask") for name in chosen.names()}
    for name, whole in folders.items():
        features[name] = DenseSpec((), "int64" if whole else "string", on_null="mask")
    if not features:
        reason = "its records have no fields, so there are no columns to convert: convert it to Avro"
        raise in_file(UnsupportedError, first.path, reason)
    data = AvroData(files, Features(features), check=check, hive=bool(folders))
    reader = Settings(read_avro, batch_size, options).reader(data)
    kinds = [pa.field(name, pa.int64() if whole else pa.string()) for name, whole in folders.items()]
    schema = pa.schema([*pa.schema(chosen), *kinds])
    return schema, reader, _decoded(reader, chosen, schema)


def _decoded(reader: Reader, chosen: AvroColumns, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in arrow_streams(reader).batches():
        encoded = pa.record_batch(batch)
        columns = pa.record_batch(Capsules(chosen.decode(encoded))).columns
        folders = zip(encoded.columns[len(columns) :], schema.types[len(columns) :], strict=True)
        columns += [column.cast(kind) for column, kind in folders]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
