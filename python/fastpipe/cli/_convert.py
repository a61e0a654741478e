"""`fastpipe convert`: the rows of files as one file of another format, codec, size of blocks, or order."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fastpipe import AvroFile, write_avro
from fastpipe._progress import progress_bar
from fastpipe._text import clean, plural, size_text
from fastpipe.cli._convert_tables import Tables, tables_of
from fastpipe.errors import FastpipeError, SchemaError, UnsupportedError
from fastpipe.sources.avro._encoded import encoded_records, projection
from fastpipe.sources.avro._writing import copy_records
from fastpipe.sources.files._atomic_write import replacing
from fastpipe.sources.files._paths import expand

if TYPE_CHECKING:
    import pyarrow as pa

_SUFFIXES = {"avro": (".avro",), "parquet": (".parquet", ".pq"), "arrow": (".arrow", ".feather", ".ipc")}
_CODECS = {
    "avro": ("null", "deflate", "snappy", "zstandard", "bzip2", "xz"),
    "parquet": ("null", "snappy", "gzip", "zstandard", "lz4", "brotli"),
    "arrow": ("null", "zstandard", "lz4"),
}
_OF_PYARROW = {"null": "none", "zstandard": "zstd"}
# Rows of a row group or record batch; of Avro they change nothing of what is written.
_BATCH_SIZE = 16_384


def add_options(convert: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Adds the options to the command `convert`."""
    convert.add_argument("source", metavar="IN", help="file, directory or glob pattern of Avro, Parquet or Arrow files")
    convert.add_argument("target", metavar="OUT", help="the file to write")
    formats = tuple(_SUFFIXES)
    convert.add_argument("--from", dest="origin", choices=formats, help="what IN is; by default its suffix says it")
    convert.add_argument("--to", choices=formats, help="what OUT is; by default its suffix says it")
    codecs = list(dict.fromkeys(name for names in _CODECS.values() for name in names))
    convert.add_argument("--codec", choices=codecs, metavar="CODEC", help=f"{', '.join(codecs)} (zstandard)")
    convert.add_argument("--block-bytes", type=positive, metavar="N", help="of Avro, before compression (65536)")
    convert.add_argument("--columns", metavar="A,B,...", help="only these, with commas between them")
    convert.add_argument("--shuffle", action="store_true", help="write the rows in a random order")
    convert.add_argument("--seed", type=_seed, metavar="N", help="of that order (0)")
    convert.add_argument("--batch-size", type=positive, metavar="N", help="rows of a row group or record batch (16384)")
    convert.add_argument("--force", action="store_true", help="replace OUT if it is there")


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of at least 0")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Converts, and prints what was written.

    Returns:
        The exit code: 2 for options that don't go together.
    """
    to = arguments.to = arguments.to or _of_suffix(arguments.target)
    if to is None:
        return _usage(f"{arguments.target}: its suffix is none of {_suffixes()}; say what it is with --to")
    codec = arguments.codec or "zstandard"
    if codec not in _CODECS[to]:
        return _usage(f"the codecs of {to} are {', '.join(_CODECS[to])}, not {codec}")
    if arguments.block_bytes is not None and to != "avro":
        return _usage("--block-bytes goes with Avro; --batch-size is the rows of a row group or record batch")
    if arguments.seed is not None and not arguments.shuffle:
        return _usage("--seed goes with --shuffle")
    if os.path.lexists(arguments.target) and not arguments.force:
        return _usage(f"{arguments.target} is there; --force replaces it")
    origin = arguments.origin or _origin(arguments.source)
    if origin is None:
        return _usage(f"{arguments.source}: its suffix is none of {_suffixes()}; say what it is with --from")
    files = expand(arguments.source, _SUFFIXES[origin])
    columns = None if arguments.columns is None else [name.strip() for name in arguments.columns.split(",")]
    if columns is not None and len(set(columns)) < len(columns):
        return _usage(f"--columns names a column twice: {arguments.columns}")
    order: dict[str, Any] = {"shuffle": True, "seed": arguments.seed or 0} if arguments.shuffle else {}
    options: dict[str, Any] = {
        "codec": codec,
        "block_bytes": arguments.block_bytes or 64 << 10,
        "progress": sys.stderr.isatty(),
    }
    rows = _copy(files, columns, arguments.target, order, options) if origin == to == "avro" else None
    if rows is None:
        batch_size = arguments.batch_size or _BATCH_SIZE
        tables = tables_of(origin, files, columns, order, batch_size)
        if to == "avro":
            rows = _write_avro(arguments.target, tables, options)
        else:
            rows = _write_columns(to, arguments.target, tables, codec, batch_size, options["progress"])
    print(f"{clean(arguments.target)}: {plural(rows, 'row')}, {size_text(os.path.getsize(arguments.target))}")
    return 0


def _usage(message: str) -> int:
    print(f"fastpipe convert: {clean(message)}", file=sys.stderr)
    return 2


def _suffixes() -> str:
    return ", ".join(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)


def _of_suffix(path: str) -> str | None:
    return next((name for name, suffixes in _SUFFIXES.items() if path.endswith(suffixes)), None)


def _origin(source: str) -> str | None:
    """What a file or pattern ends in says it, else what the files of a directory end in."""
    if not os.path.isdir(source):
        return _of_suffix(source)
    for name, suffixes in _SUFFIXES.items():
        try:
            expand(source, suffixes)
        except FastpipeError:
            continue
        return name
    return None


def _copy(
    files: list[str], columns: list[str] | None, target: str, order: dict[str, Any], options: dict[str, Any]
) -> int | None:
    """Avro to Avro: records as they are encoded, or fields of theirs; None if the columns are other ones."""

    def wanted(schema: Any) -> Any:
        return schema if columns is None else projection(schema, columns)

    first = AvroFile(files[0])
    chosen = wanted(first.schema)
    if chosen is None:
        return None
    names, text = ([""], first.schema_json) if columns is None else (columns, json.dumps(chosen))
    for path in files[1:]:
        if wanted(AvroFile(path).schema) != chosen:
            reason = (
                f"its schema isn't that of {files[0]}: convert each file, or name columns that are alike (--columns)"
            )
            raise SchemaError(f"{reason} (file {path})", path=path, reason=reason)
    metadata = {key: value for key, value in first.metadata.items() if not key.startswith("avro.")}
    with encoded_records(files, names, **order) as records:
        return copy_records(target, records, text, metadata, **options)


def _write_avro(target: str, tables: Tables, options: dict[str, Any]) -> int:
    import pyarrow as pa

    for field in tables.schema:
        _check_durations(field.type, field.name)
    with tables.open() as found:
        batches = (
            batch for table in found for batch in (table.to_batches() if isinstance(table, pa.Table) else [table])
        )
        return write_avro(target, pa.RecordBatchReader.from_batches(tables.schema, batches), **options).rows


def _check_durations(kind: Any, name: str) -> None:
    """Refuses what Avro has no type for, and `write_avro` writes as numbers."""
    import pyarrow as pa

    if pa.types.is_duration(kind):
        reason = (
            f"Avro has no type for values of type {kind} (column {name!r}): cast them to int64 or to months, days and "
            "nanoseconds, or name the other columns with --columns"
        )
        raise UnsupportedError(reason, feature=name, reason=reason)
    parts = [kind.value_type] if pa.types.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    for part in parts:
        _check_durations(part, name)


def _write_columns(to: str, target: str, tables: Tables, codec: str, batch_size: int, showing: bool) -> int:
    import pyarrow as pa

    name = _OF_PYARROW.get(codec, codec)
    if to == "parquet":
        _check_parquet(tables.schema)
    bar = progress_bar(tables.rows) if showing else None
    rows = 0
    with bar or nullcontext(), replacing(target) as temporary, tables.open() as found:
        writer: Any
        if to == "parquet":
            import pyarrow.parquet as pq

            writer = pq.ParquetWriter(temporary, tables.schema, compression=name)
        else:
            options = pa.ipc.IpcWriteOptions(compression=None if name == "none" else name)
            writer = pa.ipc.new_file(temporary, tables.schema, options=options)
        with writer:
            for table in _sized(found, batch_size):
                _write_table(writer, table, batch_size)
                rows += table.num_rows
                if bar is not None:
                    bar.update(table.num_rows)
    return rows


def _write_table(writer: Any, table: pa.Table, batch_size: int) -> None:
    import pyarrow as pa

    try:
        writer.write_table(table, batch_size)
    except pa.ArrowInvalid as error:
        if "Dictionary replacement" not in str(error):
            raise
        names = ", ".join(repr(field.name) for field in table.schema if "dictionary<" in str(field.type))
        reason = (
            f"an Arrow file has one dictionary for all record batches, and the dictionaries of {names} differ in the "
            "source: convert to Parquet, name the other columns with --columns, or give a --batch-size of all rows"
        )
        raise UnsupportedError(reason, reason=reason) from error


def _check_parquet(schema: pa.Schema) -> None:
    """Refuses columns of types that pyarrow writes no Parquet of, such as intervals."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for field in schema:
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
        except pa.ArrowNotImplementedError as error:
            reason = (
                f"Parquet has no type for column {field.name!r}, {field.type} ({error}): name the other columns with "
                "--columns, or convert to Arrow"
            )
            raise UnsupportedError(reason, feature=field.name, reason=reason) from error


def _sized(found: Iterable[Any], rows: int) -> Iterator[Any]:
    """Tables of `rows` rows; the last may have fewer."""
    import pyarrow as pa

    waiting: list[Any] = []
    count = 0
    for batch in found:
        waiting.append(batch if isinstance(batch, pa.Table) else pa.table(batch))
        count += batch.num_rows
        while count >= rows:
            whole = pa.concat_tables(waiting)
            yield whole.slice(0, rows)
            waiting, count = [whole.slice(rows)], count - rows
    if count:
        yield pa.concat_tables(waiting).combine_chunks()
