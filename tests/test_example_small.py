"""The small programs in examples/ run, and resume where they stopped."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import manual

EXAMPLES = manual.ROOT / "examples"


def _run(name: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_read() -> None:
    assert _run("read.py").splitlines()[-1].startswith("400 rows with 3 or more stars; [")


def test_train() -> None:
    pytest.importorskip("torch")
    assert float(_run("train.py").split()[-1]) < 0.1


def test_resume() -> None:
    one, first, second = ([int(row) for row in re.findall(r"\d+", line.split("[")[1])] for line in _rows())
    assert len(one) == 6
    assert [row for pair in zip(first, second, strict=True) for row in pair] == one


def _rows() -> list[str]:
    return [line for line in _run("resume.py").splitlines() if "resumes with" in line]


def test_the_page_lists_each_program() -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    assert {f"[{path.name}]({path.name})" for path in EXAMPLES.glob("*.py")} <= set(re.findall(r"\[\S+\]\(\S+\)", page))


@pytest.mark.parametrize("name", ["read.py", "train.py", "resume.py"])
def test_small_programs_are_small(name: str) -> None:
    assert len((EXAMPLES / name).read_text("utf-8").splitlines()) <= 35
