"""Shards of interactions: files of consecutive users that can be read separately."""

from __future__ import annotations

import json
import os
import zlib
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._files._paths import Paths, expand
from fastpipe.errors import MalformedFileError, MissingFileError, UnsupportedError, in_file
from fastpipe.recsys._csr import CSR
from fastpipe.recsys._files import ArrowFiles, AvroFiles, put_arrow, put_avro, wrong
from fastpipe.recsys._ids import Vocabulary

Format: TypeAlias = Literal["avro", "arrow"]

# The key in a file's metadata of a JSON object that identifies the shard and its dataset.
_KEY = "fastpipe.interactions"
_VERSION = 2
_ITEMS = "items"

# The key in a file's metadata of a CRC-32 of the JSON object and the columns, independent of the format. Arrow files
# and uncompressed Avro files have no checksum of their content. Files of version 1 lack this key.
_CHECKSUM = "fastpipe.checksum"


class Part(NamedTuple):
    """The position of some shards among all shards.

    Attributes:
        first_user: The index of the first user.
        first_positive: The number of positives of all users before it.
        num_users: The number of users in all shards.
        item_counts: int64 `[items]`, the number of positives of each item in all shards.
    """

    first_user: int
    first_positive: int
    num_users: int
    item_counts: npt.NDArray[np.int64]


class _Shard(NamedTuple):
    """The metadata of a shard."""

    version: int
    shard: int
    shards: int
    first_user: int
    first_positive: int
    num_users: int
    num_items: int
    num_positives: int
    sequence: bool


# --- Writing ---


def write(folder: str, kind: str, most: int, users: Vocabulary, items: Vocabulary, csr: CSR) -> list[str]:
    """Writes all shards, and a file of the items next to them.

    Args:
        folder: The folder of the files.
        kind: The format, `"avro"` or `"arrow"`.
        most: The number of positives at which a shard ends.
        users: The users of all shards.
        items: The items of all shards.
        csr: The positives.

    Returns:
        The paths of the shards.
    """
    if kind not in ("avro", "arrow"):
        raise ValueError(f'format must be "avro" or "arrow"; got {kind!r}')
    put = put_avro if kind == "avro" else put_arrow
    os.makedirs(folder, exist_ok=True)
    there = sorted(name for name in os.listdir(folder) if name.endswith((".avro", ".arrow")))
    if there:
        raise FileExistsError(f"the folder {folder} already contains {there[0]}: name an empty folder")
    edges = _edges(csr.indptr, most)
    paths = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        shard = _Shard(
            version=_VERSION,
            shard=number,
            shards=len(edges) - 1,
            first_user=start,
            first_positive=int(csr.indptr[start]),
            num_users=len(users),
            num_items=len(items),
            num_positives=len(csr.items),
            sequence=csr.sequence is not None,
        )
        columns: dict[str, Any] = {"user": users.ids[start:stop]}
        first, last = csr.indptr[start], csr.indptr[stop]
        offsets = csr.indptr[start : stop + 1] - first
        columns["items"] = csr.items[first:last], offsets
        if csr.sequence is not None:
            columns["sequence"] = csr.sequence[first:last], offsets
        path = os.path.join(folder, f"shard-{number:05}.{kind}")
        put(path, columns, _signed(shard._asdict(), columns))
        paths.append(path)
    # The file of items is written last. Shards can't be read without it, so an incomplete folder is never used.
    counts = np.bincount(csr.items, minlength=len(items))
    columns = {"item": items.ids, "positives": counts}
    put(os.path.join(folder, f"{_ITEMS}.{kind}"), columns, _signed({"version": _VERSION}, columns))
    return paths


def _signed(said: dict[str, Any], columns: dict[str, Any]) -> dict[str, str]:
    """Returns a file's metadata."""
    text = json.dumps(said)
    parts = [(part[0], np.diff(part[1])) if isinstance(part, tuple) else part for part in columns.values()]
    return {_KEY: text, _CHECKSUM: str(_checksum(text.encode(), parts))}


def _checksum(said: bytes, columns: list[Any]) -> int:
    """Returns the CRC-32 of a file's JSON metadata and its columns: of IDs or numbers, or of values and lengths."""
    checksum = zlib.crc32(said)
    for column in columns:
        if isinstance(column, tuple):
            arrays = [column[0].astype("<u4"), column[1].astype("<i8")]
        elif isinstance(column, np.ndarray) and column.dtype != object:
            arrays = [column.astype("<u8")]
        else:
            entries = [entry.encode() if isinstance(entry, str) else entry for entry in column]
            arrays = [np.array([len(entry) for entry in entries], "<i8"), np.frombuffer(b"".join(entries), np.uint8)]
        for array in arrays:
            checksum = zlib.crc32(array, checksum)
    return checksum


