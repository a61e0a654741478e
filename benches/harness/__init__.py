"""The shared harness of the benches: turns, tables, targets, memory, and saved figures."""

from __future__ import annotations

from harness.bench import HERE, QUICK, RESULTS, Bench, Table
from harness.memory import MB, rss_anon, sampled
from harness.turns import CannotError, Ratio, Turn, Turns, take_turns

__all__ = [
    "HERE",
    "MB",
    "QUICK",
    "RESULTS",
    "Bench",
    "CannotError",
    "Ratio",
    "Table",
    "Turn",
    "Turns",
    "rss_anon",
    "sampled",
    "take_turns",
]
