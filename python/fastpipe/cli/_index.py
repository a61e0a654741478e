"""What `fastpipe index` does: keeps the block indexes of files ahead of time."""

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

# A file that was modified more recently isn't indexed: see rust/fastpipe-files/src/index_cache.rs.
_SETTLING_SECONDS = 2.0

_STATES = {"before": "was there", "now": "written", "small": "needs none"}


@dataclass(frozen=True)
class IndexedFile:
    """What came of indexing one file.

    Attributes:
        path: of the file.
        blocks: of the file; 0 if that failed, as all other numbers.
        rows: of the file.
        size: bytes of the file.
        index_size: bytes of its index.
        state: "was there", "written", "needs none" (so small a file is read as fast as its index) or "failed".
        error: why it failed.
    """

    path: str
    blocks: int = 0
    rows: int = 0
    size: int = 0
    index_size: int = 0
    state: str = "failed"
    error: FastpipeError | None = None


def build(paths: Sequence[str], directory: str) -> list[IndexedFile]:
    """Walks the files that have no index in the directory yet, with a progress bar, and keeps the indexes there.

    Where a file was modified within the last two seconds, that time is waited for.

    Returns:
        What came of each file, in their order.
    """
    with _bytes_bar(paths) as tell:
        done = {path: _index(path, directory, tell) for path in dict.fromkeys(paths)}
    young = [path for path, indexed in done.items() if indexed is None]
    if young:
        time.sleep(_SETTLING_SECONDS + 0.1)
        with _bytes_bar(young) as tell:
            done |= {path: _index(path, directory, tell) for path in young}
    reason = "its index isn't kept: the file keeps changing, or its time of modification lies in the future"
    failed = {path: IndexedFile(path, error=in_file(StorageError, path, reason)) for path in young}
    return [done[path] or failed[path] for path in paths]


def _index(path: str, directory: str, tell: Callable[[str, int], None]) -> IndexedFile | None:
    """Indexes one file; None if it was modified too recently."""
    try:
        blocks, rows, size, index_size, kept = index_file(path, directory, lambda behind: tell(path, behind))
    except FastpipeError as error:
        return IndexedFile(path, error=error)
    if kept not in _STATES:
        return None
    return IndexedFile(path, blocks, rows, size, index_size, _STATES[kept])


@contextlib.contextmanager
def _bytes_bar(paths: Sequence[str]) -> Iterator[Callable[[str, int], None]]:
    """A bar over the bytes of all files, if tqdm is there and someone sees it; yields what moves it."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):  # What is wrong with it is said when it is opened.
            total += os.path.getsize(path)
    try:
        bar = progress_bar(total, unit="byte", leave=False, disable=None)
    except ImportError:  # Nobody asked for it.
        yield lambda path, behind: None
        return
    behind_before: dict[str, int] = {}

    def tell(path: str, behind: int) -> None:
        bar.update(behind - behind_before.get(path, 0))
        behind_before[path] = behind

    with bar:
        yield tell


def table(files: Sequence[IndexedFile], width: int) -> str:
    """The files as a table, with a line of sums if there are several."""

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
