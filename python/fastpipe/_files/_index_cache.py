"""The directory of block indexes."""

from __future__ import annotations

import os
import sys
from typing import TypeAlias

from fastpipe.errors import StorageError

IndexCache: TypeAlias = bool | str | os.PathLike[str] | None


def cache_directory(index_cache: IndexCache) -> str | None:
    """Returns the directory that keeps block indexes, or None for no cache.

    Args:
        index_cache: A directory; True for a directory in the user's cache directory; None or False for no cache.

    Raises:
        StorageError: If the user has no home directory.
        TypeError: If the argument has another type.
        ValueError: If the name is empty.
    """
    if index_cache is None or index_cache is False:
        return None
    if index_cache is True:
        return user_cache_directory()
    if not isinstance(index_cache, str | os.PathLike):
        raise TypeError(f"index_cache must be True, a directory or None; got {type(index_cache).__name__}")
    directory = os.fsdecode(index_cache)
    if not directory:
        raise ValueError("index_cache is empty: name a directory, or pass True for one in the user's cache directory")
    return directory


def user_cache_directory() -> str:
    """Returns the path of `fastpipe` in the user's cache directory.

    The user's cache directory is `$XDG_CACHE_HOME` or else `~/.cache`; on macOS `~/Library/Caches`, on Windows
    `%LOCALAPPDATA%`.

    Raises:
        StorageError: If the user has no home directory.
    """
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.join("~", "AppData", "Local")
    elif sys.platform == "darwin":
        base = os.path.join("~", "Library", "Caches")
    else:
        # The XDG Base Directory Specification requires that relative paths are ignored.
        base = os.environ.get("XDG_CACHE_HOME", "")
        base = base if os.path.isabs(base) else os.path.join("~", ".cache")
    base = os.path.expanduser(base)
    if not os.path.isabs(base):
        reason = "the user has no home directory to keep block indexes in: name a directory"
        raise StorageError(reason, reason=reason)
    return os.path.join(base, "fastpipe")
