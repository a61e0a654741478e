"""From what users name (paths, lists, globs, directories) to files."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from typing import TypeAlias

from fastpipe.errors import MissingFileError

__all__ = ["Paths", "expand"]

Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"


def expand(source: Paths, suffix: str = ".avro") -> list[str]:
    """Lists the files that a source names.

    Args:
        source: a path, a glob (`**` for any depth), a directory (all files below it that end in `suffix`), or a list of
            these. What a list names keeps its order; what a glob or directory holds is sorted. A path that exists is
            taken as it is, even if it looks like a glob.
        suffix: of the files that are taken from directories.

    Returns:
        Paths as they will be named in errors.

    Raises:
        MissingFileError: if a glob matches nothing, a directory holds no such file, or the list is empty.
        TypeError: for anything else than paths.
    """
    if isinstance(source, str | os.PathLike):
        return _expand_one(source, suffix)
    try:
        items = iter(source)
    except TypeError:
        kind = type(source).__name__
        raise TypeError(f"source is a path, a glob, a directory or a list of these, not {kind}") from None
    files = [path for item in items for path in _expand_one(item, suffix)]
    if not files:
        raise MissingFileError("the list of files is empty", reason="the list of files is empty")
    return files


def _expand_one(item: str | os.PathLike[str], suffix: str) -> list[str]:
    path = os.fsdecode(item)
    if os.path.isdir(path):
        found = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(path)
            for name in names
            if name.endswith(suffix) and not name.startswith(".")
        ]
        return _nonempty(sorted(found), path, f"the directory holds no *{suffix} file")
    if not glob.has_magic(path) or os.path.exists(path):
        return [path]
    found = [name for name in glob.glob(path, recursive=True) if not os.path.isdir(name)]
    return _nonempty(sorted(found), path, "no file matches the pattern")


def _nonempty(found: list[str], path: str, reason: str) -> list[str]:
    if not found:
        raise MissingFileError(f"{reason} (file {path})", path=path, reason=reason)
    return found
