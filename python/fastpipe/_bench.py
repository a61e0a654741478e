"""Measures how fast files are read, over batch sizes, threads and orders.

Each cell of the grid is read several times for a short while, in rounds that go through all cells, each in another
order: a machine that slows down, or becomes quieter, then changes all cells alike. What counts is the median of the
rounds. Every time a new reader is made, so that no cell uses memory that another one has paid for; the beginning of
each is a warm-up that doesn't count. Passes have no end, so small files are read again and again.

A shuffled pass opens the blocks of a window at once, and then yields its batches fast. So what is counted is whole
windows, even if that takes longer; where it would take far longer, everything from the beginning of the pass, which
makes a cell look slower than it is, never faster.

The consumer does nothing but drop the batches. So what is measured is how fast batches can be had at most.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, cast

from fastpipe._formats import AVRO, FileFormat
from fastpipe._ordering import Ordering, Shuffle
from fastpipe._running import Running
from fastpipe.errors import LimitError
from fastpipe.reader import Reader
from fastpipe.specs import Features

__all__ = ["ROUNDS", "Cell", "Data", "Measured", "Round", "Threads", "grid", "measure"]

Threads: TypeAlias = int | Literal["auto"]

ROUNDS = 3
_SEED = 0
_WARM_UP = 0.25
"""Of a round's time, before what is counted."""
_PATIENCE = 4
"""Times of that time, after which it ends in the midst of a window."""
_LOOK = 0.005
"""Seconds between two looks at the memory."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is varied.

    Attributes:
        batch_size: rows a batch.
        num_threads: as `read_avro` takes it.
        shuffle: `"off"`, `"window"`, `"block"` or `"buffer"`.
    """

    batch_size: int
    num_threads: Threads
    shuffle: str

    @property
    def order(self) -> Shuffle | Literal[False]:
        """As `read_avro` takes it."""
        return False if self.shuffle == "off" else cast("Shuffle", self.shuffle)


@dataclass(frozen=True, slots=True)
class Round:
    """What was counted in one round of a cell.

    Attributes:
        rows: that were yielded.
        batches: that were yielded.
        bytes: of their arrays.
        seconds: from the first of them to the last.
        cpu_seconds: of all threads, meanwhile.
        peak_memory: by how many bytes private memory (RssAnon) grew at most; None where the system doesn't tell.
        threads: that decoded at the end.
        whole: whether whole windows were counted; if not, the cell is faster than it looks.
    """

    rows: int
    batches: int
    bytes: float
    seconds: float
    cpu_seconds: float
    peak_memory: int | None
    threads: int
    whole: bool


@dataclass(slots=True)
class Measured:
    """A cell with what its rounds found.

    Attributes:
        cell: the cell.
        rounds: the rounds so far.
        refused: why it can't be read with the memory that it may take.
    """

    cell: Cell
    rounds: list[Round] = field(default_factory=list)
    refused: str | None = None

    @property
    def records_per_second(self) -> float:
        """Rows that were yielded in a second."""
        return self._median(lambda r: r.rows / r.seconds)

    @property
    def spread(self) -> float:
        """How far the rounds are from each other: half of the way from the slowest to the fastest, by the median."""
        rates = [r.rows / r.seconds for r in self.rounds]
        return (max(rates) - min(rates)) / 2 / self.records_per_second

    @property
    def megabytes_per_second(self) -> float:
        """Bytes of the arrays that were yielded in a second, in 10^6."""
        return self._median(lambda r: r.bytes / r.seconds / 1e6)

    @property
    def milliseconds_per_batch(self) -> float:
        """From one batch to the next."""
        return self._median(lambda r: 1e3 * r.seconds / r.batches)

    @property
    def cpu_seconds_per_million(self) -> float:
        """Of all threads, for a million rows."""
        return self._median(lambda r: 1e6 * r.cpu_seconds / r.rows)

    @property
    def peak_memory(self) -> int | None:
        """Bytes by which private memory grew in the round with the most; None where the system doesn't tell."""
        return max((r.peak_memory for r in self.rounds if r.peak_memory is not None), default=None)

    @property
    def whole(self) -> bool:
        """Whether all rounds counted whole windows."""
        return all(r.whole for r in self.rounds)

    @property
    def threads(self) -> int:
        """Threads that decoded."""
        return self.rounds[-1].threads

    def _median(self, of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, self.rounds))

    def as_json(self) -> dict[str, Any]:
        """All numbers; those of a cell that was refused are None."""
        names = (
            *("records_per_second", "spread", "megabytes_per_second", "milliseconds_per_batch"),
            *("cpu_seconds_per_million", "peak_memory", "threads", "whole"),
        )
        return {
            **asdict(self.cell),
            **{name: None if self.refused is not None else getattr(self, name) for name in names},
            "refused": self.refused,
            "rounds": [asdict(r) for r in self.rounds],
        }


