"""Random samples of a reader's rows."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag
from fastpipe._ordering import LARGEST_BATCH, within
from fastpipe.reader import Reader

__all__ = ["LARGEST_SAMPLE", "rows_of_sample", "sample"]

LARGEST_SAMPLE = 2**31
_LARGEST_PART = 2**20


def sample(
    reader: Reader,
    rows: SupportsIndex,
    *,
    replace: bool = False,
    seed: SupportsIndex | None = None,
    part: SupportsIndex = 0,
    batch_size: SupportsIndex | None = None,
) -> Reader:
    """Draws a uniform random sample of a reader's rows, of whatever source.

    Which rows it has is a pure function of seed and epoch: each epoch has another sample, of the same size. They come
    in the order in which they stand, so that each unit is read once, and units without any aren't read at all. States,
    `batch_at` and adapters are those of any reader.

    Args:
        reader: of one rank. Its features, threads, limits and epochs are kept, its order isn't.
        rows: of the sample, up to 2^31; without `replace`, at most as many as there are.
        replace: whether a row may be drawn several times (a bootstrap).
        seed: of the drawing, 0 to 2^64 - 1. One is drawn by default, and shown by `seed` of what is returned.
        part: without `replace`, samples of the same seed and size with different parts have no row in common: part `k`
            has the rows that are drawn behind those of parts 0 to `k - 1`. For several devices, or for training and
            validation. With `replace`, parts are drawn independently of each other.
        batch_size: rows a batch; None for those of the reader. The units of a batch are open at the same time: the
            fewer rows are drawn of many, the more memory a batch takes.

    Returns:
        A reader of the sample.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if one is out of range, there aren't so many rows, or the reader is one of several ranks.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=64)
        >>> half = fastpipe.sample(reader, reader.num_rows // 2, seed=7)
        >>> rest = fastpipe.sample(reader, reader.num_rows // 2, seed=7, part=1)
        >>> half.num_rows + rest.num_rows == reader.num_rows
        True
    """
    if not isinstance(reader, Reader):
        raise TypeError(f"reader is a fastpipe.Reader, not {type(reader).__name__}")
    if reader.world_size > 1:
        raise ValueError("a sample is drawn of a reader of one rank: leave out world_size, and give part=rank")
    if reader._ordering.is_sample:
        raise ValueError("this reader is of a sample already: draw from the reader that it was drawn of")
    there = reader._data.handle.num_rows
    replaced = flag("replace", replace)
    count = within("rows", rows, 1, LARGEST_SAMPLE)
    number = within("part", part, 0, _LARGEST_PART)
    skipped = count * number
    if not replaced and skipped + count > there:
        behind = f" of parts 0 to {number}, of {count} rows each" if number else ""
        raise ValueError(
            f"rows={count}{behind} are more than the {there} rows there are: replace=True draws some twice"
        )
    if there == 0:
        raise ValueError("there are no rows to draw from")
    ordering = reader._ordering.sample(count, skipped, None if seed is None else int(seed), replace=replaced)
    if batch_size is not None:
        ordering = ordering.with_batch_size(within("batch_size", batch_size, 1, LARGEST_BATCH))
    return Reader(reader._data, **(reader._options() | {"ordering": ordering}))


def rows_of_sample(reader: Reader, epoch: int = 0) -> npt.NDArray[np.int64]:
    """The numbers of the rows that a sample has in an epoch, counted over all files, ascending.

    Raises:
        ValueError: if the reader isn't of a sample.
    """
    rows = reader._order.sample(epoch)
    if rows is None:
        raise ValueError("this reader is of all rows, not of a sample")
    return rows
