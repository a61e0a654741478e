"""What tests of the orders share: files of any blocks, their orders, and the p-values of what is looked at.

All tests of randomness have the same form: a function makes a p-value of a *sampler*, and it must be above `ALPHA` for
fastpipe's order and below for that of a twin with a flaw. If an order is what it says, a p-value is below `ALPHA` with
that probability. Seeds are fixed, so each test once and for all passes or fails: of some 50 p-values about one in 200
choices of seeds has one that small, and none of the seeds here was chosen for what comes of it.

p-values are two-sided: numbers that fit too well aren't random either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import numpy as np
from scipy import stats

import wire
from fastpipe import DenseSpec, _fastpipe
from fastpipe._reader.ordering import Ordering
from fastpipe.sources.files._in_memory_files import lowered
from fastpipe.specs import Features

ALPHA = 1e-4

Sampler: TypeAlias = Callable[[int, int], np.ndarray]
"""Makes of a seed and an epoch the order of an epoch: numbers of rows, counted as they stand in the files."""

# --- Orders ---


def write(path: Path, counts: Sequence[int], first: int = 0) -> str:
    """Writes a file of blocks of these numbers of rows. Rows are ints: `first` and those that follow it."""
    blocks = []
    for count in counts:
        blocks.append(wire.block(count, wire.longs(*range(first, first + count))))
        first += count
    path.write_bytes(wire.header('"int"') + b"".join(blocks))
    return str(path)


def dataset(*files: str) -> _fastpipe.AvroDataset:
    """Opens files that `write` wrote."""
    return _fastpipe.AvroDataset(lowered(files), Features({"value": DenseSpec((), "int32")})._lower())


def order(
    data: _fastpipe.AvroDataset,
    shuffle: str,
    *,
    shuffle_buffer: int,
    batch_size: int,
    seed: int,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
    uneven: str = "drop",
) -> _fastpipe.Order:
    """An order; ranks share what they share by default."""
    ordering = Ordering(
        shuffle=shuffle,
        shuffle_buffer=None if shuffle == "sequential" else shuffle_buffer,
        batch_size=batch_size,
        drop_last=drop_last,
        seed=seed,
        seed_given=True,
        rank=rank,
        world_size=world_size,
        shard_by="block" if shuffle in ("block", "buffer") else "window",
        uneven=uneven,
    )
    return ordering.of(data)


class Fastpipe:
    """The sampler of fastpipe's order.

    Args:
        folder: for a file.
        counts: rows of each block.
        shuffle: which order.
        shuffle_buffer: rows of a window, pool or buffer.
        batch_size: rows a batch.
    """

    def __init__(self, folder: Path, counts: Sequence[int], shuffle: str, shuffle_buffer: int, batch_size: int) -> None:
        self._data = dataset(write(folder / "rows.avro", counts))
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self._settings = {"shuffle": shuffle, "shuffle_buffer": shuffle_buffer, "batch_size": batch_size}
        self._order = (0, order(self._data, seed=0, **self._settings))

    def __call__(self, seed: int, epoch: int) -> np.ndarray:
        if self._order[0] != seed:
            self._order = (seed, order(self._data, seed=seed, **self._settings))
        rows, steps = self._order[1].rows, range(self._order[1].steps)
        blocks, records = zip(*(rows(epoch, step) for step in steps), strict=True)
        return self._firsts[np.concatenate(blocks)] + np.concatenate(records)


def blocks_of(rows: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """The block of each row."""
    return np.repeat(np.arange(len(counts)), counts)[rows]


def generator(*key: int) -> np.random.Generator:
    """The randomness of twins, and of what tests draw for themselves."""
    return np.random.default_rng(key)


# --- Exact frequencies, and those of places ---


def frequencies(sampler: Sampler, expected: Mapping[Hashable, Fraction], samples: int = 8_000) -> float:
    """Whether orders are as frequent as they should be.

    Null distribution: of Pearson's statistic over independent samples, chi-square with a degree of freedom less than
    there are outcomes. Half of the samples are epochs of few seeds, half are seeds.

    Args:
        sampler: of short orders.
        expected: the probability of each order, as a tuple of its rows.
        samples: how many; each outcome is to be expected 20 times at least.
    """
    assert sum(expected.values()) == 1
    assert min(expected.values()) * samples >= 20
    half = samples // 2
    seen = Counter(tuple(sampler(i % 4, 100 + i // 4).tolist()) for i in range(half))
    seen += Counter(tuple(sampler(10 + i, i % 3).tolist()) for i in range(half))
    if not seen.keys() <= expected.keys():
        return 0.0
    statistic = sum((seen[outcome] - 2 * half * p) ** 2 / (2 * half * p) for outcome, p in expected.items())
    return two_sided(float(statistic), len(expected) - 1)


def two_sided(statistic: float, freedom: float) -> float:
    """The p-value of a chi-square statistic."""
    return min(1.0, 2 * min(stats.chi2.sf(statistic, freedom), stats.chi2.cdf(statistic, freedom)))


def places(orders: np.ndarray, bins: int) -> float:
    """Whether each stands equally often at each place.

    Null distribution: a uniform permutation of `n`, counted in groups of `a_i` things and `b_j` places, has
    covariances `(D_a - a a' / n) (x) (D_b - b b' / n) / (n - 1)`; so with `N` of them
    `(n - 1) / N * sum((x_ij - N a_i b_j / n)^2 / (a_i b_j))` is, for many, chi-square with `(bins - 1)^2` degrees.

    Args:
        orders: [N, n], permutations of `0..n-1`.
        bins: groups of things, and of places.
    """
    return _scatter([np.sum([_table(order, bins) for order in orders], axis=0)], len(orders), orders.shape[1])


def crossings(first: np.ndarray, second: np.ndarray, bins: int) -> float:
    """Whether places in one order say nothing of those in another.

    Null distribution: the way from a place in one to that of the same thing in the other is a uniform permutation, so
    the statistic of `places` is chi-square for each pair by itself, and so is its sum.

    Args:
        first: [N, n], permutations of `0..n-1`.
        second: the others of each pair.
        bins: groups of places in either.
    """
    ways = [np.argsort(b)[a] for a, b in zip(first, second, strict=True)]
    return _scatter([_table(way, bins) for way in ways], 1, first.shape[1])


def _table(order: np.ndarray, bins: int) -> np.ndarray:
    """How many of which group stand where."""
    cells = _groups(len(order), bins) * bins + _groups(len(order), bins)[order]
    return np.bincount(cells, minlength=bins * bins).reshape(bins, bins)


def _groups(n: int, bins: int) -> np.ndarray:
    return np.arange(n) * bins // n


def _scatter(tables: Sequence[np.ndarray], each: int, n: int) -> float:
    """The p-value of tables that are sums of `each` permutations."""
    sizes = np.bincount(_groups(n, len(tables[0])))
    weights = np.outer(sizes, sizes)
    total = sum(((table - each * weights / n) ** 2 / weights).sum() for table in tables)
    return two_sided(total * (n - 1) / each, len(tables) * (len(sizes) - 1) ** 2)


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Whether ranks in one order correlate with those in another.

    Null distribution: Spearman's coefficient of independent orders of many things is normal with variance
    `1 / (n - 1)`; those of all pairs are compared with that, after Kolmogorov and Smirnov.
    """
    n = first.shape[1]
    ranks = [(np.argsort(orders, axis=1) - (n - 1) / 2) / np.sqrt((n**2 - 1) / 12) for orders in (first, second)]
    return stats.kstest((ranks[0] * ranks[1]).mean(axis=1) * np.sqrt(n - 1), "norm").pvalue


