"""Values of the rows of files in the directory of block indexes, such as the rows that pass a filter.

An entry is named by a digest of its key: the absolute paths of the files, their sizes and modification times, and text
of the caller. It consists of `_MAGIC`, the digest of the name and the values, and the values. Entries are untrusted: a
damaged one is treated as missing. As for block indexes, files that were modified a moment ago have no entry, because
another change might not alter the timestamp (see `rust/fastpipe-files/src/index_cache.rs`).
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence

from fastpipe._files._atomic_write import replacing
from fastpipe._reader.dataset import Buffer
from fastpipe._reader.ordering import digest
from fastpipe.errors import FastpipeError

_LOG = logging.getLogger("fastpipe")

_MAGIC = b"FPROWS\x00\x01"
_PREFIX = len(_MAGIC) + 32

# Longer than the tick of any file system's clock.
_COARSEST_CLOCK_NS = 2_000_000_000


class IndexEntries:
    """The entries of some files.

    Args:
        directory: The directory of block indexes.
        paths: The paths of the files.
        stamps: The size and the modification time in nanoseconds that each file had when it was opened.
    """

    def __init__(self, directory: str, paths: Sequence[str], stamps: Sequence[tuple[int, int]]) -> None:
        self._directory, self._paths, self._stamps = directory, paths, stamps

    def get(self, text: str, size: int, compute: Callable[[], Buffer]) -> tuple[Buffer, bool]:
        """Returns values from their entry, or computes and stores them if there is none.

        Args:
            text: Identifies the values.
            size: Number of bytes that they have.
            compute: Function that reads the files and returns the values.

        Returns:
            The values, and whether they come from an entry.
        """
        real = [os.fsencode(os.path.realpath(path)).hex() for path in self._paths]
        name = digest(json.dumps([real, self._stamps, text]).encode())
        path = os.path.join(self._directory, f"{name}.rows1")
        if (found := _load(path, name, size)) is not None:
            return found, True
        settled = time.time_ns() - max((modified for _, modified in self._stamps), default=0) > _COARSEST_CLOCK_NS
        values = compute()
        if settled and self._unchanged():
            _store(path, name, values)
        else:
            _LOG.info("%s was not saved: a file was modified a moment ago, or its modification time is later", path)
        return values, False

    def _unchanged(self) -> bool:
        try:
            now = [(status.st_size, status.st_mtime_ns) for status in map(os.stat, self._paths)]
        except OSError:
            return False
        return now == list(self._stamps)


def _load(path: str, name: str, size: int) -> Buffer | None:
    """Returns the values of an entry. None if it doesn't exist or is damaged."""
    try:
        # Opening a pipe would wait for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is not a file")
        with open(path, "rb") as file:
            entry = file.read(_PREFIX + size + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        damage = str(error)
    else:
        values = memoryview(entry)[_PREFIX:]
        if len(values) == size and entry[:_PREFIX] == _prefix(name, values):
            return values
        damage = "its size or its digest is wrong"
    _LOG.warning("the entry %s of the index cache is damaged (%s): reading the data again", path, damage)
    return None


def _store(path: str, name: str, values: Buffer) -> None:
    try:
        if os.path.islink(path):
            raise OSError("it is a link")
        with replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(_prefix(name, values))
            file.write(values)
    except (OSError, FastpipeError) as error:
        text = "the entry %s of the index cache can't be written, so the next reader reads the data again: %s"
        _LOG.warning(text, path, error)


def _prefix(name: str, values: Buffer) -> bytes:
    return _MAGIC + digest(name.encode(), values).encode()
