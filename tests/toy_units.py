"""Sources in Python for tests: consecutive numbers, read by a function that the test provides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

Act = Callable[[int], Any]


class Numbers:
    """Units of consecutive numbers from 0, with the given numbers of rows.

    If `act` returns a value for a unit, the value replaces the unit's table.

    Attributes:
        under_way: The number of calls of `read` that haven't returned.
        most: The maximum of `under_way` so far.
        calls: The units that were read.
    """

    def __init__(self, rows: Sequence[int], act: Act | None = None) -> None:
        self.rows, self.act = rows, act
        self.schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
        self.under_way = self.most = 0
        self.calls: list[int] = []
        self.lock = threading.Lock()

    def table(self, unit: int) -> pa.Table:
        start = sum(self.rows[:unit])
        return pa.table({"x": pa.array(range(start, start + self.rows[unit]), pa.int64())})

    def read(self, unit: int) -> Any:
        with self.lock:
            self.calls.append(unit)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            found = None if self.act is None else self.act(unit)
            return self.table(unit) if found is None else found
        finally:
            with self.lock:
                self.under_way -= 1

    def name(self, unit: int) -> str:
        return f"page {unit}"

    def fingerprint(self) -> Any:
        return "numbers"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.lock = threading.Lock()


def flat(batches: Any, name: str = "x") -> list[Any]:
    """Returns the values of all batches."""
    return [value for batch in batches for value in batch[name].tolist()]


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Waits until a condition is true. Fails after `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.005)


def readers() -> Iterator[threading.Thread]:
    """Returns the threads of fastpipe that call `read`."""
    return (thread for thread in threading.enumerate() if thread.name == "fastpipe-read")
