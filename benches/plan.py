"""Cells of the comparison with their numbers of records, and the target speedups of fastpipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generate

# The fastest readers need about 0.1 to 0.5 seconds for these numbers of records.
RECORDS = {"a": 65_536, "b": 262_144, "c": 262_144, "d": 524_288, "e": 262_144, "f": 131_072}
CONTENTS = {
    "a": "6 scalars, 8 dense vectors (float32, float64, long), 5 sparse features of 10 to 50 entries",
    "b": "float32[128] and a label",
    "c": "ragged longs of 0 to 64 bits, 0 to 64 a record",
    "d": "20 scalars",
    "e": "20 nullable scalars, one in five null",
    "f": "three strings, a ragged array of strings, a label",
}
PART = 8
"""Divisor of the number of records in quick runs, and when the values of peers are checked."""
SHUFFLE_BUFFER = 10_000
"""Shuffle buffer size in rows. fastpipe rounds it up to whole batches."""
BLOCKS = {"1M": 1 << 20, "16K": 1 << 14}


@dataclass(frozen=True)
class Spec:
    """One cell: a dataset as it is stored, and the order in which it is read."""

    dataset: str
    codec: str = "null"
    block: str = "1M"
    shuffled: bool = False

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Parses a cell such as `a/null`, `a/null/16K`, or `a/null/shuffled`."""
        dataset, codec, *rest = text.split("/")
        block = next((part for part in rest if part in BLOCKS), "1M")
        if dataset not in RECORDS or codec not in generate.CODECS or set(rest) - {block, "shuffled"}:
            raise ValueError(f"not a cell: {text}")
        return cls(dataset, codec, block, "shuffled" in rest)

    def __str__(self) -> str:
        parts = [self.dataset, self.codec, *[self.block] * (self.block != "1M"), *["shuffled"] * self.shuffled]
        return "/".join(parts)

    def file(self, records: int, log: Callable[[str], None] | None = None) -> tuple[Path, dict[str, Any]]:
        """Returns the path and the metadata of a file of `records` records, and generates it if it is missing."""
        return generate.generate(self.dataset, records, block_bytes=BLOCKS[self.block], codec=self.codec, log=log)


GOALS: dict[str, tuple[float | None, float | None]] = {
    "a/null": (18, 4.5),
    "a/deflate": (8, 2.1),
    "b/null": (15, 5),
    "c/null": (18, 1.7),
    "d/null": (12, 1.5),
    "e/null": (None, 1.7),
    "f/null": (12, 1.5),
    "a/null/shuffled": (10, None),
    "b/null/shuffled": (10, None),
}
"""Cell -> target speedup over AvroTensorDataset, and over readers of data frames."""
CELLS = [*GOALS, "a/zstandard", "b/snappy", "c/null/16K", "f/deflate"]
# Usually the fastest reader of each peer.
QUICK_READERS = ["fastpipe", "atds", "fastavro", "polars", "polars-avro-batches", "jetliner-batches", "duckdb-batches"]
