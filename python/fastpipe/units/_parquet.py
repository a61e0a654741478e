"""Parquet files, whose row groups are units."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

from fastpipe._arguments import flag
from fastpipe._files._in_memory_files import Source
from fastpipe._files._partition_columns import Partitioning, Partitions, checked_partitioning
from fastpipe._reader.condition_bounds import Bounds
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.specs import Spec
from fastpipe.specs._requests import FeatureRequest
from fastpipe.units._data import threads_of
from fastpipe.units._files import File, Files, FileUnits, Positioned, read_files, storage_errors
from fastpipe.units._parquet_statistics import Statistics, bounds_of, folder_statistics, stored_statistics
from fastpipe.units._schemas import CommonSchema

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet


def uncounted(metadata: Any, schema: pa.Schema) -> set[str]:
    """Returns the columns whose null counts are incomplete.

    pyarrow doesn't count the nulls of structs that contain a dictionary. A file without an Arrow schema doesn't mark
    dictionaries, so any text in a struct may have been a dictionary.
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
    """Returns the number of rows of each row group of a file.

    Raises:
        pyarrow.ArrowInvalid: If a count is negative, or the counts don't add up to the number of rows of the file.
    """
    import pyarrow as pa

    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    for group, number in enumerate(rows):
        if number < 0:
            raise pa.ArrowInvalid(f"row group {group} has {number} rows according to the file's footer")
    if sum(rows) != metadata.num_rows:
        raise pa.ArrowInvalid(
            f"the row groups have {sum(rows)} rows in total, but the file has {metadata.num_rows}, as its footer says"
        )
    return rows


class _Unread(Positioned):
    """A file of a given size whose bytes are never read. Reading it raises `ZeroDivisionError`.

    pyarrow keeps that error until the process ends. A built-in function raises it, because the error of a Python
    function would refer to all frames of the call, and their variables.
    """

    read: Any = (0).__rfloordiv__


def check_chunks(metadata: Any, size: int) -> None:
    """Checks the metadata of all column chunks like a read does, and raises the same errors.

    If pyarrow accesses the metadata of a damaged chunk outside of a read, it terminates the process.
    """
    import pyarrow as pa
    import pyarrow.parquet

    if metadata.num_row_groups == 0:
        return
    file = pyarrow.parquet.ParquetFile(pa.PythonFile(_Unread(size), "r"), metadata=metadata, pre_buffer=True)
    try:
        file.read_row_groups(range(metadata.num_row_groups), use_threads=False)
    except ZeroDivisionError as error:  # pyarrow has checked the metadata and begins to read the bytes of the file.
        error.__traceback__ = None


# The number of footers that are read concurrently.
_OPENED_AT_ONCE = 8

# Bytes of a column chunk per read when row groups are read in slices.
_BUFFER = 1 << 20

# Bytes that store the length of a string outside of a dictionary.
_LENGTH = 4

# Minimum estimate, in bytes, of a value without a fixed size.
_VALUE = 16


