"""States of readers: their contents, and the check that a state fits a reader.

A state is a dict of strings, numbers, bools, lists and dicts. It is small (a few hundred bytes, and a few numbers for
each rank), can be stored as JSON, and has these entries:

`version`
    2. Each version of fastpipe reads the states of all earlier ones, and refuses states of later ones.
`data`
    Identifies the dataset (`Dataset.fingerprint`): a few counts, and a digest.
`order`
    The arguments that the order depends on.
`pass_epoch`
    The epoch with which the pass began.
`progress`
    What is left of the epoch. It is the same for all ranks that have read the same number of batches.
`losses`
    The damaged units of which rows are lost. Missing if there are none.
`checksum`
    CRC-32 of all other entries, as JSON with sorted keys and without whitespace.
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

# Adding to an epoch can't overflow 64 bits.
LARGEST_EPOCH = 2**62


def fresh(epoch: int, world_size: int) -> State:
    """Returns the progress of an epoch that has not begun."""
    none = {"step": 0, "taken": 0, "next": 0, "open": [], "late": [], "places": []}
    return {"epoch": epoch, "world_size": world_size, **none}


def state(
    data: State,
    ordering: Ordering,
    shuffle_buffer: int,
    pass_epoch: int,
    progress: State,
    losses: list[Any] | None = None,
) -> State:
    """Returns a state to be stored. `losses` are damaged units that the reader has left out, if any."""
    stored = {
        "version": VERSION,
        "data": dict(data),
        "order": ordering.stored(shuffle_buffer),
        "pass_epoch": pass_epoch,
        "progress": progress,
    }
    if losses:
        stored["losses"] = losses
    return stored | {"checksum": checksum(stored)}


def parts(stored: Mapping[str, Any], data: Dataset, ordering: Ordering, shuffle_buffer: int) -> tuple[int, State, int]:
    """Checks a stored state and returns its parts.

    Args:
        stored: The state.
        data: Dataset of the reader.
        ordering: Settings of the reader's order.
        shuffle_buffer: Shuffle buffer of the reader.

    Returns:
        The epoch with which the pass began, the progress, and the seed.

    Raises:
        StateError: If it isn't a state, or if it belongs to another dataset or order. The message says what differs.
        TypeError: If it isn't a mapping.
    """
    if not isinstance(stored, Mapping):
        raise TypeError(f"state must be a dict that state_dict() returned; got {type(stored).__name__}")
    try:
        return _parts(stored, data, ordering, shuffle_buffer)
    except RecursionError:
        raise StateError("this is not the state of a reader: it is nested too deeply") from None


def _parts(stored: Mapping[str, Any], data: Dataset, ordering: Ordering, shuffle_buffer: int) -> tuple[int, State, int]:
    version = stored.get("version")
    if isinstance(version, int) and version > VERSION:
        raise StateError(
            f"the state has version {version}, and this version of fastpipe reads versions up to {VERSION}: upgrade"
            " fastpipe to the version that saved it"
        )
    try:
        saved, order = dict(stored["data"]), dict(stored["order"])
        pass_epoch, progress = int(stored["pass_epoch"]), dict(stored["progress"])
        seed = int(order["seed"])
        possible = 0 <= pass_epoch <= int(progress["epoch"]) <= LARGEST_EPOCH and 0 <= seed < 2**64
        # A wrong number is not detectable by itself and would yield other rows.
        whole = stored["checksum"] == checksum({name: stored[name] for name in stored if name != "checksum"})
        # `==` treats True as 1, and 2.0 as 2.
        if type(version) is not int or version < 1 or not possible or not whole:
            raise ValueError
    except (KeyError, OverflowError, TypeError, ValueError):
        raise StateError("this is not the state of a reader, or it is damaged") from None
    # Settings that only the state has must have their default here.
    expected = {name: None for name in order if name != "skipped"} | ordering.stored(shuffle_buffer)
    if not ordering.seed_given:
        # A randomly drawn seed is restored from the state.
        expected["seed"] = seed
    if ordering.is_mixture:
        # The sum over the readers, whose own buffers are part of the dataset's digest. It grows when readers join.
        expected["shuffle_buffer"] = order.get("shuffle_buffer")
    here = data.fingerprint(version)
    saved = data.fitted(saved, progress, ordering.batch_size)
    if _changed(saved, here) == ["digest"]:
        differing = [data.words.other_digest]
    else:
        differing = differences(saved, here, "the dataset's ")
    differing += _other_partitions(saved, here)
    differing += differences(order, expected)
    if differing:
        advice = "Create the reader with the data and the arguments of the reader that saved it"
        raise StateError(f"cannot resume from this state: {'; '.join(differing)}. {advice}")
    return pass_epoch, progress, seed


def checksum(stored: State) -> int:
    """Returns the checksum of a state's other entries."""
    return zlib.crc32(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode())


def _changed(saved: State, here: State) -> list[str]:
    return [name for name in here if name != "partitions" and saved.get(name) != here[name]]


def _other_partitions(saved: State, here: State) -> list[str]:
    """Returns the partition columns that both readers read but whose values differ.

    Columns that only one of the readers reads are allowed, as for other columns.
    """
    old, new = (of.get("partitions") or {} for of in (saved, here))
    changed = sorted(name for name in new if name in old and old[name] != new[name])
    return [f"the folders {name}=... of its files have different values" for name in changed]


def differences(saved: State, here: State, whose: str = "") -> list[str]:
    """Returns a text for each entry whose value differs from the saved one."""
    names = [name for name in _changed(saved, here) if name != "digest"]
    return [f"{whose}{name} was {saved.get(name)!r} and is {here[name]!r}" for name in names]
