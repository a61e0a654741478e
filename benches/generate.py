"""Generated Avro files for the comparisons.

The Avro binary encoding is written here with NumPy, a few thousand records at a time, because writing a gigabyte record
by record would take longer than all the measurements. Every part of a record is a pair `(flat, sizes)`: all its bytes
one after another, and how many of them belong to each record. `weave` interleaves such parts; nothing else is needed
to go from columns to records, since an array is a count, items and a zero, and a union is an index and a value.

Files depend on (data set, records, block bytes, codec, seed) and are cached under `benches/.cache`. Beside each
is a JSON file with the number of rows and a checksum of every column, taken from the columns *before* they were
encoded: each reader of the file must come to the same sums, which tests this writer along with the readers.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CACHE = Path(__file__).resolve().parent / ".cache"
VERSION = 2
"""Part of the cached files' names: raise it when the same arguments give other bytes."""
CHUNK = 4096
"""Records drawn and encoded at a time. The random stream depends on it, so it isn't an option."""
SPARSE_SIZE = 100_000
BLOCK_BYTES = 1 << 20

DTYPES = {"int": "int32", "long": "int64", "float": "float32", "double": "float64", "boolean": "bool"}


def _deflate(data: bytes) -> bytes:
    squeezer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return squeezer.compress(data) + squeezer.flush()


def _snappy(data: bytes) -> bytes:
    import cramjam

    # Avro 1.12, "Required Codecs: snappy": the CRC-32 of the uncompressed data follows, big-endian.
    return bytes(cramjam.snappy.compress_raw(data)) + zlib.crc32(data).to_bytes(4, "big")


def _zstandard(data: bytes) -> bytes:
    import cramjam

    return bytes(cramjam.zstd.compress(data, level=3))


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "null": bytes,
    "deflate": _deflate,
    "snappy": _snappy,
    "zstandard": _zstandard,
}
"""Name in the file's header -> how a block is compressed."""

Part = tuple[np.ndarray, np.ndarray]
"""The bytes of one part of every record (uint8), and how many each record has (int64)."""


@dataclass(frozen=True)
class Column:
    """One field of the generated record.

    Attributes:
        name: The field's name.
        kind: scalar, dense, ragged, sparse, string or strings (an array of them).
        avro: The Avro primitive of the value or of the items.
        size: How many items a dense array has.
        counts: Least and greatest number of items (ragged, sparse, strings).
        span: Half-open range of integers to draw; None: all bit lengths evenly. Byte lengths, for strings.
        nullable: Whether the field is a union with null.
    """

    name: str
    kind: str
    avro: str
    size: int = 0
    counts: tuple[int, int] = (0, 0)
    span: tuple[int, int] | None = (0, 1000)
    nullable: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The Avro schema of the field."""
        kind: Any = self.avro
        if self.kind in ("dense", "ragged", "strings"):
            kind = {"type": "array", "items": self.avro}
        elif self.kind == "sparse":
            arrays = [("indices0", "long"), ("values", self.avro)]
            fields = [{"name": name, "type": {"type": "array", "items": items}} for name, items in arrays]
            kind = {"type": "record", "name": f"{self.name}_t", "fields": fields}
        return {"name": self.name, "type": ["null", kind] if self.nullable else kind}


def _scalars(nullable: bool) -> list[Column]:
    kinds = ["int", "long", "float", "double", "boolean"] * 4
    spans = {"int": (-500, 5000), "long": (0, 1 << 40)}
    return [Column(f"{k}{i}", "scalar", k, span=spans.get(k), nullable=nullable) for i, k in enumerate(kinds)]


DATASETS: dict[str, list[Column]] = {
    "a": [
        Column("user_id", "scalar", "long", span=(0, 1 << 40)),
        Column("item_id", "scalar", "long", span=(0, 1 << 20)),
        Column("age", "scalar", "int", span=(0, 100)),
        Column("score", "scalar", "float"),
        Column("price", "scalar", "double"),
        Column("clicked", "scalar", "boolean"),
        *[Column(f"float_{n}", "dense", "float", size=n) for n in (8, 32, 64, 128)],
        *[Column(f"double_{n}", "dense", "double", size=n) for n in (16, 32)],
        Column("long_8", "dense", "long", size=8, span=(1_500_000_000_000, 1_800_000_000_000)),
        Column("long_24", "dense", "long", size=24, span=(-10, 1000)),
        *[Column(f"sparse_{i}", "sparse", "float", counts=(10, 50), span=(0, SPARSE_SIZE)) for i in range(5)],
    ],
    "b": [Column("embedding", "dense", "float", size=128), Column("label", "scalar", "int", span=(0, 10))],
    "c": [Column("longs", "ragged", "long", counts=(0, 64), span=None)],
    "d": _scalars(nullable=False),
    "e": _scalars(nullable=True),
    "f": [
        Column("id", "string", "string", span=(16, 17)),
        Column("title", "string", "string", span=(10, 60)),
        Column("text", "string", "string", span=(40, 200)),
        Column("tags", "strings", "string", counts=(0, 8), span=(3, 13)),
        Column("label", "scalar", "int", span=(0, 10)),
    ],
}


class Sums:
    """Checksums of columns that come in pieces.

    A sum is that of the values' bits, each weighted by its place in the column, modulo 2**64: exact for floats too, the
    same however a column is cut into batches, and another one where values change places.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}

    def add(self, leaf: str, values: np.ndarray, dtype: str) -> None:
        """Adds the next values of a column.

        Args:
            leaf: The column's name.
            values: Any shape, in row order.
            dtype: The dtype of the values, even if the reader has another one.
        """
        flat = np.ascontiguousarray(values, dtype).reshape(-1)
        entry = self._sums.setdefault(leaf, [0, 0, 0])
        bits = flat.view(f"u{flat.itemsize}").astype("u8")
        weights = np.arange(entry[0], entry[0] + flat.size, dtype="u8") * np.uint64(2) + np.uint64(1)
        entry[0] += flat.size
        entry[1] = (entry[1] + int((bits * weights).sum(dtype="u8"))) % 2**64
        entry[2] = (entry[2] + int(bits.sum(dtype="u8"))) % 2**64

    def result(self) -> dict[str, list[Any]]:
        """Each column's number of values and sum (in hexadecimal: JSON has no such integers)."""
        return {leaf: [count, f"{total:016x}"] for leaf, (count, total, _) in self._sums.items()}

    def plain(self) -> dict[str, list[Any]]:
        """The same without weights: what remains of the sums when rows are shuffled."""
        return {leaf: [count, f"{total:016x}"] for leaf, (count, _, total) in self._sums.items()}


