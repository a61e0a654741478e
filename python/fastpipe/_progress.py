"""The progress bar. tqdm is an extra, so it is imported only when a bar is requested."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Self


def progress_bar(total: int | None, *, unit: str = "row", **options: Any) -> Any:
    """Returns a tqdm bar. The caller calls `update(rows)` for each batch and `close()` at the end.

    Args:
        total: Number of rows. None if it isn't known.
        unit: Name of the unit that is counted.
        options: Other arguments of `tqdm.tqdm`, such as `desc` and `initial`.

    Raises:
        ImportError: If tqdm isn't installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("the progress bar requires tqdm: pip install 'fastpipe-data[progress]'") from error
    return tqdm(total=total, unit=f" {unit}s", unit_scale=True, dynamic_ncols=True, **options)


def show(batches: Iterator[dict[str, Any]], *, total: int | None, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yields the same batches and shows a progress bar while they are drawn.

    Args:
        batches: A pass.
        total: Number of batches. None if the pass has no end.
        batch_size: Maximum number of rows per batch.

    Returns:
        An iterator that several threads may draw from if they may draw from `batches`. It keeps the pass alive.

    Raises:
        ImportError: If tqdm isn't installed.
    """
    return _Shown(batches, progress_bar(None if total is None else total * batch_size))


class _Shown:
    """An iterator with a progress bar.

    It isn't a generator, because a generator can't be used by a second thread. Batches are drawn outside of the lock,
    so that several threads can wait for one.
    """

    def __init__(self, batches: Iterator[dict[str, Any]], bar: Any) -> None:
        self._batches = batches
        self._bar = bar
        self._lock = threading.Lock()
        self._drawing = 0  # Threads that have requested a batch and not yet counted it.
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
                # Other threads may still be counting batches that they drew before the end.
                if self._ended and not self._drawing:
                    if self._complete:
                        self._bar.total = self._bar.n  # The last batch may be smaller than counted.
                    self._bar.close()
        return batch

    def __del__(self) -> None:
        self._bar.close()


class Counter:
    """A progress bar for consumers that draw batches without Python.

    One thread at a time calls it for each batch.

    Args:
        total: Number of batches. None if the pass has no end.
        batch_size: Maximum number of rows per batch.

    Raises:
        ImportError: If tqdm isn't installed.
    """

    def __init__(self, *, total: int | None, batch_size: int) -> None:
        self._bar = progress_bar(None if total is None else total * batch_size)

    def __call__(self, rows: int | None, good: bool) -> None:
        """Counts a batch.

        Args:
            rows: Number of rows in the batch. None at the end of the pass.
            good: Whether the pass ended without an error.
        """
        if rows is not None:
            self._bar.update(rows)
            return
        if good:
            self._bar.total = self._bar.n  # The last batch may be smaller than counted.
        self._bar.close()

    def __del__(self) -> None:
        # The attribute is missing if tqdm isn't installed.
        if hasattr(self, "_bar"):
            self._bar.close()
