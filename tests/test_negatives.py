"""Sampled negatives: none is a positive, each unseen item has the right probability, and draws are independent."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from scipy import stats

import fastpipe
import order_statistics
from fastpipe.recsys import Interactions
from interaction_statistics import (
    ALPHA,
    Careless,
    Fastpipe,
    NeverLast,
    Probing,
    Truncating,
    Twin,
    data,
    fairness,
    fairness_of_sets,
    seen,
    tally,
    uniforms,
)

# `make soak` draws a hundred times more.
NEGATIVES = int(os.environ.get("FASTPIPE_NEGATIVES", str(10**7)))
OF_TWINS = 10**6

pytestmark = pytest.mark.timeout(120 + NEGATIVES // 10**5)


@pytest.fixture(scope="module")
def positives() -> Interactions:
    return data()


@pytest.mark.parametrize("negatives", [1, 4, 7])
def test_unseen_items_are_equally_likely(positives: Interactions, negatives: int) -> None:
    counts = tally(Fastpipe(positives, num_negatives=negatives), positives, NEGATIVES)
    per_epoch = np.diff(positives.indptr) * negatives
    assert (counts.sum(axis=1) % np.maximum(per_epoch, 1) == 0).all()
    assert min(fairness(counts, seen(positives))) > ALPHA


def test_a_correct_twin_passes(positives: Interactions) -> None:
    assert min(fairness(tally(Twin(positives, 4), positives, OF_TWINS), seen(positives))) > ALPHA


@pytest.mark.parametrize("twin", [Truncating, NeverLast, Probing])
def test_a_twin_that_prefers_items_fails(positives: Interactions, twin: type[Twin]) -> None:
    found = fairness(tally(twin(positives, 4), positives, OF_TWINS), seen(positives))
    assert found.users < ALPHA
    if twin is NeverLast:
        assert found.last < ALPHA
    else:
        assert found.deciles < ALPHA


def test_a_twin_that_draws_positives_fails(positives: Interactions) -> None:
    counts = tally(Careless(positives, 4), positives, OF_TWINS)
    with pytest.raises(AssertionError):
        fairness(counts, seen(positives))


@pytest.mark.parametrize("negatives", [2, 4, 9])
def test_sets_without_repeats_are_equally_likely(positives: Interactions, negatives: int) -> None:
    reading = Fastpipe(positives, num_negatives=negatives, repeats=False)
    counts = tally(reading, positives, NEGATIVES // 4)
    assert fairness_of_sets(counts, seen(positives), negatives) > ALPHA
    for _, items in Fastpipe(positives, num_negatives=negatives, repeats=False, batch_size=(1 + negatives) * 1000)(
        3, 1
    ):
        sets = np.sort(items.reshape(-1, negatives), axis=1)
        assert (sets[:, 1:] > sets[:, :-1]).all()


def test_sets_with_repeats_are_not_equally_likely(positives: Interactions) -> None:
    """Proves that the test above fails for draws with repeats."""
    counts = tally(Fastpipe(positives, num_negatives=9), positives, NEGATIVES // 4)
    assert fairness_of_sets(counts, seen(positives), 9) < ALPHA


@pytest.mark.parametrize("unseen", [1, 2, 3, 4])
def test_few_unseen_items_without_repeats(unseen: int) -> None:
    """Checks that all unseen items are drawn, in a random order, when only that many exist."""
    items = 40
    few = Interactions.from_arrays(
        [0] * (items - unseen) + [1], [*range(unseen, items), 0], users=[0, 1], items=range(items)
    )
    orders: list[tuple[int, ...]] = []
    for epoch in range(60):
        for users, drawn in Fastpipe(few, num_negatives=unseen, repeats=False)(5, epoch):
            orders += map(tuple, drawn[users == 0].reshape(-1, unseen).tolist())
    found, counts = np.unique(orders, axis=0, return_counts=True)
    assert np.sort(found, axis=1).tolist() == [list(range(unseen))] * len(found)
    assert len(found) == [1, 1, 2, 6, 24][unseen]
    assert unseen == 1 or stats.chisquare(counts).pvalue > ALPHA


@pytest.mark.parametrize("power", [0.5, 0.75, 1.0, 1.5])
def test_item_probabilities_follow_their_weights(positives: Interactions, power: float) -> None:
    counts = tally(Fastpipe(positives, sampling="popularity", power=power), positives, NEGATIVES)
    weights = positives.item_counts**power
    found = fairness(counts, seen(positives), weights)
    assert min(found.users, found.deciles) > ALPHA
    # No user has interacted with the last item.
    assert positives.item_counts[-1] == 0
    assert found.last == 1
    other = fairness(counts, seen(positives), positives.item_counts ** (power + 0.1))
    assert max(other.users, other.deciles) < ALPHA


def test_power_zero_is_uniform(positives: Interactions) -> None:
    uniform = tally(Fastpipe(positives), positives, 1)
    assert (tally(Fastpipe(positives, sampling="popularity", power=0), positives, 1) == uniform).all()


# --- Independence ---


def drawn(positives: Interactions, seed: int, epoch: int, **options: Any) -> np.ndarray:
    """Returns the draws of an epoch, `[positives, negatives]`, as numbers that should be uniform and independent."""
    reading = Fastpipe(positives, num_negatives=4, **options)
    parts = list(reading(seed, epoch))
    points = np.concatenate([users for users, _ in parts]), np.concatenate([items for _, items in parts])
    return uniforms(positives, points, seed).reshape(-1, 4)


def test_draws_are_independent_of_each_other(positives: Interactions) -> None:
    draws = np.concatenate([drawn(positives, 1, epoch) for epoch in range(5)])
    assert order_statistics.uniform(draws.reshape(-1)) > ALPHA
    for lag in (1, 2, 3):
        assert order_statistics.independent(draws[:, 0], draws[:, lag]) > ALPHA
    half = len(draws) // 2 * 2
    for column in range(4):
        assert order_statistics.independent(draws[:half:2, column], draws[1:half:2, column]) > ALPHA


@pytest.mark.parametrize("which", order_statistics.PAIRS)
def test_epochs_and_seeds_are_independent(positives: Interactions, which: str) -> None:
    first, second = order_statistics.pairs(lambda *point: drawn(positives, *point), which, 5)
    assert order_statistics.independent(first.reshape(-1), second.reshape(-1)) > ALPHA
    assert order_statistics.independent(first.reshape(-1), first.reshape(-1)) < ALPHA


def test_candidates_are_independent_of_the_rows_read(positives: Interactions) -> None:
    users = np.repeat(np.arange(positives.num_users), np.diff(positives.indptr))
    held_out = fastpipe.recsys.HeldOut(users, positives.indices.astype(np.int64))
    candidates = fastpipe.recsys.evaluation_candidates(positives, held_out, 4, seed=1)
    points = np.repeat(users, 4), candidates.items[:, 1:].reshape(-1)
    apart = uniforms(positives, points, 2)
    assert order_statistics.uniform(apart) > ALPHA
    assert order_statistics.independent(apart, drawn(positives, 1, 0).reshape(-1)) > ALPHA


def test_candidates_are_fair(positives: Interactions) -> None:
    users = np.flatnonzero(np.diff(positives.indptr))
    held_out = fastpipe.recsys.HeldOut(users, positives.indices[positives.indptr[users]].astype(np.int64))
    for repeats, count in ((True, 4000), (False, 5)):
        table = np.zeros((positives.num_users, positives.num_items), np.int64)
        for seed in range(1 if repeats else 800):
            found = fastpipe.recsys.evaluation_candidates(positives, held_out, count, seed=seed, repeats=repeats)
            np.add.at(table, (found.users[:, None], found.items[:, 1:]), 1)
        if repeats:
            assert min(fairness(table, seen(positives))) > ALPHA
        else:
            assert fairness_of_sets(table, seen(positives), count) > ALPHA
