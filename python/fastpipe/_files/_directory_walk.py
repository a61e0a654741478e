"""Lists the files in folders. Each real folder is visited once, links are followed, uncommitted files are skipped."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from fastpipe.errors import MissingFileError, StorageError, in_file

# Hadoop's readers also skip these names: uncommitted attempts (`_temporary`, `.hive-staging_x`), markers (`_SUCCESS`)
# and checksums (`.part-0.avro.crc`).
HIDDEN = ("_", ".")

# Other files that are not committed or not data: Flink's parts, copies of `hdfs dfs -put`, checksums.
_UNFINISHED = re.compile(r"(?P<mark>\.inprogress)(\..*)?$|(?P<end>\.tmp|_COPYING_|\.crc)$", re.IGNORECASE)

_SEPARATORS = re.compile(r"[\\/]" if os.sep == "\\" else "/")

# The identity of a real folder: its device and inode numbers, or its real path.
_Seen: TypeAlias = "set[tuple[int, int] | str]"


@dataclass(slots=True)
class Folder:
    """The content of a folder: full paths, sorted, including hidden names. Targets of links are not inspected."""

    path: str
    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: str) -> Folder:
        """Lists a folder.

        Raises:
            StorageError: If the folder can't be read.
        """
        listed = cls(path)
        try:
            with os.scandir(path or os.curdir) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    link = entry.is_symlink()
                    kind = listed.links if link else listed.folders if entry.is_dir() else listed.files
                    kind.append(os.path.join(path, entry.name))
        except OSError as error:
            raise _failed(path, error) from None
        return listed


def files_below(folder: str) -> list[str]:
    """Returns all visible files in a folder and its visible subfolders, sorted.

    Raises:
        MissingFileError: If a link is dangling.
        StorageError: If a folder can't be read.
    """
    files = (path for found in _below([folder]) for path in _visible(found.files))
    return sorted(path for path in files if not is_unfinished(os.path.basename(path)))


def is_unfinished(name: str, pattern: str = "") -> bool:
    """Returns whether the suffix of a name marks an unfinished file (`.inprogress`, `.tmp`, `_COPYING_`, `.crc`).

    A suffix that the glob `pattern` contains doesn't count: `*.tmp` matches such files.
    """
    found = _UNFINISHED.search(name)
    return found is not None and (found["mark"] or found["end"]).lower() not in pattern.lower()


def matching(pattern: str) -> list[str]:
    """Returns the files that a glob matches, sorted. The component `**` matches any number of folders.

    Hidden names only match components that begin with the same character. Unfinished files only match components with
    the same suffix. A component that is the name of an existing file or folder is used literally.

    Raises:
        MissingFileError: If a matching link is dangling.
        StorageError: If a folder can't be read.
    """
    drive, rest = os.path.splitdrive(pattern)
    *above, last = [part for part in _SEPARATORS.split(rest) if part]
    folders = [drive + (os.sep if _SEPARATORS.match(rest) else "")]
    if last == "**":
        above, last = [*above, last], "*"
    for component in above:
        folders = _descend(folders, component)
    return sorted(path for folder in folders for path in _files(folder, last))


def broken_link(path: str) -> MissingFileError:
    """Returns the error for a dangling link."""
    reason = f"the link leads to {_target(path)!r}, which does not exist; remove the link or restore its target"
    return in_file(MissingFileError, path, reason)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # The link was removed in the meantime.
        return "?"


def _below(starts: Iterable[str]) -> list[Folder]:
    """Returns the given folders and all visible folders below them, each real folder once.

    Links to folders are followed last, so that a folder is listed under its real name if it has one here.
    """
    found: list[Folder] = []
    seen: _Seen = set()
    links = list(starts)
    while links:
        ahead, links = links[::-1], []
        while ahead:
            path = ahead.pop()
            if not _is_new(path, seen):
                continue
            listed = Folder.read(path)
            found.append(listed)
            ahead += _visible(listed.folders)[::-1]
            for link in _visible(listed.links):
                if is_unfinished(os.path.basename(link)) and not os.path.isdir(link):
                    continue
                (links if _leads_to_folder(link) else listed.files).append(link)
        links.sort()
    return found


def _descend(folders: list[str], component: str) -> list[str]:
    """Returns the folders that a component of a glob matches in the given folders, each real folder once."""
    if component == "**":
        return [found.path for found in _below(folders)]
    below: list[str] = []
    links: list[str] = []
    for folder in folders:
        if _is_literal(folder, component):
            below += filter(os.path.isdir, [os.path.join(folder, component)])
            continue
        listed = Folder.read(folder)
        below += _fitting(listed.folders, component)
        links += filter(_leads_to_folder, _fitting(listed.links, component))
    seen: _Seen = set()
    return [folder for folder in below + links if _is_new(folder, seen)]


def _files(folder: str, component: str) -> list[str]:
    """Returns the files that the last component of a glob matches in a folder."""
    if _is_literal(folder, component):
        path = os.path.join(folder, component)
        if os.path.islink(path) and not os.path.exists(path):
            raise broken_link(path)
        return [path] if os.path.exists(path) and not os.path.isdir(path) else []
    listed = Folder.read(folder)
    files, links = (
        [path for path in _fitting(paths, component) if not is_unfinished(os.path.basename(path), component)]
        for paths in (listed.files, listed.links)
    )
    return files + [link for link in links if not _leads_to_folder(link)]


def _is_literal(folder: str, component: str) -> bool:
    """Returns whether a component has no special characters, or is the name of an existing file or folder."""
    return not glob.has_magic(component) or os.path.lexists(os.path.join(folder, component))


def _fitting(paths: Iterable[str], pattern: str) -> list[str]:
    fits = re.compile(fnmatch.translate(os.path.normcase(pattern))).match
    hidden = {mark for mark in HIDDEN if not pattern.startswith(mark)}
    named = ((path, os.path.basename(path)) for path in paths)
    return [path for path, name in named if name[0] not in hidden and fits(os.path.normcase(name))]


def _visible(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not os.path.basename(path).startswith(HIDDEN)]


def _leads_to_folder(link: str) -> bool:
    """Returns whether a link leads to a folder rather than a file.

    Raises:
        MissingFileError: If the link is dangling or part of a cycle.
        StorageError: If the system denies access to the target.
    """
    if os.path.isdir(link):
        return True
    try:
        os.stat(link)
    except PermissionError as error:
        raise _failed(link, error) from None
    except OSError:
        raise broken_link(link) from None
    return False


def _is_new(folder: str, seen: _Seen) -> bool:
    """Returns whether the folder wasn't visited yet, under any name."""
    try:
        found = os.stat(folder or os.curdir)
    except OSError as error:
        raise _failed(folder, error) from None
    # Some file systems have no inode numbers, so the real path identifies the folder.
    key = (found.st_dev, found.st_ino) if found.st_ino else os.path.realpath(folder)
    new = key not in seen
    seen.add(key)
    return new


def _failed(path: str, error: OSError) -> StorageError:
    reason = f"the folder can't be read: {error.strerror}"
    failed = StorageError(f"{reason} (folder {path or os.curdir})", path=path, reason=reason)
    failed.errno = error.errno
    return failed
