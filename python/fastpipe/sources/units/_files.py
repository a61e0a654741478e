"""Files of finished columns, on local disks or as byte ranges on a file system of pyarrow or fsspec.

Whatever their format, they are chosen, pickled and read alike.
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import functools
import io
import os
import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, SupportsIndex

from fastpipe._arguments import shown
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.options import Settings
from fastpipe._reader.reader import Reader
from fastpipe.errors import FastpipeError, MalformedFileError, MissingFileError, StorageError, UnsupportedError, in_file
from fastpipe.sources.files._directory_walk import is_unfinished
from fastpipe.sources.files._paths import (
    Paths,
    alternatives,
    expand,
    none_in_directory,
    nonempty,
    tell_empty,
    with_suffix,
)
from fastpipe.sources.units._data import fetches, reader_of, threads_of
from fastpipe.sources.units._schemas import chosen_columns, with_certain
from fastpipe.specs import Spec

if TYPE_CHECKING:
    import pyarrow as pa

# Bytes between two ranges that one request reads, too.
_HOLE = 256 << 10

# Bytes of a request, at most.
_LARGEST = 32 << 20


class Range(NamedTuple):
    """Bytes of a file.

    Attributes:
        start: the first.
        end: the one after the last.
    """

    start: int
    end: int


def coalesced(ranges: Iterable[tuple[int, int]], size: int) -> list[Range]:
    """The requests by which ranges are read: ascending, without those that aren't within a file of this size."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if not 0 <= start < end <= size:
            continue
        if found and start - found[-1].end <= _HOLE and end - found[-1].start <= _LARGEST:
            found[-1] = Range(found[-1].start, max(end, found[-1].end))
        else:
            found.append(Range(start, end))
    return found


