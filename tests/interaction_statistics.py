"""Data, flawed samplers and p-values for the statistical tests of sampled negatives.

Tests follow the scheme of `order_statistics`: the p-value of a statistic must be plausible for fastpipe's draws, and
implausible for a twin with a flaw. Seeds are fixed, so each test always passes or always fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from scipy import stats

import fastpipe
from fastpipe.recsys import Interactions

ALPHA = 1e-3
"""Threshold for tests of the uniformity of many p-values. Other p-values are Bonferroni-corrected."""

USERS, ITEMS = 300, 250

Points: TypeAlias = tuple[np.ndarray, np.ndarray]
Sampler: TypeAlias = Callable[[int, int], Iterator[Points]]
"""Yields the users and items of all negatives for a seed and an epoch."""


def data(users: int = USERS, items: int = ITEMS, seed: int = 9) -> Interactions:
    """Returns users of all kinds: most have few positives, some have a quarter of the items, almost all, or none.

    Popular items have low indices, so the neighbors of a positive are likely to be positives.
    """
    random = np.random.default_rng(seed)
    popular = 1 / (20 + np.arange(items))
    counts = random.integers(items // 12, items // 4, users)
    counts[: users // 10] = random.integers(items // 4, items - 20, users // 10)
    counts[:3] = items - 20, items - 10, items // 4
    counts[3:9] = 0
    # The last item has few positives, so the tests can detect that a sampler never draws it.
    chosen = [random.choice(items - 1, count, replace=False, p=popular[:-1] / popular[:-1].sum()) for count in counts]
    return Interactions.from_arrays(
        np.repeat(np.arange(users), counts), np.concatenate(chosen), users=range(users), items=range(items)
    )


def seen(data: Interactions) -> np.ndarray:
    """Returns the positives as a bool array of shape `[users, items]`."""
    table = np.zeros((data.num_users, data.num_items), bool)
    table[np.repeat(np.arange(data.num_users), np.diff(data.indptr)), data.indices] = True
    return table


class Fastpipe:
    """fastpipe's sampler: the negatives of batches that are read."""

    def __init__(self, data: Interactions, **options: Any) -> None:
        self._data = data
        self._options = {"batch_size": 1 << 16, "shuffle": False} | options
        self._reader = fastpipe.recsys.read_interactions(data, seed=0, **self._options)

    def __call__(self, seed: int, epoch: int) -> Iterator[Points]:
        if self._reader.seed != seed:
            self._reader = fastpipe.recsys.read_interactions(self._data, seed=seed, **self._options)
        self._reader.set_epoch(epoch)
        for batch in self._reader:
            negative = batch["label"] == 0
            yield batch["user"][negative], batch["item"][negative]


class Twin:
    """A flawed sampler. A subclass draws for one user.

    Args:
        data: The positives.
        negatives: Number of negatives per positive.
    """

    def __init__(self, data: Interactions, negatives: int) -> None:
        self._data = data
        self._negatives = negatives

    def __call__(self, seed: int, epoch: int) -> Iterator[Points]:
        random = np.random.default_rng([seed, epoch])
        items = self._data.num_items
        for user, positives in enumerate(np.split(self._data.indices.astype(int), self._data.indptr[1:-1])):
            if len(positives):
                unseen = np.setdiff1d(np.arange(items), positives)
                drawn = self.draw(random, positives, unseen, items, len(positives) * self._negatives)
                yield np.full(len(drawn), user), drawn

    def draw(
        self, random: np.random.Generator, positives: np.ndarray, unseen: np.ndarray, items: int, count: int
    ) -> np.ndarray:
        """Draws `count` negatives of a user."""
        return random.choice(unseen, count)


