"""Says what is done, and about how long the rest takes."""

from __future__ import annotations

import sys
import time

SELDOM = 2.0
"""Seconds between two passing lines where they stay."""


class Clock:
    """Writes to stderr: one line that is written over on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        self._begun = self._stage_begun = time.perf_counter()
        self._stage, self._total, self._done = "", 0, 0
        self._live = sys.stderr.isatty()
        self._passed = self._begun

    def stage(self, name: str, steps: int) -> None:
        """A new stage begins.

        Args:
            name: What it is called.
            steps: How many equal steps it has, about.
        """
        self._stage, self._total, self._done = name, steps, 0
        self._stage_begun = time.perf_counter()

    def step(self, text: str) -> None:
        """A step is done.

        Args:
            text: What was done.
        """
        self._done += 1
        self.say(text, passing=True)

    def _head(self) -> str:
        now = time.perf_counter()
        head = f"{now - self._begun:6.1f} s"
        if self._total:
            spent = now - self._stage_begun
            left = spent / self._done * (self._total - self._done) if self._done else None
            eta = "?" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}"
            head += f", {self._stage} {self._done}/{self._total}, {eta} left of it"
        return head

    def say(self, text: str, passing: bool = False) -> None:
        """Prints a line.

        Args:
            text: What to say.
            passing: Whether the next line may take its place.
        """
        now = time.perf_counter()
        if passing and not self._live and now - self._passed < SELDOM:
            return
        self._passed = now
        line = f"[{self._head()}] {text}"
        if self._live:
            print(
                f"\r\x1b[K{line[:150] if passing else line}", end="" if passing else "\n", file=sys.stderr, flush=True
            )
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the passing line away, before something else is printed."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
