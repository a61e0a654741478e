"""Finds the record batches of an Arrow IPC file and their row counts without reading their columns.

pyarrow reports neither before it reads a record batch. Both are numbers at places that the format fixes (Arrow columnar
format, "IPC File Format"; the flatbuffers of `File.fbs` and `Message.fbs`).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["Block", "blocks", "footer_size", "rows"]

# The footer's size, and the magic bytes.
_END = struct.Struct("<i6s")
_MAGIC = b"ARROW1"

_BLOCK = struct.Struct("<qi4xq")
_CONTINUATION = 0xFFFFFFFF

# Fields by their places in their tables.
_RECORD_BATCHES, _HEADER, _LENGTH = 3, 2, 0


class Block(NamedTuple):
    """A record batch in a file.

    Attributes:
        start: the first byte.
        metadata: bytes of its metadata, which come first.
        end: the byte after the last one.
    """

    start: int
    metadata: int
    end: int


def footer_size(tail: bytes) -> int:
    """Bytes of a footer and what comes after it, of a file that ends in these bytes.

    Raises:
        pyarrow.ArrowInvalid: if this isn't an Arrow file, or it is damaged.
    """
    size, magic = _END.unpack(tail[-_END.size :].rjust(_END.size))
    if magic != _MAGIC or size <= 0:
        raise _damaged("the file doesn't end as an Arrow file does")
    return int(size) + _END.size


def blocks(footer: bytes, size: int) -> list[Block]:
    """The record batches of a file of some size, of its footer and what comes after it.

    Raises:
        pyarrow.ArrowInvalid: if the footer is damaged.
    """
    table = _Table(footer, _u32(footer, 0))
    at = table.target(_RECORD_BATCHES)
    found = []
    for i in range(0 if at is None else _u32(footer, at)):
        start, metadata, body = _unpacked(_BLOCK, footer, at + 4 + i * _BLOCK.size if at is not None else 0)
        if start < 0 or metadata <= 8 or body < 0 or start + metadata + body > size:
            raise _damaged(f"record batch {i} isn't within the file")
        found.append(Block(start, metadata, start + metadata + body))
    return found


def rows(metadata: bytes) -> int:
    """The rows of a record batch with this metadata.

    Raises:
        pyarrow.ArrowInvalid: if it is damaged.
    """
    message = metadata[8 if _u32(metadata, 0) == _CONTINUATION else 4 :]
    header = _Table(message, _u32(message, 0)).target(_HEADER)
    if header is None:
        raise _damaged("a record batch has no header")
    length = _Table(message, header).field(_LENGTH)
    number = 0 if length is None else _unpacked(struct.Struct("<q"), message, length)[0]
    if not 0 <= number < 2**32:
        raise _damaged(f"a record batch has {number} rows")
    return int(number)


def _damaged(reason: str) -> Exception:
    """The error that pyarrow raises for a damaged file."""
    import pyarrow as pa

    error: Exception = pa.ArrowInvalid(reason)
    return error


class _Table:
    """A table in a flatbuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - _unpacked(struct.Struct("<i"), data, at)[0]
        self._size = _u16(data, self._fields)

    def field(self, number: int) -> int | None:
        """Where a field is; None if it has its default."""
        place = 4 + 2 * number
        offset = _u16(self._data, self._fields + place) if place < self._size else 0
        return self._at + offset if offset else None

    def target(self, number: int) -> int | None:
        """Where the table or the vector is that a field refers to."""
        field = self.field(number)
        return None if field is None else field + _u32(self._data, field)


def _unpacked(form: struct.Struct, data: bytes, at: int) -> tuple[int, ...]:
    if not 0 <= at <= len(data) - form.size:
        raise _damaged("the metadata refers to bytes that it doesn't have")
    return form.unpack_from(data, at)


def _u16(data: bytes, at: int) -> int:
    return _unpacked(struct.Struct("<H"), data, at)[0]


def _u32(data: bytes, at: int) -> int:
    return _unpacked(struct.Struct("<I"), data, at)[0]
