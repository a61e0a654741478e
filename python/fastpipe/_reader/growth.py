"""Resuming from the state of a data set that has grown since: the begun epoch first, then all files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fastpipe._reader import state as _state
from fastpipe._reader.dataset import Dataset
from fastpipe._reader.reader import Reader
from fastpipe.errors import StateError, UnsupportedError

_LOG = logging.getLogger("fastpipe")


class Growth(NamedTuple):
    """What `resume_grown` found.

    Attributes:
        begun: reads the rest of the epoch in which the state was saved, of the state's files only; None if that epoch
            hadn't begun, or no files were added.
        added_files: files that the state's data set doesn't have, in the order of the reader.
        added_rows: rows of these.
    """

    begun: Reader | None
    added_files: list[str]
    added_rows: int


@runtime_checkable
class _Growing(Dataset, Protocol):
    """A data set of files that can be read without some of them."""

    def subset(self, numbers: Sequence[int]) -> Dataset:
        """The same features of some of the files."""

    def file_sizes(self) -> list[int]:
        """Bytes of each file."""


def resume_grown(reader: Reader, state: Mapping[str, Any]) -> Growth:
    """Resumes from a state to whose data set files were added since.

    All files of the state must be there, unchanged and in their order: as the first ones of the reader's, or as those
    that were modified first. The epoch in which the state was saved is finished without the added files, with the
    batches that it would have had; the next epoch has all files. A state that is saved while `begun` is read is one of
    the old files, from which `resume_grown` resumes again, whatever was added meanwhile.

    Args:
        reader: of all files, with the arguments of the reader that was saved. Its active pass is closed, and its next
            one begins with the epoch behind that of the state; with the state's own if that hadn't begun. If no files
            were added, this is `load_state_dict`.
        state: as `state_dict` returned it.

    Returns:
        A reader of what is left of the begun epoch, and what was added, which is logged to the logger `fastpipe`, too.

    Raises:
        StateError: if files of the state are missing or changed, or it is of other arguments, of a later fastpipe, or
            damaged. The reader is unchanged then.
        UnsupportedError: if the reader isn't one of Avro files.
        FastpipeError: if files can't be read.

    Example:
        >>> import fastpipe
        >>> options = {"columns": ["label"], "batch_size": 1024, "shuffle": True, "seed": 7}
        >>> before = fastpipe.read_avro("data/part-0.avro", **options)
        >>> first = next(iter(before))
        >>> reader = fastpipe.read_avro("data/*.avro", **options)
        >>> growth = fastpipe.resume_grown(reader, before.state_dict())
        >>> len(list(growth.begun)) + 1 == len(before), len(growth.added_files) + 1 == len(reader.files), reader.epoch
        (True, True, 1)
    """
    data = reader._data
    if not isinstance(data, _Growing):
        reason = (
            "only data sets of Avro files can grow: read other sources with the files that the state was saved with"
        )
        raise UnsupportedError(reason, reason=reason)
    number = _files_of(state)
    if number is None or number == len(data.files):
        reader.load_state_dict(state)
        return Growth(None, [], 0)
    if number > len(data.files):
        missing = f"the state is of {number} files, and the reader has {len(data.files)}: files are missing"
        raise StateError(f"{missing}; resume_grown() takes a reader of all the state's files and more")
    numbers, old = _found(data, state, number)
    begun = Reader(old, **(reader._options() | {"epochs": 1}))
    begun.load_state_dict(state)
    loaded = begun._cursor.loaded
    assert loaded is not None, "load_state_dict sets it"
    progress = loaded[1]
    epoch = int(progress["epoch"])
    unbegun = progress == _state.fresh(epoch, int(progress["world_size"]))
    if not unbegun and epoch == _state.LARGEST_EPOCH:
        raise StateError(f"no epoch comes behind epoch {epoch}, so no added file would ever be read")
    # Its passes end with the epoch, whatever the pass was that the state was saved in.
    begun._cursor.load(epoch, progress)
    reader._close("resume_grown() was called; iter(reader) begins an epoch of all files")
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
        "%d files of %d rows were added, which are read from epoch %d on",
        len(growth.added_files),
        growth.added_rows,
        reader.epoch,
    )
    return growth


def _files_of(state: Mapping[str, Any]) -> int | None:
    """How many files a state is of, if it says so."""
    try:
        number = state["data"]["files"]
    except (KeyError, TypeError):
        return None
    return number if type(number) is int and number >= 1 else None


def _found(data: _Growing, state: Mapping[str, Any], number: int) -> tuple[list[int], Dataset]:
    """Which files the state is of, and these as a data set.

    Raises:
        StateError: if they aren't found.
    """
    version, saved, sizes = state.get("version"), state["data"], data.file_sizes()
    if type(version) is int and 1 <= version <= _state.VERSION:
        for numbers in _candidates(data.files, number):
            # Sizes are known already; to open the files takes longer.
            if sum(sizes[i] for i in numbers) != saved.get("bytes"):
                continue
            old = data.subset(numbers)
            if old.fingerprint(version)["digest"] == saved.get("digest"):
                return numbers, old
    raise StateError(
        f"the state's {number} files aren't there as they were: it fits neither the first {number} of the reader's "
        f"{len(data.files)} files nor the {number} that were modified first. Where they are unchanged, name them "
        "first, in their order, and the added ones behind them: read_avro([*old, *added], ...)"
    )


def _candidates(files: list[str], number: int) -> Iterator[list[int]]:
    """Sets of files that the state may be of; which of them it is of, if any, its digest says."""
    first = list(range(number))
    yield first
    try:
        times = [os.stat(path).st_mtime_ns for path in files]
    except OSError as error:
        _LOG.debug("files can't be ordered by time: %s", error)
        return
    oldest = sorted(sorted(range(len(files)), key=lambda i: (times[i], i))[:number])
    if oldest != first:
        yield oldest
