"""Lets readers take turns, and compares how long a row takes them: for `parquet.py` and `frames.py`."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from typing import Any

from peers import READERS, Peer
from peers.job import Job

BUDGET = 8.0
"""Seconds that a side may take before it gets fewer rounds than the others (3 at least)."""


@dataclass
class Side:
    """A reader and what it reads.

    Attributes:
        reader: A key of `READERS`.
        job: What it reads.
        known: Sums of every value, in the file's order or (shuffled) in any; None: they aren't checked.
        label: What tables call it; by default the reader's name.
        wall: Microseconds a row, by round.
        cpu: The same of CPU time.
        error: Why it can't, or None.
    """

    reader: str
    job: Job
    known: dict[str, Any] | None = None
    label: str = ""
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.label or self.reader

    @property
    def rate(self) -> float:
        """Rows a second."""
        return 1e6 / statistics.median(self.wall)

    def times_as_fast(self, other: Side, *, by_cpu: bool = False) -> float:
        """The median of the ratios within the rounds that both took part in."""
        mine, others = (self.cpu, other.cpu) if by_cpu else (self.wall, other.wall)
        return statistics.median(b / a for a, b in zip(mine, others, strict=False))


def say(text: str) -> None:
    """Tells of progress."""
    print(text, file=sys.stderr, flush=True)


def _check(side: Side, peer: Peer) -> None:
    answer = peer.ask("check", side.job, 0.0)
    side.error = answer.get("error")
    got = answer.get("plain" if side.job.shuffle else "sums")
    if side.error is None and side.known is not None and got is not None:
        differing = [name for name, total in side.known.items() if got.get(name) != total]
        if differing:
            side.error = f"other values: {', '.join(differing)}"


def take_turns(sides: list[Side], rounds: int, core: int, versions: dict[str, str], enough: float = 0.3) -> None:
    """Checks what the sides read, and lets them take turns, each in a process of its own, all on one core.

    Args:
        sides: Filled in.
        rounds: Turns of each, but for slow ones.
        core: The core that all stay on.
        versions: Filled in: package -> version.
        enough: Seconds that a turn lasts at least; shorter passes are repeated.
    """
    peers = [Peer(side.reader, READERS[side.reader].env, [core], say) for side in sides]
    try:
        for side, peer in zip(sides, peers, strict=True):
            _check(side, peer)
            if side.error is not None:
                say(f"{side.name}: {side.error[:300]}")
            versions |= peer.versions
        taken = dict.fromkeys(range(len(sides)), 0.0)
        for turn in range(rounds):
            for number, (side, peer) in enumerate(zip(sides, peers, strict=True)):
                if side.error is not None or (turn >= 3 and taken[number] > BUDGET):
                    continue
                answer = peer.ask("read", side.job, enough)
                side.error = answer.get("error")
                if side.error is None:
                    taken[number] += answer["seconds"] * answer["passes"]
                    side.wall.append(answer["seconds"] / answer["rows"] * 1e6)
                    side.cpu.append(answer["cpu"] / answer["rows"] * 1e6)
    finally:
        for peer in peers:
            peer.close()


def in_thousands(rate: float) -> str:
    """Rows a second, in thousands."""
    return f"{rate / 1e3:,.0f}"
