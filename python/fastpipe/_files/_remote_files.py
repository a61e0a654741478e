"""Finds files in object stores and on web servers, by URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from fastpipe._arguments import memory_size, shown
from fastpipe._fastpipe import RemoteFile, list_remote
from fastpipe._files._directory_walk import HIDDEN, is_unfinished
from fastpipe._files._in_memory_files import ExpandPath
from fastpipe._files._paths import Suffixes, alternatives, expand_one, none_in_directory, nonempty, with_suffix
from fastpipe.errors import MissingFileError, UnsupportedError, in_file

if TYPE_CHECKING:
    from fastpipe._boundary import Listed

StorageOptions: TypeAlias = "Mapping[str, Any] | None"
"""How to reach an object store: names of options and their values."""

BlockCache: TypeAlias = tuple[str | os.PathLike[str], int | str] | None
"""A folder on a local disk that keeps bytes of remote files, and its size."""

_REMOTE = re.compile(r"(s3a?|gs|az|adl|azure|abfss?|https?)://", re.IGNORECASE)
_MAGIC, _WEB_MAGIC = re.compile(r"[*?\[]"), re.compile(r"[*\[]")

# Names of fsspec, s3fs, gcsfs and adlfs, in the words of the crate object_store.
_NAMES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "aws_session_token": "token",
    "anon": "skip_signature",
    "account_name": "azure_storage_account_name",
    "account_key": "azure_storage_account_key",
    "sas_token": "azure_storage_sas_token",
    "tenant_id": "azure_storage_tenant_id",
    "client_id": "azure_storage_client_id",
    "client_secret": "azure_storage_client_secret",
}
_WEB = ("http://", "https://")
_LEAST_CACHE = 1 << 20


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL of an object store or of a web server."""
    return _REMOTE.match(path) is not None and not os.path.lexists(path)


def expander(storage_options: StorageOptions, block_cache: BlockCache = None) -> ExpandPath:
    """Returns a function that lists the files that a path or a URL names. Checks the options."""
    lowered_options(storage_options)
    cache = lowered_cache(block_cache)

    def expand(item: str | os.PathLike[str], suffixes: Suffixes, empty: list[str]) -> list[str] | list[RemoteFile]:
        if isinstance(item, str) and is_remote(item):
            return expand_url(item, suffixes, empty, storage_options, cache)
        return expand_one(item, suffixes, empty)

    return expand


def lowered_cache(block_cache: BlockCache) -> tuple[str, int] | None:
    """Returns the folder and the size of a block cache for the extension module.

    Raises:
        TypeError: If the argument isn't a pair of a path and a size.
        ValueError: If the path is empty or a URL, or the size can't be parsed or is below 1 MiB.
    """
    if block_cache is None:
        return None
    example = 'such as ("/nvme/fastpipe", "500GB")'
    given: Any = block_cache
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"block_cache must be a pair of a folder and a size, {example}; got {shown(given)}")
    folder, size = given
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"the folder of block_cache must be a path, {example}; got {shown(folder)}")
    path = os.fsdecode(folder)
    if not path or is_remote(path):
        raise ValueError(f"the folder of block_cache must be on a local disk, {example}; got {shown(path)}")
    found = memory_size("the size of block_cache", size)
    if found < _LEAST_CACHE:
        raise ValueError(f"the size of block_cache must be at least 1MiB; got {shown(size)}")
    return os.path.abspath(os.path.expanduser(path)), found


def lowered_options(options: StorageOptions) -> list[tuple[str, str]]:
    """Returns options in the words of the extension module, sorted by name.

    Raises:
        TypeError: If the options aren't a mapping, or a value has another type than text, number or bool.
    """
    if options is None:
        return []
    if not isinstance(options, Mapping):
        raise TypeError(f"storage_options must be a mapping from names to values; got {shown(options)}")
    found: dict[str, str] = {}
    for name, value in options.items():
        if name == "client_kwargs" and isinstance(value, Mapping):
            found |= dict(lowered_options(value))
        elif isinstance(value, bool):
            found[_NAMES.get(name, name)] = str(value).lower()
        elif isinstance(value, str | int | float):
            found[_NAMES.get(name, name)] = str(value)
        elif value is not None:
            # The value may be a secret.
            raise TypeError(
                f"storage_options[{name!r}] must be a text, a number or a bool; got a {type(value).__name__}"
            )
    return sorted(found.items())


