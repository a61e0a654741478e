"""Random samples of a reader's rows: uniform, by strata, by weights, or in whole units.

Each row has a word from the counter-based generator Philox (J. K. Salmon et al., Parallel Random Numbers: As Easy as 1,
2, 3, 2011), keyed by the seed. NumPy keeps its raw words the same over versions.

Strata and units are drawn systematically (W. G. Madow, L. H. Madow, On the Theory of Systematic Sampling, 1944): rows
are arranged on a circle in a random order that keeps strata or units together, and the circle is entered at a random
row. Each row is then drawn with exactly the same probability, and each draw has exactly the number of rows that was
asked for.
"""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag
from fastpipe._reader.ordering import LARGEST_BATCH, Ordering, seed_of, within
from fastpipe._reader.reader import Reader
from fastpipe.batch import Masked
from fastpipe.errors import SchemaError, UnsupportedError

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


LARGEST_SAMPLE = 2**31
_LARGEST_PART = 2**20


def sample(
    reader: Reader,
    rows: SupportsIndex,
    *,
    replace: bool = False,
    seed: SupportsIndex | None = None,
    part: SupportsIndex = 0,
    stratify: str | npt.ArrayLike | None = None,
    weights: str | npt.ArrayLike | None = None,
    batch_size: SupportsIndex | None = None,
) -> Reader:
    """Draws a uniform random sample of a reader's rows, of whatever source.

    Which rows it has is a pure function of seed and epoch: each epoch has another sample, of the same size. They come
    in the order in which they stand, so that each unit is read once, and units without any aren't read at all. States,
    `batch_at` and adapters are those of any reader. `rebatch` shuffles the rows.

    Args:
        reader: of one rank, made with `shuffle=False`. Its features, threads, limits and epochs are kept.
        rows: of the sample, up to 2^31; without `replace`, at most as many as there are.
        replace: whether a row may be drawn several times (a bootstrap).
        seed: of the drawing, 0 to 2^64 - 1. One is drawn by default, and shown by `seed` of what is returned.
        part: without `replace`, samples of the same seed and size with different parts have no row in common: part `k`
            has the rows that are drawn behind those of parts 0 to `k - 1`. For several devices, or for training and
            validation. With `replace`, parts are drawn independently of each other.
        stratify: Draws from each group of rows with equal values in proportion to its rows, rounded up or down at
            random by the seed, so that each row is equally likely: the name of a feature, which is read of all rows
            once, or an array with a value for each row. All epochs have the same sample then.
        weights: draws rows in proportion to these: the name of a feature, or an array. All epochs have the same sample
            then. Without `replace`, one row after the other is drawn of those that are left.
        batch_size: rows a batch; None for those of the reader. The units of a batch are open at the same time: the
            fewer rows are drawn of many, the more memory a batch takes.

    Returns:
        A reader of the sample.

    Raises:
        SchemaError: if `stratify` or `weights` names no feature.
        TypeError: if an argument is of the wrong type.
        UnsupportedError: if the reader is shuffled.
        ValueError: if one is out of range, there are too few rows, or the reader is one of several ranks.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=64)
        >>> half = fastpipe.sample(reader, reader.num_rows // 2, seed=7)
        >>> rest = fastpipe.sample(reader, reader.num_rows // 2, seed=7, part=1)
        >>> half.num_rows + rest.num_rows == reader.num_rows
        True
    """
    _check_population(reader, "give part=rank")
    _check_order(reader, "sample")
    there = reader._data.handle.num_rows
    again = flag("replace", replace)
    count = within("rows", rows, 1, LARGEST_SAMPLE)
    number = within("part", part, 0, _LARGEST_PART)
    skipped = count * number
    if not again and skipped + count > there:
        behind = f" of parts 0 to {number}, of {count} rows each" if number else ""
        raise ValueError(
            f"rows={count}{behind} are more than the {there} rows there are: replace=True draws some twice"
        )
    if there == 0:
        raise ValueError("there are no rows to draw from")
    if stratify is not None or weights is not None:
        return _drawn(reader, count, seed, number, stratify, weights, batch_size, replace=again)
    ordering = reader._ordering.sample(count, skipped, None if seed is None else int(seed), replace=again)
    if batch_size is not None:
        ordering = ordering.with_batch_size(within("batch_size", batch_size, 1, LARGEST_BATCH))
    return Reader(reader._data, **(reader._options() | {"ordering": ordering}))


def _drawn(
    reader: Reader,
    rows: int,
    seed: SupportsIndex | None,
    part: int,
    stratify: Any,
    weights: Any,
    batch_size: SupportsIndex | None,
    *,
    replace: bool,
) -> Reader:
    """A sample that isn't uniform."""
    if stratify is not None and weights is not None:
        raise ValueError("give stratify or weights, not both")
    drawn = seed_of(seed)
    if stratify is not None:
        codes = codes_of(_values(reader, "stratify", stratify))
        numbers = stratified(codes, rows, drawn, part, replace=replace)
    else:
        given = _values(reader, "weights", weights)
        if given.dtype.kind not in "biuf":
            raise TypeError(f"weights are numbers, not {given.dtype}")
        # Numbers that float64 doesn't have become infinite, which is refused.
        with np.errstate(over="ignore"):
            floats = given.astype(np.float64)
        numbers = weighted(floats, rows, drawn, part, replace=replace)
    return take(reader, numbers, batch_size=batch_size)


