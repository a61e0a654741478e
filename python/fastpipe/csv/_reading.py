"""CSV files as a dataset: their dialect, the data and the reader."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, TypedDict, Unpack

from fastpipe._arguments import names, shown
from fastpipe._boundary import LoweredDialect
from fastpipe._fastpipe import CsvDataset
from fastpipe._files._file_data import ChunkedData
from fastpipe._files._in_memory_files import File, Source, lowered, opened
from fastpipe._files._index_cache import IndexCache
from fastpipe._files._later_columns import report_later_columns
from fastpipe._files._remote_files import BlockCache, StorageOptions, expander
from fastpipe._locations import CsvLocation
from fastpipe._omissions import is_large, report, share
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.errors import RowsLeftOutWarning
from fastpipe.specs import Features, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies
from fastpipe.specs._requests import FeatureRequest

Header: TypeAlias = bool | Sequence[str]
OnRagged: TypeAlias = Literal["error", "skip"]

DEFAULT_NULLS = ("", "NA", "N/A", "NULL", "null", "None", "NaN", "nan")


@dataclass(frozen=True)
class Dialect:
    """The checked dialect of CSV files.

    Attributes:
        delimiter: The ASCII character between fields.
        quote: The ASCII character that quotes fields; None disables quoting.
        header: Whether the first row names the columns, or the names of the columns if the files have no header.
        comment: The ASCII character that begins comment lines; None if there are no comments.
        decimal: The ASCII character before the decimals of a number.
        null_values: The fields that are read as null.
        on_ragged: "error" or "skip": what to do with rows that have too many or too few fields.
    """

    delimiter: str
    quote: str | None
    header: bool | tuple[str, ...]
    comment: str | None
    decimal: str
    null_values: tuple[str, ...]
    on_ragged: OnRagged

    lossless: ClassVar[bool] = False
    """Whether floats reject integers that would be rounded, and finite numbers that would become infinite."""

    @classmethod
    def given(cls, options: DialectOptions) -> Dialect:
        """Returns the default dialect with some options changed.

        Raises:
            TypeError: If an option doesn't exist or has the wrong type.
            ValueError: If an option is out of range.
        """
        unknown = next((name for name in options if name not in DialectOptions.__annotations__), None)
        if unknown is not None:
            raise TypeError(f"unknown argument {unknown!r}")
        return cls.of(**(asdict(DEFAULT_DIALECT) | options))

    @classmethod
    def of(
        cls,
        delimiter: Any,
        quote: Any,
        header: Any,
        comment: Any,
        decimal: Any,
        null_values: Any,
        on_ragged: Any,
    ) -> Dialect:
        """Returns a dialect after checking the user's arguments.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range.
        """
        if on_ragged not in ("error", "skip"):
            raise ValueError(f'on_ragged must be "error" or "skip"; got {shown(on_ragged)}')
        if isinstance(null_values, str) or not isinstance(null_values, Iterable):
            raise TypeError(f"null_values must be a list of strings; got {shown(null_values)}")
        return cls(
            delimiter=_character("delimiter", delimiter),
            quote=None if quote is None else _character("quote", quote),
            header=header if isinstance(header, bool) else _header(header),
            comment=None if comment is None else _character("comment", comment),
            decimal=_character("decimal", decimal),
            null_values=tuple(dict.fromkeys(names("null_values", null_values))),
            on_ragged=on_ragged,
        )

    def lowered(self) -> LoweredDialect:
        """Returns the dialect as plain values for the extension module."""
        quote = None if self.quote is None else ord(self.quote)
        comment = None if self.comment is None else ord(self.comment)
        header = self.header if isinstance(self.header, bool) else list(self.header)
        words = [word.encode() for word in self.null_values]
        skip = self.on_ragged == "skip"
        return ord(self.delimiter), quote, comment, ord(self.decimal), header, words, skip, self.lossless


class LosslessDialect(Dialect):
    """A dialect that rejects integers that a float would round, and finite numbers that would become infinite.

    Decimal fractions are rounded.
    """

    lossless = True


def _header(header: Any) -> tuple[str, ...]:
    given = tuple(names("header", header))
    if not given:
        raise ValueError("header is empty: name each column")
    twice = next((name for name, count in Counter(given).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"header names {twice!r} twice: each column needs its own name")
    return given


def _character(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one character; got {shown(value)}")
    if len(value) != 1 or not value.isascii():
        raise ValueError(f"{name} must be one ASCII character; got {shown(value)}")
    return str(value)


class DialectOptions(TypedDict, total=False):
    """The arguments of `read_csv` that describe the text of files."""

    delimiter: str
    quote: str | None
    header: Header
    comment: str | None
    decimal: str
    null_values: Sequence[str]
    on_ragged: OnRagged


DEFAULT_DIALECT = Dialect.of(",", '"', True, None, ".", DEFAULT_NULLS, "error")


# The suffixes of files that are read from a directory. Compressed and plain files are read together.
SUFFIXES = ((".csv", ".csv.gz", ".csv.zst"), (".tsv", ".tsv.gz", ".tsv.zst"))

_WORDS = SourceWording(
    units="chunks",
    advice={
        "reading": "Storage is the limit. Use faster disks. More threads help only if the storage is remote.",
        "parsing": "Read fewer columns, or numbers with fewer digits. More threads help. Parquet, Arrow and Avro "
        "files need no parsing.",
        "fetching": "Decompression is the limit. A file that is compressed as one stream is decompressed by one "
        "thread. zstandard is faster than gzip.",
        "indexing": "Rows must be located before they can be picked. Later epochs remember where up to 16 million "
        "rows start.",
    },
    other_digest="the dataset has different contents, or its files have different names or another order",
)


class CsvData(ChunkedData):
    """CSV files that are open for a set of features: the `Data` of `read_csv`.

    Args:
        files: The paths of the files, or their contents in memory.
        dialect: The dialect of the files.
        features: The specs of the features to read, by name; None to infer them.
        columns: The names of the inferred columns to read; None for all.
        index_cache: The directory of row indexes, True for the user's cache directory, or None for no cache.
    """

    handle: CsvDataset
    words = _WORDS

    def __init__(
        self,
        files: Sequence[File],
        dialect: Dialect,
        features: Features | None,
        columns: Sequence[str] | None = None,
        index_cache: IndexCache = None,
    ) -> None:
        chosen = None if columns is None else list(columns)
        wanted = chosen if features is None else features._lower()
        self.handle = CsvDataset(lowered(files, index_cache), dialect.lowered(), wanted)
        self._dialect = dialect
        self._set_files(files, index_cache)
        self._set_features(_inferred(self.handle) if features is None else features)

    @classmethod
    def of_rows(cls, handle: CsvDataset, dialect: Dialect, features: Features | None) -> CsvData:
        """Returns a dataset of rows that were picked out of files for a sample. It has no state and can't be pickled.

        Args:
            handle: The rows.
            dialect: The dialect of the rows.
            features: The specs of the features to read, by name; None to infer them.
        """
        data = cls.__new__(cls)
        data.handle = handle if features is not None else handle.inferred()
        data._dialect = dialect
        data._set_files([], None)
        data.files = [path for path, _, _ in handle.files()]
        if features is not None:
            return data.with_features(features)
        data._asked = data.features = _inferred(data.handle)
        return data

    def report_later_columns(self) -> None:
        """Reports columns that inference leaves out because the first file lacks them."""
        hint = "read the files that have them with another reader, or write all files with the same columns"
        report_later_columns(self.handle.later_columns(), hint)

    def report_skipped(self) -> None:
        """Reports rows that `on_ragged="skip"` leaves out."""
        report_ragged(self.handle.skipped_rows(), self.handle.num_rows)

    @property
    def text_bytes(self) -> int:
        """The number of bytes of all rows after decompression."""
        return self.handle.text_bytes()

    @property
    def interpretation(self) -> dict[str, Any]:
        """The lookups of features, and the dialect."""
        return {"lookups": vocabularies.described(self._asked), "dialect": asdict(self._dialect)}

    def subset(self, numbers: Iterable[int]) -> CsvData:
        """Returns a dataset with the same features and only some of the files."""
        files = [self._given[number] for number in numbers]
        return CsvData(files, self._dialect, self._asked, None, self._index_cache)

    def place(self, unit: int, record: int) -> CsvLocation:
        """Returns the file and the index of a row."""
        file, row = self.handle.place_of(unit, record)
        return CsvLocation(file=file, row=row)

    def __reduce__(self) -> tuple[Any, ...]:
        return CsvData, (self._given, self._dialect, self._asked, None, self._index_cache)


def report_ragged(skipped: int, kept: int) -> None:
    """Reports rows that `on_ragged="skip"` leaves out.

    Args:
        skipped: The number of ragged rows.
        kept: The number of other rows.
    """
    if skipped:
        rows = skipped + kept
        report(
            f"{share(skipped, rows, 'rows')} are left out, because they have too many or too few fields "
            f'(on_ragged="skip"). on_ragged="error" names the first one',
            RowsLeftOutWarning if is_large(skipped, rows) else None,
        )


def _inferred(handle: CsvDataset) -> Features:
    """Returns the inferred specs. Nullable floats have NaN as fill value."""
    found = inferred(handle.features())
    # Columns of the same type share one spec.
    distinct = {id(spec): spec for spec in found.values()}
    made = {key: _with_nan(spec) for key, spec in distinct.items()}
    return Features({name: made[id(spec)] for name, spec in found.items()})


def _with_nan(spec: Spec) -> Spec:
    return replace(spec, fill=math.nan) if spec.on_null == "fill" and spec.dtype == "float64" else spec


@takes_options()
def read_csv(
    source: Source,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    batch_size: int,
    delimiter: str = ",",
    quote: str | None = '"',
    header: Header = True,
    comment: str | None = None,
    decimal: str = ".",
    null_values: Sequence[str] = DEFAULT_NULLS,
    on_ragged: OnRagged = "error",
    index_cache: IndexCache = None,
    storage_options: StorageOptions = None,
    block_cache: BlockCache = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads CSV files as batches of NumPy arrays.

    Files are scanned for rows immediately, at the speed of memory, and parsed on demand. A row ends with a newline, or
    a carriage return and a newline, outside of quotes. A field is quoted if it begins with a quote. Inside a quoted
    field, a doubled quote is a literal quote; a quote anywhere else is also literal. Empty lines are skipped. These are
    the rules of Python's `csv` module, except that a carriage return without a newline is an error.

    Files compressed with gzip or zstandard are recognized by their first bytes and decompressed while they are read. A
    file of several members or frames (`bgzip`, `pzstd`), or of at most 16 MiB of text, can be read in any order. Other
    compressed files can only be read in sequence, with `shuffle=False` or `shuffle="buffer"`.

    When rows are shuffled, `shuffle_buffer` defaults to the rows of 16 batches or of 64 chunks of 64 KiB, the larger of
    the two.

    Args:
        source: A path, a glob, a directory, a contiguous buffer with the bytes of a file, a binary file object, which
            is read immediately to its end, a URL of an object store or web server (`s3://`, `gs://`, `az://`,
            `https://`), or a list of these. A directory stands for all `*.csv`, `*.csv.gz` and `*.csv.zst` files below
            it, or, if there are none, for the corresponding `*.tsv` files. Directories and globs skip names that begin
            with `_` or `.`, and also empty files, with a warning. Files may have different column orders and additional
            columns. Columns that the first file lacks are left out, and one `ColumnsLeftOutWarning` names them, unless
            `columns` or `features` selects what is read.
        features: The spec of each feature to read, by name: `DenseSpec((), dtype)` of any number, bool, datetime64,
            "string" or "bytes"; `VocabularySpec` or `HashSpec` to read text as indices. A spec's `field` names the
            column, if it differs from the feature's name.
        columns: The names of inferred columns to read, instead of `features`: a list, or one name as a string. By
            default, all columns are read. Types are inferred from all rows up to 16 MiB, or else from 64 chunks spread
            over the files: bool, int64, uint64, float64 (NaN for null), datetime64 in days, us or ns (NaT for null), or
            strings. Numbers with leading zeros, and integers that would be rounded, are strings. Integers and bools are
            masked if any row of the files has a null in that column. Columns without any value are float64. If a later
            field has another type, `ValueRangeError` gives its location and the argument to pass.
        overrides: Specs that replace the inferred specs of some of these columns, by name. Not allowed with `features`.
            Defaults to None: all specs are inferred.
        batch_size: Number of rows per batch.
        delimiter: The ASCII character between fields. Defaults to ",".
        quote: The ASCII character that quotes fields. None disables quoting. Defaults to '"'.
        header: True (the default) if the first row names the columns. For files without a header, pass the names of the
            columns, or False to call them "f0", "f1", ....
        comment: The ASCII character that begins comment lines, which are skipped. Defaults to None: there are no
            comments.
        decimal: The ASCII character before the decimals of a number. Defaults to ".".
        null_values: The fields that are null in columns of numbers, bools and times. Strings and bytes are read
            literally, unless their spec has `on_null="mask"` or `"fill"`.
        on_ragged: What to do with a row that has more or fewer fields than columns. "error" (the default) raises
            `MalformedFileError`; "skip" ignores the row. The logger `fastpipe` has the count of skipped rows.
        index_cache: A directory that keeps the offsets of all rows, so that files open faster the next time, or True
            for a directory in the user's cache directory. An index is rebuilt if its file has changed. Defaults to
            None: no cache.
        storage_options: How to reach the object store of a URL, such as `{"region": "eu-west-1"}`, in the words of
            fsspec or polars. Defaults to None: the environment's credentials and settings.
        block_cache: A folder on a local disk and its size, such as `("/nvme/fastpipe", "500GB")`, which keeps bytes of
            URLs for later epochs and other processes. Paths of local files ignore it. Defaults to None: no cache.
        **options: See `fastpipe.typing.Options`.

    Returns:
        A `Reader`. Iterating over it yields dicts from feature name to array or batch form (`fastpipe.batch`).

    Raises:
        MissingFileError: If a file does not exist, or a link is dangling.
        MalformedFileError: If a file has no header, ends inside quotes, or is compressed and damaged or truncated.
            While reading, if a row is ragged, has a carriage return without a newline, or has text that isn't UTF-8.
        SchemaError: If a column does not exist or exists twice, a spec doesn't fit a CSV field, or `overrides` names a
            column that isn't inferred.
        ValueRangeError: While reading, if a field can't be parsed as its dtype.
        NullValueError: While reading, if a field is null and its spec has `on_null="error"`.
        UnsupportedError: If a file has another compression, is UTF-16, or has another format; if a compressed file that
            can only be read in sequence is read in random order; or if a URL can't be read.
        StorageError: If storage fails, a file changed, or the folder of the block cache can't be written.
        LimitError: If a row exceeds 256 MiB, or a zstandard frame needs a window of more than 128 MiB.
        TypeError: If an argument has the wrong type.
        ValueError: If arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_csv("rides.csv", columns=["distance", "city"], batch_size=2, shuffle=True, seed=7)
        >>> reader.features
        {
            "distance": fastpipe.DenseSpec((), "float64", fill=float("nan")),
            "city": fastpipe.DenseSpec((), "string"),
        }
    """
    settings = Settings(read_csv, batch_size, options)
    request = FeatureRequest.of(features, columns, overrides)
    dialect = Dialect.of(delimiter, quote, header, comment, decimal, null_values, on_ragged)
    files = opened(source, SUFFIXES, expander(storage_options, block_cache))
    data = CsvData(files, dialect, request.features, request.columns, index_cache)
    if request.features is None and request.columns is None:
        data.report_later_columns()
    if request.overrides:
        data = data.with_features(request.changed(data.features))
    data.report_skipped()
    return settings.reader(data)
