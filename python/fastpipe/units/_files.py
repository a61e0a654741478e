"""Columnar files, on local disks or as byte ranges on a file system of pyarrow or fsspec.

Files of all formats are found, pickled and read in the same way.
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
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._fastpipe import RemoteFile
from fastpipe._files._directory_walk import is_unfinished
from fastpipe._files._in_memory_files import Contents, Source, opened
from fastpipe._files._paths import Suffixes, alternatives, expand_one, none_in_directory, nonempty, with_suffix
from fastpipe._reader.options import Settings
from fastpipe._reader.ordering import digest
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import VERSION
from fastpipe.errors import FastpipeError, MalformedFileError, MissingFileError, StorageError, UnsupportedError, in_file
from fastpipe.specs._requests import FeatureRequest
from fastpipe.units._data import UnitsData, fetches, reader_of, threads_of
from fastpipe.units._schemas import CommonSchema, chosen_columns, with_certain

if TYPE_CHECKING:
    import pyarrow as pa

# Maximum gap in bytes between two ranges that one request reads.
_HOLE = 256 << 10

# Maximum bytes of a request.
_LARGEST = 32 << 20


class Range(NamedTuple):
    """Byte range in a file.

    Attributes:
        start: The offset of the first byte.
        end: The offset after the last byte.
    """

    start: int
    end: int


def coalesced(ranges: Iterable[tuple[int, int]], size: int) -> list[Range]:
    """Merges ranges into requests, in ascending order. Ranges outside of a file of this size are left out."""
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
    """Reads byte ranges with a limited number of concurrent requests.

    Args:
        at_once: The maximum number of concurrent requests in a process.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._process, self._free = os.getpid(), threading.Semaphore(at_once)

    def read(self, source: pa.NativeFile, ranges: Sequence[Range]) -> list[tuple[int, bytes]]:
        """Returns the start and the bytes of each range. Helper threads read too, as long as requests are available."""
        process = os.getpid()
        if self._process != process:
            # The threads of the parent process, which may have acquired requests, don't exist in this process.
            self._process, self._free = process, threading.Semaphore(self.at_once)
        reading = _Reading(source, ranges, self._free)
        helpers = []
        for _ in ranges[1:]:
            if not self._free.acquire(blocking=False):
                break
            thread = threading.Thread(target=reading.run, name="fastpipe-range", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # Memory is exhausted, or the interpreter is shutting down.
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
    """Ranges that several threads read together."""

    def __init__(self, source: pa.NativeFile, ranges: Iterable[Range], free: threading.Semaphore) -> None:
        self._source, self._free = source, free
        self._left = deque(ranges)
        self.found: list[tuple[int, bytes]] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        """Reads until no ranges are left, and then releases the caller's request."""
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
        except IndexError:  # Another thread has taken the last range.
            return None


def ranged(source: pa.NativeFile, size: int, known: Iterable[tuple[int, bytes]]) -> pa.PythonFile:
    """Returns a file with some ranges in memory. Other ranges are read on demand, at least `_HOLE` bytes at once."""
    import pyarrow as pa

    return pa.PythonFile(_Ranged(source, size, known), "r")


class Positioned(io.RawIOBase):
    """A file of a given size with a position."""

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


# The default number of concurrent calls for remote files. Calls for local files mostly decode, and hardly wait.
REMOTE_FETCHES = 8

_MAGIC = set("*?[")
# The names of object stores in pyarrow's error messages.
_STORES = ("AWS Error", "google::cloud::", "Azure")


class File(NamedTuple):
    """A file at the time when it was found.

    Attributes:
        path: The path on its file system.
        size: The size in bytes.
        modified: The modification time in nanoseconds since 1970; None if the file system doesn't report it.
        contents: The bytes of a file in memory, whose `path` is its name in messages; None for other files.
    """

    path: str
    size: int
    modified: int | None
    contents: Contents | None = None


_NO_SYSTEM = "a URL needs its file system: pass filesystem=pyarrow.fs.S3FileSystem(...) or one of fsspec"


class Files:
    """A file system, and how files are found on it.

    Args:
        filesystem: A file system of `pyarrow.fs` or fsspec; None for local disks.
        at_once: The maximum number of concurrent requests of `ranged`.

    Raises:
        ImportError: If pyarrow isn't installed.
        TypeError: If the argument is not a file system.
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
            raise TypeError(f"filesystem must be of pyarrow.fs or fsspec, or None; got {shown(filesystem)}")

    def find(self, source: Source, suffixes: Suffixes) -> list[File]:
        """Returns the files that a source names or contains, with the rules of `fastpipe.read_avro`.

        Raises:
            MissingFileError: If a file does not exist, a glob matches nothing, or a directory contains no such file.
            StorageError: If the file system fails, or a file object can't be read.
            TypeError: If the source has another type.
            UnsupportedError: If the source is a URL and no file system is given.
        """
        try:
            files = opened(source, suffixes, expand_one if self.given is None else self._named)
        except UnsupportedError as error:
            raise in_file(UnsupportedError, error.path or "", _NO_SYSTEM) from None
        return [self.look(file) for file in files]

    def _normal(self, path: str) -> str:
        """Returns a path in the notation that the file system uses when it lists files."""
        import pyarrow.fs

        with storage_errors(path):
            if isinstance(self.given, pyarrow.fs.FileSystem):
                return str(self.system.normalize_path(path))
            return str(self.given._strip_protocol(path))

    def _named(self, item: str | os.PathLike[str], suffixes: Suffixes, empty: list[str]) -> list[str]:
        """Returns the files that a path matches, with braces expanded. Adds empty files to `empty`."""
        import pyarrow.fs

        path = self._normal(os.fsdecode(item))
        braces = alternatives(path)
        with storage_errors(path):
            if len(braces) > 1 and self.system.get_file_info(path).type != pyarrow.fs.FileType.NotFound:
                braces = [path]
        found = [name for brace in braces for name in self._matching(brace, suffixes, empty)]
        return list(dict.fromkeys(found))

    def _matching(self, path: str, suffixes: Suffixes, empty: list[str]) -> list[str]:
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

    def look(self, path: str | Contents | RemoteFile) -> File:
        """Returns a file with its current size and modification time.

        Raises:
            MissingFileError: If the file does not exist.
            StorageError: If the file system fails, or the path isn't a file.
            UnsupportedError: If the file is remote, and not of the file system.
        """
        import pyarrow.fs

        if isinstance(path, RemoteFile):
            raise in_file(UnsupportedError, str(path), _NO_SYSTEM)
        if isinstance(path, Contents):
            return File(path.name, path.stop - path.start, None, path)
        with storage_errors(path):
            info = self.system.get_file_info(path)
        if info.is_file:
            return File(path, info.size, info.mtime_ns)
        missing = info.type == pyarrow.fs.FileType.NotFound
        reason = "there is no such file" if missing else "it is not a file"
        kind = MissingFileError if missing else StorageError
        raise in_file(kind, path, reason)

    def open(self, file: File) -> pa.NativeFile:
        """Opens a file for random access. It isn't mapped, because truncating a mapped file terminates the process."""
        if file.contents is None:
            return self.system.open_input_file(file.path)
        import pyarrow as pa

        return pa.BufferReader(file.contents.view)

    def ranged(
        self,
        source: pa.NativeFile,
        size: int,
        ranges: Iterable[tuple[int, int]],
        known: Iterable[tuple[int, bytes]] = (),
    ) -> pa.NativeFile:
        """Reads ranges of an open file with few requests, and returns a file that holds them.

        A file on a local disk or in memory is returned unchanged.

        Args:
            source: The file.
            size: Its size in bytes.
            ranges: The byte ranges, each as the first offset and the offset after the last byte.
            known: Ranges that were read before, each as its first offset and its bytes.
        """
        import pyarrow as pa

        if self.is_local or isinstance(source, pa.BufferReader):
            return source
        return ranged(source, size, [*known, *self.requests.read(source, coalesced(ranges, size))])

    def check(self, before: File) -> None:
        """Raises an error if a file changed after it was found.

        Raises:
            StorageError: If the file changed.
        """
        now = self.look(before.path if before.contents is None else before.contents)
        if now != before:
            reason = "the file changed after the reader was created: create a new reader"
            raise in_file(StorageError, before.path, reason)

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self.given, self.requests.at_once)


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
    """Converts pyarrow's errors to fastpipe's errors, which name the file and the unit, if there is one."""
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
        # pyarrow raises an OSError without an errno for damage, and also for failures of an object store.
        failed = isinstance(error, OSError) and (error.errno is not None or any(name in str(error) for name in _STORES))
        kind = StorageError if failed else MalformedFileError
        raise kind(f"{error}{at}", reason=str(error), **known) from error


