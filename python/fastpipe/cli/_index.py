"""`fastpipe index`: creates the block indexes of files in advance."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import fastpipe._text as _text
from fastpipe._fastpipe import index_file
from fastpipe._progress import progress_bar
from fastpipe._text import clean, plural, size_text
from fastpipe.errors import FastpipeError, StorageError, in_file

# Files that were modified more recently aren't indexed: see rust/fastpipe-files/src/index_cache.rs.
_SETTLING_SECONDS = 2.0

_STATES = {"before": "was there", "now": "written", "small": "needs none"}


@dataclass(frozen=True)
class IndexedFile:
    """The outcome of indexing one file.

    Attributes:
        path: Path of the file.
        blocks: Number of blocks. This and all other numbers are 0 if indexing failed.
        rows: Number of rows.
        size: Size of the file in bytes.
        index_size: Size of the index in bytes.
        state: "was there", "written", "needs none" (the file is so small that an index wouldn't help) or "failed".
        error: The error if indexing failed.
    """

    path: str
    blocks: int = 0
    rows: int = 0
    size: int = 0
    index_size: int = 0
    state: str = "failed"
    error: FastpipeError | None = None


def build(paths: Sequence[str], directory: str, format_: str = "avro") -> list[IndexedFile]:
    """Indexes the files that have no index in the directory yet, with a progress bar.

    The format is "avro", "avro with checksums" or "tfrecord".

    If a file was modified within the last two seconds, waits until it is old enough to be indexed.

    Returns:
        The outcome for each file, in the sequence of `paths`.
    """
    with _bytes_bar(paths) as tell:
        done = {path: _index(path, directory, format_, tell) for path in dict.fromkeys(paths)}
    young = [path for path, indexed in done.items() if indexed is None]
    if young:
        time.sleep(_SETTLING_SECONDS + 0.1)
        with _bytes_bar(young) as tell:
            done |= {path: _index(path, directory, format_, tell) for path in young}
    reason = "its index was not saved: the file keeps changing, or its modification time is in the future"
    failed = {path: IndexedFile(path, error=in_file(StorageError, path, reason)) for path in young}
    return [done[path] or failed[path] for path in paths]


def _index(path: str, directory: str, format_: str, tell: Callable[[str, int], None]) -> IndexedFile | None:
    """Indexes one file. Returns None if it was modified too recently."""
    try:
        found = index_file(path, directory, lambda behind: tell(path, behind), format_)
        blocks, rows, size, index_size, kept = found
    except FastpipeError as error:
        return IndexedFile(path, error=error)
    if kept not in _STATES:
        return None
    return IndexedFile(path, blocks, rows, size, index_size, _STATES[kept])


@contextlib.contextmanager
def _bytes_bar(paths: Sequence[str]) -> Iterator[Callable[[str, int], None]]:
    """Shows a progress bar over the bytes of all files, if tqdm is installed and stderr is a terminal.

    Yields a function that updates the bar.
    """
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):  # Opening it will report the error.
            total += os.path.getsize(path)
    try:
        bar = progress_bar(total, unit="byte", leave=False, disable=None)
    except ImportError:  # The progress bar is optional.
        yield lambda path, behind: None
        return
    behind_before: dict[str, int] = {}

    def tell(path: str, behind: int) -> None:
        bar.update(behind - behind_before.get(path, 0))
        behind_before[path] = behind

    with bar:
        yield tell


def table(files: Sequence[IndexedFile], width: int) -> str:
    """Formats the files as a table, with a line of totals if there are several."""

    def row(name: str, counted: Sequence[IndexedFile], state: str) -> list[str]:
        blocks, rows, size, index_size = (
            sum(getattr(f, number) for f in counted) for number in ("blocks", "rows", "size", "index_size")
        )
        return [clean(name), f"{blocks:,}", f"{rows:,}", size_text(size), size_text(index_size), state]

    header = ["file", "blocks", "records", "size", "index", "state"]
    rows = [[clean(f.path), "", "", "", "", f.state] if f.error else row(f.path, [f], f.state) for f in files]
    if len(files) > 1:
        failed = sum(f.error is not None for f in files)
        rows.append(row(plural(len(files), "file"), files, f"{failed} failed" if failed else "ok"))
    return _text.table(header, rows, width, right=(1, 2, 3, 4), keep_end=(0,))