# --- Draws ---
#
# An order tells which draws made it. Given all draws before, each of the things that could come next has a known
# probability; they stand side by side in the unit interval, and a number drawn out of that of the one that came is
# uniform and independent of all before. (A probability integral transform, randomized.) So the rows of one order depend
# on each other, but these numbers don't, and simple tests hold for them exactly.


def uniform(draws: np.ndarray) -> float:
    """Whether draws are uniform, after Kolmogorov and Smirnov, whose distribution is exact for independent ones."""
    return stats.kstest(draws, "uniform").pvalue


def independent(first: np.ndarray, second: np.ndarray, bins: int = 12) -> float:
    """Whether pairs of draws are uniform in the square.

    Null distribution: of Pearson's statistic, chi-square with `bins^2 - 1` degrees.
    """
    cells = (first * bins).astype(int) * bins + (second * bins).astype(int)
    expected = len(cells) / bins**2
    assert expected >= 10
    return two_sided(((np.bincount(cells, minlength=bins**2) - expected) ** 2).sum() / expected, bins**2 - 1)


def successive(draws: np.ndarray) -> float:
    """Whether draws are independent of those before, in pairs that have no draw in common."""
    half = len(draws) // 2 * 2
    return independent(draws[:half:2], draws[1:half:2])


def window_draws(rows: np.ndarray, n: int, random: np.random.Generator) -> np.ndarray:
    """The draws of windows of `n` rows: which of those that are left comes next."""
    low, size = [], []
    for window in np.split(rows, range(n, len(rows), n)):
        low += [int((window[i:] < row).sum()) for i, row in enumerate(window)]
        size += range(len(window), 0, -1)
    return _within(np.array(low), np.ones(len(low)), np.array(size), random)


