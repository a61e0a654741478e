"""Contenders take turns, A B B A, so that other work of the machine affects all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LEAST = 3
"""Rounds of a contender that takes longer than its budget."""


class CannotError(Exception):
    """A contender can't do this; the text says why. It takes no further turns."""


class Turn(NamedTuple):
    """The cost of a turn: wall time, CPU time, and what the contender returned."""

    seconds: float
    cpu: float
    result: Any = None


class Ratio(NamedTuple):
    """The ratios of two contenders within the rounds that both took part in: the median, the least and the greatest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


Figure = str | Callable[[Turn], float]
"""What is looked at: a field of `Turn`, or a function."""


class Turns:
    """The turns of all contenders (`turns[contender][round]`), and why contenders stopped (`errors`)."""

    def __init__(self, names: list[Any]) -> None:
        self.turns: dict[Any, dict[int, Turn]] = {name: {} for name in names}
        self.errors: dict[Any, str] = {}

    def rounds(self, name: Any, figure: Figure = "seconds") -> dict[int, float]:
        """Returns a figure of a contender by round."""
        look: Callable[[Turn], float] = figure if callable(figure) else lambda turn: getattr(turn, figure)
        return {number: look(turn) for number, turn in self.turns[name].items()}

    def values(self, name: Any, figure: Figure = "seconds") -> list[float]:
        """Returns a figure of each round."""
        return list(self.rounds(name, figure).values())

    def median(self, name: Any, figure: Figure = "seconds") -> float:
        """Returns the median of a figure."""
        return statistics.median(self.values(name, figure))

    def ratio(self, mine: Any, other: Any, figure: Figure = "seconds") -> Ratio:
        """Returns what `mine` has over what `other` has."""
        here, there = self.rounds(mine, figure), self.rounds(other, figure)
        found = [here[number] / there[number] for number in here if number in there]
        return Ratio(statistics.median(found), min(found), max(found))

    def add(self, more: Turns) -> None:
        """Adds further rounds."""
        for name, turns in more.turns.items():
            mine = self.turns[name]
            first = max(mine, default=-1) + 1
            mine.update({first + number: turn for number, turn in turns.items()})


def take_turns(
    contenders: Mapping[Any, Callable[[], Any]], rounds: int, *, warm: int = 1, budget: float = float("inf")
) -> Turns:
    """Lets contenders take turns. Every other round goes backwards.

    Args:
        contenders: What is called in each round, by name. What it returns is the turn's result; a contender that takes
            its time itself returns a `Turn`, and one that raises `CannotError` is left out from then on.
        rounds: How often each is called.
        warm: How often each is called before anything counts.
        budget: Seconds that a contender may take before it gets fewer rounds than the others, and at least 3.
    """
    found = Turns(list(contenders))
    taken = dict.fromkeys(contenders, 0.0)
    for number in range(-warm, rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            if name in found.errors or (number >= LEAST and taken[name] > budget):
                continue
            cpu, begun = time.process_time(), time.perf_counter()
            try:
                result = contenders[name]()
            except CannotError as error:
                found.errors[name] = str(error)
                continue
            seconds, spent = time.perf_counter() - begun, time.process_time() - cpu
            taken[name] += seconds
            if number >= 0:
                found.turns[name][number] = result if isinstance(result, Turn) else Turn(seconds, spent, result)
    return found
