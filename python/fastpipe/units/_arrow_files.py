"""Arrow IPC files (Feather): their record batches are units."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, Unpack

from fastpipe._options import Options, Settings, takes_options
from fastpipe._sources import Paths
from fastpipe.errors import MalformedFileError, UnsupportedError
from fastpipe.reader import Reader
from fastpipe.specs import Spec
from fastpipe.units._file_units import FileUnits, read_files
from fastpipe.units._files import File, Files, storage_errors
from fastpipe.units._schemas import common_schema, without_nulls

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ArrowFileUnits", "read_arrow"]

# Local files of no more bytes are looked at as a whole to see which columns have nulls.
_LOOKED_AT = 256 << 20

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
        self._batches: list[tuple[int, int]] = []
        self.rows: list[int] = []
        look = files.is_local and sum(file.size for file in found) <= _LOOKED_AT
        nulls: set[str] = set()
        schemas = []
        for number, file in enumerate(found):
            with storage_errors(file.path), self._storage.open(file.path) as source:
                schemas.append(self._walk(number, file, source, nulls, look))
        import pyarrow as pa

        self._names = [schema.names for schema in schemas]
        common = common_schema(self.files, schemas)
        fields = [without_nulls(field) if look and field.name not in nulls else field for field in common]
        self._choose(pa.schema(fields, metadata=common.metadata))

    def _walk(self, number: int, file: File, source: pa.NativeFile, nulls: set[str], look: bool) -> pa.Schema:
        """Counts the rows of a file's record batches, and notes which columns have nulls."""
        import pyarrow.ipc

        _check_magic(file.path, source)
        # Rows can be counted by any column: the first alone is read.
        fields = None if look else [0]
        whole = pyarrow.ipc.open_file(source).schema
        if len(whole) == 0:
            return whole
        options = pyarrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        reader = pyarrow.ipc.open_file(source, options=options)
        for i in range(reader.num_record_batches):
            batch = reader.get_batch(i)
            if look:
                # Whether buffers are as long as they should be, which nobody else can find out.
                batch.validate()
            if batch.num_rows > 0:
                self._batches.append((number, i))
                self.rows.append(batch.num_rows)
            if look:
                nulls |= {
                    name for name, column in zip(batch.schema.names, batch.columns, strict=True) if _nulls(column)
                }
        return whole

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
        file = self._found[number]
        fields = [self._names[number].index(name) for name in self.schema.names]
        with storage_errors(file.path, self.name(unit)):
            options = pyarrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            with self._storage.open(file.path) as source:
                table = pyarrow.ipc.open_file(source, options=options).get_batch(batch)
            # Whether buffers are as long as they should be, which nobody else can find out.
            table.validate()
            self._storage.check(file)
        return table


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
