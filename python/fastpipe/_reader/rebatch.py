"""Changes the size of batches from any source, and shuffles their rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from fastpipe._arguments import flag, within
from fastpipe._fastpipe import RowBuffer
from fastpipe._reader.ordering import LARGEST_BATCH, seed_of
from fastpipe._reader.passes import Passes
from fastpipe._reader.state import State, checksum, differences
from fastpipe.batch._flatten import ColumnLayout
from fastpipe.errors import StateError

_END: Any = object()
_VERSION = 1


class Rebatcher(Iterator[dict[str, Any]]):
    """Yields the rows of batches in batches of another size, in order or shuffled.

    `Reader.rebatch` creates one for the batches of a reader.

    Batches may come from any iterable and have any number of rows, including none. Each batch is a dict from column
    name to a NumPy array `[rows, ...]` without Python objects, or to a batch form: `Ragged`, `Strings`, `Masked`,
    `Sparse` or `SparseCSR`, nested as in batches of readers. All batches must have the same columns, with the same
    forms, dtypes and shapes except for the number of rows. The resulting batches have them too. Their arrays are new
    and belong to the caller. `dense_shape` of sparse columns has the largest sizes seen so far. If the dtype of
    `Sparse.indices` is too narrow for `batch_size` rows, the resulting indices are int64.

    With a shuffle buffer, batches have the distribution of `tf.data.Dataset.shuffle(shuffle_buffer).batch(batch_size)`.
    Draw `i` of a Fisher-Yates shuffle swaps the row at position `i` with the row at a position drawn uniformly from
    `[i, min(i + shuffle_buffer, total))`, and yields it. The rows of a batch depend only on `batch_size`,
    `shuffle_buffer`, `seed`, `epoch` and the sequence of rows, not on the incoming batches. The result is the same in
    all versions of fastpipe.

    The buffer holds up to `1.25 * (shuffle_buffer + batch_size)` rows, or `batch_size` more than a draw needs if that
    is more. Items of ragged columns, entries of sparse columns and the bytes of strings need up to about twice their
    size.

    Rows of 512 bytes or more are not copied when they arrive. They stay in their original arrays, if these are
    C-contiguous, until they are drawn. In total, these arrays have up to twice the rows of the buffer, in addition to
    the last incoming batch. So a producer must not write to an array before all of its rows have been yielded.
    Producers that reuse their arrays need `copy=True`. With `copy=True` and without shuffling, an incoming batch is not
    accessed after the next one has been requested.

    The iterator requests incoming batches only when it needs them, and none before the first `next`. Several threads
    may draw from it; each batch goes to one of them. An error ends it, and each further `next` raises the error again.
    Ctrl-C also ends it: rows may be lost then, so each further `next` raises `RuntimeError`. An error in an incoming
    batch has a note with the index of the batch, and its traceback references the batch. Otherwise, no rows or incoming
    batches are kept after the iterator has ended or was closed or dropped.

    `state_dict` and `load_state_dict` resume between any two batches. A state is the number of batches that were
    yielded, because the order depends on nothing else. To resume, the incoming batches are read again from the
    beginning, and this number of resulting batches is dropped.

    Args:
        batches: Iterable of batches.
        batch_size: Rows per batch, 1 to 2^31 - 1. The last batch may have fewer.
        shuffle_buffer: Number of rows from which each row is drawn, up to 2^31 - 1, or 0 to keep the order. Defaults to
            0.
        seed: Seed of the shuffle, 0 to 2^64 - 1. By default a random seed is drawn, which `Rebatcher.seed` returns.
        epoch: Epoch, 0 to 2^63 - 1. Each epoch is shuffled differently. Defaults to 0. A state sets it, too.
        drop_last: Whether to drop the last batch if it has fewer than `batch_size` rows. Defaults to False.
        copy: Whether to copy all rows when they arrive, for producers that reuse their arrays. Defaults to False.

    Raises:
        TypeError: If an argument has the wrong type. The iterator also raises it for batches that aren't dicts, and for
            columns that aren't arrays or forms, hold Python objects, or differ in form or dtype from the first batch.
        ValueError: If an argument is out of range. The iterator also raises it if a batch differs in columns or shapes
            from the first one, or if its columns have different numbers of rows. Further reasons are offsets or
            coordinates that are not in order, coordinates outside of `dense_shape`, and a number of coordinates that
            differs from the number of values.

    Example:
        >>> import numpy as np
        >>> import fastpipe
        >>> pieces = ({"x": np.arange(n, n + 3)} for n in range(0, 9, 3))
        >>> [batch["x"].tolist() for batch in fastpipe.Rebatcher(pieces, batch_size=4)]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    """

    def __init__(
        self,
        batches: Iterable[Mapping[str, Any]],
        batch_size: int,
        *,
        shuffle_buffer: int = 0,
        seed: int | None = None,
        epoch: int = 0,
        drop_last: bool = False,
        copy: bool = False,
    ) -> None:
        self._batch_size = within("batch_size", batch_size, 1, LARGEST_BATCH)
        self._shuffle_buffer = within("shuffle_buffer", shuffle_buffer, 0, 2**31 - 1)
        self._seed, self._seed_given = seed_of(seed), seed is not None
        self._epoch = within("epoch", epoch, 0, 2**63 - 1)
        self._drop_last = flag("drop_last", drop_last)
        self._copy = flag("copy", copy)
        if isinstance(batches, Mapping):
            raise TypeError("batches must be an iterable of dicts; got a dict. For a single batch, pass [batch]")
        self._batches: Iterator[Mapping[str, Any]] | None = iter(batches)
        passes = getattr(batches, "_passes", None)
        # The reader that the batches come from, if any, and the state at the beginning of its pass.
        self._reader_state = passes.start_state() if isinstance(passes, Passes) else None
        self._reader = passes if self._reader_state is not None else None
        self._yielded = 0
        self._to_drop = 0
        self._rows: _Rows | None = None
        self._came_in = 0
        self._error: Exception | None = None
        # A thread may re-enter its own lock if the incoming batches, a finalizer or a signal handler call this object.
        self._lock = threading.RLock()
        self._drawing = False

    @property
    def batch_size(self) -> int:
        """Number of rows per batch."""
        return self._batch_size

    @property
    def seed(self) -> int:
        """Seed of the shuffle."""
        return self._seed

    def __repr__(self) -> str:
        shuffled = f", shuffle_buffer={self._shuffle_buffer}, seed={self._seed}, epoch={self._epoch}"
        return f"<fastpipe.Rebatcher: batch_size={self._batch_size}{shuffled if self._shuffle_buffer else ''}>"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        with self._lock:
            if self._error is not None:
                # Removes the traceback entries that were added each time the error was raised.
                raise self._error.with_traceback(None)
            if self._drawing:
                raise RuntimeError(
                    "next() was called while the same thread is making a batch: the incoming batches must not be "
                    "derived from the resulting ones"
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
            self._yielded += 1
            return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch that `next` has returned.

        If the batches come from a `Reader`, the state contains the reader's state at the beginning of the pass.

        Returns:
            A small dict that can be stored as JSON.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=777)
            >>> batches = reader.rebatch(1024, shuffle_buffer=4096, seed=7)
            >>> first = next(batches)
            >>> state = batches.state_dict()
            >>> again = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=777)
            >>> resumed = again.rebatch(1024, shuffle_buffer=4096, seed=7)
            >>> resumed.load_state_dict(state)
            >>> len(list(resumed))
            5
        """
        with self._lock:
            stored = self._settings() | {
                "version": _VERSION,
                "seed": self._seed,
                "epoch": self._epoch,
                "batches": self._yielded,
                "reader": None if self._reader_state is None else self._reader_state(),
            }
            return stored | {"checksum": checksum(stored)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from a state: the next batch is the one after the last batch before the state was saved.

        The batches of a `Reader` are read again from the beginning of the pass in which the state was saved. Batches
        that the reader has yielded since then don't matter. Any other iterable must yield the same rows as before, from
        the beginning. For such an iterable, call this method before the first `next`: fastpipe can't check whether the
        rows are the same.

        The first `next` reads all rows that were read before the state was saved. A reader with `shuffle="buffer"`, or
        with another `batch_size`, resumes without reading them.

        The epoch of the shuffle is that of the state. Without a `seed`, the seed is, too.

        Args:
            state_dict: A state as `state_dict` returned it.

        Raises:
            StateError: If the state has another `batch_size`, `shuffle_buffer`, `drop_last` or `seed`, is of a reader
                with other rows or another order, or is damaged. Also if batches that don't come from a `Reader` have
                been requested already. Nothing changes then. `next` raises it if the incoming batches end before the
                position of the state.
            TypeError: If the state isn't a dict.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict that state_dict() returned; got {type(state_dict).__name__}")
        with self._lock:
            seed, epoch, yielded, of_reader = self._read_state(state_dict)
            if self._reader is not None:
                self._reader.load_state_dict(of_reader)
                self._batches = self._reader.start().batches
                self._reader_state = self._reader.start_state()
            self._rows, self._error, self._came_in = None, None, 0
            self._seed, self._epoch, self._yielded, self._to_drop = seed, epoch, yielded, yielded

    def _settings(self) -> State:
        """Returns the arguments that must be equal when a state is loaded."""
        return {
            "batch_size": self._batch_size,
            "shuffle_buffer": self._shuffle_buffer,
            "drop_last": self._drop_last,
        }

    def _read_state(self, stored: Mapping[str, Any]) -> tuple[int, int, int, Any]:
        """Returns the seed, the epoch, the number of batches and the reader's state, after checking them."""
        version = stored.get("version")
        if isinstance(version, int) and version > _VERSION and "batches" in stored:
            raise StateError(
                f"the state has version {version}, and this version of fastpipe reads versions up to {_VERSION}: "
                "upgrade fastpipe to the version that saved it"
            )
        try:
            seed, epoch, yielded, of_reader = (stored[name] for name in ("seed", "epoch", "batches", "reader"))
            whole = stored["checksum"] == checksum({name: stored[name] for name in stored if name != "checksum"})
            if type(version) is not int or not whole:
                raise ValueError
        except (KeyError, RecursionError, TypeError, ValueError):
            raise StateError("this is not the state of a Rebatcher, or it is damaged") from None
        expected = self._settings() | ({"seed": self._seed} if self._seed_given else {})
        differing = differences(dict(stored), expected)
        if (of_reader is None) != (self._reader is None):
            which = ("another iterable", "a Reader") if of_reader is None else ("a Reader", "another iterable")
            differing.append(f"the batches came from {which[0]} and come from {which[1]}")
        if differing:
            raise StateError(f"cannot resume from this state: {'; '.join(differing)}")
        if self._reader is None and (self._drawing or self._came_in or self._batches is None or self._error):
            raise StateError(
                "cannot resume after batches were requested: create a Rebatcher of the same batches from the beginning"
            )
        return seed, epoch, yielded, of_reader

    def close(self) -> None:
        """Drops all buffered rows. No batch follows."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._batches = self._rows = None

    def _next(self) -> dict[str, Any] | None:
        while self._to_drop:
            if self._repacked() is None:
                raise StateError(
                    f"the incoming batches end before the position of the state, {self._to_drop} batches too early: "
                    "pass the same batches as when it was saved"
                )
            self._to_drop -= 1
        return self._repacked()

    def _repacked(self) -> dict[str, Any] | None:
        while True:
            batch = None if self._rows is None else self._rows.next()
            batches = self._batches
            if batch is not None or batches is None:
                return batch
            chunk = next(batches, _END)
            if self._batches is not batches:  # The producer of the batches has closed this object.
                return None
            if chunk is _END:
                self._batches = None
                if self._rows is not None:
                    self._rows.finish()
                continue
            try:
                self._take_in(chunk)
            except (TypeError, ValueError) as error:
                error.add_note(f"The error is in incoming batch {self._came_in}, counted from 0.")
                raise
            self._came_in += 1

    def _take_in(self, chunk: Any) -> None:
        if not isinstance(chunk, (dict, Mapping)):  # The check for dict avoids the slower check for the abstract class.
            raise TypeError(f"a batch must be a dict from column name to array; got {type(chunk).__name__}")
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
        f"{type(by).__name__} interrupted an earlier call, and rows may be lost: create a new Rebatcher"
    )


class _Rows:
    """The buffered rows."""

    def __init__(self, first: Mapping[str, Any], batch_size: int, **options: Any) -> None:
        self._columns = ColumnLayout(first, batch_size)
        arrays = self._columns.arrays
        self._plain = arrays is not None
        self._buffer = RowBuffer(self._columns.parts, batch_size=batch_size, arrays=arrays, **options)

    def push(self, batch: Mapping[str, Any]) -> None:
        if self._plain and self._buffer.push_arrays(batch):
            return  # Other batches are split and checked column by column.
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
