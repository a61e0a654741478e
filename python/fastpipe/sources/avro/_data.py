"""Avro files as a data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

from fastpipe._arguments import names
from fastpipe._fastpipe import AvroDataset
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.ordering import digest
from fastpipe._reader.state import VERSION
from fastpipe.sources.avro._schemas import AS_WRITTEN, Resolution
from fastpipe.sources.files._in_memory_files import Contents
from fastpipe.sources.files._index_cache import IndexCache, cache_directory
from fastpipe.sources.files._partition_columns import Partitions, digests
from fastpipe.specs import Features, inferred
from fastpipe.specs import _vocabularies as vocabularies

__all__ = ["AvroData", "Location"]

_WORDS = SourceWording(
    units="blocks",
    advice={
        "reading": "Storage is the limit: faster disks, or a codec such as zstandard, make it faster; more threads "
        "don't, unless it is far away.",
        "decompressing": "Files written with snappy or zstandard take less than with deflate; so do more threads.",
        "indexing": "Records are looked for before they can be picked. Later epochs remember where they start, up to "
        "16 million records.",
    },
    bound={"decompressing": "decompression-bound"},
    other_digest="the data set has other contents (files: sync markers or blocks), or its files other names or another "
    "order",
)


_Folders: TypeAlias = "list[tuple[str, list[int | str | None]]]"


class Location(NamedTuple):
    """Where a row stands.

    Attributes:
        file: the path of its file.
        block: the number of its block within the file.
        record: its number within the block.
    """

    file: str
    block: int
    record: int


def _split(files: Sequence[str | Contents]) -> tuple[list[str], list[tuple[bytes, int, int] | None]]:
    """The paths or names of files, and where those in memory lie; an empty list if none does."""
    places = [file.place if isinstance(file, Contents) else None for file in files]
    return list(map(str, files)), places if any(places) else []


class AvroData:
    """Avro files, opened for a set of features: the `Data` of `read_avro`.

    Args:
        files: their paths, or what lies in memory.
        features: as in `read_avro`.
        index_cache: as in `read_avro`.
        check: is called with the path and the schema, as JSON, of the first file, and of each whose schema is another
            one, before features are held to it. What it raises is raised.
        damaged: is filled with the exceptions of damaged files, of which then the blocks in front of the damage are
            read. They are raised by default.
        resolution: how files' schemas are understood.
        hive: whether folders such as `year=2026` are columns.
    """

    words = _WORDS

    def __init__(
        self,
        files: Sequence[str | Contents],
        features: Features,
        index_cache: IndexCache = None,
        check: Callable[[str, str], None] | None = None,
        damaged: list[Exception] | None = None,
        resolution: Resolution = AS_WRITTEN,
        *,
        hive: bool = False,
    ) -> None:
        lowered = [(name, spec._lower()) for name, spec in features.items()]
        paths, contents = _split(files)
        cache, lookups = cache_directory(index_cache), vocabularies.lowered(features)
        folders = _folders(paths, hive, [spec.field or name for name, spec in features.items()])
        handle = AvroDataset(
            paths, lowered, None, cache, check, damaged, *resolution.lowered(), lookups, contents, folders
        )
        self._open(files, handle, index_cache, resolution, folders)
        self.features = vocabularies.in_form(features, handle.features()) if lookups else features
        self._asked = features

    @classmethod
    def inferring(
        cls,
        files: Sequence[str | Contents],
        columns: Sequence[str] | None,
        index_cache: IndexCache,
        resolution: Resolution = AS_WRITTEN,
        *,
        hive: bool = False,
    ) -> Self:
        """Opens files for what is found in them, or for those columns of it.

        Args:
            files: their paths, or what lies in memory.
            columns: as in `read_avro`.
            index_cache: as in `read_avro`.
            resolution: how files' schemas are understood.
            hive: whether folders such as `year=2026` are columns.
        """
        wanted = None if columns is None else names("columns", columns)
        data = cls.__new__(cls)
        paths, contents = _split(files)
        cache, folders = cache_directory(index_cache), _folders(paths, hive, wanted)
        handle = AvroDataset(paths, None, wanted, cache, None, None, *resolution.lowered(), None, contents, folders)
        data._open(files, handle, index_cache, resolution, folders)
        data.features = data._asked = inferred(handle.features())
        return data

    def _open(
        self,
        files: Sequence[str | Contents],
        handle: AvroDataset,
        index_cache: IndexCache,
        resolution: Resolution,
        folders: _Folders,
    ) -> None:
        self._given = list(files)
        self.files = list(map(str, files))
        self.handle = handle
        self._index_cache = index_cache
        self._resolution = resolution
        # Columns that are read of folders.
        read = set(handle.folders())
        self._partitions = [(name, values) for name, values in folders if name in read]
        self._fingerprints: dict[int, dict[str, Any]] = {}

    @property
    def symbols(self) -> dict[str, list[str]]:
        """For each enum that is read as codes its symbols, for each union the names of its types."""
        return dict(self.handle.symbols())

    @property
    def interpretation(self) -> dict[str, Any]:
        """Lookups, and how schemas are understood."""
        return {"lookups": vocabularies.described(self._asked), "resolution": self._resolution.described()}

    @property
    def left_out(self) -> dict[str, str]:
        """For each column that is of a type which isn't read: why."""
        return dict(self.handle.left_out())

    @property
    def later_columns(self) -> tuple[list[tuple[str, str, int]], bool]:
        """Columns that the first file with rows lacks, each with the first file that has it and how many have it.

        And whether the files' schemas can be merged.
        """
        return self.handle.later_columns()

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """How many files, rows and bytes; and a digest of the files.

        Of each it has the name without folders, the size, the sync marker, and, but for version 1, where its blocks lie
        and how many rows these have. For each column of folders that is read, `partitions` has a digest of its values.
        """
        if version not in self._fingerprints:
            self._fingerprints[version] = self._fingerprint(version)
        return self._fingerprints[version]

    def _fingerprint(self, version: int) -> dict[str, Any]:
        parts = []
        files = self.handle.files()
        for path, size, marker in files:
            name = os.path.basename(path).encode(errors="surrogateescape")
            parts.append(len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little") + bytes(marker))
        if version > 1:
            parts.append(self.handle.layout())
        told: dict[str, Any] = {
            "files": len(files),
            "rows": self.handle.num_rows,
            "bytes": sum(size for _, size, _ in files),
            "digest": digest(*parts),
        }
        return told | ({"partitions": digests(self._partitions)} if self._partitions else {})

    def subset(self, numbers: Iterable[int]) -> AvroData:
        """The same features of some of the files."""
        files = [self._given[number] for number in numbers]
        return _reopened(files, self._asked, self._index_cache, self._resolution, bool(self._partitions))

    def file_sizes(self) -> list[int]:
        """Bytes of each file."""
        return [size for _, size, _ in self.handle.files()]

    def place(self, unit: int, record: int) -> Location:
        """The file, the block and the record."""
        return Location(*self.handle.place_of(unit), record)

    def column_times(self) -> tuple[float, list[tuple[str, float]]]:
        """Nanoseconds that a record takes to decode, with all columns and without each."""
        return self.handle.column_times()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (
            self._given,
            self._asked,
            self._index_cache,
            self._resolution,
            bool(self._partitions),
        )

    def __str__(self) -> str:
        return self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"


def _folders(files: list[str], hive: bool, wanted: list[str] | None) -> _Folders:
    """What the folders of files say in the columns that are wanted."""
    return Partitions(files, wanted=wanted).columns(files) if hive else []


def _reopened(
    files: Sequence[str | Contents], features: Features, index_cache: IndexCache, resolution: Resolution, hive: bool
) -> AvroData:
    return AvroData(files, features, index_cache, resolution=resolution, hive=hive)
