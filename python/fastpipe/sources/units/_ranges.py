"""Byte ranges of remote files: few requests, some of them at once, on fastpipe's own threads."""

from __future__ import annotations

import bisect
import io
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Range", "Requests", "coalesced", "ranged"]

# Bytes between two ranges that one request reads, too.
_HOLE = 256 << 10

# Bytes of a request, at most.
_LARGEST = 32 << 20


class Range(NamedTuple):
    """Bytes of a file.

    Attributes:
        start: the first.
        end: the one after the last.
    """

    start: int
    end: int


def coalesced(ranges: Iterable[tuple[int, int]], size: int) -> list[Range]:
    """The requests by which ranges are read: ascending, without those that aren't within a file of this size."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if not 0 <= start < end <= size:
            continue
        if found and start - found[-1].end <= _HOLE and end - found[-1].start <= _LARGEST:
            found[-1] = Range(found[-1].start, max(end, found[-1].end))
        else:
            found.append(Range(start, end))
    return found


class Requests:
    """Reads byte ranges, a limited number at once.

    Args:
        at_once: requests at once, in a process.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._process, self._free = os.getpid(), threading.Semaphore(at_once)

    def read(self, source: pa.NativeFile, ranges: Sequence[Range]) -> list[tuple[int, bytes]]:
        """Returns the ranges' first places and bytes. Other threads help the calling thread while requests are free."""
        process = os.getpid()
        if self._process != process:
            # The threads of the parent, which have taken some, aren't there.
            self._process, self._free = process, threading.Semaphore(self.at_once)
        reading = _Reading(source, ranges, self._free)
        helpers = []
        for _ in ranges[1:]:
            if not self._free.acquire(blocking=False):
                break
            thread = threading.Thread(target=reading.run, name="fastpipe-range", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # There is no memory for it, or the interpreter is ending.
                self._free.release()
                break
            helpers.append(thread)
        self._free.acquire()
        reading.run()
        for thread in helpers:
            thread.join()
        if reading.errors:
            raise reading.errors[0]
        return sorted(reading.found)


class _Reading:
    """Ranges that some threads read."""

    def __init__(self, source: pa.NativeFile, ranges: Iterable[Range], free: threading.Semaphore) -> None:
        self._source, self._free = source, free
        self._left = deque(ranges)
        self.found: list[tuple[int, bytes]] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        """Reads as long as any are left, and gives the request back that was taken for it."""
        try:
            while not self.errors and (wanted := self._next()) is not None:
                start, end = wanted
                self.found.append((start, self._source.read_at(end - start, start)))
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._free.release()

    def _next(self) -> Range | None:
        try:
            return self._left.popleft()
        except IndexError:  # Another thread has taken the last one.
            return None


def ranged(source: pa.NativeFile, size: int, known: Iterable[tuple[int, bytes]]) -> pa.PythonFile:
    """A file with some ranges in memory. Others are read on demand, at least `_HOLE` bytes at once."""
    import pyarrow as pa

    return pa.PythonFile(_Ranged(source, size, known), "r")


class _Ranged(io.RawIOBase):
    def __init__(self, source: pa.NativeFile, size: int, known: Iterable[tuple[int, bytes]]) -> None:
        self._source, self._size, self._at = source, size, 0
        self._known = sorted(known)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> memoryview:
        end = self._size if size < 0 else min(self._at + size, self._size)
        start, self._at = self._at, max(self._at, end)
        i = bisect.bisect_right(self._known, start, key=lambda known: known[0]) - 1
        if i < 0 or end > self._known[i][0] + len(self._known[i][1]):
            i += 1
            ahead = min(max(end, start + _HOLE), self._size)
            self._known.insert(i, (start, self._source.read_at(ahead - start, start)))
        first, data = self._known[i]
        return memoryview(data)[start - first : end - first]
