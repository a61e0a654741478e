"""Avro container files as a dataset: the reader, and the inference of features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypeAlias, Unpack

from fastpipe._fastpipe import AvroDataset
from fastpipe._files._file_data import FileData
from fastpipe._files._in_memory_files import File, Source, lowered, opened
from fastpipe._files._index_cache import IndexCache
from fastpipe._files._partition_columns import Partitioning, Partitions, checked_partitioning, digests
from fastpipe._files._remote_files import BlockCache, StorageOptions, expander
from fastpipe._locations import AvroLocation
from fastpipe._reader import losses
from fastpipe._reader.dataset import Dataset, NarrowedDataset, SourceWording
from fastpipe._reader.losses import Skip
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.avro._schemas import AS_WRITTEN, ReaderSchema, Resolution, Unsupported, tell_later, tell_left_out
from fastpipe.specs import Features, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies
from fastpipe.specs._requests import FeatureRequest

_WORDS = SourceWording(
    units="blocks",
    advice={
        "reading": "Storage is the limit. Use faster disks or a codec such as zstandard. More threads help only if "
        "the storage is remote.",
        "decompressing": "Files written with snappy or zstandard decompress faster than deflate. More threads help.",
        "indexing": "Records must be located before they can be picked. Later epochs remember where up to 16 million "
        "records start.",
    },
    bound={"decompressing": "decompression-bound"},
    other_digest="the dataset has different contents (sync markers or blocks), or its files have different names or "
    "another order",
)


_Folders: TypeAlias = "list[tuple[str, list[int | str | None]]]"


class AvroData(FileData):
    """Avro files that are open for a set of features: the `Data` of `read_avro`.

    Args:
        files: The paths of the files, or their contents in memory.
        features: The specs of the features to read, by name.
        index_cache: The directory of block indexes, True for the user's cache directory, or None for no cache.
        check: A function that is called before features are matched with a schema. It receives the path and the JSON
            schema of the first file and of every file with a different schema. Its exceptions propagate to the caller.
        damaged: A list that receives the exceptions of damaged files. The blocks before the damage are then read. By
            default, these exceptions are raised.
        resolution: How the schemas of files are interpreted.
        hive: Whether folders such as `year=2026` are read as columns.
    """

    handle: AvroDataset
    words = _WORDS
    may_lose_units = True

    def __init__(
        self,
        files: Sequence[File],
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
        files: Sequence[File],
        columns: list[str] | None,
        index_cache: IndexCache,
        resolution: Resolution = AS_WRITTEN,
        *,
        hive: bool = False,
    ) -> Self:
        """Opens files to read the columns that inference finds, or a selection of them.

        Args:
            files: The paths of the files, or their contents in memory.
            columns: The names of the inferred columns to read; None for all.
            index_cache: The directory of block indexes, True for the user's cache directory, or None for no cache.
            resolution: How the schemas of files are interpreted.
            hive: Whether folders such as `year=2026` are read as columns.
        """
        data = cls.__new__(cls)
        folders = _folders(files, hive, columns)
        handle = AvroDataset(lowered(files, index_cache), columns, resolution=resolution.lowered(), folders=folders)
        data._open(files, handle, index_cache, resolution, folders)
        data.features = data._asked = inferred(handle.features())
        return data

    def _open(
        self,
        files: Sequence[File],
        handle: AvroDataset,
        index_cache: IndexCache,
        resolution: Resolution,
        folders: _Folders,
    ) -> None:
        self.handle = handle
        self._set_files(files, index_cache)
        self._resolution = resolution
        # Only the partition columns that the features read.
        read = set(handle.folders())
        self._partitions = [(name, values) for name, values in folders if name in read]

    @property
    def categories(self) -> dict[str, list[str]]:
        """The categories of each feature that is read as codes: the symbols of enums, and the type names of unions."""
        return dict(self.handle.categories())

    @property
    def interpretation(self) -> dict[str, Any]:
        """The lookups of features, and how schemas are interpreted."""
        return {"lookups": vocabularies.described(self._asked), "resolution": self._resolution.described()}

    @property
    def left_out(self) -> dict[str, str]:
        """The columns that are left out because their type is not supported, each with the reason."""
        return dict(self.handle.left_out())

    @property
    def later_columns(self) -> tuple[list[tuple[str, str, int]], bool]:
        """Returns the columns that the first file with rows lacks, and whether the files' schemas can be merged.

        Each column comes with the first file that contains it and the number of files that contain it.
        """
        return self.handle.later_columns()

    def _fingerprint(self, version: int) -> dict[str, Any]:
        # A digest of the values of each partition column that is read.
        partitions = {"partitions": digests(self._partitions)} if self._partitions else {}
        return super()._fingerprint(version) | partitions

    def narrowed(self, names: Sequence[str]) -> Dataset:
        """Returns a dataset of the same records with only some features."""
        chosen = [number for number, name in enumerate(self.features) if name in names]
        return NarrowedDataset(self, self.handle.with_columns(chosen), names)

    def subset(self, numbers: Iterable[int]) -> AvroData:
        """Returns a dataset with the same features and only some of the files."""
        files = [self._given[number] for number in numbers]
        return _reopened(files, self._asked, self._index_cache, self._resolution, bool(self._partitions))

    def place(self, unit: int, record: int) -> AvroLocation:
        """Returns the file, the block and the index of a record."""
        file, block = self.handle.place_of(unit)
        return AvroLocation(file=file, block=block, row=record)

    def column_times(self) -> tuple[float, list[tuple[str, float]]]:
        """Returns the nanoseconds to decode a record with all columns, and without each column."""
        return self.handle.column_times()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (
            self._given,
            self._asked,
            self._index_cache,
            self._resolution,
            bool(self._partitions),
        )


def _folders(files: Sequence[File], hive: bool, wanted: list[str] | None) -> _Folders:
    """Returns the values of the wanted partition columns, which come from the files' folders."""
    paths = list(map(str, files))
    return Partitions(paths, wanted=wanted).columns(paths) if hive else []


