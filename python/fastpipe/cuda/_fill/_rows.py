"""Which rows each device gets: a pure function of counts and the seed.

Either way the rows of one refill are told in chunks, as they stand, so that a data set is gone through once for all
devices, and no list of all rows is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import Drawing, drawn_within
from fastpipe._reader.sampling import Arc, arc

Numbers = npt.NDArray[np.int64]

# What one row of a chunk takes: its number and its device, and as much again while they are made and read.
ROW_BYTES = 64


class Dealt(NamedTuple):
    """Rows of all devices.

    Attributes:
        rows: int64 `[n]`, ascending.
        devices: int64 `[n]`, the device of each.
    """

    rows: Numbers
    devices: Numbers


class FilledRows(Protocol):
    """The rows of refills."""

    def check(self, refill: int) -> None:
        """Makes sure that there are rows for it.

        Raises:
            ValueError: if there aren't.
        """

    def chunks(self, refill: int, memory: int) -> Iterator[Dealt]:
        """The rows of all devices, as they stand, in lists that take so much memory, about."""

    def of(self, refill: int, device: int) -> Numbers:
        """The rows of one device, ascending."""


class ExactRows:
    """Rows drawn one by one: those of device `d` are the sample that `fastpipe.sample` calls part `d`.

    Args:
        total: rows there are.
        rows: for each device.
        devices: how many.
        seed: of the drawing.
        replace: whether later refills may have rows of former ones.
    """

    def __init__(self, total: int, rows: int, devices: int, seed: int, *, replace: bool) -> None:
        self._total, self._rows, self._devices = total, rows, devices
        self._seed, self._replace = seed, replace

    def check(self, refill: int) -> None:
        """Makes sure that there are rows for a refill."""
        needed = self._rows * self._devices * (1 if self._replace else refill + 1)
        if needed > self._total:
            raise ValueError(_too_few(refill, self._rows, self._devices, self._total))

    def chunks(self, refill: int, memory: int) -> Iterator[Dealt]:
        """Ranges of all rows, of which each has about as many that are drawn."""
        drawing = self._drawing(refill, 0, self._rows * self._devices)
        count = -(-self._rows * self._devices * ROW_BYTES // max(memory, ROW_BYTES))
        bounds = [self._total * number // count for number in range(count + 1)]
        for start, end in pairwise(bounds):
            rows, draws = drawing.within(start, end)
            draws //= self._rows
            yield Dealt(rows, draws)

    def of(self, refill: int, device: int) -> Numbers:
        """One part of the drawing."""
        return self._drawing(refill, device * self._rows, self._rows).within(0, self._total)[0]

    def _drawing(self, refill: int, behind: int, rows: int) -> Drawing:
        skipped = behind if self._replace else behind + refill * self._rows * self._devices
        epoch = refill if self._replace else 0
        return Drawing(self._total, rows, skipped=skipped, seed=self._seed, epoch=epoch)


class BlockRows:
    """Rows of units that are drawn: a share of the rows of each, dealt to devices at random.

    Refills are successive arcs of a circle of units (`fastpipe._reader.sampling.arc`).

    Args:
        unit_rows: the rows of each unit.
        rows: for each device.
        devices: how many.
        seed: of the drawing.
        share: of the rows of a unit, above 0 up to 1.
        replace: whether later refills may have rows of former ones.
    """

    def __init__(
        self,
        unit_rows: npt.NDArray[np.uint32],
        rows: int,
        devices: int,
        seed: int,
        share: float,
        *,
        replace: bool,
    ) -> None:
        self._counts = unit_rows.astype(np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        self._taken = self.most(unit_rows, share)
        self._rows, self._devices = rows, devices
        self._seed, self._share, self._replace = seed, share, replace

    @staticmethod
    def most(unit_rows: npt.NDArray[np.uint32], share: float) -> int:
        """How many rows all units have to give at once."""
        total = int(unit_rows.sum(dtype=np.int64))
        return min(max(round(total * share), 1), total)

    def check(self, refill: int) -> None:
        """Makes sure that there are rows for a refill."""
        if self._rows * self._devices * (1 if self._replace else refill + 1) > self._taken:
            of = f" of {self._share:g} of each block" if self._share < 1 else ""
            raise ValueError(_too_few(refill, self._rows, self._devices, self._taken, of))

    def unit_of(self, rows: Numbers) -> Numbers:
        """The units of rows."""
        return np.searchsorted(self._firsts + self._counts, rows, side="right")

    def chunks(self, refill: int, memory: int) -> Iterator[Dealt]:
        """Units that were drawn, as they stand."""
        self.check(refill)
        needed, circle = self._rows * self._devices, refill if self._replace else 0
        skipped = 0 if self._replace else refill * needed
        drawn = arc(self._counts, self._taken, skipped, needed, self._seed, self._stream(circle, 0))
        behind = np.cumsum(drawn.stops - drawn.starts)
        # Who gets which of the rows.
        deal = Drawing(needed, needed, seed=self._seed, epoch=self._stream(refill, 2))
        at, before = 0, 0
        while at < len(behind):
            end = max(int(np.searchsorted(behind, before + memory // ROW_BYTES, side="right")), at + 1)
            rows = self._rows_of(Arc(*(column[at:end] for column in drawn)), self._stream(circle, 1))
            draws = deal.within(before, int(behind[end - 1]))[1]
            yield Dealt(rows, draws // self._rows)
            at, before = end, int(behind[end - 1])

    def of(self, refill: int, device: int) -> Numbers:
        """Those that were dealt to a device."""
        chunks = self.chunks(refill, 1 << 26)
        return np.concatenate([dealt.rows[dealt.devices == device] for dealt in chunks])

    def _rows_of(self, some: Arc, choice: int) -> Numbers:
        """The rows of some units that are in an arc."""
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
        # Streams of other draws by the same seed are small numbers.
        return (1 << 40) + 4 * refill + what


def _too_few(refill: int, rows: int, devices: int, there: int, of: str = "") -> str:
    behind = f" behind {refill} refills of as many" if refill else ""
    more = "; replace=True lets refills have rows again that former ones had" if refill else ""
    many = f"{devices} devices" if devices > 1 else "one device"
    return f"{rows} rows for {many}{behind} are more than the {there} rows there are{of}{more}"
