"""Mutated container files, and a child process that reads them in every order.

A mutation is a pure function of its index, so the index is enough to reproduce a failure: `python tests/mutations.py
INDEX` reads one file in this process.
"""

from __future__ import annotations

import functools
import io
import itertools
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro

import fastpipe
import wire
from wire import CODECS

CORPUS = Path(__file__).resolve().parents[2] / "shared/corpus"
LARGEST = 60_000
"""Maximum size in bytes of files from the corpus. Larger files take longer and find no more errors."""
BEYOND = 2 << 30
"""Bytes of address space that a child may allocate in addition to its initial size."""
MOST = 2_000
"""Maximum number of batches read from a file, which may contain millions of rows without bytes."""
COUNTS = (0, 1, -1, 63, 64, 2**20, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"shuffle": True, "shuffle_buffer": 7},
    {"shuffle": True},
    {"shuffle": "block", "shuffle_buffer": 5},
    {"shuffle": "buffer"},
)

_SCHEMAS: tuple[tuple[Any, Callable[[int], Any]], ...] = (
    ("long", lambda row: row * 1_000_003),
    ("null", lambda _: None),
    (wire.record("Empty"), lambda _: {}),
    (wire.list_of("null"), lambda row: [None] * (row % 5)),
    (
        wire.record("Row", x="int", t="string", v=wire.list_of("float"), n=["null", "double"], b="bytes", ok="boolean"),
        lambda row: {
            "x": row,
            "t": "ab" * (row % 4),
            "v": [0.5] * (row % 3),
            "n": None if row % 2 else 1.5,
            "b": bytes(row % 6),
            "ok": row % 3 == 0,
        },
    ),
    (
        wire.record(
            "Nested",
            s=wire.record("Sparse", indices0=wire.list_of("long"), values=wire.list_of("float")),
            m={"type": "map", "values": wire.list_of("int")},
            e={"type": "enum", "name": "E", "symbols": ["A", "B", "C"]},
            f={"type": "fixed", "name": "F", "size": 3},
            vv=wire.list_of(wire.list_of("double")),
        ),
        lambda row: {
            "s": {"indices0": list(range(row % 3)), "values": [1.0] * (row % 3)},
            "m": {"k" * (i + 1): [row] for i in range(row % 3)},
            "e": "ABC"[row % 3],
            "f": bytes([row % 256] * 3),
            "vv": [[1.0] * (row % 3)] * (row % 4),
        },
    ),
)


@functools.cache
def sound() -> list[bytes]:
    """Returns undamaged files: each schema with each codec, and files from other writers if they are available."""
    files: list[bytes] = []
    for schema, row in _SCHEMAS:
        for codec in CODECS:
            file = io.BytesIO()
            rows = [row(n) for n in range(40)]
            fastavro.writer(file, schema, rows, codec=codec, sync_interval=60, sync_marker=wire.SYNC)
            files.append(file.getvalue())
    others = sorted(CORPUS.rglob("*.avro")) if CORPUS.is_dir() else []
    return files + [path.read_bytes() for path in others if path.is_file() and path.stat().st_size <= LARGEST]


def _number(chance: random.Random) -> bytes:
    """Returns a varint for a count or a size, usually too large."""
    value = chance.choice(COUNTS) if chance.random() < 0.7 else chance.randrange(-(2**20), 2**31)
    return wire.long(value)


def _spot(chance: random.Random, data: bytes) -> int:
    """Returns a position, often right after a sync marker, where a block declares its row and byte counts."""
    if chance.random() < 0.5 and len(data) > 32:
        marker = data[-16:]
        found, at = [], data.find(marker)
        while at >= 0:
            found.append(at + 16)
            at = data.find(marker, at + 1)
        return min(chance.choice(found) + chance.choice((0, 0, 0, 1, 2, 3)), len(data))
    return chance.randrange(len(data) + 1)


def _mutate(chance: random.Random, data: bytes) -> bytes:
    at = _spot(chance, data)
    to = min(len(data), at + chance.choice((1, 1, 1, 2, 3, 8, 30, 400)))
    match chance.randrange(9):
        case 0 | 1:
            return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if at < len(data) else data
        case 3 | 4:
            return data[:at] + _number(chance) + data[min(len(data), at + chance.choice((0, 1, 1, 2))) :]
        case 5:
            return data[:at] + data[to:]
        case 6:
            return data[:at] + data[at:to] * chance.choice((2, 2, 3, 40)) + data[to:]
        case 7:
            return data[:at] + chance.randbytes(to - at) + data[to:]
        case _:
            other = chance.choice(sound())
            start = chance.randrange(len(other))
            return data[:at] + other[start : start + (to - at)] + data[to:]


