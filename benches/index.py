"""Measures what the block index cache saves: opening a file of very many tiny blocks with it and without it.

The two take turns in one process, A B A B; the file is in the page cache. Opening is all that is timed: reading the
header, finding the blocks, compiling the features. The ratio is the median of the ratios within the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import fastpipe

SYNC = bytes(range(16))
LONG_AGO = 1_600_000_000
"""When the file was modified, so that its index is kept at once."""


def write(path: Path, blocks: int) -> None:
    """A file of ints, one a block: a header of two bytes, a byte of data, the marker."""
    metadata = b"".join(
        bytes([2 * len(key)]) + key + bytes([2 * len(value)]) + value
        for key, value in ((b"avro.schema", b'"int"'), (b"avro.codec", b"null"))
    )
    body = np.tile(np.frombuffer(b"\x02\x02\x00" + SYNC, np.uint8), (blocks, 1))
    body[:, 2] = np.arange(blocks) % 64 * 2
    path.write_bytes(b"Obj\x01\x04" + metadata + b"\x00" + SYNC + body.tobytes())


def opened(path: Path, cache: Path | None, rows: int) -> float:
    """Seconds that opening takes."""
    features = {"value": fastpipe.DenseSpec((), "int32")}
    start = time.perf_counter()
    reader = fastpipe.read_avro(path, features=features, batch_size=1024, index_cache=cache)
    seconds = time.perf_counter() - start
    assert reader.num_rows == rows
    return seconds


def main() -> None:
    """Generates the file, takes turns, prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder, "blocks.avro"), Path(folder, "cache")
        write(path, arguments.blocks)
        os.utime(path, (LONG_AGO, LONG_AGO))
        first = opened(path, cache, arguments.blocks)
        turns = [
            (opened(path, None, arguments.blocks), opened(path, cache, arguments.blocks))
            for _ in range(arguments.turns)
        ]
        (entry,) = cache.iterdir()
        without, with_ = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
        ratios = [a / b for a, b in turns]
        sizes = f"{path.stat().st_size:,} bytes, an index of {entry.stat().st_size:,}"
        print(f"{arguments.blocks:,} blocks, a file of {sizes}")
        print(f"the first opening, which writes the index:  {first * 1000:8.1f} ms")
        print(f"without a cache, median of {arguments.turns} turns:         {without * 1000:8.1f} ms")
        print(f"with it, in turn:                           {with_ * 1000:8.1f} ms")
        print(f"ratio: {statistics.median(ratios):.1f} (turns: {min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
