"""Small datasets in which every value is determined by the row's index, and helpers to check their batches.

Tests choose the exact row count of each block, including 0, which Avro writers don't allow.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
import oracle
import wire

SHUFFLES = (False, True, "block", "buffer")
# Orders that allow the number of ranks to change within an epoch, and the unit that they divide between ranks.
ELASTIC = ((False, "window"), (True, "window"), *((shuffle, "batch") for shuffle in SHUFFLES))

SCHEMA = wire.record(
    "Row",
    rest="bytes",
    id="long",
    vector=wire.list_of("float"),
    items=wire.list_of("int"),
    words=wire.list_of("string"),
    note=["null", "string"],
    score=["null", "double"],
    terms=wire.record("Terms", indices0=wire.list_of("long"), values=wire.list_of("float")),
)
FEATURES = {
    "id": fastpipe.DenseSpec((), "int64"),
    "vector": fastpipe.DenseSpec((3,), "float32"),
    "items": fastpipe.RaggedSpec((None,), "int32"),
    "words": fastpipe.RaggedSpec((None,), "string"),
    "note": fastpipe.DenseSpec((), "string", on_null="mask"),
    "score": fastpipe.DenseSpec((), "float64", on_null="mask"),
    "terms": fastpipe.SparseSpec((8,), "float32"),
}
ONLY_ID = {"id": FEATURES["id"]}


def row(i: int) -> dict[str, Any]:
    """Returns the values of a row as `oracle.rows` does. No two rows have a value in common."""
    return {
        "id": i,
        "vector": [i * 0.5, -float(i), 1.0],
        "items": list(range(i, i + i % 5)),
        "words": [f"{i}.{k}" for k in range(i % 3)],
        "note": None if i % 4 == 0 else f"note {i}",
        "score": None if i % 3 == 1 else i / 7,
        "terms": [((k,), i + 0.25) for k in range(0, i * 7 % 8, 2)],
    }


@functools.cache
def encoded(i: int, rest: int) -> bytes:
    """Returns a row as encoded in a block, with `rest` bytes that no test reads."""
    values = row(i)
    note, score, terms = values["note"], values["score"], values["terms"]
    return b"".join(
        [
            wire.text(bytes(rest)),
            wire.long(i),
            wire.array(*map(wire.float_, values["vector"])),
            wire.array(*map(wire.long, values["items"])),
            wire.array(*map(wire.text, values["words"])),
            wire.long(0) if note is None else wire.long(1) + wire.text(note),
            wire.long(0) if score is None else wire.long(1) + wire.double(score),
            wire.array(*(wire.long(index) for (index,), _ in terms)),
            wire.array(*(wire.float_(value) for _, value in terms)),
        ]
    )


class Data:
    """Files, and the row at each position in them."""

    def __init__(self, paths: list[str], ids: Mapping[fastpipe.typing.Location, int]) -> None:
        self.paths = paths
        self.ids = ids

    def __repr__(self) -> str:
        return f"<{self.total} rows>"

    @property
    def total(self) -> int:
        """Number of rows."""
        return len(self.ids)

    def read(self, **options: Any) -> fastpipe.Reader:
        """Returns a reader of the files, with all features unless the options select some."""
        if "columns" not in options:
            options = {"features": FEATURES} | options
        return fastpipe.read_avro(self.paths, **options)

    def located(self, reader: fastpipe.Reader, step: int, rows: int, epoch: int | None = None) -> list[int]:
        """Returns the rows of a batch according to `locate`."""
        return [self.ids[reader.locate(step, slot, epoch)] for slot in range(rows)]


def write(folder: Path, files: Iterable[Sequence[int]], codec: str = "null", rest: int = 0) -> Data:
    """Writes files of blocks with these row counts to a new folder. Rows are numbered across all files."""
    paths, ids = [], {}
    folder = Path(tempfile.mkdtemp(dir=folder))
    for number, blocks in enumerate(files):
        path = folder / f"{number:02}.avro"
        written = []
        for block, rows in enumerate(blocks):
            start = len(ids)
            ids.update(
                {fastpipe.avro.AvroLocation(file=str(path), block=block, row=row): start + row for row in range(rows)}
            )
            written.append((rows, b"".join(encoded(i, rest) for i in range(start, start + rows))))
        path.write_bytes(wire.container(SCHEMA, written, codec))
        paths.append(str(path))
    return Data(paths, ids)


def blocks_of(rows: int, sizes: Sequence[int] = (3, 1, 7, 0, 12, 2)) -> list[int]:
    """Returns blocks of these sizes, repeated until there are `rows` rows."""
    blocks: list[int] = []
    while (left := rows - sum(blocks)) > 0:
        blocks.append(min(sizes[len(blocks) % len(sizes)], left))
    return blocks


def check(batch: dict[str, Any], ids: Sequence[int]) -> None:
    """Checks that every column of a batch contains the values of these rows in this order."""
    wanted = [row(i) for i in ids]
    for name, node in batch.items():
        if name in FEATURES:
            problem = oracle.difference([values[name] for values in wanted], oracle.rows(node), name)
            assert problem is None, problem


def digest(batch: dict[str, Any]) -> str:
    """Returns a digest of a batch's names, array types, dtypes, shapes and bytes."""
    found = hashlib.blake2b(digest_size=16)
    for part in _parts(batch):
        found.update(part)
    return found.hexdigest()


