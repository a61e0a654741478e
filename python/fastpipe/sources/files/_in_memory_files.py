"""Files that lie in memory: bytes, other buffers, and what an open file is read for."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from fastpipe._arguments import shown
from fastpipe._boundary import LoweredFiles
from fastpipe._local_path import local
from fastpipe.errors import MissingFileError, StorageError, in_file
from fastpipe.sources.files._index_cache import IndexCache, cache_directory
from fastpipe.sources.files._paths import Paths, Suffixes, expand

# Bytes that are asked of an open file at once: signals are looked at in between.
_CHUNK = 1 << 20


class ReadableFile(Protocol):
    """A binary file object."""

    def read(self, size: int, /) -> bytes: ...


# Buffers have no type of their own before Python 3.12.
Source: TypeAlias = Paths | bytes | bytearray | memoryview | ReadableFile | Iterable[Any]


class Contents(NamedTuple):
    """A file in memory.

    Attributes:
        name: what it is called in errors.
        whole: what its bytes are among. They are immutable, and read where they are.
        start: its first byte.
        stop: the byte behind its last.
    """

    name: str
    whole: bytes
    start: int
    stop: int

    @property
    def place(self) -> tuple[bytes, int, int]:
        """As the extension takes it."""
        return self.whole, self.start, self.stop

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Contents({self.name!r}, {self.stop - self.start} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        # No more than its own bytes.
        return Contents, (self.name, self.whole[self.start : self.stop], 0, self.stop - self.start)


def opened(source: Source, suffixes: Suffixes = (".avro",)) -> list[str | Contents]:
    """Lists the files that a source names, or is.

    Bytes and read-only views of them are taken where they are. Other buffers are copied once, so that a change to them
    afterwards changes nothing. Of a file object everything from its position on is read now.

    Args:
        source: as in `expand`; or a contiguous buffer of bytes, or a binary file object; or a list of any of these.
        suffixes: as in `expand`.

    Raises:
        FastpipeError: as `expand`; a StorageError if a file object fails.
        TypeError: for anything else, such as a file that was opened as text.
    """
    if isinstance(source, str | os.PathLike):
        return [*expand(source, suffixes)]
    contents = _contents(source, 0)
    if contents is not None:
        return [contents]
    try:
        items = iter(cast("Iterable[Any]", source))
    except TypeError:
        raise TypeError(
            "source is a path, a glob, a directory, bytes, a binary file object or a list of these, not "
            f"{type(source).__name__}"
        ) from None
    files: list[str | Contents] = []
    for number, item in enumerate(items):
        contents = _contents(item, number)
        files += expand(item if isinstance(item, str) else _path(item), suffixes) if contents is None else [contents]
    if not files:
        raise MissingFileError("the list of files is empty", reason="the list of files is empty")
    return files


def lowered(files: Iterable[str | Contents], index_cache: IndexCache = None) -> LoweredFiles:
    """Files as the extension module takes them.

    Args:
        files: their paths, or what is in memory.
        index_cache: as in `cache_directory`.
    """
    places = [(str(file), file.place if isinstance(file, Contents) else None) for file in files]
    return places, cache_directory(index_cache)


def one(source: Source) -> str | Contents:
    """The same for what is one file."""
    contents = None if isinstance(source, str | os.PathLike) else _contents(source, 0)
    what = "path is the path of a file, bytes or a binary file object"
    return local(cast("str", source), what) if contents is None else contents


def _path(item: object) -> str | os.PathLike[str]:
    if isinstance(item, os.PathLike):
        return item
    raise TypeError(
        f"source is a path, a glob, a directory, bytes, a binary file object or a list of these, not {shown(item)}"
    )


def _contents(item: Any, number: int) -> Contents | None:
    """What lies in memory; None if it is something else."""
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
        # Pipes have their descriptor for a name.
        name = own if isinstance(own, str) and own else name
        whole = _read(item, name)
        return Contents(name, whole, 0, len(whole))
    if view.format not in ("B", "b", "c"):
        # An array of paths is a list of them.
        return None
    if not view.contiguous:
        raise TypeError(f"source has to be a contiguous buffer: {name} isn't one; copy it with bytes()")
    if type(view.obj) is bytes and view.nbytes:
        start = _address(view) - _address(view.obj)
        return Contents(name, view.obj, start, start + view.nbytes)
    whole = view.tobytes()
    return Contents(name, whole, 0, len(whole))


def _address(buffer: bytes | memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _read(file: ReadableFile, name: str) -> bytes:
    """Everything from a file object's position on."""
    # What it has is handed out without a copy.
    found = io.BytesIO()
    for piece in pieces(file, name):
        found.write(piece)
    return found.getvalue()


def pieces(file: ReadableFile, name: str) -> Generator[bytes]:
    """What a file object has from its position on.

    Raises:
        StorageError: if it fails.
        TypeError: if it isn't one of bytes.
    """
    while True:
        try:
            chunk: object = file.read(_CHUNK)
        except OSError as error:
            raise in_file(StorageError, name, f"the file object can't be read: {error}") from error
        if isinstance(chunk, str):
            raise TypeError(f'the file {name} was opened as text: open it with "rb"')
        if chunk is None:
            reason = "the file object doesn't wait for data, and has none yet: set its descriptor to blocking"
            raise in_file(StorageError, name, reason)
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise TypeError(f"the read method of {name} returns {type(chunk).__name__}, not bytes")
        if not chunk:
            return
        yield bytes(chunk)
