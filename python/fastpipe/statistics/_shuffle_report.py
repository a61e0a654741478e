"""Measures how well an order shuffles a dataset, and formats the measures as a text report."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import within
from fastpipe._fastpipe import Order, RemoteDataset
from fastpipe._reader.dataset import Dataset, FileDataset
from fastpipe._reader.ordering import Ordering, Shuffle
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import ReaderParts, ReaderPasses
from fastpipe._reader.state import LARGEST_EPOCH
from fastpipe._text import plural, table
from fastpipe.errors import UnsupportedError
from fastpipe.statistics import _shuffle_math
from fastpipe.statistics._shuffle_math import Counts

Tick: TypeAlias = Callable[[int, int], None]

MAP_LINES = 12
MAP_COLUMNS = 40
QUANTILES = (0.05, 0.5, 0.95)
# An order visits at most this many rows to reach the sampled batches, which takes about 2 seconds. If it had to visit
# more, several neighboring batches are sampled at each of fewer places.
_WORK = 3 * 10**7
# To start in the middle of an epoch, block and buffer order repeat this many draws for each row of their buffer.
_LOOK_BACK = 16
_LEAST_PLACES = MAP_LINES


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure of an order.

    Attributes:
        found: Mean (or quantile) over the sampled batches.
        perfect: Expectation for a uniformly random permutation of all rows. It is calculated, not sampled.
        unshuffled: Value for the same batches without shuffling.

    All three are nan if there is nothing to measure.
    """

    found: float
    perfect: float
    unshuffled: float

    @property
    def score(self) -> float:
        """(found - unshuffled) / (perfect - unshuffled), clipped to 0.0 (no shuffling) to 1.0 (perfect).

        nan if `perfect` and `unshuffled` are equal, because the measure is then meaningless. Examples are the measure
        of files for a dataset of one file, and the measure of units for batches that have all rows.
        """
        way = self.perfect - self.unshuffled
        if not abs(way) > 1e-9 * max(abs(self.perfect), abs(self.unshuffled)):
            return math.nan
        return min(max((self.found - self.unshuffled) / way, 0.0), 1.0) + 0.0  # Turns -0.0 into 0.0.


