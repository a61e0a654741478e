"""Ranks held-out positives among negatives: candidates, hit rate and normalized discounted cumulative gain."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag, within
from fastpipe._boundary import NegativeSampling
from fastpipe._fastpipe import Positives
from fastpipe.batch._form import described
from fastpipe.errors import InteractionsError
from fastpipe.recsys._csr import CSR
from fastpipe.recsys._interactions import HeldOut, Interactions
from fastpipe.recsys._reading import Sampling, check_unseen, weights_of

_CELLS = 1 << 22


class Candidates(NamedTuple):
    """Candidate items of each held-out positive, among which it is ranked.

    Attributes:
        users: int32 `[m]`, the user of each positive.
        items: int32 `[m, 1 + num_negatives]`, the positive followed by its negatives.
        valid: bool `[m, 1 + num_negatives]`. False for an item that appeared earlier in the row, so that each item
            counts once.
    """

    users: npt.NDArray[np.int32]
    items: npt.NDArray[np.int32]
    valid: npt.NDArray[np.bool_]

    def __repr__(self) -> str:
        return described(self)

    def ranks(self, scores: Any) -> npt.NDArray[np.int64]:
        """Returns the number of negatives that rank before each positive, int64 `[m]`. It is 0 for the best rank.

        Negatives with the same score as the positive rank before it, so a model that gives all items the same score has
        the worst result.

        Args:
            scores: The scores of the candidates, `[m, 1 + num_negatives]`; higher is better. An array, or an object
                that NumPy can convert, such as a tensor in CPU memory.

        Raises:
            ValueError: If the scores have another shape, are not real numbers, or a valid candidate's score is NaN.
        """
        values = np.asarray(scores)
        if values.shape != self.items.shape:
            raise ValueError(f"scores must have the shape of the candidates, {self.items.shape}; got {values.shape}")
        if values.dtype.kind not in "iuf":
            raise ValueError(f"scores must be real numbers; got {values.dtype}")
        ranks = np.empty(len(values), np.int64)
        # Temporary arrays cover some rows at a time: they fit in the cache and stay smaller than the scores.
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
    num_negatives: int = 999,
    *,
    seed: int = 0,
    repeats: bool = True,
    sampling: Sampling = "uniform",
    power: float = 0.75,
) -> Candidates:
    """Draws negatives for held-out positives: items with which the user has no positive, in the data or held out.

    The draws depend only on the seed and the position in `held_out`, not on threads. Use the same candidates for all
    epochs and models, so that their results can be compared.

    Args:
        data: The training set.
        held_out: The positives to rank: the result of `Interactions.leave_one_out`, or arrays of user indices and item
            indices.
        num_negatives: The number of negatives for each positive, at least 1. Defaults to 999.
        seed: Seed of the draws, 0 to 2^64 - 1. Defaults to 0.
        repeats: Whether negatives are drawn independently; repeated items are then marked as invalid. False draws
            different items. Defaults to True.
        sampling: `"uniform"` (the default): all unseen items are equally likely. `"popularity"`: items are drawn in
            proportion to `item_counts ** power`.
        power: The exponent of the popularity, 0 or more. Defaults to 0.75.

    Returns:
        The `Candidates`, for `hit_rate` and `ndcg`.

    Raises:
        InteractionsError: If a user or an item does not exist, or nothing is held out.
        UnseenItemsError: If a user has no unseen items or, with `repeats=False`, fewer than `num_negatives`. It names
            the user.
        TypeError: If an option has the wrong type.
        ValueError: If an option is out of range.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.recsys.Interactions.from_arrays([1, 1, 2, 2], [1, 2, 3, 4], [5, 6, 5, 6])
        >>> train, held_out = data.leave_one_out()
        >>> fastpipe.recsys.evaluation_candidates(train, held_out, num_negatives=2, seed=7).items.shape
        (2, 3)
    """
    count = within("num_negatives", num_negatives, 1, 2**31 - 1)
    key = within("seed", seed, 0, 2**64 - 1)
    weights = weights_of(data.item_counts, sampling, power)
    users = _numbers(held_out[0], "user", data.first_user, len(data.users))
    items = _numbers(held_out[1], "item", 0, data.num_items)
    if len(users) != len(items):
        raise InteractionsError(f"the counts must be equal: there are {len(users)} users and {len(items)} items")
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


def hit_rate(candidates: Candidates, scores: Any, k: int = 10) -> float:
    """Returns the fraction of positives that are among the first `k` of their candidates (HR@k).

    Args:
        candidates: The candidates, as `evaluation_candidates` draws them.
        scores: The scores of the candidates, `[m, 1 + num_negatives]`; higher is better.
        k: The number of top candidates, at least 1. Defaults to 10.

    Raises:
        ValueError: If the scores have another shape than the candidates, are not real numbers, or include NaN for a
            valid candidate, or if `k` is out of range.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.recsys.Interactions.from_arrays([1, 1, 2, 2], [1, 2, 3, 4], [5, 6, 5, 6])
        >>> candidates = fastpipe.recsys.evaluation_candidates(*data.leave_one_out(), num_negatives=2, seed=7)
        >>> fastpipe.recsys.hit_rate(candidates, scores=[[3, 1, 2], [1, 2, 3]], k=1)
        0.5
    """
    most = within("k", k, 1, 2**31 - 1)
    return float(np.mean(candidates.ranks(scores) < most))


def ndcg(candidates: Candidates, scores: Any, k: int = 10) -> float:
    """Returns the mean gain of the positives (NDCG@k): `1 / log2(2 + rank)` if `rank < k`, otherwise 0.

    A row of candidates has one positive, so the ideal gain, by which the gain is divided, is 1.

    Args:
        candidates: The candidates, as `evaluation_candidates` draws them.
        scores: The scores of the candidates, `[m, 1 + num_negatives]`; higher is better.
        k: The number of top candidates, at least 1. Defaults to 10.

    Raises:
        ValueError: If the scores have another shape than the candidates, are not real numbers, or include NaN for a
            valid candidate, or if `k` is out of range.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.recsys.Interactions.from_arrays([1, 1, 2, 2], [1, 2, 3, 4], [5, 6, 5, 6])
        >>> candidates = fastpipe.recsys.evaluation_candidates(*data.leave_one_out(), num_negatives=2, seed=7)
        >>> fastpipe.recsys.ndcg(candidates, scores=[[3, 1, 2], [1, 2, 3]], k=3)
        0.75
    """
    most = within("k", k, 1, 2**31 - 1)
    ranks = candidates.ranks(scores)
    return float(np.mean(np.where(ranks < most, 1 / np.log2(2 + ranks), 0)))


def _numbers(values: Any, what: str, first: int, count: int) -> npt.NDArray[np.int64]:
    """Returns indices of users or items relative to the first one."""
    numbers = np.asarray(values)
    if numbers.size == 0:
        raise InteractionsError("nothing is held out")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise InteractionsError(
            f"held-out {what}s must be a list of {what} indices, as data.{what}_indices(ids) returns"
        )
    wrong = (numbers < first) | (numbers >= first + count)
    if wrong.any():
        there = f"{first} to {first + count - 1}"
        raise InteractionsError(f"{what} indices must be from {there}; got {numbers[wrong][0]}")
    return numbers.astype(np.int64) - first


def _seen(positives: CSR, users: npt.NDArray[np.int64], items: npt.NDArray[np.int64], num_items: int) -> CSR:
    """Returns the positives of the data together with the held-out positives."""
    held = users * num_items + items
    of_user, of_item = np.divmod(
        np.unique(np.concatenate([positives.users() * num_items + positives.items, held])), num_items
    )
    indptr = np.concatenate([[0], np.cumsum(np.bincount(of_user, minlength=positives.num_users))])
    return CSR(indptr, of_item.astype(np.uint32), None)


def _first_of_each(candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Marks the first occurrence of each item in each row."""
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
