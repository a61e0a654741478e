"""Draws random rows of CSV files that are not scanned, cell by cell, into a buffer of lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown
from fastpipe._fastpipe import CsvLineBuffer
from fastpipe._files._in_memory_files import File, lowered
from fastpipe._reader.reader import Reader
from fastpipe.csv._drawing import MOST_BATCH, Asked, BlockVariance, CsvSample, RowEstimate
from fastpipe.csv._reading import CsvData

_Numbers = npt.NDArray[np.int64]

# Number of rows from which the columns are found out.
_LOOKED_AT = 1000
# Bytes of rows that are held as text, at most.
_MOST_HELD = 64 << 20


# The smallest share, which reads 1,000 times as many rows as it draws.
LEAST_SHARE = 0.001
# The default share, and the number of cells over which it spreads few rows.
_SHARE = 0.25
_CELLS = 64


def share_of(share: Any, least: float = 0.0) -> float | None:
    """Returns the checked fraction of the rows of a cell to take; None for the default."""
    if share is None:
        return None
    if not isinstance(share, int | float) or not (least <= share <= 1 and share > 0):
        low = f"at least {least:g}" if least else "above 0"
        raise ValueError(f"share must be {low} and at most 1; got {shown(share)}")
    return float(share)


class Lines(NamedTuple):
    """Drawn rows, sorted by file and offset.

    Attributes:
        reader: Reader of the rows.
        files: Index of each row's file, int64 `[rows]`.
        offsets: Byte offset at which each row starts in its file, int64 `[rows]`.
        cells: Index of each row's cell, int64 `[rows]`.
        places: Index of each row in the order of drawing, counted from the first of these rows, int64 `[rows]`.
    """

    reader: Reader
    files: _Numbers
    offsets: _Numbers
    cells: _Numbers
    places: _Numbers


class LineBuffer:
    """A buffer that is filled with random lines of files again and again.

    Args:
        files: The files.
        asked: Columns, dialect, seed and threads.
        share: Fraction of the rows of a cell to take before other cells are read; None to let `plan` choose it.

    Attributes:
        columns: Names of the columns.
        features: The features of the columns.
        held: Bytes of rows to hold as text at a time.
        drawn: Number of rows that were drawn since the last `restart`.

    Raises:
        SchemaError: If no columns are named and a column isn't numeric.
        ValueError: If the files have no rows.
        FastpipeError: If the files can't be read.
    """

    def __init__(self, files: Sequence[File], asked: Asked, share: float | None) -> None:
        dialect = asked.dialect.lowered()
        self._given, self._share = share, _SHARE if share is None else share
        self._handle = CsvLineBuffer(lowered(files), dialect, _SHARE, asked.seed, 0, num_threads=asked.num_threads)
        limit, options = asked.memory_limit, asked.options
        # Half of the memory is for lines, which exist twice for a moment, and half for reading them.
        self.held = _MOST_HELD if limit is None else min(_MOST_HELD, limit // 4)
        if limit is not None:
            options = options | {"memory_limit": limit // 2}
        handle, offsets, *_ = self._handle.next(_LOOKED_AT, self.held)
        if not len(offsets):
            raise ValueError("the dataset has no rows to draw from")
        data, self.columns = asked.typed(CsvData.of_rows(handle, asked.dialect, asked.features))
        self._asked = replace(asked, columns=self.columns, options=options)
        self.features = data.features
        self.restart(0)

    def restart(self, circle: int) -> None:
        """Starts to draw from all rows again, independently of the rows drawn before."""
        self._handle.restart(circle, self._share)
        self.drawn = 0

    def stop(self) -> None:
        """Ends a draw in another thread. The next draw returns its rows."""
        self._handle.stop()

    def plan(self, rows: int) -> None:
        """Chooses the share of samples of this many rows, if the caller hasn't, and starts to draw from all rows.

        Few rows are spread over at least 64 cells, because rows of the same cell are often alike. The share depends
        only on the files, the seed and the number of rows.

        Raises:
            ValueError: If the files can't have this many rows.
            FastpipeError: If the files can't be read.
        """
        if rows > (most := self._handle.most_rows()):
            raise ValueError(f"rows={rows} exceeds the number of rows of the files, which is at most {most}")
        if self._given is None:
            in_cell = max(self._handle.rows_per_cell(self.held), 1.0)
            # A share of less than a row per cell would read cells in vain.
            self._share = min(max(rows / _CELLS, 1.0) / in_cell, _SHARE)
            self._share = max(self._share, LEAST_SHARE)
        self.restart(0)

    def next(self, rows: int, nbytes: int) -> Lines:
        """Draws the next rows: `rows` of them, or as many as fit into about `nbytes` of memory.

        Raises:
            LookupError: If no rows are left.
            FastpipeError: If the files can't be read.
        """
        handle, files, offsets, cells, places = self._handle.next(rows, nbytes)
        if not len(offsets):
            raise LookupError(f"all {self.drawn} rows were drawn")
        self.drawn += len(offsets)
        asked = replace(self._asked, rows=len(offsets))
        data = CsvData.of_rows(handle, asked.dialect, asked.features)
        return Lines(asked.reader(data), files, offsets, cells, places)

    def estimate(self) -> RowEstimate:
        """Returns the estimated number of rows in all files."""
        rows, low, high = self._handle.estimate()
        return RowEstimate(round(rows), math.floor(low), math.ceil(high))


def draw_lines(files: Sequence[File], asked: Asked, share: float | None) -> CsvSample:
    """Draws rows of random cells into one array.

    Raises:
        ValueError: If the files have fewer rows than requested.
        FastpipeError: If the files can't be read.
    """
    buffer = LineBuffer(files, asked, share)
    buffer.plan(asked.rows)
    values = np.empty((asked.rows, len(buffer.columns)), asked.dtype, order=asked.order)
    files_of_rows, offsets = np.empty((2, asked.rows), np.int64)
    variance = BlockVariance(len(buffer.columns))
    while (at := buffer.drawn) < asked.rows:
        try:
            lines = buffer.next(asked.rows - at, buffer.held)
        except LookupError:
            raise ValueError(f"rows={asked.rows} exceeds the {at} rows of the files") from None
        # In the order of drawing, rows don't depend on how many fit into memory.
        order = at + lines.places
        values[order] = asked.array(lines.reader, buffer.columns, len(order))
        files_of_rows[order], offsets[order] = lines.files, lines.offsets
        cells = np.empty_like(lines.cells)
        cells[lines.places] = lines.cells
        for start in range(0, len(cells), MOST_BATCH):
            piece = slice(start, start + MOST_BATCH)
            variance.add(list(values[at:][piece].T), cells[piece])
    return CsvSample(
        values=values,
        rows=None,
        columns=buffer.columns,
        seed=asked.seed,
        design_effect=variance.design_effect(),
        offsets=offsets,
        files=files_of_rows,
        estimate=buffer.estimate(),
    )
