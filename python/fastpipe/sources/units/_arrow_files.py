"""Arrow IPC files (Feather): their record batches are units."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, Unpack

from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.errors import MalformedFileError, UnsupportedError
from fastpipe.sources.files._paths import Paths
from fastpipe.sources.units._arrow_blocks import Block, blocks, footer_size
from fastpipe.sources.units._arrow_blocks import rows as count_rows
from fastpipe.sources.units._file_units import FileUnits, read_files
from fastpipe.sources.units._files import File, Files, storage_errors
from fastpipe.sources.units._schemas import common_schema
from fastpipe.specs import Spec

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ArrowFileUnits", "read_arrow"]

# Local files of no more bytes are looked at as a whole to see which columns have nulls.
_LOOKED_AT = 256 << 20

# Files that are opened at once.
_OPENED_AT_ONCE = 8

# Bytes at the end of a file that are read for its footer. Few footers have more.
_TAIL = 64 << 10

# Record batches whose rows are counted at once. If they are small, some of their columns are read with their metadata.
_COUNTED_AT_ONCE = 256

_MAGIC = b"ARROW1"
_OLD_FEATHER = b"FEA1"
_STREAM = b"\xff\xff\xff\xff"


class ArrowFileUnits(FileUnits):
    """The record batches of Arrow IPC files, as a source (see `Units`).

    Args:
        files: the file system.
        found: the files on it.
        columns: the columns that are read; None for all.
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
        common = common_schema(self.files, [opened.schema for opened in self._opened])
        certain = set.intersection(*(opened.certain for opened in self._opened))
        self._choose(common, certain)

    def _open(self, file: File, *, look: bool) -> _Opened:
        """The schema of a file, and its record batches: looked through for nulls, or only counted."""
        import pyarrow.ipc

        with storage_errors(file.path), self._storage.open(file.path) as source:
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
                # Whether buffers are as long as they should be, which nobody else can find out.
                batch.validate()
                rows.append(batch.num_rows)
                nulls |= {schema.names[i] for i in readable if _nulls(batch.column(i))}
            return _Opened(schema, rows, set(schema.names) - nulls, [], b"")

    def _counted(self, file: File, source: pa.NativeFile) -> _Opened:
        """The schema of a file, and the row counts of its record batches. Their columns aren't read."""
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
                rows.append(count_rows(metadata.read(block.metadata)))
        return _Opened(schema, rows, set(), found, tail)

    def name(self, unit: int) -> str:
        """The record batch and its file."""
        number, batch = self._batches[unit]
        return f"record batch {batch} of {self._found[number].path}"

    def fingerprint(self) -> dict[str, Any]:
        """Names without folders, and sizes, of all files."""
        return {"arrow": [[os.path.basename(file.path), file.size] for file in self._found]}

    def read(self, unit: int) -> pa.RecordBatch:
        """A record batch."""
        import pyarrow.ipc

        number, batch = self._batches[unit]
        file, opened = self._found[number], self._opened[number]
        fields = [opened.schema.names.index(name) for name in self.schema.names]
        with storage_errors(file.path, self.name(unit)):
            options = pyarrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            with self._storage.open(file.path) as source:
                ranged = self._storage.ranged(
                    source, file.size, self._ranges(opened, batch, fields), opened.known(file)
                )
                table = pyarrow.ipc.open_file(ranged, options=options).get_batch(batch)
            # Whether buffers are as long as they should be, which nobody else can find out.
            table.validate()
            self._storage.check(file)
        return table

    def _ranges(self, opened: _Opened, batch: int, fields: list[int]) -> list[tuple[int, int]]:
        """Bytes that are read before pyarrow asks for them: all, if all columns are wanted, else the metadata."""
        if not opened.blocks:
            return []
        block = opened.blocks[batch]
        whole = len(fields) == len(opened.schema)
        return [(block.start, block.end if whole else block.start + block.metadata)]


