"""Files that only TensorFlow's file systems know (`gs://`, `hdfs://`, `ram://`), copied to where they can be read.

TensorFlow's C API has functions to write files and none to read them, so `tf.io.gfile` copies them as wholes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import weakref

import tensorflow as tf

from fastpipe.errors import MissingFileError

__all__ = ["Copies"]

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
