"""Selection of the rows that each device gets by index: a pure function of row counts and the seed.

The rows of one refill are yielded in chunks, in storage order. So the dataset is read once for all devices, and no list
of all rows is kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import Drawing, drawn_within
from fastpipe._reader.sampling import Arc, arc

Numbers = npt.NDArray[np.int64]

# Bytes per row of a chunk: its index and its device, and the same amount while they are created and read.
ROW_BYTES = 64


class Dealt(NamedTuple):
    """Rows of all devices.

    Attributes:
        rows: Row indices, int64 `[n]`, ascending.
        devices: Device of each row, int64 `[n]`.
    """

    rows: Numbers
    devices: Numbers


class Shares:
    """The number of rows of each device, and the draws that belong to it.

    Args:
        rows: Number of rows for each device.

    Attributes:
        total: Number of rows of all devices.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)
        self._ends = np.cumsum(self._rows, dtype=np.int64)
        self.total = int(self._ends[-1])

    def devices(self, draws: Numbers) -> Numbers:
        """Returns the device of each draw of a refill."""
        return np.searchsorted(self._ends, draws, side="right")

    def range(self, device: int) -> tuple[int, int]:
        """Returns the first draw of a device, and the first draw of the next device."""
        return int(self._ends[device]) - self._rows[device], int(self._ends[device])

    def too_few(self, refill: int, there: int, of: str = "") -> str:
        """Returns the message that too few rows are left for a refill."""
        behind = f" after {refill} refills of the same size" if refill else ""
        more = "; with replace=True, a refill can contain rows of earlier refills" if refill else ""
        count = len(self._rows)
        wanted = f"{self.total} rows for {count} devices"
        if len(set(self._rows)) == 1:
            wanted = f"{self._rows[0]} rows for " + (f"each of {count} devices" if count > 1 else "one device")
        return f"{wanted}{behind} are more than the {there} rows available{of}{more}"


class Selection(Protocol):
    """Indices of the rows of refills."""

    def check(self, refill: int) -> None:
        """Checks that enough rows are left for a refill.

        Raises:
            ValueError: If too few rows are left.
        """

    def chunks(self, refill: int, memory: int) -> Iterator[Dealt]:
        """Yields the rows of all devices in storage order, in lists of about `memory` bytes."""

    def of(self, refill: int, device: int) -> Numbers:
        """Returns the rows of one device, ascending."""


