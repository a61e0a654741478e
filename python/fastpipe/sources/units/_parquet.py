"""Parquet files: their row groups are units."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, Unpack

from fastpipe._arguments import flag
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.sources.files._partition_columns import Partitioning, Partitions, checked_partitioning
from fastpipe.sources.files._paths import Paths
from fastpipe.sources.units._data import threads_of
from fastpipe.sources.units._files import File, Files, FileUnits, Positioned, read_files, storage_errors
from fastpipe.sources.units._schemas import common_schema
from fastpipe.specs import Spec

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet


def uncounted(metadata: Any, schema: pa.Schema) -> set[str]:
    """Columns with null counts that leave nulls out.

    pyarrow doesn't count the nulls of structs around a dictionary. A file without Arrow's schema doesn't say what was a
    dictionary: any text in a struct may have been one.
    """
    import pyarrow as pa

    types = pa.types
    says = b"ARROW:schema" in (metadata.metadata or {})
    if not says and not metadata.created_by.startswith("parquet-cpp-arrow"):
        return set()

    def may_be(kind: pa.DataType) -> bool:
        text = types.is_string(kind) or types.is_binary(kind)
        below = (may_be(kind.field(i).type) for i in range(kind.num_fields))
        return types.is_dictionary(kind) or (text and not says) or any(below)

    return {field.name for field in schema if types.is_nested(field.type) and may_be(field.type)}


def row_counts(metadata: Any) -> list[int]:
    """The rows of each row group of a file.

    Raises:
        pyarrow.ArrowInvalid: if a number is negative, or they don't add up to the file's.
    """
    import pyarrow as pa

    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    for group, number in enumerate(rows):
        if number < 0:
            raise pa.ArrowInvalid(f"row group {group} has {number} rows, as the file's footer says")
    if sum(rows) != metadata.num_rows:
        raise pa.ArrowInvalid(
            f"the row groups have {sum(rows)} rows together, and the file {metadata.num_rows}, as its footer says"
        )
    return rows


class _Unread(Positioned):
    """A file of some size that isn't read."""

    def read(self, size: int = -1) -> bytes:
        raise _Reached


class _Reached(Exception):
    """The bytes of a file would be read now."""


def check_chunks(metadata: Any, size: int) -> None:
    """Looks at the metadata of all column chunks as a read does, which raises what is wrong with it.

    Where pyarrow looks at the metadata of a damaged chunk outside of a read, it ends the process.
    """
    import pyarrow as pa
    import pyarrow.parquet

    if metadata.num_row_groups == 0:
        return
    file = pyarrow.parquet.ParquetFile(pa.PythonFile(_Unread(size), "r"), metadata=metadata, pre_buffer=True)
    with contextlib.suppress(_Reached):
        file.read_row_groups(range(metadata.num_row_groups), use_threads=False)


# Footers that are read at once.
_OPENED_AT_ONCE = 8

# Bytes of a column chunk that are read at a time, where row groups are read in slices.
_BUFFER = 1 << 20

# Bytes of the length of a string outside of a dictionary.
_LENGTH = 4

# Bytes that a value of no fixed size is taken to have at least.
_VALUE = 16


