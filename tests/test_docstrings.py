"""The examples in all docstrings run, and public names have one."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fastpipe
import manual

PACKAGE = manual.ROOT / "python/fastpipe"
FRAMEWORKS = ("torch", "jax", "tensorflow", "xgboost", "ray")

# Public types that only functions of fastpipe create. The functions have the examples.
RETURNED = {
    *("Candidates", "CsvSample", "Description", "FeatureStatistics", "Growth", "HeldOut", "LeaseWorker", "Loss"),
    *("LedgerStatus", "EpochStatus", "WorkerStatus", "Measure", "Partition", "RowEstimate", "ShuffleReport"),
    *("PrometheusCollector", "SqlPartition", "SqlPlan", "WrittenFile", "WrittenRecords", "Features", "StepOfEpoch"),
    *("AvroLocation", "CsvLocation", "MixtureLocation", "PackLocation", "PointLocation"),
    *("RowLocation", "TFRecordLocation", "UnitLocation"),
}
# Types that describe arguments: keyword arguments, and protocols.
ARGUMENTS = {"Directory", "InferOptions", "Options", "ReadableFile", "Units"}


class Documented(NamedTuple):
    """A name and its docstring."""

    path: str
    text: str


def docstrings() -> Iterator[Documented]:
    """Yields the docstrings of all functions, classes and methods. This works without any framework."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        yield from _inside(ast.parse(file.read_text("utf-8")), module)


def _inside(tree: ast.AST, path: str) -> Iterator[Documented]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = f"{path}.{node.name}"
            yield Documented(name, ast.get_docstring(node) or "")
            yield from _inside(node, name)


EXAMPLES = [documented for documented in docstrings() if ">>> " in documented.text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docstrings")
    manual.write(folder)
    return folder


def run(name: str, text: str) -> str:
    """Runs the examples in a docstring, and returns what is wrong."""
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    return "".join(said) if runner.run(test, out=said.append).failed else ""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.path)
def test_examples(example: Documented, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    framework = re.search(rf"import (?:fastpipe\.)?({'|'.join(FRAMEWORKS)}|tf)\b", example.text)
    if framework is None:
        assert run(*example) == ""
        return
    # Frameworks exclude each other, and a loader forks, so these examples run in a separate process.
    pytest.importorskip("tensorflow" if framework[1] == "tf" else framework[1])
    program = f"import test_docstrings; print(test_docstrings.run(*{tuple(example)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {program}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def test_all_public_functions_and_classes_have_an_example() -> None:
    topics = ("avro", "batch", "csv", "leases", "metrics", "recsys", "service", "sql", "tfrecord", "typing", "units")
    modules = [fastpipe, *(importlib.import_module(f"fastpipe.{topic}") for topic in topics)]
    named = [(name, getattr(module, name)) for module in modules for name in module.__all__]
    without = set()
    for name, public in named:
        error = inspect.isclass(public) and issubclass(public, (Exception, Warning))
        described = (inspect.isclass(public) or inspect.isfunction(public)) and not error
        if described and ">>> " not in (inspect.getdoc(public) or ""):
            without.add(name)
    assert without == RETURNED | ARGUMENTS


@pytest.mark.parametrize(
    "name",
    [
        *("torch.dataset", "torch.DataLoader", "torch.collate", "torch.item_rng", "torch.worker_info"),
        *("tf.dataset", "tf.parse_avro", "tf.make_avro_record_dataset", "tf.AvroRecordDataset"),
        *("jax.iterator", "cuda.fill", "xgboost.data_iter", "service.Server"),
        *("metrics.prometheus", "metrics.opentelemetry", "metrics.Scalars"),
        *("ray.dataset", "ray.shard", "ray.serve", "ray.LeaseWorkers"),
    ],
)
def test_adapters_have_an_example(name: str) -> None:
    package, _, last = name.partition(".")
    assert any(path.startswith(f"{package}.") and path.endswith(f".{last}") for path, _ in EXAMPLES)


def test_only_the_example_for_ray_train_is_skipped() -> None:
    assert [path for path, text in EXAMPLES if "+SKIP" in text] == ["ray._datasets.shard"]


@pytest.mark.parametrize(
    "method", ["batch_at", "load_state_dict", "locate", "shard", "partition", "lease", "state_dict", "to_arrow_reader"]
)
def test_methods_of_readers_have_an_example(method: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(fastpipe.Reader, method)) or "")
