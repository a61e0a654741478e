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