@dataclass(frozen=True, slots=True)
class ShuffleReport:
    """Measures of how well an order shuffles a dataset. `str(report)` contains a table, a map and advice.

    A single measure is not enough. `shuffle=True` puts all units of the dataset in a random order, so rows move as far
    as in a perfect permutation even if the window is small. But a batch has rows of only the few units of its window:
    see `units` and `same_unit_pairs`. `"block"` and `"buffer"` keep files and units close to their places, so a
    batch may mix many units, but sorted data remain roughly sorted: see `displacement` and the map.

    Attributes:
        shuffle: `"sequential"`, `"window"`, `"block"` or `"buffer"`.
        shuffle_buffer: Number of rows in a window, pool or buffer; None without shuffling.
        batch_size: Number of rows per batch.
        seed: Seed of the shuffle.
        epoch: The epoch that was sampled.
        unit_name: Name of the source's units: `"block"` (Avro), `"chunk"` (CSV), `"shard"` (interactions) or `"unit"`.
        num_rows: Number N of rows in the dataset.
        num_units: Number of units that have rows.
        num_files: Number of files that have rows. 0 if the dataset isn't stored in files, or is a partition.
        num_batches: Number of batches in an epoch.
        batches_seen: Number of batches that were sampled. The measures cover these batches, and are exact if all
            batches were sampled.
        bytes_per_row: Bytes of the files per row, including headers, and compressed if the files are. nan without rows
            or files.
        displacement: The mean absolute difference between a row's places in the epoch and in the dataset, in rows. For
            a perfect permutation it is close to N/3 (the expectation is for the sampled places).
        displacement_quantiles: The 5 %, 50 % and 95 % quantiles of the displacement (the smallest number that at least
            this share of rows doesn't exceed). For a perfect permutation of many rows they are N (1 - sqrt(1 - q)):
            0.025, 0.293 and 0.776 N.
        units: The mean number of distinct units in a batch. For a perfect permutation it is the sum over all units of
            1 - C(N-r, b) / C(N, b), with the rows r of the unit and b of the batch (a hypergeometric draw).
        files: The mean number of distinct files in a batch. nan without files.
        same_unit_pairs: The share of the pairs of rows in a batch whose rows come from the same unit. For a perfect
            permutation it is the sum of r (r-1) over N (N-1). Let p be this share. If rows of the same unit have
            correlation c and other rows have none, the variance of a batch's mean is (1 + (b-1) c p) / b times the
            variance of a row. This is the design effect of cluster samples (Kish, Survey Sampling, 1965), and it is how
            units add noise to gradients. The score is the share of this noise that shuffling removes.
        density: 12 lines of 40 columns: the number of rows that a range of the epoch (line) has from a range of the
            dataset (column), divided by the number in a perfect permutation. A dataset with fewer rows has fewer lines
            and columns. nan in lines without a sampled batch.
    """

    shuffle: str
    shuffle_buffer: int | None
    batch_size: int
    seed: int
    epoch: int
    unit_name: str
    num_rows: int
    num_units: int
    num_files: int
    num_batches: int
    batches_seen: int
    bytes_per_row: float
    displacement: Measure
    displacement_quantiles: tuple[Measure, Measure, Measure]
    units: Measure
    files: Measure
    same_unit_pairs: Measure
    density: tuple[tuple[float, ...], ...]

    @property
    def buffer_bytes(self) -> float:
        """Size of `shuffle_buffer` rows in bytes, as stored in the files. 0.0 without shuffling, nan without files."""
        return self.shuffle_buffer * self.bytes_per_row if self.shuffle_buffer and self.num_rows else 0.0

    @property
    def map(self) -> str:
        """The density as text: the epoch from top to bottom, the dataset from left to right."""
        return shaded(self.density)

    @property
    def advice(self) -> str:
        """One to three sentences on the choice of shuffle and shuffle_buffer."""
        return _advice(self)

    def __str__(self) -> str:
        return _as_text(self)


def shuffle_report(
    reader: Reader,
    shuffle: bool | Shuffle | None = None,
    shuffle_buffer: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    epoch: int | None = None,
    max_batches: int = 200,
    *,
    tick: Tick | None = None,
) -> ShuffleReport:
    """Reports how well an order shuffles a reader's dataset. See `Reader.shuffle_report`.

    `tick` is called with the number of sampled batches and of all batches to sample.
    """
    passes = ReaderPasses(reader)
    parts = passes.parts
    _check(parts)
    if epoch is None:
        at = passes.epoch if passes.loaded else passes.next_epoch
    else:
        at = within("epoch", epoch, 0, LARGEST_EPOCH)
    most = within("max_batches", max_batches, 1, 2**31 - 1)
    own = parts.ordering
    ordering = Ordering.checked(
        batch_size=own.batch_size if batch_size is None else batch_size,
        drop_last=own.drop_last,
        shuffle=_ARGUMENTS[own.shuffle] if shuffle is None else shuffle,
        shuffle_buffer=shuffle_buffer,
        seed=own.seed if seed is None else seed,
    )
    if ordering.shuffle != "sequential" and shuffle_buffer is None and (buffer := _buffer(parts, ordering.batch_size)):
        ordering = ordering.with_buffer(buffer)
    return Index(parts.data).report(ordering, at, most, tick)


def _check(parts: ReaderParts) -> None:
    """Raises an error if a reader doesn't read all rows of a dataset, or not in this process."""
    if parts.ordering.world_size > 1:
        raise ValueError("shuffle_report() needs an order of all rows: call it on a reader without rank and world_size")
    if parts.ordering.is_sample:
        reason = "shuffle_report() needs all rows: call it on the reader that this sample was drawn from"
        raise UnsupportedError(reason, reason=reason)
    if parts.ordering.is_mixture:
        reason = "shuffle_report() describes the order of one dataset: call it on the readers of the mixture"
        raise UnsupportedError(reason, reason=reason)
    if isinstance(parts.data.handle, RemoteDataset):
        reason = "shuffle_report() works only where the data is read: call it on the reader that is served"
        raise UnsupportedError(reason, reason=reason)


