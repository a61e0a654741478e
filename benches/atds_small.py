"""Compares `ATDSDataset` with tensorflow-io's on small files: the 46 shapes of tensorflow-io's own benchmarks.

Each file has 1,024 records, which are read in batches of 128 with `AUTOTUNE`, so the costs of starting decide. In a
turn, each library builds the dataset once and iterates over it ten times, in a separate process. Both have the same
TensorFlow, or with `--newest` fastpipe has the newest. A figure is the median of the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import generate
from harness import Bench, CannotError, Turn, take_turns
from harness.children import peers
from peers.job import Job
from peers.small import AVRO, CASES, RECORDS, Case

MOST = 1.5
"""Maximum time relative to tensorflow-io's."""
THEIRS = "tensorflow-io"
ALL, SUMMARY = "All benchmarks", "Summary"


def schema(name: str, kind: str, shape: list[int], dtype: str) -> Any:
    """Returns the Avro schema of a feature."""
    if kind == "SparseFeature":
        fields = [{"name": f"indices{i}", "type": {"type": "array", "items": "long"}} for i in range(len(shape))]
        fields.append({"name": "values", "type": {"type": "array", "items": AVRO[dtype]}})
        return {"type": "record", "name": f"{name}_record", "fields": fields}
    found: Any = AVRO[dtype]
    for _ in shape:
        found = {"type": "array", "items": found}
    return found


class Values:
    """Random values."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(1)
        self._text = "".join(chr(97 + i) for i in self._draw.integers(0, 8, 1024))

    def many(self, shape: list[int], dtype: str) -> Any:
        """Returns nested lists of values. A free dimension has 5 to 10."""
        draw, sizes = self._draw, [int(self._draw.integers(5, 11)) if size < 0 else size for size in shape]
        if dtype == "string":
            starts, lengths = draw.integers(0, 1000, sizes), draw.integers(1, 9, sizes)
            return np.frompyfunc(lambda at, n: self._text[at : at + n], 2, 1)(starts, lengths)
        if dtype == "bool":
            return draw.random(sizes) < 0.5
        return draw.random(sizes).astype(dtype) if dtype.startswith("float") else draw.integers(0, 1000, sizes)

    def one(self, kind: str, shape: list[int], dtype: str) -> Any:
        """Returns the value of a feature in a record."""
        if kind != "SparseFeature":
            values = self.many(shape, dtype)
            return values.tolist() if hasattr(values, "tolist") else values
        count = int(self._draw.integers(5, 11))
        # In order, because unbatching serializes sparse tensors, and TensorFlow requires sorted indices for it.
        places = np.unique(self._draw.integers(0, np.prod(shape), count))
        indices = {f"indices{axis}": axes.tolist() for axis, axes in enumerate(np.unravel_index(places, shape))}
        return indices | {"values": self.many([len(places)], dtype).tolist()}


def write(case: Case, path: Path) -> dict[str, Any]:
    """Writes the file of a benchmark."""
    import fastavro

    values = Values()
    fields = [{"name": name, "type": schema(name, *feature)} for name, feature in case.features.items()]
    rows = ({name: values.one(*feature) for name, feature in case.features.items()} for _ in range(RECORDS))
    with path.open("wb") as file:
        fastavro.writer(file, {"type": "record", "name": "Row", "fields": fields}, rows, codec=case.codec)
    # fastpipe keeps no index of a file that was modified just now.
    os.utime(path, (1e9, 1e9))
    return {"rows": RECORDS}


def job_of(bench: Bench, name: str) -> Job:
    """Returns the job of a benchmark, and writes its file if it is missing."""
    case = CASES[name]
    mark = "-".join([case.codec, *(part for feature in case.features.values() for part in map(str, feature))])
    safe = "".join(letter if letter.isalnum() else "_" for letter in mark)[:120]
    path, _ = generate.kept(generate.CACHE / f"small-{safe}-v1.avro", partial(write, case), bench.say)
    return Job(str(path), name)


def main(bench: Bench) -> None:
    """Measures all benchmarks."""
    ours = "fastpipe-small-newest" if bench.args.newest else "fastpipe-small"
    names = [name for name in CASES if bench.args.only in name]
    columns = ("fastpipe, ms|,.2f", "tensorflow-io, ms|,.2f", "ratio|,.2f", "ratio of CPU time|,.2f")
    building = ("building, CPU ms|,.1f", "tensorflow-io's|,.1f")
    row = bench.table("benchmark", *columns, *building, title=f"{ALL}, newest TensorFlow" if bench.args.newest else ALL)
    wall, cpu = [], []
    with peers(bench, {"fastpipe": (ours, []), THEIRS: ("atds-small", [])}) as readers:

        def read(side: str, job: Job) -> Turn:
            answer = readers[side].ask("read", job, 0.0)
            if "error" in answer:
                raise CannotError(answer["error"])
            return Turn(answer["seconds"], answer["cpu"], answer["building"])

        for name in names:
            job = job_of(bench, name)
            turns = take_turns({side: partial(read, side, job) for side in readers}, bench.rounds)
            if turns.errors:
                bench.fail(f"{name}: {json.dumps(turns.errors)}")
                continue
            times = [1e3 * turns.median(side, figure) for figure in ("seconds", "result") for side in readers]
            wall.append(turns.ratio("fastpipe", THEIRS).median)
            cpu.append(turns.ratio("fastpipe", THEIRS, "cpu").median)
            row(name, *times[:2], wall[-1], cpu[-1], *times[2:])
    if not wall:
        return
    # The summary of other runs isn't replaced.
    if not bench.args.only and not bench.args.newest:
        row = bench.table("ratio of", *(f"{what}|,.2f" for what in ("smallest", "median", "largest")), title=SUMMARY)
        for kind, ratios in (("time", wall), ("CPU time", cpu)):
            row(kind, min(ratios), statistics.median(ratios), max(ratios))
    bench.say(f"faster in {sum(one < 1 for one in wall)} of {len(wall)}, by CPU time {sum(one < 1 for one in cpu)}")
    bench.target("largest ratio", max(wall), most=MOST)
    bench.target("largest ratio of CPU time", max(cpu), most=MOST)


if __name__ == "__main__":
    what: dict[str, Any] = {"only": ("", "int32"), "newest": False}
    Bench("atds_small", __doc__, rounds=(3, 1), **what).run(main)
