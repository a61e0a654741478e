"""The progress bar. tqdm is an extra, so it's imported when a bar is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Self


def progress_bar(total: int | None, *, unit: str = "row", **options: Any) -> Any:
    """A tqdm bar: call `update(rows)` for each batch and `close()` at the end.

    Args:
        total: the rows to come; None if that isn't known.
        unit: what is counted.
        options: whatever else `tqdm.tqdm` takes, such as `desc` and `initial`.

    Raises:
        ImportError: if tqdm isn't installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("a progress bar needs tqdm: pip install 'fastpipe-data[progress]'") from error
    return tqdm(total=total, unit=f" {unit}s", unit_scale=True, dynamic_ncols=True, **options)


def show(batches: Iterator[dict[str, Any]], *, total: int | None, batch_size: int) -> Iterator[dict[str, Any]]:
    """The same batches, with a progress bar while they are drawn.

    Args:
        batches: a pass.
        total: the batches to come; None if they don't end.
        batch_size: their rows, at most.

    Returns:
        An iterator from which several threads may draw, if they may from `batches`. It is what keeps the pass alive.

    Raises:
        ImportError: if tqdm isn't installed.
    """
    return _Shown(batches, progress_bar(None if total is None else total * batch_size))


class _Shown:
    """No generator: those refuse a second thread. Batches are drawn outside of the lock, so that several can wait."""

    def __init__(self, batches: Iterator[dict[str, Any]], bar: Any) -> None:
        self._batches = batches
        self._bar = bar
        self._lock = threading.Lock()
        self._drawing = 0  # Threads between asking for a batch and counting it.
        self._ended = False
        self._complete = False

    def __repr__(self) -> str:
        return repr(self._batches)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        with self._lock:
            self._drawing += 1
        rows = 0
        try:
            batch = next(self._batches)
            rows = len(next(iter(batch.values())))
        except BaseException as error:
            self._ended = True
            self._complete = isinstance(error, StopIteration)
            raise
        finally:
            with self._lock:
                self._drawing -= 1
                if rows:
                    self._bar.update(rows)
                # Others may still be counting what they drew before the end.
                if self._ended and not self._drawing:
                    if self._complete:
                        self._bar.total = self._bar.n  # The last batch may be smaller, and was counted as a full one.
                    self._bar.close()
        return batch

    def __del__(self) -> None:
        self._bar.close()


class Counter:
    """A progress bar for who draws batches without Python. It is told of each by one thread at a time.

    Args:
        total: the batches to come; None if they don't end.
        batch_size: their rows, at most.

    Raises:
        ImportError: if tqdm isn't installed.
    """

    def __init__(self, *, total: int | None, batch_size: int) -> None:
        self._bar = progress_bar(None if total is None else total * batch_size)

    def __call__(self, rows: int | None, good: bool) -> None:
        """Counts a batch.

        Args:
            rows: its rows; None if there is no more.
            good: whether all went well.
        """
        if rows is not None:
            self._bar.update(rows)
            return
        if good:
            self._bar.total = self._bar.n  # The last batch may be smaller, and was counted as a full one.
        self._bar.close()

    def __del__(self) -> None:
        # There is none if tqdm isn't installed.
        if hasattr(self, "_bar"):
            self._bar.close()