class Requests:
    """Reads byte ranges, a limited number at once.

    Args:
        at_once: requests at once, in a process.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._process, self._free = os.getpid(), threading.Semaphore(at_once)

    def read(self, source: pa.NativeFile, ranges: Sequence[Range]) -> list[tuple[int, bytes]]:
        """Returns the ranges' first places and bytes. Other threads help the calling thread while requests are free."""
        process = os.getpid()
        if self._process != process:
            # The threads of the parent, which have taken some, aren't there.
            self._process, self._free = process, threading.Semaphore(self.at_once)
        reading = _Reading(source, ranges, self._free)
        helpers = []
        for _ in ranges[1:]:
            if not self._free.acquire(blocking=False):
                break
            thread = threading.Thread(target=reading.run, name="fastpipe-range", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # There is no memory for it, or the interpreter is ending.
                self._free.release()
                break
            helpers.append(thread)
        self._free.acquire()
        reading.run()
        for thread in helpers:
            thread.join()
        if reading.errors:
            raise reading.errors[0]
        return sorted(reading.found)


class _Reading:
    """Ranges that some threads read."""

    def __init__(self, source: pa.NativeFile, ranges: Iterable[Range], free: threading.Semaphore) -> None:
        self._source, self._free = source, free
        self._left = deque(ranges)
        self.found: list[tuple[int, bytes]] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        """Reads as long as any are left, and gives the request back that was taken for it."""
        try:
            while not self.errors and (wanted := self._next()) is not None:
                start, end = wanted
                self.found.append((start, self._source.read_at(end - start, start)))
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._free.release()

    def _next(self) -> Range | None:
        try:
            return self._left.popleft()
        except IndexError:  # Another thread has taken the last one.
            return None


def ranged(source: pa.NativeFile, size: int, known: Iterable[tuple[int, bytes]]) -> pa.PythonFile:
    """A file with some ranges in memory. Others are read on demand, at least `_HOLE` bytes at once."""
    import pyarrow as pa

    return pa.PythonFile(_Ranged(source, size, known), "r")


class Positioned(io.RawIOBase):
    """A file of some size that has a position."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class _Ranged(Positioned):
    def __init__(self, source: pa.NativeFile, size: int, known: Iterable[tuple[int, bytes]]) -> None:
        super().__init__(size)
        self._source, self._known = source, sorted(known)

    def read(self, size: int = -1) -> memoryview:
        end = self._size if size < 0 else min(self._at + size, self._size)
        start, self._at = self._at, max(self._at, end)
        i = bisect.bisect_right(self._known, start, key=lambda known: known[0]) - 1
        if i < 0 or end > self._known[i][0] + len(self._known[i][1]):
            i += 1
            ahead = min(max(end, start + _HOLE), self._size)
            self._known.insert(i, (start, self._source.read_at(ahead - start, start)))
        first, data = self._known[i]
        return memoryview(data)[start - first : end - first]


# Calls at once where files are far away. On a local disk they decode, and do no waiting.
REMOTE_FETCHES = 8

_MAGIC = set("*?[")
# How pyarrow names object stores in their errors.
_STORES = ("AWS Error", "google::cloud::", "Azure")


class File(NamedTuple):
    """A file as it was found.

    Attributes:
        path: on its file system.
        size: in bytes.
        modified: when, in nanoseconds since 1970; None where the file system doesn't say.
    """

    path: str
    size: int
    modified: int | None


class Files:
    """A file system, and how files on it are found.

    Args:
        filesystem: of `pyarrow.fs` or fsspec; None for local disks.
        at_once: requests at once of `ranged`.

    Raises:
        ImportError: if pyarrow isn't installed.
        TypeError: if it is no file system.
    """

    def __init__(self, filesystem: Any, at_once: int = REMOTE_FETCHES) -> None:
        require_pyarrow()
        import pyarrow.fs

        self.given = filesystem
        self.requests = Requests(at_once)
        self.is_local = filesystem is None or isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        if filesystem is None:
            self.system: Any = pyarrow.fs.LocalFileSystem()
        elif isinstance(filesystem, pyarrow.fs.FileSystem):
            self.system = filesystem
        elif hasattr(filesystem, "open") and hasattr(filesystem, "protocol"):
            self.system = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem))
        else:
            raise TypeError(f"filesystem is one of pyarrow.fs or fsspec, or None, not {shown(filesystem)}")

    def find(self, source: Paths, suffixes: tuple[str, ...]) -> list[File]:
        """The files that a source names, as `fastpipe.read_avro` takes sources.

        Raises:
            MissingFileError: if a file isn't there, a glob matches nothing, or a directory holds none.
            StorageError: if the file system fails.
            TypeError: for anything else than paths.
            UnsupportedError: for a URL: its file system must be given.
        """
        if self.given is None:
            try:
                paths = expand(source, suffixes)
            except UnsupportedError as error:
                reason = "a URL needs its file system: give filesystem=pyarrow.fs.S3FileSystem(...) or one of fsspec"
                raise in_file(UnsupportedError, error.path or "", reason) from None
        else:
            empty: list[str] = []
            paths = [path for item in _items(source) for path in self._named(self._normal(item), suffixes, empty)]
            tell_empty(paths, empty)
        if not paths:
            raise MissingFileError("the list of files is empty", reason="the list of files is empty")
        return [self.look(path) for path in paths]

    def _normal(self, path: str) -> str:
        """A path as the file system itself writes it when it lists files."""
        import pyarrow.fs

        with storage_errors(path):
            if isinstance(self.given, pyarrow.fs.FileSystem):
                return str(self.system.normalize_path(path))
            return str(self.given._strip_protocol(path))

    def _named(self, path: str, suffixes: tuple[str, ...], empty: list[str]) -> list[str]:
        """The files that a path stands for, with braces expanded; those of zero bytes are put into `empty`."""
        import pyarrow.fs

        braces = alternatives(path)
        with storage_errors(path):
            if len(braces) > 1 and self.system.get_file_info(path).type != pyarrow.fs.FileType.NotFound:
                braces = [path]
        found = [name for brace in braces for name in self._matching(brace, suffixes, empty)]
        return list(dict.fromkeys(found))

    def _matching(self, path: str, suffixes: tuple[str, ...], empty: list[str]) -> list[str]:
        import pyarrow.fs

        sizes: dict[str, int] = {}

        def below(folder: str) -> list[str]:
            selector = pyarrow.fs.FileSelector(folder, recursive=True, allow_not_found=True)
            found = self.system.get_file_info(selector)
            for info in found:
                if info.is_file and not _is_hidden(info.path, folder, path):
                    sizes[info.path] = info.size
            return sorted(sizes)

        with storage_errors(path):
            if _MAGIC.isdisjoint(path):
                if self.system.get_file_info(path).type != pyarrow.fs.FileType.Directory:
                    return [path]
                below(path)
                found = with_suffix(sorted(sizes), suffixes)
            else:
                parts = path.split("/")
                fixed = next(i for i, part in enumerate(parts) if not _MAGIC.isdisjoint(part))
                found = [name for name in below("/".join(parts[:fixed])) if _matches(name.split("/"), parts)]
        is_folder = _MAGIC.isdisjoint(path)
        nonempty(found, path, none_in_directory(suffixes, path, sizes) if is_folder else "no file matches the pattern")
        empty += (name for name in found if sizes[name] == 0)
        return [name for name in found if sizes[name] != 0]

    def look(self, path: str) -> File:
        """What a file looks like now.

        Raises:
            MissingFileError: if there is none.
            StorageError: if the file system fails, or it is no file.
        """
        import pyarrow.fs

        with storage_errors(path):
            info = self.system.get_file_info(path)
        if info.is_file:
            return File(path, info.size, info.mtime_ns)
        missing = info.type == pyarrow.fs.FileType.NotFound
        reason = "there is no such file" if missing else "it is no file"
        kind = MissingFileError if missing else StorageError
        raise in_file(kind, path, reason)

    def open(self, path: str) -> pa.NativeFile:
        """Opens a file for reading at random. It isn't mapped: a mapped file that is cut short ends the process."""
        return self.system.open_input_file(path)

    def ranged(
        self,
        source: pa.NativeFile,
        size: int,
        ranges: Iterable[tuple[int, int]],
        known: Iterable[tuple[int, bytes]] = (),
    ) -> pa.NativeFile:
        """Reads some ranges of an open file by few requests, and returns the file with them. Local files are unchanged.

        Args:
            source: the file.
            size: in bytes.
            ranges: of each the first byte, and the one after the last.
            known: where ranges begin that were read before, and their bytes.
        """
        if self.is_local:
            return source
        return ranged(source, size, [*known, *self.requests.read(source, coalesced(ranges, size))])

    def check(self, before: File) -> None:
        """Refuses a file that was changed since it was found.

        Raises:
            StorageError: if it was.
        """
        now = self.look(before.path)
        if now != before:
            reason = "the file changed since the reader was made: start again with a new reader"
            raise in_file(StorageError, before.path, reason)

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self.given, self.requests.at_once)