def _values(reader: Reader, what: str, given: Any) -> npt.NDArray[Any]:
    """A value for each row: an array, or what a feature has."""
    there = reader._data.handle.num_rows
    if not isinstance(given, str):
        values = np.asarray(given)
        if values.shape != (there,):
            raise ValueError(f"{what} has a value for each of the {there} rows, not the shape {values.shape}")
        return values
    if given not in reader.features:
        raise SchemaError(f"{what} names no feature of the reader: {given!r}", feature=given)
    parts = []
    plain = Ordering.checked(batch_size=1 << 16)
    with Reader(reader._data, **(reader._options() | {"ordering": plain, "epochs": 1})) as all_rows:
        for batch in all_rows:
            values = batch[given]
            if isinstance(values, Masked):
                if not np.asarray(values.valid).all():
                    raise ValueError(f"{what}: {given!r} is null in some rows: read it with a fill value")
                values = values.values
            # Batches would keep the memory of all of their columns.
            parts.append(np.array(values))
    found = np.concatenate(parts)
    if found.ndim != 1:
        raise ValueError(f"{what}: {given!r} isn't one value a row")
    return found


def take(reader: Reader, rows: npt.ArrayLike, *, batch_size: SupportsIndex | None = None) -> Reader:
    """Takes the rows with some numbers, of whatever source.

    For samples that are drawn otherwise than `sample` draws them, and for cross-validation: the rows of each fold. They
    come in the order in which they stand, each as often as it is named. States, `batch_at` and adapters are those of
    any reader. `rebatch` shuffles the rows, which training needs if those of the files are sorted in some way.

    Args:
        reader: of one rank, made with `shuffle=False`. Its features, threads, limits and epochs are kept.
        rows: integers `[n]`, in any order: the numbers of rows, counted over all units or files, from 0.
        batch_size: rows a batch; None for those of the reader.

    Returns:
        A reader of these rows.

    Raises:
        TypeError: if an argument is of the wrong type.
        UnsupportedError: if the reader is shuffled.
        ValueError: if there is no such row, no row is named, or the reader is one of several ranks.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=64)
        >>> taken = fastpipe.take(reader, [7, 3, 100])
        >>> taken.num_rows
        3
        >>> shuffled = fastpipe.rebatch(taken, 64, shuffle_buffer=taken.num_rows, seed=7, epoch=0)
    """
    _check_population(reader, "take rows[rank::world_size] on each rank")
    _check_order(reader, "take")
    numbers = np.asarray(rows)
    if numbers.dtype == object or numbers.dtype.kind not in "iu":
        raise TypeError(f"rows are integers, not {numbers.dtype}")
    if numbers.ndim != 1 or not numbers.size or numbers.size > LARGEST_SAMPLE:
        raise ValueError(f"rows are one list of up to {LARGEST_SAMPLE} numbers, not of shape {numbers.shape}")
    there = reader._data.handle.num_rows
    if numbers.min() < 0 or numbers.max() >= there:
        raise ValueError(f"row {numbers.min() if numbers.min() < 0 else numbers.max()} isn't one of the {there} rows")
    ordering = reader._ordering.take(np.sort(numbers.astype(np.int64)))
    if batch_size is not None:
        ordering = ordering.with_batch_size(within("batch_size", batch_size, 1, LARGEST_BATCH))
    return Reader(reader._data, **(reader._options() | {"ordering": ordering}))


def _check_population(reader: Reader, advice: str) -> None:
    if not isinstance(reader, Reader):
        raise TypeError(f"reader is a fastpipe.Reader, not {type(reader).__name__}")
    if reader.world_size > 1:
        raise ValueError(f"rows are chosen from a reader of one rank: leave out world_size, and {advice}")
    if reader._ordering.is_sample:
        raise ValueError("this reader is of a sample already: draw from the reader that it was drawn of")


def _check_order(reader: Reader, name: str) -> None:
    if (shuffle := reader._ordering.shuffle) != "sequential":
        shown = True if shuffle == "window" else shuffle
        reason = (
            f"{name}() yields rows in file order, and would drop shuffle={shown!r} of the reader. Make the reader with"
            f" shuffle=False, and shuffle the rows that it selects: chosen = fastpipe.{name}(reader, ...), then"
            f" fastpipe.rebatch(chosen, {reader.batch_size}, shuffle_buffer=chosen.num_rows, seed=7, epoch=0)"
        )
        raise UnsupportedError(reason, reason=reason)


def in_file_order(reader: Reader) -> Reader:
    """The same rows in the order of the files, for uses to which the order doesn't matter."""
    ordering = replaced(reader._ordering, shuffle="sequential", shuffle_buffer=None, shard_by="window")
    return Reader(reader._data, **(reader._options() | {"ordering": ordering}))


def counts_of(reader: Reader) -> npt.NDArray[np.uint32]:
    """The rows of each unit of a reader's data set.

    Raises:
        TypeError: if it is no reader.
        ValueError: if samples can't be drawn of it.
    """
    _check_population(reader, "name the devices of all ranks in devices=")
    return reader._data.handle.unit_rows()


def gathered(reader: Reader, rows: npt.NDArray[np.int64], batch_size: int, memory_limit: int) -> Reader:
    """A reader of one pass over rows, which ascend, in batches of `batch_size`, none left out."""
    ordering = replaced(reader._ordering.take(rows).with_batch_size(batch_size), drop_last=False)
    running = replaced(reader._running, memory_limit=memory_limit)
    return Reader(reader._data, ordering=ordering, running=running, progress=False, epochs=1)


def rows_of_sample(reader: Reader, epoch: int = 0) -> npt.NDArray[np.int64]:
    """The numbers of the rows that a sample has in an epoch, counted over all files, ascending.

    Raises:
        ValueError: if the reader isn't of a sample.
    """
    rows = reader._order.sample(epoch)
    if rows is None:
        raise ValueError("this reader is of all rows, not of a sample")
    return rows
