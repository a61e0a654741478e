"""Which rows are drawn where not all are alike: by strata, or by weights.

Each row has a word of its own, of the counter-based generator Philox (J. K. Salmon et al., Parallel Random Numbers: As
Easy as 1, 2, 3, 2011) keyed by the seed, whose raw words NumPy keeps the same over versions. Rows are drawn in the
order of what is made of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["blocks", "codes_of", "stratified", "uniform", "weighted"]

_Rows = npt.NDArray[np.int64]


def uniform(seed: int, stream: int, count: int) -> npt.NDArray[np.float64]:
    """Numbers above 0, and below 1."""
    words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(count)
    # So that neither end is met, and all doubles between are whole multiples of one.
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def codes_of(values: Any) -> npt.NDArray[np.int64]:
    """Numbers of the strata that values are of: equal ones, in the order of the values."""
    found: npt.NDArray[np.int64] = np.unique(np.asarray(values), return_inverse=True)[1]
    return found.reshape(-1).astype(np.int64)


def stratified(codes: npt.NDArray[np.int64], rows: int, seed: int, part: int, *, replace: bool) -> _Rows:
    """Draws from each stratum in proportion to its rows, rounded by largest remainders.

    Args:
        codes: the stratum of each row, from 0.
        rows: how many to draw in all.
        seed: of the drawing.
        part: without replacement, samples of parts before are left out.
        replace: whether rows may be drawn several times.

    Raises:
        ValueError: if a stratum has too few rows.
    """
    sizes = np.bincount(codes)
    exact = rows * sizes / len(codes)
    counts = np.floor(exact).astype(np.int64)
    # Of equal remainders the first stratum's counts more.
    most = np.argsort(counts - exact, kind="stable")
    counts[most[: rows - counts.sum()]] += 1
    if not replace and (counts * (part + 1) > sizes).any():
        short = int(np.argmax(counts * (part + 1) > sizes))
        raise ValueError(
            f"a stratum has {sizes[short]} rows, and {part + 1} parts of {counts[short]} are to be drawn of it: "
            "replace=True draws some twice"
        )
    if replace:
        order, keys = np.argsort(codes, kind="stable"), uniform(seed, 1 + part, rows)
        starts, which = np.cumsum(sizes) - sizes, np.repeat(np.arange(len(sizes)), counts)
        replaced: _Rows = order[starts[which] + (keys * sizes[which]).astype(np.int64)]
        return replaced
    order = np.lexsort((uniform(seed, 0, len(codes)), codes))
    starts = np.cumsum(sizes) - sizes + part * counts
    return np.concatenate([order[start : start + count] for start, count in zip(starts, counts, strict=True)])


def weighted(weights: npt.NDArray[np.float64], rows: int, seed: int, part: int, *, replace: bool) -> _Rows:
    """Draws rows in proportion to weights: one after the other, of those that are left without replacement.

    Without replacement these are the rows with the least `-log(u) / weight` (P. S. Efraimidis, P. G. Spirakis, Weighted
    random sampling with a reservoir, 2006).

    Args:
        weights: of each row.
        rows: how many to draw.
        seed: of the drawing.
        part: without replacement, samples of parts before are left out.
        replace: whether rows may be drawn several times.

    Raises:
        ValueError: if a weight is negative or no number, or there are too few others than 0.
    """
    if not np.isfinite(weights).all() or (weights < 0).any():
        wrong = int(np.argmax(~np.isfinite(weights) | (weights < 0)))
        raise ValueError(f"weights are numbers from 0, and that of row {wrong} is {weights[wrong]}")
    there = np.flatnonzero(weights)
    if len(there) < (1 if replace else rows * (part + 1)):
        raise ValueError(f"{len(there)} rows have weights other than 0, and {rows * (part + 1)} are to be drawn")
    if replace:
        sums = np.cumsum(weights[there])
        places = np.searchsorted(sums, uniform(seed, 1 + part, rows) * sums[-1], side="right")
        replaced: _Rows = there[np.minimum(places, len(there) - 1)]
        return replaced
    keys = -np.log(uniform(seed, 0, len(weights))[there]) / weights[there]
    return there[np.argsort(keys, kind="stable")[part * rows : (part + 1) * rows]]


def blocks(unit_rows: npt.NDArray[np.uint32], rows: int, seed: int, part: int) -> tuple[_Rows, _Rows]:
    """Draws whole units until they have enough rows; of the last one as many as are missing, at random.

    Args:
        unit_rows: the rows of each unit.
        rows: how many to draw.
        seed: of the drawing.
        part: samples of parts before are left out, with all rows of their units.

    Returns:
        The numbers of the rows, ascending, and of each the number of its unit.

    Raises:
        ValueError: if there are too few rows.
    """
    counts = unit_rows.astype(np.int64)
    order = np.argsort(uniform(seed, 0, len(counts)), kind="stable")
    sums = np.cumsum(counts[order])
    first = before = start = end = 0
    for _ in range(part + 1):
        start = first
        end = int(np.searchsorted(sums, before + rows, side="left"))
        if end == len(sums):
            raise ValueError(f"{part + 1} parts of whole blocks, of {rows} rows each, are more than there are")
        first, before = end + 1, int(sums[end])
    chosen = np.sort(order[start : end + 1])
    firsts = np.cumsum(counts) - counts
    of = np.repeat(chosen, counts[chosen])
    numbers = np.arange(len(of)) - np.repeat(np.cumsum(counts[chosen]) - counts[chosen], counts[chosen]) + firsts[of]
    last = np.flatnonzero(of == order[end])
    more = len(of) - rows
    left_out = last[np.argsort(uniform(seed, 1 + part, len(last)), kind="stable")[:more]]
    return np.delete(numbers, left_out), np.delete(of, left_out)
