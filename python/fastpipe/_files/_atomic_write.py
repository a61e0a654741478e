"""Atomic writes: a file or a directory appears completely or not at all."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from fastpipe.errors import FastpipeError, MissingFileError, StorageError, in_file


def storage_error(error: OSError, path: str) -> FastpipeError:
    """Converts an error of the operating system to one of fastpipe's errors."""
    reason = error.strerror or str(error)
    kind = MissingFileError if isinstance(error, FileNotFoundError) else StorageError
    made = in_file(kind, path, reason)
    made.errno = error.errno
    return made


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yields the path of an empty temporary file next to `path`, which replaces `path` at the end of the block.

    The file is synced to disk first. If the block raises an exception, `path` keeps its old content. Links are
    followed.

    Raises:
        MissingFileError: If the directory does not exist.
        StorageError: If the file can't be created or renamed, or `path` isn't a regular file.
    """
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise storage_error(error, path) from error
    if mode is not None and not stat.S_ISREG(mode):
        raise in_file(StorageError, path, "it isn't a regular file, so it can't be replaced: pass another path")

    def create(temporary: str) -> None:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        if mode is not None:
            os.chmod(temporary, stat.S_IMODE(mode))

    with _renamed(path, target, create, os.replace, os.unlink) as temporary:
        yield temporary


@contextmanager
def creating(path: str) -> Iterator[str]:
    """Yields the path of an empty temporary directory next to `path`, and renames it to `path` at the end of the block.

    The block must sync the files that it writes.

    Raises:
        MissingFileError: If the parent does not exist.
        StorageError: If the directory can't be created or renamed, or `path` exists and isn't an empty directory.
    """
    # Unlike `os.replace` of files, `os.rename` of a directory fails if the target is a file or has files.
    with _renamed(path, os.path.abspath(path), os.mkdir, os.rename, _delete_tree) as temporary:
        yield temporary


@contextmanager
def _renamed(
    path: str,
    target: str,
    create: Callable[[str], None],
    rename: Callable[[str, str], None],
    delete: Callable[[str], None],
) -> Iterator[str]:
    """Yields a temporary path next to `target`, and renames it to `target` at the end of the block.

    If the block raises an exception, the temporary file or directory is deleted. Its name begins with a dot, so that
    readers of the parent directory ignore it if a killed process leaves it there.

    Args:
        path: Path in error messages.
        target: Path of the result.
        create: Function that creates the temporary file or directory.
        rename: Function that renames it.
        delete: Function that deletes it.
    """
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".fastpipe-{os.urandom(8).hex()}.tmp")
    process = os.getpid()
    done = False
    try:
        try:
            create(temporary)
        except OSError as error:
            raise storage_error(error, path) from error
        yield temporary
        try:
            _sync(temporary)
            rename(temporary, target)
            done = True
            _sync(folder)
        except OSError as error:
            raise storage_error(error, path) from error
    finally:
        # A forked child must not delete what its parent is writing.
        if not done and os.getpid() == process:
            with suppress(OSError):
                delete(temporary)


@contextmanager
def truncated_on_failure(path: str, length: int) -> Iterator[None]:
    """Truncates a file to a length: immediately if it is longer, and again if the block raises an exception.

    Raises:
        StorageError: If the file can't be truncated.
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


def _delete_tree(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _cut(path: str, length: int) -> None:
    os.truncate(path, length)
    _sync(path)


def _sync(path: str) -> None:
    """Syncs a file or folder to disk."""
    if os.name == "nt" and os.path.isdir(path):
        return  # Windows can't sync folders.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
