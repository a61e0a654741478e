"""Draws of rows: by strata, by weights, or in whole units.

Each row has a word from the counter-based generator Philox (J. K. Salmon et al., Parallel Random Numbers: As Easy as 1,
2, 3, 2011), keyed by the seed. NumPy keeps its raw words the same over versions.

Strata and units are drawn systematically (W. G. Madow, L. H. Madow, On the Theory of Systematic Sampling, 1944): rows
are arranged on a circle in a random order that keeps strata or units together, and the circle is entered at a random
row. Each row is then drawn with exactly the same probability, and each draw has exactly the number of rows that was
asked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Arc", "arc", "blocks", "codes_of", "stratified", "uniform", "weighted"]

_Rows = npt.NDArray[np.int64]

# Streams of other draws with the same seed are smaller, or are those of BlockRows.
_STRATA = 1 << 44


def uniform(seed: int, stream: int, count: int) -> npt.NDArray[np.float64]:
    """Returns numbers above 0 and below 1."""
    words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(count)
    # So that neither end is met, and all doubles between are whole multiples of one.
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def codes_of(values: Any) -> npt.NDArray[np.int64]:
    """Returns the index of each value's stratum. Strata are numbered in the order of their first rows.

    So the same strata are drawn alike, whether their values are read as text or as numbers.
    """
    _, first, found = np.unique(np.asarray(values), return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first)).astype(np.int64)[found.reshape(-1)]


def stratified(codes: npt.NDArray[np.int64], rows: int, seed: int, part: int, *, replace: bool) -> _Rows:
    """Draws from each stratum in proportion to its rows. Counts are rounded up or down at random, by the seed.

    Args:
        codes: The stratum of each row, from 0.
        rows: How many rows to draw.
        seed: Seed of the draw.
        part: Without replacement, samples with other parts have no row in common with this one. There are
            `len(codes) // rows` of them.
        replace: Whether a row may be drawn several times.
    """
    total, sizes = len(codes), np.bincount(codes)
    words = uniform(seed, _STRATA, len(sizes) + 1)
    # Strata are arranged at random, too: of neighbors that are small, not more than one has a row.
    turn = np.argsort(np.argsort(words[1:]))
    order = np.lexsort((uniform(seed, 0, total), turn[codes]))
    if not replace:
        # Places are at least `total // rows` apart, so that those of other parts are between them.
        return order[(_spread(total, rows, int(words[0] * total)) + part) % total]
    keys = uniform(seed, 1 + part, rows + 1)
    drawn = turn[codes[order[_spread(total, rows, int(keys[0] * total))]]]
    turned = sizes[np.argsort(turn)]
    replaced: _Rows = order[(np.cumsum(turned) - turned)[drawn] + (keys[1:] * turned[drawn]).astype(np.int64)]
    return replaced


def _spread(total: int, rows: int, start: int) -> _Rows:
    """Returns `rows` places of `total`, ascending and equally far apart.

    They are `(start + j * total) // rows`, without overflow. If `start` is random, from 0 to `total - 1`, each place is
    there with the probability `rows / total`.
    """
    whole, rest = divmod(total, rows)
    each = np.arange(rows, dtype=np.int64)
    return each * whole + start // rows + (start % rows + each * rest) // rows


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
        ValueError: if a weight is negative or not finite, or too few are above 0.
    """
    if not np.isfinite(weights).all() or (weights < 0).any():
        wrong = int(np.argmax(~np.isfinite(weights) | (weights < 0)))
        raise ValueError(f"weights are numbers from 0, and that of row {wrong} is {weights[wrong]}")
    there = np.flatnonzero(weights)
    if len(there) < (1 if replace else rows * (part + 1)):
        raise ValueError(f"{len(there)} rows have weights other than 0, and {rows * (part + 1)} are to be drawn")
    if replace:
        # Scaled by a power of two, which is exact, so that the sum neither overflows nor loses digits.
        sums = np.cumsum(np.ldexp(weights[there], -np.frexp(weights.max())[1]))
        places = np.searchsorted(sums, uniform(seed, 1 + part, rows) * sums[-1], side="right")
        replaced: _Rows = there[np.minimum(places, len(there) - 1)]
        return replaced
    # Logarithms of the keys have the same order, and don't overflow.
    keys = np.log(-np.log(uniform(seed, 0, len(weights))[there])) - np.log(weights[there])
    return there[np.argsort(keys, kind="stable")[part * rows : (part + 1) * rows]]


