"""Avro container files: as a data set, their reader, and inferring what is in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, SupportsIndex, TypeAlias, Unpack

from fastpipe._arguments import names
from fastpipe._arrow.schema import asked_for
from fastpipe._fastpipe import AvroDataset
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.ordering import digest
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import VERSION
from fastpipe.sources.avro._schemas import AS_WRITTEN, ReaderSchema, Resolution, Unsupported, tell_later, tell_left_out
from fastpipe.sources.files._in_memory_files import Contents, Source, lowered, opened
from fastpipe.sources.files._index_cache import IndexCache
from fastpipe.sources.files._partition_columns import Partitioning, Partitions, checked_partitioning, digests
from fastpipe.specs import Features, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies

_WORDS = SourceWording(
    units="blocks",
    advice={
        "reading": "Storage is the limit: faster disks, or a codec such as zstandard, make it faster; more threads "
        "don't, unless it is far away.",
        "decompressing": "Files written with snappy or zstandard take less than with deflate; so do more threads.",
        "indexing": "Records are looked for before they can be picked. Later epochs remember where they start, up to "
        "16 million records.",
    },
    bound={"decompressing": "decompression-bound"},
    other_digest="the data set has other contents (files: sync markers or blocks), or its files other names or another "
    "order",
)


_Folders: TypeAlias = "list[tuple[str, list[int | str | None]]]"


class Location(NamedTuple):
    """Where a row stands.

    Attributes:
        file: the path of its file.
        block: the number of its block within the file.
        record: its number within the block.
    """

    file: str
    block: int
    record: int


class AvroData:
    """Avro files, opened for a set of features: the `Data` of `read_avro`.

    Args:
        files: their paths, or what lies in memory.
        features: as in `read_avro`.
        index_cache: as in `read_avro`.
        check: is called with the path and the schema, as JSON, of the first file, and of each whose schema is another
            one, before features are held to it. What it raises is raised.
        damaged: is filled with the exceptions of damaged files, of which then the blocks in front of the damage are
            read. They are raised by default.
        resolution: how files' schemas are understood.
        hive: whether folders such as `year=2026` are columns.
    """

    words = _WORDS

    def __init__(
        self,
        files: Sequence[str | Contents],
        features: Features,
        index_cache: IndexCache = None,
        check: Callable[[str, str], None] | None = None,
        damaged: list[Exception] | None = None,
        resolution: Resolution = AS_WRITTEN,
        *,
        hive: bool = False,
    ) -> None:
        folders = _folders(files, hive, [spec.field or name for name, spec in features.items()])
        handle = AvroDataset(
            lowered(files, index_cache),
            features._lower(),
            check=check,
            damaged=damaged,
            resolution=resolution.lowered(),
            folders=folders,
        )
        self._open(files, handle, index_cache, resolution, folders)
        self.features = vocabularies.in_form(features, handle.features)
        self._asked = features

    @classmethod
    def inferring(
        cls,
        files: Sequence[str | Contents],
        columns: Sequence[str] | None,
        index_cache: IndexCache,
        resolution: Resolution = AS_WRITTEN,
        *,
        hive: bool = False,
    ) -> Self:
        """Opens files for what is found in them, or for those columns of it.

        Args:
            files: their paths, or what lies in memory.
            columns: as in `read_avro`.
            index_cache: as in `read_avro`.
            resolution: how files' schemas are understood.
            hive: whether folders such as `year=2026` are columns.
        """
        wanted = None if columns is None else names("columns", columns)
        data = cls.__new__(cls)
        folders = _folders(files, hive, wanted)
        handle = AvroDataset(lowered(files, index_cache), wanted, resolution=resolution.lowered(), folders=folders)
        data._open(files, handle, index_cache, resolution, folders)
        data.features = data._asked = inferred(handle.features())
        return data

    def _open(
        self,
        files: Sequence[str | Contents],
        handle: AvroDataset,
        index_cache: IndexCache,
        resolution: Resolution,
        folders: _Folders,
    ) -> None:
        self._given = list(files)
        self.files = list(map(str, files))
        self.handle = handle
        self._index_cache = index_cache
        self._resolution = resolution
        # Columns that are read of folders.
        read = set(handle.folders())
        self._partitions = [(name, values) for name, values in folders if name in read]
        self._fingerprints: dict[int, dict[str, Any]] = {}

    @property
    def symbols(self) -> dict[str, list[str]]:
        """For each enum that is read as codes its symbols, for each union the names of its types."""
        return dict(self.handle.symbols())

    @property
    def interpretation(self) -> dict[str, Any]:
        """Lookups, and how schemas are understood."""
        return {"lookups": vocabularies.described(self._asked), "resolution": self._resolution.described()}

    @property
    def left_out(self) -> dict[str, str]:
        """For each column that is of a type which isn't read: why."""
        return dict(self.handle.left_out())

    @property
    def later_columns(self) -> tuple[list[tuple[str, str, int]], bool]:
        """Columns that the first file with rows lacks, each with the first file that has it and how many have it.

        And whether the files' schemas can be merged.
        """
        return self.handle.later_columns()

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """How many files, rows and bytes; and a digest of the files.

        Of each it has the name without folders, the size, the sync marker, and, but for version 1, where its blocks lie
        and how many rows these have. For each column of folders that is read, `partitions` has a digest of its values.
        """
        if version not in self._fingerprints:
            self._fingerprints[version] = self._fingerprint(version)
        return self._fingerprints[version]

    def _fingerprint(self, version: int) -> dict[str, Any]:
        parts = []
        files = self.handle.files()
        for path, size, marker in files:
            name = os.path.basename(path).encode(errors="surrogateescape")
            parts.append(len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little") + bytes(marker))
        if version > 1:
            parts.append(self.handle.layout())
        told: dict[str, Any] = {
            "files": len(files),
            "rows": self.handle.num_rows,
            "bytes": sum(size for _, size, _ in files),
            "digest": digest(*parts),
        }
        return told | ({"partitions": digests(self._partitions)} if self._partitions else {})

    def subset(self, numbers: Iterable[int]) -> AvroData:
        """The same features of some of the files."""
        files = [self._given[number] for number in numbers]
        return _reopened(files, self._asked, self._index_cache, self._resolution, bool(self._partitions))

    def file_sizes(self) -> list[int]:
        """Bytes of each file."""
        return [size for _, size, _ in self.handle.files()]

    def place(self, unit: int, record: int) -> Location:
        """The file, the block and the record."""
        return Location(*self.handle.place_of(unit), record)

    def column_times(self) -> tuple[float, list[tuple[str, float]]]:
        """Nanoseconds that a record takes to decode, with all columns and without each."""
        return self.handle.column_times()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (
            self._given,
            self._asked,
            self._index_cache,
            self._resolution,
            bool(self._partitions),
        )

    def __str__(self) -> str:
        return self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"


def _folders(files: Sequence[str | Contents], hive: bool, wanted: list[str] | None) -> _Folders:
    """What the folders of files say in the columns that are wanted."""
    paths = list(map(str, files))
    return Partitions(paths, wanted=wanted).columns(paths) if hive else []


def _reopened(
    files: Sequence[str | Contents], features: Features, index_cache: IndexCache, resolution: Resolution, hive: bool
) -> AvroData:
    return AvroData(files, features, index_cache, resolution=resolution, hive=hive)


@takes_options()
def read_avro(
    source: Source,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: SupportsIndex,
    index_cache: IndexCache = None,
    reader_schema: ReaderSchema = None,
    logical_types: bool = True,
    unsupported: Unsupported = "warn",
    partitioning: Partitioning = "hive",
    **options: Unpack[Options],
) -> Reader:
    """Reads Avro files as batches of NumPy arrays.

    Headers of files and of blocks are read at once, data as it is asked for: a missing or truncated file, a feature
    that a schema lacks and a spec that doesn't fit are errors here, damage inside of a block is one when it is read.

    When rows are shuffled, `shuffle_buffer` is as many as 16 batches or 64 average blocks have, whichever is more,
    unless it is given.

    Args:
        source: a path, a glob (`"data/*.avro"`), a directory (all `*.avro` below it), or a list of these. Directories
            and globs leave out files and folders that begin with `_` or `.` (what isn't committed), follow links, and
            visit each folder once. `{a,b}` stands for both, and `~` for the home directory. Files may have different
            schemas, as long as each that has records has the features; the first of these decides which symbols enum
            codes stand for. In directories and globs, files of zero bytes are passed over, with a warning to the logger
            `fastpipe`. Or a contiguous buffer of the bytes of a file, or a binary file object, which is read from its
            position to its end now; a list may mix all of these. `bytes` are read where they are, other buffers are
            copied.
        features: spec of each wanted feature, by name. Fields of nested records are named with dots (`user.age`), below
            a map come `keys` and `values` (`scores.keys`, `scores.values`), items of arrays add nothing to the name. If
            the files' records aren't of a record type, their only feature is `value`. A spec's `field` names the path
            instead, so that several features can read one field. Unions of several types are named as
            `infer_features` has them.
        columns: names out of what `infer_features` finds, instead of `features`; a name stands for all that is nested
            in it. With neither, all of it is read. Unrequested fields are skipped, not decoded.
        batch_size: rows a batch.
        index_cache: a directory in which the places of all blocks are kept, so that the next opening needn't look for
            them again; True for one in the user's cache directory. A file's entry is keyed by its path, size and time
            of modification, and rebuilt when these or the file's sync marker are others, or when it is damaged
            (which is logged as a warning to the logger `fastpipe`). None is kept of files that were modified less than
            two seconds ago, whose next change could go unnoticed, nor of files up to 64 KiB, which are read whole with
            their header anyway. None for no cache.
        reader_schema: a schema to which those of all files are resolved, as the Avro 1.12 specification has it: JSON
            text, parsed JSON, or the path of a file (`pathlib.Path("user.avsc")`). Names are then the reader's; fields
            that a file lacks take their default. "union" for the schema that has all that the files' have: fields that
            some of them lack may be null, numbers are promoted. None takes files as they are: each must have the
            features, but for those with a `fill` value, which stands for a field that a later file lacks. Columns that
            the first file with rows lacks are left out then: one `ColumnsLeftOutWarning` names them and their files.
        logical_types: whether dates, times, decimals, UUIDs and durations are read as such, or as what is stored.
        unsupported: "warn" leaves out columns of types that aren't read, with one `ColumnsLeftOutWarning` that names
            them and says what would read them; "error" raises `UnsupportedError` instead, "ignore" does neither. What
            `columns` or `features` name is never left out.
        partitioning: "hive" makes columns of folders that are named `year=2026`: int64 if all values are such numbers,
            else text; null for `__HIVE_DEFAULT_PARTITION__`. A field of that name in a file counts more. None doesn't.
        **options: see `fastpipe.Options`.

    Returns:
        A `Reader`; iterating over it yields dicts from feature name to array or batch form (`fastpipe.batch`).

    Raises:
        MissingFileError: if a file isn't there, or a link leads nowhere.
        MalformedFileError: if a header is damaged or a file cut short.
        SchemaError: if a feature isn't in a schema or its spec doesn't fit, or only some files lie in folders of a
            column.
        UnsupportedError: for what isn't read: other codecs, URLs; a column that is named and can't be read.
        StorageError: if storage fails, a folder can't be read, a file changed, or an index has to be kept and the
            cache's directory can't be written.
        LimitError: if a schema or a header exceeds a limit, such as that of columns which are inferred. From
            `iter(reader)`, if `memory_limit` is below the least with which this can be read: it names that, and the
            largest `shuffle_buffer` that would fit. Without `memory_limit`, if the order of a window, pool or buffer
            takes more than half of the memory of this machine or container.
        TypeError: if an argument is of the wrong type; the message names it.
        ValueError: if arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro(
        ...     "data/*.avro", columns=["user.age", "label"], batch_size=1024, shuffle=True, seed=7
        ... )
        >>> for batch in reader:
        ...     ages, labels = batch["user.age"], batch["label"]
        >>> len(reader), labels.dtype, labels.shape
        (6, dtype('float32'), (1024,))
    """
    settings = Settings(read_avro, batch_size, options)
    wanted, chosen = asked_for(features, columns)
    resolution = Resolution.of(reader_schema, logical_types)
    hive = checked_partitioning(partitioning)
    tell_left_out({}, unsupported)
    files = opened(source)
    if wanted is not None:
        return settings.reader(AvroData(files, wanted, index_cache, resolution=resolution, hive=hive))
    data = AvroData.inferring(files, chosen, index_cache, resolution, hive=hive)
    tell_left_out(data.left_out, unsupported)
    tell_later(*data.later_columns)
    return settings.reader(data)


def infer_features(
    source: Source,
    columns: Sequence[str] | None = None,
    *,
    index_cache: IndexCache = None,
    reader_schema: ReaderSchema = None,
    logical_types: bool = True,
    unsupported: Unsupported = "warn",
    partitioning: Partitioning = "hive",
) -> Features:
    """Finds the features of Avro files; printed, they are Python code to paste.

    Types and nulls follow from the first file's schema, or the reader's: nullable fields are masked, records of exactly
    `indices0`, `indices1`, ... and `values` are sparse. A recursive record has the columns of its outermost level.

    Dates, times and timestamps are `datetime64` and `timedelta64` of their unit; decimals of up to 18 digits are int64
    with their `scale`, those of more float64; durations are months, days and milliseconds, uint32 of shape (3,); UUIDs
    are strings, or 16 bytes where the file has these. A union of numbers is int64, or float64 if one of them is a
    float; integers beyond 2**53 are rounded then. Any other union `f` has the column `f`, the number of the value's
    type in the union (`Reader.symbols` names them), and for each type a column `f:type`, null where the value is of
    another one; records, enums and fixed go by their names.

    Lengths of
    arrays are not in a schema, so data are looked at (all of it up to 16 MiB, else 64 blocks spread over it): a
    dimension whose arrays all have the same length, 16 arrays at least, is taken to be fixed, of the 31 innermost ones.
    Where that turns out wrong later, `ShapeError` says so and a `RaggedSpec` reads it. Damaged blocks are passed over,
    with a warning to the logger `fastpipe`; where storage fails, so does this.

    Args:
        source: as in `read_avro`.
        columns: only these, and what is nested in them; at least one.
        index_cache: as in `read_avro`.
        reader_schema: as in `read_avro`.
        logical_types: as in `read_avro`.
        unsupported: as in `read_avro`.
        partitioning: as in `read_avro`.

    Returns:
        Specs by feature name, in the order of the schema; columns of folders behind them.

    Raises:
        UnsupportedError: if a column that is named, or any with `unsupported="error"`, is of a type that isn't read: a
            record within another of its own (recursive) type, or types nested too deep; the message says how single
            fields can be asked for in `features`.
        LimitError: if the schema has more columns than are inferred, or nests deeper.
        TypeError: if an argument is of the wrong type.
        ValueError: if `columns` is empty.
        FastpipeError: as in `read_avro`.

    Example:
        >>> import fastpipe
        >>> fastpipe.infer_features("data/*.avro", ["user_embedding", "country"])
        {
            "user_embedding": fastpipe.DenseSpec((64,), "float32"),
            "country": fastpipe.DenseSpec((), "string", nulls="mask"),
        }
    """
    chosen = None if columns is None else names("columns", columns)
    if chosen is not None and not chosen:
        raise ValueError("columns is empty: name at least one")
    resolution = Resolution.of(reader_schema, logical_types)
    hive = checked_partitioning(partitioning)
    tell_left_out({}, unsupported)
    data = AvroData.inferring(opened(source), chosen, index_cache, resolution, hive=hive)
    tell_left_out(data.left_out, unsupported)
    tell_later(*data.later_columns)
    return data.features
