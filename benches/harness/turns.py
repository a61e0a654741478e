"""Runs contenders in turn, in the order A B B A, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LEAST = 3
"""Minimum number of rounds of a contender that exceeds its budget."""


class CannotError(Exception):
    """Raised by a contender that can't run, with the reason. It takes no further turns."""


class Turn(NamedTuple):
    """Cost of a turn: wall seconds, CPU seconds, and the contender's return value."""

    seconds: float
    cpu: float
    result: Any = None


class Ratio(NamedTuple):
    """Median, minimum, and maximum ratio of two contenders over the rounds that both took part in."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


Figure = str | Callable[[Turn], float]
"""A figure of a turn: a field name of `Turn`, or a function of the turn."""


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
        """Returns the figure of `mine` divided by the figure of `other`, round by round."""
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
    """Runs contenders in turn. Every other round runs in reverse order.

    Args:
        contenders: Functions by name. Each is called once per round, and its return value becomes the turn's result. A
            contender that measures its own time returns a `Turn`. One that raises `CannotError` isn't called again.
        rounds: Number of measured rounds.
        warm: Number of warm-up rounds, which aren't counted.
        budget: Total seconds after which a contender gets fewer rounds than the others, but at least 3.
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
