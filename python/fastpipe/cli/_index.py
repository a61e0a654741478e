"""`fastpipe index`: creates the block indexes of files in advance."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import fastpipe._text as _text
from fastpipe._fastpipe import RemoteFile, index_file
from fastpipe._files._in_memory_files import File, lowered
from fastpipe._progress import progress_bar
from fastpipe._text import clean, plural, size_text
from fastpipe.errors import FastpipeError, StorageError, in_file

# Files that were modified more recently aren't indexed: see rust/fastpipe-files/src/index_cache.rs.
_SETTLING_SECONDS = 2.0

# Number of remote files that are read at the same time, as in readers.
_MOST_REMOTE = 16

_STATES = {"before": "was there", "now": "written", "small": "needs none"}


@dataclass(frozen=True)
class IndexedFile:
    """The outcome of indexing one file.

    Attributes:
        path: Path or URL of the file.
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


def build(files: Sequence[File], directory: str, format_: str = "avro") -> list[IndexedFile]:
    """Indexes the files that have no index in the directory yet, with a progress bar.

    The format is "avro", "avro with checksums" or "tfrecord".

    If a file was modified within the last two seconds, waits until it is old enough to be indexed.

    Returns:
        The outcome for each file, in the sequence of `files`.
    """
    by_name = {str(file): file for file in files}
    done = _index_all(by_name.values(), directory, format_)
    young = [name for name, indexed in done.items() if indexed is None]
    if young:
        time.sleep(_SETTLING_SECONDS + 0.1)
        done |= _index_all([by_name[name] for name in young], directory, format_)
    reason = "its index was not saved: the file keeps changing, or its modification time is in the future"
    failed = {name: IndexedFile(name, error=in_file(StorageError, name, reason)) for name in young}
    return [done[name] or failed[name] for name in map(str, files)]


def _index_all(files: Collection[File], directory: str, format_: str) -> dict[str, IndexedFile | None]:
    """Indexes files: local files one by one, remote files at the same time.

    Returns:
        The outcome by path or URL; None for a file that was modified too recently.
    """
    stopped = threading.Event()
    threads = _MOST_REMOTE if any(isinstance(file, RemoteFile) for file in files) else 1
    with _bytes_bar(files) as report, ThreadPoolExecutor(threads, "fastpipe-index") as pool:

        def index(file: File) -> IndexedFile | None:
            def progress(processed: int) -> None:
                if stopped.is_set():
                    raise KeyboardInterrupt
                report(str(file), processed)

            return _index(file, directory, format_, progress)

        try:
            return dict(zip(map(str, files), pool.map(index, files), strict=True))
        finally:
            # After Ctrl-C, other threads end at once.
            stopped.set()


def _index(file: File, directory: str, format_: str, progress: Callable[[int], None]) -> IndexedFile | None:
    """Indexes one file. Returns None if it was modified too recently."""
    path = str(file)
    try:
        found = index_file(lowered([file], directory), progress, format_)
        blocks, rows, size, index_size, kept = found
    except FastpipeError as error:
        return IndexedFile(path, error=error)
    progress(size)
    if kept not in _STATES:
        return None
    return IndexedFile(path, blocks, rows, size, index_size, _STATES[kept])


@contextlib.contextmanager
def _bytes_bar(files: Iterable[File]) -> Iterator[Callable[[str, int], None]]:
    """Shows a progress bar over the bytes of all files, if tqdm is installed and stderr is a terminal.

    Yields a function that updates the bar. Several threads may call it.
    """
    total = 0
    for file in files:
        with contextlib.suppress(OSError):  # Opening it will report the error.
            total += file.entry[1] if isinstance(file, RemoteFile) else os.path.getsize(str(file))
    try:
        bar = progress_bar(total, unit="byte", leave=False, disable=None)
    except ImportError:  # The progress bar is optional.
        yield lambda path, processed: None
        return
    before: dict[str, int] = {}
    lock = threading.Lock()

    def report(path: str, processed: int) -> None:
        with lock:
            bar.update(processed - before.get(path, 0))
            before[path] = processed

    with bar:
        yield report


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
