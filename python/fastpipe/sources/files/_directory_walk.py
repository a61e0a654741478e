"""What folders hold: each real folder once, links followed, what isn't committed left out."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from fastpipe.errors import MissingFileError, StorageError, in_file

# Hadoop's readers pass these over too: attempts that aren't committed (`_temporary`, `.hive-staging_x`), marks
# (`_SUCCESS`), checksums (`.part-0.avro.crc`).
_HIDDEN = ("_", ".")

# What else is written and not yet committed, or no data: Flink's parts, copies of `hdfs dfs -put`, checksums.
_UNFINISHED = re.compile(r"(?P<mark>\.inprogress)(\..*)?$|(?P<end>\.tmp|_COPYING_|\.crc)$", re.IGNORECASE)

_SEPARATORS = re.compile(r"[\\/]" if os.sep == "\\" else "/")

# What a real folder is known by: the numbers of its device and of itself, or its real name.
_Seen: TypeAlias = "set[tuple[int, int] | str]"


@dataclass(slots=True)
class Folder:
    """What a folder holds: full names, sorted, hidden ones too. Where links lead isn't looked at."""

    path: str
    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: str) -> Folder:
        """Lists a folder.

        Raises:
            StorageError: if it can't be read.
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
    """The visible files in a folder and all visible ones below it, sorted.

    Raises:
        MissingFileError: for a link that leads nowhere.
        StorageError: if a folder can't be read.
    """
    files = (path for found in _below([folder]) for path in _visible(found.files))
    return sorted(path for path in files if not is_unfinished(os.path.basename(path)))


def is_unfinished(name: str, pattern: str = "") -> bool:
    """Whether a file's name ends as those do that are still written (`.inprogress`, `.tmp`, `_COPYING_`, `.crc`).

    What a pattern names itself isn't: `*.tmp` matches such files.
    """
    found = _UNFINISHED.search(name)
    return found is not None and (found["mark"] or found["end"]).lower() not in pattern.lower()


def matching(pattern: str) -> list[str]:
    """The files that a glob matches, sorted. `**` as a component stands for any number of folders.

    Hidden names match only components that begin like them, and names of files that are still written only components
    that end like them. A component that is itself the name of a file or folder stands for that.

    Raises:
        MissingFileError: for a link that leads nowhere and would match.
        StorageError: if a folder can't be read.
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
    """The error for a link that leads nowhere."""
    reason = f"the link leads to {_target(path)!r}, which isn't there; remove the link, or put the data there"
    return in_file(MissingFileError, path, reason)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # It was removed since.
        return "?"


def _below(starts: Iterable[str]) -> list[Folder]:
    """These folders and all visible ones below them, each real one once.

    Links to folders come last, so that a folder that has a real name here has that one.
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
    """The folders that a component of a glob stands for in these folders, each real one once."""
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
    """The files that the last component of a glob stands for in a folder."""
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
    """Whether a component of a glob stands for itself: no character of it is special, or there is such a name."""
    return not glob.has_magic(component) or os.path.lexists(os.path.join(folder, component))


def _fitting(paths: Iterable[str], pattern: str) -> list[str]:
    fits = re.compile(fnmatch.translate(os.path.normcase(pattern))).match
    hidden = {mark for mark in _HIDDEN if not pattern.startswith(mark)}
    named = ((path, os.path.basename(path)) for path in paths)
    return [path for path, name in named if name[0] not in hidden and fits(os.path.normcase(name))]


def _visible(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not os.path.basename(path).startswith(_HIDDEN)]


def _leads_to_folder(link: str) -> bool:
    """Whether a link leads to a folder, and not to a file.

    Raises:
        MissingFileError: if it leads nowhere, or in a circle.
        StorageError: if the system won't say.
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
    """Whether the folder wasn't seen under any name."""
    try:
        found = os.stat(folder or os.curdir)
    except OSError as error:
        raise _failed(folder, error) from None
    # File systems that don't number their files have names for them, at least.
    key = (found.st_dev, found.st_ino) if found.st_ino else os.path.realpath(folder)
    new = key not in seen
    seen.add(key)
    return new


def _failed(path: str, error: OSError) -> StorageError:
    reason = f"the folder can't be read: {error.strerror}"
    failed = StorageError(f"{reason} (folder {path or os.curdir})", path=path, reason=reason)
    failed.errno = error.errno
    return failed
