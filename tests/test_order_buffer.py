"""Buffer order has the same distribution as `tf.data.Dataset.shuffle`."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Hashable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from order_statistics import (
    ALPHA,
    PAIRS,
    Fastpipe,
    Sampler,
    buffer_draws,
    frequencies,
    generator,
    independent,
    pairs,
    successive,
    uniform,
)

# --- Twins: samplers with a known flaw ---


def textbook(total: int, n: int, key: Callable[[int, int], tuple[int, ...]] = lambda *key: key) -> Sampler:
    """Returns a textbook shuffle buffer. Orders with the same key are equal."""

    def sample(seed: int, epoch: int) -> np.ndarray:
        random = generator(*key(seed, epoch)).random(total)
        waiting, out = list(range(min(n, total))), []
        for coming, word in enumerate(random, start=n):
            slot = int(word * len(waiting))
            out.append(waiting[slot])
            if coming < total:
                waiting[slot] = coming
            else:
                waiting[slot] = waiting[-1]
                waiting.pop()
        return np.array(out)

    return sample


def one_less(total: int, n: int) -> Sampler:
    """Never draws the row that entered the buffer last."""
    return textbook(total, n - 1)


def windows(total: int, n: int) -> Sampler:
    """Refills the buffer only when it is empty."""

    def sample(seed: int, epoch: int) -> np.ndarray:
        random = generator(seed, epoch)
        return np.concatenate([random.permutation(np.arange(i, min(i + n, total))) for i in range(0, total, n)])

    return sample


# --- Exact frequencies ---


def all_orders(total: int, n: int) -> dict[Hashable, Fraction]:
    """Returns the probability of each order.

    As `tf.data` documents it, a buffer is filled with `n` rows. A row is drawn at random, and the next row replaces it.
    """
    found: dict[Hashable, Fraction] = {}

    def draw(waiting: tuple[int, ...], coming: tuple[int, ...], out: tuple[int, ...], p: Fraction) -> None:
        for slot, row in enumerate(waiting):
            then = (*waiting[:slot], *coming[:1], *waiting[slot + 1 :])
            draw(then, coming[1:], (*out, row), p / len(waiting))
        if not waiting:
            found[out] = found.get(out, Fraction(0)) + p

    rows = tuple(range(total))
    draw(rows[:n], rows[n:], (), Fraction(1))
    return found


@pytest.mark.parametrize(
    ("counts", "n", "batch_size", "twin"),
    [
        ([6], 2, 6, windows),
        ([2, 0, 3], 3, 2, one_less),
        ([1, 1, 3], 4, 1, windows),
        ([5], 2**31, 3, one_less),
    ],
)
def test_small_orders_have_the_right_frequencies(
    tmp_path: Path, counts: list[int], n: int, batch_size: int, twin: Callable[[int, int], Sampler]
) -> None:
    """Checks the `frequencies` of all orders."""
    total = sum(counts)
    expected = all_orders(total, n)
    assert frequencies(Fastpipe(tmp_path, counts, "buffer", n, batch_size), expected) > ALPHA
    assert frequencies(twin(total, min(n, total)), expected) < ALPHA


# --- Many rows ---

TOTAL, BUFFER = 2000, 32


def test_draws_are_uniform_and_independent(tmp_path: Path) -> None:
    """Checks that the draws of 20,000 rows are `uniform` and successive draws are independent."""

    def p(sampler: Sampler) -> tuple[float, float]:
        random = generator(2)
        draws = np.concatenate([buffer_draws(sampler(seed, 1), BUFFER, random) for seed in range(10)])
        return uniform(draws), successive(draws)

    assert min(p(Fastpipe(tmp_path, [100] * 20, "buffer", BUFFER, 50))) > ALPHA
    assert p(one_less(TOTAL, BUFFER))[0] < ALPHA
    assert p(windows(TOTAL, BUFFER))[0] < ALPHA


@pytest.mark.parametrize("which", PAIRS)
def test_epochs_and_seeds_are_independent(tmp_path: Path, which: str) -> None:
    """Checks that draws at the same positions are `independent` in 40 pairs of orders of 300 rows."""
    total, n = 300, 20

    def p(sampler: Sampler) -> float:
        random = generator(3)
        first, second = (
            np.concatenate([buffer_draws(order, n, random) for order in orders]) for orders in pairs(sampler, which, 40)
        )
        return independent(first, second)

    assert p(Fastpipe(tmp_path, [total], "buffer", n, 10)) > ALPHA
    assert p(textbook(total, n, PAIRS[which][1])) < ALPHA


# --- TensorFlow ---

RUNS = 300

# In a separate process: TensorFlow's threads and memory would affect all later tests, some of which fork or measure
# memory.
SHUFFLE = """
import sys
import numpy as np
import tensorflow as tf

path, total, buffer, runs = sys.argv[1], *map(int, sys.argv[2:])
data = tf.data.Dataset.range(total).shuffle(buffer, seed=1, reshuffle_each_iteration=True).batch(total).repeat(runs)
np.save(path, np.stack([rows.numpy() for rows in data]))
"""


@pytest.mark.skipif(
    # The condition under which pyproject.toml requires it.
    not (sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 14)),
    reason="there are no wheels of tensorflow-cpu",
)
def test_displacements_match_tensorflow(tmp_path: Path) -> None:
    """Compares 300 orders of 2,000 rows with 300 orders of TensorFlow.

    Null distribution: rows of one order depend on each other, but orders don't. So a two-sample Kolmogorov-Smirnov test
    compares each number of `displacements` over orders. The test is exact without ties, and conservative with them. The
    smallest of k p-values times k is a p-value.
    """
    path = tmp_path / "shuffled.npy"
    arguments = [str(path), str(TOTAL), str(BUFFER), str(RUNS)]
    subprocess.run([sys.executable, "-c", SHUFFLE, *arguments], check=True, timeout=500)
    theirs = np.load(path)
    summaries = np.array([displacements(order) for order in theirs])

    def p(sampler: Sampler) -> float:
        ours = np.array([displacements(sampler(seed, 0)) for seed in range(RUNS)])
        values = [stats.ks_2samp(a, b).pvalue for a, b in zip(ours.T, summaries.T, strict=True)]
        return min(1.0, len(values) * min(values))

    assert p(Fastpipe(tmp_path, [7] * 285 + [5], "buffer", BUFFER, 64)) > ALPHA
    assert p(one_less(TOTAL, BUFFER)) < ALPHA
    assert p(windows(TOTAL, BUFFER)) < ALPHA
    # TensorFlow's draws pass the other tests of our draws.
    random = generator(4)
    draws = np.concatenate([buffer_draws(order, BUFFER, random) for order in theirs[:10]])
    assert min(uniform(draws), successive(draws)) > ALPHA


def displacements(order: np.ndarray) -> list[float]:
    """Returns statistics of an order.

    They measure how far rows move in either direction, how many move forward by the maximum, where the first and last
    row end up, how far apart consecutive rows are, and how similar their moves are.
    """
    moved = np.argsort(order) - np.arange(len(order))
    return [
        np.abs(moved).mean(),
        moved.std(),
        moved.max(),
        np.quantile(moved, 0.9),
        float(moved[0]),
        float(moved[-1]),
        (moved == 1 - BUFFER).sum(),
        np.abs(np.diff(order)).mean(),
        np.corrcoef(moved[:-1], moved[1:])[0, 1],
    ]