class _Opened(NamedTuple):
    """A file that was opened.

    Attributes:
        schema: its own.
        rows: of each record batch.
        certain: columns that were found to have no nulls.
        blocks: where the record batches are, if that was looked up.
        tail: the last bytes of the file, in which its footer is; empty if they aren't kept.
    """

    schema: pa.Schema
    rows: list[int]
    certain: set[str]
    blocks: list[Block]
    tail: bytes

    def known(self, file: File) -> list[tuple[int, bytes]]:
        """The bytes that are kept, with the place of the first one."""
        return [(file.size - len(self.tail), self.tail)] if self.tail else []


def _has_arrays(kind: pa.DataType) -> bool:
    """Whether pyarrow can make arrays of a type: it has none for intervals of months, or of days and milliseconds."""
    import pyarrow as pa

    if kind.id in (pa.lib.Type_INTERVAL_MONTHS, pa.lib.Type_INTERVAL_DAY_TIME):
        return False
    return all(_has_arrays(kind.field(i).type) for i in range(kind.num_fields))


def _nulls(column: pa.Array) -> bool:
    """Whether there are nulls at any level."""
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
    # Lists and their views, and run ends.
    if hasattr(column, "values"):
        return _nulls(column.values)
    return bool(kind.num_fields > 0)


def _check_magic(path: str, source: pa.NativeFile) -> None:
    head = source.read(8)
    source.seek(0)
    if head.startswith(_MAGIC):
        return
    if head.startswith(_OLD_FEATHER):
        reason = (
            "this is a Feather file of version 1: pyarrow.feather.read_table reads it, and from_arrow takes the table"
        )
        raise UnsupportedError(f"{reason} (file {path})", path=path, reason=reason)
    if head.startswith(_STREAM):
        reason = (
            "this is a stream of Arrow, which can only be read from its beginning: "
            "from_arrow(pyarrow.ipc.open_stream(path)) takes it into memory, and pyarrow.ipc.new_file writes it as a "
            "file"
        )
        raise UnsupportedError(f"{reason} (file {path})", path=path, reason=reason)
    reason = f"an Arrow file begins with {_MAGIC!r}, and this one with {head[:6]!r}"
    raise MalformedFileError(f"{reason} (file {path})", path=path, reason=reason)


@takes_options()
def read_arrow(
    source: Paths,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: SupportsIndex,
    filesystem: Any = None,
    num_fetches: SupportsIndex | None = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads Arrow IPC files (Feather) as batches of NumPy arrays (extra `arrow`).

    Record batches are read by pyarrow, requested columns only, on threads of their own; rows are gathered from them.
    Files aren't mapped: one that is cut short while it is read raises an error, and doesn't end the process.

    When rows are shuffled, `shuffle_buffer` is as large as 256 MiB of record batches allow, unless it is given.

    Args:
        source: a path, a glob, a directory (all files below it that end in `.arrow`, else in `.feather`, else in
            `.ipc`), or a list of these, as in `read_avro`.
        features: dict from name to spec, as in `from_arrow`. By default, the specs in the files' metadata if fastpipe
            wrote all of them alike, else what follows from the types, which must be the same in all files: of local
            files up to 256 MiB, columns have `nulls="mask"` if there are nulls in them; of others, if the schema lets
            them be null.
        columns: only these, and what is nested in them; at least one.
        batch_size: rows a batch.
        filesystem: where the files are: a file system of `pyarrow.fs` or fsspec; None for local disks.
        num_fetches: record batches that are read at once; by default as many as `num_threads` on local disks, else 8.
        **options: see `fastpipe.Options`.

    Returns:
        The reader.

    Raises:
        ImportError: if pyarrow isn't installed.
        MissingFileError: if a file isn't there, a glob matches nothing, or a directory holds none.
        MalformedFileError: if a file is damaged or no Arrow file.
        StorageError: if a file can't be read, or was changed since the reader was made.
        SchemaError: if files have different columns, a column isn't there, or a spec doesn't fit its type.
        UnsupportedError: for streams and old Feather files, for a type that isn't read, for URLs without a file system.
        TypeError: if an argument is of the wrong type.
        ValueError: for values out of range, and for arguments that exclude each other.

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
        features=features,
        columns=columns,
        filesystem=filesystem,
        num_fetches=num_fetches,
    )
