"""Generates Avro files for the comparisons.

This module encodes Avro with NumPy, a few thousand records at a time. Writing a gigabyte record by record would take
longer than all measurements together. A *part* of the records is a pair `(flat, sizes)`: the bytes of that part of all
records, concatenated, and the number of bytes per record. `weave` interleaves parts and thereby turns columns into
records: an array is a count, items, and a zero; a union is an index and a value.

A file depends on the dataset, the number of records, the block size, the codec, and the seed. Files are cached under
`benches/.cache`, each with a JSON file that contains the number of rows and a checksum of every column. The checksums
are computed *before* encoding, and each reader must arrive at the same ones. This tests the writer and the readers.
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
"""Version in the names of cached files. Increase it if the same arguments produce different bytes."""
CHUNK = 4096
"""Number of records drawn and encoded at a time. It affects the random values, so it isn't an option."""
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
"""Codec name in the file header -> function that compresses a block."""

Part = tuple[np.ndarray, np.ndarray]
"""The concatenated bytes of one part of all records (uint8), and the number of bytes per record (int64)."""


@dataclass(frozen=True)
class Column:
    """One field of the generated record.

    Attributes:
        name: The field's name.
        kind: "scalar", "dense", "ragged", "sparse", "string", or "strings" (an array of strings).
        avro: Avro primitive type of the value or of the items.
        size: Number of items in a dense array.
        counts: Minimum and maximum number of items (ragged, sparse, strings).
        span: Half-open range of the integers, or of the byte lengths of strings. None draws all bit lengths evenly.
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
    """Checksums of columns that are added batch by batch.

    A checksum is the sum of the values' bit patterns, each weighted by its position in the column, modulo 2**64. It is
    exact for floats, independent of the batch size, and different if values change places.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}

    def add(self, leaf: str, values: np.ndarray, dtype: str) -> None:
        """Adds the next values of a column.

        Args:
            leaf: Name of the column.
            values: Values of any shape, in row order.
            dtype: Dtype that the values are converted to if the reader returns another one.
        """
        flat = np.ascontiguousarray(values, dtype).reshape(-1)
        entry = self._sums.setdefault(leaf, [0, 0, 0])
        bits = flat.view(f"u{flat.itemsize}").astype("u8")
        weights = np.arange(entry[0], entry[0] + flat.size, dtype="u8") * np.uint64(2) + np.uint64(1)
        entry[0] += flat.size
        entry[1] = (entry[1] + int((bits * weights).sum(dtype="u8"))) % 2**64
        entry[2] = (entry[2] + int(bits.sum(dtype="u8"))) % 2**64

    def result(self) -> dict[str, list[Any]]:
        """Returns the number of values and the checksum of each column. Checksums are hexadecimal to fit into JSON."""
        return {leaf: [count, f"{total:016x}"] for leaf, (count, total, _) in self._sums.items()}

    def plain(self) -> dict[str, list[Any]]:
        """Returns the same with unweighted sums, which don't depend on the order of rows."""
        return {leaf: [count, f"{total:016x}"] for leaf, (count, _, total) in self._sums.items()}


def varints(values: np.ndarray) -> Part:
    """Encodes int64 values as zigzag varints (Avro 1.12, "Primitive Types: int, long")."""
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
        # All bytes of a record's part move by the same distance.
        shift = starts - (np.cumsum(part) - part)
        out[np.repeat(shift, part) + np.arange(flat.size)] = flat
        starts = starts + part
    return out, sizes


def _grouped(part: Part, counts: np.ndarray) -> Part:
    """Converts a part with one entry per item into a part with one entry per record."""
    flat, sizes = part
    ends = np.concatenate(([0], np.cumsum(sizes)))
    last = np.cumsum(counts)
    return flat, ends[last] - ends[last - counts]


def _array(items: Part, counts: np.ndarray) -> Part:
    # Avro 1.12, "Complex Types: Arrays": one block of items, then an empty block. An empty array is only the empty
    # block, which the count 0 already encodes.
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
    """Draws n strings of letters and spaces. One string in four begins with "é", which has two bytes in UTF-8."""
    assert column.span is not None
    sizes = rng.integers(*column.span, n, "i8")
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", "u1")
    flat = letters[rng.integers(0, letters.size, int(sizes.sum()))]
    heads = (np.cumsum(sizes) - sizes)[rng.random(n) < 0.25]
    flat[heads], flat[heads + 1] = 0xC3, 0xA9
    return flat, sizes


def encode(column: Column, rng: np.random.Generator, n: int, sums: Sums) -> Part:
    """Draws n values of a column, adds them to the sums, and encodes them."""
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
    """Returns the Avro schema of a dataset."""
    return {"type": "record", "name": f"bench_{dataset}", "fields": [c.schema for c in DATASETS[dataset]]}


def _header(dataset: str, codec: str, sync: bytes) -> bytes:
    meta = {"avro.schema": json.dumps(schema(dataset)).encode(), "avro.codec": codec.encode()}
    out = [b"Obj\x01", varints(np.array([len(meta)]))[0].tobytes()]
    for key, value in meta.items():
        for text in (key.encode(), value):
            out += [varints(np.array([len(text)]))[0].tobytes(), text]
    return b"".join([*out, b"\0", sync])


class _BlockWriter:
    """Splits encoded records into blocks. A block ends with the record that reaches the block size."""

    def __init__(self, file: Any, block_bytes: int, codec: str, sync: bytes) -> None:
        self._file, self._limit, self._squeeze, self._sync = file, block_bytes, CODECS[codec], sync
        self._held: list[bytes] = []
        self._bytes = self._rows = 0

    def write(self, part: Part) -> None:
        flat, sizes = part
        ends = np.cumsum(sizes)
        row = byte = 0
        while row < ends.size:
            # The record that completes the block, or the last record.
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
    """Writes a file unless it is cached. Returns its path and its metadata.

    Args:
        path: Path of the cached file.
        write: Function that writes the file to a given path and returns its metadata except for `bytes`.
        log: Function that is called with a message for each file that is written.
    """
    note = path.with_suffix(".json")
    if not (path.exists() and note.exists()):
        CACHE.mkdir(parents=True, exist_ok=True)
        begun, partial = time.perf_counter(), path.with_suffix(f".{os.getpid()}.partial")
        try:
            known = write(partial) | {"bytes": partial.stat().st_size}
            # Write the metadata first: if the process is killed in between, no file exists without metadata.
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
    """Writes a dataset unless it is cached.

    Args:
        dataset: Key of `DATASETS`.
        records: Number of records.
        block_bytes: Uncompressed size at which a block ends.
        codec: Key of `CODECS`.
        seed: Seed of the random values.
        log: Function that is called with a message for each file that is written.

    Returns:
        The file's path and its metadata: `rows`, `bytes`, `raw_bytes` (uncompressed size of the records), `sums`, and
        `plain` (sums that don't depend on the order of rows).
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


def rows_of(path: str | Path) -> int:
    """Returns the number of rows of a generated file."""
    return int(json.loads(Path(path).with_suffix(".json").read_text())["rows"])


def page_in(path: Path) -> None:
    """Reloads a file into the page cache by a sequential read, so that its cached pages are always the same size.

    The page cache stores a file in pages of 4 KB or in larger ones, depending on the process that first wrote or read
    it. Copies from 4 KB pages are less than half as fast. Without this step, results would depend on past accesses.
    """
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            # The kernel drops only pages that are already on disk.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_through(path)


def read_through(path: Path) -> None:
    """Reads a file once sequentially, which loads it into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass
