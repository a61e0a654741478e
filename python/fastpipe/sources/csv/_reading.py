"""Reading CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import SupportsIndex, Unpack

from fastpipe._arrow.schema import asked_for
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.sources.csv._data import SUFFIXES, CsvData
from fastpipe.sources.csv._dialect import DEFAULT_NULLS, Dialect, Header, OnRagged
from fastpipe.sources.files._in_memory_files import Source, opened
from fastpipe.sources.files._index_cache import IndexCache
from fastpipe.specs import Spec

__all__ = ["read_csv"]


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
