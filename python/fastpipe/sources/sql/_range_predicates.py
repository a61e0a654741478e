"""Where a result is cut, and the predicates that follow: pure functions, in the database's own order.

Rows are ordered by the columns of a key, one after the other, NULLs last. A cut is a key, and begins a part: which rows
are below it is asked of the database, so its collations, NaN and time zones decide. Whatever the cut is, a row is below
it or it isn't, so parts are disjoint and make up the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Cut: TypeAlias = "tuple[str | None, ...]"
"""An SQL literal for each column of a key; None for NULL."""


def below(columns: Sequence[str], cut: Cut) -> str:
    """The predicate that a key is below a cut; false or NULL where it isn't."""
    column, value = columns[0], cut[0]
    rest = below(columns[1:], cut[1:]) if len(columns) > 1 else ""
    if value is None:
        return f"({column} IS NOT NULL OR {rest})" if rest else f"{column} IS NOT NULL"
    if not rest:
        return f"{column} < {value}"
    return f"({column} < {value} OR ({column} = {value} AND {rest}))"


def at_or_above(columns: Sequence[str], cut: Cut, *, nulls: bool = True) -> str:
    """The predicate that a key isn't below a cut.

    Args:
        columns: of the key, as SQL.
        cut: where a part begins.
        nulls: whether the first column may be NULL. What another predicate excludes needn't be said, and an index helps
            more without it.
    """
    column, value = columns[0], cut[0]
    rest = at_or_above(columns[1:], cut[1:]) if len(columns) > 1 else ""
    if value is None:
        return f"({column} IS NULL AND {rest})" if rest else f"{column} IS NULL"
    found = f"({column} > {value} OR ({column} = {value} AND {rest}))" if rest else f"{column} >= {value}"
    # Says it once more, so that an index is used.
    found = f"{column} >= {value} AND {found}" if rest and not nulls else found
    return f"({found} OR {column} IS NULL)" if nulls else found


def between(columns: Sequence[str], first: Cut | None, end: Cut | None, *, nulls: bool = True) -> str | None:
    """The predicate of the part from one cut up to another, of which None is the start or the end; None for all.

    Args:
        columns: of the key, as SQL.
        first: where the part begins.
        end: where the next one begins.
        nulls: whether the first column may be NULL.
    """
    if first is None:
        return None if end is None else below(columns, end)
    if end is None:
        return at_or_above(columns, first, nulls=nulls)
    return f"{at_or_above(columns, first, nulls=nulls and end[0] is None)} AND {below(columns, end)}"


def part_number(columns: Sequence[str], cuts: Sequence[Cut]) -> str:
    """The expression for the number of a row's part, from 0: comparisons with few of the cuts."""

    def search(low: int, high: int) -> str:
        if low == high:
            return str(low)
        middle = (low + high) // 2
        return (
            f"CASE WHEN {below(columns, cuts[middle])} THEN {search(low, middle)} ELSE {search(middle + 1, high)} END"
        )

    return search(0, len(cuts))


def chosen(rows: npt.NDArray[np.int64], parts: int) -> list[int]:
    """Chooses where to cut pieces that can't be cut themselves, so that the largest part is as small as it can be.

    The classic search over the largest part: with a given one, taking as much as fits is best.

    Args:
        rows: of each piece, in their order; positive.
        parts: at most.

    Returns:
        The numbers of the pieces that begin a part, but the first.
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
