"""Sources in Python that do as tests want: numbers in a row, read by whatever function."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

Act = Callable[[int], Any]


class Numbers:
    """Units of the numbers from 0, this many each; what `act` returns for a unit is returned in place of its table.

    Attributes:
        under_way: calls of `read` that haven't returned.
        most: the most that there were.
        calls: the units that were asked for.
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
    """The values of all batches."""
    return [value for batch in batches for value in batch[name].tolist()]


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Waits until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def readers() -> Iterator[threading.Thread]:
    """Threads of fastpipe's that call `read`."""
    return (thread for thread in threading.enumerate() if thread.name == "fastpipe-read")