def buffer_draws(rows: np.ndarray, n: int, random: np.random.Generator) -> np.ndarray:
    """The draws of a buffer of `n` rows: which of those in it comes next.

    Raises:
        ValueError: if the row that comes isn't in the buffer.
    """
    waiting = list(range(min(n, len(rows))))
    low, size = [], []
    for row in rows.tolist():
        low.append(waiting.index(row))
        size.append(len(waiting))
        waiting.remove(row)
        if len(low) + n <= len(rows):
            waiting.append(len(low) + n - 1)
    return _within(np.array(low), np.ones(len(low)), np.array(size), random)


def block_draws(rows: np.ndarray, counts: Sequence[int], n: int, random: np.random.Generator) -> np.ndarray:
    """The draws of a pool of at least `n` rows: from which block the next record comes. Blocks stand side by side by
    what they have left, so that it shows if small ones come too often.

    Raises:
        ValueError: if a block isn't in the pool, or the row isn't its next.
    """
    firsts = [0, *accumulate(counts)]
    pool: dict[int, int] = {}
    entered = 0
    low, width, size = [], [], []
    for row, number in zip(rows.tolist(), blocks_of(rows, counts).tolist(), strict=True):
        while sum(pool.values()) < n and entered < len(counts):
            pool[entered] = counts[entered]
            entered += 1
        if number not in pool or row != firsts[number + 1] - pool[number]:
            raise ValueError(f"row {row} can't come here: it isn't the next one of a block in the pool")
        here = (pool[number], number)
        low.append(sum(left for block, left in pool.items() if (left, block) < here))
        width.append(pool[number])
        size.append(sum(pool.values()))
        pool[number] -= 1
        if pool[number] == 0:
            del pool[number]
    return _within(np.array(low), np.array(width), np.array(size), random)


def _within(low: np.ndarray, width: np.ndarray, size: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return (low + width * random.random(len(low))) / size


# --- Pairs of orders that might depend on each other ---

PAIRS: dict[str, tuple[Callable[[int, int], tuple[int, int]], Callable[[int, int], tuple[int, ...]]]] = {
    "epochs": (lambda seed, epoch: (seed, epoch + 1), lambda seed, epoch: (seed,)),
    "seeds": (lambda seed, epoch: (seed + 1, epoch), lambda seed, epoch: (epoch,)),
    "sums": (lambda seed, epoch: (seed + 1, epoch - 1), lambda seed, epoch: (seed + epoch,)),
    "swapped": (lambda seed, epoch: (epoch, seed), lambda seed, epoch: (min(seed, epoch), max(seed, epoch))),
    "far": (lambda seed, epoch: (seed + 2**32, epoch), lambda seed, epoch: (seed % 2**32, epoch)),
}
"""By name: another seed and epoch that a careless key confuses with given ones, and that key."""


def pairs(sampler: Sampler, which: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of orders, no order twice."""
    points = [(1000 + 3 * i, 3 + 3 * (i % 7)) for i in range(samples)]
    partner = PAIRS[which][0]
    return np.array([sampler(*point) for point in points]), np.array([sampler(*partner(*point)) for point in points])
