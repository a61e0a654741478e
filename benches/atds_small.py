"""Compares `ATDSDataset` with tensorflow-io's on little data: the 46 shapes of tensorflow-io's own benchmarks.

Each has 1,024 records and batches of 128. A round builds the dataset and iterates over it, in one process of each, in
turn; an iteration is timed to its last batch, since after that tf.data waits for a timer.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import Bench, Turns, take_turns
from peers.environments import interpreter

RECORDS, BATCH_SIZE = 1024, 128
OURS = "fastpipe.tf.atds,fastpipe.tf.atds"
THEIRS = "tensorflow_io.python.experimental.atds.dataset,tensorflow_io.python.experimental.atds.features"
AVRO = {"int32": "int", "int64": "long", "float32": "float", "float64": "double", "string": "string", "bool": "boolean"}


def cases() -> list[dict[str, Any]]:
    """Name, features (kind, shape and dtype by name), codec and shuffling of each benchmark."""
    found: list[dict[str, Any]] = []
    for kind, shapes in (("Dense", [[], [128], [64, 64]]), ("Sparse", [[128], [64, 64]]), ("Varlen", [[-1]])):
        for shape in shapes:
            for dtype in AVRO:
                name = f"{kind.lower()} {dtype} {len(shape)}d"
                found.append({"name": name, "features": {"x": [f"{kind}Feature", shape, dtype]}})
    mixed = {
        "label": ["DenseFeature", [], "int32"],
        "ids": ["SparseFeature", [50000], "int32"],
        "embedding": ["DenseFeature", [128], "float32"],
        "image": ["DenseFeature", [32, 32], "float64"],
        "words": ["VarlenFeature", [-1], "string"],
        "wide": ["DenseFeature", [5], "bool"],
    }
    found += [{"name": f"mixed, {codec}", "features": mixed, "codec": codec} for codec in ("null", "deflate", "snappy")]
    found += [{"name": f"mixed, shuffle {n}", "features": mixed, "shuffle": n} for n in (0, 64, 512, 1024)]
    found += [{"name": f"mixed, unbatch, shuffle {n}", "features": mixed, "rebatch": n} for n in (64, 512, 1024)]
    return found


def write(path: Path, features: dict[str, Any], codec: str) -> None:
    """Random records of these features."""
    import fastavro

    draw = random.Random(1)

    def one(dtype: str) -> object:
        if dtype == "string":
            return "".join(draw.choices("abcdefgh", k=draw.randint(1, 8)))
        if dtype == "bool":
            return draw.random() < 0.5
        return draw.random() if dtype.startswith("float") else draw.randint(0, 1000)

    def dense(shape: list[int], dtype: str) -> object:
        if not shape:
            return one(dtype)
        return [dense(shape[1:], dtype) for _ in range(shape[0] if shape[0] > 0 else draw.randint(5, 10))]

    def value(kind: str, shape: list[int], dtype: str) -> object:
        if kind != "SparseFeature":
            return dense(shape, dtype)
        count = draw.randint(5, 10)
        # In order: unbatching serializes sparse tensors, which TensorFlow refuses if indices aren't sorted.
        places = sorted(tuple(map(draw.randrange, shape)) for _ in range(count))
        indices = {f"indices{axis}": list(column) for axis, column in enumerate(zip(*places, strict=True))}
        return indices | {"values": [one(dtype) for _ in range(count)]}

    def avro(name: str, kind: str, shape: list[int], dtype: str) -> object:
        if kind == "SparseFeature":
            fields = [{"name": f"indices{i}", "type": {"type": "array", "items": "long"}} for i in range(len(shape))]
            fields.append({"name": "values", "type": {"type": "array", "items": AVRO[dtype]}})
            return {"type": "record", "name": f"{name}_record", "fields": fields}
        schema: object = AVRO[dtype]
        for _ in shape:
            schema = {"type": "array", "items": schema}
        return schema

    fields = [{"name": name, "type": avro(name, *feature)} for name, feature in features.items()]
    rows = [{name: value(*feature) for name, feature in features.items()} for _ in range(RECORDS)]
    with path.open("wb") as file:
        fastavro.writer(file, {"type": "record", "name": "Row", "fields": fields}, rows, codec=codec)
    os.utime(path, (1e9, 1e9))


def answer(modules: str) -> None:
    """One side: a line of JSON with a case in, one with seconds out."""
    import tensorflow as tf

    dataset_module, feature_module = map(importlib.import_module, modules.split(","))

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def timed(work: Callable[[dict[str, Any]], None], case: dict[str, Any]) -> tuple[float, float]:
        clock, cpu = time.perf_counter(), spent()
        work(case)
        return time.perf_counter() - clock, spent() - cpu

    datasets: dict[str, Any] = {}

    def build(case: dict[str, Any]) -> None:
        features = {
            name: getattr(feature_module, kind)(shape, getattr(tf, dtype))
            for name, (kind, shape, dtype) in case["features"].items()
        }
        dataset = dataset_module.ATDSDataset(
            [case["path"]],
            BATCH_SIZE,
            features,
            shuffle_buffer_size=case.get("shuffle", 0),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        if "rebatch" in case:
            dataset = dataset.unbatch().shuffle(case["rebatch"]).batch(BATCH_SIZE)
        datasets[case["name"]] = dataset.prefetch(1)

    def iterate(case: dict[str, Any]) -> None:
        batches = iter(datasets[case["name"]])
        for _ in range(RECORDS // BATCH_SIZE):
            next(batches)

    for line in sys.stdin:
        case = json.loads(line)
        built = timed(build, case)
        runs = [timed(iterate, case) for _ in range(case["times"])]
        wall, cpu = (statistics.median(run[i] for run in runs) for i in (0, 1))
        print(json.dumps({"build": built[1], "wall": wall, "cpu": cpu}), flush=True)


def ask(side: subprocess.Popen[str], case: dict[str, Any]) -> dict[str, float]:
    """Returns the answer of one side."""
    assert side.stdin is not None
    assert side.stdout is not None
    print(json.dumps(case), file=side.stdin, flush=True)
    answer: dict[str, float] = json.loads(side.stdout.readline())
    return answer


def main(bench: Bench) -> None:
    """Runs the comparison, and fails if fastpipe is less than half as fast in any of them."""
    args = bench.args
    if args.modules:
        answer(args.modules)
        raise SystemExit
    peer = args.peer or interpreter("tensorflow-io", bench.say)
    options: dict[str, Any] = {"env": os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, "text": True}
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    sides = {
        modules: subprocess.Popen([python, __file__, "--modules", modules], **options)
        for python, modules in ((sys.executable, OURS), (peer, THEIRS))
    }
    columns = ("fastpipe, ms|,.2f", "tensorflow-io, ms|,.2f", "times as fast|,.1f", "by CPU time|,.1f")
    row = bench.table("benchmark", *columns, "building, CPU ms of each|")
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(case for case in cases() if args.only in case["name"]):
            path = Path(folder) / f"{number}.avro"
            write(path, case["features"], case.get("codec", "null"))
            request = case | {"path": str(path), "times": args.times}
            turns = take_turns({name: partial(ask, side, request) for name, side in sides.items()}, bench.rounds)

            def median(side: str, key: str, turns: Turns = turns) -> float:
                return turns.median(side, lambda turn: turn.result[key]) * 1e3

            ratio, by_cpu = (median(THEIRS, key) / median(OURS, key) for key in ("wall", "cpu"))
            building = f"{median(OURS, 'build'):.1f}, {median(THEIRS, 'build'):.1f}"
            row(case["name"], median(OURS, "wall"), median(THEIRS, "wall"), ratio, by_cpu, building)
            found.append(by_cpu)
    for side in sides.values():
        side.communicate()
    print(f"\nBy CPU time fastpipe is ahead in {sum(one >= 1 for one in found)} of {len(found)}.")
    bench.bound("times as fast by CPU time, in the slowest", min(found), least=0.5)


if __name__ == "__main__":
    # `modules` is one side: a module of the dataset, and one of its features. `peer` is a Python with tensorflow-io.
    sides: dict[str, Any] = {"modules": "", "times": 10, "only": ("", "int32"), "peer": ""}
    Bench("atds_small", __doc__, rounds=(5, 1), **sides).run(main)