class FileUnits:
    """The base of sources whose units are parts of columnar files (see `Units`).

    The class of a format adds `rows`, `unit_files`, `name`, `fingerprint` and `read`, sets `_common`, and calls
    `_choose` when it knows the schema.

    Args:
        files: The file system.
        found: The files on it.
        columns: The names of the columns to read; None for all.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of the format's files, in order of preference: only files with the first one in a directory are read."""

    schema: pa.Schema
    inferred_schema: pa.Schema
    """The schema without nullability for columns that contain no nulls. Features are inferred from it."""

    rows: list[int]

    unit_files: list[int]
    """The index of each unit's file."""

    _common: CommonSchema

    def __init__(self, files: Files, found: list[File], columns: list[str] | None = None) -> None:
        self._storage, self._found, self._columns = files, found, columns
        self.files = [file.path for file in found]

    def _choose(self, whole: pa.Schema, certain: Container[str]) -> None:
        """Derives the schemas of the columns to read from the files' schema.

        Args:
            whole: The schema of the files.
            certain: The columns that contain no nulls.
        """
        self._certain_columns = certain
        self.schema = whole if self._columns is None else chosen_columns(whole, self._columns)
        self.inferred_schema = with_certain(self.schema, certain)

    def check(self, request: FeatureRequest) -> None:
        """Checks that all requested columns are the same in all files.

        Raises:
            SchemaError: If a column differs.
        """
        wanted = request.columns
        if request.features is not None:
            wanted = [spec.field or name for name, spec in request.features.items()]
        self._common.check(wanted)

    def _how(self) -> dict[str, Any]:
        """Returns the arguments that only the format's class has."""
        return {}

    def select(self, columns: list[str]) -> Self:
        """Returns the same units with only the given columns."""
        chosen = object.__new__(type(self))
        chosen.__dict__ |= self.__dict__
        chosen._columns = columns
        chosen._choose(self.schema, self._certain_columns)
        return chosen

    @functools.cached_property
    def identities(self) -> list[list[Any]]:
        """The name without folders and the size of each file, and the digest of a file in memory.

        The name of a file in memory is often only its type and index.
        """
        found: list[list[Any]] = [[os.path.basename(file.path), file.size] for file in self._found]
        for file, identity in zip(self._found, found, strict=True):
            if file.contents is not None:
                identity.append(digest(file.contents.view))
        return found

    @property
    def sizes(self) -> list[int]:
        """The size of each file in bytes."""
        return [file.size for file in self._found]

    @property
    def stamps(self) -> list[tuple[int, int]]:
        """The size and the modification time of each file. Empty if the time of a file is unknown, as in memory."""
        known = [(file.size, file.modified) for file in self._found if file.modified is not None]
        return known if len(known) == len(self._found) else []

    def subset(self, numbers: Iterable[int]) -> Self:
        """Returns the units of some of the files."""
        return type(self)(self._storage, [self._found[number] for number in numbers], self._columns, **self._how())

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self._storage, self._found, self._columns, self._how())


