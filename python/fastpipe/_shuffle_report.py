"""How well an order shuffles a data set: `shuffle_report`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe import _fastpipe, _shuffle_math, _shuffle_text
from fastpipe._ordering import Ordering, Shuffle, within
from fastpipe._shuffle_math import Counts
from fastpipe._sources import Paths, expand
from fastpipe._state import LARGEST_EPOCH

__all__ = ["Measure", "ShuffleReport", "shuffle_report"]

Tick: TypeAlias = Callable[[int, int], None]

MAP_LINES = 12
MAP_COLUMNS = 40
QUANTILES = (0.05, 0.5, 0.95)
# Rows that orders go through to get to the batches that are looked at, before those are taken several at a place: some
# 2 seconds.
_WORK = 3 * 10**7
# To start in the middle of an epoch, block and buffer order look at this many draws for each row of their buffer.
_LOOK_BACK = 16
_LEAST_PLACES = MAP_LINES


@dataclass(frozen=True, slots=True)
class Measure:
    """One way to look at an order.

    Attributes:
        found: its mean (or quantile) over the batches that were looked at.
        perfect: what it is for a uniform random permutation of all rows, in expectation: calculated, not drawn.
        unshuffled: what it is for the same batches without shuffling.

    All are nan where there is nothing to measure.
    """

    found: float
    perfect: float
    unshuffled: float

    @property
    def score(self) -> float:
        """(found - unshuffled) / (perfect - unshuffled), at least 0.0 (no shuffling) and at most 1.0 (perfect).

        nan where these two are the same, so that the measure says nothing: as for the files of a single file, or the
        blocks in batches of all rows.
        """
        way = self.perfect - self.unshuffled
        if not abs(way) > 1e-9 * max(abs(self.perfect), abs(self.unshuffled)):
            return math.nan
        return min(max((self.found - self.unshuffled) / way, 0.0), 1.0) + 0.0  # -0.0 isn't nice to read.


@dataclass(frozen=True, slots=True)
class ShuffleReport:
    """How an order shuffles a data set; `shuffle_report` makes one. Printed, it is a table, a map and a word of advice.

    No measure tells it all. `shuffle=True` puts all blocks of the data set in a random order, so that rows move as far
    as in a perfect permutation however small the window is, and yet a batch has rows of the window's few blocks alone:
    look at `blocks` and `same_block_pairs`. `"block"` and `"buffer"` keep files and blocks about where they stand, so
    that a batch may mix many blocks, and yet sorted data come sorted: look at `displacement` and the map.

    Attributes:
        shuffle: `"sequential"`, `"window"`, `"block"` or `"buffer"`.
        shuffle_buffer: rows of a window, pool or buffer; None without shuffling.
        batch_size: rows of a batch.
        seed: of the epoch's order.
        epoch: the one that was looked at.
        num_rows: rows N of the data set.
        num_blocks: blocks that have rows.
        num_files: files that have rows.
        num_batches: batches of an epoch.
        batches_seen: how many of them were looked at; all measures are of these, and exact if they are all.
        bytes_per_row: bytes of the files for each row: as stored, maybe compressed, with headers. nan without rows.
        displacement: |place in the epoch's order - place in the data set| of a row, in rows: the mean. For a perfect
            permutation it is near N/3 (taken for the places that were looked at).
        displacement_quantiles: its 5 %, 50 % and 95 % quantiles (the least that this many don't exceed). For a perfect
            permutation of many rows: N (1 - sqrt(1 - q)), which is 0.025, 0.293 and 0.776 N.
        blocks: distinct blocks of which a batch has rows, the mean. For a perfect permutation: the sum over all blocks
            of 1 - C(N-r, b) / C(N, b), where r are the block's rows and b the batch's (a hypergeometric draw).
        files: the same for files.
        same_block_pairs: of all pairs of two rows of one batch, the share that stood in one block. For a perfect
            permutation: the sum of r (r-1) over N (N-1). If rows of one block correlate by c and others don't, the
            variance of a mean over a batch is (1 + (b-1) c p) / b times that of a row, where p is this share (the
            design effect of cluster samples: Kish, Survey Sampling, 1965). That is how blocks hurt gradients, and the
            score says how much of it shuffling takes away.
        density: 12 lines of 40 columns: how many rows from that stretch of the data set (column) stand in that stretch
            of the epoch (line), in units of what a perfect permutation has there. Fewer of each for fewer rows; nan in
            lines of which no batch was looked at.
    """

    shuffle: str
    shuffle_buffer: int | None
    batch_size: int
    seed: int
    epoch: int
    num_rows: int
    num_blocks: int
    num_files: int
    num_batches: int
    batches_seen: int
    bytes_per_row: float
    displacement: Measure
    displacement_quantiles: tuple[Measure, Measure, Measure]
    blocks: Measure
    files: Measure
    same_block_pairs: Measure
    density: tuple[tuple[float, ...], ...]

    @property
    def buffer_bytes(self) -> float:
        """Bytes, as stored, of as many rows as shuffle_buffer says; maybe compressed. 0.0 without shuffling."""
        return (self.shuffle_buffer or 0) * self.bytes_per_row if self.num_rows else 0.0

    @property
    def map(self) -> str:
        """The density as text: a line of the epoch below the other, the data set from left to right."""
        return _shuffle_text.shaded(self.density)

    @property
    def advice(self) -> str:
        """What follows for the choice of shuffle and shuffle_buffer: a sentence or a few."""
        return _shuffle_text.advice(self)

    def __str__(self) -> str:
        return _shuffle_text.report(self)


def shuffle_report(
    source: Paths,
    *,
    batch_size: int,
    shuffle: bool | Shuffle = True,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    max_batches: int = 200,
) -> ShuffleReport:
    """Says how well an order would shuffle a data set, before a run. Only headers are read, of files and of blocks.

    Of an epoch with B batches, more than M = `max_batches`, those with the numbers (2i + 1) B / 2M, i below M, are
    looked at. Where it would take long to get to each of them (in more than 3 * 10^7 rows with a large buffer), it is
    several in a row at each of fewer places, 12 at least. It takes about as long as `read_avro` needs to open the
    files, and then some seconds; with millions of rows in the buffer up to a minute or two.

    Args:
        source: as in `read_avro`.
        batch_size: rows of a batch.
        shuffle: as in `read_avro`; False says what the files as they stand are like.
        shuffle_buffer: as in `read_avro`.
        seed: of the shuffling. Others differ little, but for data sets of a few blocks.
        epoch: which one to look at.
        max_batches: batches to look at, at most. Fewer are where they would have more than 2^25 rows together, but 12
            or all at least.

    Returns:
        A `ShuffleReport`, for one rank: the same each time.

    Raises:
        MissingFileError: if a file isn't there.
        MalformedFileError: if a header is damaged or a file cut short.
        UnsupportedError: if a codec isn't read.
        LimitError: if the order takes more than half of the memory of this machine or container; the message says which
            `shuffle_buffer` would fit.
        ValueError: if arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> report = fastpipe.shuffle_report("data/*.avro", batch_size=64, shuffle=True, seed=7)
        >>> 0 < report.blocks.score <= 1
        True
    """
    ordering = Ordering.checked(batch_size=batch_size, shuffle=shuffle, shuffle_buffer=shuffle_buffer, seed=seed)
    at = within("epoch", epoch, 0, LARGEST_EPOCH)
    most = within("max_batches", max_batches, 1, 2**31 - 1)
    return Index(expand(source)).report(ordering, at, most)


class Index:
    """The blocks of a data set.

    Args:
        files: paths.

    Raises:
        FastpipeError: if headers can't be read.
    """

    def __init__(self, files: list[str]) -> None:
        self.files = files
        self._dataset = _fastpipe.AvroDataset(files, [], None)  # Without features nothing is looked at but headers.
        every = self._dataset.unit_rows().astype(np.int64)
        self._every_start = np.cumsum(every) - every
        self._every_file = np.cumsum(np.array(self._dataset.blocks(), np.int64))
        self._rows = every[every > 0]
        self._ends = np.cumsum(self._rows)
        file_ends = np.concatenate(([0], np.cumsum(every)))[self._every_file]
        self._file_rows = np.diff(file_ends, prepend=0)
        self._file_ends = file_ends[self._file_rows > 0]
        self.num_rows = int(every.sum())
        self._bytes = sum(size for _, size, _ in self._dataset.files())

    def report(self, ordering: Ordering, epoch: int, max_batches: int, tick: Tick | None = None) -> ShuffleReport:
        """The report of an order; see `shuffle_report`. `tick` is told how many batches of how many were looked at."""
        order = ordering.of(self._dataset)
        size = ordering.batch_size
        steps = _steps(order.steps, min(max_batches, max(2**25 // size, _LEAST_PLACES)), size, _jump(ordering, order))
        seen = _Seen(self._ends, self._file_ends, self.num_rows)
        # Windows are permuted only as far as a batch that is asked for, so nothing between has to be made.
        near = 0 if ordering.shuffle == "window" else _jump(ordering, order) // size
        for done, (step, units, records) in enumerate(_batches(order, epoch, steps, near)):
            files = np.searchsorted(self._every_file, units, side="right")
            seen.add(step * size, self._every_start[units] + records, units, files)
            if tick is not None:
                tick(done + 1, len(steps))
        return ShuffleReport(
            shuffle=ordering.shuffle,
            shuffle_buffer=None if ordering.shuffle == "sequential" else order.shuffle_buffer,
            batch_size=size,
            seed=ordering.seed,
            epoch=epoch,
            num_rows=self.num_rows,
            num_blocks=len(self._rows),
            num_files=len(self._file_ends),
            num_batches=order.steps,
            batches_seen=len(steps),
            bytes_per_row=self._bytes / self.num_rows if self.num_rows else math.nan,
            displacement=seen.displacement(),
            displacement_quantiles=seen.quantiles(),
            blocks=seen.mixed(self._rows, 0),
            files=seen.mixed(self._file_rows, 1),
            same_block_pairs=seen.same_block(self._rows),
            density=seen.density(),
        )


def _jump(ordering: Ordering, order: _fastpipe.Order) -> int:
    """Rows that an order goes through to get to a batch far away."""
    if ordering.shuffle == "sequential":
        return 1
    return order.shuffle_buffer * (1 if ordering.shuffle == "window" else _LOOK_BACK)


def _steps(batches: int, most: int, size: int, jump: int) -> list[int]:
    """Which batches of an epoch are looked at: all, or single ones or groups of neighbours, evenly spread."""
    if batches <= most:
        return list(range(batches))
    places, least = most, min(most, _LEAST_PLACES)
    if batches * size > _WORK:  # Else going through all of them is no more work, either.
        places = min(most, max(_WORK // jump, least))
        places = max(most // -(-most // places), least)  # With these there are nearly as many batches as there may be.
    run = most // places
    firsts = ((2 * i + 1) * batches // (2 * places) - run // 2 for i in range(places))
    return [first + i for first in firsts for i in range(run)]


def _batches(
    order: _fastpipe.Order, epoch: int, steps: list[int], near: int
) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.uint32]]]:
    """The batches: step, blocks and records of the rows. Those between are gone through where that is less work."""
    after = 0
    for step in steps:
        for between in range(after, step if step - after < near else after):
            order.rows(epoch, between)
        units, records = order.rows(epoch, step)
        yield step, units.astype(np.int64), records
        after = step + 1


class _Seen:
    """What is kept of the batches that were looked at."""

    def __init__(self, ends: Counts, file_ends: Counts, total: int) -> None:
        self._group_ends = (ends, file_ends)
        self._total = total
        self._places: list[Counts] = []
        self._distances: list[Counts] = []
        self._sizes: list[int] = []
        self._distinct: tuple[list[int], list[int]] = ([], [])
        self._unshuffled: tuple[list[int], list[int]] = ([], [])
        self._pairs: list[float] = []
        self._unshuffled_pairs: list[float] = []
        self._counts = np.zeros((min(MAP_LINES, total), min(MAP_COLUMNS, total)), np.int64)

    def add(self, start: int, rows: Counts, blocks: Counts, files: Counts) -> None:
        """Adds a batch that starts there in the epoch's order: its rows' places in the data set, blocks and files."""
        size = len(rows)
        places = np.arange(start, start + size)
        self._places.append(places)
        self._distances.append(np.abs(places - rows))
        self._sizes.append(size)
        lines, columns = self._counts.shape
        cells = places * lines // self._total * columns + rows * columns // self._total
        self._counts += np.bincount(cells, minlength=self._counts.size).reshape(self._counts.shape)
        for i, groups in enumerate((blocks, files)):
            counts = np.unique(groups, return_counts=True)[1]
            as_it_stands = _shuffle_math.stretch(self._group_ends[i], start, start + size)
            self._distinct[i].append(len(counts))
            self._unshuffled[i].append(len(as_it_stands))
            if i == 0:
                self._pairs.append(_shuffle_math.pairs(counts))
                self._unshuffled_pairs.append(_shuffle_math.pairs(as_it_stands))

    def displacement(self) -> Measure:
        if not self._sizes:
            return _NOTHING
        found = sum(int(distances.sum()) for distances in self._distances) / sum(self._sizes)
        places = np.concatenate(self._places)
        return Measure(found, _shuffle_math.mean_displacement(places, self._total), 0.0)

    def quantiles(self) -> tuple[Measure, Measure, Measure]:
        if not self._sizes:
            return _NOTHING, _NOTHING, _NOTHING
        found = np.quantile(np.concatenate(self._distances), QUANTILES, method="inverted_cdf")
        perfect = [_shuffle_math.displacement_quantile(q, self._total) for q in QUANTILES]
        low, median, high = (Measure(float(f), float(p), 0.0) for f, p in zip(found, perfect, strict=True))
        return low, median, high

    def mixed(self, groups: Counts, which: int) -> Measure:
        """Distinct blocks (0) or files (1) of a batch, given the rows of each."""
        if not self._sizes:
            return _NOTHING
        sizes, times = np.unique(self._sizes, return_counts=True)
        perfect = np.array([_shuffle_math.distinct(groups, int(size)) for size in sizes])
        return Measure(
            float(np.mean(self._distinct[which])),
            float(perfect @ times / len(self._sizes)),
            float(np.mean(self._unshuffled[which])),
        )

    def same_block(self, groups: Counts) -> Measure:
        pairs = sum(size * (size - 1) / 2 for size in self._sizes)
        if not pairs:
            return _NOTHING
        perfect = _shuffle_math.same_group(groups)
        return Measure(sum(self._pairs) / pairs, perfect, sum(self._unshuffled_pairs) / pairs)

    def density(self) -> tuple[tuple[float, ...], ...]:
        lines, columns = self._counts.shape
        if not lines:
            return ()
        edges = -(-np.arange(columns + 1) * self._total // columns)  # Rows j with j * columns // total == column.
        perfect = self._counts.sum(axis=1, keepdims=True) * (np.diff(edges) / self._total)
        density: Any = np.divide(self._counts, perfect, out=np.full(self._counts.shape, math.nan), where=perfect > 0)
        return tuple(map(tuple, density.tolist()))


_NOTHING = Measure(math.nan, math.nan, math.nan)
