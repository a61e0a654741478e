"""Writes Avro container files."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from fastpipe._arguments import flag, memory_size, shown, within
from fastpipe._boundary import AvroWriting
from fastpipe._fastpipe import AvroWriter, ContainerFile
from fastpipe._files._atomic_write import replacing, truncated_on_failure
from fastpipe._files._written_rows import Part, bar_of, parts_of
from fastpipe._local_path import local
from fastpipe._omissions import stacklevel

Codec: TypeAlias = Literal["null", "deflate", "snappy", "zstandard", "bzip2", "xz"]

# About the size that Java's writer uses.
_BLOCK_BYTES = 64 << 10
# Readers reject larger blocks.
_MOST_BLOCK_BYTES = 1 << 30
_SYNC_BYTES = 16


class WrittenFile(NamedTuple):
    """Result of `write_avro`.

    Attributes:
        rows: Number of records that were written or appended.
        blocks: Number of blocks, the units of reading and shuffling.
        size: Number of bytes.
    """

    rows: int
    blocks: int
    size: int


def write_avro(
    path: str | os.PathLike[str],
    data: Any,
    schema: str | Mapping[str, Any] | None = None,
    *,
    codec: Codec | None = None,
    level: int | None = None,
    block_bytes: int | str = _BLOCK_BYTES,
    append: bool = False,
    progress: bool = False,
    metadata: Mapping[str, str | bytes] | None = None,
    num_threads: int | Literal["auto"] = "auto",
) -> WrittenFile:
    """Writes batches, Arrow data, or the batches of a reader to an Avro container file.

    Data is written as it arrives; only one batch and a few blocks are held in memory. The file appears once it is
    complete and synced to disk. Until then, and after an error or Ctrl-C, `path` keeps its old content. The same rows
    produce the same blocks, no matter how they are split into batches or how many threads compress them.

    Args:
        path: The path of the file. An existing file is replaced.
        data: A batch (a dict from name to array or form), a `Reader`, an object with `__arrow_c_stream__` or
            `__arrow_c_array__` (such as tables and record batches of pyarrow or data frames of polars), or an iterable
            of these. Columns `a.b` and `a.c` are written as fields of a record `a`.
        schema: An Avro schema, as JSON text or parsed: a record whose fields are the columns, in any order. Values are
            converted to its types if the conversion loses at most digits of floating-point numbers. Unions must consist
            of null and one type. By default, the schema is derived from the data's types; the manual's page on writing
            has the rules.
        codec: "null", "deflate", "snappy", "zstandard", "bzip2" or "xz". Defaults to "deflate", which all Avro
            libraries read, or to the file's codec when appending. "zstandard" compresses and decompresses faster.
        level: The compression level of deflate (1 to 12, default 6), zstandard (-7 to 22, default 3), bzip2 (1 to 9,
            default 9) or xz (0 to 9, default 6).
        block_bytes: The size before compression at which a block is closed: a number of bytes, 1 to 2^30, or a size
            such as "64KiB" (the default). Readers read, decompress and shuffle by blocks.
        append: Whether to write after the last complete block of an existing file, with its schema, codec and sync
            marker. An error truncates the file to that block. A killed process leaves an incomplete block at the end.
            The next call with `append=True` cuts it off, with a `RuntimeWarning` that names the file and the number of
            lost bytes.
        progress: Whether to show a progress bar, which requires the extra `progress`. Defaults to False.
        metadata: Additional entries of the header, from key to str or bytes. Keys that begin with "avro." are reserved.
        num_threads: The number of threads that compress, 1 to 1024. Defaults to "auto": the number of processors that
            the process may use.

    Returns:
        The counts of rows, blocks and bytes that were written.

    Raises:
        SchemaError: If the schema can't be parsed, the columns differ from its fields in name or type, or a name is not
            valid in Avro.
        UnsupportedError: If Avro has no counterpart of a type, for example of unions.
        ValueRangeError: If a value doesn't fit the schema's type.
        NullValueError: If the data contains a null that the schema doesn't allow.
        MalformedFileError: If the file to append to is damaged other than by an incomplete last block, or Arrow data is
            inconsistent.
        MissingFileError: If the directory, or the file to append to, does not exist.
        StorageError: If the disk is full, permission is missing, or a stream fails.
        LimitError: If a row exceeds the maximum size of a block.
        ImportError: If `progress` is True and tqdm isn't installed.
        TypeError: If an argument has the wrong type.
        ValueError: If arguments are out of range or exclude each other.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro(
        ...     "data/*.avro", columns=["user.id", "label"], batch_size=1024, shuffle=True, seed=7
        ... )
        >>> fastpipe.write_avro("shuffled.avro", reader).rows
        6144
    """
    target = local(path, "path must be a path")
    text = _schema_text(schema)
    writing = AvroWriting(
        codec=codec or "deflate",
        block_bytes=within("block_bytes", memory_size("block_bytes", block_bytes), 1, _MOST_BLOCK_BYTES),
        level=None if level is None else within("level", level, -(2**31), 2**31 - 1),
        num_threads=_threads(num_threads),
        sync=os.urandom(_SYNC_BYTES),
        metadata=_entries(metadata),
    )
    if codec is not None and not isinstance(codec, str):
        raise TypeError(f"codec must be the name of a codec; got {shown(codec)}")
    given = parts_of(data)
    appending, showing = flag("append", append), flag("progress", progress)
    if appending:
        if metadata is not None:
            raise ValueError("metadata is part of the header, which append=True doesn't change: leave metadata out")
        known, length = _appendable(target, codec)
        writing, schema_there = writing._replace(codec=known.codec, sync=known.sync_marker), known.schema_json
        place: Any = truncated_on_failure(target, length)
    else:
        schema_there, place = None, replacing(target)
    with bar_of(data, showing) as bar, place as temporary:
        writer = AvroWriter(temporary or target, shown=target, schema=text, writing=writing, appending_to=schema_there)
        try:
            _write(writer, given, text is None and not appending, None if bar is None else bar.update)
            rows, blocks, written = writer.finish()
        finally:
            writer.close()
        if bar is not None:
            bar.total = bar.n
    return WrittenFile(rows, blocks, written)


def copy_records(
    path: str,
    batches: Iterable[Any],
    schema: str,
    metadata: Mapping[str, bytes],
    *,
    codec: str,
    block_bytes: int,
    on_progress: Callable[[int], object],
) -> int:
    """Writes encoded records with any schema, without decoding them.

    Args:
        path: The path of the file. An existing file is replaced.
        batches: Arrow data of encoded records, as a reader of `encoded_records` yields it.
        schema: The schema of the records, which is written unchanged.
        metadata: Additional entries of the header.
        codec: The name of the codec, which compresses at its default level.
        block_bytes: The size in bytes, before compression, at which a block is closed.
        on_progress: Function that is called with the number of records of each batch, after they were written.

    Returns:
        The number of records that were written.
    """
    with replacing(path) as temporary:
        sync = os.urandom(_SYNC_BYTES)
        writing = AvroWriting(codec, None, block_bytes, _threads("auto"), sync, list(metadata.items()))
        writer = AvroWriter(temporary, shown=path, schema=schema, writing=writing, encoded=True)
        try:
            for batch in batches:
                on_progress(writer.copy(batch))
                del batch  # Releases it before the next batch is drawn.
            rows, _, _ = writer.finish()
        finally:
            writer.close()
    return rows


def _write(writer: AvroWriter, given: Iterator[Part], inferring: bool, on_progress: Any) -> None:
    known = not inferring
    for data, required, declared in given:
        if declared is not None:
            writer.declare(declared, required)
        else:
            writer.write(data, required, on_progress)
        known = True
        del data  # Releases it before the next item is drawn.
    if not known:
        raise ValueError("the data is empty, without even an empty batch to derive a schema from: pass schema=")


def _schema_text(schema: Any) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    if isinstance(schema, (Mapping, list)):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise TypeError(f"schema can't be written as JSON: {error}") from error
    raise TypeError(f"schema must be an Avro schema, as JSON or as a dict; got {shown(schema)}")


def _threads(num_threads: Any) -> int:
    if isinstance(num_threads, str) and num_threads == "auto":
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if isinstance(num_threads, str):
        raise ValueError(f'num_threads must be an integer or "auto"; got {num_threads!r}')
    return within("num_threads", num_threads, 1, 1024)


def _entries(metadata: Any) -> list[tuple[str, bytes]]:
    if metadata is None:
        return []
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict from key to str or bytes; got {shown(metadata)}")
    entries = []
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"a key of metadata must be a string; got {shown(key)}")
        if key.startswith("avro."):
            raise ValueError(f'metadata has the key {key!r}, but keys that begin with "avro." are reserved')
        if not isinstance(value, (str, bytes)):
            raise TypeError(f"metadata[{key!r}] must be str or bytes; got {shown(value)}")
        entries.append((key, value.encode() if isinstance(value, str) else value))
    return entries


def _appendable(path: str, codec: str | None) -> tuple[ContainerFile, int]:
    """Returns a file that has this codec, and the offset at which its complete blocks end."""
    file = ContainerFile(path)
    if codec is not None and codec != file.codec:
        raise ValueError(f"the file's codec is {file.codec}, but codec is {codec!r}: leave codec out (file {path})")
    length = file.whole_blocks_end()
    if torn := file.size - length:
        text = (
            f"the file's last block is incomplete, as a killed writer leaves it: its {torn} bytes are cut off, and the "
            f"new rows follow the {length} bytes before it (file {path})"
        )
        warnings.warn(text, RuntimeWarning, stacklevel())
    return file, length