def _reopened(
    files: Sequence[File], features: Features, index_cache: IndexCache, resolution: Resolution, hive: bool
) -> AvroData:
    return AvroData(files, features, index_cache, resolution=resolution, hive=hive)


@takes_options()
def read_avro(
    source: Source,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    batch_size: int,
    index_cache: IndexCache = None,
    storage_options: StorageOptions = None,
    block_cache: BlockCache = None,
    reader_schema: ReaderSchema = None,
    logical_types: bool = True,
    on_unsupported: Unsupported = "warn",
    partitioning: Partitioning = "hive",
    on_error: Literal["raise"] | Skip = "raise",
    **options: Unpack[Options],
) -> Reader:
    """Reads Avro files as batches of NumPy arrays.

    The headers of files and blocks are read immediately, data on demand. A missing or truncated file, a feature that a
    schema lacks, or a spec that doesn't fit raises an error here. Damage inside a block raises an error when that block
    is read.

    When rows are shuffled, `shuffle_buffer` defaults to the rows of 16 batches or of 64 average blocks, the larger of
    the two.

    Features are inferred from the types and nulls of the first file's schema or the reader's schema. Nullable fields
    are masked. Records with exactly the fields `indices0`, `indices1`, ... and `values` are sparse. For recursive
    records, only the outermost level is inferred. Partition columns follow the columns of the schema.

    Dates, times and timestamps are `datetime64` or `timedelta64` of their unit. Decimals of up to 18 digits are int64
    with their `scale`, and larger decimals float64. Durations are months, days and milliseconds: uint32 of shape (3,).
    UUIDs are strings, or 16 bytes if the file stores bytes.

    A union of numbers is int64, or float64 if it contains a float, which rounds integers above 2**53. Any other union
    `f` has a column `f`: the index of the value's type in the union (`Reader.categories` has the types). Each type also
    has a column `f:type`, which is null if the value has another type. Records, enums and fixed types appear under
    their names.

    A schema doesn't contain the lengths of arrays, so fastpipe samples the data: all of it up to 16 MiB, otherwise 64
    blocks spread over it. A dimension is fixed if at least 16 arrays all have the same length; only the 31 innermost
    dimensions can be fixed. If later data has another length, `ShapeError` is raised; use `RaggedSpec` then. Damaged
    blocks are skipped, with a warning to the logger `fastpipe`.

    Args:
        source: A path, a glob (`"data/*.avro"`), a directory (all `*.avro` files below it), a contiguous buffer with
            the bytes of a file, a binary file object, which is read immediately to its end, a URL of an object store or
            web server (`s3://`, `gs://`, `az://`, `https://`), or a list of these. Directories and globs skip names
            that begin with `_` or `.`, and also empty files, with a warning. Each file with records must have all
            features. The first one decides which symbols enum codes represent.
        features: The spec of each feature to read, by name. Dots name the fields of nested records (`user.age`), and
            the `keys` and `values` of maps (`scores.keys`). The items of arrays add nothing to the name. If the schema
            is not a record, its only feature is `value`. A spec's `field` can set the path instead, so that several
            features can read one field.
        columns: The names of inferred features to read, instead of `features`: a list, or one name as a string. A name
            includes everything nested in it. By default, all inferred features are read. Other fields are skipped
            without being decoded.
        overrides: Specs that replace the inferred specs of some of these features, by name. The name of an array of
            records that is read as a bag replaces all features nested in it. Files are opened twice then: to infer the
            features, and to read them. Not allowed with `features`. Defaults to None: all specs are inferred.
        batch_size: Number of rows per batch.
        index_cache: A directory that keeps the offsets of all blocks, so that files open faster the next time, or True
            for a directory in the user's cache directory. An index is rebuilt if its file has changed. Defaults to
            None: no cache.
        storage_options: How to reach the object store of a URL, such as `{"region": "eu-west-1"}`, in the words of
            fsspec or polars. Defaults to None: the environment's credentials and settings.
        block_cache: A folder on a local disk and its size, such as `("/nvme/fastpipe", "500GB")`, which keeps bytes of
            URLs for later epochs and other processes. Paths of local files ignore it. Defaults to None: no cache.
        reader_schema: A schema to which the schemas of all files are resolved, by the rules of Avro 1.12: JSON text,
            parsed JSON, or the path of a file (`pathlib.Path("user.avsc")`). Fields that a file lacks get their
            default. `"union"` merges the schemas of all files: fields that some files lack are nullable, and numbers
            are promoted. By default, each file is read with its own schema. Later files may lack features that have a
            `fill` value. Columns that the first file with records lacks are left out, and one `ColumnsLeftOutWarning`
            names them.
        logical_types: Whether to read dates, times, decimals, UUIDs and durations as such. If False, they are read as
            the values that are stored. Defaults to True.
        on_unsupported: What to do with columns of unsupported types. "warn" (the default) leaves them out, and one
            `ColumnsLeftOutWarning` names them and explains how to read them. "error" raises `UnsupportedError`.
            "ignore" leaves them out silently. Columns that are named in `columns` or `features` are never left out.
        partitioning: "hive" (the default) reads folders named like `year=2026` as columns: int64 if all values are
            integers, otherwise text. `__HIVE_DEFAULT_PARTITION__` is null. If a file has a field of the same name, the
            field wins. None ignores the names of folders.
        on_error: What to do with damaged blocks. "raise" (the default) raises an error when such a block is read.
            `fastpipe.Skip(...)` leaves damaged blocks out, up to a limit.
        **options: See `fastpipe.typing.Options`.

    Returns:
        A `Reader`. Iterating over it yields dicts from feature name to array or batch form (`fastpipe.batch`).

    Raises:
        MissingFileError: If a file does not exist, or a link is dangling.
        MalformedFileError: If a header is damaged or a file is truncated.
        SchemaError: If a schema lacks a feature or its spec doesn't fit, or only some files are in the folders of a
            partition column, or `overrides` names a column that isn't inferred.
        UnsupportedError: If a codec, a URL, or the type of a requested column is not supported.
        StorageError: If storage fails, a folder can't be read, a file changed, or the directory of the index cache
            or of the block cache can't be written.
        LimitError: If a schema or a header exceeds a limit, such as the number of inferred columns. `iter(reader)`
            raises it if `memory_limit` or, without a limit, half of the memory of the machine or container is too
            small. The message gives the largest `shuffle_buffer` that fits.
        TypeError: If an argument has the wrong type; the message names the argument.
        ValueError: If arguments exclude each other or are out of range.

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
    settings.running = replace(settings.running, on_error=losses.checked(on_error))
    request = FeatureRequest.of(features, columns, overrides)
    resolution = Resolution.of(reader_schema, logical_types)
    hive = checked_partitioning(partitioning)
    tell_left_out({}, on_unsupported)
    files = opened(source, expand_path=expander(storage_options, block_cache))
    with losses.framing_noted(settings.running.on_error):
        if request.features is not None:
            data = AvroData(files, request.features, index_cache, resolution=resolution, hive=hive)
            return settings.reader(data)
        data = AvroData.inferring(files, request.columns, index_cache, resolution, hive=hive)
    tell_left_out(data.left_out, on_unsupported)
    tell_later(*data.later_columns)
    if request.overrides:
        wanted = request.changed(data.features, data.left_out)
        data = AvroData(files, wanted, index_cache, resolution=resolution, hive=hive)
    return settings.reader(data)
