"""Batches of another size, and shuffled ones, from any batches."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, SupportsIndex

from fastpipe._arguments import flag
from fastpipe._fastpipe import RowBuffer
from fastpipe._reader.ordering import LARGEST_BATCH, seed_of, within
from fastpipe.batch._flatten import ColumnLayout

_END: Any = object()


def rebatch(
    batches: Iterable[Mapping[str, Any]],
    batch_size: SupportsIndex,
    *,
    shuffle_buffer: SupportsIndex = 0,
    seed: SupportsIndex | None = None,
    epoch: SupportsIndex = 0,
    drop_last: bool = False,
    copy: bool = False,
) -> Rebatcher:
    """Yields the rows of batches in batches of another size, in order or shuffled.

    Batches may come from anywhere, and have any number of rows, or none. Each is a dict from column name to a NumPy
    array `[rows, ...]` of any dtype that holds no Python objects, or to one of fastpipe's forms: `Ragged`, `Strings`,
    `Masked`, `Sparse`, `SparseCSR`, within each other as readers make them. All have the same columns, of the same
    forms, dtypes and shapes but for the rows. So do those that come out, in arrays of their own, which are the
    caller's. `dense_shape` of sparse columns has the largest sizes seen so far. Where `indices` of `Sparse` are of a
    type too narrow for the numbers of `batch_size` rows, those that come out are int64.

    Shuffled, batches are what `tf.data.Dataset.shuffle(shuffle_buffer).batch(batch_size)` yields, in distribution. Draw
    `i` of a Fisher-Yates shuffle swaps the row at position `i` with the one at a position drawn uniformly from
    `[i, min(i + shuffle_buffer, total))`, and puts it out. Which rows are in which batch depends on `batch_size`,
    `shuffle_buffer`, `seed`, `epoch` and the rows alone, not on the batches that they came in, and it stays the same in
    all versions.

    The buffer keeps up to `1.25 * (shuffle_buffer + batch_size)` rows, or `batch_size` more than a draw needs if that
    is more. Items of ragged columns, entries of sparse ones and the bytes of strings take up to about twice their size.

    Rows of 512 bytes or more aren't copied as they come in, but stay in the arrays that they came in, if these are
    C-contiguous, until they are drawn. Arrays that are held have, altogether, up to twice the rows of the buffer,
    besides the last batch that came in. So arrays that were handed over must not be written to before their rows have
    come out: a producer that writes to the same arrays again needs `copy=True`. With that, and without a shuffle,
    a batch is not looked at after the next one was asked for.

    Args:
        batches: the batches.
        batch_size: rows a batch, at least 1. The last one has fewer if rows are left.
        shuffle_buffer: rows among which each row is drawn, or 0 to keep the order.
        seed: what the shuffling depends on, below 2^64. By default a random one: see `Rebatcher.seed`.
        epoch: the epoch, at least 0. Each is shuffled in another way.
        drop_last: leave out the last batch if it has fewer rows.
        copy: copy all rows as they come in, for producers that write to their arrays again.

    Returns:
        An iterator of batches. It reads no more batches than it needs, and none before the first is asked for.

    Raises:
        TypeError: if an argument has another type; and, by the iterator, if a batch isn't a dict, if a column isn't an
            array or a form, holds Python objects, or has another form or dtype than in the first batch.
        ValueError: if an argument is out of range; and, by the iterator, if a batch has other columns or shapes than
            the first, if its columns have different numbers of rows, if offsets or coordinates are out of order, or if
            those of a sparse column lie outside of `dense_shape` or are more or fewer than its values.

    Example:
        >>> import numpy as np
        >>> import fastpipe
        >>> pieces = ({"x": np.arange(n, n + 3)} for n in range(0, 9, 3))
        >>> [batch["x"].tolist() for batch in fastpipe.rebatch(pieces, batch_size=4)]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    """
    return Rebatcher(
        batches, batch_size, shuffle_buffer=shuffle_buffer, seed=seed, epoch=epoch, drop_last=drop_last, copy=copy
    )


class Rebatcher(Iterator[dict[str, Any]]):
    """Yields rows in batches of another size. `rebatch` makes one, and says how.

    Several threads may draw from it: each batch goes to one of them. An error ends it: it is raised again by each
    further `next`. So does Ctrl-C: rows may be lost where it lands, so each further `next` raises `RuntimeError`. An
    error of a batch that came in has a note with its number, and refers to it by its traceback. Else neither rows nor
    the batches that came in are kept when it has ended, was closed or is dropped.
    """

    def __init__(
        self,
        batches: Iterable[Mapping[str, Any]],
        batch_size: SupportsIndex,
        *,
        shuffle_buffer: SupportsIndex = 0,
        seed: SupportsIndex | None = None,
        epoch: SupportsIndex = 0,
        drop_last: bool = False,
        copy: bool = False,
    ) -> None:
        self._batch_size = within("batch_size", batch_size, 1, LARGEST_BATCH)
        self._shuffle_buffer = within("shuffle_buffer", shuffle_buffer, 0, 2**31 - 1)
        self._seed = seed_of(seed)
        self._epoch = within("epoch", epoch, 0, 2**63 - 1)
        self._drop_last = flag("drop_last", drop_last)
        self._copy = flag("copy", copy)
        if isinstance(batches, Mapping):
            raise TypeError("batches is an iterable of dicts, not a dict: [batch] is one with a single batch")
        self._batches: Iterator[Mapping[str, Any]] | None = iter(batches)
        self._rows: _Rows | None = None
        self._came_in = 0
        self._error: Exception | None = None
        # A thread may meet its own lock: where the batches that come in, a finalizer or a signal handler call this.
        self._lock = threading.RLock()
        self._drawing = False

    @property
    def batch_size(self) -> int:
        """Rows a batch."""
        return self._batch_size

    @property
    def seed(self) -> int:
        """What the shuffling depends on, besides the epoch."""
        return self._seed

    def __repr__(self) -> str:
        shuffled = f", shuffle_buffer={self._shuffle_buffer}, seed={self._seed}, epoch={self._epoch}"
        return f"<fastpipe.Rebatcher: batch_size={self._batch_size}{shuffled if self._shuffle_buffer else ''}>"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        with self._lock:
            if self._error is not None:
                # Without what was added to it each time it was raised before.
                raise self._error.with_traceback(None)
            if self._drawing:
                raise RuntimeError(
                    "a batch was asked for while one is being made in the same thread: the batches that come in "
                    "mustn't be made of those that come out"
                )
            self._drawing = True
            try:
                batch = self._next()
            except BaseException as error:
                self._error = error if isinstance(error, Exception) else _interrupted(error)
                self._drop()
                raise
            finally:
                self._drawing = False
            if batch is None:
                self._drop()
                raise StopIteration
            return batch

    def close(self) -> None:
        """Drops all rows that wait. No batch comes after it."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._batches = self._rows = None

    def _next(self) -> dict[str, Any] | None:
        while True:
            batch = None if self._rows is None else self._rows.next()
            batches = self._batches
            if batch is not None or batches is None:
                return batch
            chunk = next(batches, _END)
            if self._batches is not batches:  # Whoever makes them has closed this.
                return None
            if chunk is _END:
                self._batches = None
                if self._rows is not None:
                    self._rows.finish()
                continue
            try:
                self._take_in(chunk)
            except (TypeError, ValueError) as error:
                error.add_note(f"This is batch {self._came_in} of those that came in, counted from 0.")
                raise
            self._came_in += 1

    def _take_in(self, chunk: Any) -> None:
        if not isinstance(chunk, (dict, Mapping)):  # Of a dict the abstract class isn't asked, which takes longer.
            raise TypeError(f"a batch is a dict from column name to array, not {type(chunk).__name__}")
        if self._rows is None:
            self._rows = _Rows(
                chunk,
                self._batch_size,
                shuffle_buffer=self._shuffle_buffer,
                key=(self._seed, self._epoch),
                drop_last=self._drop_last,
                copy=self._copy,
            )
        self._rows.push(chunk)


def _interrupted(by: BaseException) -> RuntimeError:
    return RuntimeError(
        f"{type(by).__name__} has ended an earlier call, and rows may be lost: start over with another rebatch(...)"
    )


class _Rows:
    """The rows that wait."""

    def __init__(self, first: Mapping[str, Any], batch_size: int, **options: Any) -> None:
        self._columns = ColumnLayout(first, batch_size)
        arrays = self._columns.arrays
        self._plain = arrays is not None
        self._buffer = RowBuffer(self._columns.parts, batch_size=batch_size, arrays=arrays, **options)

    def push(self, batch: Mapping[str, Any]) -> None:
        if self._plain and self._buffer.push_arrays(batch):
            return  # Others are taken apart, and if need be refused, column by column.
        rows, parts = self._columns.split(batch)
        if rows:
            self._buffer.push(rows, parts)

    def finish(self) -> None:
        self._buffer.finish()

    def next(self) -> dict[str, Any] | None:
        if self._plain:
            return self._buffer.next_arrays()
        taken = self._buffer.next()
        if taken is None:
            return None
        return self._columns.join(*taken)
