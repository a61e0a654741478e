"""Importing the extension loads little, and nothing that loads later can swallow Ctrl-C."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import fastpipe
import samples
from fastpipe import _fastpipe

INTERRUPTED = """
    import builtins, signal, sys
    import numpy

    wanted, imported = sys.argv[2], builtins.__import__

    def interrupted(name, *args, **kwargs):
        if name.startswith("numpy") and name.endswith(wanted):
            raise KeyboardInterrupt
        return imported(name, *args, **kwargs)
"""


def outcome(script: str, *arguments: str) -> str:
    """Returns the output of a separate Python process, or its errors if it failed."""
    command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED) + textwrap.dedent(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    return done.stdout.strip() if done.returncode == 0 else done.stderr


def test_numpy_is_loaded_before_the_first_batch(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[5, 3]])
    script = """
        import fastpipe
        batches = iter(fastpipe.read_avro(sys.argv[1], batch_size=4))
        builtins.__import__ = interrupted
        print(len(next(batches)["id"]))
    """
    assert outcome(script, data.paths[0], "") == "4"


def test_ctrl_c_while_numpy_loads_is_raised() -> None:
    script = """
        builtins.__import__ = interrupted
        try:
            import fastpipe._fastpipe
        except BaseException as error:
            builtins.__import__ = imported
            print(type(error).__name__)
    """
    assert outcome(script, "", "multiarray") == "KeyboardInterrupt"


def test_no_framework_is_loaded_and_nothing_warns() -> None:
    frameworks = ["fastavro", "jax", "matplotlib", "pyarrow", "ray", "sqlalchemy", "tensorflow", "torch", "tqdm"]
    frameworks += ["xgboost"]
    script = """
        import warnings
        warnings.simplefilter("error")
        import fastpipe
        print(*(name for name in sys.argv[2].split() if name in sys.modules))
    """
    assert outcome(script, "", " ".join(frameworks)) == ""


def test_rarely_used_modules_are_loaded_late() -> None:
    script = """
        import fastpipe
        late = ["csv", "http.client", "leases", "logging", "metrics", "service", "sources.avro", "sources.sql"]
        late += ["statistics"]
        print([name for name in late if name in sys.modules or f"fastpipe.{name}" in sys.modules])
        print(set(fastpipe.__all__) <= set(dir(fastpipe)), fastpipe.read_avro is fastpipe.avro.read_avro)
        from fastpipe import *
        print(all(globals()[name] is getattr(fastpipe, name) for name in fastpipe.__all__))
        try:
            fastpipe.read_arvo
        except AttributeError as error:
            print(error)
    """
    assert outcome(script, "", "").splitlines() == [
        "[]",
        "True True",
        "True",
        "module 'fastpipe' has no attribute 'read_arvo'",
    ]


@pytest.mark.parametrize("package", [fastpipe, fastpipe.service])
def test_names_of_the_stub_are_loaded_late(package: ModuleType) -> None:
    assert package.__file__ is not None
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text("utf-8"))
    names = {name.name for each in ast.walk(stub) if isinstance(each, ast.ImportFrom) for name in each.names}
    assert {name for name in names if isinstance(getattr(package, name), ModuleType)} == names - set(package.__all__)


@pytest.mark.parametrize("name", ["cuda", "jax", "ray", "tf", "torch", "xgboost"])
def test_adapters_are_loaded_when_they_are_used(name: str) -> None:
    framework = {"cuda": "numpy", "tf": "tensorflow"}.get(name, name)
    pytest.importorskip(framework)
    script = """
        import fastpipe
        name = sys.argv[1]
        print(name in dir(fastpipe), f"fastpipe.{name}" in sys.modules)
        adapter = getattr(fastpipe, name)
        print(adapter.__name__, name in dir(fastpipe), sys.argv[2] in sys.modules)
    """
    assert outcome(script, name, framework).splitlines() == ["False False", f"fastpipe.{name} True True"]


def test_a_missing_framework_is_named() -> None:
    script = """
        sys.modules["torch"] = None
        import fastpipe
        try:
            fastpipe.torch
        except ImportError as error:
            print(error)
    """
    assert "pip install 'fastpipe-data[torch]'" in outcome(script, "", "")


def test_no_additional_library_is_loaded(tmp_path: Path) -> None:
    for name in ("framework", "cc"):
        shutil.copy(_fastpipe.__file__, tmp_path / f"libtensorflow_{name}.so.2")
        shutil.copy(_fastpipe.__file__, tmp_path / f"libtensorflow_{name}.2.dylib")
    script = """
        import types
        from fastpipe import _fastpipe
        try:
            _fastpipe.register_tensorflow(print)
        except ImportError as error:
            print(error)
        tensorflow = sys.modules["tensorflow"] = types.ModuleType("tensorflow")
        tensorflow.__version__ = "2.18.0"
        tensorflow.sysconfig = types.SimpleNamespace(get_lib=lambda: sys.argv[1])
        try:
            _fastpipe.register_tensorflow(print)
        except ImportError as error:
            print("loaded" in str(error), sys.argv[1] in str(error))
        if sys.platform == "linux":
            assert sys.argv[1] not in open("/proc/self/maps").read()
    """
    assert outcome(script, str(tmp_path), "").splitlines() == ["TensorFlow isn't imported", "True True"]
