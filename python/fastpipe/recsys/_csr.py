"""The compact form of interactions: the items of each user, one user after another (compressed sparse rows)."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import compress_interactions, core_of, keep_positives

Duplicates: TypeAlias = Literal["first", "last"]


class CSR(NamedTuple):
    """Positives by user. User `u` has `items[indptr[u]:indptr[u + 1]]`, in ascending order and without duplicates.

    Attributes:
        indptr: int64 `[users + 1]`, the offsets of users in `items`.
        items: uint32 `[positives]`, the items of all users.
        sequence: uint32 `[positives]`, the position of each positive in its user's history, from 0 for the earliest.
            None if the times aren't known.
    """

    indptr: npt.NDArray[np.int64]
    items: npt.NDArray[np.uint32]
    sequence: npt.NDArray[np.uint32] | None

    @property
    def num_users(self) -> int:
        """The number of users, including users without positives."""
        return len(self.indptr) - 1

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The number of positives of each user, int64 `[users]`."""
        return np.diff(self.indptr)

    def users(self) -> npt.NDArray[np.int64]:
        """Returns the user of each positive, int64 `[positives]`."""
        return np.repeat(np.arange(self.num_users, dtype=np.int64), self.counts)

    def keep(self, kept: npt.NDArray[np.bool_]) -> Self:
        """Returns only the marked positives, with all users."""
        return type(self)(*keep_positives(self.indptr, self.items, self.sequence, kept))

    def take(self, users: npt.NDArray[np.int64]) -> Self:
        """Returns the positives of the given users, in the given order."""
        counts = self.counts[users]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(indptr[-1]) + np.repeat(self.indptr[users] - indptr[:-1], counts)
        return type(self)(indptr, self.items[at], None if self.sequence is None else self.sequence[at])

    def frozen(self) -> Self:
        """Makes all arrays read-only and returns the object itself."""
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
    """Sorts interactions by user and item, and keeps one interaction for each pair of user and item.

    Args:
        users: uint32 `[n]`, the indices of users, below `num_users`.
        items: uint32 `[n]`, the indices of items, below 2^31.
        times: `[n]`, numbers or datetime64 without missing values; None if the times aren't known.
        num_users: The number of users, below 2^31.
        duplicates: Whether to keep the `"first"` or the `"last"` interaction in time. For equal times, or without
            times, the order of the arrays decides.
    """
    known = None if times is None else _orderable(times)
    return CSR(*compress_interactions(users, items, known, num_users=num_users, duplicates=duplicates))


def _orderable(times: np.ndarray) -> np.ndarray:
    """Returns contiguous 32-bit or 64-bit numbers in the same order; the array itself, if it already is suitable."""
    if times.dtype.kind == "M":
        times = times.astype(times.dtype.newbyteorder("="), copy=False).view(np.int64)
    elif times.dtype.itemsize > 8:
        # Long doubles have more digits than a double, so they are replaced by their ranks.
        times = np.unique(times, return_inverse=True)[1].reshape(-1).astype(np.int64, copy=False)
    elif times.dtype.itemsize < 4:
        times = times.astype(np.float32 if times.dtype.kind == "f" else np.int32)
    return np.ascontiguousarray(times, times.dtype.newbyteorder("="))


def core(csr: CSR, num_items: int, min_per_user: int, min_per_item: int) -> npt.NDArray[np.bool_]:
    """Marks the largest set of positives in which each remaining user and item has enough positives.

    Args:
        csr: The positives.
        num_items: The number of items.
        min_per_user: The minimum number of positives of a user.
        min_per_item: The minimum number of positives of an item.

    Returns:
        bool `[positives]`, True for positives in the set.
    """
    return core_of(csr.indptr, csr.items, num_items, min_per_user, min_per_item)