def expand_url(
    url: str, suffixes: Suffixes, empty: list[str], options: StorageOptions, cache: tuple[str, int] | None = None
) -> list[RemoteFile]:
    """Returns the files that a URL names, as `expand` does for paths. Adds empty files that are skipped to `empty`.

    A URL that names no object is a directory. Web servers have no directories and no globs.

    Raises:
        MissingFileError: If nothing is found.
        StorageError: If the storage can't be read.
        UnsupportedError: If the storage can't list its files.
    """
    lowered = lowered_options(options)
    braces = alternatives(url)
    if len(braces) > 1:
        found = [file for each in braces for file in expand_url(each, suffixes, empty, options, cache)]
        return list({str(file): file for file in found}.values())
    is_web = url.startswith(_WEB)
    # A web server's ? begins a query, which is another error.
    if magic := (_WEB_MAGIC if is_web else _MAGIC).search(url):
        if is_web:
            raise in_file(UnsupportedError, url, "a web server has no list of its files: name each file")
        folder = url[: url.rindex("/", 0, magic.start()) + 1]
        fits = _pattern(url)
        listed = [entry for entry in list_remote(folder, lowered) if fits.fullmatch(_name(entry))]
        return _opened(nonempty_entries(listed, url, "no object matches the pattern"), (lowered, cache), empty)
    if not url.endswith("/"):
        try:
            return [RemoteFile.open(url, lowered, cache)]
        except MissingFileError:
            if is_web:
                raise
    folder = url.rstrip("/") + "/"
    below = [entry for entry in list_remote(folder, lowered) if _is_committed(_name(entry)[len(folder) :])]
    chosen = set(with_suffix([_name(entry) for entry in below], suffixes))
    reason = none_in_directory(suffixes, folder, [_name(entry) for entry in below])
    reason = reason if below else "there is no such object, and no object below it"
    return _opened(nonempty_entries([e for e in below if _name(e) in chosen], url, reason), (lowered, cache), empty)


def nonempty_entries(found: list[Listed], url: str, reason: str) -> list[Listed]:
    """Returns the objects that were found.

    Raises:
        MissingFileError: If there are none; `reason` is the message.
    """
    nonempty([entry[0] for entry in found], url, reason)
    return found


def _name(entry: Listed) -> str:
    """Returns the URL of an object as users write it in a glob."""
    return entry[0].replace("%23", "#").replace("%3F", "?").replace("%25", "%")


def _is_committed(path: str) -> bool:
    parts = path.split("/")
    return not any(part.startswith(HIDDEN) for part in parts) and not is_unfinished(parts[-1])


def _opened(
    found: list[Listed], access: tuple[list[tuple[str, str]], tuple[str, int] | None], empty: list[str]
) -> list[RemoteFile]:
    empty += [entry[0] for entry in found if not entry[1]]
    return [RemoteFile.listed(entry, *access) for entry in found if entry[1]]


def _pattern(url: str) -> re.Pattern[str]:
    """Returns the expression for a glob. `*` and `?` don't match a slash, and `**` matches any number of folders.

    Hidden names only match components that begin with the same character.
    """
    parts = url.split("/")
    if parts[-1] == "**":
        parts.append("*")
    text = ""
    for number, part in enumerate(parts):
        if part == "**":
            text += r"(?:(?![_.])[^/]+/)*"
            continue
        visible = "" if part[:1] in ("_", ".", "") or number < 3 else "(?![_.])"
        text += visible + "".join(map(_piece, re.findall(r"\[!?\]?[^\]]*\]|.", part)))
        text += "/" if number < len(parts) - 1 else ""
    return re.compile(text)


def _piece(token: str) -> str:
    if token == "*":
        return "[^/]*"
    if token == "?":
        return "[^/]"
    if len(token) > 1:
        negated = token[1] == "!"
        inside = re.sub(r"([\\^])", r"\\\1", token[1 + negated : -1])
        return f"[{'^/' if negated else ''}{inside}]"
    return re.escape(token)