class ParquetUnits(FileUnits):
    """The row groups of Parquet files, as a source (see `Units`).

    Args:
        files: The file system.
        found: The files on it.
        columns: The names of the columns to read; None for all.
        hive: Whether folders such as `year=2026` are read as columns.
        parallel: Whether the columns of a slice are decoded in parallel.
        checksums: Whether pages are verified with their checksums, if they have checksums.
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
        # For each file, the column of each leaf, and the index of each leaf by its path.
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
        self.unit_files = [number for number, _ in self._groups]
        self._choose(self._whole_schema(kinds), self._certain())

    def _open(self, file: File) -> tuple[Any, pa.Schema, list[int]]:
        """Returns the metadata and the schema of a file, and the number of rows of each row group."""
        import pyarrow.parquet

        with storage_errors(file.path), self._storage.open(file) as source:
            metadata = pyarrow.parquet.read_metadata(source)
            rows = row_counts(metadata)
            check_chunks(metadata, file.size)
            return metadata, metadata.schema.to_arrow_schema(), rows

    def _whole_schema(self, values: dict[str, pa.DataType]) -> pa.Schema:
        """Returns the schema of the columns that are the same in all files, followed by the partition columns."""
        import pyarrow as pa

        self._common = CommonSchema(self.files, self._schemas)
        first = self._common.schema
        fields = list(first)
        for name, kind in values.items():
            some = any(partition.get(name) is None for partition in self._partitions)
            fields.append(pa.field(name, kind, nullable=some))
        return pa.schema(fields, metadata=first.metadata)

    def _certain(self) -> set[str]:
        """Returns the columns without nulls at any level, according to the statistics of all row groups."""
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
        """Returns the metadata of the column chunks of a row group, each with the name of its column."""
        import pyarrow as pa

        row_group, kinds = self._metadata[number].row_group(group), self._physical[number]
        with storage_errors(self._found[number].path):
            columns = [row_group.column(i) for i in range(row_group.num_columns)]
            # If the types differ, pyarrow terminates the process when statistics are read.
            if any(column.physical_type != kind for column, kind in zip(columns, kinds, strict=True)):
                raise pa.ArrowInvalid(f"the type of a column of row group {group} differs from the schema")
            return list(zip(self._leaves[number], columns, strict=True))

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """Estimated bytes of each unit in memory: fixed-size values, and the decompressed size of other columns.

        It is computed on first access, only for the columns that are read, because a file may have many columns.
        """
        widths = {field.name: _width(field.type) for field in self.schema}
        fixed = sum(width for width in widths.values() if width is not None)
        # Metadata of a column chunk takes microseconds to read, and there may be many chunks.
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
        """Returns the same row groups with only the given columns."""
        chosen = super().select(columns)
        for name in ("nbytes", "_texts"):
            chosen.__dict__.pop(name, None)
        return chosen

    def name(self, unit: int) -> str:
        """Returns the name of a unit: its row group and file."""
        return f"row group {self._groups[unit][1]} of {self._file_of(unit)}"

    def _file_of(self, unit: int) -> str:
        return self._found[self._groups[unit][0]].path

    def fingerprint(self) -> dict[str, Any]:
        """Returns the identities of all files, and their counts of rows and row groups."""
        return {
            "parquet": [
                [*identity[:2], metadata.num_rows, metadata.num_row_groups, *identity[2:]]
                for identity, metadata in zip(self.identities, self._metadata, strict=True)
            ]
        }

    def read(self, unit: int) -> pa.Table:
        """Reads a row group."""
        number, group = self._groups[unit]
        with storage_errors(self._found[number].path, self.name(unit)), self._opened(number, group) as parquet:
            table = parquet.read_row_group(group, columns=self._stored(number), use_threads=False)
            self._storage.check(self._found[number])
            return self._with_folders(number, table)

    def read_slices(self, unit: int, start: int, rows: int) -> Iterator[pa.Table]:
        """Yields a row group from row `start`, `rows` rows at a time, without holding all of it in memory."""
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
        """Opens a file to read a row group. `buffer` is the size of each column's buffer for a local file."""
        import pyarrow.parquet

        file, is_local = self._found[number], self._storage.is_local
        ranges = () if is_local else self._ranges(number, group)
        with self._storage.open(file) as source:
            # pyarrow's `pre_buffer` reads with threads that the whole process shares, by default eight.
            yield pyarrow.parquet.ParquetFile(
                self._storage.ranged(source, file.size, ranges),
                metadata=self._metadata[number],
                pre_buffer=False,
                buffer_size=buffer if is_local else 0,
                page_checksum_verification=self._checksums,
                read_dictionary=self._in_dictionaries(number, group),
            )

    def _in_dictionaries(self, number: int, group: int) -> list[str]:
        """Returns the string columns that pyarrow should read as dictionaries, which is several times faster for them.

        A string outside of a dictionary takes four bytes for its length. If strings are shorter than that on average,
        most strings are in the dictionary. Otherwise, pyarrow would look up the other strings one by one, which is
        several times slower.
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
        """The string columns, computed on first access because there may be many columns."""
        import pyarrow as pa

        kinds = (pa.string(), pa.binary())
        return [field.name for field in self.schema if field.type in kinds]

    def _ranges(self, number: int, group: int) -> list[tuple[int, int]]:
        """Returns the byte ranges of the requested columns of a row group."""
        stored, found = set(self._stored(number)), []
        for name, chunk in self._chunks(number, group):
            if name in stored:
                start = chunk.data_page_offset
                if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
                    start = chunk.dictionary_page_offset
                found.append((start, start + chunk.total_compressed_size))
        return found

    def _bounds(self, name: str, spec: Spec) -> Bounds | None:
        """Returns the bounds of a feature in each row group, from statistics or folders; None if they are unknown."""
        path = spec.field or name
        return bounds_of(spec, (self._statistics(number, group, path) for number, group in self._groups))

    def _statistics(self, number: int, group: int, path: str) -> Statistics | None:
        """Returns what a file says about a column in a row group."""
        folders, schema = self._folders(number), self._schemas[number]
        if path in folders:
            return folder_statistics(self.schema.field(path).type, folders[path])
        # The path of a nested field has dots.
        leaf = self._numbers[number].get(path)
        if leaf is None or "." in path or schema.get_field_index(path) < 0:
            return None
        row_group = self._metadata[number].row_group(group)
        return stored_statistics(schema.field(path).type, row_group.column(leaf).statistics, row_group.num_rows)

    def _folders(self, number: int) -> dict[str, str | None]:
        """Returns a file's partition columns and their values."""
        return self._partitions[number] if self._partitions else {}

    def _stored(self, number: int) -> list[str]:
        """Returns the columns that are read from the file itself."""
        return [name for name in self.schema.names if name not in self._folders(number)]

    def with_texts(self, names: Container[str]) -> Self:
        """Returns the same units with partition columns of these names as text. Folders of integers have text, too."""
        import pyarrow as pa

        folders = self._partitions[0] if self._partitions else {}
        changed = [name for name in self.schema.names if name in folders and name in names]
        if not changed:
            return self
        found = copy.copy(self)
        schema = self.schema
        for name in changed:
            place = schema.get_field_index(name)
            schema = schema.set(place, schema.field(place).with_type(pa.string()))
        found._choose(schema, self._certain_columns)
        return found

    def _with_folders(self, number: int, table: pa.Table) -> pa.Table:
        import pyarrow as pa

        for name, text in self._folders(number).items():
            if name in self.schema.names:
                kind = self.schema.field(name).type
                value = pa.scalar(None, kind) if text is None else pa.scalar(text).cast(kind)
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table


