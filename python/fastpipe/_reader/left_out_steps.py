"""Steps that a reader leaves out of every epoch, as ranges that its order goes past."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fastpipe._arguments import integer, shown
from fastpipe._text import plural
from fastpipe.errors import UnsupportedError

if TYPE_CHECKING:
    from fastpipe._reader.ordering import Ordering
    from fastpipe._reader.reader import Reader

# Longer lists are cut off.
_SHOWN = 8


def without_steps(reader: Reader, steps: Iterable[int] | slice) -> Reader:
    """Leaves out steps of each epoch. See `Reader.without`."""
    order, ordering = reader._order, reader._ordering
    ranges = _ranges(steps, order.steps)
    if order.steps and sum(stop - start for start, stop in ranges) == order.steps:
        raise ValueError(f"steps has all {order.steps} batches of an epoch: keep at least one of them")
    # The reader may already leave out steps before, between or after these.
    counted = [(order.step_at(start), order.step_at(stop - 1) + 1) for start, stop in ranges]
    return reader._like(reader._data, ordering=replace(ordering, without_steps=_union(ordering.without_steps, counted)))


def check_all_steps(ordering: Ordering, what: str, advice: str) -> None:
    """Checks that no steps are left out.

    Args:
        ordering: Settings of a reader's order.
        what: What can't be done, for the error.
        advice: What to do instead.

    Raises:
        UnsupportedError: If steps are left out.
    """
    if ordering.without_steps:
        reason = f"{what} without some steps: {advice}"
        raise UnsupportedError(reason, reason=reason)


def described(ordering: Ordering) -> str:
    """Returns the steps that are left out, in words."""
    ranges = ordering.without_steps
    named = [str(start) if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in ranges[:_SHOWN]]
    count = plural(sum(stop - start for start, stop in ranges), "step")
    return f"{count} of each epoch: {', '.join(named)}{', ...' if len(ranges) > _SHOWN else ''}"


def _ranges(steps: Iterable[int] | slice, total: int) -> list[tuple[int, int]]:
    """Returns the steps that a user passes as sorted ranges.

    Raises:
        TypeError: If they aren't an iterable of integers or a slice.
        ValueError: If a step doesn't exist.
    """
    if isinstance(steps, slice):
        start, stop, by = steps.start, steps.stop, steps.step
        steps = range(
            0 if start is None else integer("start of the slice", start),
            total if stop is None else integer("end of the slice", stop),
            1 if by is None else integer("step of the slice", by),
        )
    if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
        raise TypeError(f"steps must be a range, a slice or a list of integers; got {shown(steps)}")
    if isinstance(steps, range) and steps:
        # The range may be huge.
        first, last = sorted((_existing(steps[0], total), _existing(steps[-1], total)))
        if abs(steps.step) == 1:
            return [(first, last + 1)]
    return list(_union([(step, step + 1) for step in {_existing(step, total) for step in steps}]))


def _existing(step: int, total: int) -> int:
    number = integer("each of the steps", step)
    if not 0 <= number < total:
        last = f", counted from 0 to {total - 1}" if total else ""
        raise ValueError(f"step {number} does not exist: an epoch has {total} batches{last}")
    return number


def _union(*lists: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns sorted ranges of the same steps, which neither overlap nor touch."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(itertools.chain(*lists)):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)
