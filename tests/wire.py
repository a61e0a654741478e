"""A small hand encoder of Avro's binary encoding and container files, for tests that need bytes no writer would write.

Sections named here are those of the Avro 1.12 specification.
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
    """An unsigned number, seven bits a byte, the lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def long(value: int) -> bytes:
    """An int or long as a zigzag varint ("Primitive Types"). Values beyond 64 bits become overlong varints."""
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)


def longs(*values: int) -> bytes:
    return b"".join(map(long, values))


def text(value: str | bytes) -> bytes:
    """A string or bytes."""
    data = value.encode() if isinstance(value, str) else value
    return long(len(data)) + data


def float_(value: float) -> bytes:
    return struct.pack("<f", value)


def double(value: float) -> bytes:
    return struct.pack("<d", value)


def items(count: int, data: bytes, size: int | None = None) -> bytes:
    """One block of array or map items ("Arrays"). A negative count is followed by a size: the true one by default."""
    if count >= 0:
        return long(count) + data
    return long(count) + long(len(data) if size is None else size) + data


def array(*values: bytes) -> bytes:
    """A whole array: one block, and the 0 behind it."""
    return (items(len(values), b"".join(values)) if values else b"") + long(0)


def compress(codec: str, data: bytes) -> bytes:
    """Data as a block of that codec stores it. fastavro compresses, so that tests need no library of their own."""
    if codec == "null" or not data:
        # No writer compresses nothing; these are the bytes that each codec makes of it.
        nothing = {"null": data, "deflate": b"\x03\x00", "snappy": bytes(5), "zstandard": ZSTD_OF_NOTHING}
        return nothing.get(codec) or {"null": bytes, "bzip2": bz2.compress, "xz": lzma.compress}[codec](data)
    file = io.BytesIO()
    schema = {"type": "fixed", "name": "Data", "size": len(data)}
    fastavro.writer(file, schema, [data], codec=codec, sync_marker=SYNC)
    whole = file.getvalue()
    start = whole.index(SYNC) + len(SYNC)
    for _ in range(2):  # The number of records and the size.
        while whole[start] >= 0x80:
            start += 1
        start += 1
    return whole[start : -len(SYNC)]


ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# A frame of one segment (RFC 8878, 3.1.1) of size 0 with one last, raw, empty block.
ZSTD_OF_NOTHING = ZSTD_MAGIC + b"\x20\x00\x01\x00\x00"


def header(
    schema: object,
    codec: str | bytes | None = "null",
    *,
    metadata: Mapping[str | bytes, bytes] | None = None,
    sync: bytes = SYNC,
) -> bytes:
    """A file's header ("Object Container Files"). `schema` is JSON as text or bytes, or what becomes JSON; neither it
    nor the codec is written if it is None.
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
    """A file's block. `size` is a lie about the bytes that are stored."""
    return stored(rows, compress(codec, data), size=size, sync=sync)


def stored(rows: int, data: bytes, *, size: int | None = None, sync: bytes = SYNC) -> bytes:
    """A block of data that is compressed already."""
    return long(rows) + long(len(data) if size is None else size) + data + sync


def container(schema: object, blocks: Sequence[tuple[int, bytes]], codec: str = "null") -> bytes:
    """A whole file of blocks of records."""
    return header(schema, codec) + b"".join(block(rows, data, codec) for rows, data in blocks)


def record(name: str, /, **fields: object) -> dict[str, object]:
    """The schema of a record."""
    return {"type": "record", "name": name, "fields": [{"name": key, "type": value} for key, value in fields.items()]}


def list_of(items: object) -> dict[str, object]:
    """The schema of an array."""
    return {"type": "array", "items": items}
