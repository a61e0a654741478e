"""Expected values of shuffle measures for a perfect permutation.

The functions take counts of rows and return expectations. They read neither data nor an order.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = "npt.NDArray[np.int64]"
Floats: TypeAlias = "npt.NDArray[np.float64]"

_TERMS = 64


def log_miss(total: float, drawn: float, group: npt.NDArray[Any]) -> Floats:
    """Returns the logarithm of the probability that a draw without replacement misses a group.

    That is log C(total - group, drawn) / C(total, drawn), the hypergeometric distribution at 0. For a billion rows the
    logarithm of a factorial is 10^14 times larger than the result, so none is calculated. With s and l, the smaller and
    the larger of `group` and `drawn`, the result is the sum of log(1 - l / (total - i)) over i from 0 to s - 1. Up to
    64 terms are added. A longer sum is replaced by the integral from -1/2 to s - 1/2 (the midpoint rule). The
    probability is then accurate to 10^-7, and its logarithm to a relative error of 10^-5 if the probability is at least
    10^-9.

    Args:
        total: Number of all rows.
        drawn: Number of rows that are drawn, at most `total`.
        group: Number of rows in each group, at most `total`, int [n].

    Returns:
        float64 [n]; -inf if there are too few rows outside of the group.
    """
    size = np.minimum(group, total - drawn).astype(np.float64)
    small, large = np.minimum(size, drawn), np.maximum(size, drawn)
    terms = np.zeros(len(size))
    for i in range(_TERMS):
        terms += np.log1p(-np.where(i < small, large / max(total - i, 1), 0))
    top = total + 0.5
    integral = (
        (top - size) * np.log1p(-size / top)
        + (top - drawn) * math.log1p(-drawn / top)
        - (top - size - drawn) * np.log1p(-(size + drawn) / top)
    )
    found = np.where(small <= _TERMS, terms, np.minimum(integral, 0))
    return np.where(group > total - drawn, -np.inf, found)


def distinct(groups: Counts, drawn: int) -> float:
    """Returns the mean number of groups in a batch of a perfect permutation: the sum of 1 - C(N-r, b) / C(N, b).

    Args:
        groups: Number of rows r in each group, int64 [n]. N is their sum.
        drawn: Number of rows b in the batch.
    """
    sizes, counts = np.unique(groups[groups > 0], return_counts=True)
    return float(counts @ -np.expm1(log_miss(float(groups.sum()), drawn, sizes)))


def same_group(groups: Counts) -> float:
    """Returns the share of pairs of rows whose rows are in the same group; nan for fewer than two rows.

    A batch of a perfect permutation has the same share, on average.
    """
    total = float(groups.sum())
    return float(pairs(groups) / (total * (total - 1) / 2)) if total > 1 else math.nan


def pairs(groups: Counts) -> float:
    """Returns the number of pairs of rows in the same group."""
    sizes = groups.astype(np.float64)
    return float((sizes * (sizes - 1) / 2).sum())


def mean_displacement(places: Counts, total: int) -> float:
    """Returns the mean of |place - j| for a uniformly random row j; (N - 1/N) / 3 if `places` has every place.

    Args:
        places: Places in the order, int64 [n].
        total: Number N of rows.
    """
    before = places.astype(np.float64)
    after = total - 1 - before
    return float(((before * (before + 1) + after * (after + 1)) / 2 / total).mean())


def displacement_quantile(q: float, total: int) -> int:
    """Returns the smallest k with P(|i - j| <= k) >= q for uniformly random rows i and j.

    N + 2kN - k(k + 1) of the N^2 pairs are at most k apart. For a large N, k is about N (1 - sqrt(1 - q)).
    """

    def reached(k: int) -> bool:
        return total + 2 * k * total - k * (k + 1) >= q * total * total

    k = max(0, min(total - 1, int(total * (1 - math.sqrt(1 - q)))))
    while k > 0 and reached(k - 1):
        k -= 1
    while k < total - 1 and not reached(k):
        k += 1
    return k


def stretch(ends: Counts, start: int, stop: int) -> Counts:
    """Returns the number of rows that each group has in `start..stop` of the unshuffled dataset.

    Args:
        ends: Index after the last row of each group, int64 [n], ascending.
        start: Index of the first row.
        stop: Index after the last row; more than `start`.

    Returns:
        int64 [m], without groups that have no rows in the range.
    """
    first, last = np.searchsorted(ends, (start, stop - 1), side="right")
    edges = np.minimum(ends[first : last + 1], stop)
    return np.diff(edges, prepend=start)
