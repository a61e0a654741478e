"""How many servers a service should have, by what they say of their time: decided here, without servers or threads.

A consumer that is faster than its servers always has a request that waits for a batch being made. One that is slower
lets batches wait, or asks for nothing. So the share of their time in which servers keep somebody waiting says whether
they are too few: near one, they are what limits consumers; far from it, fewer of them would do. The two thresholds lie
so far apart that neither answer leads to the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

__all__ = ["GROW_AFTER", "SHRINK_AFTER", "Decision", "Look", "decide"]

# Shares of the servers' time in which somebody waits for them: above the first one there are more servers, and fewer
# only if those that would be left stay below the second one.
_BUSY, _EASY = 0.75, 0.5
GROW_AFTER = 3
"""Looks in a row after which there are more servers: so that neither the first batch nor a hiccup makes them."""
SHRINK_AFTER = 10
"""Looks in a row after which there is one less. More than before growing: a server that is missing costs more."""


class Look(NamedTuple):
    """What servers did between two looks at them, as shares of their time; means over servers, which add up to one.

    Attributes:
        making: somebody waited for a batch being made.
        held_back: nobody did, and batches waited for clients to take them.
        idle: nobody had asked for anything.
    """

    making: float
    held_back: float
    idle: float

    @classmethod
    def of(cls, seconds: Sequence[tuple[float, float, float]]) -> Self:
        """From the seconds of each server: in which requests waited for it, in which it waited, and of the clock.

        Seconds are summed over the requests of a server, so they may be more than those of the clock.
        """
        making = held_back = 0.0
        for waited, held, passed in seconds:
            share = min(waited / passed, 1.0)
            making += share
            held_back += min(held / passed, 1.0 - share)
        making, held_back = making / len(seconds), held_back / len(seconds)
        return cls(making, held_back, max(0.0, 1.0 - making - held_back))

    def __str__(self) -> str:
        return f"{self.making:.0%} making what is waited for, {self.held_back:.0%} held back, {self.idle:.0%} idle"


class Decision(NamedTuple):
    """How many servers there should be, and why."""

    servers: int
    why: str


def decide(looks: Sequence[Look], servers: int, least: int, most: int) -> Decision:
    """How many servers there should be.

    Args:
        looks: at the servers, oldest first, since there have been so many.
        servers: how many there are.
        least: servers that there should be, whatever they do.
        most: the same.

    Returns:
        At most twice as many, or one less.
    """
    if servers < least:
        return Decision(least, f"there are {least} at least")
    if servers > most:
        return Decision(most, f"there are {most} at most")
    recent = _mean(looks[-GROW_AFTER:]) if len(looks) >= GROW_AFTER else None
    if recent is not None and all(look.making >= _BUSY for look in looks[-GROW_AFTER:]):
        if servers == most:
            return Decision(servers, f"consumers wait, and there are {most} at most: {recent}")
        return Decision(min(2 * servers, most), f"consumers wait: {recent}")
    if servers > least and len(looks) >= SHRINK_AFTER:
        past = looks[-SHRINK_AFTER:]
        if all(look.making * servers <= _EASY * (servers - 1) for look in past):
            return Decision(servers - 1, f"one less would do: {_mean(past)}")
    return Decision(servers, f"{looks[-1]}" if looks else "nothing is known yet")


def _mean(looks: Sequence[Look]) -> Look:
    making, held_back, idle = (sum(values) / len(looks) for values in zip(*looks, strict=True))
    return Look(making, held_back, idle)