def varints(values: np.ndarray) -> Part:
    """Zigzag varints (Avro 1.12, "Primitive Types: int, long") of int64 values."""
    values = np.ascontiguousarray(values, "i8").reshape(-1)
    zigzag = ((values << 1) ^ (values >> 63)).view("u8")
    sizes = np.ones(values.size, "i8")
    for shift in range(7, 64, 7):
        sizes += zigzag >= np.uint64(1 << shift)
    width = int(sizes.max(initial=1))
    table = np.empty((values.size, width), "u1")
    for k in range(width):
        table[:, k] = (zigzag >> np.uint64(7 * k)) & np.uint64(127) | np.uint64(128)
    table[np.arange(values.size), sizes - 1] &= 127
    return table[np.arange(width) < sizes[:, None]], sizes


def weave(parts: list[Part]) -> Part:
    """Interleaves parts: record 0 of the first, of the second, ..., then record 1 of the first, and so on."""
    sizes = np.sum([s for _, s in parts], axis=0)
    starts = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), "u1")
    for flat, part in parts:
        # A byte moves as far as the start of its record's part does.
        shift = starts - (np.cumsum(part) - part)
        out[np.repeat(shift, part) + np.arange(flat.size)] = flat
        starts = starts + part
    return out, sizes


def _grouped(part: Part, counts: np.ndarray) -> Part:
    """Turns a part with one entry an item into one with one entry a record."""
    flat, sizes = part
    ends = np.concatenate(([0], np.cumsum(sizes)))
    last = np.cumsum(counts)
    return flat, ends[last] - ends[last - counts]


def _array(items: Part, counts: np.ndarray) -> Part:
    # Avro 1.12, "Complex Types: Arrays": one block of items, then a block of none. An empty array is only the latter,
    # which the count 0 already is.
    flat, sizes = _grouped(items, counts)
    ends = counts > 0
    return weave([varints(counts), (flat, sizes), (np.zeros(int(ends.sum()), "u1"), ends.astype("i8"))])


def _primitive(avro: str, values: np.ndarray) -> Part:
    if avro in ("int", "long"):
        return varints(values)
    flat = np.ascontiguousarray(values, np.dtype(DTYPES[avro]).newbyteorder("<")).reshape(-1)
    return flat.view("u1"), np.full(flat.size, flat.itemsize, "i8")


