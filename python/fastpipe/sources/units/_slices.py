"""Large units that are read a slice at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from fastpipe.errors import ShapeError

__all__ = ["Slices"]

# Iterators that wait for their next slice, at most. A pass needs one; those of passes that were left wait in vain.
_WAITING = 8

_END = object()


class Slices:
    """Reads slices of units: each by the iterator that has read the one in front of it, if there is one.

    Args:
        units: have `read_slices`.
        rows: number of rows of each unit.
    """

    def __init__(self, units: Any, rows: Sequence[int]) -> None:
        self._units, self._rows = units, rows
        # By process, unit and next row. Without a lock, which could be held by another thread when the process forks.
        self._waiting: OrderedDict[tuple[int, int, int], Iterator[Any]] = OrderedDict()

    def read(self, unit: int, first: int, end: int) -> Any:
        """The rows of a unit from `first` up to `end`, as Arrow.

        Raises:
            ShapeError: if the unit ends before, or doesn't end where it should.
        """
        process, all_rows = os.getpid(), self._rows[unit]
        slices = self._waiting.pop((process, unit, first), None)
        if slices is None:
            slices = iter(self._units.read_slices(unit, first, end - first))
        found = next(slices, _END)
        if found is _END:
            reason = f"read_slices({unit}) ended before row {first}, and the unit has {all_rows} rows as `rows` says"
            raise ShapeError(reason, reason=reason)
        if end < all_rows:
            self._waiting[process, unit, end] = slices
            while len(self._waiting) > _WAITING:
                self._waiting.popitem(last=False)
        elif next(slices, _END) is not _END:
            reason = f"read_slices({unit}) went on behind row {end}, where the unit ends as `rows` says"
            raise ShapeError(reason, reason=reason)
        return found

    def clear(self) -> None:
        """Forgets what no pass waits for."""
        self._waiting.clear()