@dataclass(frozen=True, slots=True)
class Data:
    """What is read, and what all cells have in common.

    Attributes:
        files: paths.
        features: what is decoded.
        shuffle_buffer: of the shuffled orders; None for the default of each.
        memory_limit: bytes; None for no limit.
        index_cache: a directory for the places of blocks or rows, which are looked for once and not by each reader.
        format: of the files.
    """

    files: Sequence[str]
    features: Features
    shuffle_buffer: int | None
    memory_limit: int | None
    index_cache: str
    format: FileFormat = AVRO

    def check(self, cell: Cell) -> None:
        """Checks arguments without a look at the files.

        Raises:
            ValueError: if one is out of range.
        """
        Ordering.checked(batch_size=cell.batch_size, shuffle=cell.order, shuffle_buffer=self._buffer(cell), seed=_SEED)
        Running.checked(num_threads=cell.num_threads, prefetch=None, memory_limit=self.memory_limit)

    def reader(self, cell: Cell) -> Reader:
        """A reader whose passes have no end."""
        index = {"index_cache": self.index_cache} if self.format.function in ("read_avro", "read_csv") else {}
        return self.format.read(
            list(self.files),
            features=self.features,
            batch_size=cell.batch_size,
            shuffle=cell.order,
            shuffle_buffer=self._buffer(cell),
            seed=_SEED,
            epochs=None,
            num_threads=cell.num_threads,
            memory_limit=self.memory_limit,
            **index,
        )

    def _buffer(self, cell: Cell) -> int | None:
        return None if cell.order is False else self.shuffle_buffer

    def round(self, cell: Cell, seconds: float) -> tuple[Round, Reader]:
        """Reads for so long, and at least one batch.

        Returns:
            What was counted, and the reader, whose pass is over: it knows what limited it.

        Raises:
            LimitError: if the memory limit is too low.
            FastpipeError: if the files can't be read.
        """
        memory = _Memory()
        with self.reader(cell) as reader:
            period = _period(cell, reader)
            begun = _Span()
            batches = iter(reader)
            _draw(batches, begun, seconds * _WARM_UP, 1, memory)
            span = _Span()
            _draw(batches, span, seconds * (1 - _WARM_UP), period, memory)
            whole = span.rows >= period
            if not whole:
                span.add(begun)
            memory.look()
            stats = reader.stats()
        size = stats["bytes_delivered"] / max(stats["rows"], 1) * span.rows
        found = Round(
            rows=span.rows,
            batches=span.batches,
            bytes=size,
            seconds=span.seconds,
            cpu_seconds=span.cpu_seconds,
            peak_memory=memory.growth,
            threads=stats["threads"]["chosen"],
            whole=whole,
        )
        return found, reader


def grid(batch_sizes: Sequence[int], threads: Sequence[Threads], shuffles: Sequence[str]) -> list[Cell]:
    """All cells, in the order of the table."""
    return [Cell(size, count, shuffle) for shuffle in shuffles for count in threads for size in batch_sizes]


def measure(data: Data, cells: Sequence[Cell], seconds: float, done: Callable[[Cell], object]) -> list[Measured]:
    """Measures all cells.

    Args:
        data: what is read.
        cells: of the grid.
        seconds: for each, of all rounds together.
        done: called after each round of a cell.

    Raises:
        LimitError: if no cell can be read with the memory that it may take.
        FastpipeError: if the files can't be read.
    """
    found = {cell: Measured(cell) for cell in cells}
    refusal: LimitError | None = None
    mixed = random.Random(_SEED)
    for _ in range(ROUNDS):
        for cell in mixed.sample(cells, len(cells)):
            if found[cell].refused is None:
                try:
                    found[cell].rounds.append(data.round(cell, seconds / ROUNDS)[0])
                except LimitError as error:
                    if data.memory_limit is None:  # One of the limits of the format, which all cells have.
                        raise
                    refusal = error
                    found[cell].refused = error.reason
            done(cell)
    if refusal is not None and all(measured.refused is not None for measured in found.values()):
        raise refusal
    return list(found.values())


def _period(cell: Cell, reader: Reader) -> int:
    """Rows after which a pass does the same kinds of work again."""
    buffer = reader.shuffle_buffer or 1
    if cell.shuffle in ("off", "window"):
        return min(buffer, reader.num_rows)
    # A pool or buffer is filled once an epoch, and then gets a row for each that it yields.
    return reader.num_rows if buffer * 4 >= reader.num_rows else 1


class _Span:
    """What was drawn in a stretch of time, which begins now."""

    def __init__(self) -> None:
        self.rows = 0
        self.batches = 0
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self._start = time.perf_counter()
        self._cpu_start = time.process_time()

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._start
        self.cpu_seconds = time.process_time() - self._cpu_start

    def add(self, before: _Span) -> None:
        """Adds a stretch that ended when this one began."""
        self.rows += before.rows
        self.batches += before.batches
        self.seconds += before.seconds
        self.cpu_seconds += before.cpu_seconds


def _draw(batches: Iterator[dict[str, Any]], span: _Span, seconds: float, period: int, memory: _Memory) -> None:
    """Draws batches for so long, and then up to the end of a period unless that is too far; at least one."""
    start = time.perf_counter()
    periods = 0
    while True:
        batch = next(batches)  # Like a `for` loop, it holds one batch while it waits for the next.
        span.rows += len(next(iter(batch.values())))
        span.batches += 1
        memory.look_now_and_then()
        elapsed = time.perf_counter() - start
        ended, periods = span.rows // period > periods, span.rows // period
        if elapsed >= seconds and (ended or elapsed >= _PATIENCE * seconds):
            span.stop()
            return


class _Memory:
    """By how much the private memory of the process has grown at most. The consumer looks: no other thread does."""

    def __init__(self) -> None:
        _settle()
        self._before = _private_memory()
        self._most = self._before or 0
        self._next = 0.0

    @property
    def growth(self) -> int | None:
        return None if self._before is None else self._most - self._before

    def look_now_and_then(self) -> None:
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + _LOOK
            self.look()

    def look(self) -> None:
        if self._before is not None:
            self._most = max(self._most, _private_memory() or 0)


def _private_memory() -> int | None:
    """Anonymous memory that is really there, in bytes: not the files' own pages. None where there is no such file."""
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    return None


def _settle() -> None:
    """Gives back what was freed, where the C library can: what the next reader takes is then seen to grow."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
