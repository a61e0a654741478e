"""An oracle for preparing interactions, to test the fast path against.

It uses NumPy sorts and copies everything several times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Prepared(NamedTuple):
    """Sorted ids, and interactions as compressed sparse rows."""

    users: np.ndarray
    items: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    sequence: np.ndarray | None


def prepare(
    users: np.ndarray,
    items: np.ndarray,
    times: np.ndarray | None,
    *,
    duplicates: str,
    min_per_user: int = 1,
    min_per_item: int = 1,
) -> Prepared:
    """Encodes ids, drops duplicates, and drops users and items with too few interactions."""
    user_ids, user_codes = np.unique(users, return_inverse=True)
    item_ids, item_codes = np.unique(items, return_inverse=True)
    ages = np.zeros(len(users)) if times is None else np.argsort(np.argsort(times, kind="stable"), kind="stable")
    order = np.lexsort((np.arange(len(users)), ages, item_codes, user_codes))
    key = user_codes[order].astype(np.int64) * len(item_ids) + item_codes[order]
    changes = key[1:] != key[:-1]
    one = np.ones(min(len(key), 1), bool)
    order = order[np.concatenate([one, changes] if duplicates == "first" else [changes, one])]
    while True:
        by_user = np.bincount(user_codes[order], minlength=len(user_ids)) >= min_per_user
        by_item = np.bincount(item_codes[order], minlength=len(item_ids)) >= min_per_item
        left = by_user[user_codes[order]] & by_item[item_codes[order]]
        if left.all():
            break
        order = order[left]
    present_users, rows = np.unique(user_codes[order], return_inverse=True)
    present_items, columns = np.unique(item_codes[order], return_inverse=True)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(present_users)))])
    sequence = None
    if times is not None:
        history = np.lexsort((ages[order], rows))
        sequence = np.empty(len(order), np.int64)
        sequence[history] = np.arange(len(order)) - np.repeat(indptr[:-1], np.diff(indptr))
    return Prepared(user_ids[present_users], item_ids[present_items], indptr, columns, sequence)
