"""The examples of README.md run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manual

README = Path(__file__).resolve().parent.parent / "README.md"
EXAMPLES = [
    (language, code) for language, code in re.findall(r"```(\w+)\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
]
PYTHON = [code for language, code in EXAMPLES if language == "python"]
COMMANDS = [
    line
    for language, code in EXAMPLES
    if language == "sh"
    for line in code.splitlines()
    if line.startswith("fastpipe ")
]
# What an example reads beside the files.
RANDOM = np.random.default_rng(3)
GIVEN: dict[str, Any] = {
    "user_ids": np.repeat(np.arange(40), 30),
    "item_ids": np.concatenate([RANDOM.permutation(2_000)[:30] for _ in range(40)]),
    "timestamps": RANDOM.integers(0, 1_000, 1_200),
    "model": lambda users, items: items % (users + 7),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    manual.write(folder)
    return folder


def _id(code: str) -> str:
    return re.sub(r"\W+", "-", code.strip().splitlines()[-1])[:40]


@pytest.mark.parametrize("code", PYTHON, ids=_id)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch", "ignore::DeprecationWarning:keras")
def test_python(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "fastpipe.cuda" in code:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")
    for framework in ("torch", "jax", "tensorflow"):
        if re.search(rf"\b(import|from|fastpipe\.)\s*{framework}\b", code):
            pytest.importorskip(framework)
    monkeypatch.chdir(folder)
    assert re.search(r"^(import|from) fastpipe", code, re.MULTILINE), "it doesn't import what it uses"
    names = dict(GIVEN)
    exec(compile(code, str(README), "exec"), names)
    assert names.keys() > GIVEN.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, folder: Path) -> None:
    words = command.split("#")[0].split()
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_there_are_examples() -> None:
    assert len(PYTHON) > 10
    assert len(COMMANDS) >= 2