class Arc(NamedTuple):
    """Successive rows on a circle of units, in the order of the units.

    Attributes:
        units: int64 `[n]`, ascending. A unit is there twice if the arc begins and ends within it.
        starts: int64 `[n]`, the first of the unit's rows on the circle that are in the arc.
        stops: int64 `[n]`, one more than the last.
        taken: int64 `[n]`, how many rows of the unit are on the circle.
    """

    units: _Rows
    starts: _Rows
    stops: _Rows
    taken: _Rows


def arc(unit_rows: npt.NDArray[Any], taken: int, skipped: int, rows: int, seed: int, stream: int) -> Arc:
    """Draws rows of units that are arranged on a circle at random, from a random row onward.

    Args:
        unit_rows: The rows of each unit.
        taken: How many of all rows are on the circle: of each unit in proportion to its rows.
        skipped: Rows of the circle that are left out first, for earlier draws.
        rows: How many to draw; with `skipped`, at most `taken`.
        seed: Seed of the draw.
        stream: Stream of the generator. Draws of the same circle have the same one.
    """
    words = uniform(seed, stream, len(unit_rows) + 2)
    order = np.argsort(words[2:], kind="stable")
    ends = np.cumsum(unit_rows[order], dtype=np.int64)
    total = int(ends[-1])
    if taken < total:
        # How many of the places of `_spread` are before each end. Python's integers don't overflow.
        exact = ends if total * taken < 2**62 else ends.astype(object)
        ends = (-((int(words[0] * total) - exact * taken) // total)).astype(np.int64)
    begins = np.concatenate([[0], ends[:-1]])
    first = (int(words[1] * taken) + skipped) % taken
    found = []
    for low, high in ((first, min(first + rows, taken)), (0, first + rows - taken)):
        there = np.flatnonzero((begins < high) & (ends > low) & (begins < ends))
        of = begins[there]
        found.append((order[there], np.maximum(low - of, 0), np.minimum(high, ends[there]) - of, ends[there] - of))
    units, starts, stops, counts = (np.concatenate(both) for both in zip(*found, strict=True))
    ascending = np.lexsort((starts, units))
    return Arc(units[ascending], starts[ascending], stops[ascending], counts[ascending])


def blocks(unit_rows: npt.NDArray[np.uint32], rows: int, seed: int, part: int) -> tuple[_Rows, _Rows]:
    """Draws whole units, and parts of two: an arc of a circle of all.

    Args:
        unit_rows: The rows of each unit.
        rows: How many rows to draw.
        seed: Seed of the draw.
        part: Index of the arc. Arcs with the same seed and number of rows have no row in common.

    Returns:
        The indices of the rows, ascending, and of each the index of its unit.

    Raises:
        ValueError: If there are too few rows.
    """
    total = int(unit_rows.sum(dtype=np.int64))
    if rows * (part + 1) > total:
        parts = f"{part + 1} parts of {rows} rows each" if part else f"rows={rows}"
        raise ValueError(f"{parts} are more than the {total} rows there are: draw fewer rows")
    drawn = arc(unit_rows, total, part * rows, rows, seed, 0)
    firsts = np.cumsum(unit_rows, dtype=np.int64) - unit_rows
    counts = drawn.stops - drawn.starts
    skipped = firsts[drawn.units] + drawn.starts - (np.cumsum(counts) - counts)
    return np.arange(rows) + np.repeat(skipped, counts), np.repeat(drawn.units, counts)
