"""Window order: blocks are in random order, and windows are uniform permutations, for any seed, epoch and window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest

from order_statistics import (
    ALPHA,
    PAIRS,
    Fastpipe,
    Sampler,
    crossings,
    frequencies,
    generator,
    independent,
    pairs,
    places,
    rank_correlation,
    successive,
    uniform,
    window_draws,
)

# --- Twins: samplers with a known flaw ---


def cut(rows: np.ndarray, n: int) -> list[np.ndarray]:
    return np.split(rows, range(n, len(rows), n))


def in_random_blocks(counts: Sequence[int], random: np.random.Generator) -> np.ndarray:
    """Returns the rows of blocks in random order."""
    rows = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    return np.concatenate([rows[block] for block in random.permutation(len(counts))])


def naive(counts: Sequence[int], n: int) -> Sampler:
    """Swaps each position with any position, instead of one that is still open."""

    def sample(seed: int, epoch: int) -> np.ndarray:
        random = generator(seed, epoch)
        windows = cut(in_random_blocks(counts, random), n)
        for window in windows:
            for i, j in enumerate(random.integers(len(window), size=len(window))):
                window[[i, j]] = window[[j, i]]
        return np.concatenate(windows)

    return sample


def blocks_in_file_order(counts: Sequence[int], n: int) -> Sampler:
    """Shuffles windows, but not blocks."""

    def sample(seed: int, epoch: int) -> np.ndarray:
        random = generator(seed, epoch)
        return np.concatenate([random.permutation(window) for window in cut(np.arange(sum(counts)), n)])

    return sample


def same_in_each_window(counts: Sequence[int], n: int) -> Sampler:
    """Shuffles all windows with the same draws."""

    def sample(seed: int, epoch: int) -> np.ndarray:
        windows = cut(in_random_blocks(counts, generator(seed, epoch)), n)
        return np.concatenate([generator(seed, epoch, 1).permutation(window) for window in windows])

    return sample


def same_for_blocks_and_rows(counts: Sequence[int], n: int) -> Sampler:
    """Shuffles blocks with the same draws as the first window."""

    def sample(seed: int, epoch: int) -> np.ndarray:
        windows = cut(in_random_blocks(counts, generator(seed, epoch)), n)
        return np.concatenate([generator(seed, epoch).permutation(window) for window in windows])

    return sample


def rotated(counts: Sequence[int], n: int) -> Sampler:
    """Begins at a random row, so each row is equally often at each position, but only rotates."""

    def sample(seed: int, epoch: int) -> np.ndarray:
        rows = np.arange(sum(counts))
        return np.roll(rows, generator(seed, epoch).integers(len(rows)))

    return sample


# --- One window or a few ---


def all_orders(counts: Sequence[int], n: int) -> dict[Hashable, Fraction]:
    """Returns the probability of each order. All orders of blocks, and of the rows in a window, are equally likely."""
    rows = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    seen: Counter[Hashable] = Counter()
    for blocks in permutations(rows):
        windows = cut(np.concatenate(blocks), n)
        for order in product(*(permutations(window.tolist()) for window in windows)):
            seen[sum(order, ())] += 1
    return {order: Fraction(times, seen.total()) for order, times in seen.items()}


@pytest.mark.parametrize(
    ("counts", "n", "batch_size", "twin"),
    [
        ([5], 5, 5, naive),  # A single window.
        ([1] * 5, 1, 1, rotated),  # Windows of one row.
        ([1] * 4, 4, 2, same_for_blocks_and_rows),
        ([2, 0, 3], 5, 5, naive),
        ([2, 1, 1], 2, 1, blocks_in_file_order),
        ([1, 2, 2], 3, 3, blocks_in_file_order),  # Windows cut blocks.
        ([4], 2, 2, same_in_each_window),
    ],
)
def test_small_orders_have_the_right_frequencies(
    tmp_path: Path, counts: list[int], n: int, batch_size: int, twin: Callable[[Sequence[int], int], Sampler]
) -> None:
    """Checks the `frequencies` of all orders."""
    expected = all_orders(counts, n)
    assert frequencies(Fastpipe(tmp_path, counts, "window", n, batch_size), expected) > ALPHA
    assert frequencies(twin(counts, n), expected) < ALPHA


def test_rows_are_at_each_position_of_a_window(tmp_path: Path) -> None:
    """Checks `places` of 64 rows in one window, over 2,000 seeds."""

    def p(sampler: Sampler) -> float:
        return places(np.array([sampler(seed, 5) for seed in range(2000)]), 64)

    assert p(Fastpipe(tmp_path, [9, 1, 0, 30, 4, 20], "window", 64, 16)) > ALPHA
    # The twin has one block, since the random order of several blocks would hide the flaw.
    assert p(naive([64], 64)) < ALPHA


@pytest.mark.parametrize("twin", [rotated, blocks_in_file_order])
def test_blocks_are_at_each_position_of_an_epoch(tmp_path: Path, twin: Callable[[Sequence[int], int], Sampler]) -> None:
    """Checks `places` of 240 blocks of one row, in windows of four, over 500 epochs."""
    counts = [1] * 240

    def p(sampler: Sampler) -> float:
        return places(np.array([sampler(3, epoch) for epoch in range(500)]), 30)

    assert p(Fastpipe(tmp_path, counts, "window", 4, 4)) > ALPHA
    assert p(twin(counts, 4)) < ALPHA


def test_draws_of_windows_are_uniform_and_independent(tmp_path: Path) -> None:
    """Checks that draws are `uniform`, and `independent` of the draw before and the draw one window before.

    Uses 40,000 rows in windows of 20.
    """
    n = 20

    def p(sampler: Sampler) -> list[float]:
        random = generator(1)
        draws = np.array([window_draws(sampler(seed, 0), n, random) for seed in range(10)])
        here, behind = draws.reshape(-1, 2, n).swapaxes(0, 1).reshape(2, -1)
        return [uniform(draws.ravel()), successive(draws.ravel()), independent(here, behind)]

    assert min(p(Fastpipe(tmp_path, [4000], "window", n, n))) > ALPHA
    assert p(naive([4000], n))[0] < ALPHA
    assert p(same_in_each_window([4000], n))[2] < ALPHA


# --- Epochs and seeds ---


def keyed_by(counts: Sequence[int], key: Callable[[int, int], tuple[int, ...]]) -> Sampler:
    """Returns valid orders, but orders with the same key are equal."""
    return lambda seed, epoch: generator(*key(seed, epoch)).permutation(sum(counts))


@pytest.mark.parametrize("which", PAIRS)
def test_epochs_and_seeds_are_independent(tmp_path: Path, which: str) -> None:
    """Checks `crossings` and `rank_correlation` of 200 pairs of orders of 400 rows, all in one window."""
    counts = [1, 99] * 4

    def p(sampler: Sampler) -> tuple[float, float]:
        first, second = pairs(sampler, which, 200)
        return crossings(first, second, 8), rank_correlation(first, second)

    assert min(p(Fastpipe(tmp_path, counts, "window", 400, 50))) > ALPHA
    assert max(p(keyed_by(counts, PAIRS[which][1]))) < ALPHA
