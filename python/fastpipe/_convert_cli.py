"""`fastpipe convert`: the rows of files as one file of another format, codec, size of blocks, or order."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fastpipe import AvroFile, read_arrow, read_avro, read_parquet, write_avro
from fastpipe._columns.arrow_schema import require_pyarrow
from fastpipe._progress import progress_bar
from fastpipe._replacing import replacing
from fastpipe._sources import expand
from fastpipe._terminal_text import clean, plural, size_text
from fastpipe.avro._encoded import encoded_records
from fastpipe.avro._writing import copy_records
from fastpipe.errors import FastpipeError, SchemaError
from fastpipe.reader import Reader

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
    order: dict[str, Any] = {"shuffle": True, "seed": arguments.seed or 0} if arguments.shuffle else {}
    options: dict[str, Any] = {
        "codec": codec,
        "block_bytes": arguments.block_bytes or 64 << 10,
        "progress": sys.stderr.isatty(),
    }
    if origin == to == "avro" and columns is None:
        rows = _copy(files, arguments.target, order, options)
    else:
        with _reader(origin, files, columns, order | {"batch_size": arguments.batch_size or _BATCH_SIZE}) as reader:
            if to == "avro":
                rows = write_avro(arguments.target, reader, **options).rows
            else:
                rows = _write_columns(to, arguments.target, reader, codec, options["progress"])
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


def _reader(origin: str, files: list[str], columns: Sequence[str] | None, options: dict[str, Any]) -> Reader:
    if origin == "parquet":
        return read_parquet(files, columns=columns, **options)
    if origin == "arrow":
        return read_arrow(files, columns=columns, **options)
    # Nothing is lost without a word.
    return read_avro(files, columns=columns, unsupported="error", **options)


def _copy(files: list[str], target: str, order: dict[str, Any], options: dict[str, Any]) -> int:
    """Avro to Avro: records as they are encoded."""
    first = AvroFile(files[0])
    for path in files[1:]:
        if AvroFile(path).schema != first.schema:
            reason = f"its schema isn't that of {files[0]}: convert each of them, or name the columns with --columns"
            raise SchemaError(f"{reason} (file {path})", path=path, reason=reason)
    metadata = {key: value for key, value in first.metadata.items() if not key.startswith("avro.")}
    with encoded_records(files, **order) as records:
        return copy_records(target, records, first.schema_json, metadata, **options)


def _write_columns(to: str, target: str, reader: Reader, codec: str, showing: bool) -> int:
    require_pyarrow()
    import pyarrow as pa

    name = _OF_PYARROW.get(codec, codec)
    batches = reader.to_reader()
    bar = progress_bar(len(reader) * reader.batch_size) if showing else None
    rows = 0
    try:
        with replacing(target) as temporary:
            writer: Any
            if to == "parquet":
                import pyarrow.parquet as pq

                writer = pq.ParquetWriter(temporary, batches.schema, compression=name)
            else:
                options = pa.ipc.IpcWriteOptions(compression=None if name == "none" else name)
                writer = pa.ipc.new_file(temporary, batches.schema, options=options)
            with writer:
                for batch in batches:
                    writer.write_batch(batch)
                    rows += batch.num_rows
                    if bar is not None:
                        bar.update(batch.num_rows)
    finally:
        if bar is not None:
            bar.close()
    return rows
