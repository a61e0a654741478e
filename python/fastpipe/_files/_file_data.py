"""The parts that datasets of files share. The extension module opens the files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import RemoteFile
from fastpipe._files._in_memory_files import File
from fastpipe._files._index_cache import IndexCache, cache_directory
from fastpipe._files._index_entries import IndexEntries
from fastpipe._reader.dataset import BaseDataset
from fastpipe._reader.ordering import digest
from fastpipe._reader.state import VERSION
from fastpipe.specs import Features
from fastpipe.specs import _vocabularies as vocabularies

if TYPE_CHECKING:
    from fastpipe._fastpipe import AvroDataset, CsvDataset, TfRecordDataset


class FileData(BaseDataset):
    """Files that are open for a set of features."""

    handle: AvroDataset | CsvDataset | TfRecordDataset

    def _set_files(self, files: Sequence[File], index_cache: IndexCache) -> None:
        self._given, self._index_cache = list(files), index_cache
        self.files = list(map(str, files))
        self._fingerprints: dict[int, dict[str, Any]] = {}

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the counts of files, rows and bytes, and a digest of the files.

        The digest covers each file's name without folders, its size, and its marker: the sync marker of an Avro file,
        or a digest of the first and last 64 KiB as stored. After version 1 it also covers the offsets and row counts of
        all units.
        """
        if version not in self._fingerprints:
            self._fingerprints[version] = self._fingerprint(version)
        return self._fingerprints[version]

    def _fingerprint(self, version: int) -> dict[str, Any]:
        files, parts = self.handle.files(), []
        for path, size, marker in files:
            name = os.path.basename(path).encode(errors="surrogateescape")
            parts.append(len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little") + marker)
        if version > 1:
            parts.append(self.handle.layout())
        return {
            "files": len(files),
            "rows": self.handle.num_rows,
            "bytes": sum(size for _, size, _ in files),
            "digest": digest(*parts),
        }

    def index_entries(self) -> IndexEntries | None:
        """Returns the entries of the files. None without an index cache, or if a file isn't on a disk."""
        directory, stamps = cache_directory(self._index_cache), self.stamps()
        return IndexEntries(directory, self.files, stamps) if directory is not None and stamps else None

    def storage_counts(self) -> dict[str, Any]:
        """Returns the bytes from the block cache and from the storage, if files are read through a block cache."""
        counts = (file.cache_counts for file in self._given if isinstance(file, RemoteFile))
        found = next(counts, None)
        return {} if found is None else {"block_cache": {"bytes_cached": found[0], "bytes_fetched": found[1]}}

    def file_sizes(self) -> list[int]:
        """Returns the size of each file in bytes."""
        return [size for _, size, _ in self.handle.files()]

    def stamps(self) -> list[tuple[int, int]]:
        """Returns the size and the modification time of each file when it was opened. Empty if one isn't on a disk."""
        return self.handle.stamps if all(isinstance(file, str) for file in self._given) else []

    def unit_files(self) -> npt.NDArray[np.int64]:
        """Returns the index of each unit's file."""
        return np.repeat(np.arange(len(self.files)), self.handle.units_by_file())

    def __str__(self) -> str:
        return self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"


class ChunkedData(FileData):
    """Files that are read in chunks of rows, and whose features can change without opening the files again."""

    handle: CsvDataset | TfRecordDataset
    column_times = None

    def _set_files(self, files: Sequence[File], index_cache: IndexCache) -> None:
        super()._set_files(files, index_cache)
        self.categories: dict[str, list[str]] = {}

    def _set_features(self, features: Features) -> None:
        self._asked = features
        self.features = vocabularies.in_form(features, self.handle.features)

    def narrowed(self, names: Sequence[str]) -> Self:
        """Returns a dataset of the same rows with only some features."""
        return self.with_features(Features({name: spec for name, spec in self._asked.items() if name in names}))

    def with_features(self, features: Features) -> Self:
        """Returns a dataset that reads other features of the same files, without opening them again."""
        data = type(self).__new__(type(self))
        # copy.copy would use __reduce__ and open the files again.
        data.__dict__.update(self.__dict__)
        data.handle = self.handle.with_features(features._lower())
        data._set_features(features)
        return data
