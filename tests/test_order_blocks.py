"""Block order: picks a block of the pool in proportion to its remaining records, and yields the block's next record."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from order_statistics import (
    ALPHA,
    PAIRS,
    Fastpipe,
    Sampler,
    block_draws,
    frequencies,
    generator,
    independent,
    pairs,
    successive,
    uniform,
)

# --- Twins: samplers with a known flaw ---

Twin = Callable[[Sequence[int], int], Sampler]


def pool(
    counts: Sequence[int],
    n: int,
    *,
    by_rows: bool = True,
    key: Callable[[int, int], tuple[int, ...]] = lambda *key: key,
) -> Sampler:
    """Returns a pool that draws blocks in proportion to their remaining rows, or with equal probability."""

    def sample(seed: int, epoch: int) -> np.ndarray:
        random = generator(*key(seed, epoch)).random(sum(counts))
        firsts, left, open_blocks, entered, out = np.cumsum(counts), list(counts), [], 0, []
        for word in random:
            while entered < len(counts) and sum(left[block] for block in open_blocks) < n:
                open_blocks += [entered] if counts[entered] else []
                entered += 1
            weights = np.cumsum([left[block] if by_rows else 1 for block in open_blocks])
            drawn = open_blocks[int(np.searchsorted(weights, word * weights[-1], side="right"))]
            out.append(firsts[drawn] - left[drawn])
            left[drawn] -= 1
            if left[drawn] == 0:
                open_blocks.remove(drawn)
        return np.array(out)

    return sample


def each_block_alike(counts: Sequence[int], n: int) -> Sampler:
    """Draws blocks with equal probability."""
    return pool(counts, n, by_rows=False)


def too_small(counts: Sequence[int], n: int) -> Sampler:
    """Keeps only half of the rows that it should in its pool."""
    return pool(counts, (n + 1) // 2)


def too_large(counts: Sequence[int], n: int) -> Sampler:
    """Keeps twice the number of rows that it should in its pool."""
    return pool(counts, 2 * n)


def out_of_sequence(counts: Sequence[int], n: int) -> Sampler:
    """Draws any row of the pool instead of the next record of a block."""
    good = pool(counts, n)

    def sample(seed: int, epoch: int) -> np.ndarray:
        order = good(seed, epoch)
        blocks = np.searchsorted(np.cumsum(counts), order, side="right")
        for block in range(len(counts)):
            order[blocks == block] = generator(seed, epoch, block).permutation(order[blocks == block])
        return order

    return sample


# --- Exact frequencies ---


def all_orders(counts: Sequence[int], n: int) -> dict[Hashable, Fraction]:
    """Returns the probability of each order. Each draw has the probability of its block's share of the rows left in the
    pool.
    """
    found: dict[Hashable, Fraction] = {}
    firsts = [sum(counts[:block]) for block in range(len(counts))]

    def draw(left: tuple[int, ...], out: tuple[int, ...], p: Fraction) -> None:
        if sum(left) < n and len(left) < len(counts):
            draw((*left, counts[len(left)]), out, p)
            return
        for block, rows in enumerate(left):
            if rows:
                then = (*left[:block], rows - 1, *left[block + 1 :])
                draw(then, (*out, firsts[block] + counts[block] - rows), p * rows / sum(left))
        if not sum(left):
            found[out] = p

    draw((), (), Fraction(1))
    return found


@pytest.mark.parametrize(
    ("counts", "n", "batch_size", "twin"),
    [
        ([1, 4], 5, 5, each_block_alike),
        ([2, 1, 3], 3, 2, each_block_alike),
        ([1, 2, 0, 2, 1], 2, 1, too_large),
        ([1, 3, 1, 2], 4, 3, too_small),
        ([2, 2, 1], 100, 4, out_of_sequence),
    ],
)
def test_small_orders_have_the_right_frequencies(
    tmp_path: Path, counts: list[int], n: int, batch_size: int, twin: Twin
) -> None:
    """Checks the `frequencies` of all orders."""
    expected = all_orders(counts, n)
    assert frequencies(Fastpipe(tmp_path, counts, "block", n, batch_size), expected) > ALPHA
    assert frequencies(twin(counts, n), expected) < ALPHA


# --- Many rows ---

COUNTS = [int(count) for count in generator(5).integers(1, 60, size=300)] + [0, 1, 500, 0, 1, 1]


def test_blocks_are_drawn_by_their_remaining_rows(tmp_path: Path) -> None:
    """Checks that about 19,000 draws from pools of 200 rows are `uniform` and `successive` draws are independent."""
    n = 200

    def p(sampler: Sampler) -> tuple[float, float]:
        random = generator(6)
        draws = np.concatenate([block_draws(sampler(seed, 3), COUNTS, n, random) for seed in range(2)])
        return uniform(draws), successive(draws)

    assert min(p(Fastpipe(tmp_path, COUNTS, "block", n, 64))) > ALPHA
    assert p(each_block_alike(COUNTS, n))[0] < ALPHA
    assert p(too_small(COUNTS, n))[0] < ALPHA


@given(
    counts=st.lists(st.one_of(st.just(0), st.just(1), st.integers(0, 50)), min_size=1, max_size=20).filter(any),
    n=st.integers(1, 60),
    batch_size=st.integers(1, 30),
    seed=st.integers(0, 2**64 - 1),
)
def test_records_come_in_sequence_and_from_the_pool(tmp_path: Path, counts, n, batch_size, seed) -> None:
    """Checks the sequence exactly, and that every row is read once."""
    order = Fastpipe(tmp_path, counts, "block", n, batch_size)(seed, 0)
    block_draws(order, counts, n, generator(0))
    assert sorted(order) == list(range(sum(counts)))


@pytest.mark.parametrize("twin", [out_of_sequence, too_large])
def test_unexpected_rows_are_detected(twin: Twin) -> None:
    """Proves that the test above would fail for wrong orders."""
    with pytest.raises(ValueError, match="cannot be next"):
        block_draws(twin([10, 10, 10], 10)(0, 0), [10, 10, 10], 10, generator(0))


@pytest.mark.parametrize("which", PAIRS)
def test_epochs_and_seeds_are_independent(tmp_path: Path, which: str) -> None:
    """Checks that draws at the same positions are `independent` in 40 pairs of orders of 300 rows."""
    counts, n = [5, 20] * 12, 60

    def p(sampler: Sampler) -> float:
        random = generator(7)
        first, second = (
            np.concatenate([block_draws(order, counts, n, random) for order in orders])
            for orders in pairs(sampler, which, 40)
        )
        return independent(first, second)

    assert p(Fastpipe(tmp_path, counts, "block", n, 10)) > ALPHA
    assert p(pool(counts, n, key=PAIRS[which][1])) < ALPHA
