"""Samples of CSV files that nobody has scanned, by random bytes: `method="estimate"`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastpipe import _fastpipe
from fastpipe.sources.csv._data import CsvData
from fastpipe.sources.csv._sample import Asked, CsvSample, RowEstimate
from fastpipe.sources.files._contents import Contents

__all__ = ["draw_at_bytes"]


def draw_at_bytes(files: Sequence[str | Contents], asked: Asked, *, replace: bool) -> CsvSample:
    """Draws the rows in which random bytes lie, each row with the same probability.

    Raises:
        ValueError: if there are fewer rows, or hardly more.
        FastpipeError: as `read_csv`; a LimitError if quotes around a byte can be read in two ways.
    """
    places = [file.place if isinstance(file, Contents) else None for file in files]
    handle, numbers, offsets, (rows, low, high) = _fastpipe.estimate_csv(
        list(map(str, files)),
        asked.dialect.lowered(),
        places if any(places) else [],
        asked.rows,
        asked.seed,
        replace=replace,
        num_threads=asked.num_threads,
    )
    data, wanted = asked.typed(CsvData.of_rows(handle, asked.dialect, asked.features))
    values = asked.array(asked.reader(data), wanted, asked.rows)
    # As many there are for certain.
    least = len(np.unique(np.stack([numbers, offsets]), axis=1).T)
    found = RowEstimate(
        max(round(rows), least), max(math.floor(round(low, 3)), least), max(math.ceil(round(high, 3)), least)
    )
    return CsvSample(values, None, wanted, asked.seed, offsets=offsets, files=numbers, estimate=found)
