"""How CSV files are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from fastpipe._arguments import names, shown
from fastpipe._boundary import LoweredDialect

__all__ = ["DEFAULT_DIALECT", "DEFAULT_NULLS", "Dialect", "Header", "LosslessDialect", "OnRagged"]

Header: TypeAlias = bool | Sequence[str]
OnRagged: TypeAlias = Literal["error", "skip"]

DEFAULT_NULLS = ("", "NA", "N/A", "NULL", "null", "None", "NaN", "nan")


@dataclass(frozen=True)
class Dialect:
    """How files are written, checked.

    Attributes:
        delimiter: as in `read_csv`, like the others.
    """

    delimiter: str
    quote: str | None
    header: bool | tuple[str, ...]
    comment: str | None
    decimal: str
    null_values: tuple[str, ...]
    on_ragged: OnRagged

    lossless: ClassVar[bool] = False
    """Whether floats refuse integers that they would round, and finite numbers that would be infinite."""

    @classmethod
    def of(
        cls,
        delimiter: Any,
        quote: Any,
        header: Any,
        comment: Any,
        decimal: Any,
        null_values: Any,
        on_ragged: Any,
    ) -> Dialect:
        """Checks what users give.

        Raises:
            TypeError: if an argument is of the wrong type.
            ValueError: if one is out of range.
        """
        if on_ragged not in ("error", "skip"):
            raise ValueError(f'on_ragged is "error" or "skip", not {shown(on_ragged)}')
        if isinstance(null_values, str) or not isinstance(null_values, Iterable):
            raise TypeError(f"null_values is a list of words, not {shown(null_values)}")
        return cls(
            delimiter=_character("delimiter", delimiter),
            quote=None if quote is None else _character("quote", quote),
            header=header if isinstance(header, bool) else _header(header),
            comment=None if comment is None else _character("comment", comment),
            decimal=_character("decimal", decimal),
            null_values=tuple(dict.fromkeys(names("null_values", null_values))),
            on_ragged=on_ragged,
        )

    def lowered(self) -> LoweredDialect:
        """Plain values for the extension module."""
        quote = None if self.quote is None else ord(self.quote)
        comment = None if self.comment is None else ord(self.comment)
        header = self.header if isinstance(self.header, bool) else list(self.header)
        words = [word.encode() for word in self.null_values]
        skip = self.on_ragged == "skip"
        return ord(self.delimiter), quote, comment, ord(self.decimal), header, words, skip, self.lossless


class LosslessDialect(Dialect):
    """The same, read into floats only if they keep integers and finite numbers. Decimal fractions are rounded."""

    lossless = True


def _header(header: Any) -> tuple[str, ...]:
    given = tuple(names("header", header))
    if not given:
        raise ValueError("header is empty: name each column")
    twice = next((name for name, count in Counter(given).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"header names {twice!r} twice: columns need names of their own")
    return given


def _character(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is one character, not {shown(value)}")
    if len(value) != 1 or not value.isascii():
        raise ValueError(f"{name} is one ASCII character, not {shown(value)}")
    return str(value)


DEFAULT_DIALECT = Dialect.of(",", '"', True, None, ".", DEFAULT_NULLS, "error")
