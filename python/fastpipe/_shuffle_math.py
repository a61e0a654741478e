"""What a perfect permutation does to rows, blocks and batches, and what a window or a buffer of a given size would do.

Nothing here looks at data or at an order: numbers of rows go in, expectations come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = "npt.NDArray[np.int64]"
Floats: TypeAlias = "npt.NDArray[np.float64]"

_SHIFT = 8
_MOST_GROUPS = 4096
_MOST_WINDOWS = 8
_PLACES = 16
_WITHIN = (np.arange(8) + 0.5) / 8
_FORGOTTEN = 30  # Of the rows that entered a buffer this many times its size ago, e^-30 are left.


# --- A perfect permutation ---


def log_miss(total: float, drawn: float, group: npt.NDArray[Any]) -> Floats:
    """The logarithm of the probability that rows drawn from all of them, without putting any back, miss a group.

    That is log C(total - group, drawn) / C(total, drawn), the hypergeometric distribution at 0. With g(z) = log z! it
    is g(total - group) + g(total - drawn) - g(total) - g(total - group - drawn). For a billion rows each g is 10^10
    times larger than what is left of them, so they aren't subtracted: in Stirling's series (DLMF 5.11.1) the multiples
    of log(total) cancel by hand, and what remains are logarithms of 1 + x. The series is taken 8 places higher up,
    where it is exact to 10^-11; the way back is a product.

    Args:
        total: all rows.
        drawn: rows that are drawn, at most `total`.
        group: int [n], the rows of each group, at most `total`.

    Returns:
        float64 [n]; -inf where there are too few others to draw.
    """
    size = group.astype(np.float64)
    rest = total - drawn - size
    possible = rest >= 0
    rest = np.where(possible, rest, 0)
    size = total - drawn - rest
    top = total + _SHIFT
    shifted = (
        (top - size + 0.5) * np.log1p(-size / top)
        + (top - drawn + 0.5) * math.log1p(-drawn / top)
        - (rest + _SHIFT + 0.5) * np.log1p(-(size + drawn) / top)
        + (_tail(top - size) - _tail(rest + _SHIFT))
        + (_tail(top - drawn) - _tail(top))
    )
    for i in range(1, _SHIFT + 1):
        shifted -= np.log1p(size / (total + i) * drawn / (rest + i))
    return np.where(possible, np.minimum(shifted, 0), -np.inf)


def _tail(z: Any) -> Any:
    """Stirling's series of log z! without its first terms."""
    square = 1 / (z * z)
    return (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / z


def distinct(groups: Counts, drawn: int) -> float:
    """How many groups a batch of a perfect permutation has rows of, on average: the sum of 1 - C(N-r, b) / C(N, b).

    Args:
        groups: int64 [n], the rows r of each group; N is their sum.
        drawn: the rows b of the batch.
    """
    sizes, counts = np.unique(groups[groups > 0], return_counts=True)
    return float(counts @ -np.expm1(log_miss(float(groups.sum()), drawn, sizes)))


def same_group(groups: Counts) -> float:
    """The share of all pairs of two rows that are of one group; nan if there is no pair.

    In each batch of a perfect permutation the share is the same, on average.
    """
    total = float(groups.sum())
    return float(pairs(groups) / (total * (total - 1) / 2)) if total > 1 else math.nan


def pairs(groups: Counts) -> float:
    """The number of pairs of two rows of one group."""
    sizes = groups.astype(np.float64)
    return float((sizes * (sizes - 1) / 2).sum())


def mean_displacement(places: Counts, total: int) -> float:
    """The mean of |place - j| where j is any of all rows, equally likely; (N - 1/N) / 3 if `places` are all of them.

    Args:
        places: int64 [n], places in the order.
        total: the number N of rows.
    """
    before = places.astype(np.float64)
    behind = total - 1 - before
    return float(((before * (before + 1) + behind * (behind + 1)) / 2 / total).mean())


def displacement_quantile(q: float, total: int) -> int:
    """The least k with P(|i - j| <= k) >= q, where i and j are any of N rows, all equally likely.

    Of the N^2 pairs N + 2kN - k(k + 1) are no further apart than k. For a large N that is N (1 - sqrt(1 - q)).
    """

    def reached(k: int) -> bool:
        return total + 2 * k * total - k * (k + 1) >= q * total * total

    k = max(0, min(total - 1, int(total * (1 - math.sqrt(1 - q)))))
    while k > 0 and reached(k - 1):
        k -= 1
    while k < total - 1 and not reached(k):
        k += 1
    return k


def stretch(ends: Counts, start: int, stop: int) -> Counts:
    """How many rows of each group stand in `start..stop` of the data set, as it stands.

    Args:
        ends: int64 [n], ascending: where the rows of each group end.
        start: the first row.
        stop: the row behind the last; more than `start`.

    Returns:
        int64 [m]: of those groups that have some.
    """
    first, last = np.searchsorted(ends, (start, stop - 1), side="right")
    edges = np.minimum(ends[first : last + 1], stop)
    return np.diff(edges, prepend=start)


# --- Orders of a given size ---


def mixed_by_windows(rows: Counts, batch: int, window: int) -> float:
    """How many blocks a batch has rows of, on average, if windows are cut from these blocks and shuffled.

    Args:
        rows: int64 [n], the rows of each block, in the random order of an epoch; none is 0.
        batch: rows of a batch.
        window: rows of a window.
    """
    ends = np.cumsum(rows)
    total = int(ends[-1])
    windows = -(-total // window)
    looked_at = min(windows, _MOST_WINDOWS)
    mixed = weights = 0.0
    for i in range(looked_at):
        start = (2 * i + 1) * windows // (2 * looked_at) * window
        size = min(window, total - start)
        sizes, weight = _thinned(stretch(ends, start, start + size))
        mixed += size * weight * float(-np.expm1(log_miss(size, min(batch, size), sizes)).sum())
        weights += size
    return mixed / weights


def mixed_by_buffer(rows: Counts, batch: int, buffer: int) -> float:
    """How many blocks a batch has rows of, on average, in buffer or in block order.

    In front of draw t the row j of the data set has been in a buffer of n rows since draw max(0, j - n + 1), and each
    draw takes it with probability 1/n: so it is still there with probability (1 - 1/n)^age. Once the last row has
    entered, what is left is a uniform permutation. Draws of rows of one block are taken to be independent, and 8 rows
    of a block stand for all: that is within a few per cent of what buffer order does. A pool of blocks draws alike, but
    holds more, since blocks enter as wholes: where blocks are larger than the pool, block order mixes more than this.

    Args:
        rows: int64 [n], the rows of each block, as they stand; none is 0.
        batch: rows of a batch.
        buffer: rows of the buffer or the pool.
    """
    ends = np.cumsum(rows)
    total = int(ends[-1])
    size = min(buffer, total)
    mixed = 0.0
    for i in range(_PLACES):
        place = (2 * i + 1) * total // (2 * _PLACES)
        drawn = min(batch, total - place)
        first = np.searchsorted(ends, place - _FORGOTTEN * size, side="right")
        last = np.searchsorted(ends, place + drawn + size, side="right") + 1
        near, weight = _thinned(np.arange(int(first), min(int(last), len(ends))))
        sizes = rows[near].astype(np.float64)
        starts = (ends[near] - rows[near]).astype(np.float64)
        row = starts[:, None] + sizes[:, None] * _WITHIN
        taken = _taken(row, place, drawn, size, total).mean(axis=1)
        with np.errstate(divide="ignore"):
            mixed += weight * float(-np.expm1(sizes * np.log1p(-taken)).sum())
    return mixed / _PLACES


def _taken(row: Floats, place: int, drawn: int, size: int, total: int) -> Floats:
    """The probability that rows are among those drawn at `place`."""
    rate = -math.log1p(-1 / size) if size > 1 else 700.0  # A buffer of one row keeps none: e^-700 is nothing.
    entered = np.maximum(0, row - size + 1)
    full = total - size  # From this draw on nothing enters.
    survived: Floats = np.exp(np.minimum(0, entered - min(place, full)) * rate)
    if place > full:
        survived *= (total - place) / size  # This share of what was left then is left now.
        taken: Floats = np.full_like(survived, drawn / (total - place))
    else:
        taken = -np.expm1(-np.clip(place + drawn - entered, 0, drawn) * rate)
    return survived * taken


def _thinned(values: Counts) -> tuple[Counts, float]:
    """Some of many values, evenly spread, and how many each of them stands for."""
    step = -(-len(values) // _MOST_GROUPS)
    some = values[:: max(step, 1)]
    return some, len(values) / max(len(some), 1)


def smallest(enough: Callable[[int], bool], least: int, most: int) -> int:
    """The smallest number of two significant digits that is enough, if larger ones are better; `most` if none is.

    Args:
        enough: whether a number is.
        least: the first that is looked at; it needn't be round.
        most: the last.
    """
    low, high = math.log(least), math.log(max(most, least))
    if enough(least):
        return least
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(round(math.exp(middle))) else (middle, high)
    found = math.exp(high)
    unit = 10.0 ** (math.floor(math.log10(found)) - 1)
    return max(least, min(most, round(math.ceil(found / unit - 1e-9) * unit)))
