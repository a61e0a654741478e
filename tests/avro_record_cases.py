"""Reads Avro files with `make_avro_record_dataset` and `AvroRecordDataset`, of fastpipe or of tensorflow-io.

Run as a program, it prints the results of all cases as JSON. Its arguments are the module that has the functions, and
the folder of the files.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "features", "type": {"type": "array", "items": "int"}},
        {"name": "label", "type": ["int", "null"]},
        {"name": "dataType", "type": {"type": "enum", "name": "Kind", "symbols": ["TRAINING", "VALIDATION"]}},
        {"name": "flag", "type": "boolean"},
        {"name": "big", "type": "long"},
        {"name": "single", "type": "float"},
        {"name": "double", "type": "double"},
        {"name": "text", "type": ["null", "string"]},
        {"name": "raw", "type": "bytes"},
        {"name": "pair", "type": {"type": "array", "items": "float"}},
        {"name": "nested", "type": {"type": "array", "items": {"type": "array", "items": "string"}}},
        {
            "name": "user",
            "type": {"type": "record", "name": "User", "fields": [{"name": "age", "type": "int"}]},
        },
        {
            "name": "entries",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Entry",
                    "fields": [
                        {"name": "row", "type": "long"},
                        {"name": "column", "type": "long"},
                        {"name": "value", "type": "float"},
                    ],
                },
            },
        },
    ],
}


def row(i: int) -> dict[str, Any]:
    """Returns row `i` of the files."""
    return {
        "features": list(range(1 + i % 5)),
        "label": None if i % 3 == 0 else i,
        "dataType": ("TRAINING", "VALIDATION")[i % 2],
        "flag": i % 2 == 0,
        "big": i << 40,
        "single": i / 4,
        "double": i / 3,
        "text": None if i % 4 == 1 else f"text {i}",
        "raw": bytes([255, i]),
        "pair": [i, i + 0.5],
        "nested": [["w" * k for k in range(j)] for j in range(1 + i % 4)],
        "user": {"age": 20 + i},
        "entries": [{"row": (7 * j) % 5, "column": j, "value": i + j / 8} for j in range(1 + i % 4)],
    }


def reduced() -> dict[str, Any]:
    """Returns a reader schema with fewer fields, in another order."""
    fields = {field["name"]: field for field in SCHEMA["fields"]}
    return SCHEMA | {"fields": [fields["big"], fields["label"], fields["features"]]}


def cases(columnar: Any) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Returns features and arguments by name."""
    varlen, fixed = columnar.VarLenFeatureWithRank, tf.io.FixedLenFeature
    scalars = {
        "label": fixed(shape=[], dtype=tf.int32, default_value=-100),
        "dataType": fixed(shape=[], dtype=tf.string),
        "flag": fixed([], tf.bool),
        "big": fixed([], tf.int64),
        "single": fixed([], tf.float32),
        "double": fixed([], tf.float64),
        "text": fixed([], tf.string, default_value="none"),
        "raw": fixed([], tf.string),
        "user.age": fixed([], tf.int32),
    }
    flat = scalars | {"features[*]": varlen(dtype=tf.int32), "entries[*].value": varlen(tf.float32)}
    sparse = tf.io.SparseFeature(index_key=["row", "column"], value_key="value", dtype=tf.float32, size=[5, 9])
    every = flat | {"pair[*]": fixed([2], tf.float32), "nested[*][*]": varlen(tf.string, 2), "entries": sparse}
    options: dict[str, dict[str, Any]] = {
        "once": {"num_epochs": 1, "batch_size": 3},
        "dropped": {"num_epochs": 1, "batch_size": 3, "drop_final_batch": True},
        "epochs": {"num_epochs": 3, "batch_size": 7, "num_parallel_reads": 1},
        "epochs, dropped": {"num_epochs": 3, "batch_size": 7, "drop_final_batch": True},
        "small": {"num_epochs": 4, "batch_size": 50, "prefetch_buffer_size": 0},
        "endless": {"batch_size": 7},
        "one batch": {"num_epochs": 1, "batch_size": 100},
    }
    found = {}
    for kind, features in {"scalars": scalars, "flat": flat, "every": every}.items():
        found |= {f"{kind}: {name}": (features, {"shuffle": False} | option) for name, option in options.items()}
    some = {name: scalars[name] for name in ("big", "label")}
    return found | {"scalars: reader schema": (some, {"shuffle": False, "num_epochs": 1, "batch_size": 5})}


def shown(value: Any) -> Any:
    """Returns a tensor as JSON, with its dtype and shape."""
    if isinstance(value, tf.SparseTensor):
        return [shown(value.indices), shown(value.values), value.dense_shape.numpy().tolist()]
    items = value.numpy().ravel().tolist()
    return [value.dtype.name, value.shape.as_list(), [x.hex() if isinstance(x, bytes) else x for x in items]]


def spec(value: Any) -> Any:
    return [type(value).__name__, value.dtype.name, value.shape.as_list()]


def batches_of(columnar: Any, folder: Path, name: str) -> Any:
    """Returns the spec and the first elements of a case."""
    features, options = cases(columnar)[name]
    dataset = columnar.make_avro_record_dataset(
        file_pattern=[str(folder / "*.avro")],
        features=features,
        reader_schema=json.dumps(reduced() if "reader schema" in name else SCHEMA),
        **options,
    )
    batches = [{key: shown(batch[key]) for key in sorted(batch)} for batch in dataset.take(9)]
    return [{key: spec(value) for key, value in sorted(dataset.element_spec.items())}, batches]


def records_of(columnar: Any, folder: Path, reads: int | None) -> Any:
    """Returns all encoded records, and batches that are parsed from them."""
    paths = tf.data.Dataset.from_tensor_slices(sorted(map(str, folder.glob("*.avro"))))
    schema = json.dumps(SCHEMA)
    records = columnar.AvroRecordDataset(paths, num_parallel_reads=reads, reader_schema=schema)
    features = cases(columnar)["scalars: once"][0]
    parsed = records.batch(4).map(lambda batch: columnar.parse_avro(batch, reader_schema=schema, features=features))
    batches = [{key: shown(batch[key]) for key in sorted(batch)} for batch in parsed]
    return [[record.hex() for record in records.as_numpy_iterator()], batches]


def results(columnar: Any, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yields the name and the result of each case.

    Arrays come last. tensorflow-io often aborts the process if a batch with arrays is small.
    """
    for reads in (None, 1, 2):
        yield f"records {reads}", records_of(columnar, folder, reads)
    for name in [*filter(re.compile("scalars").match, cases(columnar)), "flat: one batch"]:
        yield name, batches_of(columnar, folder, name)


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    for result in results(module.experimental.columnar, Path(sys.argv[2])):
        print(json.dumps(result), flush=True)
