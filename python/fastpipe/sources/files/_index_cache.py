"""Where block indexes are kept."""

from __future__ import annotations

import os
import sys
from typing import TypeAlias

from fastpipe.errors import StorageError

IndexCache: TypeAlias = bool | str | os.PathLike[str] | None


def cache_directory(index_cache: IndexCache) -> str | None:
    """The directory in which block indexes are kept.

    Args:
        index_cache: a directory; True for that of the user; None or False for none.

    Raises:
        StorageError: if the user has none.
        TypeError: for anything else.
        ValueError: if the name is empty.
    """
    if index_cache is None or index_cache is False:
        return None
    if index_cache is True:
        return user_cache_directory()
    if not isinstance(index_cache, str | os.PathLike):
        raise TypeError(f"index_cache is True, a directory or None, not {type(index_cache).__name__}")
    directory = os.fsdecode(index_cache)
    if not directory:
        raise ValueError("index_cache is empty: name a directory, or True for one in the user's cache directory")
    return directory


def user_cache_directory() -> str:
    """`fastpipe` in the user's cache directory.

    That is `$XDG_CACHE_HOME` or else `~/.cache`; on macOS `~/Library/Caches`, on Windows `%LOCALAPPDATA%`.

    Raises:
        StorageError: if the user has no home directory.
    """
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.join("~", "AppData", "Local")
    elif sys.platform == "darwin":
        base = os.path.join("~", "Library", "Caches")
    else:
        # A relative path has to be ignored, says the XDG Base Directory Specification.
        base = os.environ.get("XDG_CACHE_HOME", "")
        base = base if os.path.isabs(base) else os.path.join("~", ".cache")
    base = os.path.expanduser(base)
    if not os.path.isabs(base):
        reason = "the user has no home directory to keep block indexes in: name a directory"
        raise StorageError(reason, reason=reason)
    return os.path.join(base, "fastpipe")
