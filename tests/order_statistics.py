"""Files of blocks, their orders, and p-values for the statistical tests of orders.

All tests of randomness have the same form. A function computes the p-value of a *sampler*. It must be above `ALPHA` for
fastpipe's order, and below `ALPHA` for a twin with a flaw. For a correct order a p-value is below `ALPHA` with
probability `ALPHA`. Seeds are fixed, so each test always passes or always fails. Among some 50 p-values, about one in
200 choices of seeds yields one that small. None of the seeds was chosen for its result.

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
from fastpipe._files._in_memory_files import lowered
from fastpipe._reader.ordering import Ordering
from fastpipe.specs import Features

ALPHA = 1e-4

Sampler: TypeAlias = Callable[[int, int], np.ndarray]
"""Returns the order of an epoch from a seed and an epoch, as row indices in file order."""

# --- Orders ---


def write(path: Path, counts: Sequence[int], first: int = 0) -> str:
    """Writes a file of blocks with these row counts. Rows are consecutive ints that start at `first`."""
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
    on_uneven: str = "drop",
) -> _fastpipe.Order:
    """Returns an order, with the default way of sharding between ranks."""
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
        on_uneven=on_uneven,
    )
    return ordering.of(data)


class Fastpipe:
    """The sampler of fastpipe's order.

    Args:
        folder: Folder for a file.
        counts: Number of rows in each block.
        shuffle: The order.
        shuffle_buffer: Number of rows in a window, pool or buffer.
        batch_size: Number of rows in a batch.
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
    """Returns the block of each row."""
    return np.repeat(np.arange(len(counts)), counts)[rows]


def generator(*key: int) -> np.random.Generator:
    """Returns the generator for twins and for the tests' own draws."""
    return np.random.default_rng(key)


# --- Exact frequencies of orders and of places ---


def frequencies(sampler: Sampler, expected: Mapping[Hashable, Fraction], samples: int = 8_000) -> float:
    """Tests whether orders have their expected frequencies.

    Null distribution: Pearson's statistic over independent samples is chi-square, with one degree of freedom less than
    there are outcomes. Half of the samples are epochs of a few seeds, the other half are different seeds.

    Args:
        sampler: A sampler of short orders.
        expected: The probability of each order, as a tuple of its rows.
        samples: Number of samples. Each outcome must be expected at least 20 times.
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
    """Returns the two-sided p-value of a chi-square statistic."""
    return min(1.0, 2 * min(stats.chi2.sf(statistic, freedom), stats.chi2.cdf(statistic, freedom)))


def places(orders: np.ndarray, bins: int) -> float:
    """Tests whether each row is equally often at each place.

    Null distribution: A uniform permutation of `n`, counted in groups of `a_i` rows and `b_j` places, has covariances
    `(D_a - a a' / n) (x) (D_b - b b' / n) / (n - 1)`. So with many permutations `N`, `(n - 1) / N * sum((x_ij - N a_i
    b_j / n)^2 / (a_i b_j))` is chi-square with `(bins - 1)^2` degrees of freedom.

    Args:
        orders: [N, n], permutations of `0..n-1`.
        bins: Number of groups of rows, and of places.
    """
    return _scatter([np.sum([_table(order, bins) for order in orders], axis=0)], len(orders), orders.shape[1])


def crossings(first: np.ndarray, second: np.ndarray, bins: int) -> float:
    """Tests whether places in one order are independent of places in another.

    Null distribution: The map from a row's place in one order to its place in the other is a uniform permutation. So
    the statistic of `places` is chi-square for each pair, and so is the sum.

    Args:
        first: [N, n], permutations of `0..n-1`.
        second: The second order of each pair.
        bins: Number of groups of places.
    """
    ways = [np.argsort(b)[a] for a, b in zip(first, second, strict=True)]
    return _scatter([_table(way, bins) for way in ways], 1, first.shape[1])


def _table(order: np.ndarray, bins: int) -> np.ndarray:
    """Counts the rows of each group in each group of places."""
    cells = _groups(len(order), bins) * bins + _groups(len(order), bins)[order]
    return np.bincount(cells, minlength=bins * bins).reshape(bins, bins)


def _groups(n: int, bins: int) -> np.ndarray:
    return np.arange(n) * bins // n


def _scatter(tables: Sequence[np.ndarray], each: int, n: int) -> float:
    """Returns the p-value of tables that are sums of `each` permutations."""
    sizes = np.bincount(_groups(n, len(tables[0])))
    weights = np.outer(sizes, sizes)
    total = sum(((table - each * weights / n) ** 2 / weights).sum() for table in tables)
    return two_sided(total * (n - 1) / each, len(tables) * (len(sizes) - 1) ** 2)


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Tests whether ranks in one order correlate with ranks in another.

    Null distribution: Spearman's coefficient of long independent orders is normal with variance `1 / (n - 1)`. A
    Kolmogorov-Smirnov test compares the coefficients of all pairs with that.
    """
    n = first.shape[1]
    ranks = [(np.argsort(orders, axis=1) - (n - 1) / 2) / np.sqrt((n**2 - 1) / 12) for orders in (first, second)]
    return stats.kstest((ranks[0] * ranks[1]).mean(axis=1) * np.sqrt(n - 1), "norm").pvalue


