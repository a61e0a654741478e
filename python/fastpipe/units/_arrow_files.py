"""Arrow IPC files (Feather), whose record batches are units.

Record batches and their row counts are found without reading columns. pyarrow reports neither before it reads a record
batch. The format stores both at fixed positions (Arrow columnar format, "IPC File Format"; the flatbuffers of
`File.fbs` and `Message.fbs`).
"""

from __future__ import annotations

import concurrent.futures
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from fastpipe._files._in_memory_files import Source
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.errors import MalformedFileError, UnsupportedError, in_file
from fastpipe.specs import Spec
from fastpipe.specs._requests import FeatureRequest
from fastpipe.units._files import File, Files, FileUnits, read_files, storage_errors
from fastpipe.units._schemas import CommonSchema

if TYPE_CHECKING:
    import pyarrow as pa

# The footer's size and the magic bytes.
_END = struct.Struct("<i6s")
_MAGIC = b"ARROW1"

_BLOCK = struct.Struct("<qi4xq")
_CONTINUATION = 0xFFFFFFFF

# Indices of fields in their flatbuffer tables.
_RECORD_BATCHES, _HEADER, _LENGTH = 3, 2, 0


class Block(NamedTuple):
    """Byte range of a record batch in a file.

    Attributes:
        start: The offset of the first byte.
        metadata: The size of the metadata, which comes first.
        end: The offset after the last byte.
    """

    start: int
    metadata: int
    end: int


def footer_size(tail: bytes) -> int:
    """Returns the size of a footer and the bytes after it, for a file that ends in `tail`.

    Raises:
        pyarrow.ArrowInvalid: If this isn't an Arrow file, or it is damaged.
    """
    size, magic = _END.unpack(tail[-_END.size :].rjust(_END.size))
    if magic != _MAGIC or size <= 0:
        raise _damaged("the file doesn't end like an Arrow file")
    return int(size) + _END.size


def blocks(footer: bytes, size: int) -> list[Block]:
    """Returns the record batches of a file of `size` bytes from its footer and the bytes after it.

    Raises:
        pyarrow.ArrowInvalid: If the footer is damaged.
    """
    table = _Table(footer, _u32(footer, 0))
    at = table.target(_RECORD_BATCHES)
    found = []
    for i in range(0 if at is None else _u32(footer, at)):
        start, metadata, body = _unpacked(_BLOCK, footer, at + 4 + i * _BLOCK.size if at is not None else 0)
        if start < 0 or metadata <= 8 or body < 0 or start + metadata + body > size:
            raise _damaged(f"record batch {i} isn't within the file")
        found.append(Block(start, metadata, start + metadata + body))
    return found


def row_count(metadata: bytes) -> int:
    """Returns the number of rows of a record batch from its metadata.

    Raises:
        pyarrow.ArrowInvalid: If the metadata is damaged.
    """
    message = metadata[8 if _u32(metadata, 0) == _CONTINUATION else 4 :]
    header = _Table(message, _u32(message, 0)).target(_HEADER)
    if header is None:
        raise _damaged("a record batch has no header")
    length = _Table(message, header).field(_LENGTH)
    number = 0 if length is None else _unpacked(struct.Struct("<q"), message, length)[0]
    if not 0 <= number < 2**32:
        raise _damaged(f"a record batch has {number} rows")
    return int(number)


def _damaged(reason: str) -> Exception:
    """Returns the error that pyarrow raises for a damaged file."""
    import pyarrow as pa

    error: Exception = pa.ArrowInvalid(reason)
    return error


