"""Compares fastpipe.tf.atds with tensorflow-io in random cases: tensors, specs, and classes and texts of errors.

tensorflow-io is installed in a separate environment, which needs Python 3.11 and a package index; otherwise the test is
skipped. FASTPIPE_ATDS_CASES sets the number of cases, 25 by default.

Cases in which tensorflow-io is wrong are left out: damaged files, empty lists of files, and errors under shuffling.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastavro
import pytest

import atds_cases

sys.path.insert(0, str(Path(__file__).parent.parent / "benches"))
from peers.environments import NoEnvironmentError, interpreter

atds = pytest.importorskip("fastpipe.tf.atds", reason="TensorFlow isn't installed", exc_type=ImportError)

CASES = int(os.environ.get("FASTPIPE_ATDS_CASES", "25"))
OURS = "fastpipe.tf.atds,fastpipe.tf.atds"
PEER = "tensorflow_io.python.experimental.atds.dataset,tensorflow_io.python.experimental.atds.features"
DTYPES = {
    "int": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "boolean": "bool",
    "string": "string",
    "bytes": "string",
}


@pytest.fixture(scope="module")
def peer() -> str:
    """Returns the interpreter that has tensorflow-io."""
    try:
        return interpreter("tensorflow-io", print)
    except NoEnvironmentError as error:
        pytest.skip(f"no environment with tensorflow-io: {error}")


@pytest.mark.timeout(600 + 2 * CASES)
@pytest.mark.filterwarnings("ignore")
def test_random_cases_match_tensorflow_io(peer: str, tmp_path: Path) -> None:
    cases = [_case(random.Random(number), tmp_path / str(number)) for number in range(CASES)]
    results = _results(peer, PEER, cases, tmp_path)
    assert any(result and result["error"] for result in results)
    assert any(result and not result["error"] and result["batches"] for result in results)
    problems = []
    for number, (case, wanted) in enumerate(zip(cases, results, strict=True)):
        found = json.loads(json.dumps(atds_cases.run(case, atds, atds)))
        if wanted is None:
            assert found["error"] == "InvalidArgumentError", (
                f"case {number}, which tensorflow-io did not survive: {case}"
            )
            continue
        if case["options"]["shuffle_buffer_size"]:
            found, wanted = _unordered(found), _unordered(wanted)
            if case["options"]["drop_remainder"]:  # The remaining rows are random.
                found["batches"] = wanted["batches"] = None
        if any(path.endswith("absent.avro") for path in case["files"]) and wanted["error"]:
            # fastpipe reads all headers before the first batch. tensorflow-io reads a file's header when its turn
            # comes, so after earlier errors.
            assert found["error"] in ("NotFoundError", wanted["error"]), f"case {number}: {case}"
            assert not found["batches"]
            continue
        said, words = found.pop("message"), _words(wanted.pop("message"))
        if words not in said:
            problems.append(f"case {number}: {said!r} without {words!r}, with {case}")
        if found != wanted:
            problems.append(f"case {number}: {_difference(found, wanted)}, with {case}")
    assert not problems, "\n".join([f"{len(problems)} cases differ", *problems[:10]])


def _words(message: str) -> str:
    """Returns tensorflow-io's message up to the quoted schema.

    It lists all sparse arrays, fastpipe only the two that differ.
    """
    words = re.sub(r"^(\{\{[^}]*\}\} )?", "", message)
    return re.split(
        r"Invalid (?:union )?schema found|Input data schema|Numbers of decoded value in \[| \[Op:|\n", words
    )[0]


def _difference(found: Any, wanted: Any, where: str = "") -> str:
    """Describes the first difference between two results."""
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        pairs: Any = [(name, found[name], wanted[name]) for name in found]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [(place, *pair) for place, pair in enumerate(zip(found, wanted, strict=True))]
    else:
        return f"{where}: {str(found)[:200]}, not {str(wanted)[:200]}"
    return next(_difference(a, b, f"{where}/{name}") for name, a, b in pairs if a != b)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_the_oldest_tensorflow_yields_the_same(peer: str, tmp_path: Path) -> None:
    """Tests the built extension with TensorFlow 2.16, which tensorflow-io needs."""
    cases = [_case(random.Random(number), tmp_path / str(number)) for number in range(20)]
    for case in cases:
        case["options"]["seed"] = 5
    results = _results(peer, OURS, cases, tmp_path)
    assert any(result and not result["error"] and result["batches"] for result in results)
    for number, (case, found) in enumerate(zip(cases, results, strict=True)):
        wanted = json.loads(json.dumps(atds_cases.run(case, atds, atds)))
        assert found == wanted, f"case {number}: {_difference(found, wanted)}, with {case}"


def _results(interpreter: str, modules: str, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any] | None]:
    """Returns the result of each case with these modules, or None if the process was aborted."""
    source, target = folder / "cases", folder / "results"
    command = [interpreter, atds_cases.__file__, modules, str(source), str(target)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(Path(__file__).parents[1] / "python")}
    results: list[dict[str, Any] | None] = []
    while len(results) < len(cases):
        source.write_text("".join(json.dumps(case) + "\n" for case in cases[len(results) :]))
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        results += map(json.loads, target.read_text().splitlines())
        if len(results) < len(cases):
            assert done.returncode < 0, done.stderr[-2000:]
            results.append(None)
    return results


def _unordered(result: dict[str, Any]) -> dict[str, Any]:
    """Reduces results in random order to the parts that must be equal: the rows, and the sizes of batches."""
    ids = [batch["id"][0] for batch in result["batches"]]
    return result | {
        "batches": sorted(i for _, _, items in ids for i in items) if not result["error"] else None,
        "sizes": [shape for _, shape, _ in ids],
    }


def _case(draw: random.Random, folder: Path) -> dict[str, Any]:
    """Returns files of a random schema and random features. Some features don't fit the schema."""
    folder.mkdir()
    features: dict[str, Any] = {"id": ["DenseFeature", [], "int64"]}
    fields: list[dict[str, Any]] = [{"name": "id", "type": "long"}]
    values = []
    wrong = draw.random() < 0.25
    shuffle = 0 if wrong else draw.choice([0, 0, 0, 1, 7, 50])
    for number in range(draw.randint(1, 5)):
        name = f"{draw.choice('zyxabc')}{number}"
        kind, feature, value = _field(draw, f"{name}_record")
        nullable = draw.random()
        if nullable < 0.3:
            kind = draw.choice([["null", kind], [kind, "null"], [kind]])
            if wrong and nullable < 0.1 and "null" in kind:
                value = _sometimes_none(draw, value)
        fields.append({"name": name, "type": kind})
        values.append((name, value))
        if draw.random() < 0.8:
            features[name] = _damaged(draw, feature) if wrong and draw.random() < 0.4 else feature
    if wrong and draw.random() < 0.1:
        features["absent"] = ["DenseFeature", [], "int64"]
    draw.shuffle(fields)
    schema = {"type": "record", "name": "Row", "fields": fields}
    files, total = [], 0
    for number in range(draw.randint(1, 3)):
        count = draw.choice([0, 1, 5, 30])
        rows = [{"id": i} | {name: value() for name, value in values} for i in range(total, total + count)]
        total += count
        path = folder / f"{number}.avro"
        with path.open("wb") as file:
            codec = draw.choice(["null", "deflate", "snappy"])
            fastavro.writer(file, schema, rows, codec=codec, sync_interval=draw.choice([1, 100, 16_000]))
        files.append(str(path))
    if wrong and draw.random() < 0.1:
        files.append(str(folder / "absent.avro"))
    return {
        "files": files,
        "features": features,
        "options": {
            "batch_size": draw.choice([1, 2, 7, 16, 100]),
            "drop_remainder": draw.random() < 0.3,
            "shuffle_buffer_size": shuffle,
            "num_parallel_calls": draw.choice([1, 2, 4]),
        },
    }