class ParquetUnits(FileUnits):
    """The row groups of Parquet files, as a source (see `Units`).

    Args:
        files: the file system.
        found: the files on it.
        columns: the columns that are read; None for all.
        hive: whether folders such as `year=2026` are columns.
        parallel: whether columns of a slice are decoded at the same time.
        checksums: whether pages are held against their checksums, where they have some.
    """

    suffixes = (".parquet", ".pq")

    def __init__(
        self,
        files: Files,
        found: list[File],
        columns: list[str] | None = None,
        *,
        hive: bool,
        parallel: bool,
        checksums: bool = False,
    ) -> None:
        super().__init__(files, found, columns)
        import pyarrow as pa

        self._hive, self._parallel, self._checksums = hive, parallel, checksums
        with concurrent.futures.ThreadPoolExecutor(min(_OPENED_AT_ONCE, len(found))) as pool:
            opened = list(pool.map(self._open, found))
        self._metadata: list[Any] = [metadata for metadata, _, _ in opened]
        self._schemas = [schema for _, schema, _ in opened]
        counts = [rows for _, _, rows in opened]
        schemas = [metadata.schema for metadata in self._metadata]
        self._physical = [[schema.column(i).physical_type for i in range(len(schema))] for schema in schemas]
        paths = [[schema.column(i).path for i in range(len(schema))] for schema in schemas]
        # Of each file, to which column each leaf belongs; and the numbers of leaves by their paths.
        self._leaves = [[path.partition(".")[0] for path in each] for each in paths]
        self._numbers = [{path: i for i, path in enumerate(each)} for each in paths]
        stored = {name for schema in self._schemas for name in schema.names}
        partitions = Partitions([file.path for file in found] if hive else [], stored)
        self._uncounted = [
            uncounted(metadata, schema) for metadata, schema in zip(self._metadata, self._schemas, strict=True)
        ]
        self._partitions = partitions.found
        kinds = {name: pa.int64() if whole else pa.string() for name, whole in partitions.integers.items()}
        self._groups = [
            (number, group) for number, rows in enumerate(counts) for group in range(len(rows)) if rows[group] > 0
        ]
        self.rows = [counts[number][group] for number, group in self._groups]
        self._choose(self._whole_schema(kinds), self._certain())

    def _open(self, file: File) -> tuple[Any, pa.Schema, list[int]]:
        """The metadata and the schema of a file, and the rows of its row groups."""
        import pyarrow.parquet

        with storage_errors(file.path), self._storage.open(file.path) as source:
            metadata = pyarrow.parquet.read_metadata(source)
            rows = row_counts(metadata)
            check_chunks(metadata, file.size)
            return metadata, metadata.schema.to_arrow_schema(), rows

    def _whole_schema(self, values: dict[str, pa.DataType]) -> pa.Schema:
        """The schema of all files, which must be one, with columns for folders."""
        import pyarrow as pa

        first = common_schema([file.path for file in self._found], self._schemas)
        fields = list(first)
        for name, kind in values.items():
            some = any(partition.get(name) is None for partition in self._partitions)
            fields.append(pa.field(name, kind, nullable=some))
        return pa.schema(fields, metadata=first.metadata)

    def _certain(self) -> set[str]:
        """Columns in which there is no null at any level, as the statistics of all row groups say."""
        certain: dict[str, bool] = {}
        for number, group in self._groups:
            for name, column in self._chunks(number, group):
                if certain.get(name) is False:
                    continue
                statistics = column.statistics
                known = statistics is not None and statistics.has_null_count
                certain[name] = known and statistics.null_count == 0 and name not in self._uncounted[number]
        return {name for name, all_there in certain.items() if all_there}

    def _chunks(self, number: int, group: int) -> list[tuple[str, Any]]:
        """What is known of the column chunks of a row group, and the columns that they belong to."""
        import pyarrow as pa

        row_group, kinds = self._metadata[number].row_group(group), self._physical[number]
        with storage_errors(self._found[number].path):
            columns = [row_group.column(i) for i in range(row_group.num_columns)]
            # Where they differ, pyarrow ends the process when it is asked for statistics.
            if any(column.physical_type != kind for column, kind in zip(columns, kinds, strict=True)):
                raise pa.ArrowInvalid(f"a column of row group {group} is of another type than the schema says")
            return list(zip(self._leaves[number], columns, strict=True))

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """A guess of what units take in memory: values of a fixed size, and what others take in the file, decompressed.

        It is made when it is asked for: of the columns that are read alone, where there may be many.
        """
        widths = {field.name: _width(field.type) for field in self.schema}
        fixed = sum(width for width in widths.values() if width is not None)
        # Asking for a column of a row group takes microseconds, and there may be many.
        others = {name for name, width in widths.items() if width is None}
        asked = [[i for i, name in enumerate(leaves) if name in others] for leaves in self._leaves]
        sizes: list[int] = []
        for (number, group), rows in zip(self._groups, self.rows, strict=True):
            total = fixed * rows
            if asked[number]:
                row_group = self._metadata[number].row_group(group)
                chunks = (row_group.column(i).total_uncompressed_size for i in asked[number])
                total += sum(max(size, _VALUE * rows) for size in chunks)
            sizes.append(total)
        return sizes

    def _how(self) -> dict[str, Any]:
        return {"hive": self._hive, "parallel": self._parallel, "checksums": self._checksums}

    def select(self, columns: list[str]) -> Self:
        """The same row groups, of which only these columns are read."""
        chosen = super().select(columns)
        for name in ("nbytes", "_texts"):
            chosen.__dict__.pop(name, None)
        return chosen

    def name(self, unit: int) -> str:
        """The row group and its file."""
        number, group = self._groups[unit]
        return f"row group {group} of {self._found[number].path}"

    def fingerprint(self) -> dict[str, Any]:
        """Names without folders, sizes, and numbers of rows and row groups of all files."""
        return {
            "parquet": [
                [os.path.basename(file.path), file.size, metadata.num_rows, metadata.num_row_groups]
                for file, metadata in zip(self._found, self._metadata, strict=True)
            ]
        }

    def read(self, unit: int) -> pa.Table:
        """A row group."""
        number, group = self._groups[unit]
        with storage_errors(self._found[number].path, self.name(unit)), self._opened(number, group) as parquet:
            table = parquet.read_row_group(group, columns=self._stored(number), use_threads=False)
            self._storage.check(self._found[number])
            return self._with_folders(number, table)

    def read_slices(self, unit: int, start: int, rows: int) -> Iterator[pa.Table]:
        """Yields a row group from a row on, `rows` rows at a time, without ever holding all of it."""
        number, group = self._groups[unit]
        with storage_errors(self._found[number].path, self.name(unit)), self._opened(number, group, _BUFFER) as parquet:
            batches = parquet.iter_batches(
                rows, row_groups=[group], columns=self._stored(number), use_threads=self._parallel
            )
            for table in _slices(batches, start, rows):
                self._storage.check(self._found[number])
                yield self._with_folders(number, table)

    @contextlib.contextmanager
    def _opened(self, number: int, group: int, buffer: int = 0) -> Iterator[pyarrow.parquet.ParquetFile]:
        """A file, of which a row group is read; a local one with a buffer of this size for each column."""
        import pyarrow.parquet

        file, is_local = self._found[number], self._storage.is_local
        ranges = () if is_local else self._ranges(number, group)
        with self._storage.open(file.path) as source:
            # pyarrow's own `pre_buffer` reads on threads that the whole process shares, eight by default.
            yield pyarrow.parquet.ParquetFile(
                self._storage.ranged(source, file.size, ranges),
                metadata=self._metadata[number],
                pre_buffer=False,
                buffer_size=buffer if is_local else 0,
                page_checksum_verification=self._checksums,
                read_dictionary=self._in_dictionaries(number, group),
            )

    def _in_dictionaries(self, number: int, group: int) -> list[str]:
        """Columns of strings that a row group has in dictionaries: left there they take pyarrow a fraction of the time.

        A string outside of a dictionary takes four bytes for its length. Where strings are on average shorter than
        that, most are in the dictionary; others would be looked up in it one by one, which takes a multiple.
        """
        numbers, row_group, found = self._numbers[number], self._metadata[number].row_group(group), []
        for name in self._texts:
            if (leaf := numbers.get(name)) is not None:
                chunk = row_group.column(leaf)
                if chunk.has_dictionary_page and chunk.total_uncompressed_size < _LENGTH * chunk.num_values:
                    found.append(name)
        return found

    @functools.cached_property
    def _texts(self) -> list[str]:
        """Columns of strings. It is made when it is asked for: there may be many columns."""
        import pyarrow as pa

        kinds = (pa.string(), pa.binary())
        return [field.name for field in self.schema if field.type in kinds]

    def _ranges(self, number: int, group: int) -> list[tuple[int, int]]:
        """Where the bytes of the wanted columns of a row group are."""
        stored, found = set(self._stored(number)), []
        for name, chunk in self._chunks(number, group):
            if name in stored:
                start = chunk.data_page_offset
                if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
                    start = chunk.dictionary_page_offset
                found.append((start, start + chunk.total_compressed_size))
        return found

    def _folders(self, number: int) -> dict[str, str | None]:
        """The columns that a file's folders stand for."""
        return self._partitions[number] if self._partitions else {}

    def _stored(self, number: int) -> list[str]:
        """The columns that are read from a file."""
        return [name for name in self.schema.names if name not in self._folders(number)]

    def _with_folders(self, number: int, table: pa.Table) -> pa.Table:
        import pyarrow as pa

        for name, text in self._folders(number).items():
            if name in self.schema.names:
                kind = self.schema.field(name).type
                value = pa.scalar(None, kind) if text is None else pa.scalar(text).cast(kind)
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table