def _draw(column: Column, rng: np.random.Generator, n: int) -> np.ndarray:
    """Draws n values or items of a numeric column."""
    if column.avro == "boolean":
        return rng.random(n) < 0.5
    if column.avro in ("float", "double"):
        return rng.standard_normal(n).astype(DTYPES[column.avro])
    if column.span is not None:
        return rng.integers(*column.span, n, DTYPES[column.avro])
    bits = rng.integers(0, 65, n, "u8")
    zigzag = rng.integers(0, 2**64 - 1, n, "u8", endpoint=True) | np.uint64(1 << 63)
    zigzag = np.where(bits == 0, np.uint64(0), zigzag >> np.minimum(np.uint64(64) - bits, np.uint64(63)))
    values: np.ndarray = (zigzag >> np.uint64(1)).view("i8") ^ -(zigzag & np.uint64(1)).view("i8")
    return values


def _draw_text(column: Column, rng: np.random.Generator, n: int) -> Part:
    """Draws n strings: letters and blanks, and an e acute (two bytes of UTF-8) at the head of one string in four."""
    assert column.span is not None
    sizes = rng.integers(*column.span, n, "i8")
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", "u1")
    flat = letters[rng.integers(0, letters.size, int(sizes.sum()))]
    heads = (np.cumsum(sizes) - sizes)[rng.random(n) < 0.25]
    flat[heads], flat[heads + 1] = 0xC3, 0xA9
    return flat, sizes


def encode(column: Column, rng: np.random.Generator, n: int, sums: Sums) -> Part:
    """Draws n values of a column, adds them to the sums and encodes them."""
    name, kind = column.name, column.kind
    if kind in ("string", "strings"):
        counts = rng.integers(column.counts[0], column.counts[1] + 1, n) if kind == "strings" else np.ones(n, "i8")
        flat, sizes = _draw_text(column, rng, int(counts.sum()))
        sums.add(name, flat, "u1")
        sums.add(f"{name}.size", sizes, "i8")
        part = weave([varints(sizes), (flat, sizes)])
        if kind == "string":
            return part
        sums.add(f"{name}.count", counts, "i8")
        return _array(part, counts)
    if kind == "sparse":
        counts = rng.integers(column.counts[0], column.counts[1] + 1, n)
        total = int(counts.sum())
        indices = rng.integers(*(column.span or (0, SPARSE_SIZE)), total)
        values = _draw(column, rng, total)
        sums.add(f"{name}.indices0", indices, "i8")
        sums.add(f"{name}.values", values, DTYPES[column.avro])
        sums.add(f"{name}.count", counts, "i8")
        return weave([_array(varints(indices), counts), _array(_primitive(column.avro, values), counts)])
    if kind in ("dense", "ragged"):
        counts = np.full(n, column.size) if kind == "dense" else rng.integers(column.counts[0], column.counts[1] + 1, n)
        values = _draw(column, rng, int(counts.sum()))
        sums.add(name, values, DTYPES[column.avro])
        if kind == "ragged":
            sums.add(f"{name}.count", counts, "i8")
        return _array(_primitive(column.avro, values), counts)
    values = _draw(column, rng, n)
    if not column.nullable:
        sums.add(name, values, DTYPES[column.avro])
        return _primitive(column.avro, values)
    valid = rng.random(n) >= 0.2
    sums.add(name, values[valid], DTYPES[column.avro])
    sums.add(f"{name}.valid", valid, "bool")
    flat, present = _primitive(column.avro, values[valid])
    sizes = np.zeros(n, "i8")
    sizes[valid] = present
    # Avro 1.12, "Complex Types: Unions": the branch's index, as a zigzag varint, then the value.
    return weave([varints(valid.astype("i8")), (flat, sizes)])


def schema(dataset: str) -> dict[str, Any]:
    """The Avro schema of a data set."""
    return {"type": "record", "name": f"bench_{dataset}", "fields": [c.schema for c in DATASETS[dataset]]}


def _header(dataset: str, codec: str, sync: bytes) -> bytes:
    meta = {"avro.schema": json.dumps(schema(dataset)).encode(), "avro.codec": codec.encode()}
    out = [b"Obj\x01", varints(np.array([len(meta)]))[0].tobytes()]
    for key, value in meta.items():
        for text in (key.encode(), value):
            out += [varints(np.array([len(text)]))[0].tobytes(), text]
    return b"".join([*out, b"\0", sync])