def _edges(indptr: npt.NDArray[np.int64], most: int) -> list[int]:
    """Returns the first user of each shard, followed by the number of users."""
    edges, users = [0], len(indptr) - 1
    while edges[-1] < users:
        full = np.searchsorted(indptr, indptr[edges[-1]] + most)
        edges.append(min(max(int(full), edges[-1] + 1), users))
    return edges


# --- Reading ---


def read(source: Paths) -> tuple[Vocabulary, Vocabulary, CSR, Part | None]:
    """Reads consecutive shards, and the items.

    Returns:
        The users, the items, the positives, and the position of the shards among all shards. The position is None if
        all shards are read.
    """
    whole = isinstance(source, str | os.PathLike) and os.path.isdir(source)
    paths = _paths(source)
    kind = "arrow" if paths[0].endswith(".arrow") else "avro"
    beside = os.path.join(os.path.dirname(paths[0]), f"{_ITEMS}.{kind}")
    if not os.path.exists(beside):
        reason = "the items of the shards aren't next to them: the shards were moved, or writing them was interrupted"
        raise in_file(MissingFileError, beside, reason)
    files = ArrowFiles if kind == "arrow" else AvroFiles
    opened = files(paths)
    shards = [_described(path, metadata) for path, metadata in zip(paths, opened.metadata, strict=True)]
    _check_row(paths, shards, whole)
    head = shards[0]
    items = _items(beside, files([beside]), head)
    columns = opened.columns(["user"], ["items", "sequence"] if head.sequence else ["items"])
    users, csr = _content(paths[0], columns)
    _check_places(paths, shards, csr)
    _check_sums(paths, shards, csr.indptr, columns, opened.metadata)
    _check_content(csr, head.num_items, paths[0])
    vocabulary, counts = items
    if shards[-1].shard == head.shards - 1 and head.shard == 0:
        if not np.array_equal(counts, np.bincount(csr.items, minlength=len(vocabulary))):
            raise wrong(beside, "its counts of positives differ from the shards")
        return users, vocabulary, csr, None
    return users, vocabulary, csr, Part(head.first_user, head.first_positive, head.num_users, counts)


def _paths(source: Paths) -> list[str]:
    if isinstance(source, str | os.PathLike) and os.path.isdir(source):
        for suffix in (".avro", ".arrow"):
            found = sorted(name for name in os.listdir(source) if name.startswith("shard-") and name.endswith(suffix))
            if found:
                return [os.path.join(os.fsdecode(source), name) for name in found]
        raise in_file(MissingFileError, os.fsdecode(source), "the folder contains no shards")
    return expand(source)


def _said(path: str, metadata: dict[str, bytes]) -> dict[str, Any]:
    """Returns the JSON metadata of a file, after checking that its version is supported."""
    if _KEY not in metadata:
        raise wrong(path, "it isn't a shard of interactions, as write_shards writes it")
    try:
        found: dict[str, Any] = dict(json.loads(metadata[_KEY]))
        version = found["version"]
        if type(version) is not int or version < 1:
            raise ValueError
    except (KeyError, RecursionError, TypeError, ValueError):
        raise wrong(path, "the shard's metadata is corrupt") from None
    if version > _VERSION:
        raise UnsupportedError(f"the shard has version {version}, of a later fastpipe: upgrade fastpipe (file {path})")
    return found


def _described(path: str, metadata: dict[str, bytes]) -> _Shard:
    found = _said(path, metadata)
    possible = all(type(value) in (int, bool) and value >= 0 for value in found.values())
    if not possible or found.keys() != set(_Shard._fields):
        raise wrong(path, "the shard's metadata is corrupt")
    shard = _Shard(**found)
    if shard.num_users > 2**31 or shard.num_items > 2**31:
        raise wrong(path, "the shard's metadata is corrupt")
    return shard


def _check_row(paths: list[str], shards: list[_Shard], whole: bool) -> None:
    """Checks that shards belong to the same data and are consecutive, and that a folder contains all of them."""
    head = shards[0]
    for path, before, shard in zip(paths[1:], shards[:-1], shards[1:], strict=True):
        common = ("shards", "num_users", "num_items", "num_positives", "sequence")
        if any(getattr(shard, name) != getattr(head, name) for name in common):
            raise wrong(path, f"it is a shard of different data than {paths[0]}")
        if shard.shard != before.shard + 1:
            raise wrong(
                path, f"shard {shard.shard} doesn't follow shard {before.shard}: name consecutive shards in order"
            )
    if whole and (head.shard, len(shards)) != (0, head.shards):
        raise wrong(paths[0], f"its folder has {len(shards)} of {head.shards} shards: name files to read some of them")


