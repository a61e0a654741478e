"""Shards of interactions: files of consecutive users, each of which can be read by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._csr import CSR
from fastpipe._ids import Vocabulary
from fastpipe._sources import Paths, expand
from fastpipe.avro import AvroFile, read_avro
from fastpipe.errors import InteractionsError, MalformedFileError, MissingFileError, UnsupportedError
from fastpipe.specs import DenseSpec, Features, RaggedSpec

__all__ = ["Format", "Part", "read", "write"]

Format: TypeAlias = Literal["avro", "arrow"]

# Of the files' metadata, under which a JSON object says which shard of what it is.
_KEY = "fastpipe.interactions"
_VERSION = 1
_ITEMS = "items"
_ROWS = 1 << 14


class Part(NamedTuple):
    """Where some shards stand among all.

    Attributes:
        first_user: the number of the first user.
        first_positive: how many positives the users before have.
        num_users: users of all shards.
        item_counts: int64 `[items]`, positives of each item in all shards.
    """

    first_user: int
    first_positive: int
    num_users: int
    item_counts: npt.NDArray[np.int64]


class _Shard(NamedTuple):
    """What a shard's metadata say."""

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
    """Writes all shards, and the items beside them.

    Args:
        folder: where to.
        kind: `"avro"` or `"arrow"`.
        most: positives with which a shard ends.
        users: of all shards.
        items: of all shards.
        csr: the positives.

    Returns:
        Paths of the shards.
    """
    if kind not in ("avro", "arrow"):
        raise ValueError(f'format is "avro" or "arrow", not {kind!r}')
    put = _put_avro if kind == "avro" else _put_arrow
    os.makedirs(folder, exist_ok=True)
    there = sorted(name for name in os.listdir(folder) if name.endswith((".avro", ".arrow")))
    if there:
        raise FileExistsError(f"the folder {folder} holds {there[0]} already: name an empty one")
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
        put(path, columns, shard._asdict())
        paths.append(path)
    # Last: without it no shard can be read, so a folder that wasn't finished isn't taken for a whole one.
    counts = np.bincount(csr.items, minlength=len(items))
    put(os.path.join(folder, f"{_ITEMS}.{kind}"), {"item": items.ids, "positives": counts}, {"version": _VERSION})
    return paths


def _edges(indptr: npt.NDArray[np.int64], most: int) -> list[int]:
    """The first user of each shard, and the number of users."""
    edges, users = [0], len(indptr) - 1
    while edges[-1] < users:
        full = np.searchsorted(indptr, indptr[edges[-1]] + most)
        edges.append(min(max(int(full), edges[-1] + 1), users))
    return edges


