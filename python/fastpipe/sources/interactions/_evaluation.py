"""Ranking held-out positives among negatives: candidates, hit rate and normalized discounted cumulative gain."""

from __future__ import annotations

from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag
from fastpipe._boundary import NegativeSampling
from fastpipe._fastpipe import Positives
from fastpipe._reader.ordering import within
from fastpipe.batch._form import described
from fastpipe.errors import InteractionsError
from fastpipe.sources.interactions import HeldOut, Interactions
from fastpipe.sources.interactions._csr import CSR
from fastpipe.sources.interactions._reading import Sampling, check_unseen, weights_of

_CELLS = 1 << 22


class Candidates(NamedTuple):
    """For each held-out positive the items among which it is ranked.

    Attributes:
        users: int32 `[m]`.
        items: int32 `[m, 1 + negatives]`, the positive in front.
        valid: bool `[m, 1 + negatives]`, False for a negative that stands in the row before: it counts once.
    """

    users: npt.NDArray[np.int32]
    items: npt.NDArray[np.int32]
    valid: npt.NDArray[np.bool_]

    def __repr__(self) -> str:
        return described(self)

    def ranks(self, scores: Any) -> npt.NDArray[np.int64]:
        """How many of its negatives rank before each positive, int64 `[m]`: 0 if it is the first.

        Those that score as high as the positive do, too: a model that gives all items the same score finds nothing.

        Args:
            scores: `[m, 1 + negatives]`, of the candidates, the higher the better; an array or what becomes one, such
                as a tensor in the CPU's memory.

        Raises:
            ValueError: if they are of another shape, no real numbers, or one of a candidate that counts is NaN.
        """
        values = np.asarray(scores)
        if values.shape != self.items.shape:
            raise ValueError(f"there is one score for each candidate: {self.items.shape}, not {values.shape}")
        if values.dtype.kind not in "iuf":
            raise ValueError(f"scores are real numbers, not {values.dtype}")
        ranks = np.empty(len(values), np.int64)
        # By rows: what lies between is in the cache, and not as large as the scores.
        step = max(1, _CELLS // max(1, values.shape[1]))
        for start in range(0, len(values), step):
            some, valid = values[start : start + step], self.valid[start : start + step]
            if values.dtype.kind == "f" and (nan := np.isnan(some) & valid).any():
                row, column = (int(at[0]) for at in np.nonzero(nan))
                raise ValueError(f"the score of candidate {column} of row {start + row} is NaN")
            ahead = some[:, 1:] >= some[:, :1]
            ranks[start : start + step] = np.count_nonzero(ahead & valid[:, 1:], axis=1)
        return ranks


def evaluation_candidates(
    data: Interactions,
    held_out: HeldOut,
    negatives: SupportsIndex = 999,
    *,
    seed: SupportsIndex = 0,
    repeats: bool = True,
    sampling: Sampling = "uniform",
    power: float = 0.75,
) -> Candidates:
    """Draws negatives for held-out positives: items that the user has no positive with, in the data or held out.

    Which are drawn depends on the seed and the place in `held_out`; not on threads. The same candidates serve each
    epoch and each model, so that they can be compared.

    Args:
        data: the training set.
        held_out: what to rank, as `Interactions.leave_one_out` returns it, or any users and items by their numbers.
        negatives: negatives for each, at least 1.
        seed: 0 to 2^64 - 1.
        repeats: whether negatives are drawn independently; repeated ones are not valid. False for different ones.
        sampling: as in `read_interactions`.
        power: as in `read_interactions`.

    Returns:
        `Candidates`, which give scores to `hit_rate` and `ndcg` their meaning.

    Raises:
        InteractionsError: if there is no such user or item, or nothing is held out.
        UnseenItemsError: if a user has no unseen items or, without repeats, fewer than `negatives`; it names the user.
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.Interactions.from_arrays([1, 1, 2, 2], [1, 2, 3, 4], [5, 6, 5, 6])
        >>> train, held_out = data.leave_one_out()
        >>> fastpipe.evaluation_candidates(train, held_out, negatives=2, seed=7).items.shape
        (2, 3)
    """
    count = within("negatives", negatives, 1, 2**31 - 1)
    key = within("seed", seed, 0, 2**64 - 1)
    weights = weights_of(data.item_counts, sampling, power)
    users = _numbers(held_out[0], "user", data.first_user, len(data.users))
    items = _numbers(held_out[1], "item", 0, data.num_items)
    if len(users) != len(items):
        raise InteractionsError(f"there must be as many of each: these are {len(users)} users and {len(items)} items")
    distinct, places = np.unique(users, return_inverse=True)
    places = places.reshape(-1)
    seen = _seen(data._csr.take(distinct), places, items, data.num_items)
    positives = Positives(seen.indptr, seen.items, data.num_items)
    how = NegativeSampling(count, flag("repeats", repeats), weights)
    check_unseen(data.users[distinct], positives, how)
    drawn = positives.sample_unseen(places, np.full_like(places, -1), how, seed=key)
    candidates = np.empty((len(users), 1 + count), np.int32)
    candidates[:, 0] = items
    candidates[:, 1:] = drawn
    return Candidates((users + data.first_user).astype(np.int32), candidates, _first_of_each(candidates))


def hit_rate(candidates: Candidates, scores: Any, k: SupportsIndex = 10) -> float:
    """The share of positives that are among the first `k` of their candidates (HR@k).

    Args:
        candidates: as `evaluation_candidates` drew them.
        scores: as in `Candidates.ranks`.
        k: at least 1.

    Raises:
        ValueError: as in `Candidates.ranks`, and if `k` is out of range.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.Interactions.from_arrays([1, 1, 2, 2], [1, 2, 3, 4], [5, 6, 5, 6])
        >>> candidates = fastpipe.evaluation_candidates(*data.leave_one_out(), negatives=2, seed=7)
        >>> fastpipe.hit_rate(candidates, scores=[[3, 1, 2], [1, 2, 3]], k=1)
        0.5
    """
    most = within("k", k, 1, 2**31 - 1)
    return float(np.mean(candidates.ranks(scores) < most))


def ndcg(candidates: Candidates, scores: Any, k: SupportsIndex = 10) -> float:
    """The mean of `1 / log2(2 + rank)` of the positives, of those that aren't among the first `k` 0 (NDCG@k).

    With one positive among its candidates, the ideal gain by which it is divided is 1.

    Args:
        candidates: as `evaluation_candidates` drew them.
        scores: as in `Candidates.ranks`.
        k: at least 1.

    Raises:
        ValueError: as in `Candidates.ranks`, and if `k` is out of range.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.Interactions.from_arrays([1, 1, 2, 2], [1, 2, 3, 4], [5, 6, 5, 6])
        >>> candidates = fastpipe.evaluation_candidates(*data.leave_one_out(), negatives=2, seed=7)
        >>> fastpipe.ndcg(candidates, scores=[[3, 1, 2], [1, 2, 3]], k=3)
        0.75
    """
    most = within("k", k, 1, 2**31 - 1)
    ranks = candidates.ranks(scores)
    return float(np.mean(np.where(ranks < most, 1 / np.log2(2 + ranks), 0)))


def _numbers(values: Any, what: str, first: int, count: int) -> npt.NDArray[np.int64]:
    """Numbers of users or items, counted from the first that is there."""
    numbers = np.asarray(values)
    if numbers.size == 0:
        raise InteractionsError("nothing is held out")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise InteractionsError(
            f"held-out {what}s are numbers of {what}s, one list of integers: data.{what}_indices(ids)"
        )
    wrong = (numbers < first) | (numbers >= first + count)
    if wrong.any():
        there = f"{first} to {first + count - 1}"
        raise InteractionsError(f"there is no {what} number {numbers[wrong][0]}: there are {there}")
    return numbers.astype(np.int64) - first


def _seen(positives: CSR, users: npt.NDArray[np.int64], items: npt.NDArray[np.int64], num_items: int) -> CSR:
    """The positives, and what is held out, together."""
    held = users * num_items + items
    of_user, of_item = np.divmod(
        np.unique(np.concatenate([positives.users() * num_items + positives.items, held])), num_items
    )
    indptr = np.concatenate([[0], np.cumsum(np.bincount(of_user, minlength=positives.num_users))])
    return CSR(indptr, of_item.astype(np.uint32), None)


def _first_of_each(candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Marks in each row each item where it stands first."""
    valid = np.empty(candidates.shape, bool)
    step = max(1, _CELLS // candidates.shape[1])
    for start in range(0, len(candidates), step):
        rows = candidates[start : start + step]
        order = np.argsort(rows, axis=1, kind="stable")
        ordered = np.take_along_axis(rows, order, axis=1)
        new = np.ones(rows.shape, bool)
        new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        np.put_along_axis(valid[start : start + step], order, new, axis=1)
    return valid
