"""States of readers: what they hold, and whether one fits a reader.

A state is a dict of strings, numbers, bools, lists and dicts. It is small (some hundred bytes; a few numbers more for
each rank), can be stored as JSON, and has these entries:

`version`
    2. What a version writes all later ones read; a state of a later version is refused.
`data`
    What tells the data set from others, as its source has it (`Dataset.fingerprint`): a few numbers, and a digest.
`order`
    The arguments that the order depends on.
`pass_epoch`
    The epoch with which the pass began.
`progress`
    What is left of the epoch. The same for all ranks that have had equally many batches.
`checksum`
    CRC-32 of all other entries, as JSON with sorted keys and without blanks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from fastpipe._reader.ordering import Ordering
from fastpipe.errors import StateError

if TYPE_CHECKING:
    from fastpipe._reader.dataset import Dataset

State: TypeAlias = dict[str, Any]

VERSION = 2

# Far from where adding to it would leave 64 bits.
LARGEST_EPOCH = 2**62


def fresh(epoch: int, world_size: int) -> State:
    """The progress of an epoch that hasn't begun."""
    none = {"step": 0, "taken": 0, "next": 0, "open": [], "late": [], "places": []}
    return {"epoch": epoch, "world_size": world_size, **none}


def state(data: State, ordering: Ordering, shuffle_buffer: int, pass_epoch: int, progress: State) -> State:
    """A state to be stored."""
    stored = {
        "version": VERSION,
        "data": dict(data),
        "order": ordering.stored(shuffle_buffer),
        "pass_epoch": pass_epoch,
        "progress": progress,
    }
    return stored | {"checksum": _checksum(stored)}


def parts(stored: Mapping[str, Any], data: Dataset, ordering: Ordering, shuffle_buffer: int) -> tuple[int, State, int]:
    """Takes a stored state apart.

    Args:
        stored: the state.
        data: of the reader.
        ordering: of the reader.
        shuffle_buffer: of the reader.

    Returns:
        The epoch with which the pass began, the progress, and the seed.

    Raises:
        StateError: if it isn't a state, or one of another data set or order; it says what differs.
        TypeError: if it isn't a mapping.
    """
    if not isinstance(stored, Mapping):
        raise TypeError(f"a state is a dict as state_dict() returns it, not {type(stored).__name__}")
    try:
        return _parts(stored, data, ordering, shuffle_buffer)
    except RecursionError:
        raise StateError("this is no state of a reader: it is nested too deeply") from None


def _parts(stored: Mapping[str, Any], data: Dataset, ordering: Ordering, shuffle_buffer: int) -> tuple[int, State, int]:
    version = stored.get("version")
    if isinstance(version, int) and version > VERSION:
        raise StateError(
            f"the state is of version {version}, and this fastpipe reads versions up to {VERSION}: it was saved by a"
            " later fastpipe, which reads it"
        )
    try:
        saved, order = dict(stored["data"]), dict(stored["order"])
        pass_epoch, progress = int(stored["pass_epoch"]), dict(stored["progress"])
        seed = int(order["seed"])
        possible = 0 <= pass_epoch <= int(progress["epoch"]) <= LARGEST_EPOCH and 0 <= seed < 2**64
        # Numbers that are wrong alone would be believed, and yield other rows.
        whole = stored["checksum"] == _checksum({name: stored[name] for name in stored if name != "checksum"})
        # True is 1, and 2.0 is 2, to ==.
        if type(version) is not int or version < 1 or not possible or not whole:
            raise ValueError
    except (KeyError, OverflowError, TypeError, ValueError):
        raise StateError("this is no state of a reader, or it is damaged") from None
    # Settings that are only in the state have their default here.
    expected = {name: None for name in order if name not in ("rows", "skipped")} | ordering.stored(shuffle_buffer)
    if not ordering.seed_given:
        # One that was drawn is part of what is restored.
        expected["seed"] = seed
    here = data.fingerprint(version)
    if (changed := _changed(saved, here)) == ["digest"]:
        differing = [data.words.other_digest]
    else:
        differing = _told(changed, saved, here, "the data set's ")
    differing += _other_partitions(saved, here)
    differing += _told(_changed(order, expected), order, expected)
    if differing:
        raise StateError(f"the state is of another reader: {'; '.join(differing)}")
    return pass_epoch, progress, seed


def _checksum(stored: State) -> int:
    return zlib.crc32(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode())


def _changed(saved: State, here: State) -> list[str]:
    return [name for name in here if name != "partitions" and saved.get(name) != here[name]]


def _other_partitions(saved: State, here: State) -> list[str]:
    """Columns of folders that both read, with other values. Like other columns, each may read those that it likes."""
    old, new = (of.get("partitions") or {} for of in (saved, here))
    changed = sorted(name for name in new if name in old and old[name] != new[name])
    return [f"the folders {name}=... of its files have other values" for name in changed]


def _told(names: list[str], saved: State, here: State, whose: str = "") -> list[str]:
    return [f"{whose}{name} was {saved.get(name)!r} and is {here[name]!r}" for name in names if name != "digest"]