def _slices(batches: Iterator[pa.RecordBatch], start: int, rows: int) -> Iterator[pa.Table]:
    """Skips `start` rows of record batches, and yields the others in tables of `rows` rows. The last may have fewer."""
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
    """Returns the bytes of a value if all values have the same size, otherwise None."""
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
    source: Source,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    batch_size: int,
    filesystem: Any = None,
    partitioning: Partitioning = "hive",
    page_checksum_verification: bool = False,
    num_fetches: int | None = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads Parquet files as batches of NumPy arrays (extra `arrow`).

    pyarrow reads and decodes the row groups, only with the requested columns, on separate threads. Rows are then
    gathered from the row groups.

    When rows are shuffled, `shuffle_buffer` defaults to the rows of 256 MiB of row groups. Smaller row groups (a few
    thousand rows) are mixed better and faster.

    Args:
        source: A path, a glob (`**` for any depth), a directory (all files below it that end in `.parquet`, or else in
            `.pq`), a contiguous buffer with the bytes of a file, a binary file object, which is read immediately to its
            end, or a list of these. Directories and globs skip names that begin with `_` or `.`, and also empty files,
            with a warning.
        features: The spec of each feature, by name: the path of a column, with dots between the names of nested fields.
            By default, features come from the specs in the files' metadata if fastpipe wrote all files with the same
            specs, or else from the column types, which must be the same in all files: lists are ragged, fixed-size
            lists are dense, and other structs have a feature for each field. Columns have `on_null="mask"` unless the
            files' statistics show that there are no nulls.
        columns: The columns to read: a list of at least one name, or one name as a string. A name includes everything
            nested in it. Other columns aren't read from storage. Defaults to None: all columns.
        overrides: Specs that replace some of the specs that `features` has by default, by name. Not allowed with
            `features`. Defaults to None.
        batch_size: Number of rows per batch.
        filesystem: The file system of the paths, from `pyarrow.fs` (S3, Google Cloud Storage, HDFS, ...) or fsspec.
            Defaults to None: local disks.
        partitioning: "hive" (the default) reads folders named like `year=2026` as columns: int64 if all values are
            integers, otherwise text. None ignores the names of folders.
        page_checksum_verification: Whether to verify pages with their checksums, in files with checksums. Defaults to
            False.
        num_fetches: The number of row groups that are read concurrently, and of concurrent requests to a remote file
            system, 1 to 1024. Defaults to `num_threads` for local disks, where reading is mostly decoding, and to 8 for
            other file systems, where it is mostly waiting.
        **options: See `fastpipe.typing.Options`.

    Returns:
        The reader.

    Raises:
        ImportError: If pyarrow isn't installed.
        MissingFileError: If a file does not exist, a glob matches nothing, or a directory contains no such file.
        MalformedFileError: If a file is damaged or isn't a Parquet file.
        StorageError: If a file can't be read, or changed after the reader was created.
        SchemaError: If a requested column isn't the same in all files or does not exist, a spec doesn't fit its type,
            or `overrides` names a column that isn't read.
        UnsupportedError: If the type of a requested column is not supported, or a URL has no `filesystem`.
        TypeError: If an argument has the wrong type.
        ValueError: If arguments are out of range or exclude each other.

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
        request=FeatureRequest.of(features, columns, overrides),
        filesystem=filesystem,
        num_fetches=num_fetches,
        hive=hive,
        checksums=flag("page_checksum_verification", page_checksum_verification),
        parallel=threads_of(settings) > 1,
    )
