"""Writing container files."""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias

import numpy as np

from fastpipe._arguments import flag, imported, shown
from fastpipe._arrow import to_arrow
from fastpipe._boundary import AvroWriting
from fastpipe._fastpipe import AvroWriter, ContainerFile
from fastpipe._local_path import local
from fastpipe._progress import progress_bar
from fastpipe._reader.dropped_rows import stacklevel
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import arrow_streams
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR
from fastpipe.sources.files._atomic_write import replacing, truncated_on_failure
from fastpipe.specs import SparseSpec, Spec

Codec: TypeAlias = Literal["null", "deflate", "snappy", "zstandard", "bzip2", "xz"]

# What Java's writer takes, about.
_BLOCK_BYTES = 64 << 10
# Readers take no larger ones.
_MOST_BLOCK_BYTES = 1 << 30
_SYNC_BYTES = 16


class WrittenFile(NamedTuple):
    """What `write_avro` has written, or appended.

    Attributes:
        rows: records.
        blocks: blocks, which are what readers read and shuffle by.
        size: bytes.
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
    level: SupportsIndex | None = None,
    block_bytes: SupportsIndex = _BLOCK_BYTES,
    append: bool = False,
    progress: bool = False,
    metadata: Mapping[str, str | bytes] | None = None,
    num_threads: SupportsIndex | Literal["auto"] = "auto",
) -> WrittenFile:
    """Writes an Avro container file of batches, Arrow data, or what a reader yields.

    Data are taken as they come: a batch and some blocks are held. The file appears when it is whole and on its disk;
    until then, and after an error or Ctrl-C, `path` is what it was. The same rows make the same blocks, however they
    are cut in batches and however many threads compress them.

    Args:
        path: the file. One that is there is replaced.
        data: a batch (dict from name to array or form, extra `arrow`), a `Reader`, whatever has `__arrow_c_stream__`
            or `__arrow_c_array__` (tables and record batches of pyarrow, frames of polars), or an iterable of these.
            Columns `a.b` and `a.c` are fields of a record `a`.
        schema: a schema of Avro's, as JSON or parsed: a record whose fields are the columns, in any order. Values
            become its types where nothing is lost but digits of floating-point numbers; unions are of null and one
            type. By default it follows from the types: see the manual's page on writing.
        codec: "null", "deflate", "snappy", "zstandard", "bzip2" or "xz"; None for zstandard, or when appending for the
            file's.
        level: of deflate (1 to 12), zstandard (-7 to 22), bzip2 (1 to 9) or xz (0 to 9); None for 6, 3, 9 and 6.
        block_bytes: a block is closed with the row by which it has as many bytes before compression. Readers read,
            decompress and shuffle by blocks.
        append: whether to write after the last whole block of a file, with its schema, codec and sync marker. An error
            cuts the file back to that block. A kill leaves an incomplete block at its end, which the next call with
            `append=True` cuts off, with a `RuntimeWarning` that names the file and how many bytes are lost.
        progress: whether to show a progress bar (extra `progress`).
        metadata: more entries of the header, from key to str or bytes; keys that begin with "avro." are Avro's.
        num_threads: threads that compress. `"auto"`: the processors that the process may use.

    Returns:
        The numbers of rows, blocks and bytes that were written.

    Raises:
        SchemaError: if the schema doesn't parse, columns aren't its fields or of other types, or names aren't Avro's.
        UnsupportedError: for types without a counterpart, such as unions.
        ValueRangeError: if a value doesn't fit the schema's type.
        NullValueError: if there is a null that the schema doesn't allow.
        MalformedFileError: if a file that is appended to is damaged anywhere but in an incomplete last block, or Arrow
            data contradict themselves.
        MissingFileError: if there is no such directory, or no file to append to.
        StorageError: if the disk is full, there is no permission, or a stream fails.
        LimitError: if a row is larger than a block may be.
        ImportError: if pyarrow or tqdm is needed and missing.
        TypeError: if an argument is of the wrong type.
        ValueError: for values out of range, and arguments that exclude each other.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro(
        ...     "data/*.avro", columns=["user.id", "label"], batch_size=1024, shuffle=True, seed=7
        ... )
        >>> fastpipe.write_avro("shuffled.avro", reader).rows
        6144
    """
    target = local(path, "path is a path")
    text = _schema_text(schema)
    writing = AvroWriting(
        codec=codec or "zstandard",
        block_bytes=_number("block_bytes", block_bytes, 1, _MOST_BLOCK_BYTES),
        level=None if level is None else _number("level", level, -(2**31), 2**31 - 1),
        num_threads=_threads(num_threads),
        sync=os.urandom(_SYNC_BYTES),
        metadata=_entries(metadata),
    )
    if codec is not None and not isinstance(codec, str):
        raise TypeError(f"codec is the name of one, not {shown(codec)}")
    given = _given(data)
    appending, showing = flag("append", append), flag("progress", progress)
    if appending:
        if metadata is not None:
            raise ValueError("metadata is in the header, which append=True leaves as it is: leave metadata out")
        known, length = _appendable(target, codec)
        writing, schema_there = writing._replace(codec=known.codec, sync=known.sync_marker), known.schema_json
        place: Any = truncated_on_failure(target, length)
    else:
        schema_there, place = None, replacing(target)
    with _bar(data, showing) as bar, place as temporary:
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
    records: Reader,
    schema: str,
    metadata: Mapping[str, bytes],
    *,
    codec: str,
    block_bytes: int,
    progress: bool,
) -> int:
    """Writes records as they are encoded, whatever their schema is.

    Args:
        path: the file. One that is there is replaced.
        records: yields encoded records, as `encoded_records` makes it.
        schema: their schema, which is written as it is.
        metadata: more entries of the header.
        codec: as in `write_avro`.
        block_bytes: as in `write_avro`.
        progress: as in `write_avro`.

    Returns:
        The number of records.
    """
    with _bar(records, progress) as bar, replacing(path) as temporary:
        sync = os.urandom(_SYNC_BYTES)
        writing = AvroWriting(codec, None, block_bytes, _threads("auto"), sync, list(metadata.items()))
        writer = AvroWriter(temporary, shown=path, schema=schema, writing=writing, encoded=True)
        try:
            for batch in arrow_streams(records).batches():
                copied = writer.copy(batch)
                if bar is not None:
                    bar.update(copied)
                del batch  # The next is drawn before this name is bound to it.
            rows, _, _ = writer.finish()
        finally:
            writer.close()
        if bar is not None:
            bar.total = bar.n
    return rows


def _write(writer: AvroWriter, given: Iterator[_Part], inferring: bool, told: Any) -> None:
    known = not inferring
    for data, required, declared in given:
        if declared is not None:
            writer.declare(declared, required)
        else:
            writer.write(data, required, told)
        known = True
        del data  # The next is drawn before this name is bound to it.
    if not known:
        raise ValueError("there are no data, not even empty ones, of which a schema follows: give schema=")


# Arrow data, the columns (and fields of them) without nulls, and in place of data something with their schema.
_Part: TypeAlias = tuple[Any, list[str], Any]


def _given(data: Any) -> Iterator[_Part]:
    """The data, part by part. Of the wrong type they are refused at once."""
    if isinstance(data, Reader):
        return _of_reader(data)
    if isinstance(data, Mapping) or _is_arrow(data):
        return _of_item(data, "data")
    if isinstance(data, Iterable) and not isinstance(
        data, (str, bytes, bytearray, memoryview, np.ndarray, os.PathLike)
    ):
        return _of_items(data)
    kinds = "a batch, a Reader, Arrow data, or an iterable of these"
    hint = ": collect() it first" if hasattr(data, "collect") else ""
    raise TypeError(f"data is {kinds}, not {shown(data)}{hint}")


def _is_arrow(data: Any) -> bool:
    return hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")


def _of_reader(reader: Reader) -> Iterator[_Part]:
    required = [path for name, spec in reader.features.items() for path in _without_nulls(name, spec)]
    yield None, required, reader
    for batch in arrow_streams(reader).batches():
        yield batch, required, None


def _of_items(items: Iterable[Any]) -> Iterator[_Part]:
    for number, item in enumerate(items):
        yield from _of_item(item, f"item {number} of data")


def _of_item(item: Any, what: str) -> Iterator[_Part]:
    if isinstance(item, Mapping):
        # An empty record batch has no columns of which its rows could be counted.
        if not item:
            raise ValueError(f"{what} is a batch without columns")
        yield to_arrow(item), [name for name, form in item.items() if not _may_be_null(form)], None
    elif isinstance(item, Reader):
        yield from _of_reader(item)
    elif (pa := imported("pyarrow")) is not None and isinstance(item, pa.RecordBatchReader):
        # Python may make its batches: in C what it raises becomes a text.
        yield None, [], item.schema
        for batch in item:
            yield batch, [], None
    elif _is_arrow(item):
        yield item, [], None
    else:
        raise TypeError(f"{what} is a batch (dict from name to array) or Arrow data, not {shown(item)}")


def _without_nulls(name: str, spec: Spec) -> list[str]:
    """The column of a feature if its Arrow data have no nulls, or else the fields of the column that have none."""
    # Arrow data have nulls for NaT, and for NaN that stands for null.
    whole = not spec._nan_is_null and not spec.dtype.startswith(("datetime64", "timedelta64"))
    if whole and spec.nulls != "mask":
        return [name]
    if not isinstance(spec, SparseSpec):
        return []
    # Of sparse rows a mask says which are null, and none of their values is.
    return [f"{name}.indices{i}" for i in range(len(spec.shape))] + [f"{name}.values"] * whole


def _may_be_null(form: Any) -> bool:
    if isinstance(form, Masked):
        return True
    if isinstance(form, (Ragged, Sparse, SparseCSR)):
        return _may_be_null(form.values)
    return isinstance(form, np.ndarray) and form.dtype.kind in "mM"


def _schema_text(schema: Any) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    if isinstance(schema, (Mapping, list)):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise TypeError(f"schema isn't what JSON holds: {error}") from error
    raise TypeError(f"schema is one of Avro's, as JSON or as a dict, not {shown(schema)}")


def _number(name: str, value: Any, least: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a number, not {shown(value)}") from None
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is a number, not {shown(value)}")
    if not least <= number <= most:
        raise ValueError(f"{name} is a number from {least} to {most}, not {number}")
    return number


def _threads(num_threads: Any) -> int:
    if isinstance(num_threads, str) and num_threads == "auto":
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if isinstance(num_threads, str):
        raise ValueError(f'num_threads is a number or "auto", not {num_threads!r}')
    return _number("num_threads", num_threads, 1, 1024)


def _entries(metadata: Any) -> list[tuple[str, bytes]]:
    if metadata is None:
        return []
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a dict from key to str or bytes, not {shown(metadata)}")
    entries = []
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"a key of metadata is a string, not {shown(key)}")
        if key.startswith("avro."):
            raise ValueError(f'metadata has the key {key!r}, and those that begin with "avro." are Avro\'s')
        if not isinstance(value, (str, bytes)):
            raise TypeError(f"metadata[{key!r}] is str or bytes, not {shown(value)}")
        entries.append((key, value.encode() if isinstance(value, str) else value))
    return entries


def _appendable(path: str, codec: str | None) -> tuple[ContainerFile, int]:
    """A file that has this codec, and where its whole blocks end."""
    file = ContainerFile(path)
    if codec is not None and codec != file.codec:
        raise ValueError(f"the file's codec is {file.codec}, and codec is {codec!r}: leave codec out (file {path})")
    length = file.whole_blocks_end()
    if torn := file.size - length:
        text = (
            f"the file's last block is incomplete, as a killed writer leaves it: its {torn} bytes are cut off, and the "
            f"new rows follow the {length} bytes before it (file {path})"
        )
        warnings.warn(text, RuntimeWarning, stacklevel())
    return file, length


def _bar(data: Any, showing: bool) -> Any:
    if not showing:
        return nullcontext()
    total: int | None = None
    if isinstance(data, Reader):
        with suppress(TypeError):  # It may have no end.
            total = len(data) * data.batch_size
    elif not isinstance(data, Mapping):
        rows = getattr(data, "num_rows", getattr(data, "height", None))
        total = rows if isinstance(rows, int) else None
    return progress_bar(total)