def _buffer(parts: ReaderParts, batch_size: int) -> int | None:
    """Returns the default buffer of a report: the reader's, or else the source's. None for the general default."""
    own = parts.ordering
    if own.shuffle == "sequential":
        return parts.data.default_window(batch_size)
    # The order's buffer is rounded up to whole batches of the reader.
    return own.shuffle_buffer or parts.order.shuffle_buffer


class Index:
    """The units of a dataset, and their files if it is stored in files.

    Args:
        data: The dataset.
    """

    def __init__(self, data: Dataset) -> None:
        self._data = data.unsliced()
        every = self._data.handle.unit_rows().astype(np.int64)
        self._every_start = np.cumsum(every) - every
        self._rows = every[every > 0]
        self.num_rows = int(every.sum())
        self._files: Counts | None = None
        self._file_rows, self._bytes = np.zeros(0, np.int64), math.nan
        if isinstance(self._data, FileDataset):
            self._files, self._bytes = self._data.unit_files(), sum(self._data.file_sizes())
            rows = np.bincount(self._files, every).astype(np.int64)
            self._file_rows = rows[rows > 0]

    def report(self, ordering: Ordering, epoch: int, max_batches: int, tick: Tick | None = None) -> ShuffleReport:
        """Returns the report of an order; see `shuffle_report`."""
        order = ordering.of(self._data.handle)
        size = ordering.batch_size
        steps = _steps(order.steps, min(max_batches, max(2**25 // size, _LEAST_PLACES)), size, _jump(ordering, order))
        seen = _Seen(self._rows, self._file_rows, self.num_rows)
        # A window is permuted only up to the batch that is requested, so batches in between are skipped.
        near = 0 if ordering.shuffle == "window" else _jump(ordering, order) // size
        for done, (step, units, records) in enumerate(_batches(order, epoch, steps, near)):
            files = None if self._files is None else self._files[units]
            seen.add(step * size, self._every_start[units] + records, units, files)
            if tick is not None:
                tick(done + 1, len(steps))
        return ShuffleReport(
            shuffle=ordering.shuffle,
            shuffle_buffer=None if ordering.shuffle == "sequential" else order.shuffle_buffer,
            batch_size=size,
            seed=ordering.seed,
            epoch=epoch,
            unit_name=self._data.words.units.removesuffix("s"),
            num_rows=self.num_rows,
            num_units=len(self._rows),
            num_files=len(self._file_rows),
            num_batches=order.steps,
            batches_seen=len(steps),
            bytes_per_row=self._bytes / self.num_rows if self.num_rows else math.nan,
            displacement=seen.displacement(),
            displacement_quantiles=seen.quantiles(),
            units=seen.mixed(0),
            files=seen.mixed(1),
            same_unit_pairs=seen.same_unit(),
            density=seen.density(),
        )


def _jump(ordering: Ordering, order: Order) -> int:
    """Returns the number of rows that an order visits to reach a distant batch."""
    if ordering.shuffle == "sequential":
        return 1
    return order.shuffle_buffer * (1 if ordering.shuffle == "window" else _LOOK_BACK)


def _steps(batches: int, most: int, size: int, jump: int) -> list[int]:
    """Returns the batches to sample: all, or evenly spread single batches or groups of neighboring batches."""
    if batches <= most:
        return list(range(batches))
    places, least = most, min(most, _LEAST_PLACES)
    if batches * size > _WORK:  # Otherwise visiting every row is cheap enough.
        places = min(most, max(_WORK // jump, least))
        places = max(most // -(-most // places), least)  # Makes the number of batches nearly `most`.
    run = most // places
    firsts = ((2 * i + 1) * batches // (2 * places) - run // 2 for i in range(places))
    return [first + i for first in firsts for i in range(run)]


def _batches(
    order: Order, epoch: int, steps: list[int], near: int
) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.uint32]]]:
    """Yields step, units and records of each batch. Visits the batches in between if that is less work."""
    after = 0
    for step in steps:
        for between in range(after, step if step - after < near else after):
            order.rows(epoch, between)
        units, records = order.rows(epoch, step)
        yield step, units.astype(np.int64), records
        after = step + 1


class _Seen:
    """Statistics of the sampled batches.

    Args:
        units: Number of rows in each unit that has rows.
        files: Number of rows in each file that has rows. Empty if the dataset isn't stored in files.
        total: Number of rows.
    """

    def __init__(self, units: Counts, files: Counts, total: int) -> None:
        self._groups = (units, files)
        self._group_ends = (np.cumsum(units), np.cumsum(files))
        self._total = total
        self._places: list[Counts] = []
        self._distances: list[Counts] = []
        self._sizes: list[int] = []
        self._distinct: tuple[list[int], list[int]] = ([], [])
        self._unshuffled: tuple[list[int], list[int]] = ([], [])
        self._pairs: list[float] = []
        self._unshuffled_pairs: list[float] = []
        self._counts = np.zeros((min(MAP_LINES, total), min(MAP_COLUMNS, total)), np.int64)

    def add(self, start: int, rows: Counts, units: Counts, files: Counts | None) -> None:
        """Adds a batch whose first row has the index `start` in the epoch.

        Args:
            start: Index of the batch's first row in the epoch.
            rows: Index of each row in the dataset.
            units: Unit of each row.
            files: File of each row. None if the dataset isn't stored in files.
        """
        size = len(rows)
        places = np.arange(start, start + size)
        self._places.append(places)
        self._distances.append(np.abs(places - rows))
        self._sizes.append(size)
        lines, columns = self._counts.shape
        cells = places * lines // self._total * columns + rows * columns // self._total
        self._counts += np.bincount(cells, minlength=self._counts.size).reshape(self._counts.shape)
        for i, groups in enumerate((units,) if files is None else (units, files)):
            counts = np.unique(groups, return_counts=True)[1]
            unshuffled = _shuffle_math.stretch(self._group_ends[i], start, start + size)
            self._distinct[i].append(len(counts))
            self._unshuffled[i].append(len(unshuffled))
            if i == 0:
                self._pairs.append(_shuffle_math.pairs(counts))
                self._unshuffled_pairs.append(_shuffle_math.pairs(unshuffled))

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

    def mixed(self, which: int) -> Measure:
        """Returns the number of distinct units (0) or files (1) in a batch."""
        groups = self._groups[which]
        if not self._sizes or not len(groups):
            return _NOTHING
        sizes, times = np.unique(self._sizes, return_counts=True)
        perfect = np.array([_shuffle_math.distinct(groups, int(size)) for size in sizes])
        return Measure(
            float(np.mean(self._distinct[which])),
            float(perfect @ times / len(self._sizes)),
            float(np.mean(self._unshuffled[which])),
        )

    def same_unit(self) -> Measure:
        pairs = sum(size * (size - 1) / 2 for size in self._sizes)
        if not pairs:
            return _NOTHING
        perfect = _shuffle_math.same_group(self._groups[0])
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


_WIDTH = 100
# A perfect permutation has the density 1.
_SHADES = ((0.05, " "), (0.5, "░"), (1.5, "▒"), (4.0, "▓"), (math.inf, "█"))
LEGEND = "▒ about as many rows as in a perfect permutation, ░ less than half, ▓ and █ over 1.5 and 4 times as many"
_NO_ROWS = "There are no rows to shuffle."
_ARGUMENTS: dict[str, bool | Shuffle] = {"window": True, "sequential": False, "block": "block", "buffer": "buffer"}


def shaded(density: Sequence[Sequence[float]]) -> str:
    """Returns a density map as text: one character per cell, one line per range of the epoch."""

    def shade(value: float) -> str:
        return " " if math.isnan(value) else next(char for above, char in _SHADES if value < above)

    return "\n".join("".join(map(shade, line)) for line in density)


def _as_text(r: ShuffleReport) -> str:
    """Returns the whole report as text."""
    buffer = "" if r.shuffle_buffer is None else f", shuffle_buffer={r.shuffle_buffer:_}"
    seed = "" if r.shuffle_buffer is None else f", seed={r.seed}"
    order = f"shuffle={name(r.shuffle)}{buffer}, batch_size={r.batch_size:_}{seed}, epoch {r.epoch}"
    counts = [plural(r.num_rows, "row"), plural(r.num_units, r.unit_name)]
    data = ", ".join([*counts, plural(r.num_files, "file")] if r.num_files else counts)
    seen = f"looked at {r.batches_seen:,} of {r.num_batches:,} batch{'' if r.num_batches == 1 else 'es'}"
    shown = [_measures(r), "", *_map(r), ""] if r.num_batches else []
    wrapped = (textwrap.fill(line, _WIDTH, break_long_words=False) for line in r.advice.splitlines())
    return "\n".join([order, f"{data}; {seen}", "", *shown, *wrapped])


def name(shuffle: str) -> str:
    """Returns the value of the argument `shuffle` for an order."""
    argument = _ARGUMENTS[shuffle]
    return str(argument) if isinstance(argument, bool) else f'"{argument}"'


def _measures(r: ShuffleReport) -> str:
    low, median, high = r.displacement_quantiles
    rows = [
        _row("places that a row moves: mean", r.displacement),
        _row("  5 % quantile", low),
        _row("  median", median),
        _row("  95 % quantile", high),
        _row(f"{r.unit_name}s in a batch", r.units),
        *([_row("files in a batch", r.files)] if r.num_files else []),
        _row(f"pairs in a batch from one {r.unit_name}", r.same_unit_pairs, percent=True),
    ]
    return table(["", "this order", "perfect", "unshuffled", "score"], rows, _WIDTH, right=(1, 2, 3, 4))


def _row(title: str, measure: Measure, *, percent: bool = False) -> list[str]:
    values = (measure.found, measure.perfect, measure.unshuffled)
    return [title, *(share(v) if percent else number(v) for v in values), score(measure)]


def number(value: float) -> str:
    """Returns a count, which may be a mean, as text."""
    return "-" if math.isnan(value) else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def share(value: float) -> str:
    """Returns a share as text, in percent."""
    return "-" if math.isnan(value) else f"{100 * value:.3g} %"


def score(measure: Measure) -> str:
    """Returns a score as text; a dash for nan."""
    return "-" if math.isnan(measure.score) else f"{measure.score:.2f}"


def _map(r: ShuffleReport) -> list[str]:
    width = len(r.density[0])
    edge = "─" * width
    lines = [f"epoch │{line}│" for line in r.map.splitlines()]
    lines[1:] = [f"      {line[6:]}" for line in lines[1:]]
    return [f"       {'dataset':<{width}}".rstrip(), f"      ┌{edge}┐", *lines, f"      └{edge}┘", LEGEND]


def _advice(r: ShuffleReport) -> str:
    """Returns advice based on the measures, one line per sentence."""
    if not r.num_batches:
        # drop_last leaves out a batch with too few rows.
        return "There are no batches to shuffle: a batch has more rows than the dataset." if r.num_rows else _NO_ROWS
    lines = [_mixing(r)]
    if not math.isnan(r.same_unit_pairs.score) and r.shuffle != "sequential":
        taken = share(r.same_unit_pairs.score)
        lines.append(f"It removes {taken} of the noise that similar rows of a {r.unit_name} add to a batch's mean.")
    if r.shuffle in ("block", "buffer") and r.displacement.score < 0.5:
        lines.append(
            f"Rows move {share(r.displacement.found / r.displacement.perfect)} as far as in a perfect permutation: "
            "if the rows are sorted, use shuffle=True, which mixes rows of the whole dataset."
        )
    return "\n".join(lines)


def _mixing(r: ShuffleReport) -> str:
    now, without = r.units.found / r.units.perfect, r.units.unshuffled / r.units.perfect
    if without >= 0.9:
        return (
            f"Even without shuffling a batch has rows of {share(without)} of the {r.unit_name}s that a perfect "
            f"permutation gives it, so {r.unit_name}s matter little here."
        )
    having = f"A batch has rows of {share(now)} of the {r.unit_name}s that a perfect permutation gives it"
    if now >= 0.9:
        return f"{having}."
    return f"{having}: {'shuffle=True' if r.shuffle == 'sequential' else 'a larger shuffle_buffer'} mixes more of them."
