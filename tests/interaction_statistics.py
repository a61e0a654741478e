"""What tests of sampled negatives share: data, samplers with flaws, and the p-values of what is drawn.

Tests have the form that `order_statistics` describes: what a function looks at must be as likely as chance allows for
fastpipe, and is not for a twin with a flaw. Seeds are fixed, so each test once and for all passes or fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from scipy import stats

import fastpipe
from fastpipe import Interactions

ALPHA = 1e-3
"""For the uniformity of many p-values. The others are held against that by Bonferroni."""

USERS, ITEMS = 300, 250

Points: TypeAlias = tuple[np.ndarray, np.ndarray]
Sampler: TypeAlias = Callable[[int, int], Iterator[Points]]
"""Yields, of a seed and an epoch, the users and items of all negatives."""


def data(users: int = USERS, items: int = ITEMS, seed: int = 9) -> Interactions:
    """Users of all kinds: most have seen few items, some most of them, some all but few, some none.

    Popular items have low numbers, so that a positive's neighbours are likely to be positives.
    """
    random = np.random.default_rng(seed)
    popular = 1 / (20 + np.arange(items))
    counts = random.integers(items // 12, items // 4, users)
    counts[: users // 10] = random.integers(items // 4, items - 20, users // 10)
    counts[:3] = items - 20, items - 10, items // 4
    counts[3:9] = 0
    # The last item is one that few have, so that leaving it out shows.
    chosen = [random.choice(items - 1, count, replace=False, p=popular[:-1] / popular[:-1].sum()) for count in counts]
    return Interactions.from_arrays(
        np.repeat(np.arange(users), counts), np.concatenate(chosen), users=range(users), items=range(items)
    )


def seen(data: Interactions) -> np.ndarray:
    """Who has what, bool `[users, items]`."""
    table = np.zeros((data.num_users, data.num_items), bool)
    table[np.repeat(np.arange(data.num_users), np.diff(data.indptr)), data.indices] = True
    return table


class Fastpipe:
    """The sampler of fastpipe: negatives of batches as they are read."""

    def __init__(self, data: Interactions, **options: Any) -> None:
        self._data = data
        self._options = {"batch_size": 1 << 16, "shuffle": False} | options
        self._reader = fastpipe.read_interactions(data, seed=0, **self._options)

    def __call__(self, seed: int, epoch: int) -> Iterator[Points]:
        if self._reader.seed != seed:
            self._reader = fastpipe.read_interactions(self._data, seed=seed, **self._options)
        self._reader.set_epoch(epoch)
        for batch in self._reader:
            negative = batch["label"] == 0
            yield batch["user"][negative], batch["item"][negative]


class Twin:
    """A sampler with a flaw. A subclass draws for one user.

    Args:
        data: the positives.
        negatives: for each positive.
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
        """So many negatives of a user."""
        return random.choice(unseen, count)


class Truncating(Twin):
    """Draws more than it needs, drops what is seen, and keeps the first in order of items."""

    def draw(
        self, random: np.random.Generator, positives: np.ndarray, unseen: np.ndarray, items: int, count: int
    ) -> np.ndarray:
        more = random.choice(unseen, count + count // 10 + 5)
        return np.sort(more)[:count]


class NeverLast(Twin):
    """Draws below the number of the last item."""

    def draw(
        self, random: np.random.Generator, positives: np.ndarray, unseen: np.ndarray, items: int, count: int
    ) -> np.ndarray:
        return random.choice(unseen[unseen < items - 1], count)


class Probing(Twin):
    """Takes the next unseen item where it draws a seen one."""

    def draw(
        self, random: np.random.Generator, positives: np.ndarray, unseen: np.ndarray, items: int, count: int
    ) -> np.ndarray:
        return unseen[np.searchsorted(unseen, random.integers(0, items, count)) % len(unseen)]


class Careless(Twin):
    """Takes what is still seen after two attempts."""

    def draw(
        self, random: np.random.Generator, positives: np.ndarray, unseen: np.ndarray, items: int, count: int
    ) -> np.ndarray:
        drawn = random.integers(0, items, count)
        return np.where(np.isin(drawn, positives), random.integers(0, items, count), drawn)


def tally(sampler: Sampler, data: Interactions, negatives: int, seed: int = 0) -> np.ndarray:
    """Reads as many epochs as there must be for this many negatives; counts them: int64 `[users, items]`."""
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
        users: of chi-square statistics of single users, whether those are uniform, after Kolmogorov and Smirnov.
        deciles: whether tenths of the items are drawn as often as they should be; the least of ten, times ten.
        last: whether the last item is.
    """

    users: float
    deciles: float
    last: float


def fairness(counts: np.ndarray, seen: np.ndarray, weights: np.ndarray | None = None) -> Fairness:
    """Holds independent draws against their probabilities.

    Null distributions: a user's draws are multinomial, so Pearson's statistic is chi-square with a degree of freedom
    less than there are items; users of whom some item is expected less than 5 times are left out, for whom it isn't.
    What all users drew of some items is a sum of independent binomials, of which there are so many that it is normal.

    Args:
        counts: `[users, items]`, none of them of a seen item.
        seen: bool `[users, items]`.
        weights: of the items; None if all are alike.
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
    """The two-sided p-value of how often all users together drew some items."""
    p = chance.sum(axis=1)
    mean, variance = (draws * p).sum(), (draws * p * (1 - p)).sum()
    if variance == 0:  # They can't be drawn.
        return float(counts.sum() == mean)
    return float(2 * stats.norm.sf(abs(counts.sum() - mean) / np.sqrt(variance)))


def fairness_of_sets(counts: np.ndarray, seen: np.ndarray, size: int) -> float:
    """The same of sets of `size` different items, each set as likely as any other: whether users' p-values are uniform.

    Null distribution: of `N` sets out of `C` items an item is in `n / C` of them, and the covariance of two is that of
    drawing without replacement; so `(C - 1) / (N n (1 - n / C)) * sum((x - N n / C)^2)` is, for many sets, chi-square
    with `C - 1` degrees.

    Args:
        counts: `[users, items]`.
        seen: bool `[users, items]`.
        size: items of a set.
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
    """Draws as numbers that are uniform and independent if the draws are, whatever their user: ranks among the unseen.

    Args:
        data: the positives.
        points: users and items of draws.
        seed: of the randomness within a rank.
    """
    unseen = ~seen(data)
    ranks = np.cumsum(unseen, axis=1) - 1
    users, items = points
    within = np.random.default_rng(seed).random(len(users))
    return (ranks[users, items] + within) / unseen.sum(axis=1)[users]
