"""Columns of shards of interactions in Avro files and Arrow IPC files.

A column is an array of IDs or numbers, or a pair of uint32 values and the offsets (for writing) or lengths (for
reading) of its lists.

Arrow files have no checksums, and pyarrow trusts their offsets unless the caller validates them. A file is therefore
fully validated before its values are used. It is read into memory, because truncating a mapped file would terminate the
process with SIGBUS.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._arrow.schema import require_pyarrow
from fastpipe.avro import AvroFile, read_avro, write_avro
from fastpipe.batch import Ragged, Strings
from fastpipe.errors import (
    InteractionsError,
    MalformedFileError,
    MissingFileError,
    OutOfMemoryError,
    StorageError,
    UnsupportedError,
    in_file,
)
from fastpipe.specs import DenseSpec, Features, RaggedSpec

_ROWS = 1 << 14


def wrong(path: str, reason: str) -> InteractionsError:
    """Returns the error for a file with invalid content."""
    return in_file(InteractionsError, path, reason)


# --- Writing ---


def put_avro(path: str, columns: dict[str, Any], metadata: dict[str, str]) -> None:
    """Writes an Avro file with one record per row of the columns: IDs or numbers, or values and offsets."""
    fields = [{"name": name, "type": _avro_type(column)} for name, column in columns.items()]
    schema = {"type": "record", "name": "Shard", "namespace": "fastpipe", "fields": fields}
    batch = {name: _form(column) for name, column in columns.items()}
    write_avro(path, batch, schema, codec="null", metadata=metadata)


def _avro_type(column: Any) -> Any:
    if isinstance(column, tuple):
        return {"type": "array", "items": "int"}
    if column.dtype == object:
        return "bytes" if isinstance(column[0], bytes) else "string"
    if column.dtype == np.uint64:
        raise UnsupportedError('Avro integers must be below 2^63: pass format="arrow", or use strings as ids')
    return "long"


def _form(column: Any) -> Any:
    """Returns a column as `write_avro` takes it."""
    if isinstance(column, tuple):
        return Ragged(*column)
    if column.dtype != object:
        return column
    binary = isinstance(column[0], bytes)
    texts = column.tolist() if binary else [text.encode() for text in column.tolist()]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)])
    return Strings(np.frombuffer(b"".join(texts), np.uint8), offsets, (len(texts),), binary)


def put_arrow(path: str, columns: dict[str, Any], metadata: dict[str, str]) -> None:
    """Writes the columns as an Arrow IPC file of one record batch."""
    pa = require_pyarrow()

    def array(column: Any) -> Any:
        if isinstance(column, tuple):
            return pa.LargeListArray.from_arrays(pa.array(column[1]), pa.array(column[0]))
        return pa.array(column)

    table = pa.table({name: array(column) for name, column in columns.items()})
    table = table.replace_schema_metadata(metadata)
    with open(path, "xb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


# --- Reading ---


class AvroFiles:
    """Avro files with the same columns.

    Args:
        paths: The paths of the files.
    """

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        self.metadata: list[dict[str, bytes]] = [dict(AvroFile(path).metadata) for path in paths]

    def columns(self, scalars: list[str], lists: list[str]) -> dict[str, Any]:
        """Returns the columns of all files: IDs or numbers as an array or list, lists as uint32 values and lengths."""
        inferred = read_avro(self._paths[:1], columns=scalars, batch_size=1).features
        if any(not isinstance(inferred[name], DenseSpec) or inferred[name].shape for name in scalars):
            raise wrong(self._paths[0], f"{' or '.join(scalars)} must have one value per record")
        features = Features({name: DenseSpec((), inferred[name].dtype) for name in scalars})
        features.update({name: RaggedSpec((None,), "uint32") for name in lists})
        batches = list(read_avro(self._paths, features=features, batch_size=_ROWS))
        if not batches:
            raise wrong(self._paths[0], "it is empty")
        columns: dict[str, Any] = {}
        for name in scalars:
            text = features[name].dtype in ("string", "bytes")
            pieces = [batch[name] for batch in batches]
            columns[name] = [entry for piece in pieces for entry in piece.to_list()] if text else np.concatenate(pieces)
        for name in lists:
            pieces = [batch[name] for batch in batches]
            columns[name] = (
                np.concatenate([piece.values for piece in pieces]),
                np.concatenate([piece.lengths for piece in pieces]),
            )
        return columns


class ArrowFiles:
    """Arrow IPC files with the same columns.

    Raises:
        MalformedFileError: If a file isn't an Arrow file, or is damaged.
        MissingFileError: If a file does not exist.
        StorageError: If a file can't be read.
    """

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        self._tables = [_table(path) for path in paths]
        self.metadata: list[dict[str, bytes]] = [
            {key.decode(errors="replace"): value for key, value in (table.schema.metadata or {}).items()}
            for table in self._tables
        ]

    def columns(self, scalars: list[str], lists: list[str]) -> dict[str, Any]:
        """Returns the columns of all files: IDs or numbers as an array or list, lists as uint32 values and lengths."""
        for path, table in zip(self._paths, self._tables, strict=True):
            _check_table(path, table, scalars, lists)
        first = self._tables[0].schema
        columns: dict[str, Any] = {}
        for name in scalars:
            for path, table in zip(self._paths, self._tables, strict=True):
                if table.schema.field(name).type != first.field(name).type:
                    raise wrong(path, f"its column {name} has another type than in {self._paths[0]}")
            chunks = [chunk for table in self._tables for chunk in table[name].chunks]
            integers = require_pyarrow().types.is_integer(first.field(name).type)
            columns[name] = (
                np.concatenate([chunk.to_numpy() for chunk in chunks])
                if integers
                else [value for chunk in chunks for value in chunk.to_pylist()]
            )
        for name in lists:
            chunks = [chunk for table in self._tables for chunk in table[name].chunks]
            values = [chunk.flatten().to_numpy() for chunk in chunks]
            lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in chunks]
            columns[name] = np.concatenate(values), np.concatenate(lengths)
        return columns


def _table(path: str) -> Any:
    """Reads and validates an Arrow file, so that all of its values can be accessed safely."""
    pa = require_pyarrow()
    data = _read(path)
    try:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
        table.validate(full=True)
        table.schema.names  # noqa: B018 - Raises an error if a name isn't UTF-8.
    except MemoryError as error:
        raise OutOfMemoryError(f"not enough memory for an Arrow file: {error} (file {path})", path=path) from None
    except Exception as error:  # pyarrow also raises OSError, KeyError, UnicodeDecodeError, ...
        raise in_file(MalformedFileError, path, f"it isn't an Arrow file, or it is damaged: {error}") from None
    return table


def _check_table(path: str, table: Any, scalars: list[str], lists: list[str]) -> None:
    """Rejects a table with missing columns, wrong types, or nulls."""
    types, wanted = require_pyarrow().types, [*scalars, *lists]
    if any(table.schema.names.count(name) != 1 or table[name].null_count for name in wanted):
        raise wrong(path, f"it doesn't have the columns {', '.join(wanted)}, or some of their values are null")
    if not table.num_rows:
        raise wrong(path, "it is empty")
    for name in scalars:
        kind = table.schema.field(name).type
        if not any(
            is_such(kind)
            for is_such in (
                types.is_integer,
                types.is_string,
                types.is_large_string,
                types.is_binary,
                types.is_large_binary,
            )
        ):
            raise wrong(path, f"the type of its column {name} is {kind}, not integers, strings or bytes")
    for name in lists:
        kind = table.schema.field(name).type
        if not (types.is_list(kind) or types.is_large_list(kind)) or not types.is_uint32(kind.value_type):
            raise wrong(path, f"the type of its column {name} is {kind}, not lists of uint32")
        if any(chunk.flatten().null_count for chunk in table[name].chunks):
            raise wrong(path, f"some values of its column {name} are null")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise in_file(MissingFileError, path, "there is no such file") from None
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: str, error: OSError) -> StorageError:
    """Returns the error for a file that the operating system can't read."""
    refused = in_file(StorageError, path, f"it can't be read: {error.strerror or error}")
    refused.errno = error.errno
    return refused
