"""The files that the examples of README.md and of docstrings read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fastavro
import numpy as np

# Six whole batches of 1,024 rows in all.
ROWS, FILES = 3_072, 2

_LONGS = {"type": "array", "items": "long"}
_FLOATS = {"type": "array", "items": "float"}
SCHEMA = {
    "type": "record",
    "name": "Impression",
    "fields": [
        {
            "name": "user",
            "type": {
                "type": "record",
                "name": "User",
                "fields": [{"name": "id", "type": "long"}, {"name": "age", "type": "int"}],
            },
        },
        {"name": "user_embedding", "type": _FLOATS},
        {"name": "history", "type": _LONGS},
        {"name": "clicked_items", "type": _LONGS},
        {
            "name": "sparse_terms",
            "type": {
                "type": "record",
                "name": "Terms",
                "fields": [{"name": "indices0", "type": _LONGS}, {"name": "values", "type": _FLOATS}],
            },
        },
        {"name": "age", "type": ["null", "int"]},
        {"name": "country", "type": ["null", "string"]},
        {"name": "label", "type": "float"},
    ],
}


def _record(random: np.random.Generator, row: int) -> dict[str, Any]:
    terms = random.integers(0, 4)
    return {
        "user": {"id": row, "age": int(random.integers(18, 90))},
        "user_embedding": random.random(64, dtype=np.float32).tolist(),
        "history": random.integers(0, 500, random.integers(0, 30)).tolist(),
        "clicked_items": random.integers(0, 500, random.integers(0, 5)).tolist(),
        "sparse_terms": {
            "indices0": np.sort(random.choice(100_000, terms, replace=False)).tolist(),
            "values": random.random(terms, dtype=np.float32).tolist(),
        },
        "age": None if row % 7 == 0 else int(random.integers(18, 90)),
        "country": None if row % 5 == 0 else ("NL", "PE", "JP")[row % 3],
        "label": float(row % 2),
    }


def write(folder: Path) -> None:
    """Writes `data/part-*.avro` into a folder."""
    random = np.random.default_rng(7)
    (folder / "data").mkdir()
    for number in range(FILES):
        rows = [_record(random, row) for row in range(number * ROWS, (number + 1) * ROWS)]
        with (folder / f"data/part-{number}.avro").open("wb") as file:
            fastavro.writer(file, SCHEMA, rows, codec="deflate", sync_interval=32_000)
