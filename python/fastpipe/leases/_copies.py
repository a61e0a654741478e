"""Which stretch an idle worker takes a second copy of, near the end of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Held", "worth_copying"]

# A copy must promise to be this much faster than the holder of the lease, or both would do the same work for nothing.
_FASTER = 1.5
# Seconds until a copy's first batch is read.
_START = 0.1
# A holder that has committed nothing for so many seconds, batches, and times between exchanges, hangs.
_HANGING_SECONDS, _HANGING_BATCHES, _HANGING_GROUPS = 0.5, 3, 2


class Held(NamedTuple):
    """A stretch that isn't done.

    Attributes:
        number: of the stretch.
        committed: its first batch that isn't done.
        stop: behind its last batch.
        worker: who holds the lease; None if nobody does.
        token: of the lease.
        copied: whether there is a second copy.
        rate: batches a second of the holder; 0 if it isn't known.
        stalled: seconds since the holder's last commit, or since it was given work.
    """

    number: int
    committed: int
    stop: int
    worker: str | None
    token: int
    copied: bool
    rate: float
    stalled: float


def worth_copying(held: Sequence[Held], worker: str, pace: float, group: float = 0.0) -> list[Held]:
    """The stretches that a worker would end clearly sooner than their holders, the latest expected end first.

    A holder does its stretches one after the other. One that has been silent for longer than its rate explains is
    expected to stay silent for as long again.

    Args:
        held: all stretches of the epoch that aren't done, by number.
        worker: who asks; it copies nothing of its own.
        pace: its seconds for a batch; 0 if that isn't known yet, which is taken for the fastest holder's.
        group: seconds between exchanges that commit, which are about the same for all workers.
    """
    fastest = max((stretch.rate for stretch in held), default=0.0)
    usual = 1 / fastest if fastest else 0.0
    pace = pace or usual
    busy: dict[str, float] = {}
    found = []
    for stretch in held:
        if stretch.worker is None:
            continue
        left = stretch.stop - stretch.committed
        end = busy.get(stretch.worker, _silence(stretch, usual, group)) + left * _pace(stretch, usual)
        busy[stretch.worker] = end
        if not stretch.copied and stretch.worker != worker and end > _FASTER * left * pace + _START:
            found.append((end, stretch))
    return [stretch for _, stretch in sorted(found, key=lambda pair: -pair[0])]


def _pace(stretch: Held, usual: float) -> float:
    return 1 / stretch.rate if stretch.rate > 0 else usual


def _silence(stretch: Held, usual: float, group: float) -> float:
    """Seconds for which the holder is expected to go on doing nothing."""
    hangs = stretch.stalled > max(_HANGING_SECONDS, _HANGING_BATCHES * _pace(stretch, usual), _HANGING_GROUPS * group)
    return stretch.stalled if hangs else 0.0