class _Table:
    """A table in a flatbuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - _unpacked(struct.Struct("<i"), data, at)[0]
        self._size = _u16(data, self._fields)

    def field(self, number: int) -> int | None:
        """Returns the position of a field; None if it has its default."""
        place = 4 + 2 * number
        offset = _u16(self._data, self._fields + place) if place < self._size else 0
        return self._at + offset if offset else None

    def target(self, number: int) -> int | None:
        """Returns the position of the table or vector that a field refers to; None if the field has its default."""
        field = self.field(number)
        return None if field is None else field + _u32(self._data, field)


def _unpacked(form: struct.Struct, data: bytes, at: int) -> tuple[int, ...]:
    if not 0 <= at <= len(data) - form.size:
        raise _damaged("the metadata refers to bytes outside of it")
    return form.unpack_from(data, at)


def _u16(data: bytes, at: int) -> int:
    return _unpacked(struct.Struct("<H"), data, at)[0]


def _u32(data: bytes, at: int) -> int:
    return _unpacked(struct.Struct("<I"), data, at)[0]


# Local files are scanned for columns with nulls if their total size is at most this many bytes.
_LOOKED_AT = 256 << 20

# The number of files that are opened concurrently.
_OPENED_AT_ONCE = 8

# Bytes at the end of a file that are read for its footer. Few footers are larger.
_TAIL = 64 << 10

# Record batches whose rows are counted together. If they are small, some columns are read along with their metadata.
_COUNTED_AT_ONCE = 256

_OLD_FEATHER = b"FEA1"
_STREAM = b"\xff\xff\xff\xff"


class ArrowFileUnits(FileUnits):
    """The record batches of Arrow IPC files, as a source (see `Units`).

    Args:
        files: The file system.
        found: The files on it.
        columns: The names of the columns to read; None for all.
    """

    suffixes = (".arrow", ".feather", ".ipc")

    def __init__(self, files: Files, found: list[File], columns: list[str] | None = None) -> None:
        super().__init__(files, found, columns)
        look = files.is_local and sum(file.size for file in found) <= _LOOKED_AT
        with concurrent.futures.ThreadPoolExecutor(1 if files.is_local else min(_OPENED_AT_ONCE, len(found))) as pool:
            self._opened = list(pool.map(lambda file: self._open(file, look=look), found))
        self._batches = [
            (number, i) for number, opened in enumerate(self._opened) for i, rows in enumerate(opened.rows) if rows > 0
        ]
        self.rows = [self._opened[number].rows[i] for number, i in self._batches]
        self.unit_files = [number for number, _ in self._batches]
        self._common = CommonSchema(self.files, [opened.schema for opened in self._opened])
        certain = set.intersection(*(opened.certain for opened in self._opened))
        self._choose(self._common.schema, certain)

    def _open(self, file: File, *, look: bool) -> _Opened:
        """Opens a file and its record batches: with `look`, they are scanned for nulls, otherwise only counted."""
        import pyarrow.ipc

        with storage_errors(file.path), self._storage.open(file) as source:
            _check_magic(file.path, source)
            if not look:
                return self._counted(file, source)
            reader = pyarrow.ipc.open_file(source)
            schema = reader.schema
            if len(schema) == 0:
                return _Opened(schema, [], set(), [], b"")
            readable = [i for i, field in enumerate(schema) if _has_arrays(field.type)]
            rows, nulls = [], set()
            for i in range(reader.num_record_batches):
                batch = reader.get_batch(i)
                # Checks that buffers have the right lengths, which only pyarrow can do.
                batch.validate()
                rows.append(batch.num_rows)
                nulls |= {schema.names[i] for i in readable if _nulls(batch.column(i))}
            return _Opened(schema, rows, set(schema.names) - nulls, [], b"")

    def _counted(self, file: File, source: pa.NativeFile) -> _Opened:
        """Returns the schema of a file and the row counts of its record batches, without reading columns."""
        import pyarrow.ipc

        tail = source.read_at(min(file.size, _TAIL), max(file.size - _TAIL, 0))
        if (size := footer_size(tail)) > len(tail):
            tail = source.read_at(min(file.size, size), max(file.size - size, 0))
        found = blocks(tail[-size:], file.size)
        known = [(file.size - len(tail), tail)]
        schema = pyarrow.ipc.open_file(self._storage.ranged(source, file.size, (), known)).schema
        rows = []
        for first in range(0, len(found), _COUNTED_AT_ONCE):
            some = found[first : first + _COUNTED_AT_ONCE]
            metadata = self._storage.ranged(
                source, file.size, [(block.start, block.start + block.metadata) for block in some]
            )
            for block in some:
                metadata.seek(block.start)
                rows.append(row_count(metadata.read(block.metadata)))
        return _Opened(schema, rows, set(), found, tail)

    def name(self, unit: int) -> str:
        """Returns the name of a unit: its record batch and file."""
        return f"record batch {self._batches[unit][1]} of {self._file_of(unit)}"

    def _file_of(self, unit: int) -> str:
        return self._found[self._batches[unit][0]].path

    def fingerprint(self) -> dict[str, Any]:
        """Returns the identities of all files."""
        return {"arrow": self.identities}

    def read(self, unit: int) -> pa.RecordBatch:
        """Reads a record batch."""
        import pyarrow.ipc

        number, batch = self._batches[unit]
        file, opened = self._found[number], self._opened[number]
        fields = [opened.schema.names.index(name) for name in self.schema.names]
        with storage_errors(file.path, self.name(unit)):
            options = pyarrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            with self._storage.open(file) as source:
                ranged = self._storage.ranged(
                    source, file.size, self._ranges(opened, batch, fields), opened.known(file)
                )
                table = pyarrow.ipc.open_file(ranged, options=options).get_batch(batch)
            # Checks that buffers have the right lengths, which only pyarrow can do.
            table.validate()
            self._storage.check(file)
        return table

    def _ranges(self, opened: _Opened, batch: int, fields: list[int]) -> list[tuple[int, int]]:
        """Returns the byte ranges to read in advance: the record batch if all columns are requested, else metadata."""
        if not opened.blocks:
            return []
        block = opened.blocks[batch]
        whole = len(fields) == len(opened.schema)
        return [(block.start, block.end if whole else block.start + block.metadata)]


class _Opened(NamedTuple):
    """An open file.

    Attributes:
        schema: The file's own schema.
        rows: The number of rows of each record batch.
        certain: The columns that contain no nulls, according to a scan.
        blocks: The byte ranges of the record batches, if they were read from the footer.
        tail: The last bytes of the file, including its footer; empty if they aren't kept.
    """

    schema: pa.Schema
    rows: list[int]
    certain: set[str]
    blocks: list[Block]
    tail: bytes

    def known(self, file: File) -> list[tuple[int, bytes]]:
        """Returns the kept bytes with the offset of the first byte."""
        return [(file.size - len(self.tail), self.tail)] if self.tail else []


def _has_arrays(kind: pa.DataType) -> bool:
    """Returns whether pyarrow has arrays of a type. It lacks intervals of months, and of days and milliseconds."""
    import pyarrow as pa

    if kind.id in (pa.lib.Type_INTERVAL_MONTHS, pa.lib.Type_INTERVAL_DAY_TIME):
        return False
    return all(_has_arrays(kind.field(i).type) for i in range(kind.num_fields))


def _nulls(column: pa.Array) -> bool:
    """Returns whether a column contains nulls at any level."""
    import pyarrow as pa

    if column.null_count > 0:
        return True
    kind, types = column.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _nulls(column.storage)
    if types.is_dictionary(kind):
        return _nulls(column.dictionary)
    if types.is_struct(kind):
        return any(_nulls(column.field(i)) for i in range(kind.num_fields))
    if types.is_map(kind):
        return _nulls(column.keys) or _nulls(column.items)
    # Lists, list views and run ends.
    if hasattr(column, "values"):
        return _nulls(column.values)
    return bool(kind.num_fields > 0)


def _check_magic(path: str, source: pa.NativeFile) -> None:
    head = source.read(8)
    source.seek(0)
    if head.startswith(_MAGIC):
        return
    if head.startswith(_OLD_FEATHER):
        reason = "this is a Feather file of version 1: read it with pyarrow.feather.read_table, and use from_arrow"
        raise in_file(UnsupportedError, path, reason)
    if head.startswith(_STREAM):
        reason = (
            "this is an Arrow stream, which can only be read from its beginning: "
            "from_arrow(pyarrow.ipc.open_stream(path)) reads it into memory, and pyarrow.ipc.new_file writes it as a "
            "file"
        )
        raise in_file(UnsupportedError, path, reason)
    raise in_file(MalformedFileError, path, f"an Arrow file begins with {_MAGIC!r}, but this one with {head[:6]!r}")


@takes_options()
def read_arrow(
    source: Source,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    batch_size: int,
    filesystem: Any = None,
    num_fetches: int | None = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads Arrow IPC files (Feather) as batches of NumPy arrays (extra `arrow`).

    pyarrow reads the record batches, only with the requested columns, on separate threads. Rows are then gathered from
    the record batches. Files aren't mapped into memory, so truncating a file while it is read raises an error and
    doesn't terminate the process.

    When rows are shuffled, `shuffle_buffer` defaults to the rows of 256 MiB of record batches.

    Args:
        source: A path, a glob (`**` for any depth), a directory (all files below it that end in `.arrow`, or else in
            `.feather`, or else in `.ipc`), a contiguous buffer with the bytes of a file, a binary file object, which is
            read immediately to its end, or a list of these. Directories and globs skip names that begin with `_` or
            `.`, and also empty files, with a warning.
        features: The spec of each feature, by name: the path of a column, with dots between the names of nested fields.
            By default, features come from the specs in the files' metadata if fastpipe wrote all files with the same
            specs, or else from the column types, which must be the same in all files: lists are ragged, fixed-size
            lists are dense, and other structs have a feature for each field. In files on local disks or in memory, of
            up to 256 MiB in total, columns that contain nulls have `on_null="mask"`. In other files, all nullable
            columns do.
        columns: The columns to read: a list of at least one name, or one name as a string. A name includes everything
            nested in it. Defaults to None: all columns.
        overrides: Specs that replace some of the specs that `features` has by default, by name. Not allowed with
            `features`. Defaults to None.
        batch_size: Number of rows per batch.
        filesystem: The file system of the paths, from `pyarrow.fs` or fsspec. Defaults to None: local disks.
        num_fetches: The number of record batches that are read concurrently, 1 to 1024. Defaults to `num_threads` for
            local disks, and to 8 for other file systems.
        **options: See `fastpipe.typing.Options`.

    Returns:
        The reader.

    Raises:
        ImportError: If pyarrow isn't installed.
        MissingFileError: If a file does not exist, a glob matches nothing, or a directory contains no such file.
        MalformedFileError: If a file is damaged or isn't an Arrow file.
        StorageError: If a file can't be read, or changed after the reader was created.
        SchemaError: If a requested column isn't the same in all files or does not exist, a spec doesn't fit its type,
            or `overrides` names a column that isn't read.
        UnsupportedError: If a file is a stream or an old Feather file, the type of a requested column is not supported,
            or a URL has no `filesystem`.
        TypeError: If an argument has the wrong type.
        ValueError: If arguments are out of range or exclude each other.

    Example:
        >>> import fastpipe
        >>> import pyarrow as pa
        >>> import pyarrow.feather
        >>> pa.feather.write_feather(pa.table({"x": range(5)}), "numbers.feather")
        >>> [batch["x"].tolist() for batch in fastpipe.read_arrow("numbers.feather", batch_size=3)]
        [[0, 1, 2], [3, 4]]
    """
    settings = Settings(read_arrow, batch_size, options)
    return read_files(
        ArrowFileUnits,
        settings,
        source,
        request=FeatureRequest.of(features, columns, overrides),
        filesystem=filesystem,
        num_fetches=num_fetches,
    )
