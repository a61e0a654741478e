"""CSV files: how they are written, as a data set, and their reader."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, SupportsIndex, TypeAlias, Unpack

from fastpipe._arguments import names, shown
from fastpipe._arrow.schema import asked_for
from fastpipe._boundary import LoweredDialect
from fastpipe._fastpipe import CsvDataset
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.ordering import digest
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import VERSION
from fastpipe.sources.files._in_memory_files import Contents, Source, lowered, opened
from fastpipe.sources.files._index_cache import IndexCache
from fastpipe.specs import Features, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies

Header: TypeAlias = bool | Sequence[str]
OnRagged: TypeAlias = Literal["error", "skip"]

DEFAULT_NULLS = ("", "NA", "N/A", "NULL", "null", "None", "NaN", "nan")


@dataclass(frozen=True)
class Dialect:
    """How files are written, checked.

    Attributes:
        delimiter: as in `read_csv`, like the others.
    """

    delimiter: str
    quote: str | None
    header: bool | tuple[str, ...]
    comment: str | None
    decimal: str
    null_values: tuple[str, ...]
    on_ragged: OnRagged

    lossless: ClassVar[bool] = False
    """Whether floats refuse integers that they would round, and finite numbers that would be infinite."""

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
        """Checks what users give.

        Raises:
            TypeError: if an argument is of the wrong type.
            ValueError: if one is out of range.
        """
        if on_ragged not in ("error", "skip"):
            raise ValueError(f'on_ragged is "error" or "skip", not {shown(on_ragged)}')
        if isinstance(null_values, str) or not isinstance(null_values, Iterable):
            raise TypeError(f"null_values is a list of words, not {shown(null_values)}")
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
        """Plain values for the extension module."""
        quote = None if self.quote is None else ord(self.quote)
        comment = None if self.comment is None else ord(self.comment)
        header = self.header if isinstance(self.header, bool) else list(self.header)
        words = [word.encode() for word in self.null_values]
        skip = self.on_ragged == "skip"
        return ord(self.delimiter), quote, comment, ord(self.decimal), header, words, skip, self.lossless


class LosslessDialect(Dialect):
    """The same, read into floats only if they keep integers and finite numbers. Decimal fractions are rounded."""

    lossless = True


def _header(header: Any) -> tuple[str, ...]:
    given = tuple(names("header", header))
    if not given:
        raise ValueError("header is empty: name each column")
    twice = next((name for name, count in Counter(given).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"header names {twice!r} twice: columns need names of their own")
    return given


def _character(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is one character, not {shown(value)}")
    if len(value) != 1 or not value.isascii():
        raise ValueError(f"{name} is one ASCII character, not {shown(value)}")
    return str(value)


DEFAULT_DIALECT = Dialect.of(",", '"', True, None, ".", DEFAULT_NULLS, "error")


# Of the files that are taken from a directory: compressed ones beside others.
SUFFIXES = ((".csv", ".csv.gz", ".csv.zst"), (".tsv", ".tsv.gz", ".tsv.zst"))

_WORDS = SourceWording(
    units="stretches",
    advice={
        "reading": "Storage is the limit: faster disks make it faster; more threads don't, unless it is far away.",
        "parsing": "Fewer columns take less, and so do numbers with fewer digits; more threads help; Parquet, Arrow "
        "and Avro files need no parsing.",
        "fetching": "Decompressing is the limit: files in one piece are decompressed on one thread, one after the "
        "other; zstandard is faster than gzip.",
        "indexing": "Rows are looked for before they can be picked. Later epochs remember where they start, up to 16 "
        "million rows.",
    },
    other_digest="the data set has other contents, or its files other names or another order",
)


class CsvLocation(NamedTuple):
    """Where a row stands.

    Attributes:
        file: the path of its file.
        row: its number in the file, from 0; headers, comments and empty lines aren't counted.
    """

    file: str
    row: int


class CsvData:
    """CSV files, opened for a set of features: the `Data` of `read_csv`.

    Args:
        files: their paths, or what lies in memory.
        dialect: how they are written.
        features: as in `read_csv`.
        columns: as in `read_csv`.
        index_cache: as in `read_csv`.
    """

    words = _WORDS
    column_times = None

    def __init__(
        self,
        files: Sequence[str | Contents],
        dialect: Dialect,
        features: Features | None,
        columns: Sequence[str] | None = None,
        index_cache: IndexCache = None,
    ) -> None:
        chosen = None if columns is None else list(columns)
        wanted = chosen if features is None else features._lower()
        self.handle = CsvDataset(lowered(files, index_cache), dialect.lowered(), wanted)
        self._given, self._dialect, self._index_cache = list(files), dialect, index_cache
        self.files = list(map(str, files))
        self._asked = _inferred(self.handle) if features is None else features
        self.features = vocabularies.in_form(self._asked, self.handle.features)
        self.symbols: dict[str, list[str]] = {}
        self._fingerprint: dict[str, Any] | None = None

    @classmethod
    def of_rows(cls, handle: CsvDataset, dialect: Dialect, features: Features | None) -> CsvData:
        """Rows that were picked out of files, which a sample is read of: no state is made of it, and no process has it.

        Args:
            handle: the rows.
            dialect: how they are written.
            features: as in `read_csv`; None if they are inferred.
        """
        data = cls.__new__(cls)
        data.handle = handle if features is not None else handle.inferred()
        data._given, data._dialect, data._index_cache = [], dialect, None
        data.files = [path for path, _, _ in handle.files()]
        data.symbols, data._fingerprint = {}, None
        if features is not None:
            return data.with_features(features)
        data._asked = data.features = _inferred(data.handle)
        return data

    def with_features(self, features: Features) -> Self:
        """The same files, read for other features: nothing is opened."""
        data = type(self).__new__(type(self))
        # Copies are made as pickles are read, by opening files again.
        data.__dict__.update(self.__dict__)
        data.handle = self.handle.with_features(features._lower())
        data._asked = features
        data.features = vocabularies.in_form(features, data.handle.features)
        return data

    @property
    def text_bytes(self) -> int:
        """Bytes of all rows, decompressed."""
        return self.handle.text_bytes()

    @property
    def interpretation(self) -> dict[str, Any]:
        """Lookups, and the dialect."""
        return {"lookups": vocabularies.described(self._asked), "dialect": asdict(self._dialect)}

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """How many files, rows and bytes; and a digest of the files.

        Of each it has the name without folders, the size, 64 KiB at either end, as they are stored, and where its rows
        lie.
        """
        if self._fingerprint is None:
            parts = []
            files = self.handle.files()
            for path, size, ends in files:
                name = os.path.basename(path).encode(errors="surrogateescape")
                parts.append(
                    len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little") + ends.to_bytes(8, "little")
                )
            parts.append(self.handle.layout())
            self._fingerprint = {
                "files": len(files),
                "rows": self.handle.num_rows,
                "bytes": sum(size for _, size, _ in files),
                "digest": digest(*parts),
            }
        return self._fingerprint

    def place(self, unit: int, record: int) -> CsvLocation:
        """The file, and the number of the row."""
        return CsvLocation(*self.handle.place_of(unit, record))

    def __reduce__(self) -> tuple[Any, ...]:
        return CsvData, (self._given, self._dialect, self._asked, None, self._index_cache)

    def __str__(self) -> str:
        return self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"


def _inferred(handle: CsvDataset) -> Features:
    """Specs of what was found: floats have NaN where a field stands for no value."""
    found = inferred(handle.features())
    # Columns of a type share one spec.
    distinct = {id(spec): spec for spec in found.values()}
    made = {key: _with_nan(spec) for key, spec in distinct.items()}
    return Features({name: made[id(spec)] for name, spec in found.items()})


def _with_nan(spec: Spec) -> Spec:
    return replace(spec, fill=math.nan) if spec.nulls == "fill" and spec.dtype == "float64" else spec


@takes_options()
def read_csv(
    source: Source,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: SupportsIndex,
    delimiter: str = ",",
    quote: str | None = '"',
    header: Header = True,
    comment: str | None = None,
    decimal: str = ".",
    null_values: Sequence[str] = DEFAULT_NULLS,
    on_ragged: OnRagged = "error",
    index_cache: IndexCache = None,
    **options: Unpack[Options],
) -> Reader:
    """Reads CSV files as batches of NumPy arrays.

    Files are scanned for their rows at once, at the speed of memory, and parsed as rows are asked for. A row ends with
    a newline, or a carriage return and a newline, that isn't within quotes. A field is quoted if it begins with a
    quote; a doubled quote in it is one; a quote anywhere else stands for itself. Empty lines are no rows. That is what
    Python's `csv` reads, but for a carriage return without a newline, which is an error.

    Files that are compressed with gzip or zstandard are known by their first bytes, and decompressed as they are read.
    One of several members or frames (`bgzip`, `pzstd`), or of at most 16 MiB of text, can be read in every order; one
    in one piece only in sequence, with `shuffle=False` or `shuffle="buffer"`.

    When rows are shuffled, `shuffle_buffer` is as many as 16 batches or 64 stretches of 64 KiB have, whichever is more,
    unless it is given.

    Args:
        source: a path, a glob, a directory (all `*.csv`, `*.csv.gz` and `*.csv.zst` below it; if there are none, those
            of `*.tsv`), or a list of these, as in `read_avro`. Or a contiguous buffer of the bytes of a file, or a
            binary file object. Files may have their columns in different orders, and others beside those that are read.
        features: spec of each wanted feature, by name: `DenseSpec((), dtype)` of any number, bool, datetime64, "string"
            or "bytes"; `VocabularySpec` or `HashSpec` for text as indices. A spec's `field` names the column, if it
            isn't the feature's name.
        columns: names out of what is inferred, instead of `features`. With neither, all columns are read.

            Inferred are, by a look at all rows up to 16 MiB, else at those of 64 stretches spread over the files: bool
            (true, false), int64, uint64, float64 (NaN for no value), datetime64[D] (2024-02-29), datetime64[us] or [ns]
            (2024-02-29T12:30:00.5Z, with a blank in the place of T, or an offset in that of Z), else strings. Numbers
            with leading zeros and integers that would be rounded are strings unless `features` says otherwise. Times
            are NaT where a field stands for no value. Integers and truth values are masked if any row of the files has
            such a field in their column; the scan for rows looks for them. Columns without any value are float64. A
            field that turns out to be of another type is a `ValueRangeError` that says where and what to pass.
        batch_size: rows a batch.
        delimiter: one ASCII character.
        quote: one ASCII character; None if quotes stand for themselves.
        header: True if the first row names the columns; False if there are no names, and columns are called "f0", "f1",
            ...; or the names, of files without any.
        comment: a character; lines that begin with it are no rows. None if there are no comments.
        decimal: the mark in front of a number's decimals.
        null_values: fields that stand for no value, where numbers, truth values and times are read. Strings and bytes
            are what they are, unless their spec has `nulls="mask"` or `"fill"`.
        on_ragged: "error" raises `MalformedFileError` at a row with more or fewer fields than there are columns; "skip"
            passes over such rows, as if they weren't there.
        index_cache: a directory in which the places of all rows are kept, so that the next opening needn't scan for
            them; True for one in the user's cache directory; None for none. As in `read_avro`.
        **options: see `fastpipe.Options`.

    Returns:
        A `Reader`; iterating over it yields dicts from feature name to array or batch form (`fastpipe.batch`).

    Raises:
        MissingFileError: if a file isn't there, or a link leads nowhere.
        MalformedFileError: if a file has no header, a row ends within quotes, a compressed file is damaged or cut
            short, or, while reading, a row is ragged, has a carriage return without a newline, or text that isn't
            UTF-8.
        SchemaError: if a column isn't there, or is there twice, or a spec is none that a field can have.
        ValueRangeError: while reading, if a field isn't a value of its dtype.
        NullValueError: while reading, if a field stands for no value, and the spec has `nulls="error"`.
        UnsupportedError: for files that are compressed otherwise, in UTF-16, or of another format; for random orders of
            compressed files in one piece; and URLs.
        StorageError: if storage fails, or a file changed.
        LimitError: if a row has more than 256 MiB, or a zstandard frame needs a window of more than 128 MiB.
        TypeError: if an argument is of the wrong type.
        ValueError: if arguments exclude each other or are out of range.

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
    wanted, chosen = asked_for(features, columns)
    dialect = Dialect.of(delimiter, quote, header, comment, decimal, null_values, on_ragged)
    files = opened(source, SUFFIXES)
    return settings.reader(CsvData(files, dialect, wanted, chosen, index_cache))
