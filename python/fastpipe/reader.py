"""The reader: batches of a data set, pass after pass."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, SupportsIndex

from fastpipe import _fastpipe
from fastpipe._progress import show
from fastpipe.specs import Features

__all__ = ["Reader"]

_LARGEST_BATCH = 2**31 - 1


class Reader:
    """Yields the batches of a data set. `read_avro` makes one.

    `iter(reader)` starts a pass; it is the one active pass of the reader, and a second one closes the first. Several
    threads may draw from one pass: each batch goes to one of them. A pass that is dropped ends its threads. A pass that
    ends advances the epoch. An error ends a pass: it is raised again by each further `next`.

    Batches are dicts from feature name to array or batch form, in the order of `features`. Their arrays lie in memory
    of the reader, which is used again when the last array over it has died; so keeping batches is safe.

    A reader can be pickled, and used in a forked child; passes can't.
    """

    def __init__(
        self,
        dataset: _fastpipe.Dataset,
        files: list[str],
        features: Features,
        *,
        batch_size: SupportsIndex,
        drop_last: bool,
        num_threads: SupportsIndex | None,
        prefetch: SupportsIndex,
        progress: bool,
        epochs: SupportsIndex,
    ) -> None:
        self._dataset = dataset
        self._files = files
        self._features = features
        self._batch_size = _within("batch_size", batch_size, 1, _LARGEST_BATCH)
        self._drop_last = bool(drop_last)
        self._num_threads = None if num_threads is None else _within("num_threads", num_threads, 1, 4096)
        self._prefetch = _within("prefetch", prefetch, 0, 1 << 20)
        self._progress = bool(progress)
        self._epochs = _within("epochs", epochs, 1, 2**31 - 1)
        self._epoch = 0
        self._position: _fastpipe.Position | None = None
        self._pass: weakref.ref[_fastpipe.Pass] | None = None

    @property
    def features(self) -> Features:
        """The spec of each feature."""
        return self._features

    @property
    def files(self) -> list[str]:
        """The files, in the order in which they are read."""
        return list(self._files)

    @property
    def symbols(self) -> dict[str, list[str]]:
        """For each enum that is read as codes its symbols; code `i` stands for symbol `i`."""
        return dict(self._dataset.symbols())

    @property
    def num_rows(self) -> int:
        """Rows of one epoch, with those that `drop_last` leaves out."""
        return self._dataset.num_rows

    @property
    def batch_size(self) -> int:
        """Rows a batch."""
        return self._batch_size

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or that the next pass starts with."""
        return self._epoch if self._position is None else self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass start with this epoch. The active pass goes on as it is."""
        self._epoch = _within("epoch", epoch, 0, 2**63 - 1)
        self._position = None

    def __len__(self) -> int:
        """Batches a pass."""
        rows, size = self.num_rows, self._batch_size
        return (rows // size if self._drop_last else -(-rows // size)) * self._epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Starts a pass."""
        epoch = self.epoch
        self.close()
        started = self._dataset.start(
            batch_size=self._batch_size,
            drop_last=self._drop_last,
            num_threads=self._num_threads,
            prefetch=self._prefetch,
            epoch=epoch,
            epochs=self._epochs,
        )
        self._epoch, self._position, self._pass = epoch, started.position, weakref.ref(started)
        if not self._progress:
            return started
        return show(started, total=started.total, batch_size=self._batch_size)

    def close(self) -> None:
        """Ends the active pass, if there is one, and waits for its threads."""
        active = None if self._pass is None else self._pass()
        self._pass = None
        if active is not None:
            active.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._pass is not None and self._pass() is not None:
            raise TypeError("a reader can't be pickled while a pass is active: close() it first")
        options = {
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
            "num_threads": self._num_threads,
            "prefetch": self._prefetch,
            "progress": self._progress,
            "epochs": self._epochs,
        }
        return _rebuild, (self._files, self._features, options, self.epoch)

    def __repr__(self) -> str:
        files = self._files[0] if len(self._files) == 1 else f"{len(self._files)} files"
        return (
            f"<fastpipe.Reader of {files}: {self.num_rows} rows, {len(self._features)} features, "
            f"batch_size={self._batch_size}>"
        )


def _rebuild(files: list[str], features: Features, options: dict[str, Any], epoch: int) -> Reader:
    """Makes a pickled reader again: opens the files anew."""
    from fastpipe.avro import _dataset

    reader = Reader(_dataset(files, features), files, features, **options)
    reader.set_epoch(epoch)
    return reader


def _within(name: str, value: SupportsIndex, least: int, most: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} is an integer, not a bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is an integer, not {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is between {least} and {most}, not {number}")
    return number
