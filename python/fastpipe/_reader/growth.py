"""Resuming from the state of a dataset that has grown since: first the rest of the epoch, then epochs of all files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastpipe._reader import state as _state
from fastpipe._reader.dataset import Dataset, FileDataset
from fastpipe._reader.ordering import Ordering
from fastpipe.errors import StateError, UnsupportedError

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader

_LOG = logging.getLogger("fastpipe")


@dataclass(frozen=True, slots=True)
class Growth:
    """The result of `Reader.resume_appended`.

    Attributes:
        begun: A reader of the rest of the epoch in which the state was saved, of the state's files only. None if that
            epoch had not begun, or if no files were added.
        added_files: Files that are not in the state's dataset, in the order of the reader.
        added_rows: Number of rows in the added files.
    """

    begun: Reader | None
    added_files: list[str]
    added_rows: int


def resume_appended(reader: Reader, state: Mapping[str, Any]) -> Growth:
    """Resumes from a state after files were added to its dataset. See `Reader.resume_appended`."""
    data = reader._data
    if not isinstance(data, FileDataset):
        reason = (
            f"resume_appended() needs a reader of files, which read_avro, read_csv, read_parquet and read_arrow return;"
            f" this one reads {data}. Resume from the state with load_state_dict() in a reader of the old data, and"
            " read all data with another reader from the next epoch on"
        )
        raise UnsupportedError(reason, reason=reason)
    number = _files_of(state)
    if number is None or number == len(data.files):
        reader.load_state_dict(state)
        return Growth(None, [], 0)
    if number > len(data.files):
        missing = f"the state has {number} files, and the reader has {len(data.files)}: files are missing"
        raise StateError(f"{missing}. resume_appended() needs a reader of all the state's files and the added ones")
    numbers, old = _found(data, state, number)
    begun = reader._like(old, ordering=_old_ordering(reader, old, state), epochs=1)
    begun.load_state_dict(state)
    loaded = begun._cursor.loaded
    assert loaded is not None, "load_state_dict sets it"
    progress = loaded[1]
    epoch = int(progress["epoch"])
    unbegun = progress == _state.fresh(epoch, int(progress["world_size"]))
    if not unbegun and epoch == _state.LARGEST_EPOCH:
        raise StateError(f"no epoch follows epoch {epoch}, so the added files would never be read")
    # Passes of this reader end with the epoch, even if the saved pass had several epochs.
    begun._cursor.load(epoch, progress)
    reader._close("resume_appended() was called; iter(reader) begins an epoch of all files")
    if begun.seed != reader.seed:
        reader._ordering = reader._ordering.with_seed(begun.seed)
        reader._order = reader._ordering.of(data.handle)
    reader.set_epoch(epoch if unbegun else epoch + 1)
    known = set(numbers)
    growth = Growth(
        begun=None if unbegun else begun,
        added_files=[path for i, path in enumerate(data.files) if i not in known],
        added_rows=reader.num_rows - begun.num_rows,
    )
    _LOG.info(
        "%d files with %d rows were added; they are read from epoch %d on",
        len(growth.added_files),
        growth.added_rows,
        reader.epoch,
    )
    return growth


def _old_ordering(reader: Reader, old: Dataset, state: Mapping[str, Any]) -> Ordering:
    """Returns the reader's ordering, with the default window of the old files if the reader has its default window."""
    ordering, order = reader._ordering, state.get("order")
    saved = order.get("shuffle_buffer") if isinstance(order, Mapping) else None
    default, old_default = (data.default_window(ordering.batch_size) for data in (reader._data, old))
    if old_default is None or ordering.shuffle_buffer in (None, saved):
        return ordering
    return ordering.with_buffer(old_default) if ordering.shuffle_buffer == default else ordering


def _files_of(state: Mapping[str, Any]) -> int | None:
    """Returns the number of files that a state records, or None if it records none."""
    try:
        number = state["data"]["files"]
    except (KeyError, TypeError):
        return None
    return number if type(number) is int and number >= 1 else None


def _found(data: FileDataset, state: Mapping[str, Any], number: int) -> tuple[list[int], Dataset]:
    """Returns the indices of the state's files, and a dataset of these files.

    Raises:
        StateError: If the files aren't found.
    """
    version, saved, sizes = state.get("version"), state["data"], data.file_sizes()
    if type(version) is int and 1 <= version <= _state.VERSION:
        for numbers in _candidates(data.files, number):
            # The sizes are already known. Opening the files takes longer.
            if sum(sizes[i] for i in numbers) != saved.get("bytes"):
                continue
            old = data.subset(numbers)
            if old.fingerprint(version)["digest"] == saved.get("digest"):
                return numbers, old
    raise StateError(
        f"the state's {number} files are missing or changed: it matches neither the first {number} of the reader's "
        f"{len(data.files)} files nor the {number} that were modified first. If the files are unchanged, list them "
        "first, in their order, and the added files after them: [*old, *added]"
    )


def _candidates(files: list[str], number: int) -> Iterator[list[int]]:
    """Yields sets of file indices that may be the state's files. The digest shows which one matches, if any."""
    first = list(range(number))
    yield first
    try:
        times = [os.stat(path).st_mtime_ns for path in files]
    except OSError as error:
        _LOG.debug("cannot order files by modification time: %s", error)
        return
    oldest = sorted(sorted(range(len(files)), key=lambda i: (times[i], i))[:number])
    if oldest != first:
        yield oldest
