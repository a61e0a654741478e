"""The order of more than 65,536 blocks is computed, not drawn. No test here distinguishes it from a random order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

import order_model as model
from order_statistics import ALPHA, Fastpipe, Sampler, crossings, generator, places, two_sided

MANY = 70_000
"""Number of blocks, with one row each. With windows of one row, the order of blocks is the order of rows."""


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Returns the orders of two epochs with each of two seeds."""
    return four(Fastpipe(tmp_path_factory.mktemp("many"), [1] * MANY, "window", 1, 1))


def four(sampler: Sampler) -> np.ndarray:
    return np.array([sampler(seed, epoch) for seed in (0, 1) for epoch in (0, 1)])


# --- Twins: samplers with a known flaw ---


def by_multiplication(seed: int, epoch: int) -> np.ndarray:
    """Spreads the blocks as evenly as possible."""
    factor, start = generator(seed, epoch).integers(MANY // 70, size=2)
    return (np.arange(MANY) * (70 * int(factor) + 11) + start) % MANY


def in_few_rounds(seed: int, epoch: int) -> np.ndarray:
    """Uses a network with too few rounds to mix well."""
    return model.keyed(MANY, seed, epoch, rounds=2)


def in_tens(seed: int, epoch: int) -> np.ndarray:
    """Keeps every ten blocks together."""
    tens = generator(seed, epoch).permutation(MANY // 10)
    return (tens[:, np.newaxis] * 10 + np.arange(10)).ravel()


# --- One order ---


def each_place(orders: np.ndarray) -> float:
    """Tests `places` in 50 groups, for all orders together and for each order separately."""
    by_itself = crossings(np.tile(np.arange(MANY), (len(orders), 1)), orders, 50)
    return min(1.0, 2 * min(by_itself, places(orders, 50)))


def differences(orders: np.ndarray) -> float:
    """Tests the distances from each block to the next, around the end.

    Null distribution: each distance from 1 to `n - 1` has probability `1 / (n - 1)`. Distances of one order depend on
    each other so little (a correlation of the order of `1 / n^2`) that Pearson's statistic of 500 groups is chi-square.
    """
    found = np.diff(orders, axis=1).ravel() % MANY - 1
    cells = np.bincount(found * 500 // (MANY - 1), minlength=500)
    expected = np.bincount(np.arange(MANY - 1) * 500 // (MANY - 1)) * (len(found) / (MANY - 1))
    return two_sided(((cells - expected) ** 2 / expected).sum(), 499)


def neighbors(orders: np.ndarray) -> float:
    """Tests whether blocks of one group follow blocks of another too often, in pairs that share no block.

    Null distribution: given the first and the second blocks of all pairs, every pairing is equally likely. So Pearson's
    statistic, slightly reduced to account for that, is chi-square with 29^2 degrees of freedom for each order.
    """
    total = 0.0
    for order in orders * 30 // MANY:
        table = np.bincount(order[::2] * 30 + order[1::2], minlength=900).reshape(30, 30)
        total += stats.chi2_contingency(table).statistic * (1 - 2 / MANY)
    return two_sided(total, len(orders) * 29**2)


@pytest.mark.parametrize(
    ("p", "twins"),
    [
        (each_place, [by_multiplication, in_few_rounds, in_tens]),
        (differences, [by_multiplication, in_few_rounds, in_tens]),
        (neighbors, [by_multiplication, in_few_rounds, in_tens]),
    ],
)
def test_orders_are_random(orders: np.ndarray, p: Callable[[np.ndarray], float], twins: list[Sampler]) -> None:
    """Checks the null hypothesis that each function of a p-value documents."""
    assert p(orders) > ALPHA
    for twin in twins:
        assert p(four(twin)) < ALPHA


# --- Epochs ---


def overlap(first: np.ndarray, second: np.ndarray, bins: int) -> float:
    """Tests whether windows with the same index share more or fewer blocks than expected.

    Null distribution: as in `places`, the number of shared blocks has mean `n / bins` and variance `(n / bins)^2 (bins
    - 1) / (n - 1)`. The sum over pairs is normal.
    """
    group = np.arange(MANY) * bins // MANY
    shared = sum((group[np.argsort(a)] == group[np.argsort(b)]).sum() for a, b in zip(first, second, strict=True))
    deviation = np.sqrt(len(first) * (bins - 1) / (MANY - 1)) * MANY / bins
    return 2 * stats.norm.sf(abs(shared - len(first) * MANY / bins) / deviation)


def test_epochs_are_independent(tmp_path) -> None:
    """Checks `overlap` and `crossings` of 100 windows between successive epochs of 24."""

    def p(sampler: Sampler) -> tuple[float, float]:
        orders = np.array([sampler(9, epoch) for epoch in range(24)])
        return overlap(orders[:-1], orders[1:], 100), crossings(orders[:-1], orders[1:], 100)

    def every_second_again(seed: int, epoch: int) -> np.ndarray:
        return generator(seed, epoch // 2).permutation(MANY)

    assert min(p(Fastpipe(tmp_path, [1] * MANY, "window", 700, 700))) > ALPHA
    assert max(p(every_second_again)) < ALPHA
