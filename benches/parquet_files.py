"""Generates seeded Parquet files for `parquet.py` with pyarrow's defaults (Snappy compression, dictionary encoding).

Each file has a JSON file with the number of rows and a checksum of every column, computed before writing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import generate

VERSION = 2
"""Version in the names of cached files. Increase it if the same arguments produce different values."""
KINDS = ("int32", "float32", "int64", "float64", "uint8")
LEAVES: dict[str, dict[str, str]] = {
    "scalars": {f"c{i}": KINDS[i % 5] for i in range(20)},
    # float32[128] and a label.
    "vectors": {"x": "float32", "label": "int8"},
    # Two strings, a ragged array of 0 to 16 longs, a label.
    "texts": {"title": "uint8", "query": "uint8", "clicks": "int64", "label": "int8"},
    # Strings that repeat, so that pages refer to a dictionary.
    "words": {"country": "uint8", "city": "uint8", "query": "uint8", "title": "uint8"},
}
"""Table -> column -> dtype of its values. The values of a string column are bytes."""


DISTINCT = {"country": 200, "city": 5_000, "query": 1_000, "title": 10_000}
"""Column of "words" -> number of different strings."""


def _columns(table: str, rows: int, rng: np.random.Generator, sums: generate.Sums) -> dict[str, Any]:
    import pyarrow as pa

    def summed(name: str, values: Any) -> Any:
        sums.add(name, values, LEAVES[table][name])
        return values

    def ends(counts: Any) -> Any:
        return np.concatenate(([0], np.cumsum(counts))).astype("i4")

    def text(name: str, least: int, most: int) -> Any:
        counts = rng.integers(least, most, rows)
        letters = rng.integers(ord("a"), ord("z") + 1, int(counts.sum()), "u1")
        buffers = [None, pa.py_buffer(ends(counts)), pa.py_buffer(summed(name, letters))]
        return pa.Array.from_buffers(pa.string(), rows, buffers)

    if table == "scalars":
        # Integers repeat, like real identifiers and counts. Floats fit float32 because datasets casts float64 to it.
        drawn = {
            name: rng.random(rows, "float32").astype(kind)
            if "float" in kind
            else rng.integers(0, 200, rows).astype(kind)
            for name, kind in LEAVES[table].items()
        }
        return {name: pa.array(summed(name, values)) for name, values in drawn.items()}
    if table == "words":
        found = {}
        for name, count in DISTINCT.items():
            strings = pa.array(["".join(map(chr, rng.integers(97, 123, rng.integers(4, 20)))) for _ in range(count)])
            found[name] = strings.take(pa.array(rng.integers(0, count, rows)))
            summed(name, np.frombuffer(found[name].buffers()[2], "u1"))
        return found
    label = pa.array(summed("label", rng.integers(0, 2, rows, "int8")))
    if table == "vectors":
        x = summed("x", rng.random(rows * 128, "float32"))
        return {"x": pa.FixedSizeListArray.from_arrays(pa.array(x), 128), "label": label}
    counts = rng.integers(0, 17, rows)
    clicks = summed("clicks", rng.integers(0, 1 << 40, int(counts.sum())))
    lists = pa.ListArray.from_arrays(pa.array(ends(counts)), pa.array(clicks))
    return {"title": text("title", 8, 40), "query": text("query", 2, 20), "clicks": lists, "label": label}


def write(table: str, rows: int, row_group: int) -> tuple[Path, dict[str, Any]]:
    """Writes a table unless it is cached.

    Args:
        table: Key of `LEAVES`.
        rows: Number of rows.
        row_group: Rows per row group.

    Returns:
        The file's path and its metadata: `rows`, `bytes`, `sums`, and `plain` (sums that don't depend on the order).
    """

    def to(path: Path) -> dict[str, Any]:
        import pyarrow as pa
        import pyarrow.parquet

        sums = generate.Sums()
        columns = _columns(table, rows, np.random.default_rng([1, rows]), sums)
        pa.parquet.write_table(pa.table(columns), path, row_group_size=row_group)
        return {"rows": rows, "sums": sums.result(), "plain": sums.plain()}

    return generate.kept(generate.CACHE / f"{table}-{rows}-{row_group}-v{VERSION}.parquet", to)
