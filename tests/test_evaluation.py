"""Hit rate and NDCG compared with a simple reference, and the evaluation candidates."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from fastpipe.errors import InteractionsError, UnseenItemsError
from fastpipe.recsys import Candidates, HeldOut, Interactions, evaluation_candidates, hit_rate, ndcg

NAN = float("nan")


def candidates_of(items: np.ndarray) -> Candidates:
    """Returns arbitrary rows of items as candidates.

    Repeated items are marked as `evaluation_candidates` marks them.
    """
    valid = np.array([[item not in row[:at] for at, item in enumerate(row)] for row in items.tolist()], bool)
    return Candidates(np.arange(len(items), dtype=np.int32), items.astype(np.int32), valid.reshape(items.shape))


def reference(items: list[int], scores: list[float], k: int) -> tuple[float, float]:
    """Returns HR@k and NDCG@k of one row by their textbook definition.

    The positive comes first, and each item counts once.
    """
    score = dict(reversed(list(zip(items, scores, strict=True))))  # A repeated item uses its first score.
    positive = score.pop(items[0])
    above = [item for item, value in score.items() if value >= positive]
    place = len(above) + 1
    return (1.0, math.log(2) / math.log(place + 1)) if place <= k else (0.0, 0.0)


def test_ten_thousand_random_cases() -> None:
    random = np.random.default_rng(1)
    rows = 0
    while rows < 10_000:
        count, negatives = int(random.integers(1, 300)), int(random.integers(0, 40))
        k = int(random.integers(1, 15))
        items = random.integers(1, random.integers(2, 60), (count, 1 + negatives))
        items[:, 0] = 0
        # There are few different scores, so ties are frequent.
        scores = random.integers(0, random.integers(1, 50), items.shape) / 8
        candidates = candidates_of(items)
        expected = [reference(*row, k) for row in zip(items.tolist(), scores.tolist(), strict=True)]
        for row in range(count):
            one = Candidates(*(part[row : row + 1] for part in candidates))
            assert hit_rate(one, scores[row : row + 1], k) == expected[row][0]
            assert ndcg(one, scores[row : row + 1], k) == pytest.approx(expected[row][1], rel=1e-12)
        assert hit_rate(candidates, scores, k) == pytest.approx(np.mean([hit for hit, _ in expected]), rel=1e-12)
        assert ndcg(candidates, scores, k) == pytest.approx(np.mean([gain for _, gain in expected]), rel=1e-12)
        rows += count


def test_known_values() -> None:
    items = np.array([[0, 1, 2, 2, 3]] * 4)
    candidates = candidates_of(items)
    scores = np.array([[9, 1, 2, 3, 4], [2, 9, 9, 9, 1], [5, 5, 5, 5, 5], [4, 5, 3, 9, 3]], np.float32)
    # The second row's repeated item counts once. Among equal scores the positive comes last. A repeated item's second
    # score is ignored.
    assert candidates.ranks(scores).tolist() == [0, 2, 3, 1]
    assert [hit_rate(candidates, scores, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert ndcg(candidates, scores, 1) == 0.25
    assert ndcg(candidates, scores, 10) == pytest.approx((1 + 1 / 2 + 1 / math.log2(5) + 1 / math.log2(3)) / 4)
    assert candidates.ranks(np.where(candidates.valid, scores, NAN)).tolist() == [0, 2, 3, 1]


def test_scores_of_other_kinds() -> None:
    torch = pytest.importorskip("torch")
    candidates = candidates_of(np.array([[0, 1], [0, 1]]))
    for scores in ([[1, 2], [2, 1]], np.array([[1, 2], [2, 1]], np.uint8), torch.tensor([[1.0, 2.0], [2.0, 1.0]])):
        assert hit_rate(candidates, scores, 1) == 0.5
    infinite = [[math.inf, -math.inf], [-math.inf, math.inf]]
    assert candidates.ranks(infinite).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("scores", "k", "message"),
    [
        ([[1.0]], 10, r"the shape of the candidates, \(2, 2\); got \(1, 1\)"),
        ([[1.0, 2.0], [NAN, 1.0]], 10, "candidate 0 of row 1 is NaN"),
        ([[1.0, NAN], [1.0, 1.0]], 10, "candidate 1 of row 0 is NaN"),
        ([["a", "b"], ["a", "b"]], 10, "scores must be real numbers"),
        ([[1j, 2], [1, 2]], 10, "scores must be real numbers"),
        ([[1, 2], [1, 2]], 0, "k must be between 1"),
    ],
)
def test_invalid_scores(scores: Any, k: int, message: str) -> None:
    for metric in (hit_rate, ndcg):
        with pytest.raises(ValueError, match=message):
            metric(candidates_of(np.array([[0, 1], [0, 1]])), scores, k)


# --- Candidates ---


def seen_by(data: Interactions, held_out: HeldOut) -> dict[int, set[int]]:
    """Returns the items that each user must not get as negatives."""
    seen = {user: set(part.tolist()) for user, part in enumerate(np.split(data.indices, data.indptr[1:-1]))}
    for user, item in zip(*map(np.ndarray.tolist, held_out), strict=True):
        seen[user].add(item)
    return seen


def some(users: int = 30, items: int = 40, positives: int = 300) -> Interactions:
    random = np.random.default_rng(5)
    return Interactions.from_arrays(
        random.integers(0, users, positives),
        random.integers(0, items, positives),
        random.integers(0, 9, positives),
        users=range(users),
        items=range(items),
    )


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("sampling", ["uniform", "popularity"])
def test_negatives_are_unseen(repeats: bool, sampling: Any) -> None:
    train, held_out = some().leave_one_out()
    count = 200 if repeats else 15
    found = evaluation_candidates(train, held_out, count, seed=3, repeats=repeats, sampling=sampling)
    assert (found.users.dtype, found.items.dtype, found.valid.dtype) == (np.int32, np.int32, np.bool_)
    assert found.items.shape == found.valid.shape == (len(held_out.users), 1 + count)
    assert found.users.tolist() == held_out.users.tolist()
    assert found.items[:, 0].tolist() == held_out.items.tolist()
    seen = seen_by(train, held_out)
    for user, row, valid in zip(found.users.tolist(), found.items.tolist(), found.valid.tolist(), strict=True):
        assert not seen[user] & set(row[1:])
        if sampling == "uniform" and repeats:
            # With 200 draws from about 30 items, each item is missing with a probability of about 0.001.
            assert len(set(row[1:])) > 0.8 * (train.num_items - len(seen[user]))
        if not repeats:
            assert len(set(row)) == len(row)
        assert [row[at] for at, counts in enumerate(valid) if counts] == list(dict.fromkeys(row))
    assert found.valid.all() == (not repeats)


def test_candidates_depend_only_on_seed_and_position() -> None:
    train, held_out = some().leave_one_out()
    first = evaluation_candidates(train, held_out, 20, seed=1)
    assert np.array_equal(first.items, evaluation_candidates(train, held_out, 20, seed=1).items)
    assert (first.items != evaluation_candidates(train, held_out, 20, seed=2).items).any(axis=1).all()
    part = HeldOut(held_out.users[:7], held_out.items[:7])
    assert np.array_equal(first.items[:7], evaluation_candidates(train, part, 20, seed=1).items)


def test_held_out_items_are_not_negatives_of_their_user() -> None:
    data = Interactions.from_arrays([0, 1, 1], [0, 1, 2], users=[0, 1], items=range(6))
    held_out = HeldOut(np.array([0, 0, 1, 0]), np.array([1, 2, 0, 3]))
    found = evaluation_candidates(data, held_out, 50)
    assert [set(row[1:]) for row in found.items.tolist()] == [{4, 5}, {4, 5}, {3, 4, 5}, {4, 5}]
    # Held-out items may also be in the data, for validation against all known interactions.
    again = evaluation_candidates(data, HeldOut([0], [0]), 50)
    assert set(again.items[0, 1:].tolist()) == {1, 2, 3, 4, 5}


def test_random_scores_match_chance() -> None:
    train, held_out = some(200, 400, 3000).leave_one_out()
    candidates = evaluation_candidates(train, held_out, 99)
    scores = np.random.default_rng(0).random((400, 1))[candidates.items[..., None], 0].reshape(candidates.items.shape)
    different = candidates.valid.sum(axis=1)
    expected = np.minimum(10 / different, 1).mean()
    # Users share the scores of items, so rows aren't independent. The test allows five generous standard errors.
    assert abs(hit_rate(candidates, scores) - expected) < 5 * math.sqrt(expected / len(scores)) + 0.05
    assert hit_rate(candidates, np.zeros(candidates.items.shape)) == 0


@pytest.mark.parametrize(
    ("users", "items", "options", "error", "message"),
    [
        ([], [], {}, InteractionsError, "nothing is held out"),
        ([30], [0], {}, InteractionsError, "user indices must be from 0 to 29; got 30"),
        ([0], [-1], {}, InteractionsError, "item indices must be from 0 to 39; got -1"),
        ([0], [0, 1], {}, InteractionsError, "there are 1 users and 2 items"),
        (["0"], [0], {}, InteractionsError, r"data\.user_indices\(ids\)"),
        ([0], [NAN], {}, InteractionsError, r"data\.item_indices\(ids\)"),
        ([0], [0], {"num_negatives": 0}, ValueError, "num_negatives must be between 1"),
        ([0], [0], {"num_negatives": 40, "repeats": False}, UnseenItemsError, "the user 0 has fewer than 40 unseen"),
        ([0], [0], {"seed": -1}, ValueError, "seed must be between"),
        ([0], [0], {"sampling": "best"}, ValueError, 'sampling must be "uniform" or "popularity"'),
        ([0], [0], {"sampling": "popularity", "power": NAN}, ValueError, "power must be 0 or more"),
    ],
)
def test_bad_input_is_rejected(users: Any, items: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        evaluation_candidates(some(), HeldOut(np.array(users, object if users == ["0"] else None), items), **options)


def test_a_user_who_has_everything_is_named() -> None:
    data = Interactions.from_arrays(["a", "b", "b", "b"], [0, 0, 1, 2])
    with pytest.raises(UnseenItemsError, match="the user 'b' has no unseen items to draw negatives from") as caught:
        evaluation_candidates(data, HeldOut(np.array([0, 1]), np.array([0, 0])), 3)
    assert caught.value.user == "b"


@hypothesis.given(st.integers(1, 5), st.integers(2, 9), st.data())
def test_any_held_out(users: int, items: int, draw: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, users), st.integers(0, items - 1))
    known = draw.draw(st.lists(pairs, min_size=1, max_size=30))
    held = draw.draw(st.lists(pairs, min_size=1, max_size=8))
    data = Interactions.from_arrays(*zip(*known, strict=True), users=range(users + 1), items=range(items))
    held_out = HeldOut(*(np.array(part) for part in zip(*held, strict=True)))
    seen = seen_by(data, held_out)
    full = [user for user in held_out.users.tolist() if len(seen[user]) == items]
    if full:
        with pytest.raises(UnseenItemsError) as caught:
            evaluation_candidates(data, held_out, 5)
        assert caught.value.user in full
        return
    found = evaluation_candidates(data, held_out, 5)
    for user, row in zip(held_out.users.tolist(), found.items.tolist(), strict=True):
        assert not seen[user] & set(row[1:])