def _items(source: Any) -> list[str]:
    """The paths of a source, as text.

    Raises:
        TypeError: if it is anything else.
    """
    one = isinstance(source, (str, os.PathLike))
    try:
        items = [source] if one or isinstance(source, bytes) else list(source)
    except TypeError:
        items = [source]
    for item in items:
        if not isinstance(item, (str, os.PathLike)):
            raise TypeError(f"source is a path, a glob, a directory or a list of these, not {shown(item)}")
    return [os.fsdecode(item) for item in items]


def _is_hidden(path: str, folder: str, pattern: str) -> bool:
    parts = path.removeprefix(folder).split("/")
    return any(part.startswith(("_", ".")) for part in parts) or is_unfinished(parts[-1], pattern)


def _matches(path: list[str], pattern: list[str]) -> bool:
    @functools.cache
    def matches(i: int, j: int) -> bool:
        if j == len(pattern):
            return i == len(path)
        if pattern[j] == "**":
            return matches(i, j + 1) or (i < len(path) and matches(i + 1, j))
        return i < len(path) and fnmatch.fnmatchcase(path[i], pattern[j]) and matches(i + 1, j + 1)

    return matches(0, 0)


@contextlib.contextmanager
def storage_errors(path: str, unit: str | None = None) -> Iterator[None]:
    """Turns what pyarrow raises into fastpipe's errors, which name the file, and the unit if there is one."""
    import pyarrow

    at = f" (file {path})" if unit is None else f" ({unit})"
    known: dict[str, Any] = {"path": path, "unit": unit}
    try:
        yield
    except (FastpipeError, pyarrow.ArrowMemoryError):
        raise
    except FileNotFoundError as error:
        raise MissingFileError(f"{error}{at}", reason=str(error), **known) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # pyarrow raises an OSError without a number both for damage and where an object store fails.
        failed = isinstance(error, OSError) and (error.errno is not None or any(name in str(error) for name in _STORES))
        kind = StorageError if failed else MalformedFileError
        raise kind(f"{error}{at}", reason=str(error), **known) from error


