"""The compact form of interactions: the items of each user, one user after the other (compressed sparse rows)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["CSR", "Duplicates", "compress", "core"]

Duplicates: TypeAlias = Literal["first", "last"]


class CSR(NamedTuple):
    """The items of user `u` are `items[indptr[u]:indptr[u + 1]]`, in ascending order, each once.

    Attributes:
        indptr: int64 `[users + 1]`.
        items: uint32 `[positives]`.
        sequence: uint32 `[positives]`, the place of each positive in its user's history, from 0 for the earliest; None
            if the times aren't known.
    """

    indptr: npt.NDArray[np.int64]
    items: npt.NDArray[np.uint32]
    sequence: npt.NDArray[np.uint32] | None

    @property
    def num_users(self) -> int:
        """Users, those without positives among them."""
        return len(self.indptr) - 1

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Positives of each user, int64 `[users]`."""
        return np.diff(self.indptr)

    def users(self) -> npt.NDArray[np.int64]:
        """The user of each positive, int64 `[positives]`."""
        return np.repeat(np.arange(self.num_users, dtype=np.int64), self.counts)

    def keep(self, kept: npt.NDArray[np.bool_]) -> Self:
        """Those positives that are marked, of the same users."""
        ends = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])
        indptr = ends[self.indptr]
        sequence = self.sequence
        if sequence is not None:
            users = np.repeat(np.arange(self.num_users, dtype=np.int64), np.diff(indptr))
            sequence = _places(users, sequence[kept], indptr)
        return type(self)(indptr, self.items[kept], sequence)

    def take(self, users: npt.NDArray[np.int64]) -> Self:
        """The positives of some users, in the order in which these are named."""
        counts = self.counts[users]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(indptr[-1]) + np.repeat(self.indptr[users] - indptr[:-1], counts)
        return type(self)(indptr, self.items[at], None if self.sequence is None else self.sequence[at])

    def frozen(self) -> Self:
        """The same; its arrays can't be written to."""
        for array in self:
            if array is not None:
                array.flags.writeable = False
        return self


def compress(
    users: npt.NDArray[np.int64],
    items: npt.NDArray[np.int64],
    times: np.ndarray | None,
    *,
    num_users: int,
    num_items: int,
    duplicates: Duplicates,
) -> CSR:
    """Sorts interactions by user and item, and leaves one of several of the same user and item.

    Args:
        users: int64 `[n]`, below `num_users`.
        items: int64 `[n]`, below `num_items`.
        times: `[n]`, whatever can be sorted; None if they aren't known.
        num_users: number of users, at most 2^31.
        num_items: number of items, at most 2^31.
        duplicates: which one stays: the earliest or the latest, of several at the same time (or without times) the one
            that comes first or last in the arrays.
    """
    # One number for both: sorting by one key is several times as fast as by two. Below 2^62, as is that of `_places`.
    key = users * num_items + items
    by_time = None if times is None else np.argsort(times, kind="stable")
    order = np.argsort(key, kind="stable") if by_time is None else by_time[np.argsort(key[by_time], kind="stable")]
    key = key[order]
    changes = key[1:] != key[:-1]
    one = np.ones(min(len(key), 1), bool)
    kept = np.concatenate([one, changes] if duplicates == "first" else [changes, one])
    if not kept.all():
        key, order = key[kept], order[kept]
    of_user, of_item = np.divmod(key, num_items)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(of_user, minlength=num_users))])
    sequence = None
    if by_time is not None:
        age = np.empty_like(by_time)
        age[by_time] = np.arange(len(by_time))
        sequence = _places(of_user, age[order], indptr)
    return CSR(indptr, of_item.astype(np.uint32), sequence)


def _places(
    users: npt.NDArray[np.int64], ages: npt.NDArray[np.integer[Any]], indptr: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """The place of each positive in its user's history.

    Args:
        users: of the positives, ascending.
        ages: what histories are sorted by; no two of a user are equal.
        indptr: where each user's positives begin.
    """
    history = np.argsort(users * (int(ages.max(initial=0)) + 1) + ages)
    places = np.empty(len(history), np.uint32)
    places[history] = np.arange(len(history)) - np.repeat(indptr[:-1], np.diff(indptr))
    return places


def core(csr: CSR, num_items: int, min_per_user: int, min_per_item: int) -> npt.NDArray[np.bool_]:
    """Marks the largest set of positives in which each user and each item that is left has so many.

    Args:
        csr: the positives.
        num_items: number of items.
        min_per_user: positives of a user.
        min_per_item: positives of an item.

    Returns:
        bool `[positives]`.
    """
    users, items = csr.users(), csr.items
    kept = np.ones(len(items), bool)
    while True:
        enough = np.bincount(users[kept], minlength=csr.num_users) >= min_per_user
        popular = np.bincount(items[kept], minlength=num_items) >= min_per_item
        left = kept & enough[users] & popular[items]
        if np.array_equal(left, kept):
            return kept
        kept = left