def _items(path: str, file: ArrowFiles | AvroFiles, head: _Shard) -> tuple[Vocabulary, npt.NDArray[np.int64]]:
    """Returns the items of all shards, and the number of positives of each item."""
    _said(path, file.metadata[0])
    columns = file.columns(["item", "positives"], [])
    counts = columns["positives"]
    if not isinstance(counts, np.ndarray) or counts.dtype.kind not in "iu":
        raise wrong(path, "its column positives doesn't contain integers")
    _check_sum(path, file.metadata[0], list(columns.values()))
    vocabulary = Vocabulary.of(columns["item"], "item")
    if len(vocabulary) != head.num_items:
        raise wrong(path, f"it has {len(vocabulary)} items, but the shards refer to {head.num_items}")
    if counts.min() < 0 or counts.max() > 2**62 or sum(counts.tolist()) != head.num_positives:
        raise wrong(path, f"its counts of positives don't match the {head.num_positives} positives of the shards")
    return vocabulary, counts.astype(np.int64)


def _content(path: str, columns: dict[str, Any]) -> tuple[Vocabulary, CSR]:
    """Returns the users and positives of shards. Checks only what is valid or invalid within a single file."""
    items, lengths = columns["items"]
    sequence = None
    if "sequence" in columns:
        sequence, others = columns["sequence"]
        if not np.array_equal(lengths, others):
            raise wrong(path, "the history of a user has more or fewer positions than the user has items")
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return Vocabulary.of(columns["user"], "user"), CSR(indptr, items, sequence)


def _check_places(paths: list[str], shards: list[_Shard], csr: CSR) -> None:
    """Checks that each shard begins where the previous shard ends, and that the last shard ends with the data."""
    head, last = shards[0], shards[-1]
    before = -1
    for path, shard in zip(paths, shards, strict=True):
        user, begins = shard.first_user - head.first_user, shard.shard == 0
        inside = before < user < csr.num_users and (not begins or shard.first_user == shard.first_positive == 0)
        before = user
        if not inside or csr.indptr[user] != shard.first_positive - head.first_positive:
            raise wrong(path, "it doesn't begin after the last user and positive of the previous shard")
    end = (head.first_user + csr.num_users, head.first_positive + len(csr.items))
    all_ = (head.num_users, head.num_positives)
    if (last.shard == head.shards - 1 and end != all_) or end[0] > all_[0] or end[1] > all_[1]:
        raise wrong(paths[-1], f"it is incomplete: shard {last.shard} doesn't end with its last user or positive")


def _check_sums(
    paths: list[str],
    shards: list[_Shard],
    indptr: npt.NDArray[np.int64],
    columns: dict[str, Any],
    metadata: list[dict[str, bytes]],
) -> None:
    """Verifies the checksum of each file."""
    starts = [shard.first_user - shards[0].first_user for shard in shards]
    for path, said, (start, stop) in zip(paths, metadata, pairwise([*starts, len(indptr) - 1]), strict=True):
        first, last = indptr[start], indptr[stop]
        parts = [
            (part[0][first:last], part[1][start:stop]) if isinstance(part, tuple) else part[start:stop]
            for part in columns.values()
        ]
        _check_sum(path, said, parts)


def _check_sum(path: str, metadata: dict[str, bytes], columns: list[Any]) -> None:
    if _CHECKSUM not in metadata and _said(path, metadata)["version"] == 1:
        return
    if metadata.get(_CHECKSUM) != str(_checksum(metadata[_KEY], columns)).encode():
        raise in_file(MalformedFileError, path, "it is damaged: its content doesn't match its checksum")


def _check_content(csr: CSR, num_items: int, path: str) -> None:
    ascends = np.diff(csr.items.astype(np.int64)) > 0
    inner = csr.indptr[1:-1]
    ascends[inner[(inner > 0) & (inner < len(csr.items))] - 1] = True  # Items may decrease from one user to the next.
    if not ascends.all() or (len(csr.items) and int(csr.items.max()) >= num_items):
        raise wrong(path, "the items of a user of this shard, or of a later shard, don't ascend or don't exist")
    if csr.sequence is not None:
        places = np.arange(len(csr.items)) - np.repeat(csr.indptr[:-1], csr.counts)
        history = np.lexsort((csr.sequence, csr.users()))
        if not np.array_equal(csr.sequence[history], places):
            raise wrong(
                path, "positions in the history of a user of this shard, or of a later shard, aren't 0, 1, 2 and so on"
            )
