"""The examples of README.md and of the pages in `docs/` run exactly as printed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manual
from apart import apart
from manual import Example
from shown_values import ShownValues

PAGES = [manual.README, *manual.PAGES]
EXAMPLES = [example for page in PAGES for example in manual.examples(page)]
# Variables that examples use in addition to the files.
RANDOM = np.random.default_rng(3)
GIVEN: dict[str, Any] = {
    "user_ids": np.repeat(np.arange(40), 30),
    "item_ids": np.concatenate([RANDOM.permutation(2_000)[:30] for _ in range(40)]),
    "timestamps": RANDOM.integers(0, 1_000, 1_200),
    "model": lambda users, items: items % (users + 7),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    manual.write(folder)
    return folder


@pytest.fixture(scope="module")
def folders() -> dict[Path, Path]:
    """Returns the folder of each page that has run an example."""
    return {}


@pytest.fixture
def page(
    request: pytest.FixtureRequest, written: Path, folders: dict[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Returns a folder with the files for each page. All examples of the page share it."""
    if request.param not in folders:
        folders[request.param] = tmp_path_factory.mktemp(request.param.stem)
        shutil.copytree(written, folders[request.param], dirs_exist_ok=True)
    return folders[request.param]


def _name(page: Path) -> str:
    return page.relative_to(manual.ROOT).as_posix()


def _id(example: Example) -> str:
    return f"{_name(example.page)}-" + re.sub(r"\W+", "-", example.code.strip().splitlines()[-1])[:40]


def _run_python(example: Example) -> None:
    code = example.code
    if "fastpipe.cuda" in code:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("requires a GPU")
    frameworks = _require_frameworks(code)
    assert re.search(r"^(import|from) fastpipe", code, re.MULTILINE), "the example must import fastpipe"
    if "torch" in frameworks:
        _execute_apart(example=example, folder=Path.cwd())
    else:
        _execute(example)


def _require_frameworks(code: str) -> list[str]:
    """Returns the frameworks that code imports. Skips the test if one isn't installed."""
    frameworks = [
        framework
        for framework in ("torch", "jax", "tensorflow", "ray")
        if re.search(rf"\b(import|from|fastpipe\.)\s*{framework}\b", code)
    ]
    for framework in frameworks:
        pytest.importorskip(framework)
    return frameworks


def _execute(example: Example) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ShownValues(example.code, _name(example.page)).run(GIVEN)
    if example.output is not None:
        assert printed.getvalue() == example.output


@apart(looks=False)
def _execute_apart(example: Example, folder: Path) -> None:
    """Runs an example where TensorFlow isn't loaded.

    torch's optimizers import Triton. Triton and TensorFlow both have LLVM, which ends a process that loads it twice.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    os.chdir(folder)
    _execute(example)


COMMANDS = {"fastpipe": ["-m", "fastpipe"], "python": [], "torchrun": ["-m", "torch.distributed.run"]}


def _run_commands(example: Example) -> None:
    """Runs commands as a shell does: `NAME=value command`, and `command &` in the background, to the end of the block.

    If the page shows an output, the commands must end with it, because Ray logs to the same stream. Otherwise, each
    command must print something.
    """
    for name, code in example.programs:
        _require_frameworks(code)
        Path(name).write_text(code, "utf-8")
    if sys.platform == "win32" and "torchrun" in example.code:
        pytest.skip("torch's builds for Windows have no libuv, which torchrun needs")
    outputs = []
    with contextlib.ExitStack() as background:
        for command in example.code.splitlines():
            words = shlex.split(command, comments=True)
            environment = dict(os.environ)
            while "=" in words[0]:
                environment.update([words.pop(0).split("=", 1)])
            line = [sys.executable, *COMMANDS[words[0]], *words[1:]]
            if line[-1] == "&":
                process = background.enter_context(subprocess.Popen(line[:-1], env=environment))
                background.callback(process.terminate)
                continue
            done = subprocess.run(line, capture_output=True, text=True, timeout=500, env=environment)
            errors = "" if example.programs else done.stderr  # frameworks and Ray log to stderr
            assert (done.returncode, errors) == (0, ""), done.stdout + done.stderr
            assert done.stdout
            outputs.append(done.stdout)
    if example.output is not None:
        assert "".join(outputs).endswith(example.output)


@pytest.mark.parametrize(
    ("page", "example"), [(example.page, example) for example in EXAMPLES], indirect=["page"], ids=map(_id, EXAMPLES)
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch", "ignore::DeprecationWarning:keras")
def test_examples(page: Path, example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(page)
    if example.language == "python":
        _run_python(example)
    else:
        _run_commands(example)


@pytest.mark.parametrize("path", [path for path in PAGES if path != manual.INDEX], ids=_name)
def test_each_page_has_an_example(path: Path) -> None:
    assert any(example.page == path for example in EXAMPLES)


@pytest.mark.parametrize(
    "code",
    [
        "1 + 1  # 3",
        "[1, 'a']  # [1, ..., 'b']",
        "for i in range(2):\n    print(i)  # 0, 2",
        "numpy.zeros(3)  # float64 [4]",
        "numpy.zeros(3), numpy.zeros(3)  # float64 [3] and int64 [3]",
        "numpy.zeros(3)  # fastpipe.Ragged",
    ],
)
def test_wrong_comments_are_found(code: str) -> None:
    with pytest.raises(AssertionError):
        ShownValues(code, "example").run({"numpy": np})


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_each_program_is_run(path: Path) -> None:
    commands = [example.code for example in manual.examples(path) if example.programs]
    run = {name for name in manual.programs(path) if any(name in code for code in commands)}
    assert run == manual.programs(path).keys()


def test_wrong_outputs_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\nprint(x)\n```\n\n```text\n2\n```\n")
    (example,) = (found._replace(page=manual.README) for found in manual.examples(page))
    with pytest.raises(AssertionError):
        _execute(example)
    _execute(example._replace(output="1\n"))