def _reopened(
    kind: type[FileUnits], files: Files, found: list[File], columns: list[str] | None, how: dict[str, Any]
) -> FileUnits:
    for file in found:
        files.check(file)
    return kind(files, found, columns, **how)


class FilesData(UnitsData):
    """Columnar files that are open for a set of features: the `Data` of `read_parquet` and `read_arrow`."""

    _units: Any

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the counts of files, units, rows and bytes, and a digest."""
        sizes = self._units.sizes
        return {"files": len(sizes), "bytes": sum(sizes)} | super().fingerprint(version)

    def subset(self, numbers: Iterable[int]) -> FilesData:
        """Returns a dataset with the same features and only some of the files."""
        units = self._units.subset(numbers)
        return FilesData(units, FeatureRequest(self._asked), self._num_fetches, in_sequence=self._in_sequence)

    def file_sizes(self) -> list[int]:
        """Returns the size of each file in bytes."""
        sizes: list[int] = self._units.sizes
        return sizes

    def stamps(self) -> list[tuple[int, int]]:
        """Returns the size and the modification time of each file when it was opened. Empty if one isn't on a disk."""
        stamps: list[tuple[int, int]] = self._units.stamps
        return stamps

    def unit_files(self) -> npt.NDArray[np.int64]:
        """Returns the index of each unit's file."""
        # A unit that is read in slices consists of several units here.
        units = (self.handle.row_of(unit, 0)[0] for unit in range(len(self.handle.unit_rows())))
        return np.array([self._units.unit_files[unit] for unit in units], np.int64)


def read_files(
    kind: type[FileUnits],
    settings: Settings,
    source: Source,
    *,
    request: FeatureRequest,
    filesystem: Any,
    num_fetches: int | None,
    **how: Any,
) -> Reader:
    """Returns the reader of files of one format.

    Args:
        kind: The format's class.
        settings: The options of the reader.
        source: The paths or the contents of the files.
        request: The features to read.
        filesystem: The file system of the files; None for local disks.
        num_fetches: The number of units that are read concurrently; None for the default.
        how: The arguments that only the format's class has.
    """
    require_pyarrow()
    files = Files(filesystem)
    at_once = fetches(num_fetches, threads_of(settings) if files.is_local else REMOTE_FETCHES)
    files.requests = Requests(at_once)
    units = kind(files, files.find(source, kind.suffixes), **how)
    units.check(request)
    return reader_of(settings, units, request, at_once, FilesData)
