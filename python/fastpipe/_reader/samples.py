"""Random samples of a reader's rows."""

from __future__ import annotations

import secrets
from dataclasses import replace as replaced
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag
from fastpipe._reader.draws import codes_of, stratified, weighted
from fastpipe._reader.ordering import LARGEST_BATCH, Ordering, within
from fastpipe._reader.reader import Reader
from fastpipe.batch import Masked
from fastpipe.errors import SchemaError, UnsupportedError

__all__ = ["LARGEST_SAMPLE", "counts_of", "gathered", "in_file_order", "rows_of_sample", "sample", "take"]

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
    drawn = secrets.randbits(48) if seed is None else within("seed", seed, 0, 2**64 - 1)
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
