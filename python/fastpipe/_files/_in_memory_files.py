"""Files in memory: bytes, other buffers, and the contents of open files."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from fastpipe._arguments import shown
from fastpipe._boundary import Elsewhere, LoweredFiles
from fastpipe._fastpipe import RemoteFile
from fastpipe._files._index_cache import IndexCache, cache_directory
from fastpipe._files._paths import Paths, Suffixes, expand_one, tell_empty
from fastpipe._local_path import local
from fastpipe.errors import MissingFileError, StorageError, in_file

# Bytes per read of an open file. Signals are handled between reads.
_CHUNK = 1 << 20

_SOURCE = "source must be a path, a glob, a directory, bytes, a binary file object or a list of these"


class ReadableFile(Protocol):
    """A binary file object, such as `open(path, "rb")` returns."""

    def read(self, size: int, /) -> bytes:
        """Returns the next bytes, at most `size` if it is positive. No bytes at the end."""


# Python before 3.12 has no type for buffers.
Source: TypeAlias = Paths | bytes | bytearray | memoryview | ReadableFile | Iterable[Any]
# Functions such as `expand_one`.
ExpandPath: TypeAlias = Callable[["str | os.PathLike[str]", Suffixes, list[str]], "list[str] | list[RemoteFile]"]


class Contents(NamedTuple):
    """A file in memory.

    Attributes:
        name: Its name in error messages.
        whole: An immutable buffer that contains the file's bytes. It isn't copied.
        start: The offset of the file's first byte in `whole`.
        stop: The offset after the file's last byte in `whole`.
    """

    name: str
    whole: bytes
    start: int
    stop: int

    @property
    def place(self) -> tuple[bytes, int, int]:
        """The buffer and its range, for the extension module."""
        return self.whole, self.start, self.stop

    @property
    def view(self) -> memoryview:
        """The file's bytes. They aren't copied."""
        return memoryview(self.whole)[self.start : self.stop]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Contents({self.name!r}, {self.stop - self.start} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles only the bytes of this file.
        return Contents, (self.name, self.whole[self.start : self.stop], 0, self.stop - self.start)


File: TypeAlias = "str | Contents | RemoteFile"
"""The path of a file, its contents in memory, or a remote file."""


def opened(
    source: Source,
    suffixes: Suffixes = (".avro",),
    expand_path: ExpandPath = expand_one,
) -> list[File]:
    """Lists the files that a source names or contains.

    Bytes and read-only views of bytes are not copied. Other buffers are copied once, so that later changes to them have
    no effect. File objects are read immediately, from their position to their end.

    Args:
        source: Paths as in `expand`, a contiguous buffer of bytes, a binary file object, or a list of any of these.
        suffixes: The suffixes of files to read from a directory, as in `expand`.
        expand_path: The function that expands each path: by default on local disks.

    Raises:
        FastpipeError: If paths can't be expanded (see `expand`), or a file object can't be read.
        TypeError: If the source has another type, such as a file that was opened as text.
    """
    contents = _contents(source, 0)
    if contents is not None:
        return [contents]
    if isinstance(source, Mapping):
        raise TypeError(f"{_SOURCE}; got {shown(source)}: from_arrays reads a dict of arrays")
    try:
        items = [source] if isinstance(source, str | os.PathLike) else iter(cast("Iterable[Any]", source))
    except TypeError:
        raise TypeError(f"{_SOURCE}; got {type(source).__name__}") from None
    files: list[File] = []
    empty: list[str] = []
    for number, item in enumerate(items):
        contents = _contents(item, number)
        if contents is not None:
            files.append(contents)
        elif isinstance(item, RemoteFile):
            files.append(item)
        elif isinstance(item, str | os.PathLike):
            files += expand_path(item, suffixes, empty)
        else:
            hint = ": read rows with from_arrow(pyarrow.Table.from_pylist(rows))" if isinstance(item, Mapping) else ""
            raise TypeError(f"{_SOURCE}; got {shown(item)}{hint}")
    tell_empty(files, empty)
    if not files:
        raise MissingFileError("the list of files is empty", reason="the list of files is empty")
    return files


def lowered(files: Iterable[File], index_cache: IndexCache = None) -> LoweredFiles:
    """Returns files as arguments of the extension module.

    Args:
        files: The paths of the files, their contents in memory, or remote files.
        index_cache: A directory of block indexes, True for the user's cache directory, or None for no cache.
    """
    places = [(str(file), elsewhere(file)) for file in files]
    return places, cache_directory(index_cache)


def elsewhere(file: File) -> Elsewhere:
    """Returns a file that isn't on a local disk as an argument of the extension module. None for a path."""
    if isinstance(file, Contents):
        return file.place
    return file if isinstance(file, RemoteFile) else None


def one(source: Source) -> str | Contents:
    """Returns the path or the contents of a source that is a single file."""
    contents = None if isinstance(source, str | os.PathLike) else _contents(source, 0)
    what = "path must be the path of a file, bytes or a binary file object"
    return local(cast("str", source), what) if contents is None else contents


def _contents(item: Any, number: int) -> Contents | None:
    """Returns the contents of a buffer or file object; None for other types."""
    if isinstance(item, Contents):
        return item
    if isinstance(item, str | os.PathLike):
        return None
    name = f"<{type(item).__name__} #{number}>"
    if type(item) is bytes:
        return Contents(name, item, 0, len(item))
    try:
        view = memoryview(item)
    except TypeError:
        if not callable(getattr(item, "read", None)):
            return None
        own = getattr(item, "name", None)
        # The name of a pipe is its file descriptor.
        name = own if isinstance(own, str) and own else name
        whole = _read(item, name)
        return Contents(name, whole, 0, len(whole))
    if view.format not in ("B", "b", "c"):
        # An array of paths is a list, not a buffer of bytes.
        return None
    if not view.contiguous:
        raise TypeError(f"source must be a contiguous buffer: {name} isn't contiguous; copy it with bytes()")
    if type(view.obj) is bytes and view.nbytes:
        start = _address(view) - _address(view.obj)
        return Contents(name, view.obj, start, start + view.nbytes)
    whole = view.tobytes()
    return Contents(name, whole, 0, len(whole))


def _address(buffer: bytes | memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _read(file: ReadableFile, name: str) -> bytes:
    """Returns all bytes from a file object's position to its end."""
    # BytesIO.getvalue doesn't copy its contents.
    found = io.BytesIO()
    for piece in pieces(file, name):
        found.write(piece)
    return found.getvalue()


def pieces(file: ReadableFile, name: str) -> Generator[bytes]:
    """Yields the bytes from a file object's position to its end.

    Raises:
        StorageError: If the file object can't be read.
        TypeError: If the file object isn't binary.
    """
    while True:
        try:
            chunk: object = file.read(_CHUNK)
        except OSError as error:
            raise in_file(StorageError, name, f"the file object can't be read: {error}") from error
        except ValueError as error:  # The file object is closed.
            raise ValueError(f"the file object {name} can't be read: {error}") from error
        if isinstance(chunk, str):
            raise TypeError(f'the file {name} was opened as text: open it with "rb"')
        if chunk is None:
            reason = "the file object is non-blocking and has no data yet: set its descriptor to blocking"
            raise in_file(StorageError, name, reason)
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise TypeError(f"the read method of {name} must return bytes; got {type(chunk).__name__}")
        if not chunk:
            return
        yield bytes(chunk)
