"""The public surface: few names at the top, each other name in the module of its topic, and uniform arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import re
import sys
from typing import Any

import pytest

import fastpipe
import manual

TOPICS = [
    *("avro", "batch", "csv", "errors", "leases", "metrics", "recsys", "service", "sql", "tfrecord", "typing", "units"),
    *("cuda", "jax", "ray", "tf", "torch", "xgboost"),
]
MODULES = ["fastpipe", *(f"fastpipe.{topic}" for topic in TOPICS)]
# Classes with the signatures of the classes that they replace: torch's DataLoader and tensorflow-io's dataset.
AS_THEIRS = ("DataLoader.", "ATDSDataset.")
# Arguments in a function's signature that have another name elsewhere, and that name.
OTHERWISE = {
    "ahead": "prefetch",
    "depth": "prefetch",
    "keep": "cache_bytes",
    "buckets": "num_buckets",
    "ledger_url": "url",
    "memory": "memory_limit",
    "most": "limit, or max_*",
    "negatives": "num_negatives",
    "nulls": "on_null",
    "uneven": "on_uneven",
    "unknown": "on_unknown",
    "unsupported": "on_unsupported",
}
POLICY = re.compile(r"Literal\[[^]]*[\"'](error|drop|warn|ignore|skip)[\"']")


def functions(theirs: bool = False) -> dict[str, Any]:
    """Returns public functions and methods by name, by default without classes that mimic other libraries."""
    found: dict[str, Any] = {}
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            members = {"": value}
            if inspect.isclass(value):
                public = ((key, member) for key, member in vars(value).items() if key == "__init__" or key[0] != "_")
                members = {f".{key}": getattr(member, "__func__", member) for key, member in public}
                if getattr(value, "_is_protocol", False):
                    del members[".__init__"]  # typing generates it.
            found |= {f"{module}.{name}{key}": member for key, member in members.items() if inspect.isfunction(member)}
    assert len(found) > 150, "the walk found too little"
    return {name: function for name, function in found.items() if theirs or not any(a in name for a in AS_THEIRS)}


def test_the_top_level_has_few_names() -> None:
    assert len(fastpipe.__all__) <= 34


def test_public_names_exist_once() -> None:
    for module in MODULES:
        names = importlib.import_module(module).__all__
        assert sorted(set(names)) == sorted(names)
        assert not [name for name in names if name.startswith("_") and name != "__version__"]
        assert all(hasattr(importlib.import_module(module), name) for name in names)


def test_arguments_are_named_alike() -> None:
    wrong = []
    for name, function in functions().items():
        for argument in inspect.signature(function).parameters.values():
            annotation = str(argument.annotation)
            # The annotation may be the name of a type alias.
            annotation += str(function.__globals__.get(annotation, ""))
            if argument.name in OTHERWISE:
                wrong.append(f"{name}: call {argument.name!r} {OTHERWISE[argument.name]!r}")
            if "SupportsIndex" in annotation:
                wrong.append(f"{name}: say int for {argument.name!r}")
            if POLICY.search(annotation) and not argument.name.startswith("on_"):
                wrong.append(f"{name}: the policy {argument.name!r} must begin with on_")
    assert not wrong, "\n".join(wrong)


def test_functions_have_documentation_and_types() -> None:
    wrong = []
    for name, function in functions(theirs=True).items():
        signature = inspect.signature(function)
        arguments = [argument for argument in signature.parameters.values() if argument.name not in ("self", "cls")]
        if not (function.__doc__ or name.endswith(".__init__")):
            wrong.append(f"{name} has no docstring")
        wrong += [f"{name}: {each.name} has no type" for each in arguments if each.annotation is each.empty]
        if signature.return_annotation is inspect.Signature.empty:
            wrong.append(f"{name} has no type of its result")
    assert not wrong, "\n".join(wrong)


def classes() -> set[Any]:
    """Returns public classes."""
    modules = [importlib.import_module(module) for module in (*MODULES, "fastpipe.specs")]
    named = {getattr(module, name) for module in modules for name in module.__all__ if name != "__version__"}
    return {value for value in named if inspect.isclass(value)}


def classes_of_package() -> set[str]:
    """Returns the names of all classes in the package's source, public or not."""
    package = manual.ROOT / "python/fastpipe"
    files = [*package.rglob("*.py"), *package.rglob("*.pyi")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def fastpipe_types(annotation: object, names: dict[str, Any]) -> set[str]:
    """Returns the names of fastpipe's classes in an annotation, whose text uses the names of a module."""
    found = set()
    for path in re.findall(r"[A-Za-z_][\w.]*", str(annotation)):
        value = names.get(path, path)
        if path.startswith("fastpipe.") or value == path:
            # A type of another package has a dot, and a name may be imported only for type checkers.
            found.add(path.rpartition(".")[2] if path.startswith("fastpipe.") else path)
        elif inspect.isclass(value):
            found |= {path} if value.__module__.startswith("fastpipe.") else set()
        elif not inspect.ismodule(value):
            found |= fastpipe_types(value, names)  # An alias.
    return found


def test_constructors_mention_only_public_types() -> None:
    private = classes_of_package() - {value.__name__ for value in classes()}
    assert {"Dataset", "Ordering", "PassOptions", "Data"} < private, "the walk found too little"
    wrong = []
    for value in classes():
        if not issubclass(value, (dict, Warning, TypeError)):  # They have the signatures of builtins.
            names = vars(sys.modules[value.__module__])
            for argument in inspect.signature(value).parameters.values():
                hidden = fastpipe_types(argument.annotation, names) & private
                wrong += [f"{value}: {argument.name} is a {name}" for name in sorted(hidden)]
    assert not wrong, "\n".join(wrong)


def test_classes_that_only_functions_create_name_these_functions() -> None:
    hidden = {value.__name__: value for value in classes() if "_of" in vars(value)}
    assert {"Reader", "LeaseWorker", "Prefetcher", "Fill", "Filled", "DatasetIterator", "IterableDataset"} < set(hidden)
    assert {"FeatureStatistics", "Description", "Interactions"} < set(hidden)
    for name, value in hidden.items():
        with pytest.raises(TypeError, match=rf"^{name} can't be constructed: use \w.*\("):
            value(1, data=2)
        assert "Raises `TypeError`: use " in pydoc.render_doc(value)
    with pytest.raises(TypeError, match=r"^Reader can't be constructed: use fastpipe.read_avro\(\.\.\.\), read_csv"):
        fastpipe.Reader()