def _put_avro(path: str, columns: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Writes a file of a record for each entry of the columns: of ids or numbers, or of values and offsets."""
    try:
        import fastavro
    except ImportError as error:
        raise ImportError('Avro is written with fastavro: pip install fastavro, or take format="arrow"') from error
    fields = [{"name": name, "type": _avro_type(column)} for name, column in columns.items()]
    schema = fastavro.parse_schema({"type": "record", "name": "Shard", "namespace": "fastpipe", "fields": fields})
    rows = zip(*map(_entries, columns.values()), strict=True)
    records = (dict(zip(columns, row, strict=True)) for row in rows)
    with open(path, "xb") as file:
        fastavro.writer(file, schema, records, codec="null", metadata={_KEY: json.dumps(metadata)})


def _avro_type(column: Any) -> Any:
    if isinstance(column, tuple):
        return {"type": "array", "items": "int"}
    if column.dtype == object:
        return "bytes" if isinstance(column[0], bytes) else "string"
    if column.dtype == np.uint64:
        raise UnsupportedError('Avro has no integers of 2^63 or more: take format="arrow", or strings for ids')
    return "long"


def _entries(column: Any) -> Iterator[Any]:
    if not isinstance(column, tuple):
        return iter(column.tolist())
    values, offsets = column
    return (values[start:stop].tolist() for start, stop in pairwise(offsets.tolist()))


def _put_arrow(path: str, columns: dict[str, Any], metadata: dict[str, Any]) -> None:
    pa = _pyarrow()

    def array(column: Any) -> Any:
        if isinstance(column, tuple):
            return pa.LargeListArray.from_arrays(pa.array(column[1]), pa.array(column[0]))
        return pa.array(column)

    table = pa.table({name: array(column) for name, column in columns.items()})
    table = table.replace_schema_metadata({_KEY: json.dumps(metadata)})
    with open(path, "xb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


# --- Reading ---


def read(source: Paths) -> tuple[Vocabulary, Vocabulary, CSR, Part | None]:
    """Reads shards that follow each other, and the items.

    Returns:
        Users, items, the positives; and where they stand among all, if these aren't all.
    """
    whole = isinstance(source, str | os.PathLike) and os.path.isdir(source)
    paths = _paths(source)
    kind = "arrow" if paths[0].endswith(".arrow") else "avro"
    beside = os.path.join(os.path.dirname(paths[0]), f"{_ITEMS}.{kind}")
    if not os.path.exists(beside):
        reason = "the items of the shards aren't beside them: either they were moved, or writing them was interrupted"
        raise MissingFileError(f"{reason} (file {beside})", path=beside, reason=reason)
    get = _get_arrow if kind == "arrow" else _get_avro
    shards = [_described(path, _metadata(path, kind)) for path in paths]
    _check_row(paths, shards, whole)
    head = shards[0]
    vocabulary, counts = _items(beside, get)
    users, csr = _content(paths, head, get)
    if len(vocabulary) != head.num_items:
        raise _wrong(beside, f"it has {len(vocabulary)} items, and the shards are of {head.num_items}")
    _check_content(csr, head.num_items, paths[0])
    end = (shards[-1].shard, shards[-1].first_positive)
    is_last = shards[-1].shard == head.shards - 1
    if is_last and (head.first_user + csr.num_users, head.first_positive + len(csr.items)) != (
        head.num_users,
        head.num_positives,
    ):
        raise _wrong(paths[-1], f"it isn't whole: shard {end[0]} ends before the last user or positive")
    if is_last and head.shard == 0:
        return users, vocabulary, csr, None
    return users, vocabulary, csr, Part(head.first_user, head.first_positive, head.num_users, counts)


def _paths(source: Paths) -> list[str]:
    if isinstance(source, str | os.PathLike) and os.path.isdir(source):
        for suffix in (".avro", ".arrow"):
            found = sorted(name for name in os.listdir(source) if name.startswith("shard-") and name.endswith(suffix))
            if found:
                return [os.path.join(os.fsdecode(source), name) for name in found]
        reason = "the folder holds no shards"
        raise MissingFileError(f"{reason} (file {os.fsdecode(source)})", path=os.fsdecode(source), reason=reason)
    return expand(source)


def _metadata(path: str, kind: str) -> bytes | None:
    if kind == "avro":
        return AvroFile(path).metadata.get(_KEY)
    found: bytes | None = (_opened(path).schema.metadata or {}).get(_KEY.encode())
    return found


def _described(path: str, metadata: bytes | None) -> _Shard:
    if metadata is None:
        raise _wrong(path, "it is no shard of interactions: write_shards writes them")
    try:
        found = json.loads(metadata)
        if found["version"] > _VERSION:
            raise UnsupportedError(f"the shard is of version {found['version']}, of a later fastpipe (file {path})")
        shard = _Shard(**found)
        possible = all(type(value) in (int, bool) and value >= 0 for value in found.values())
        if not possible or shard.num_users > 2**31 or shard.num_items > 2**31:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise _wrong(path, "what it says of itself is damaged") from None
    return shard


def _check_row(paths: list[str], shards: list[_Shard], whole: bool) -> None:
    """Shards of the same data that follow each other; all of them, if a folder was named."""
    head = shards[0]
    for path, before, shard in zip(paths[1:], shards[:-1], shards[1:], strict=True):
        common = ("shards", "num_users", "num_items", "num_positives", "sequence")
        if any(getattr(shard, name) != getattr(head, name) for name in common):
            raise _wrong(path, f"it is a shard of other data than {paths[0]}")
        if shard.shard != before.shard + 1:
            raise _wrong(
                path, f"shard {shard.shard} doesn't follow shard {before.shard}: name shards in a row, in order"
            )
    if whole and (head.shard, len(shards)) != (0, head.shards):
        raise _wrong(paths[0], f"its folder has {len(shards)} of {head.shards} shards: name files to read some of them")


def _items(path: str, get: Callable[..., dict[str, Any]]) -> tuple[Vocabulary, npt.NDArray[np.int64]]:
    columns = get([path], ["item", "positives"], [])
    return Vocabulary.of(columns["item"], "item"), np.asarray(columns["positives"], np.int64)


def _content(paths: list[str], head: _Shard, get: Callable[..., dict[str, Any]]) -> tuple[Vocabulary, CSR]:
    lists = ["items", "sequence"] if head.sequence else ["items"]
    columns = get(paths, ["user"], lists)
    items, lengths = columns["items"]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    sequence = None
    if head.sequence:
        sequence, others = columns["sequence"]
        if not np.array_equal(lengths, others):
            raise _wrong(paths[0], "a user has more or fewer places in the history than items")
    return Vocabulary.of(columns["user"], "user"), CSR(indptr, items, sequence)


def _check_content(csr: CSR, num_items: int, path: str) -> None:
    ascends = np.diff(csr.items.astype(np.int64)) > 0
    inner = csr.indptr[1:-1]
    ascends[inner[(inner > 0) & (inner < len(csr.items))] - 1] = True  # From one user to the next they may fall.
    if not ascends.all() or (len(csr.items) and int(csr.items.max()) >= num_items):
        raise _wrong(path, "items of a user of this shard, or one behind it, don't ascend or don't exist")
    if csr.sequence is not None:
        places = np.arange(len(csr.items)) - np.repeat(csr.indptr[:-1], csr.counts)
        history = np.lexsort((csr.sequence, csr.users()))
        if not np.array_equal(csr.sequence[history], places):
            raise _wrong(
                path, "places in the history of a user of this shard, or one behind it, aren't 0, 1, 2 and so on"
            )


def _get_avro(paths: list[str], scalars: list[str], lists: list[str]) -> dict[str, Any]:
    """Columns of files: of ids or numbers as an array or list, of lists as uint32 values and lengths."""
    inferred = read_avro(paths[:1], columns=scalars, batch_size=1).features
    features = Features({name: DenseSpec((), inferred[name].dtype) for name in scalars})
    features.update({name: RaggedSpec((None,), "uint32") for name in lists})
    batches = list(read_avro(paths, features=features, batch_size=_ROWS))
    columns: dict[str, Any] = {}
    for name in scalars:
        text = features[name].dtype in ("string", "bytes")
        pieces = [batch[name] for batch in batches]
        columns[name] = [entry for piece in pieces for entry in piece.to_list()] if text else np.concatenate(pieces)
    for name in lists:
        pieces = [batch[name] for batch in batches]
        columns[name] = (
            np.concatenate([piece.values for piece in pieces]),
            np.concatenate([piece.lengths for piece in pieces]),
        )
    return columns


def _get_arrow(paths: list[str], scalars: list[str], lists: list[str]) -> dict[str, Any]:
    pa = _pyarrow()
    tables = [_opened(path).read_all() for path in paths]
    wanted = [*scalars, *lists]
    for path, table in zip(paths, tables, strict=True):
        if any(name not in table.column_names or table[name].null_count for name in wanted):
            raise _wrong(path, f"it hasn't the columns {', '.join(wanted)}, or some of their values are null")
    columns: dict[str, Any] = {}
    for name in scalars:
        column = pa.chunked_array([chunk for table in tables for chunk in table[name].chunks])
        columns[name] = column.to_numpy() if pa.types.is_integer(column.type) else column.to_pylist()
    for name in lists:
        chunks = [chunk for table in tables for chunk in table[name].chunks]
        values = [chunk.flatten().to_numpy().astype(np.uint32) for chunk in chunks]
        lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in chunks]
        columns[name] = np.concatenate(values), np.concatenate(lengths)
    return columns


def _opened(path: str) -> Any:
    pa = _pyarrow()
    if not os.path.exists(path):
        raise MissingFileError(f"there is no such file (file {path})", path=path, reason="there is no such file")
    try:
        return pa.ipc.open_file(pa.memory_map(path))
    except pa.ArrowInvalid as error:
        reason = f"it is no Arrow file, or damaged: {error}"
        raise MalformedFileError(f"{reason} (file {path})", path=path, reason=reason) from None


def _wrong(path: str, reason: str) -> InteractionsError:
    return InteractionsError(f"{reason} (file {path})", path=path, reason=reason)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("Arrow files need pyarrow: pip install 'fastpipe-data[arrow]'") from error
    return pyarrow
