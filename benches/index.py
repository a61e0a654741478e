"""Measures how much time the block index cache saves when fastpipe opens a file of a million tiny blocks.

Opening with and without the cache takes turns in one process, with the file in the page cache. Only opening is timed:
reading the header, finding the blocks, and compiling the features.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

import fastpipe
from harness import Bench, take_turns

SYNC = bytes(range(16))


def write(path: Path, blocks: int) -> None:
    """Writes a file with one int per block. A block is a header of two bytes, one byte of data, and the marker."""
    metadata = b"".join(
        bytes([2 * len(key)]) + key + bytes([2 * len(value)]) + value
        for key, value in ((b"avro.schema", b'"int"'), (b"avro.codec", b"null"))
    )
    body = np.tile(np.frombuffer(b"\x02\x02\x00" + SYNC, np.uint8), (blocks, 1))
    body[:, 2] = np.arange(blocks) % 64 * 2
    path.write_bytes(b"Obj\x01\x04" + metadata + b"\x00" + SYNC + body.tobytes())
    # fastpipe keeps no index of a file that was modified just now.
    os.utime(path, (1e9, 1e9))


def opened(path: Path, cache: Path | None, rows: int) -> float:
    """Opens the file. Returns the seconds that this takes."""
    features = {"value": fastpipe.DenseSpec((), "int32")}
    start = time.perf_counter()
    reader = fastpipe.read_avro(path, features=features, batch_size=1024, index_cache=cache)
    seconds = time.perf_counter() - start
    assert reader.num_rows == rows
    return seconds


def main(bench: Bench) -> None:
    """Generates the file and measures how long opening it takes."""
    with tempfile.TemporaryDirectory() as folder:
        path, cache, blocks = Path(folder, "blocks.avro"), Path(folder, "cache"), bench.args.blocks
        write(path, blocks)
        first = opened(path, cache, blocks)
        ways = {"without": lambda: opened(path, None, blocks), "with": lambda: opened(path, cache, blocks)}
        turns = take_turns(ways, bench.rounds, warm=0)
        (entry,) = cache.iterdir()
        columns = ("bytes of the file|", "of its index|", "first opening, which writes it, ms|,.1f")
        row = bench.table("blocks", *columns, "without a cache, ms|,.1f", "with it|,.1f", "times as fast (rounds)|")
        each = [turns.median(name, "result") * 1e3 for name in ways]
        sizes = path.stat().st_size, entry.stat().st_size
        row(f"{blocks:,}", *sizes, first * 1e3, *each, turns.ratio("without", "with", "result"))


if __name__ == "__main__":
    Bench("index", __doc__, rounds=(9, 3), blocks=(1_000_000, 100_000)).run(main)