def digests(batches: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the digest of each batch."""
    return [digest(batch) for batch in batches]


def _parts(node: Any) -> Iterator[bytes]:
    if isinstance(node, np.ndarray):
        yield f"{node.dtype.str}{node.shape}".encode()
        yield node.tobytes()
    elif isinstance(node, dict):
        for name, value in node.items():
            yield name.encode()
            yield from _parts(value)
    else:
        yield type(node).__name__.encode()
        if isinstance(node, fastpipe.Strings):
            yield f"{node.shape}{node.binary}".encode()
        for part in node:
            yield from _parts(part)


def order_of(shuffle: bool | str) -> dict[str, Any]:
    """Returns the arguments of an order with a short window, pool or buffer."""
    buffer = {} if shuffle is False else {"shuffle_buffer": 21}
    return {"shuffle": shuffle, "batch_size": 7, "seed": 11, **buffer}


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state after a round trip through JSON."""
    return json.loads(json.dumps(state))


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state with a matching checksum."""
    entries = {name: value for name, value in state.items() if name != "checksum"}
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return entries | {"checksum": zlib.crc32(text.encode())}


def ids_of(batches: Iterable[dict[str, Any]]) -> list[int]:
    """Returns the rows of batches according to their ids, without padding rows."""
    return [
        i
        for batch in batches
        for i, valid in zip(batch["id"].tolist(), batch.get("valid", np.ones(len(batch["id"]), bool)), strict=True)
        if valid
    ]


def ids_by_batch(batches: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Returns the rows of each batch according to their ids."""
    return [batch["id"].tolist() for batch in batches]


def check_order(shuffle: bool | str, ids: Sequence[int], data: Data, buffer: int | None, batch_size: int) -> None:
    """Checks the guarantees of an order for the rows of a whole epoch."""
    assert sorted(ids) == list(range(data.total))
    if shuffle is False:
        assert list(ids) == sorted(ids)
        return
    assert buffer is not None
    block_of = {i: (place.file, place.block) for place, i in data.ids.items()}
    if shuffle == "buffer":
        # The buffer contains `buffer` rows when one is drawn.
        assert all(i < at + buffer for at, i in enumerate(ids))
    elif shuffle == "block":
        # Each block is read from its first record to its last.
        last: dict[tuple[str, int], int] = {}
        for i in ids:
            assert i > last.get(block_of[i], -1)
            last[block_of[i]] = i
    else:
        # Windows contain whole blocks, except for blocks that a window boundary cuts.
        assert buffer % batch_size == 0
        windows = [{block_of[i] for i in ids[at : at + buffer]} for at in range(0, len(ids), buffer)]
        assert all(len(a & b) <= 1 for a, b in pairwise(windows))


def threads_are(expected: int) -> bool:
    """Returns whether the engine soon runs this many threads (Linux).

    A process keeps its threads of remote readers, and those that receive remote files.
    """
    stop = time.monotonic() + 60
    while time.monotonic() < stop:
        names = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                names.append(Path(f"/proc/self/task/{task}/comm").read_text())
        kept = ("fastpipe-client", "fastpipe-remote")
        engine = [name for name in names if name.startswith("fastpipe-") and not name.startswith(kept)]
        if len(engine) == expected:
            return True
        time.sleep(0.01)
    return False