class Truncating(Twin):
    """Draws more items than it needs, drops positives, and keeps the lowest item indices."""

    def draw(
        self, random: np.random.Generator, positives: np.ndarray, unseen: np.ndarray, items: int, count: int
    ) -> np.ndarray:
        more = random.choice(unseen, count + count // 10 + 5)
        return np.sort(more)[:count]


class NeverLast(Twin):
    """Never draws the last item."""

    def draw(
        self, random: np.random.Generator, positives: np.ndarray, unseen: np.ndarray, items: int, count: int
    ) -> np.ndarray:
        return random.choice(unseen[unseen < items - 1], count)


class Probing(Twin):
    """Replaces a positive by the next unseen item."""

    def draw(
        self, random: np.random.Generator, positives: np.ndarray, unseen: np.ndarray, items: int, count: int
    ) -> np.ndarray:
        return unseen[np.searchsorted(unseen, random.integers(0, items, count)) % len(unseen)]


class Careless(Twin):
    """Keeps a positive that is drawn twice in a row."""

    def draw(
        self, random: np.random.Generator, positives: np.ndarray, unseen: np.ndarray, items: int, count: int
    ) -> np.ndarray:
        drawn = random.integers(0, items, count)
        return np.where(np.isin(drawn, positives), random.integers(0, items, count), drawn)


def tally(sampler: Sampler, data: Interactions, negatives: int, seed: int = 0) -> np.ndarray:
    """Reads epochs until there are `negatives` draws. Returns their counts as int64 `[users, items]`."""
    counts = np.zeros((data.num_users, data.num_items), np.int64)
    epoch = 0
    while counts.sum() < negatives:
        for users, items in sampler(seed, epoch):
            pairs = users.astype(np.int64) * data.num_items + items
            counts += np.bincount(pairs, minlength=counts.size).reshape(counts.shape)
        epoch += 1
    return counts


class Fairness(NamedTuple):
    """p-values of counts of draws.

    Attributes:
        users: Kolmogorov-Smirnov test that the p-values of users' chi-square statistics are uniform.
        deciles: Test that the deciles of the items have their expected counts: the minimum of ten p-values, times ten.
        last: Test that the last item has its expected count.
    """

    users: float
    deciles: float
    last: float


def fairness(counts: np.ndarray, seen: np.ndarray, weights: np.ndarray | None = None) -> Fairness:
    """Tests counts of independent draws against their probabilities.

    Null distributions: A user's draws are multinomial, so Pearson's statistic is chi-square with one degree of freedom
    less than there are items. That approximation fails for small counts, so users with an expected count below 5 are
    left out. The draws of some items by all users are a sum of many independent binomials, which is approximately
    normal.

    Args:
        counts: Counts of shape `[users, items]`, 0 for positives.
        seen: The positives as bool `[users, items]`.
        weights: Weights of the items. None means equal weights.
    """
    assert not counts[seen].any()
    chance = np.where(seen, 0.0, 1.0 if weights is None else weights)
    chance = chance / chance.sum(axis=1, keepdims=True)
    draws = counts.sum(axis=1, keepdims=True)
    expected = draws * chance
    some = (draws[:, 0] > 0) & ((expected >= 5) | (chance == 0)).all(axis=1)
    assert some.sum() > counts.shape[0] / 2
    tested = (expected > 0)[some]
    pearson = np.divide((counts - expected) ** 2, expected, out=np.zeros(counts.shape), where=expected > 0)[some].sum(1)
    p_values = stats.chi2.sf(pearson, tested.sum(axis=1) - 1)
    parts = np.array_split(np.arange(counts.shape[1]), 10)
    of_parts = [_normal(counts[:, part], draws[:, 0], chance[:, part]) for part in parts]
    return Fairness(
        users=float(stats.kstest(p_values, "uniform").pvalue),
        deciles=min(1.0, 10 * min(of_parts)),
        last=_normal(counts[:, -1:], draws[:, 0], chance[:, -1:]),
    )


def _normal(counts: np.ndarray, draws: np.ndarray, chance: np.ndarray) -> float:
    """Returns the two-sided p-value of all users' draws of some items."""
    p = chance.sum(axis=1)
    mean, variance = (draws * p).sum(), (draws * p * (1 - p)).sum()
    if variance == 0:  # No draw of these items is possible.
        return float(counts.sum() == mean)
    return float(2 * stats.norm.sf(abs(counts.sum() - mean) / np.sqrt(variance)))


def fairness_of_sets(counts: np.ndarray, seen: np.ndarray, size: int) -> float:
    """Tests counts of draws without replacement: sets of `size` different items, each set equally likely.

    Null distribution: Of `N` sets out of `C` items an item is in `n / C` of them. The covariance of two items is that
    of drawing without replacement. So `(C - 1) / (N n (1 - n / C)) * sum((x - N n / C)^2)` is, for many sets,
    chi-square with `C - 1` degrees of freedom.

    Args:
        counts: Counts of shape `[users, items]`.
        seen: The positives as bool `[users, items]`.
        size: Number of items in a set.
    """
    assert not counts[seen].any()
    p_values = []
    for count, unseen in zip(counts, ~seen, strict=True):
        sets, items = count.sum() / size, int(unseen.sum())
        if sets * size / items >= 5 and items > size:
            squares = ((count[unseen] - sets * size / items) ** 2).sum()
            p_values.append(stats.chi2.sf((items - 1) / (sets * size * (1 - size / items)) * squares, items - 1))
    assert len(p_values) > len(counts) / 2
    return float(stats.kstest(p_values, "uniform").pvalue)


def uniforms(data: Interactions, points: Points, seed: int) -> np.ndarray:
    """Maps draws to numbers that are uniform and independent if the draws are: ranks among the user's unseen items.

    Args:
        data: The positives.
        points: Users and items of the draws.
        seed: Seed of the random part within a rank.
    """
    unseen = ~seen(data)
    ranks = np.cumsum(unseen, axis=1) - 1
    users, items = points
    within = np.random.default_rng(seed).random(len(users))
    return (ranks[users, items] + within) / unseen.sum(axis=1)[users]