def _take_long(data: bytes, at: int) -> tuple[int, int]:
    """Reads a long from an undamaged file. Returns it and its end."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value >> 1 ^ -(value & 1), at


def _blocks(data: bytes) -> tuple[bytes, list[tuple[int, bytes]]]:
    """Returns the header of an undamaged file, and each block's row count and stored bytes.

    Broken files of other writers have none.
    """
    marker = data[-16:]
    start = at = data.index(marker) + 16
    blocks = []
    try:
        while at < len(data):
            rows, at = _take_long(data, at)
            size, at = _take_long(data, at)
            blocks.append((rows, data[at : at + size]))
            at += size + 16
    except IndexError:
        return data, []
    return data[:start], blocks


def _mutate_inside(chance: random.Random, data: bytes) -> bytes:
    """Changes what blocks declare and contain. All around them stays intact, so that readers get that far."""
    head, blocks = _blocks(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        if not blocks:
            break
        at = chance.randrange(len(blocks))
        rows, stored = blocks[at]
        match chance.randrange(5):
            case 0 | 1:
                rows = chance.choice(COUNTS) if chance.random() < 0.5 else chance.randrange(2**31)
            case 2:
                stored = _mutate(chance, stored + data[-16:])[:-16]
            case 3:
                blocks[at:at] = [blocks[at]] * chance.choice((1, 3, 200))
            case _:
                stored = b""
        blocks[at] = rows, stored
    return head + b"".join(wire.stored(rows, stored, sync=data[-16:]) for rows, stored in blocks)


def mutated(number: int) -> bytes:
    """Returns the mutation with this index: random changes of an undamaged file.

    For half of the indices, all changes are inside of blocks.
    """
    chance = random.Random(number)
    data = chance.choice(sound())
    if chance.random() < 0.5:
        return _mutate_inside(chance, data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        data = _mutate(chance, data)
    return data[: chance.randrange(len(data) + 1)] if chance.random() < 0.05 else data


def _attempt(outcomes: list[str], what: Callable[[], Any]) -> Any:
    """Calls a function that may fail with a documented error."""
    try:
        return what()
    except fastpipe.FastpipeError as error:
        outcomes.append(type(error).__name__)
    except IndexError:
        # `batch_at` and `locate` raise it for rows that a damaged file has lost.
        outcomes.append("IndexError")
    return None


def _read(path: str, order: dict[str, Any], batch_size: int, features: Any) -> None:
    reader = fastpipe.read_avro(path, features=features, batch_size=batch_size, seed=3, num_threads=1, **order)
    batches = iter(reader)
    next(batches, None)
    state = reader.state_dict()
    rest = sum(1 for _ in itertools.islice(batches, MOST))
    reader.load_state_dict(state)
    again = sum(1 for _ in itertools.islice(reader, MOST))
    assert again == rest, f"{rest} batches after the first, {again} when resumed there"


def _look_up(path: str, order: dict[str, Any], batch_size: int, features: Any, chance: random.Random) -> list[str]:
    """Reads a random batch and locates one of its rows. Returns the classes of errors."""
    outcomes: list[str] = []
    reader = _attempt(
        outcomes,
        lambda: fastpipe.read_avro(
            path, features=features, batch_size=batch_size, seed=3, num_threads=1, memory_limit="64MB", **order
        ),
    )
    if reader is not None:
        step = chance.randrange(max(_attempt(outcomes, lambda: len(reader)) or 0, 1))
        _attempt(outcomes, lambda: reader.batch_at(step))
        _attempt(outcomes, lambda: reader.locate(step, 0))
    return outcomes


def read(path: str, number: int) -> list[str]:
    """Reads a file in every order and uses the other features of orders. Returns the classes of errors."""
    outcomes: list[str] = []
    chance = random.Random(number)
    size = chance.choice((1, 3, 16, 1024))
    features = _attempt(outcomes, lambda: fastpipe.infer_features(path))
    if not features:
        return outcomes
    for order in ORDERS:
        _attempt(outcomes, functools.partial(_read, path, order, size, features))
        outcomes += _look_up(path, order, size, features, chance)
    if number % 7 == 0:
        order: dict[str, Any] = {"batch_size": size, "shuffle": True, "seed": 3}
        _attempt(outcomes, lambda: str(fastpipe.read_avro(path, **order).shuffle_report()))
    return outcomes


def main(first: int, count: int) -> None:
    """Reads mutations. Prints each index before its read, and the seconds and errors after it."""
    path = str(Path(tempfile.mkdtemp(prefix="mutations-")) / "mutated.avro")
    warnings.simplefilter("ignore")  # Ignores expected warnings about rows that are left out and about few batches.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    if count > 1:
        size = pages * resource.getpagesize() + BEYOND
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for number in range(first, first + count):
        Path(path).write_bytes(mutated(number))
        print(f"begin {number}", flush=True)
        began = time.process_time()
        found = read(path, number)
        print(f"end {time.process_time() - began:.3f} {','.join(found)}", flush=True)
    Path(path).unlink()
    Path(path).parent.rmdir()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
