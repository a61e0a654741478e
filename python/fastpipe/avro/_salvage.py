"""Copies the intact blocks of a damaged Avro file.

A block is copied if its size leads to a sync marker, or to another block and finally to one, and if all of its records
can be decoded. So damage to values, headers of blocks or sync markers costs only the blocks that it hits.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fastpipe._files._atomic_write import replacing, storage_error
from fastpipe._local_path import local
from fastpipe._reader.losses import Skip
from fastpipe.avro._file import AvroFile
from fastpipe.avro._reading import read_avro
from fastpipe.errors import FastpipeError, MalformedFileError, OutOfMemoryError, StorageError, in_file

_MARKER = 16
_ANY = Skip(max_units=2**31 - 1, max_fraction=1.0)


class Block(NamedTuple):
    """A block, as its header describes it.

    Attributes:
        rows: Number of records.
        start: Offset of its header in the file.
        end: Offset after its data, where the sync marker should be.
    """

    rows: int
    start: int
    end: int


class Salvaged(NamedTuple):
    """The result of a copy.

    Attributes:
        blocks: Number of blocks.
        rows: Number of records in them.
        lost: Start and end of each range of bytes that wasn't copied, and the reason.
    """

    blocks: int
    rows: int
    lost: list[tuple[int, int, str]]


def salvage(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Salvaged:
    """Copies the intact blocks of a file to a new file with the same header.

    Raises:
        MalformedFileError: If the header of the file is damaged.
        StorageError: If a file can't be read or written, or they are the same.
        OutOfMemoryError: If the file doesn't fit into the address space, or its records don't fit into memory.
    """
    path, new = local(source), local(target, "target must be a path")
    marker = AvroFile(path).sync_marker
    if os.path.exists(new) and os.path.samefile(path, new):
        raise in_file(StorageError, path, "salvage writes a new file: pass another path for it")
    with _storage_errors(path), open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = data.find(marker) + _MARKER
        if begin < _MARKER:
            raise in_file(MalformedFileError, path, "the header has no sync marker")
        found = list(_blocks(data, begin, marker))
        blocks = [each for each in found if isinstance(each, Block)]
        lost = [each for each in found if not isinstance(each, Block)]
        with replacing(new) as temporary, _storage_errors(new):
            _write(temporary, data, begin, blocks, marker)
            damaged = _undecodable(temporary)
            sound = [block for number, block in enumerate(blocks) if number not in damaged]
            if damaged:
                _write(temporary, data, begin, sound, marker)
    lost += [(blocks[number].start, blocks[number].end, reason) for number, reason in damaged.items()]
    return Salvaged(len(sound), sum(block.rows for block in sound), sorted(lost))


@contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    """Converts errors of the operating system to errors that name a file."""
    try:
        yield
    except FastpipeError:
        raise
    except OSError as error:
        if error.errno == errno.ENOMEM:
            reason = "out of memory: the address space is too small for the file"
            raise in_file(OutOfMemoryError, path, reason) from error
        raise storage_error(error, path) from error


def _blocks(data: mmap.mmap, begin: int, marker: bytes) -> Iterator[Block | tuple[int, int, str]]:
    """Yields the blocks between sync markers, and the ranges without blocks."""
    at, size = begin, len(data)
    while at < size:
        end = data.find(marker, at)
        last = size if end < 0 else end
        inside = list(_chain(data, at, last))
        reached = inside[-1].end if inside else at
        if reached == last and end >= 0:
            yield from inside
        else:
            reason = "the file ends within a block" if end < 0 else "no block ends at the sync marker after it"
            yield at, last, reason
        at = last + _MARKER if end >= 0 else size


def _chain(data: mmap.mmap, start: int, last: int) -> Iterator[Block]:
    """Yields blocks that follow each other up to `last`. The markers between them may be damaged."""
    at = start
    while at < last:
        rows, after = _long(data, at, last)
        size, after = _long(data, after, last)
        if rows < 0 or size < 0 or after + size > last:
            return
        yield Block(rows, at, after + size)
        at = after + size
        if at < last:
            at += _MARKER


def _long(data: mmap.mmap, at: int, last: int) -> tuple[int, int]:
    """Returns an integer of an Avro file, and the offset after it. It is -1 if it doesn't end before `last`."""
    value = 0
    for number, byte in enumerate(data[at : min(at + 10, last)]):
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at + number + 1
    return -1, at


def _write(path: str, data: mmap.mmap, begin: int, blocks: list[Block], marker: bytes) -> None:
    with open(path, "wb") as file, memoryview(data) as view:
        file.write(view[:begin])
        for block in blocks:
            # A block may be too large for a copy in memory.
            with view[block.start : block.end] as stored:
                file.write(stored)
            file.write(marker)
        file.flush()
        os.fsync(file.fileno())


def _undecodable(path: str) -> dict[int, str]:
    """Returns the blocks with records that can't be decoded, and why."""
    with read_avro(path, batch_size=256, on_error=_ANY, on_unsupported="ignore") as reader:
        for _ in reader:
            pass
        return {loss.block: loss.reason for loss in reader.losses if loss.block is not None}
