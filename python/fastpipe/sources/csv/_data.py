"""CSV files as a data set."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, Self

from fastpipe._fastpipe import CsvDataset
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.ordering import digest
from fastpipe._reader.state import VERSION
from fastpipe.sources.csv._dialect import Dialect
from fastpipe.sources.files._in_memory_files import Contents
from fastpipe.sources.files._index_cache import IndexCache, cache_directory
from fastpipe.specs import Features, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies

__all__ = ["SUFFIXES", "CsvData", "CsvLocation"]

# Of the files that are taken from a directory: compressed ones beside others.
SUFFIXES = ((".csv", ".csv.gz", ".csv.zst"), (".tsv", ".tsv.gz", ".tsv.zst"))

_WORDS = SourceWording(
    units="stretches",
    advice={
        "reading": "Storage is the limit: faster disks make it faster; more threads don't, unless it is far away.",
        "parsing": "Fewer columns take less, and so do numbers with fewer digits; more threads help; Parquet, Arrow "
        "and Avro files need no parsing.",
        "fetching": "Decompressing is the limit: files in one piece are decompressed on one thread, one after the "
        "other; zstandard is faster than gzip.",
        "indexing": "Rows are looked for before they can be picked. Later epochs remember where they start, up to 16 "
        "million rows.",
    },
    other_digest="the data set has other contents, or its files other names or another order",
)


class CsvLocation(NamedTuple):
    """Where a row stands.

    Attributes:
        file: the path of its file.
        row: its number in the file, from 0; headers, comments and empty lines aren't counted.
    """

    file: str
    row: int


class CsvData:
    """CSV files, opened for a set of features: the `Data` of `read_csv`.

    Args:
        files: their paths, or what lies in memory.
        dialect: how they are written.
        features: as in `read_csv`.
        columns: as in `read_csv`.
        index_cache: as in `read_csv`.
    """

    words = _WORDS

    def __init__(
        self,
        files: Sequence[str | Contents],
        dialect: Dialect,
        features: Features | None,
        columns: Sequence[str] | None = None,
        index_cache: IndexCache = None,
    ) -> None:
        places = [file.place if isinstance(file, Contents) else None for file in files]
        lowered = None if features is None else [(name, spec._lower()) for name, spec in features.items()]
        lookups = None if features is None else vocabularies.lowered(features)
        wanted = None if columns is None else list(columns)
        cache, contents = cache_directory(index_cache), places if any(places) else []
        paths = list(map(str, files))
        self.handle = CsvDataset(paths, dialect.lowered(), lowered, wanted, cache, contents, lookups)
        self._given, self._dialect, self._index_cache = list(files), dialect, index_cache
        self.files = paths
        self._asked = _inferred(self.handle) if features is None else features
        self.features = vocabularies.in_form(self._asked, self.handle.features()) if lookups else self._asked
        self.symbols: dict[str, list[str]] = {}
        self._fingerprint: dict[str, Any] | None = None

    @classmethod
    def of_rows(cls, handle: CsvDataset, dialect: Dialect, features: Features | None) -> CsvData:
        """Rows that were picked out of files, which a sample is read of: no state is made of it, and no process has it.

        Args:
            handle: the rows.
            dialect: how they are written.
            features: as in `read_csv`; None if they are inferred.
        """
        data = cls.__new__(cls)
        data.handle = handle if features is not None else handle.inferred()
        data._given, data._dialect, data._index_cache = [], dialect, None
        data.files = [path for path, _, _ in handle.files()]
        data.symbols, data._fingerprint = {}, None
        if features is not None:
            return data.with_features(features)
        data._asked = data.features = _inferred(data.handle)
        return data

    def with_features(self, features: Features) -> Self:
        """The same files, read for other features: nothing is opened."""
        data = type(self).__new__(type(self))
        # Copies are made as pickles are read, by opening files again.
        data.__dict__.update(self.__dict__)
        lowered, lookups = [(name, spec._lower()) for name, spec in features.items()], vocabularies.lowered(features)
        data.handle = self.handle.with_features(lowered, lookups)
        data._asked = features
        data.features = vocabularies.in_form(features, data.handle.features()) if lookups else features
        return data

    @property
    def text_bytes(self) -> int:
        """Bytes of all rows, decompressed."""
        return self.handle.text_bytes()

    @property
    def interpretation(self) -> dict[str, Any]:
        """Lookups, and the dialect."""
        return {"lookups": vocabularies.described(self._asked), "dialect": asdict(self._dialect)}

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """How many files, rows and bytes; and a digest of the files.

        Of each it has the name without folders, the size, 64 KiB at either end, as they are stored, and where its rows
        lie.
        """
        if self._fingerprint is None:
            parts = []
            files = self.handle.files()
            for path, size, ends in files:
                name = os.path.basename(path).encode(errors="surrogateescape")
                parts.append(
                    len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little") + ends.to_bytes(8, "little")
                )
            parts.append(self.handle.layout())
            self._fingerprint = {
                "files": len(files),
                "rows": self.handle.num_rows,
                "bytes": sum(size for _, size, _ in files),
                "digest": digest(*parts),
            }
        return self._fingerprint

    def place(self, unit: int, record: int) -> CsvLocation:
        """The file, and the number of the row."""
        return CsvLocation(*self.handle.place_of(unit, record))

    def column_times(self) -> tuple[float, list[tuple[str, float]]]:
        """Nothing: it isn't measured."""
        return 0.0, []

    def __reduce__(self) -> tuple[Any, ...]:
        return CsvData, (self._given, self._dialect, self._asked, None, self._index_cache)

    def __str__(self) -> str:
        return self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"


def _inferred(handle: CsvDataset) -> Features:
    """Specs of what was found: floats have NaN where a field stands for no value."""
    found = inferred(handle.features())
    # Columns of a type share one spec.
    distinct = {id(spec): spec for spec in found.values()}
    made = {key: _with_nan(spec) for key, spec in distinct.items()}
    return Features({name: made[id(spec)] for name, spec in found.items()})


def _with_nan(spec: Spec) -> Spec:
    return replace(spec, fill=math.nan) if spec.nulls == "fill" and spec.dtype == "float64" else spec
