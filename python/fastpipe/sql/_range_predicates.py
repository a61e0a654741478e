"""Cuts of a result, and predicates for its parts: pure functions, in the database's own order.

Rows are ordered by the columns of a key, one after another, NULLs last. A cut is a key at which a part begins. The
database decides which rows are below a cut, so its own collations, NaN and time zones apply. Every row is either below
a cut or not, so parts are disjoint and together form the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Cut: TypeAlias = "tuple[str | None, ...]"
"""An SQL literal for each column of a key; None for NULL."""


def below(columns: Sequence[str], cut: Cut) -> str:
    """Returns the predicate that a key is below a cut. It is false or NULL for other keys."""
    column, value = columns[0], cut[0]
    rest = below(columns[1:], cut[1:]) if len(columns) > 1 else ""
    if value is None:
        return f"({column} IS NOT NULL OR {rest})" if rest else f"{column} IS NOT NULL"
    if not rest:
        return f"{column} < {value}"
    return f"({column} < {value} OR ({column} = {value} AND {rest}))"


def at_or_above(columns: Sequence[str], cut: Cut, *, nulls: bool = True) -> str:
    """Returns the predicate that a key isn't below a cut.

    Args:
        columns: The columns of the key, as SQL.
        cut: The start of a part.
        nulls: Whether the first column may be NULL. If another predicate excludes NULL, False gives a predicate that an
            index can speed up.
    """
    column, value = columns[0], cut[0]
    rest = at_or_above(columns[1:], cut[1:]) if len(columns) > 1 else ""
    if value is None:
        return f"({column} IS NULL AND {rest})" if rest else f"{column} IS NULL"
    found = f"({column} > {value} OR ({column} = {value} AND {rest}))" if rest else f"{column} >= {value}"
    # This redundant condition lets the database use an index.
    found = f"{column} >= {value} AND {found}" if rest and not nulls else found
    return f"({found} OR {column} IS NULL)" if nulls else found


def between(columns: Sequence[str], first: Cut | None, end: Cut | None, *, nulls: bool = True) -> str | None:
    """Returns the predicate of the part between two cuts; None if the part is the whole result.

    Args:
        columns: The columns of the key, as SQL.
        first: The start of the part; None for the start of the result.
        end: The start of the next part; None for the end of the result.
        nulls: Whether the first column may be NULL.
    """
    if first is None:
        return None if end is None else below(columns, end)
    if end is None:
        return at_or_above(columns, first, nulls=nulls)
    return f"{at_or_above(columns, first, nulls=nulls and end[0] is None)} AND {below(columns, end)}"


def part_number(columns: Sequence[str], cuts: Sequence[Cut]) -> str:
    """Returns an SQL expression for the index of a row's part, from 0. It is a binary search over the cuts."""

    def search(low: int, high: int) -> str:
        if low == high:
            return str(low)
        middle = (low + high) // 2
        return (
            f"CASE WHEN {below(columns, cuts[middle])} THEN {search(low, middle)} ELSE {search(middle + 1, high)} END"
        )

    return search(0, len(cuts))


def chosen(rows: npt.NDArray[np.int64], parts: int) -> list[int]:
    """Chooses cuts between indivisible pieces that minimize the size of the largest part.

    A binary search finds the smallest possible maximum. To check a maximum, each part takes as many pieces as fit.

    Args:
        rows: The number of rows of each piece, in order; positive.
        parts: The maximum number of parts.

    Returns:
        The index of the first piece of each part, except for the first part.
    """
    if not len(rows):
        return []
    ends = np.cumsum(rows)

    def cut(largest: int) -> list[int] | None:
        found: list[int] = []
        piece = 0
        while True:
            before = int(ends[piece - 1]) if piece else 0
            piece = int(np.searchsorted(ends, before + largest, "right"))
            if piece == len(rows):
                return found
            found.append(piece)
            if len(found) == parts:
                return None

    low, high = max(int(rows.max()), -(-int(ends[-1]) // parts)), int(ends[-1])
    while low < high:
        middle = (low + high) // 2
        if cut(middle) is None:
            low = middle + 1
        else:
            high = middle
    return cut(low) or []
