"""Random samples of a reader's rows: uniform, stratified, balanced, weighted, or of whole units.

A sample is a selection, so it has the order and ranks of its reader. Only samples that are drawn for each epoch are an
order.

Each row has a word from the counter-based generator Philox (J. K. Salmon et al., Parallel Random Numbers: As Easy as 1,
2, 3, 2011), keyed by the seed. NumPy guarantees that its raw words are the same in all versions.

Strata and units are sampled systematically (W. G. Madow, L. H. Madow, On the Theory of Systematic Sampling, 1944). Rows
are arranged on a circle in a random order that keeps strata or units together, and sampling starts at a random row. So
each row is drawn with exactly the same probability, and each sample has exactly the requested number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag, within
from fastpipe._expressions import Expr
from fastpipe._reader.conditions import Evaluated
from fastpipe._reader.filtering import evaluated
from fastpipe._reader.indexed_rows import indexed
from fastpipe._reader.ordering import LARGEST_BATCH, Ordering, seed_of
from fastpipe._reader.selection import Selected, check, select
from fastpipe._reader.sequential_reads import columns_of
from fastpipe.batch import Masked
from fastpipe.errors import SchemaError, UnsupportedError

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader

_Rows = npt.NDArray[np.int64]
# An array with a value for each row, the name of a feature, or an expression.
_Checked: TypeAlias = npt.NDArray[Any] | str | Evaluated

# Other streams with the same seed have smaller numbers, or belong to `BlockRows`.
_STRATA = 1 << 44


def uniform(seed: int, stream: int, count: int) -> npt.NDArray[np.float64]:
    """Returns random numbers above 0 and below 1."""
    words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(count)
    # Excludes both ends, and makes all values multiples of the same power of two.
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def codes_of(values: Any) -> npt.NDArray[np.int64]:
    """Returns the index of each value's stratum. Strata are numbered in the order of their first rows.

    So the same strata get the same sample whether their values are read as text or as numbers.
    """
    _, first, found = np.unique(np.asarray(values), return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first)).astype(np.int64)[found.reshape(-1)]


def stratified(codes: npt.NDArray[np.int64], rows: int, seed: int, part: int, *, replace: bool) -> _Rows:
    """Draws from each stratum in proportion to its rows.

    The number of rows per stratum is rounded up or down at random, depending on the seed.

    Args:
        codes: Stratum of each row, from 0.
        rows: Number of rows to draw.
        seed: Seed of the sample.
        part: Index of the part. Without replacement, different parts have no row in common. There are
            `len(codes) // rows` parts.
        replace: Whether a row may be drawn several times.
    """
    total, sizes = len(codes), np.bincount(codes)
    words = uniform(seed, _STRATA, len(sizes) + 1)
    # Strata are also arranged at random. At most one of several small neighboring strata gets a row.
    turn = np.argsort(np.argsort(words[1:]))
    order = np.lexsort((uniform(seed, 0, total), turn[codes]))
    if not replace:
        # Positions are at least `total // rows` apart, so the positions of other parts fit between them.
        return order[(_spread(total, rows, int(words[0] * total)) + part) % total]
    keys = uniform(seed, 1 + part, rows + 1)
    drawn = turn[codes[order[_spread(total, rows, int(keys[0] * total))]]]
    turned = sizes[np.argsort(turn)]
    replaced: _Rows = order[(np.cumsum(turned) - turned)[drawn] + (keys[1:] * turned[drawn]).astype(np.int64)]
    return replaced


def balanced(codes: npt.NDArray[np.int64], rows: int, seed: int, part: int, *, replace: bool) -> _Rows:
    """Draws equally many rows from each stratum. At random, some strata have one row more.

    Args:
        codes: Stratum of each row, from 0. Each stratum has rows.
        rows: Number of rows to draw.
        seed: Seed of the sample.
        part: Index of the part. Without replacement, different parts have no row in common.
        replace: Whether a row may be drawn several times.

    Raises:
        TooFewRowsError: If a stratum has too few rows.
    """
    sizes = np.bincount(codes)
    turn = np.argsort(np.argsort(uniform(seed, _STRATA, len(sizes))))
    counts = rows // len(sizes) + (turn < rows % len(sizes))
    order = np.lexsort((uniform(seed, 0, len(codes)), codes))
    firsts = np.cumsum(sizes) - sizes
    if replace:
        sizes, firsts = np.repeat(sizes, counts), np.repeat(firsts, counts)
        replaced: _Rows = order[firsts + (uniform(seed, 1 + part, rows) * sizes).astype(np.int64)]
        return replaced
    needed = counts * (part + 1)
    if (sizes < needed).any():
        raise TooFewRowsError(int(np.argmax(sizes < needed)), int(needed.max()))
    # Positions among the rows of all strata, which are adjacent.
    skipped = firsts + counts * part - (np.cumsum(counts) - counts)
    drawn: _Rows = order[np.arange(rows) + np.repeat(skipped, counts)]
    return drawn


class TooFewRowsError(ValueError):
    """A stratum has too few rows.

    Args:
        stratum: Index of the stratum.
        needed: Number of rows that a stratum needs.
    """

    def __init__(self, stratum: int, needed: int) -> None:
        super().__init__(f"stratum {stratum} has fewer than {needed} rows")
        self.stratum, self.needed = stratum, needed


def _spread(total: int, rows: int, start: int) -> _Rows:
    """Returns `rows` ascending, equally spaced positions below `total`.

    The positions are `(start + j * total) // rows`, computed without overflow. If `start` is uniform on 0 to
    `total - 1`, each position is included with probability `rows / total`.
    """
    whole, rest = divmod(total, rows)
    each = np.arange(rows, dtype=np.int64)
    return each * whole + start // rows + (start % rows + each * rest) // rows


def weighted(weights: npt.NDArray[np.float64], rows: int, seed: int, part: int, *, replace: bool) -> _Rows:
    """Draws rows one after the other with probabilities proportional to weights.

    Without replacement, each draw is from the remaining rows. The result is the rows with the smallest
    `-log(u) / weight` (P. S. Efraimidis, P. G. Spirakis, Weighted random sampling with a reservoir, 2006).

    Args:
        weights: Weight of each row.
        rows: Number of rows to draw.
        seed: Seed of the sample.
        part: Index of the part. Without replacement, the rows of earlier parts are excluded.
        replace: Whether a row may be drawn several times.

    Raises:
        ValueError: If a weight is negative or not finite, or if too few weights are above 0.
    """
    if not np.isfinite(weights).all() or (weights < 0).any():
        wrong = int(np.argmax(~np.isfinite(weights) | (weights < 0)))
        raise ValueError(f"weights must be finite and at least 0; the weight of row {wrong} is {weights[wrong]}")
    there = np.flatnonzero(weights)
    if len(there) < (1 if replace else rows * (part + 1)):
        raise ValueError(f"{len(there)} rows have weights above 0, fewer than the {rows * (part + 1)} to be drawn")
    if replace:
        # Scaling by a power of two is exact. It prevents overflow and loss of digits in the sum.
        sums = np.cumsum(np.ldexp(weights[there], -np.frexp(weights.max())[1]))
        places = np.searchsorted(sums, uniform(seed, 1 + part, rows) * sums[-1], side="right")
        replaced: _Rows = there[np.minimum(places, len(there) - 1)]
        return replaced
    # The logarithms of the keys have the same order and don't overflow.
    keys = np.log(-np.log(uniform(seed, 0, len(weights))[there])) - np.log(weights[there])
    return there[np.argsort(keys, kind="stable")[part * rows : (part + 1) * rows]]


class Arc(NamedTuple):
    """Successive rows on a circle of units, sorted by unit.

    Attributes:
        units: Unit indices, int64 `[n]`, ascending. A unit occurs twice if the arc begins and ends within it.
        starts: For each unit, the index of its first row in the arc among its rows on the circle, int64 `[n]`.
        stops: Index after the last row, int64 `[n]`.
        taken: Number of the unit's rows that are on the circle, int64 `[n]`.
    """

    units: _Rows
    starts: _Rows
    stops: _Rows
    taken: _Rows


def arc(unit_rows: npt.NDArray[Any], taken: int, skipped: int, rows: int, seed: int, stream: int) -> Arc:
    """Draws successive rows of units that are arranged on a circle at random, starting at a random row.

    Args:
        unit_rows: Number of rows in each unit.
        taken: Number of rows on the circle. Each unit contributes in proportion to its rows.
        skipped: Number of rows on the circle to skip first, for earlier draws.
        rows: Number of rows to draw. `rows + skipped` must be at most `taken`.
        seed: Seed of the sample.
        stream: Stream of the generator. All draws from the same circle use the same stream.
    """
    words = uniform(seed, stream, len(unit_rows) + 2)
    order = np.argsort(words[2:], kind="stable")
    ends = np.cumsum(unit_rows[order], dtype=np.int64)
    total = int(ends[-1])
    if taken < total:
        # Number of positions of `_spread` before each end. Python integers don't overflow.
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
    """Draws whole units, except for parts of two: an arc of a circle of all units.

    Args:
        unit_rows: Number of rows in each unit.
        rows: Number of rows to draw.
        seed: Seed of the sample.
        part: Index of the arc. Arcs with the same seed and `rows` have no row in common.

    Returns:
        The indices of the rows, ascending, and the index of each row's unit.

    Raises:
        ValueError: If there are too few rows.
    """
    total = int(unit_rows.sum(dtype=np.int64))
    if rows * (part + 1) > total:
        parts = f"{part + 1} parts of {rows} rows each" if part else f"rows={rows}"
        raise ValueError(f"{parts}: the dataset has only {total} rows, so draw fewer rows")
    drawn = arc(unit_rows, total, part * rows, rows, seed, 0)
    firsts = np.cumsum(unit_rows, dtype=np.int64) - unit_rows
    counts = drawn.stops - drawn.starts
    skipped = firsts[drawn.units] + drawn.starts - (np.cumsum(counts) - counts)
    return np.arange(rows) + np.repeat(skipped, counts), np.repeat(drawn.units, counts)


LARGEST_SAMPLE = 2**31
_LARGEST_PART = 2**20


def sample(
    reader: Reader,
    rows: int,
    *,
    replace: bool = False,
    seed: int | None = None,
    part: int = 0,
    stratify: str | Expr | npt.ArrayLike | None = None,
    balance: str | Expr | npt.ArrayLike | None = None,
    weights: str | Expr | npt.ArrayLike | None = None,
    redraw: bool = False,
    batch_size: int | None = None,
) -> Reader:
    """Draws a random sample of a reader's rows. See `Reader.sample`."""
    reader = _with_batch_size(reader, batch_size)
    there = reader._data.handle.num_rows
    again, anew = flag("replace", replace), flag("redraw", redraw)
    count = within("rows", rows, 1, LARGEST_SAMPLE)
    number = within("part", part, 0, _LARGEST_PART)
    skipped = count * number
    if reader._ordering.has_own_rows or reader._ordering.without_steps or not anew:
        check(reader, "sample")
    if seed is None and reader.world_size > 1:
        raise ValueError("set a seed: every rank must draw the same rows, and a random seed differs between ranks")
    if not again and skipped + count > there:
        behind = f" (parts 0 to {number}, {count} rows each)" if number else ""
        raise ValueError(
            f"rows={count}{behind} exceeds the {there} rows of the dataset: draw fewer rows, or set replace=True"
        )
    if there == 0:
        raise ValueError("the dataset has no rows to draw from")
    given = {"stratify": stratify, "balance": balance, "weights": weights}
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1 or (used and anew):
        raise ValueError(f"pass only one of {', '.join(used + ['redraw'] * anew)}")
    if used:
        numbers, known = _drawn(reader, count, seed_of(seed), number, used[0], given[used[0]], replace=again)
        return select(reader, np.sort(numbers), method=("sample", f"{used[0]}=, part {number}{known}"))
    ordering = reader._ordering.sample(count, skipped, None if seed is None else int(seed), replace=again)
    if anew:
        _check_order(reader)
        return reader._like(reader._data, ordering=ordering)
    # The samples of epochs begin with these rows.
    drawn = reader._like(reader._data, ordering=ordering)
    how = "with replacement" if again else "uniform"
    return select(reader, rows_of_sample(drawn), method=("sample", f"{how}, part {number}"))


