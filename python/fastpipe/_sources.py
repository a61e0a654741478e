"""From what users name (paths, lists, globs, directories) to files."""

from __future__ import annotations

import glob
import os
import re
import urllib.request
from collections.abc import Iterable
from typing import TypeAlias
from urllib.parse import urlsplit

from fastpipe._arguments import shown
from fastpipe._folders import broken_link, files_below, matching
from fastpipe.errors import MissingFileError, UnsupportedError

__all__ = ["Paths", "expand", "local", "none_in_directory", "with_suffix"]

Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

# One letter is a drive of Windows.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def expand(source: Paths, suffixes: tuple[str, ...] = (".avro",)) -> list[str]:
    """Lists the files that a source names.

    Directories and globs leave out files and folders that begin with `_` or `.`, as Hadoop's readers do: they hold what
    isn't committed. A glob's component that begins so itself matches them, and what is named outright is read whatever
    its name. Links are followed; each real folder is visited once, under its own name if it has one there, so loops
    end. A file that is linked twice is read twice.

    Args:
        source: a path, a glob (`**` for any depth), a directory (all files below it with one of the suffixes), or a
            list of these. What a list names keeps its order; what a glob or directory holds is sorted. A path that
            exists is taken as it is, even if it looks like a glob or begins with `~`, which else is the home directory.
        suffixes: what the files end in that are taken from a directory: the first of them that it has files of.

    Returns:
        Paths as they will be named in errors.

    Raises:
        MissingFileError: if a glob matches nothing, a directory holds no such file, the list is empty, or a link leads
            nowhere.
        StorageError: if a folder can't be read.
        TypeError: for anything else than paths.
        UnsupportedError: for a URL of anything but a local file.
    """
    if isinstance(source, str | os.PathLike):
        return _expand_one(source, suffixes)
    _refuse_contents(source)
    try:
        items = iter(source)
    except TypeError:
        kind = type(source).__name__
        raise TypeError(f"source is a path, a glob, a directory or a list of these, not {kind}") from None
    files = [path for item in items for path in _expand_one(item, suffixes)]
    if not files:
        raise MissingFileError("the list of files is empty", reason="the list of files is empty")
    return files


def _refuse_contents(source: object) -> None:
    """Raises a TypeError for files that are open, and for what was read of them."""
    if isinstance(source, bytes | bytearray | memoryview) or hasattr(source, "read"):
        kind = type(source).__name__
        raise TypeError(
            f"source is a path, not {kind}: open files and bytes are taken by read_avro, infer_features and AvroFile "
            "alone; write them to a file"
        )


def with_suffix(paths: list[str], suffixes: tuple[str, ...]) -> list[str]:
    """The files of a directory with the first of the suffixes that any has; none if none has one."""
    found = ([path for path in paths if path.endswith(suffix)] for suffix in suffixes)
    return next(filter(None, found), [])


def none_in_directory(suffixes: tuple[str, ...]) -> str:
    """Why nothing is read of a directory in which no file has one of these suffixes."""
    return f"the directory holds no file that ends in {' or '.join(suffixes)}"


def _expand_one(item: str | os.PathLike[str], suffixes: tuple[str, ...]) -> list[str]:
    path = local(item)
    if os.path.isdir(path):
        return _nonempty(with_suffix(files_below(path), suffixes), path, none_in_directory(suffixes))
    if os.path.exists(path):
        return [path]
    if os.path.islink(path):
        raise broken_link(path)
    if not glob.has_magic(path):
        return [path]
    return _nonempty(matching(path), path, "no file matches the pattern")


def local(item: str | os.PathLike[str], what: str = "source is a path, a glob, a directory or a list of these") -> str:
    """The path of a local file or folder, of which the user may have given a URL or one that begins with `~`.

    Args:
        item: the path.
        what: says what should be given, in the error for what is no path.

    Raises:
        TypeError: if it is no path.
        UnsupportedError: for a URL of anything but a local file.
    """
    _refuse_contents(item)
    if not isinstance(item, str | os.PathLike):
        raise TypeError(f"{what}, not {shown(item)}")
    path = os.fsdecode(item)
    if os.path.lexists(path):
        return path
    if url := _URL.match(path):
        return _of_url(path, url[1])
    return os.path.expanduser(path)


def _of_url(url: str, scheme: str) -> str:
    host, path = urlsplit(url)[1:3]
    if scheme.lower() == "file" and host in ("", "localhost"):
        return urllib.request.url2pathname(path)
    reason = (
        f"only local files are read, and this is a URL of {scheme}://; copy the data to a local disk, or mount them "
        "there, and give the path"
    )
    raise UnsupportedError(f"{reason} (file {url})", path=url, reason=reason)


def _nonempty(found: list[str], path: str, reason: str) -> list[str]:
    if not found:
        raise MissingFileError(f"{reason} (file {path})", path=path, reason=reason)
    return found
