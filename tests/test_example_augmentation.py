"""The augmentation example: it learns, and images don't depend on the number of workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "augmentation.py"

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its workers are processes that share memory")


def run(*options: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_learns() -> None:
    said = run("--images=600", "--size=16", "--epochs=4", "--batch-size=16")
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]


def test_images_are_the_same_with_any_number_of_workers() -> None:
    said = run("--check", "--images=60", "--size=16", "--batch-size=8")
    assert "fastpipe: augmentation is the same for any number of workers" in said
    digests = re.findall(r"^fastpipe, \d workers: (\w+)$", said, re.MULTILINE)
    assert len(digests) == 4
    assert len(set(digests)) == 1


def test_memory_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    said = run(f"--memory={picture}", "--most-workers=1", "--images=40", "--size=16", "--batch-size=8", "--epochs=1")
    assert len(re.findall(r"workers: [\d,]+ MB at most", said)) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