def _drawn(
    reader: Reader, rows: int, seed: int, part: int, how: str, given: Any, *, replace: bool
) -> tuple[_Rows, str]:
    """Draws a stratified, balanced or weighted sample, and returns its rows and a phrase for plans."""
    there = reader._data.handle.num_rows
    if how == "weights":
        # A product with a float is a float.
        checked = _checked(reader, how, given * 1.0 if isinstance(given, Expr) else given)
        weights, known = _computed(reader, how, checked, "weights", np.float64, _weights)
        return weighted(weights, rows, seed, part, replace=replace), known
    checked = _checked(reader, how, given)
    codes, known = _computed(reader, how, checked, "strata", np.min_scalar_type(there), codes_of)
    codes = codes.astype(np.int64, copy=False)
    if how == "stratify":
        return stratified(codes, rows, seed, part, replace=replace), known
    try:
        return balanced(codes, rows, seed, part, replace=replace), known
    except TooFewRowsError as error:
        sizes, row = np.bincount(codes), int(np.argmax(codes == error.stratum))
        if isinstance(checked, np.ndarray):
            value = checked[row]
        else:
            # The index cache has only the codes.
            plain = reader._like(reader._data, ordering=Ordering.checked(batch_size=1))
            value = _values(select(plain, np.array([row])), how, checked)[0]
        raise ValueError(
            f"balance: {sizes[error.stratum]} rows have the value {value!s:.100}, fewer than the {error.needed} to be"
            f" drawn of each value: draw at most rows={sizes.min() // (part + 1) * len(sizes)}, or set replace=True"
        ) from None


