"""Runs random cases with one of two implementations of ATDSDataset, each in a separate interpreter.

    python atds_cases.py MODULES CASES RESULTS

MODULES are the modules of the dataset and of its features, separated by a comma. Only TensorFlow and its dependencies
are imported here, because the other environment has nothing else.
"""

from __future__ import annotations

import importlib
import json
import sys


def run(case: dict, dataset: object, features: object) -> dict:
    """Returns the result of a case: specs, batches, and the class and message of the error that ended it.

    Args:
        case: `files`, `features` (kind, shape and dtype by name) and further arguments of the dataset.
        dataset: The module with ATDSDataset.
        features: The module with DenseFeature and the other feature classes.
    """
    import tensorflow as tf

    found: dict = {"batches": [], "error": None, "message": ""}
    try:
        wanted = {
            name: getattr(features, kind)(shape, getattr(tf, dtype))
            for name, (kind, shape, dtype) in case["features"].items()
        }
        batches = dataset.ATDSDataset(case["files"], features=wanted, **case["options"])
        found["spec"] = {
            name: [type(spec).__name__, spec.shape.as_list(), spec.dtype.name]
            for name, spec in batches.element_spec.items()
        }
        found["keys"] = list(batches.element_spec)
        for batch in batches:
            found["batches"].append({name: _parts(value, tf) for name, value in batch.items()})
    except Exception as error:
        found["error"], found["message"] = type(error).__name__, getattr(error, "message", str(error))
    return found


def _parts(value: object, tf: object) -> list:
    tensors = [value.indices, value.values, value.dense_shape] if isinstance(value, tf.SparseTensor) else [value]
    return [_part(tensor.numpy()) for tensor in tensors]


def _part(array: object) -> list:
    items = array.reshape(-1).tolist()
    if array.dtype == object:
        items = [item.decode("latin-1") for item in items]
    return [array.dtype.name, list(array.shape), items]


def main(modules: str, cases: str, results: str) -> None:
    """Runs the cases of a file, one line of JSON each, and writes a line with the result of each."""
    dataset, features = map(importlib.import_module, modules.split(","))
    with open(cases) as source, open(results, "w") as target:
        for line in source:
            print(json.dumps(run(json.loads(line), dataset, features)), file=target, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
