"""File formats and their readers. A format is detected from the file name, or else from the first bytes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack

from fastpipe._arguments import shown
from fastpipe._fastpipe import RemoteFile, begins_with_record
from fastpipe._files._in_memory_files import Contents, File, Source, opened
from fastpipe._files._index_cache import IndexCache
from fastpipe._files._partition_columns import Partitioning
from fastpipe._files._paths import Suffixes
from fastpipe._files._remote_files import BlockCache, StorageOptions, expander
from fastpipe._reader.reader import Reader
from fastpipe.avro import read_avro
from fastpipe.avro._schemas import ReaderSchema, Unsupported
from fastpipe.csv import read_csv
from fastpipe.csv._reading import DialectOptions
from fastpipe.errors import UnsupportedError
from fastpipe.specs import Features, Spec
from fastpipe.tfrecord import read_tfrecord
from fastpipe.units import Units, read_arrow, read_parquet


class FileFormat(NamedTuple):
    """A file format that fastpipe can read.

    Attributes:
        name: Name in JSON output.
        title: Name in messages.
        function: Function that creates a reader of such files.
        suffixes: File name suffixes. All suffixes in one tuple are matched together when a directory is listed.
        magic: First bytes of such files, or None if the format has no magic bytes.
        options: Extra arguments of `function`.
        rows: Term of the format for rows.
        units: Term of the format for the parts of a file.
    """

    name: str
    title: str
    function: Callable[..., Reader]
    suffixes: tuple[str | tuple[str, ...], ...]
    magic: bytes | None
    options: Mapping[str, Any] = MappingProxyType({})
    rows: str = "rows"
    units: str = "units"

    @property
    def ends(self) -> tuple[str, ...]:
        """All suffixes of the format."""
        return tuple(end for ends in self.suffixes for end in ([ends] if isinstance(ends, str) else ends))

    def read(self, files: Sequence[File], **options: Any) -> Reader:
        """Returns a reader of such files."""
        if self.function in (read_parquet, read_arrow):
            # pyarrow opens URLs itself.
            files = [str(file) if isinstance(file, RemoteFile) else file for file in files]
        return self.function(files, **{**self.options, **options})


AVRO = FileFormat("avro", "Avro", read_avro, (".avro",), b"Obj\x01", rows="records", units="blocks")
TFRECORD = FileFormat(
    "tfrecord",
    "TFRecord",
    read_tfrecord,
    ((".tfrecord", ".tfrecords", ".tfrec"),),
    None,
    units="chunks",
)
FORMATS = (
    AVRO,
    FileFormat("parquet", "Parquet", read_parquet, (".parquet", ".pq"), b"PAR1", units="row groups"),
    FileFormat("arrow", "Arrow", read_arrow, (".arrow", ".feather", ".ipc"), b"ARROW1", units="record batches"),
    FileFormat("csv", "CSV", read_csv, ((".csv", ".csv.gz", ".csv.zst"),), None, units="chunks"),
    FileFormat(
        "tsv",
        "CSV with tabs",
        read_csv,
        ((".tsv", ".tsv.gz", ".tsv.zst"),),
        None,
        MappingProxyType({"delimiter": "\t"}),
        units="chunks",
    ),
    TFRECORD,
)
# Magic bytes, or the length of a record of a TFRecord file and its checksum.
_FIRST_BYTES = 12
_GZIP = b"\x1f\x8b"


SUFFIXES: Suffixes = tuple(end for each in FORMATS for end in each.suffixes)
# Advice for a file whose format is unknown, on the command line.
RENAME = f"Give it a name that ends in one of {', '.join(end for each in FORMATS for end in each.ends)}"


def format_of(files: Sequence[File], advice: str) -> FileFormat:
    """Returns the format that all files have.

    Args:
        files: Paths of files, and files in memory.
        advice: What to do about a file whose format can't be detected, for the message.

    Raises:
        UnsupportedError: If the format of a file can't be detected, or if the files have several formats.
    """
    firsts: dict[str, tuple[FileFormat, str]] = {}
    for file in files:
        format_ = _format_of(file, advice)
        firsts.setdefault(format_.name, (format_, str(file)))
    if len(firsts) > 1:
        listed = ", ".join(f"{format_.title} ({path})" for format_, path in firsts.values())
        raise UnsupportedError(f"the files have several formats: {listed}. Pass files of one format")
    return next(iter(firsts.values()))[0]


def _format_of(file: File, advice: str) -> FileFormat:
    if isinstance(file, RemoteFile):
        start, signs = b"", "its name"
        if by_name := [each for each in FORMATS if str(file).endswith(each.ends)]:
            return by_name[0]
    elif isinstance(file, Contents):
        start, signs = file.whole[file.start : min(file.start + _FIRST_BYTES, file.stop)], "its first bytes"
    else:
        by_name = [each for each in FORMATS if file.endswith(each.ends)]
        if by_name:
            return by_name[0]
        try:
            if not stat.S_ISREG(os.stat(file).st_mode):
                # Opening a pipe would wait for a writer. The reader refuses it.
                return AVRO
            with open(file, "rb") as opened_file:
                start, signs = opened_file.read(_FIRST_BYTES), "its name or its first bytes"
        except OSError:
            # The reader will report why the file can't be opened.
            return AVRO
    if begins_with_record(start):
        return TFRECORD
    by_start = [each for each in FORMATS if each.magic is not None and start.startswith(each.magic)]
    if by_start:
        return by_start[0]
    if start.startswith(_GZIP):
        signs += ", because it is compressed with gzip, which only CSV files may be. Decompress other files"
    raise UnsupportedError(f"cannot detect the format of {file} from {signs}. {advice}", path=str(file))


class InferOptions(DialectOptions, total=False):
    """Keyword arguments of `infer_features`. Each is an argument of the functions that are named here.

    Attributes:
        overrides: All functions.
        index_cache: `read_avro`, `read_csv` and `read_tfrecord`.
        storage_options: `read_avro`, `read_csv` and `read_tfrecord`.
        block_cache: `read_avro`, `read_csv` and `read_tfrecord`.
        reader_schema: `read_avro`.
        logical_types: `read_avro`.
        on_unsupported: `read_avro`.
        partitioning: `read_avro` and `read_parquet`.
        delimiter: `read_csv`.
        quote: `read_csv`.
        header: `read_csv`.
        comment: `read_csv`.
        decimal: `read_csv`.
        null_values: `read_csv`.
        on_ragged: `read_csv`.
        page_checksum_verification: `read_parquet`.
        num_fetches: `read_parquet` and `read_arrow`.
    """

    overrides: Mapping[str, Spec] | None
    index_cache: IndexCache
    storage_options: StorageOptions
    block_cache: BlockCache
    reader_schema: ReaderSchema
    logical_types: bool
    on_unsupported: Unsupported
    partitioning: Partitioning
    page_checksum_verification: bool
    num_fetches: int | None


_READER = "Create a reader, for example with read_sql, read_units, from_arrow or from_arrays, and use reader.features"
_FUNCTION = (
    "Create a reader with the function for the format, for example fastpipe.read_csv(source, batch_size=1), and use "
    "reader.features"
)


def infer_features(
    source: Source, *, columns: str | Sequence[str] | None = None, **options: Unpack[InferOptions]
) -> Features:
    """Infers the features of files: Avro, CSV, Parquet, Arrow or TFRecord. Printing them gives Python code to paste.

    The result equals the `features` of the reader that the function for the format returns: `read_avro`, `read_csv`,
    `read_parquet`, `read_arrow` or `read_tfrecord`. Their pages describe what is inferred. For other sources, such as
    tables and queries, create a reader and use its `features`.

    The file name determines the format: `.avro`; `.csv` and `.tsv` (with tabs), also with `.gz` or `.zst`; `.parquet`
    and `.pq`; `.arrow`, `.feather` and `.ipc`; `.tfrecord`, `.tfrecords` and `.tfrec`. The first bytes of files with
    other names, and of files in memory, determine whether the format is Avro, Parquet, Arrow or TFRecord. From a
    directory, the files of the first of these formats that it contains are read.

    Args:
        source: A path, a glob, a directory, a contiguous buffer with the bytes of an Avro, Parquet, Arrow or TFRecord
            file, a binary file object with such bytes, or a list of these, all of one format. Directories and globs
            skip names that begin with `_` or `.`, and also empty files, with a warning.
        columns: The columns to infer: a list of at least one name, or one name as a string. A name includes everything
            nested in it. Defaults to None: all columns.
        **options: Other arguments of the function for the format, such as `reader_schema` of `read_avro`, `null_values`
            of `read_csv` or `partitioning` of `read_parquet`. See `fastpipe.typing.InferOptions`.

    Returns:
        Specs by feature name, in the order of the files' columns.

    Raises:
        UnsupportedError: If the format can't be detected, or if the files have several formats, or a requested column
            has a type that isn't supported.
        TypeError: If an argument has the wrong type, or the function for the format has no such argument.
        ValueError: If `columns` is empty.
        FastpipeError: If the files can't be read. The page of the function for the format lists the errors.

    Example:
        >>> import fastpipe
        >>> fastpipe.infer_features("data/*.avro", columns=["user_embedding", "country"])
        {
            "user_embedding": fastpipe.DenseSpec((64,), "float32"),
            "country": fastpipe.DenseSpec((), "string", on_null="mask"),
        }
        >>> fastpipe.infer_features("rides.csv") == fastpipe.read_csv("rides.csv", batch_size=1).features
        True
    """
    # A mapping is an iterable of strings, which would be taken for paths.
    if isinstance(source, Mapping) or hasattr(source, "__arrow_c_stream__") or isinstance(source, Units):
        raise TypeError(f"source must be files; got {shown(source)}. {_READER}")
    if "filesystem" in options:
        raise TypeError(f"infer_features has no argument 'filesystem'. {_FUNCTION}")
    files = opened(source, SUFFIXES, expander(options.get("storage_options"), options.get("block_cache")))
    with format_of(files, _FUNCTION).read(files, columns=columns, **{"batch_size": 1, **options}) as reader:
        return reader.features
