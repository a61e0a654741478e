"""`fastpipe convert`: writes the rows of files to one or more files with another format, codec, block size or order."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from fastpipe._arrow.schema import require_pyarrow, schema_of
from fastpipe._fastpipe import RemoteFile
from fastpipe._files._atomic_write import replacing
from fastpipe._files._in_memory_files import File, opened
from fastpipe._files._remote_files import expander, is_remote
from fastpipe._formats import FORMATS, SUFFIXES
from fastpipe._progress import progress_bar
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import arrow_streams
from fastpipe._text import clean, plural, size_text
from fastpipe.avro import AvroFile, write_avro
from fastpipe.avro._encoded import avro_tables, encoded_records, projection
from fastpipe.avro._file import parse_schema
from fastpipe.avro._writing import Codec, copy_records
from fastpipe.cli._convert_files import even_counts, full_counts, sized, write_files
from fastpipe.errors import SchemaError, UnsupportedError, in_file
from fastpipe.specs._requests import FeatureRequest
from fastpipe.tfrecord import write_tfrecord
from fastpipe.units._arrow_files import ArrowFileUnits
from fastpipe.units._files import Files
from fastpipe.units._parquet import ParquetUnits

if TYPE_CHECKING:
    import pyarrow as pa


class Tables(NamedTuple):
    """The rows of files as Arrow data.

    Attributes:
        schema: Schema of all tables.
        rows: Total number of rows.
        open: Starts reading. The context manager yields record batches or tables of any size.
    """

    schema: pa.Schema
    rows: int
    open: Callable[[], AbstractContextManager[Iterator[Any]]]


def tables_of(
    origin: str, files: list[File], columns: list[str] | None, order: dict[str, Any], batch_size: int
) -> Tables:
    """Returns the rows of files, in storage order or shuffled.

    Args:
        origin: Format of the files: "avro", "parquet", "arrow", "csv", "tsv" or "tfrecord". The types of CSV columns
            and of the features of TFRecord files are inferred.
        files: The files.
        columns: Columns to read, or None for all. `a.b` selects a field of a record or struct.
        order: Options of a shuffled reader. Empty to keep the storage order.
        batch_size: Rows per batch, if a reader decodes the rows.

    Raises:
        UnsupportedError: If the type of a column can't be preserved (the message names the column), or a Parquet or
            Arrow file is remote.
        SchemaError: If a column doesn't exist, or the files have different columns.
    """
    require_pyarrow()
    if origin == "avro":
        schema, reader, tables = avro_tables(files, columns, batch_size=batch_size, **order)
        return Tables(schema, reader.num_rows, lambda: _Closing(reader, tables))
    if origin in ("csv", "tsv", "tfrecord"):
        read = _FORMATS[origin].read(files, columns=columns, batch_size=batch_size, **order)
        return Tables(schema_of(read.features), read.num_rows, lambda: _Closing(read, read.to_arrow_reader()))
    if remote := [str(file) for file in files if isinstance(file, RemoteFile)]:
        reason = "fastpipe convert reads Parquet and Arrow files only from local disks: copy or mount them there"
        raise in_file(UnsupportedError, remote[0], reason)
    parquet = origin == "parquet"
    kind, storage = ParquetUnits if parquet else ArrowFileUnits, Files(None)
    how: dict[str, Any] = {"hive": True, "parallel": True} if parquet else {}
    units: Any = kind(storage, storage.find(files, kind.suffixes), **how)
    units.check(FeatureRequest(None, columns))
    whole: pa.Schema = units.schema
    names = whole.names if columns is None else columns
    schema = _chosen(whole, names)
    if order:
        reader = _FORMATS[origin].read(files, columns=columns, batch_size=batch_size, **order)
        _check_kept(schema, schema_of(reader.features))
        return Tables(schema, sum(units.rows), lambda: _Closing(reader, _cast(reader.to_arrow_reader(), schema)))
    units = units.select(list(dict.fromkeys(_root(whole, name) for name in names)))
    return Tables(schema, sum(units.rows), lambda: nullcontext(_of_units(units, names, schema)))


class _Closing(AbstractContextManager[Iterator[Any]]):
    """Yields the tables of a reader, and closes the reader at the end."""

    def __init__(self, reader: Reader, tables: Iterator[Any]) -> None:
        self._reader, self._tables = reader, tables

    def __enter__(self) -> Iterator[Any]:
        return self._tables

    def __exit__(self, *exception: object) -> None:
        self._reader.close()


def _root(schema: pa.Schema, name: str) -> str:
    """Returns the top-level column of a path."""
    return name if name in schema.names else name.partition(".")[0]


def _chosen(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Returns a schema of the fields with these paths."""
    import pyarrow as pa

    fields = []
    for name in names:
        found, *rest = _steps(schema, name)
        if found not in schema.names:
            raise _missing(name, found, schema.names)
        field, nullable = schema.field(found), schema.field(found).nullable
        for step in rest:
            if not pa.types.is_struct(field.type):
                reason = f"column {name!r} is nested in a value of type {field.type}: select the whole column {found!r}"
                raise SchemaError(reason, feature=name, reason=reason)
            steps = [field.type.field(i).name for i in range(field.type.num_fields)]
            if step not in steps:
                raise _missing(name, step, steps)
            field = field.type.field(steps.index(step))
            nullable |= field.nullable
        fields.append(field.with_name(name).with_nullable(nullable))
    return pa.schema(fields, metadata=schema.metadata)


