"""The files of `ATDSDataset`, opened once for all epochs.

Some files only TensorFlow's file systems know (`gs://`, `hdfs://`, `ram://`). TensorFlow's C API has functions to write
files and none to read them, so `tf.io.gfile` copies whole files to where they can be read.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable

import tensorflow as tf

from fastpipe.errors import MissingFileError
from fastpipe.sources.avro._data import AvroData
from fastpipe.specs import Features

__all__ = ["Copies", "OpenedFiles"]

_SETTLED = 2 * 10**9
"""Nanoseconds within which two changes of a file may leave it with the same time of modification."""


class Copies:
    """Copies of such files, which are deleted with this object. A file that has changed is copied again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._kept: dict[str, tuple[tuple[int, int], str]] = {}
        self._count = 0

    def local(self, path: str) -> str:
        """Where a file can be read.

        Raises:
            MissingFileError: if there is no such file.
            NotImplementedError: if TensorFlow has no such file system.
        """
        scheme, separator, rest = path.partition("://")
        if not separator or os.sep in scheme:
            return path
        if scheme == "file":
            return rest
        with self._lock:
            try:
                return self._copied(path)
            except tf.errors.NotFoundError:
                raise MissingFileError(f"there is no such file (file {path})", path=path) from None
            except tf.errors.UnimplementedError as error:
                raise NotImplementedError(
                    f"{error.message} Import what adds {scheme}:// to TensorFlow, or copy the files to a local folder "
                    f"(file {path})"
                ) from None

    def named(self, text: str) -> str:
        """A message in which copies have the names of what they are copies of."""
        for path, (_, copy) in self._kept.items():
            text = text.replace(copy, path)
        return text

    def _copied(self, path: str) -> str:
        found = tf.io.gfile.stat(path)
        stamp = (found.length, found.mtime_nsec)
        kept = self._kept.get(path)
        if kept is not None and kept[0] == stamp and found.mtime_nsec < time.time_ns() - _SETTLED:
            return kept[1]
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="fastpipe-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._count += 1
        folder = os.path.join(self._folder, str(self._count))
        os.mkdir(folder)
        copy = os.path.join(folder, os.path.basename(path) or "file")
        tf.io.gfile.copy(path, copy)
        # The one before stays: somebody may be reading it.
        self._kept[path] = stamp, copy
        return copy


_KEPT = 4
"""Sets of files that stay open to later epochs. Each has an index, the places of records and the memory of batches."""

_COARSEST_CLOCK = 2 * 10**9
"""Nanoseconds within which two changes of a file may leave it with the same time of modification on some systems."""

_Stamp = tuple[int, int, int, int, int]


class OpenedFiles:
    """Data sets that were opened, the last few of them kept for the epochs to come.

    A data set is opened anew when the size, the time of modification or the identity of any of its files is another.
    None is kept of files that were modified less than two seconds before, whose next change could go unnoticed.

    Args:
        features: to open files for.
        check: holds a file's schema to them, given its path and its JSON; raises where it doesn't fit.
    """

    def __init__(self, features: Features, check: Callable[[str, str], None]) -> None:
        self._features = features
        self._check = check
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, ...], tuple[list[_Stamp], AvroData]] = OrderedDict()

    def open(self, paths: tuple[str, ...]) -> tuple[AvroData, list[Exception]]:
        """The data set of these files, and the errors of those that are damaged. Several passes may read it at a time.

        Of a damaged file it has the blocks in front of the damage.

        Raises:
            FastpipeError: as `read_avro`, and what `check` raises.
        """
        # Before anything is read: what changes from here on shows in the stamps of the next epoch.
        stamps = _stamps(paths)
        with self._lock:
            kept = self._kept.pop(paths, None)
            if kept is not None and kept[0] == stamps:
                self._kept[paths] = kept
                return kept[1], []
        damaged: list[Exception] = []
        data = AvroData(list(paths), self._features, check=self._check, damaged=damaged)
        if stamps is not None and not damaged:
            with self._lock:
                self._kept[paths] = stamps, data
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return data, damaged


def _stamps(paths: tuple[str, ...]) -> list[_Stamp] | None:
    """What changes when a file does; None where a change might go unnoticed, or there is no such file."""
    settled = time.time_ns() - _COARSEST_CLOCK
    stamps = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:  # Opening it says more.
            return None
        if max(found.st_mtime_ns, found.st_ctime_ns) >= settled:
            return None
        stamps.append((found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino))
    return stamps