def _field(draw: random.Random, name: str) -> tuple[Any, list[Any], Any]:
    """Returns a type, a feature that fits it, and a function that makes its values."""
    avro = draw.choice(list(DTYPES))
    form = draw.choice(["DenseFeature", "SparseFeature", "VarlenFeature"])
    if form == "SparseFeature":
        shape = [draw.choice([-1, 4, 20]) for _ in range(draw.randint(1, 3))]
        names = [*(f"indices{axis}" for axis in range(len(shape))), "values"]
        items = {field: draw.choice(["int", "long"]) for field in names} | {"values": avro}
        draw.shuffle(names)
        fields = [{"name": field, "type": {"type": "array", "items": items[field]}} for field in names]

        def sparse() -> dict[str, Any]:
            count = draw.choice([0, 0, 1, 3, 9])
            return {
                field: [_value(draw, avro) if field == "values" else draw.randint(0, 30) for _ in range(count)]
                for field in names
            }

        return {"type": "record", "name": name, "fields": fields}, [form, shape, DTYPES[avro]], sparse
    free = form == "VarlenFeature"
    shape = [draw.choice([-1, 2]) if free else draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
    kind: Any = avro
    for _ in shape:
        kind = {"type": "array", "items": kind}

    def nested(sizes: list[int]) -> Any:
        if not sizes:
            return _value(draw, avro)
        return [nested(sizes[1:]) for _ in range(draw.randint(0, 4) if sizes[0] == -1 else sizes[0])]

    return kind, [form, shape, DTYPES[avro]], lambda: nested(shape)


def _sometimes_none(draw: random.Random, value: Any) -> Any:
    return lambda: None if draw.random() < 0.1 else value()


def _damaged(draw: random.Random, feature: list[Any]) -> list[Any]:
    form, shape, dtype = feature
    return draw.choice(
        [
            [form, shape, draw.choice([other for other in DTYPES.values() if other != dtype])],
            [form, [*shape, 2], dtype],
            ["DenseFeature", [abs(size) + 1 for size in shape], dtype],
            ["SparseFeature", shape or [2], dtype],
            ["VarlenFeature", [size + 1 if size > 0 else -1 for size in shape], dtype],
        ]
    )


def _value(draw: random.Random, avro: str) -> Any:
    if avro == "boolean":
        return draw.random() < 0.5
    if avro in ("int", "long"):
        bits = draw.randint(0, 31 if avro == "int" else 63)
        return draw.randint(-(1 << bits), (1 << bits) - 1)
    if avro in ("float", "double"):
        return draw.choice([0.0, -0.5, draw.randint(-1000, 1000) / 8])
    text = "".join(draw.choices("aé\N{SNOWMAN} ", k=draw.choice([0, 1, 5, 200])))
    return text if avro == "string" else text.encode("utf-16")