def _steps(schema: pa.Schema, name: str) -> list[str]:
    return [name] if name in schema.names else name.split(".")


def _missing(name: str, step: str, names: Sequence[str]) -> SchemaError:
    reason = f"column {name!r}: unknown field {step!r}; the fields are {', '.join(names)}"
    return SchemaError(reason, feature=name, reason=reason)


def _of_units(units: Any, names: Sequence[str], schema: pa.Schema) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.compute

    slices = getattr(units, "read_slices", None)
    for unit, rows in enumerate(units.rows):
        for table in [units.read(unit)] if slices is None else slices(unit, 0, min(rows, 1 << 16)):
            columns = []
            for name in names:
                first, *rest = _steps(units.schema, name)
                column = table.column(table.schema.names.index(first))
                columns.append(pyarrow.compute.struct_field(column, rest) if rest else column)
            yield _as(pa.table(columns, names=list(names)), schema)


def _cast(batches: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[Any]:
    import pyarrow as pa

    for batch in batches:
        yield _as(pa.table(batch), schema)


def _as(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Casts a table to the types of a schema. Readers may return text as dictionaries."""
    import pyarrow as pa

    columns = zip(table.columns, schema, strict=True)
    arrays = [column if column.type == field.type else column.cast(field.type) for column, field in columns]
    return pa.table(arrays, schema=schema)


def _check_kept(schema: pa.Schema, read: pa.Schema) -> None:
    """Refuses columns whose type in a batch differs from their type in the files."""
    for field in schema:
        if field.name not in read.names or _plain(read.field(field.name).type) != _plain(field.type):
            reason = (
                f"shuffled batches can't preserve the type of column {field.name!r}, {field.type}: convert "
                "to Avro without --shuffle and shuffle that file, or select other columns with --columns"
            )
            raise UnsupportedError(reason, feature=field.name, reason=reason)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Normalizes a type: 32-bit offsets, and no names or nullability of list items."""
    import pyarrow as pa

    types = pa.types
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    return kind


_FORMATS = {each.name: each for each in FORMATS}
# The formats that can be written, and their codecs.
_CODECS = {
    "avro": get_args(Codec),
    "parquet": ("null", "snappy", "gzip", "zstandard", "lz4", "brotli"),
    "arrow": ("null", "zstandard", "lz4"),
    "tfrecord": ("null",),
}
# All Avro libraries read deflate, but not all of them zstandard.
_DEFAULT_CODECS = {"avro": "deflate", "parquet": "zstandard", "arrow": "zstandard", "tfrecord": "null"}
_OF_PYARROW = {"null": "none", "zstandard": "zstd"}
# Default number of rows in a row group or record batch. It doesn't affect Avro output.
_BATCH_SIZE = 16_384


def add_options(convert: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Adds the options of the command `convert`."""
    convert.add_argument(
        "source", metavar="IN", help="file, URL, directory or glob of Avro, Parquet, Arrow, CSV or TFRecord files"
    )
    convert.add_argument("target", metavar="OUT", help="file to write, or directory with --files or --rows-per-file")
    convert.add_argument(
        "--from", dest="origin", choices=tuple(_FORMATS), help="format of IN (default: from its suffix)"
    )
    convert.add_argument("--to", choices=tuple(_CODECS), help="format of OUT (default: from its suffix)")
    codecs = list(dict.fromkeys(name for names in _CODECS.values() for name in names))
    usual = "default: deflate for Avro, zstandard for Parquet and Arrow"
    convert.add_argument("--codec", choices=codecs, metavar="CODEC", help=f"{', '.join(codecs)} ({usual})")
    convert.add_argument(
        "--block-bytes", type=positive, metavar="N", help="Avro block size in bytes before compression (default: 65536)"
    )
    convert.add_argument("--columns", metavar="A,B,...", help="comma-separated columns to write (default: all)")
    convert.add_argument("--shuffle", action="store_true", help="write the rows in a random order")
    convert.add_argument("--seed", type=_seed, metavar="N", help="shuffle seed (default: 0)")
    convert.add_argument(
        "--batch-size", type=positive, metavar="N", help="rows per row group or record batch (default: 16384)"
    )
    several = convert.add_mutually_exclusive_group()
    several.add_argument(
        "--files", type=positive, metavar="N", help="write a directory of N files whose numbers of rows differ by one"
    )
    several.add_argument(
        "--rows-per-file", type=positive, metavar="N", help="write a directory of files with N rows each"
    )
    convert.add_argument("--force", action="store_true", help="replace the file OUT if it exists")


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0; got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Converts the files, and prints a summary of the output.

    Returns:
        The exit code: 0, or 2 for invalid combinations of options.
    """
    if is_remote(arguments.target):
        return _usage(f"{arguments.target} is a URL: write to a local disk, and upload the result")
    split = arguments.files is not None or arguments.rows_per_file is not None
    origin = arguments.origin or _origin(arguments.source)
    to = arguments.to or _of_suffix(arguments.target) or (origin if split else None)
    if to not in _CODECS:
        return _usage(f"{arguments.target}: its suffix must be one of {_suffixes(_CODECS)}; set the format with --to")
    codec = arguments.codec or _DEFAULT_CODECS[to]
    if codec not in _CODECS[to]:
        return _usage(f"the codec for {to} must be one of {', '.join(_CODECS[to])}; got {codec}")
    if arguments.block_bytes is not None and to != "avro":
        return _usage(
            "--block-bytes requires Avro output; use --batch-size for the rows of a row group or record batch"
        )
    if arguments.seed is not None and not arguments.shuffle:
        return _usage("--seed requires --shuffle")
    if os.path.lexists(arguments.target) and (split or not arguments.force):
        hint = "remove it, or name another directory" if split else "use --force to replace it"
        return _usage(f"{arguments.target} already exists; {hint}")
    if origin is None:
        return _usage(
            f"{arguments.source}: its suffix must be one of {_suffixes(_FORMATS)}; set the format with --from"
        )
    files = opened(arguments.source, _FORMATS[origin].suffixes, expander(None))
    columns = None if arguments.columns is None else [name.strip() for name in arguments.columns.split(",")]
    if columns is not None and len(set(columns)) < len(columns):
        return _usage(f"--columns names a column twice: {arguments.columns}")
    order: dict[str, Any] = {"shuffle": True, "seed": arguments.seed or 0} if arguments.shuffle else {}
    block_bytes, batch_size = arguments.block_bytes or 64 << 10, arguments.batch_size or _BATCH_SIZE
    made = _copying(files, columns, order, codec, block_bytes) if origin == to == "avro" else None
    if made is None:
        tables = tables_of(origin, files, columns, order, batch_size)
        if to == "avro":
            made = _to_avro(tables, codec, block_bytes)
        else:
            made = _to_records(tables) if to == "tfrecord" else _to_columns(to, tables, codec, batch_size)
    if arguments.files is not None and arguments.files > max(made.rows, 1):
        have = plural(made.rows, "row")
        return _usage(f"--files {arguments.files} is more than {have}, and each file needs one: use fewer files")
    bar = progress_bar(made.rows) if sys.stderr.isatty() else None
    on_progress = _ignore if bar is None else bar.update
    with bar or nullcontext(), made.open() as found:
        if not split:
            made.write(arguments.target, found, on_progress)
            written, size = "", os.path.getsize(arguments.target)
        else:
            most = arguments.rows_per_file
            counts = full_counts(made.rows, most) if most is not None else even_counts(made.rows, arguments.files)
            write, suffix = made.write, _FORMATS[to].ends[0]
            size = write_files(
                arguments.target, suffix, counts, map(_table, found), lambda path, rows: write(path, rows, on_progress)
            )
            written = f" in {plural(len(counts), 'file')}"
    print(f"{clean(arguments.target)}: {plural(made.rows, 'row')}{written}, {size_text(size)}")
    return 0


def _ignore(rows: int) -> None:
    """Takes the place of a progress bar."""


def _table(found: Any) -> Any:
    """Returns a table or record batch of pyarrow, whose rows can be sliced."""
    return found if hasattr(found, "slice") else require_pyarrow().record_batch(found)


def _usage(message: str) -> int:
    print(f"fastpipe convert: {clean(message)}", file=sys.stderr)
    return 2


def _suffixes(formats: Iterable[str]) -> str:
    return ", ".join(suffix for name in formats for suffix in _FORMATS[name].ends)


def _of_suffix(path: str) -> str | None:
    return next((name for name, each in _FORMATS.items() if path.endswith(each.ends)), None)


def _origin(source: str) -> str | None:
    """Detects the format from the suffix of a file or pattern, or from the files in a directory."""
    if not os.path.isdir(source) and ((named := _of_suffix(source)) or not is_remote(source)):
        return named
    return _of_suffix(str(opened(source, SUFFIXES, expander(None))[0]))


class _Conversion(NamedTuple):
    """The rows of files, and how they are written to a file.

    Attributes:
        rows: Total number of rows.
        open: Starts reading. The context manager yields Arrow data.
        write: Writes Arrow data to the file at a path, and calls a function with the number of rows of each table.
            Returns the number of rows.
    """

    rows: int
    open: Callable[[], AbstractContextManager[Iterator[Any]]]
    write: Callable[[str, Iterable[Any], Callable[[int], object]], int]


def _copying(
    files: list[File], columns: list[str] | None, order: dict[str, Any], codec: str, block_bytes: int
) -> _Conversion | None:
    """Copies encoded Avro records or fields to Avro. Returns None if the columns need decoding."""

    def wanted(schema: Any) -> Any:
        return schema if columns is None else projection(schema, columns)

    first = AvroFile._from(files[0])
    chosen = wanted(first.schema)
    if chosen is None:
        return None
    names, text = ([""], first.schema_json) if columns is None else (columns, json.dumps(chosen))

    def check(path: str, schema: str) -> None:
        if wanted(parse_schema(schema, path)) != chosen:
            reason = f"its schema differs from that of {first.path}: convert each file, or pass common --columns"
            raise in_file(SchemaError, path, reason)

    metadata = {key: value for key, value in first.metadata.items() if not key.startswith("avro.")}
    records = encoded_records(files, names, check=check, **order)

    def write(path: str, batches: Iterable[Any], on_progress: Callable[[int], object]) -> int:
        return copy_records(
            path, batches, text, metadata, codec=codec, block_bytes=block_bytes, on_progress=on_progress
        )

    return _Conversion(records.num_rows, lambda: _Closing(records, arrow_streams(records).batches()), write)


def _to_avro(tables: Tables, codec: Any, block_bytes: int) -> _Conversion:
    import pyarrow as pa

    for field in tables.schema:
        _check_durations(field.type, field.name)

    def write(path: str, found: Iterable[Any], on_progress: Callable[[int], object]) -> int:
        def batches() -> Iterator[Any]:
            for table in found:
                for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
                    yield batch
                    on_progress(batch.num_rows)

        data = pa.RecordBatchReader.from_batches(tables.schema, batches())
        return write_avro(path, data, codec=codec, block_bytes=block_bytes).rows

    return _Conversion(tables.rows, tables.open, write)


def _to_records(tables: Tables) -> _Conversion:
    def write(path: str, found: Iterable[Any], on_progress: Callable[[int], object]) -> int:
        def counted() -> Iterator[Any]:
            for table in found:
                yield table
                on_progress(table.num_rows)

        return write_tfrecord(path, counted()).rows

    return _Conversion(tables.rows, tables.open, write)


def _check_durations(kind: Any, name: str) -> None:
    """Refuses types that Avro doesn't have and `write_avro` would write as plain numbers."""
    import pyarrow as pa

    if pa.types.is_duration(kind):
        reason = (
            f"Avro has no type for values of type {kind} (column {name!r}): cast it to int64 or to months, days and "
            "nanoseconds, or select other columns with --columns"
        )
        raise UnsupportedError(reason, feature=name, reason=reason)
    parts = [kind.value_type] if pa.types.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    for part in parts:
        _check_durations(part, name)


def _to_columns(to: str, tables: Tables, codec: str, batch_size: int) -> _Conversion:
    name = _OF_PYARROW.get(codec, codec)
    if to == "parquet":
        _check_parquet(tables.schema)

    def write(path: str, found: Iterable[Any], on_progress: Callable[[int], object]) -> int:
        import pyarrow as pa

        rows = 0
        with replacing(path) as temporary:
            writer: Any
            if to == "parquet":
                import pyarrow.parquet as pq

                writer = pq.ParquetWriter(temporary, tables.schema, compression=name)
            else:
                options = pa.ipc.IpcWriteOptions(compression=None if name == "none" else name)
                writer = pa.ipc.new_file(temporary, tables.schema, options=options)
            with writer:
                for table in sized(found, batch_size):
                    _write_table(writer, table, batch_size)
                    rows += table.num_rows
                    on_progress(table.num_rows)
        return rows

    return _Conversion(tables.rows, tables.open, write)


def _write_table(writer: Any, table: pa.Table, batch_size: int) -> None:
    import pyarrow as pa

    try:
        writer.write_table(table, batch_size)
    except pa.ArrowInvalid as error:
        if "Dictionary replacement" not in str(error):
            raise
        names = ", ".join(repr(field.name) for field in table.schema if "dictionary<" in str(field.type))
        reason = (
            f"an Arrow file has one dictionary for all record batches, but the dictionaries of {names} differ in the "
            "source: convert to Parquet, select other columns with --columns, or set --batch-size to the number of rows"
        )
        raise UnsupportedError(reason, reason=reason) from error


def _check_parquet(schema: pa.Schema) -> None:
    """Refuses columns of types that pyarrow can't write to Parquet, such as intervals."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for field in schema:
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
        except pa.ArrowNotImplementedError as error:
            reason = (
                f"Parquet has no type for column {field.name!r}, {field.type} ({error}): select other columns with "
                "--columns, or convert to Arrow"
            )
            raise UnsupportedError(reason, feature=field.name, reason=reason) from error
