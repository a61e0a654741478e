"""Expands paths, lists, globs and directories to files."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from fastpipe._files._directory_walk import broken_link, files_below, matching
from fastpipe._local_path import local, refuse_contents
from fastpipe.errors import LimitError, MissingFileError, in_file

_MOST_ALTERNATIVES = 10_000
_MOST_BRACES = 64


def alternatives(text: str) -> list[str]:
    """Expands `{a,b}` in a text, in the order of a shell. Other text is returned as the only element.

    Alternatives may be nested. Braces without a comma, and braces that are not closed, are literal: `{1..3}` isn't
    expanded.

    Raises:
        LimitError: If the text has more than 64 opening braces, or more than 10,000 alternatives.
    """
    if text.count("{") > _MOST_BRACES:
        raise _too_many(f"more than {_MOST_BRACES} opening braces", text)
    at = text.find("{")
    while at >= 0:
        if (group := _group(text, at)) is not None:
            parts, end = group
            tails = alternatives(text[end:])
            middles = [middle for part in parts for middle in alternatives(part)]
            if len(middles) * len(tails) > _MOST_ALTERNATIVES:
                raise _too_many(f"more than {_MOST_ALTERNATIVES} alternatives", text)
            return [text[:at] + middle + tail for middle in middles for tail in tails]
        at = text.find("{", at + 1)
    return [text]


def _group(text: str, start: int) -> tuple[list[str], int] | None:
    """Returns the alternatives between the brace at `start` and its closing brace, and the index after that brace.

    Returns None if the brace isn't closed, or contains no comma.
    """
    parts: list[str] = []
    depth, begin = 0, start + 1
    for i in range(start, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "," and depth == 1:
            parts.append(text[begin:i])
            begin = i + 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return ([*parts, text[begin:i]], i + 1) if parts else None
    return None


def _too_many(what: str, text: str) -> LimitError:
    reason = f"{what} in a path: pass a list of paths instead"
    return LimitError(f"{reason} (file {text[:200]})", path=text, reason=reason)


Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
# In order of preference: only files with the first suffix that a directory contains are read. A tuple groups suffixes.
Suffixes: TypeAlias = "tuple[str | tuple[str, ...], ...]"


def expand(source: Paths, suffixes: Suffixes = (".avro",)) -> list[str]:
    """Lists the files that a source names.

    Directories and globs skip files and folders whose names begin with `_` or `.`, as Hadoop's readers do, because
    these are not committed. A glob matches such a name only if its component begins with the same character. They also
    skip files that end in `.tmp`, `_COPYING_`, `.crc`, or `.inprogress` with or without a further suffix. An explicit
    path is always read, regardless of its name.

    Links are followed. Each real folder is visited once, under its real name if possible, so link cycles end. A file
    with two links is read twice.

    Directories and globs skip empty files, with one warning to the logger `fastpipe`, because Hive writes them for
    empty buckets. An empty file that is named explicitly is listed.

    Args:
        source: A path, a glob (`**` for any depth), a directory (all files below it with one of the suffixes), or a
            list of these. A list keeps its order; the files of a glob or directory are sorted. `{a,b}` expands to both
            alternatives in this order; each must match something, and a file that both match is read once. `~` is the
            home directory, `~user` the home directory of another user. Environment variables are not expanded. An
            existing path, or the existing part of a path, is used literally.
        suffixes: The suffixes of files to read from a directory, in order of preference: only files with the first
            suffix that the directory contains are read. Suffixes in a tuple are read together.

    Returns:
        Paths as they appear in error messages.

    Raises:
        LimitError: If braces have more than 10,000 alternatives.
        MissingFileError: If a glob matches nothing, a directory contains no such file, all files are empty, the list is
            empty, or a link is dangling.
        StorageError: If a folder can't be read.
        TypeError: If the source is not made of paths.
        UnsupportedError: If a URL is not of a local file.
    """
    empty: list[str] = []
    if isinstance(source, str | os.PathLike):
        return _some(expand_one(source, suffixes, empty), empty)
    refuse_contents(source)
    try:
        items = iter(source)
    except TypeError:
        kind = type(source).__name__
        raise TypeError(f"source must be a path, a glob, a directory or a list of these; got {kind}") from None
    return _some([path for item in items for path in expand_one(item, suffixes, empty)], empty)


def _some(files: list[str], empty: list[str]) -> list[str]:
    tell_empty(files, empty)
    if not files:
        raise MissingFileError("the list of files is empty", reason="the list of files is empty")
    return files


def tell_empty(files: Sequence[object], empty: list[str]) -> None:
    """Warns about empty files that were skipped.

    Raises:
        MissingFileError: If all files are empty.
    """
    if not empty:
        return
    if not files:
        reason = f"all {len(empty)} files that were found are empty (zero bytes): there is no schema to read rows by"
        raise in_file(MissingFileError, empty[0], reason)
    import logging  # Takes milliseconds to import, and is rarely needed.

    logging.getLogger("fastpipe").warning(
        "skipped %d files of zero bytes, the first of which is %s", len(empty), empty[0]
    )


def with_suffix(paths: list[str], suffixes: Suffixes) -> list[str]:
    """Returns the files with the first suffix that any file has; an empty list if no file has a suffix."""
    found = ([path for path in paths if path.endswith(suffix)] for suffix in suffixes)
    return next(filter(None, found), [])


def none_in_directory(suffixes: Suffixes, folder: str, found: Iterable[str]) -> str:
    """Explains why no file of a directory is read: none of its files has one of the suffixes."""
    every = [end for ends in suffixes for end in ([ends] if isinstance(ends, str) else ends)]
    reason = f"the directory contains no file that ends in {' or '.join(every)}"
    bare = [path for path in found if not os.path.splitext(path)[1]]
    if not bare:
        return reason
    # Hive and old versions of Spark write files without a suffix: 000000_0, part-00000.
    pattern = "*" if os.path.dirname(bare[0]) == folder.rstrip("/" + os.sep) else "**/*"
    return f"{reason}, but files without a suffix, such as {bare[0]!r}: {os.path.join(folder, pattern)!r} reads them"


def expand_one(item: str | os.PathLike[str], suffixes: Suffixes, empty: list[str]) -> list[str]:
    """Returns the files that a path names, as in `expand`. Adds empty files that are skipped to `empty`."""
    path = local(item)
    if os.path.isdir(path):
        found = files_below(path)
        chosen = with_suffix(found, suffixes)
        return _without_empty(nonempty(chosen, path, none_in_directory(suffixes, path, found)), empty)
    if os.path.exists(path):
        return [path]
    if os.path.islink(path):
        raise broken_link(path)
    start = _existing(path)
    braces = alternatives(path[start:])
    if len(braces) > 1:
        lists = [expand_one(path[:start] + rest, suffixes, empty) for rest in braces]
        return list(dict.fromkeys(name for files in lists for name in files))
    if not glob.has_magic(path):
        return [path]
    return _without_empty(nonempty(matching(path), path, "no file matches the pattern"), empty)


def _existing(path: str) -> int:
    """Returns the length of the prefix of a path that consists of existing folders."""
    end = 0
    for separator in re.finditer(r"[\\/]" if os.sep == "\\" else "/", path):
        if not os.path.lexists(path[: separator.start()] or os.sep):
            break
        end = separator.end()
    return end


def _without_empty(files: list[str], empty: list[str]) -> list[str]:
    """Returns files that are not empty, or whose size can't be read. Adds empty files to `empty`."""
    kept: list[str] = []
    for path in files:
        try:
            found = os.stat(path)
        except OSError:  # Opening the file will report the error.
            kept.append(path)
            continue
        (empty if stat.S_ISREG(found.st_mode) and found.st_size == 0 else kept).append(path)
    return kept


def nonempty(found: list[str], path: str, reason: str) -> list[str]:
    """Returns the files that were found.

    Raises:
        MissingFileError: If no files were found; `reason` is the message.
    """
    if not found:
        raise in_file(MissingFileError, path, reason)
    return found
