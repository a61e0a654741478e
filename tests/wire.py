"""A small encoder of Avro's binary encoding and container files, for bytes that no regular writer would produce.

Section names refer to the Avro 1.12 specification.
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import struct
from collections.abc import Mapping, Sequence

import fastavro

CODECS = ("null", "deflate", "snappy", "zstandard", "bzip2", "xz")
MAGIC = b"Obj\x01"
SYNC = bytes(range(0xA0, 0xB0))


def varint(value: int) -> bytes:
    """Encodes an unsigned number with seven bits per byte, lowest bits first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def long(value: int) -> bytes:
    """Encodes an int or long as a zigzag varint ("Primitive Types"). Values beyond 64 bits yield overlong varints."""
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)


def longs(*values: int) -> bytes:
    return b"".join(map(long, values))


def text(value: str | bytes) -> bytes:
    """Encodes a string or bytes."""
    data = value.encode() if isinstance(value, str) else value
    return long(len(data)) + data


def float_(value: float) -> bytes:
    return struct.pack("<f", value)


def double(value: float) -> bytes:
    return struct.pack("<d", value)


def items(count: int, data: bytes, size: int | None = None) -> bytes:
    """Encodes one block of array or map items ("Arrays").

    A negative count is followed by a size, which is the true size by default.
    """
    if count >= 0:
        return long(count) + data
    return long(count) + long(len(data) if size is None else size) + data


def array(*values: bytes) -> bytes:
    """Encodes a whole array as one block, followed by the terminating 0."""
    return (items(len(values), b"".join(values)) if values else b"") + long(0)


def compress(codec: str, data: bytes) -> bytes:
    """Compresses data as a block with that codec stores it.

    Uses fastavro, so that tests need no further compression libraries.
    """
    if codec == "null" or not data:
        # No writer compresses empty data. These are the bytes that each codec would produce.
        nothing = {"null": data, "deflate": b"\x03\x00", "snappy": bytes(5), "zstandard": ZSTD_OF_NOTHING}
        return nothing.get(codec) or {"null": bytes, "bzip2": bz2.compress, "xz": lzma.compress}[codec](data)
    file = io.BytesIO()
    schema = {"type": "fixed", "name": "Data", "size": len(data)}
    fastavro.writer(file, schema, [data], codec=codec, sync_marker=SYNC)
    whole = file.getvalue()
    start = whole.index(SYNC) + len(SYNC)
    for _ in range(2):  # Skips the number of records and the size.
        while whole[start] >= 0x80:
            start += 1
        start += 1
    return whole[start : -len(SYNC)]


ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# A single-segment frame (RFC 8878, 3.1.1) of size 0 with one empty raw block, which is the last one.
ZSTD_OF_NOTHING = ZSTD_MAGIC + b"\x20\x00\x01\x00\x00"


def header(
    schema: object,
    codec: str | bytes | None = "null",
    *,
    metadata: Mapping[str | bytes, bytes] | None = None,
    sync: bytes = SYNC,
) -> bytes:
    """Encodes a file's header ("Object Container Files").

    `schema` is JSON as text or bytes, or a value to serialize as JSON. The schema and the codec are omitted if they are
    None.
    """
    entries: dict[str | bytes, bytes] = {}
    if schema is not None:
        entries["avro.schema"] = schema_bytes(schema)
    if codec is not None:
        entries["avro.codec"] = codec.encode() if isinstance(codec, str) else codec
    entries |= metadata or {}
    return MAGIC + array(*(text(key) + text(value) for key, value in entries.items())) + sync


def schema_bytes(schema: object) -> bytes:
    if isinstance(schema, bytes):
        return schema
    return (schema if isinstance(schema, str) else json.dumps(schema, separators=(",", ":"))).encode()


def block(rows: int, data: bytes, codec: str = "null", *, size: int | None = None, sync: bytes = SYNC) -> bytes:
    """Encodes a file's block. `size` replaces the true number of stored bytes."""
    return stored(rows, compress(codec, data), size=size, sync=sync)


def stored(rows: int, data: bytes, *, size: int | None = None, sync: bytes = SYNC) -> bytes:
    """Encodes a block of data that is already compressed."""
    return long(rows) + long(len(data) if size is None else size) + data + sync


def container(schema: object, blocks: Sequence[tuple[int, bytes]], codec: str = "null") -> bytes:
    """Encodes a whole file with the given blocks of records."""
    return header(schema, codec) + b"".join(block(rows, data, codec) for rows, data in blocks)


def record(name: str, /, **fields: object) -> dict[str, object]:
    """Returns the schema of a record."""
    return {"type": "record", "name": name, "fields": [{"name": key, "type": value} for key, value in fields.items()]}


def list_of(items: object) -> dict[str, object]:
    """Returns the schema of an array."""
    return {"type": "array", "items": items}