class ExactRows:
    """Rows that are drawn one by one. Device `d` gets the rows of part `d` of `Reader.sample`.

    Args:
        total: Number of rows in the dataset.
        rows: Number of rows for each device.
        seed: Seed of the draw.
        replace: Whether a refill may contain rows of earlier refills.
    """

    def __init__(self, total: int, rows: Sequence[int], seed: int, *, replace: bool) -> None:
        self._total, self._shares = total, Shares(rows)
        self._seed, self._replace = seed, replace

    def check(self, refill: int) -> None:
        """Checks that enough rows are left for a refill."""
        if self._shares.total * (1 if self._replace else refill + 1) > self._total:
            raise ValueError(self._shares.too_few(refill, self._total))

    def chunks(self, refill: int, memory: int) -> Iterator[Dealt]:
        """Yields the drawn rows in ranges of the dataset that contain about the same number of rows."""
        drawing = self._drawing(refill, 0, self._shares.total)
        count = -(-self._shares.total * ROW_BYTES // max(memory, ROW_BYTES))
        bounds = [self._total * number // count for number in range(count + 1)]
        for start, end in pairwise(bounds):
            rows, draws = drawing.within(start, end)
            yield Dealt(rows, self._shares.devices(draws))

    def of(self, refill: int, device: int) -> Numbers:
        """Returns one part of the drawing."""
        start, stop = self._shares.range(device)
        return self._drawing(refill, start, stop - start).within(0, self._total)[0]

    def _drawing(self, refill: int, behind: int, rows: int) -> Drawing:
        skipped = behind if self._replace else behind + refill * self._shares.total
        epoch = refill if self._replace else 0
        return Drawing(self._total, rows, skipped=skipped, seed=self._seed, epoch=epoch)


class BlockRows:
    """Rows of drawn units. A fraction of each unit's rows is dealt to the devices at random.

    Refills are successive arcs of a circle of units (`fastpipe._reader.sampling.arc`).

    Args:
        unit_rows: Number of rows in each unit.
        rows: Number of rows for each device.
        seed: Seed of the draw.
        share: Fraction of a unit's rows to take, above 0 and up to 1.
        replace: Whether a refill may contain rows of earlier refills.
    """

    def __init__(
        self,
        unit_rows: npt.NDArray[np.uint32],
        rows: Sequence[int],
        seed: int,
        share: float,
        *,
        replace: bool,
    ) -> None:
        self._counts = unit_rows.astype(np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        self._taken = self.most(unit_rows, share)
        self._shares = Shares(rows)
        self._seed, self._share, self._replace = seed, share, replace

    @staticmethod
    def most(unit_rows: npt.NDArray[np.uint32], share: float) -> int:
        """Returns the total number of rows that can be drawn from all units."""
        total = int(unit_rows.sum(dtype=np.int64))
        return min(max(round(total * share), 1), total)

    def check(self, refill: int) -> None:
        """Checks that enough rows are left for a refill."""
        if self._shares.total * (1 if self._replace else refill + 1) > self._taken:
            of = f" at a share of {self._share:g} of each unit" if self._share < 1 else ""
            raise ValueError(self._shares.too_few(refill, self._taken, of))

    def unit_of(self, rows: Numbers) -> Numbers:
        """Returns the units of rows."""
        return np.searchsorted(self._firsts + self._counts, rows, side="right")

    def chunks(self, refill: int, memory: int) -> Iterator[Dealt]:
        """Yields the rows of the drawn units in storage order."""
        self.check(refill)
        needed, circle = self._shares.total, refill if self._replace else 0
        skipped = 0 if self._replace else refill * needed
        drawn = arc(self._counts, self._taken, skipped, needed, self._seed, self._stream(circle, 0))
        behind = np.cumsum(drawn.stops - drawn.starts)
        # Assigns the rows to devices.
        deal = Drawing(needed, needed, seed=self._seed, epoch=self._stream(refill, 2))
        at, before = 0, 0
        while at < len(behind):
            end = max(int(np.searchsorted(behind, before + memory // ROW_BYTES, side="right")), at + 1)
            rows = self._rows_of(Arc(*(column[at:end] for column in drawn)), self._stream(circle, 1))
            draws = deal.within(before, int(behind[end - 1]))[1]
            yield Dealt(rows, self._shares.devices(draws))
            at, before = end, int(behind[end - 1])

    def of(self, refill: int, device: int) -> Numbers:
        """Returns the rows that were dealt to a device."""
        chunks = self.chunks(refill, 1 << 26)
        return np.concatenate([dealt.rows[dealt.devices == device] for dealt in chunks])

    def _rows_of(self, some: Arc, choice: int) -> Numbers:
        """Returns the rows of an arc's units that are inside the arc."""
        rows = drawn_within(
            some.units,
            self._firsts[some.units],
            self._counts[some.units],
            some.taken,
            seed=self._seed,
            epoch=choice,
        )
        places = np.arange(len(rows)) - np.repeat(np.cumsum(some.taken) - some.taken, some.taken)
        inside = (places >= np.repeat(some.starts, some.taken)) & (places < np.repeat(some.stops, some.taken))
        return rows[inside]

    def _stream(self, refill: int, what: int) -> int:
        return stream_of(refill, what)


def stream_of(refill: int, what: int) -> int:
    """Returns the stream of one of the draws of a refill."""
    # Small numbers are the streams of other draws with the same seed.
    return (1 << 40) + 4 * refill + what