# --- Draws ---
#
# An order reveals the draws that made it. Given all earlier draws, each possible next row has a known probability and
# thus an interval within the unit interval. A number drawn from the interval of the actual row is uniform and
# independent of all earlier numbers (a randomized probability integral transform). So the rows of one order depend on
# each other, but these numbers don't, and simple tests hold for them exactly.


def uniform(draws: np.ndarray) -> float:
    """Tests whether draws are uniform, with the Kolmogorov-Smirnov test, which is exact for independent draws."""
    return stats.kstest(draws, "uniform").pvalue


def independent(first: np.ndarray, second: np.ndarray, bins: int = 12) -> float:
    """Tests whether pairs of draws are uniform in the unit square.

    Null distribution: Pearson's statistic is chi-square with `bins^2 - 1` degrees of freedom.
    """
    cells = (first * bins).astype(int) * bins + (second * bins).astype(int)
    expected = len(cells) / bins**2
    assert expected >= 10
    return two_sided(((np.bincount(cells, minlength=bins**2) - expected) ** 2).sum() / expected, bins**2 - 1)


def successive(draws: np.ndarray) -> float:
    """Tests whether successive draws are independent, using disjoint pairs."""
    half = len(draws) // 2 * 2
    return independent(draws[:half:2], draws[1:half:2])


def window_draws(rows: np.ndarray, n: int, random: np.random.Generator) -> np.ndarray:
    """Returns the draws of windows of `n` rows: the next row among those left in the window."""
    low, size = [], []
    for window in np.split(rows, range(n, len(rows), n)):
        low += [int((window[i:] < row).sum()) for i, row in enumerate(window)]
        size += range(len(window), 0, -1)
    return _within(np.array(low), np.ones(len(low)), np.array(size), random)


def buffer_draws(rows: np.ndarray, n: int, random: np.random.Generator) -> np.ndarray:
    """Returns the draws of a buffer of `n` rows: the next row among those in the buffer.

    Raises:
        ValueError: If the next row isn't in the buffer.
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
    """Returns the draws of a pool of at least `n` rows: the block of the next record.

    Blocks are ordered by the number of their remaining rows, so the tests detect if small blocks are drawn too often.

    Raises:
        ValueError: If a block isn't in the pool, or the row isn't its next one.
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
            raise ValueError(f"row {row} cannot be next: it is not the next row of a block in the pool")
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
"""For each name, a function that returns another seed and epoch, and the careless key that confuses the two."""


def pairs(sampler: Sampler, which: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of distinct orders."""
    points = [(1000 + 3 * i, 3 + 3 * (i % 7)) for i in range(samples)]
    partner = PAIRS[which][0]
    return np.array([sampler(*point) for point in points]), np.array([sampler(*partner(*point)) for point in points])
