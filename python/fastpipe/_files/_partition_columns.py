"""Partition columns: values in the names of folders, as Hive, Spark and Flink write them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from fastpipe._reader.ordering import digest
from fastpipe.errors import SchemaError, in_file

Partitioning: TypeAlias = Literal["hive"] | None

# The name that Hive uses for null.
_NULL = "__HIVE_DEFAULT_PARTITION__"


def checked_partitioning(partitioning: Any) -> bool:
    """Returns whether the argument `partitioning` requests partition columns.

    Raises:
        ValueError: If the argument is neither `"hive"` nor None.
    """
    if partitioning is not None and partitioning != "hive":
        raise ValueError(f"partitioning must be 'hive' or None; got {partitioning!r}")
    return partitioning is not None


def partition_of(path: str) -> dict[str, str | None]:
    """Returns the partition columns and values in a path, in Hive's format: `year=2026/month=11`."""
    found: dict[str, str | None] = {}
    for part in path.replace("\\", "/").split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals and key:
            found[urllib.parse.unquote(key)] = None if value == _NULL else urllib.parse.unquote(value)
    return found


class Partitions:
    """Partition columns and their values, from the folders of files.

    Args:
        paths: The paths of the files.
        stored: The names of columns that the files contain. These take precedence over folders and are left out.
        wanted: The names to consider; None for all.

    Attributes:
        found: For each file, its values as text, by name.
        integers: For each name, whether all values are 64-bit integers.

    Raises:
        SchemaError: If only some of the files are in folders of a name.
    """

    def __init__(self, paths: Sequence[str], stored: Iterable[str] = (), wanted: Iterable[str] | None = None) -> None:
        found = [partition_of(path) for path in paths]
        left_out, among = set(stored), None if wanted is None else set(wanted)
        names = dict.fromkeys(name for of in found for name in of if among is None or name in among)
        names = {name: None for name in names if name not in left_out}
        self.integers: dict[str, bool] = {}
        for name in names:
            if any(name not in of for of in found):
                path = next(path for path, of in zip(paths, found, strict=True) if name not in of)
                reason = f"other files are in folders {name}=..., but this file isn't: partitioning=None ignores them"
                raise in_file(SchemaError, path, reason, feature=name)
            values = [of[name] for of in found if of[name] is not None]
            self.integers[name] = bool(values) and all(map(_is_int64, values))
        self.found = [{name: of[name] for name in names} for of in found]

    def columns(self, paths: Sequence[str]) -> list[tuple[str, list[int | str | None]]]:
        """Returns the typed values of all files, by name.

        Raises:
            SchemaError: If text isn't Unicode.
        """
        return [(name, self._values(name, paths)) for name in self.integers]

    def _values(self, name: str, paths: Sequence[str]) -> list[int | str | None]:
        values: list[int | str | None] = []
        for path, of in zip(paths, self.found, strict=True):
            text = of[name]
            if text is not None and any("\ud800" <= letter <= "\udfff" for letter in name + text):
                reason = (
                    "the name of a folder isn't UTF-8, so its value can't be read as text: partitioning=None ignores it"
                )
                raise in_file(SchemaError, path, reason)
            values.append(int(text) if text is not None and self.integers[name] else text)
        return values


def digests(columns: Iterable[tuple[str, list[int | str | None]]]) -> dict[str, str]:
    """Returns a digest of the values of each column, in the order of files."""
    return {
        name: digest(repr([None if value is None else str(value) for value in values]).encode())[:16]
        for name, values in columns
    }


def _is_int64(text: str | None) -> bool:
    try:
        return text is not None and str(int(text)) == text and -(2**63) <= int(text) < 2**63
    except ValueError:
        return False