class _BlockWriter:
    """Cuts encoded records into blocks: a block ends with the record that fills it."""

    def __init__(self, file: Any, block_bytes: int, codec: str, sync: bytes) -> None:
        self._file, self._limit, self._squeeze, self._sync = file, block_bytes, CODECS[codec], sync
        self._held: list[bytes] = []
        self._bytes = self._rows = 0

    def write(self, part: Part) -> None:
        flat, sizes = part
        ends = np.cumsum(sizes)
        row = byte = 0
        while row < ends.size:
            # The first record that brings the block to its size, or the last that there is.
            full = int(np.searchsorted(ends, byte + self._limit - self._bytes))
            stop = min(full + 1, ends.size)
            end = int(ends[stop - 1])
            self._held.append(flat[byte:end].tobytes())
            self._rows += stop - row
            self._bytes += end - byte
            row, byte = stop, end
            if self._bytes >= self._limit:
                self.flush()

    def flush(self) -> None:
        if self._rows == 0:
            return
        data = self._squeeze(b"".join(self._held))
        self._file.write(varints(np.array([self._rows, len(data)]))[0].tobytes())
        self._file.write(data)
        self._file.write(self._sync)
        self._held, self._bytes, self._rows = [], 0, 0


def kept(
    path: Path, write: Callable[[Path], dict[str, Any]], log: Callable[[str], None] | None = None
) -> tuple[Path, dict[str, Any]]:
    """Writes a file, unless it is in the cache already. Returns its path, and what is known of it.

    Args:
        path: Where it is kept.
        write: Writes it to another path, and returns what is known of it besides its bytes.
        log: Called for each file that is really written.
    """
    note = path.with_suffix(".json")
    if not (path.exists() and note.exists()):
        CACHE.mkdir(parents=True, exist_ok=True)
        begun, partial = time.perf_counter(), path.with_suffix(f".{os.getpid()}.partial")
        try:
            known = write(partial) | {"bytes": partial.stat().st_size}
            # The note first: a file with its note is complete even if this program is stopped in between.
            note.write_text(json.dumps(known))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        if log is not None:
            log(f"wrote {path.name}: {known['bytes'] / 1e6:,.0f} MB in {time.perf_counter() - begun:.1f} s")
    page_in(path)
    return path, json.loads(note.read_text())


def generate(
    dataset: str,
    records: int,
    *,
    block_bytes: int = BLOCK_BYTES,
    codec: str = "null",
    seed: int = 1,
    log: Callable[[str], None] | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Writes a data set, unless it is in the cache already.

    Args:
        dataset: A key of `DATASETS`.
        records: How many records to write.
        block_bytes: Uncompressed size at which a block is closed.
        codec: A key of `CODECS`.
        seed: Another seed gives other values.
        log: Called for each file that is really written.

    Returns:
        The file's path, and what is known of it: rows, bytes, raw_bytes (uncompressed records), sums, and plain sums,
        which don't depend on the order.
    """

    def write(path: Path) -> dict[str, Any]:
        sync = np.random.default_rng([seed, 0xA5]).bytes(16)
        sums, raw = Sums(), 0
        with path.open("wb") as file:
            file.write(_header(dataset, codec, sync))
            blocks = _BlockWriter(file, block_bytes, codec, sync)
            for chunk, start in enumerate(range(0, records, CHUNK)):
                rng = np.random.default_rng([seed, ord(dataset), chunk])
                n = min(CHUNK, records - start)
                part = weave([encode(column, rng, n, sums) for column in DATASETS[dataset]])
                raw += part[0].size
                blocks.write(part)
            blocks.flush()
        return {"rows": records, "raw_bytes": raw, "sums": sums.result(), "plain": sums.plain()}

    return kept(CACHE / f"{dataset}-{records}-{block_bytes}-{codec}-s{seed}-v{VERSION}.avro", write, log)


def page_in(path: Path) -> None:
    """Has a file in the page cache as reading it once in sequence leaves it, however it came there before.

    It may be there in pages of 4 KB or in larger ones, depending on who wrote or read it first, and is copied from the
    former less than half as fast: without this, all that is measured would depend on what became of the file days ago.
    """
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            # Pages that aren't on the disk yet wouldn't be dropped.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_through(path)


def read_through(path: Path) -> None:
    """Reads a file once in sequence, which brings what isn't in the page cache back to it."""
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass
