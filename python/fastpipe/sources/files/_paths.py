"""From what users name (paths, lists, globs, directories) to files."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable
from typing import TypeAlias

from fastpipe._local_path import local, refuse_contents
from fastpipe.errors import LimitError, MissingFileError, in_file
from fastpipe.sources.files._directory_walk import broken_link, files_below, matching

_MOST_ALTERNATIVES = 10_000
_MOST_BRACES = 64


def alternatives(text: str) -> list[str]:
    """What a text with `{a,b}` stands for, in the order in which a shell lists it; of any other text the text itself.

    Alternatives may hold alternatives. Braces without a comma between them, and those that nothing closes, are
    characters like others: `{1..3}` isn't expanded.

    Raises:
        LimitError: if there are more than 64 opening braces, or 10,000 alternatives.
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
    """The parts between the brace at `start` and the one that closes it, and where what is behind begins.

    None if nothing closes it, or no comma separates parts.
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
    reason = f"{what} in a path: list the paths instead"
    return LimitError(f"{reason} (file {text[:200]})", path=text, reason=reason)


Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
# The first that a directory has files of is taken; several that are taken together are a tuple.
Suffixes: TypeAlias = "tuple[str | tuple[str, ...], ...]"


def expand(source: Paths, suffixes: Suffixes = (".avro",)) -> list[str]:
    """Lists the files that a source names.

    Directories and globs leave out files and folders that begin with `_` or `.`, as Hadoop's readers do: they hold what
    isn't committed. A glob's component that begins so itself matches them, and what is named outright is read whatever
    its name. Links are followed; each real folder is visited once, under its own name if it has one there, so loops
    end. A file that is linked twice is read twice. Files whose names end in `.inprogress` (and what follows it),
    `.tmp`, `_COPYING_` or `.crc` are left out likewise.

    Of directories and globs, files of zero bytes are passed over, with one warning to the logger `fastpipe`: Hive
    leaves them for empty buckets. One that is named outright is listed.

    Args:
        source: a path, a glob (`**` for any depth), a directory (all files below it with one of the suffixes), or a
            list of these. What a list names keeps its order; what a glob or directory holds is sorted. `{a,b}` stands
            for both, in this order, and each must name something; what both name is read once. `~` is the home
            directory, `~user` another one; environment variables aren't looked at. A path that exists is taken as it
            is, whatever it looks like; so is the part of a path that exists.
        suffixes: what the files end in that are taken from a directory: the first of them that it has files of. Several
            that are taken together are a tuple.

    Returns:
        Paths as they will be named in errors.

    Raises:
        LimitError: for braces with more than 10,000 alternatives.
        MissingFileError: if a glob matches nothing, a directory holds no such file, all files have zero bytes, the list
            is empty, or a link leads nowhere.
        StorageError: if a folder can't be read.
        TypeError: for anything else than paths.
        UnsupportedError: for a URL of anything but a local file.
    """
    empty: list[str] = []
    if isinstance(source, str | os.PathLike):
        return _some(_expand_one(source, suffixes, empty), empty)
    refuse_contents(source)
    try:
        items = iter(source)
    except TypeError:
        kind = type(source).__name__
        raise TypeError(f"source is a path, a glob, a directory or a list of these, not {kind}") from None
    return _some([path for item in items for path in _expand_one(item, suffixes, empty)], empty)


def _some(files: list[str], empty: list[str]) -> list[str]:
    tell_empty(files, empty)
    if not files:
        raise MissingFileError("the list of files is empty", reason="the list of files is empty")
    return files


def tell_empty(files: list[str], empty: list[str]) -> None:
    """Warns of files of zero bytes that were passed over.

    Raises:
        MissingFileError: if there are no others.
    """
    if not empty:
        return
    if not files:
        reason = f"all files that were found are empty ({len(empty)} of zero bytes): there is no schema to read rows by"
        raise in_file(MissingFileError, empty[0], reason)
    import logging  # Takes milliseconds to import, and is rarely needed.

    logging.getLogger("fastpipe").warning(
        "passed over %d files of zero bytes, the first of which is %s", len(empty), empty[0]
    )


def with_suffix(paths: list[str], suffixes: Suffixes) -> list[str]:
    """The files of a directory with the first of the suffixes that any has; none if none has one."""
    found = ([path for path in paths if path.endswith(suffix)] for suffix in suffixes)
    return next(filter(None, found), [])


def none_in_directory(suffixes: Suffixes, folder: str, found: Iterable[str]) -> str:
    """Why nothing is read of a directory in which none of the files that were found has one of these suffixes."""
    every = [end for ends in suffixes for end in ([ends] if isinstance(ends, str) else ends)]
    reason = f"the directory holds no file that ends in {' or '.join(every)}"
    bare = [path for path in found if not os.path.splitext(path)[1]]
    if not bare:
        return reason
    # Hive and old Spark give no suffix: 000000_0, part-00000.
    pattern = "*" if os.path.dirname(bare[0]) == folder.rstrip("/" + os.sep) else "**/*"
    return f"{reason}, but files without a suffix, such as {bare[0]!r}: {os.path.join(folder, pattern)!r} reads them"


def _expand_one(item: str | os.PathLike[str], suffixes: Suffixes, empty: list[str]) -> list[str]:
    """The files that a path names; those of zero bytes that are passed over are put into `empty`."""
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
        lists = [_expand_one(path[:start] + rest, suffixes, empty) for rest in braces]
        return list(dict.fromkeys(name for files in lists for name in files))
    if not glob.has_magic(path):
        return [path]
    return _without_empty(nonempty(matching(path), path, "no file matches the pattern"), empty)


def _existing(path: str) -> int:
    """How many characters of a path name folders that exist."""
    end = 0
    for separator in re.finditer(r"[\\/]" if os.sep == "\\" else "/", path):
        if not os.path.lexists(path[: separator.start()] or os.sep):
            break
        end = separator.end()
    return end


def _without_empty(files: list[str], empty: list[str]) -> list[str]:
    """Those of the files that have bytes, or can't be looked at; the others are put into `empty`."""
    kept: list[str] = []
    for path in files:
        try:
            found = os.stat(path)
        except OSError:  # Opening it says why.
            kept.append(path)
            continue
        (empty if stat.S_ISREG(found.st_mode) and found.st_size == 0 else kept).append(path)
    return kept


def nonempty(found: list[str], path: str, reason: str) -> list[str]:
    """What was found.

    Raises:
        MissingFileError: for that reason, if it is nothing.
    """
    if not found:
        raise in_file(MissingFileError, path, reason)
    return found
