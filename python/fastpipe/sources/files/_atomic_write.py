"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastpipe.errors import FastpipeError, MissingFileError, StorageError, in_file


def storage_error(error: OSError, path: str) -> FastpipeError:
    """What the operating system said about a file, as one of fastpipe's errors."""
    reason = error.strerror or str(error)
    kind = MissingFileError if isinstance(error, FileNotFoundError) else StorageError
    made = in_file(kind, path, reason)
    made.errno = error.errno
    return made


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """The name of an empty file beside `path`, which becomes `path` at the end of the block, and is on its disk then.

    If the block raises, `path` is what it was, and the other file is gone. A link is followed. The name begins with a
    dot, so that readers of a directory leave it out when a kill has left it behind.

    Raises:
        MissingFileError: if there is no such directory.
        StorageError: if the file can't be made or renamed, or `path` is no file.
    """
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise storage_error(error, path) from error
    if mode is not None and not stat.S_ISREG(mode):
        raise in_file(StorageError, path, "it isn't a regular file, and only such are replaced: give another path")
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".fastpipe-{os.urandom(8).hex()}.tmp")
    process = os.getpid()
    done = False
    try:
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            if mode is not None:
                os.chmod(temporary, stat.S_IMODE(mode))
        except OSError as error:
            raise storage_error(error, path) from error
        yield temporary
        try:
            _sync(temporary)
            os.replace(temporary, target)
            done = True
            _sync(folder)
        except OSError as error:
            raise storage_error(error, path) from error
    finally:
        # A process that was forked meanwhile leaves the file to the one that writes it.
        if not done and os.getpid() == process:
            with suppress(OSError):
                os.unlink(temporary)


@contextmanager
def truncated_on_failure(path: str, length: int) -> Iterator[None]:
    """Cuts a file to a length, now if it is longer and again if the block raises.

    Raises:
        StorageError: if the file can't be cut.
    """
    process = os.getpid()
    done = False
    try:
        if os.path.getsize(path) > length:
            _cut(path, length)
    except OSError as error:
        raise storage_error(error, path) from error
    try:
        yield
        done = True
    finally:
        if not done and os.getpid() == process:
            _cut(path, length)


def _cut(path: str, length: int) -> None:
    os.truncate(path, length)
    _sync(path)


def _sync(path: str) -> None:
    """Sees to it that a file or folder is on its disk."""
    if os.name == "nt" and os.path.isdir(path):
        return  # Windows has no such call for folders.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
