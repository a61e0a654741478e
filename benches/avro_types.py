"""Measures what logical types and resolved schemas cost.

The same bytes are read with and without them, in turn, in one process. Each row is a pair of readers over one file. The
figure is how much longer the first takes than the second, by CPU time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import numpy as np

import fastpipe
from harness import Bench, take_turns
from harness.data import drain

MOST = 1.05


def _schema(*fields: tuple[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in fields]}


def _timestamp(unit: str) -> dict[str, Any]:
    return {"type": "long", "logicalType": f"timestamp-{unit}"}


def _times(rows: int) -> tuple[Any, list[dict[str, Any]]]:
    raw = _schema(*((f"t{i}", ["null", _timestamp("micros")] if i % 2 else _timestamp("millis")) for i in range(10)))
    numbers = np.random.default_rng(1).integers(1_600_000_000_000, 1_800_000_000_000, (rows, 10)).tolist()
    return raw, [{f"t{i}": row[i] for i in range(10)} for row in numbers]


def _decimals(rows: int) -> tuple[Any, list[dict[str, Any]]]:
    kind = {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2}
    numbers = np.random.default_rng(2).integers(-(10**12), 10**12, (rows, 10)).tolist()
    return _schema(*((f"d{i}", kind) for i in range(10))), [
        {f"d{i}": Decimal(row[i]).scaleb(-2) for i in range(10)} for row in numbers
    ]


def _mixed(rows: int) -> tuple[Any, list[dict[str, Any]]]:
    random = np.random.default_rng(3)
    fields = [(f"x{i}", ("int", "float", "double", ["null", "long"], "string")[i % 5]) for i in range(15)]
    numbers = random.integers(0, 10**6, (rows, 15)).tolist()
    make: list[Callable[[int], Any]] = [int, float, float, lambda n: n if n % 3 else None, str]
    records = [{f"x{i}": make[i % 5](row[i]) for i in range(15)} for row in numbers]
    return _schema(*fields), records


def _evolved(schema: Any) -> Any:
    """In another order, under other names, promoted where that costs nothing more."""
    fields = []
    for field in reversed(schema["fields"]):
        name = field["name"]
        fields.append({"name": f"new_{name}", "aliases": [name], "type": field["type"]})
    return {**schema, "fields": fields}


def _promoted(schema: Any) -> Any:
    kinds = {"int": "long", "float": "double"}
    fields = [
        {**field, "type": kinds.get(field["type"], field["type"]) if isinstance(field["type"], str) else field["type"]}
        for field in schema["fields"]
    ]
    return {**schema, "fields": fields}


def _features(path: str, **types: str) -> fastpipe.Features:
    """Returns the inferred features, with other dtypes."""
    found = fastpipe.infer_features(path)
    for name, spec in found.items():
        if spec.dtype in types:
            found[name] = fastpipe.DenseSpec(spec.shape, types[spec.dtype], nulls=spec.nulls)
    return found


def pairs(bench: Bench, folder: str) -> Any:
    """Yields the name of each pair, and its readers."""
    for name, make in (("times", _times), ("decimals", _decimals), ("mixed", _mixed)):
        path = str(Path(folder) / f"{name}.avro")
        schema, records = make(bench.args.rows)
        with open(path, "wb") as file:
            fastavro.writer(file, schema, records, sync_interval=64_000)
        for shuffle in (False, True):
            read = partial(fastpipe.read_avro, path, batch_size=1024, num_threads=1, shuffle=shuffle, seed=1)
            how = "shuffled" if shuffle else "in sequence"
            if name == "mixed":
                yield f"renamed and reordered, {how}", read(reader_schema=_evolved(schema)), read()
                plain = read(features=_features(path, int32="int64", float32="float64"))
                yield f"promoted, {how}", read(reader_schema=_promoted(schema)), plain
            else:
                yield f"{name}, {how}", read(), read(logical_types=False)


def main(bench: Bench) -> None:
    """Measures all pairs."""
    row = bench.table("read", "times as long by CPU time (rounds)|", "allowed|g", "met")
    with tempfile.TemporaryDirectory() as folder:
        for name, first, second in pairs(bench, folder):
            ways = {"first": partial(drain, first), "second": partial(drain, second)}
            ratio = take_turns(ways, bench.rounds).ratio("first", "second", "cpu")
            row(name, ratio, MOST, bench.target(name, ratio.median, most=MOST))


if __name__ == "__main__":
    Bench("avro_types", __doc__, rounds=(15, 3), rows=(200_000, 10_000)).run(main)
