"""Arguments by which users say how a query is cut."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

from fastpipe._arguments import shown

__all__ = ["By", "checked_by", "checked_partitions"]

By: TypeAlias = "str | Sequence[str] | None"

_MOST = 1 << 16


def checked_by(by: object) -> tuple[str, ...] | None:
    """The names of the columns by which to cut; None for those that suit.

    Raises:
        TypeError: if they are no names.
        ValueError: if there is none, or one comes twice.
    """
    if by is None:
        return None
    names = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, Sequence) else (by,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"by is a column's name, a list of names or None, not {shown(by)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"by names at least one column, and each once: {shown(by)}")
    return names


def checked_partitions(partitions: object) -> int | None:
    """The number of partitions; None for "auto".

    Raises:
        TypeError: if it is no number.
        ValueError: if it is out of range.
    """
    if partitions == "auto":
        return None
    try:
        number = operator.index(partitions)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"partitions is a number or 'auto', not {shown(partitions)}") from None
    if isinstance(partitions, bool) or not 1 <= number <= _MOST:
        raise ValueError(f"partitions is from 1 to {_MOST}, or 'auto', not {shown(partitions)}")
    return number
