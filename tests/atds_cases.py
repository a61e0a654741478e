"""Random cases for two implementations of ATDSDataset, run by each in an interpreter of its own.

    python atds_cases.py MODULES CASES RESULTS

MODULES are the modules of the dataset and of its features, with a comma between. TensorFlow and what comes with it is
all that is imported here, as the other environment has nothing else.
"""

from __future__ import annotations

import importlib
import json
import sys


def run(case: dict, dataset: object, features: object) -> dict:
    """What comes of a case: specs, batches, and the class and the message of the error that ended it.

    Args:
        case: of `files`, `features` (kind, shape and dtype by name) and further arguments of the dataset.
        dataset: the module with ATDSDataset.
        features: the module with DenseFeature and the others.
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
    """Runs cases from a file, each a line of JSON, and writes a line for each."""
    dataset, features = map(importlib.import_module, modules.split(","))
    with open(cases) as source, open(results, "w") as target:
        for line in source:
            print(json.dumps(run(json.loads(line), dataset, features)), file=target, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