def _slices(batches: Iterator[pa.RecordBatch], start: int, rows: int) -> Iterator[pa.Table]:
    """Cuts record batches, without their first `start` rows, into tables of `rows` rows; the last may have fewer."""
    import pyarrow as pa

    kept: list[pa.RecordBatch] = []
    missing, passed = rows, start
    for batch in batches:
        rest = batch.slice(min(passed, len(batch)))
        passed -= len(batch) - len(rest)
        while len(rest) > 0:
            kept.append(rest[:missing])
            rest, missing = rest[len(kept[-1]) :], missing - len(kept[-1])
            if missing == 0:
                yield pa.Table.from_batches(kept)
                kept, missing = [], rows
    if kept:
        yield pa.Table.from_batches(kept)


def _width(kind: pa.DataType) -> int | None:
    """Bytes of a value, if all have as many."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        item = _width(kind.value_type)
        return None if item is None else item * kind.list_size
    if pa.types.is_struct(kind):
        parts = [_width(kind.field(i).type) for i in range(kind.num_fields)]
        return None if None in parts else sum(part for part in parts if part is not None)
    try:
        return -(-int(kind.bit_width) // 8)
    except (ValueError, AttributeError):
        return None


@takes_options()
def read_parquet(
    source: Paths,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: SupportsIndex,
    filesystem: Any = None,
    partitioning: Partitioning = "hive",
    page_checksum_verification: bool = False,
    num_fetches: SupportsIndex | None = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads Parquet files as batches of NumPy arrays (extra `arrow`).

    Row groups are read and decoded by pyarrow, requested columns only, on threads of their own; rows are gathered from
    them.

    When rows are shuffled, `shuffle_buffer` is as large as 256 MiB of row groups allow, unless it is given. Files with
    smaller row groups (some thousand rows) are mixed better, and faster.

    Args:
        source: a path, a glob (`**` for any depth), a directory (all files below it that end in `.parquet`, else in
            `.pq`), or a list of these, as in `read_avro`.
        features: dict from name to spec, as in `from_arrow`. By default, the specs in the files' metadata if fastpipe
            wrote all of them alike, else what follows from the types, which must be the same in all files: columns have
            `nulls="mask"` unless the files' statistics say that there are no nulls.
        columns: only these, and what is nested in them; at least one. Other columns aren't read.
        batch_size: rows a batch.
        filesystem: where the files are: a file system of `pyarrow.fs` (S3, Google Cloud Storage, HDFS, ...) or fsspec;
            None for local disks.
        partitioning: "hive" makes columns of folders that are named `year=2026`: int64 if all values are such numbers,
            else text. None doesn't.
        page_checksum_verification: whether pages are held against their checksums, in files that have some.
        num_fetches: row groups that are read at once, and requests at once to a file system that isn't local: by
            default as many as `num_threads` on local disks, where that is work, and 8 elsewhere, where it is waiting.
        **options: see `fastpipe.Options`.

    Returns:
        The reader.

    Raises:
        ImportError: if pyarrow isn't installed.
        MissingFileError: if a file isn't there, a glob matches nothing, or a directory holds none.
        MalformedFileError: if a file is damaged or no Parquet file.
        StorageError: if a file can't be read, or was changed since the reader was made.
        SchemaError: if files have different columns, a column isn't there, or a spec doesn't fit its type.
        UnsupportedError: if a wanted column is of a type that isn't read; for URLs without a file system.
        TypeError: if an argument is of the wrong type.
        ValueError: for values out of range, and for arguments that exclude each other.

    Example:
        >>> import fastpipe
        >>> import pyarrow as pa
        >>> import pyarrow.parquet
        >>> pa.parquet.write_table(pa.table({"x": range(5), "y": list("abcde")}), "letters.parquet", row_group_size=2)
        >>> for batch in fastpipe.read_parquet("letters.parquet", batch_size=3):
        ...     print(batch["x"], batch["y"].to_list())
        [0 1 2] ['a', 'b', 'c']
        [3 4] ['d', 'e']
    """
    settings = Settings(read_parquet, batch_size, options)
    hive = checked_partitioning(partitioning)
    return read_files(
        ParquetUnits,
        settings,
        source,
        features=features,
        columns=columns,
        filesystem=filesystem,
        num_fetches=num_fetches,
        hive=hive,
        checksums=flag("page_checksum_verification", page_checksum_verification),
        parallel=threads_of(settings) > 1,
    )
