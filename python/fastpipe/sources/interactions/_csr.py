"""The compact form of interactions: the items of each user, one user after the other (compressed sparse rows)."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import compress_interactions, core_of, keep_positives

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
        return type(self)(*keep_positives(self.indptr, self.items, self.sequence, kept))

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
    users: npt.NDArray[np.uint32],
    items: npt.NDArray[np.uint32],
    times: np.ndarray | None,
    *,
    num_users: int,
    duplicates: Duplicates,
) -> CSR:
    """Sorts interactions by user and item, and leaves one of several of the same user and item.

    Args:
        users: uint32 `[n]`, below `num_users`.
        items: uint32 `[n]`, below 2^31.
        times: `[n]`, numbers or datetime64 without missing ones; None if they aren't known.
        num_users: number of users, below 2^31.
        duplicates: which one stays: the earliest or the latest, of several at the same time (or without times) the one
            that comes first or last in the arrays.
    """
    known = None if times is None else _orderable(times)
    return CSR(*compress_interactions(users, items, known, num_users=num_users, duplicates=duplicates))


def _orderable(times: np.ndarray) -> np.ndarray:
    """Numbers of 32 or 64 bits in the same order, contiguous; the array itself, if it is such."""
    if times.dtype.kind == "M":
        times = times.astype(times.dtype.newbyteorder("="), copy=False).view(np.int64)
    elif times.dtype.itemsize > 8:
        # More digits than a double has: their places do.
        times = np.unique(times, return_inverse=True)[1].reshape(-1).astype(np.int64, copy=False)
    elif times.dtype.itemsize < 4:
        times = times.astype(np.float32 if times.dtype.kind == "f" else np.int32)
    return np.ascontiguousarray(times, times.dtype.newbyteorder("="))


def core(csr: CSR, num_items: int, min_per_user: int, min_per_item: int) -> npt.NDArray[np.bool_]:
    """Marks the largest set of positives in which each user and each item that is left has at least these.

    Args:
        csr: the positives.
        num_items: number of items.
        min_per_user: positives of a user.
        min_per_item: positives of an item.

    Returns:
        bool `[positives]`.
    """
    return core_of(csr.indptr, csr.items, num_items, min_per_user, min_per_item)
