"""Types of what Python and the extension module pass to each other.

The stub of the extension module names them. They are below everything else, so that the stub needs no other module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from fastpipe._fastpipe import Vocabulary

Value: TypeAlias = "bool | int | float | str | bytes"

# A spec, as it is asked for.
Lowered: TypeAlias = (
    "tuple[str, tuple[int, ...], str, str, Value | None, Value | None, str, bool, str | None, bool, int | None]"
)

# The spec of a feature, as a source has it.
Described: TypeAlias = "tuple[str, str, list[int | None], str, str, int | None]"

# How CSV files are written.
LoweredDialect: TypeAlias = "tuple[int, int | None, int | None, int, bool | list[str], list[bytes], bool, bool]"

# How the values of a feature become numbers.
LoweredLookup: TypeAlias = "tuple[Vocabulary | None, str, int, int, bytes, str | None, str]"

# The features to read: the spec of each, and the lookup of text that is read as indices.
LoweredFeatures: TypeAlias = "dict[str, tuple[Lowered, LoweredLookup | None]]"

# The features to read, or the columns, whose specs are inferred; None for all columns.
Wanted: TypeAlias = "LoweredFeatures | list[str] | None"

# The bytes of a file that is in memory, and from where to where; None for one that isn't.
InMemory: TypeAlias = "tuple[bytes, int, int] | None"

# Paths or names of files, and the directory that has their indexes.
LoweredFiles: TypeAlias = "tuple[list[tuple[str, InMemory]], str | None]"