class FileUnits:
    """Units that lie in files of finished columns, as a source (see `Units`).

    A format's class adds `rows`, `name`, `fingerprint` and `read`, and calls `_choose` when it knows the schema.

    Args:
        files: the file system.
        found: the files on it.
        columns: the columns that are read; None for all.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """Endings of the format's files: a directory's files are those with the first ending that any of them has."""

    schema: pa.Schema
    inferred_schema: pa.Schema
    """The schema with no nulls where data have none: features follow from it by default."""

    rows: list[int]

    def __init__(self, files: Files, found: list[File], columns: list[str] | None = None) -> None:
        self._storage, self._found, self._columns = files, found, columns
        self.files = [file.path for file in found]

    def _choose(self, whole: pa.Schema, certain: Container[str]) -> None:
        """Makes the schemas of the columns that are read, out of that of the files.

        Args:
            whole: the schema of the files.
            certain: columns in which there are no nulls.
        """
        self._certain_columns = certain
        self.schema = whole if self._columns is None else chosen_columns(whole, self._columns)
        self.inferred_schema = with_certain(self.schema, certain)

    def _how(self) -> dict[str, Any]:
        """Arguments of the format's class besides those of every format."""
        return {}

    def select(self, columns: list[str]) -> Self:
        """The same units, of which only these columns are read."""
        chosen = object.__new__(type(self))
        chosen.__dict__ |= self.__dict__
        chosen._columns = columns
        chosen._choose(self.schema, self._certain_columns)
        return chosen

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self._storage, self._found, self._columns, self._how())


def _reopened(
    kind: type[FileUnits], files: Files, found: list[File], columns: list[str] | None, how: dict[str, Any]
) -> FileUnits:
    for file in found:
        files.check(file)
    return kind(files, found, columns, **how)


def read_files(
    kind: type[FileUnits],
    settings: Settings,
    source: Paths,
    *,
    features: Mapping[str, Spec] | None,
    columns: Sequence[str] | None,
    filesystem: Any,
    num_fetches: SupportsIndex | None,
    **how: Any,
) -> Reader:
    """The reader of files of one format.

    Args:
        kind: the format's class.
        settings: the options.
        source: names the files.
        features: dict from name to spec; None for what the files say.
        columns: only these; None for all.
        filesystem: where the files are; None for local disks.
        num_fetches: units that are read at once; None for the default.
        how: arguments of the format's class besides those of every format.
    """
    require_pyarrow()
    files = Files(filesystem)
    at_once = fetches(num_fetches, threads_of(settings) if files.is_local else REMOTE_FETCHES)
    files.requests = Requests(at_once)
    return reader_of(settings, kind(files, files.find(source, kind.suffixes), **how), features, columns, at_once)
