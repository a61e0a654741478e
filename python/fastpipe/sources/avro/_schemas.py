"""How the schemas of files are understood: what they resolve to, and what is left out of them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fastpipe._arguments import flag, shown
from fastpipe._reader.dropped_rows import stacklevel
from fastpipe.errors import ColumnsLeftOutWarning, StorageError, UnsupportedError

__all__ = ["AS_WRITTEN", "ReaderSchema", "Resolution", "Unsupported", "tell_later", "tell_left_out"]

ReaderSchema: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any] | None
Unsupported: TypeAlias = Literal["warn", "error", "ignore"]

# Of columns that are left out, as many are named.
_SHOWN = 20


@dataclass(frozen=True)
class Resolution:
    """How files' schemas are understood.

    Attributes:
        schema: the JSON of the reader's schema; None to take files' schemas as they are.
        merged: whether the reader's schema is made of the schemas of all files.
        logical_types: whether values are what logical types say that they stand for.
    """

    schema: str | None = None
    merged: bool = False
    logical_types: bool = True

    @classmethod
    def of(cls, reader_schema: ReaderSchema, logical_types: bool) -> Resolution:
        """From the arguments of `read_avro`.

        Raises:
            TypeError: if one is of the wrong type.
            StorageError: if a schema's file can't be read.
        """
        logical_types = flag("logical_types", logical_types)
        if reader_schema is None:
            return cls(None, False, logical_types)
        if isinstance(reader_schema, str) and reader_schema == "union":
            return cls(None, True, logical_types)
        return cls(_json(reader_schema), False, logical_types)

    def described(self) -> list[Any]:
        """The same for two resolutions that read the same values, fit for JSON."""
        schema: Any = self.schema
        if schema is not None:
            # How the JSON is laid out decides nothing. What isn't JSON is the name of a type.
            with suppress(ValueError, RecursionError):
                schema = json.loads(schema)
        return [schema, self.merged, self.logical_types]

    def lowered(self) -> tuple[str | None, bool, bool]:
        """As the extension module takes it."""
        return self.schema, self.merged, self.logical_types


AS_WRITTEN = Resolution()
"""Files' schemas as they are."""


def _json(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    if isinstance(schema, os.PathLike):
        path = os.fspath(schema)
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            reason = f"the reader's schema can't be read: {error}"
            raise StorageError(f"{reason} (file {path})", path=path, reason=reason) from None
    if isinstance(schema, (Mapping, list, tuple)):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"reader_schema is a schema as JSON, and this can't be written as JSON: {error}") from None
    raise TypeError(
        f'reader_schema is a schema (JSON text, a dict or a list), the path of a file that has one, or "union", not '
        f"{shown(schema)}"
    )


def tell_left_out(left_out: Mapping[str, str], unsupported: str) -> None:
    """Warns of columns that are left out, or raises an error.

    Raises:
        UnsupportedError: if `unsupported` is "error" and there are such.
        ValueError: if it is something else.
    """
    if unsupported not in ("warn", "error", "ignore"):
        raise ValueError(f'unsupported is "warn", "error" or "ignore", not {shown(unsupported)}')
    if not left_out or unsupported == "ignore":
        return
    named = [f"{name!r} ({reason})" for name, reason in list(left_out.items())[:_SHOWN]]
    more = f"; and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
    what = "1 column is" if len(left_out) == 1 else f"{len(left_out)} columns are"
    text = f"{what} left out, of types that are not read: {'; '.join(named)}{more}"
    if unsupported == "error":
        hint = 'unsupported="warn" reads the others'
        raise UnsupportedError(f"{text}. {hint}", reason=text)
    warnings.warn(text, ColumnsLeftOutWarning, stacklevel())


def tell_later(later: Sequence[tuple[str, str, int]], mergeable: bool) -> None:
    """Warns of columns that the first file lacks.

    Args:
        later: for each its name, the first file that has it, and how many files have it.
        mergeable: whether `reader_schema="union"` reads the files.
    """
    if not later:
        return
    named = [
        f"{name!r} (file {path}{f' and {files - 1} more' if files > 1 else ''})" for name, path, files in later[:_SHOWN]
    ]
    more = f"; and {len(later) - _SHOWN} more" if len(later) > _SHOWN else ""
    what = "1 column is" if len(later) == 1 else f"{len(later)} columns are"
    hint = 'reader_schema="union" reads them, with null in files that lack them'
    if not mergeable:
        hint = "the files' schemas can't be merged: give reader_schema= a schema that has them"
    text = (
        f"{what} left out because the first file with rows lacks them: {'; '.join(named)}{more}; {hint}; "
        "columns= with the names of the others leaves them out without a warning"
    )
    warnings.warn(text, ColumnsLeftOutWarning, stacklevel())