def _computed(
    reader: Reader,
    how: str,
    checked: _Checked,
    kind: str,
    dtype: npt.DTypeLike,
    compute: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
) -> tuple[npt.NDArray[Any], str]:
    """Returns an array that is computed from a value for each row, and a phrase for plans.

    The index cache keeps it, with this dtype, if it is computed from features. `kind` says what is computed.
    """
    if isinstance(checked, np.ndarray):
        return compute(checked), ""
    names, text = ([checked], "") if isinstance(checked, str) else (checked.names, repr(checked.expression))
    shape = reader._data.handle.num_rows, dtype
    return indexed(reader, names, (kind, *names, text), shape, lambda: compute(_values(reader, how, checked)))


def _weights(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if values.dtype.kind not in "biuf":
        raise TypeError(f"weights must be numbers; got {values.dtype}")
    # Numbers that float64 can't represent are converted to infinity, which raises an error.
    with np.errstate(over="ignore"):
        return values.astype(np.float64)


def _checked(reader: Reader, what: str, given: Any) -> _Checked:
    """Returns an array with a value for each row, the name of a feature, or an expression."""
    if isinstance(given, Expr):
        return Evaluated(given, reader.features, f"{what}=")
    there = reader._data.handle.num_rows
    if not isinstance(given, str):
        values = np.asarray(given)
        if values.shape != (there,):
            raise ValueError(f"{what} must have one value for each of the {there} rows; got shape {values.shape}")
        return values
    if given not in reader.features:
        known = ", ".join(map(repr, reader.features))
        raise SchemaError(
            f"{what} must be the name of a feature, an array with a value for each row, or an expression such as"
            f" fastpipe.col({next(iter(reader.features), 'age')!r}) > 3; got {given!r}. The features are {known}",
            feature=given,
        )
    return given


def _values(reader: Reader, what: str, checked: str | Evaluated) -> npt.NDArray[Any]:
    """Returns the value of a feature or an expression in each row."""
    if isinstance(checked, Evaluated):
        return evaluated(reader, what, checked)
    parts = []
    with columns_of(reader, [checked]) as all_rows:
        for batch in all_rows:
            values = batch[checked]
            if isinstance(values, Masked):
                if not np.asarray(values.valid).all():
                    raise ValueError(f"{what}: {checked!r} is null in some rows: use a fill value when reading it")
                values = values.values
            # Keeping the array itself would keep the memory of all columns of the batch.
            parts.append(np.array(values))
    found = np.concatenate(parts)
    if found.ndim != 1:
        raise ValueError(f"{what}: {checked!r} must have one value per row")
    return found


def take(reader: Reader, rows: npt.ArrayLike, *, batch_size: int | None = None) -> Reader:
    """Selects rows of a reader by index. See `Reader.take`."""
    check(reader, "take")
    numbers = np.asarray(rows)
    if numbers.ndim == 1 and not numbers.size:
        raise ValueError("rows is empty: pass at least one row index")
    if numbers.dtype == object or numbers.dtype.kind not in "iu":
        raise TypeError(f"rows must be integers; got {numbers.dtype}")
    if numbers.ndim != 1 or numbers.size > LARGEST_SAMPLE:
        raise ValueError(f"rows must be a list of 1 to {LARGEST_SAMPLE} numbers; got shape {numbers.shape}")
    there = reader._data.handle.num_rows
    if numbers.min() < 0 or numbers.max() >= there:
        raise ValueError(f"row {numbers.min() if numbers.min() < 0 else numbers.max()} does not exist in {there} rows")
    # The caller may change the array later.
    return select(_with_batch_size(reader, batch_size), numbers.astype(np.int64), method=("take", "rows by index"))


def _with_batch_size(reader: Reader, batch_size: int | None) -> Reader:
    if batch_size is None:
        return reader
    ordering = reader._ordering.with_batch_size(within("batch_size", batch_size, 1, LARGEST_BATCH))
    return reader._like(reader._data, ordering=ordering)


def _check_order(reader: Reader) -> None:
    if (shuffle := reader._ordering.shuffle) != "sequential":
        shown = True if shuffle == "window" else shuffle
        reason = (
            f"sample(redraw=True) yields rows in file order and would ignore the reader's shuffle={shown!r}. Create the"
            " reader with shuffle=False, and shuffle the drawn rows: drawn = reader.sample(..., redraw=True), then"
            f" drawn.rebatch({reader.batch_size}, shuffle_buffer=drawn.num_rows, seed=7)"
        )
        raise UnsupportedError(reason, reason=reason)


def in_file_order(reader: Reader) -> Reader:
    """Returns a reader of the same rows in file order, for uses that don't depend on the order."""
    ordering = replaced(reader._ordering, shuffle="sequential", shuffle_buffer=None, shard_by="window")
    return reader._like(reader._data, ordering=ordering)


def counts_of(reader: Reader) -> npt.NDArray[np.uint32]:
    """Returns the number of rows in each unit of a reader's dataset.

    Raises:
        ValueError: If the reader has ranks, or draws a sample for each epoch.
    """
    if reader.world_size > 1:
        raise ValueError("omit rank and world_size, and name the devices of all ranks in devices=")
    check(reader, "fill")
    return reader._data.handle.unit_rows()


def gathered(reader: Reader, rows: npt.NDArray[np.int64], batch_size: int, memory_limit: int) -> Reader:
    """Returns a reader of one pass over the given rows, which must ascend. No row is left out."""
    ordering = Ordering.checked(batch_size=batch_size, seed=reader.seed)
    running = replaced(reader._running.strict, memory_limit=memory_limit)
    data = Selected(reader._data, rows)
    return reader._like(data, ordering=ordering, running=running, progress=False, epochs=1)


def rows_of_sample(reader: Reader, epoch: int = 0) -> npt.NDArray[np.int64]:
    """Returns the indices of the rows of a selection, or of a sample that is drawn for an epoch, over all units.

    Raises:
        ValueError: If the reader has all rows.
    """
    if reader._ordering.is_sample and (rows := reader._order.sample(epoch)) is not None:
        return rows
    if not isinstance(reader._data, Selected):
        raise ValueError("this reader reads all rows; it is not a sample")
    index = reader._data.origin()[1]
    return np.flatnonzero(index) if index.dtype == np.bool_ else index
