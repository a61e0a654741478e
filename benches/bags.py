"""Compares two ways to turn bags into indices: while fastpipe decodes them, and by a lookup of decoded strings.

A bag is an array of records with a name, a term, and a value. fastpipe reads it with `VocabularySpec` or `HashSpec`.
The alternatives read names, terms, and values as Arrow strings with `read_avro`, join names and terms in Arrow, and
look up the resulting keys:

* pandas: `Index.get_indexer`, with an index that is built once.
* NumPy: `np.searchsorted` in fixed-width keys that are sorted once.
* Arrow: `index_in`. It builds its table in every call, so it is called once for the whole file.
* strings: Only reads, without a lookup.

All lookups drop unknown keys and must arrive at the same sums of indices and values. The readers take turns with one
thread each. Figures are nanoseconds per entry.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

import fastpipe
from harness import Bench, take_turns

NAMES = 200
_FIELDS = [{"name": name, "type": kind} for name, kind in (("name", "string"), ("term", "string"), ("value", "float"))]
_BAG = {"type": "array", "items": {"type": "record", "name": "NTV", "fields": _FIELDS}}
SCHEMA = {"type": "record", "name": "R", "fields": [{"name": "features", "type": _BAG}]}
Sums = tuple[int, float]


def pair(number: int) -> tuple[str, str]:
    """Returns the name and the term of key `number`."""
    return f"feature_{number % NAMES}", f"term_{number // NAMES}"


def write(path: Path, keys: int, rows: int, entries: int) -> None:
    """Writes a file of bags. One key in ten is unknown."""
    rng = np.random.default_rng(keys)
    drawn = rng.integers(0, keys + keys // 9, (rows, entries)).tolist()

    def row(numbers: list[int]) -> Any:
        pairs = (pair(number) for number in numbers)
        return {"features": [{"name": name, "term": term, "value": 0.5} for name, term in pairs]}

    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(SCHEMA), map(row, drawn), sync_interval=1 << 20)


passes = partial(fastpipe.read_avro, num_threads=1)


def by_lookup(path: Path, spec: Any, batch_size: int) -> Sums:
    """Reads bags directly as indices. Returns the sums of the indices and the values."""
    indices, values = 0, 0.0
    for batch in passes(path, features={"features": spec}, batch_size=batch_size):
        sparse = batch["features"]
        indices += int(sparse.indices[:, 1].sum())
        values += float(sparse.values.sum())
    return indices, values


TEXT = {
    "names": fastpipe.RaggedSpec((None,), "string", field="features.name"),
    "terms": fastpipe.RaggedSpec((None,), "string", field="features.term"),
    "values": fastpipe.RaggedSpec((None,), "float32", field="features.value"),
}


def by_strings(path: Path, find: Callable[[Any], Any] | None, batch_size: int) -> Sums:
    """Reads bags as strings, and looks up their keys with `find`, which returns -1 for unknown keys."""
    separator = pa.scalar("\x01", pa.large_string())
    indices, values = 0, 0.0
    for batch in passes(path, features=TEXT, batch_size=batch_size):
        if find is None:
            values += float(batch["values"].values.sum())
            continue
        names, terms = (batch[name].values.to_arrow() for name in ("names", "terms"))
        found = find(pc.binary_join_element_wise(names, terms, separator))
        known = found >= 0
        rows = np.repeat(np.arange(len(batch["values"])), np.diff(batch["values"].offsets))
        kept = np.stack([rows[known], found[known]], axis=1)
        indices += int(kept[:, 1].sum())
        values += float(batch["values"].values[known].sum())
    return indices, values


def fixed(keys: Any, width: int) -> Any:
    """Converts an Arrow array of strings to a NumPy array of fixed-width bytes."""
    offsets = np.frombuffer(keys.buffers()[1], np.int64)[keys.offset : keys.offset + len(keys) + 1]
    text = np.frombuffer(keys.buffers()[2], np.uint8)
    lengths = np.minimum(np.diff(offsets), width)
    out = np.zeros((len(keys), width), np.uint8)
    rows = np.repeat(np.arange(len(keys)), lengths)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out[rows, places] = text[np.repeat(offsets[:-1], lengths) + places]
    return out.reshape(-1).view(f"S{width}")


def finders(keys: list[str]) -> dict[str, Callable[[Any], Any]]:
    """Returns the lookup functions by library. Their indexes are already built."""
    table = pa.array(keys, pa.large_string())
    width = max(map(len, keys)) + 8
    in_order = fixed(table, width)
    order = np.argsort(in_order)
    ordered = in_order[order]

    def numpy(found: Any) -> Any:
        wanted = fixed(found, width)
        places = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        return np.where(ordered[places] == wanted, order[places], -1)

    def arrow(found: Any) -> Any:
        return pc.fill_null(pc.index_in(found, value_set=table), -1).to_numpy()

    index = pd.Index(np.array(keys, object))
    index.get_indexer(["a"])  # Builds the hash table of the index.
    return {
        "numpy": numpy,
        "arrow": arrow,
        "pandas": lambda found: index.get_indexer(found.to_numpy(zero_copy_only=False)),
    }


def compare(bench: Bench, number: int) -> None:
    """Measures a vocabulary of `number` keys."""
    args = bench.args
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bags.avro"
        write(path, number, args.rows, args.entries)
        keys = ["\x01".join(pair(i)) for i in range(number)]
        spec = fastpipe.VocabularySpec(keys, on_unknown="drop")
        print(f"\n{spec.vocabulary.nbytes / number:.0f} bytes a key")
        size = args.batch_size
        sides: dict[str, Callable[[], Sums]] = {
            "vocabulary": partial(by_lookup, path, spec, size),
            "hash": partial(by_lookup, path, fastpipe.HashSpec(1 << 20), size),
            "strings": partial(by_strings, path, None, size),
        }
        for name, find in finders(keys).items():
            # Arrow builds a table in each call, so it gets the whole file as one batch.
            sides[name] = partial(by_strings, path, find, args.rows if name == "arrow" else size)
        turns = take_turns(sides, bench.rounds)
        sums = {name: turns.turns[name][0].result for name in sides}
        known = {sums[name] for name in sides if name not in ("hash", "strings")}
        assert len(known) == 1, f"they disagree: {sums}"
        columns = ("ns an entry|,.1f", "times as long|,.1f", "CPU ns an entry|,.1f", "times as long|,.1f")
        row = bench.table("", *columns, title=f"{number:,} keys, bags of {args.entries} entries")
        for name in sides:
            cells: list[float] = []
            for figure in ("seconds", "cpu"):
                each = turns.median(name, figure) / (args.rows * args.entries) * 1e9
                cells += [each, turns.ratio(name, "vocabulary", figure).median]
            row(name, *cells)


def main(bench: Bench) -> None:
    """Measures all vocabulary sizes."""
    for number in bench.args.keys:
        compare(bench, number)


if __name__ == "__main__":
    sizes: dict[str, Any] = {"rows": (10_000, 1_000), "entries": 50, "batch_size": 1024}
    keys = ([10_000, 1_000_000], [1_000])
    Bench("bags", __doc__, packages=("numpy", "pyarrow", "pandas"), keys=keys, **sizes).run(main)
