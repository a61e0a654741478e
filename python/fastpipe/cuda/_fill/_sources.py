"""Sources of the rows that devices are filled with: rows of a reader by index, and rows of unscanned CSV files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy.typing as npt

from fastpipe._fastpipe import Drawing
from fastpipe._reader.reader import Reader
from fastpipe._reader.sampling import gathered
from fastpipe.csv._drawing import RowEstimate
from fastpipe.csv._line_buffer import LineBuffer, Lines
from fastpipe.cuda._fill._device_table import Columns
from fastpipe.cuda._fill._rows import BlockRows, Numbers, Selection, Shares, stream_of
from fastpipe.errors import LimitError, UnsupportedError

_T = TypeVar("_T")

# Fraction of the allowed memory that lists of rows may use.
_PARTS = 8
LEAST_BATCH, MOST_BATCH = 64, 1 << 16


class Part(NamedTuple):
    """Some rows of a refill.

    Attributes:
        columns: The columns, `[rows]` each.
        devices: Device of each row, int64 `[rows]`.
        units: Unit or cell of each row, int64 `[rows]`; None if rows are drawn one by one. The rows of a unit are in
            successive parts.
    """

    columns: list[npt.NDArray[Any]]
    devices: Numbers
    units: Numbers | None


class RowSource(Protocol):
    """The rows of refills."""

    def check(self, refill: int) -> None:
        """Checks that enough rows are left for a refill, as far as that is known.

        Raises:
            ValueError: If too few rows are left.
        """

    def parts(self, refill: int) -> Iterator[Part]:
        """Yields the rows of all devices."""

    def of(self, refill: int, device: int) -> Numbers:
        """Returns the indices of one device's rows, ascending."""

    def estimate(self) -> RowEstimate | None:
        """Returns the estimated number of rows in all files; None if it is known."""


class SelectedRows:
    """Rows of a reader that are selected by index.

    Args:
        reader: The reader.
        columns: Columns of its features.
        selection: The indices.
        batch_size: Number of rows to read at a time, if memory allows.
        memory: Allowed memory in bytes.
    """

    def __init__(self, reader: Reader, columns: Columns, selection: Selection, batch_size: int, memory: int) -> None:
        self._reader, self._columns, self._selection = reader, columns, selection
        self._batch_size, self._memory = batch_size, memory

    def check(self, refill: int) -> None:
        """Checks that enough rows are left for a refill."""
        self._selection.check(refill)

    def parts(self, refill: int) -> Iterator[Part]:
        """Yields the rows of all devices in storage order."""
        unit_of = self._selection.unit_of if isinstance(self._selection, BlockRows) else None
        for dealt in ahead(self._selection.chunks(refill, self._memory // _PARTS)):
            if not len(dealt.rows):
                continue
            at = 0
            rows, batches = self._begun(dealt.rows)
            with rows:
                for batch in batches:
                    columns = self._columns.of(batch)
                    part = slice(at, at + len(columns[0]))
                    units = None if unit_of is None else unit_of(dealt.rows[part])
                    yield Part(columns, dealt.devices[part], units)
                    at = part.stop

    def of(self, refill: int, device: int) -> Numbers:
        """Returns the indices of one device's rows."""
        return self._selection.of(refill, device)

    def estimate(self) -> RowEstimate | None:
        """Returns None, because the number of rows is known."""
        return None

    def _begun(self, numbers: Numbers) -> tuple[Reader, Iterator[dict[str, Any]]]:
        """Starts a pass over rows in batches that are as large as memory allows."""
        memory = self._memory - self._memory * 2 // _PARTS
        while True:
            rows = gathered(self._reader, numbers, self._batch_size, memory)
            try:
                return rows, iter(rows)
            except LimitError:
                if self._batch_size <= LEAST_BATCH:
                    raise
                self._batch_size = max(self._batch_size // 2, LEAST_BATCH)


class BufferedRows:
    """Rows of CSV files that are not scanned.

    Args:
        buffer: Draws the rows.
        columns: Columns of its features.
        rows: Number of rows for each device.
        seed: Seed of the draw.
        replace: Whether a refill may contain rows of earlier refills.
    """

    def __init__(self, buffer: LineBuffer, columns: Columns, rows: list[int], seed: int, *, replace: bool) -> None:
        self._buffer, self._columns, self._shares = buffer, columns, Shares(rows)
        self._seed, self._replace = seed, replace

    def check(self, refill: int) -> None:
        """Does nothing, because the number of rows isn't known."""

    def parts(self, refill: int) -> Iterator[Part]:
        """Yields the rows of all devices in the order of drawing, sorted by file and offset within each buffer.

        Raises:
            ValueError: If too few rows are left.
        """
        buffer, total = self._buffer, self._shares.total
        if self._replace:
            buffer.restart(refill)
        start = 0 if self._replace else refill * total
        # Rows of refills that failed are drawn and not used.
        while buffer.drawn < start:
            self._next(refill, start - buffer.drawn)
        deal = Drawing(total, total, seed=self._seed, epoch=stream_of(refill, 3))

        def drawn() -> Iterator[tuple[Lines, Numbers]]:
            while (at := buffer.drawn - start) < total:
                lines = self._next(refill, total - at)
                devices = self._shares.devices(deal.within(at, buffer.drawn - start)[1])[lines.places]
                yield lines, devices

        for lines, devices in ahead(drawn(), buffer.stop):
            at = 0
            with lines.reader as rows:
                for batch in rows:
                    columns = self._columns.of(batch)
                    part = slice(at, at + len(columns[0]))
                    yield Part(columns, devices[part], lines.cells[part])
                    at = part.stop

    def of(self, refill: int, device: int) -> Numbers:
        """Raises `UnsupportedError`, because rows are not counted."""
        raise UnsupportedError('method="buffered" doesn\'t count rows: for their indices, use method="exact"')

    def estimate(self) -> RowEstimate | None:
        """Returns the estimated number of rows in all files."""
        return self._buffer.estimate()

    def _next(self, refill: int, rows: int) -> Lines:
        try:
            return self._buffer.next(rows, self._buffer.held)
        except LookupError:
            raise ValueError(self._shares.too_few(refill, self._buffer.drawn)) from None


def ahead(items: Iterator[_T], stop: Callable[[], None] = lambda: None) -> Iterator[_T]:
    """Yields the same items, while another thread creates the next one.

    Args:
        items: The items.
        stop: Function that ends the creation of an item that isn't needed.
    """
    with ThreadPoolExecutor(1, "fastpipe-draw") as other:
        coming = other.submit(next, items, None)
        try:
            while (item := coming.result()) is not None:
                coming = other.submit(next, items, None)
                yield item
        finally:
            coming.cancel()
            stop()
