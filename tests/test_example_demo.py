"""The demo: its model learns, its runs resume exactly, and it accepts the user's files."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import fastavro
import numpy as np
import pytest

import samples

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "demo.py"

for module in ("matplotlib", "sklearn"):
    pytest.importorskip(module)


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def assert_compared(said: str, folder: Path) -> None:
    for reader in ("fastavro", "fastpipe"):
        assert re.search(rf"^{reader} +[\d,]+ records/s, ", said, re.MULTILINE)
    assert re.search(r"^fastpipe is [\d.]+ times as fast\.$", said, re.MULTILINE)
    assert (folder / "fastpipe-demo.png").read_bytes().startswith(b"\x89PNG")


def test_it_learns_and_resumes_exactly(tmp_path: Path) -> None:
    done = run("--rows=12000", "--epochs=3", f"--out={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    epochs = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+) ", done.stdout, re.MULTILINE)
    losses, accuracies = [float(loss) for _, loss, _ in epochs], [float(accuracy) for _, _, accuracy in epochs]
    assert len(epochs) == 3
    assert losses == sorted(losses, reverse=True)
    assert accuracies[-1] > 0.8
    assert "Interrupted at step 30 of epoch 3 and resumed: the same losses and weights" in done.stdout
    assert_compared(done.stdout, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["digits-test.avro", "digits-train.avro", "fastpipe-demo.png"]


def test_it_reads_the_users_files(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [samples.blocks_of(20_000), samples.blocks_of(5000)])
    done = run(*data.paths, f"--out={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Files: 2, records: 25,000, features: 8" in done.stdout
    assert re.search(r"^Interrupted at step \d+ and resumed: the same batches", done.stdout, re.MULTILINE)
    assert_compared(done.stdout, tmp_path)


@pytest.mark.parametrize("content", [None, b"id,name\n1,a\n"], ids=["missing", "CSV"])
def test_unreadable_files_are_reported_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.avro"
    if content is not None:
        path.write_bytes(content)
    done = run(path, f"--out={tmp_path}")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"demo: .*x\.avro.*\n", done.stderr)


def test_digits_are_the_same_each_time(demo: ModuleType, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("train", "test", "train2", "test2")]
    demo.write_digits(*paths[:2], 2000)
    demo.write_digits(*paths[2:], 2000)
    assert paths[0].read_bytes() == paths[2].read_bytes()
    assert paths[1].read_bytes() == paths[3].read_bytes()


def test_no_test_digit_is_trained_on(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "augment", lambda pixels, rng: pixels)  # Without augmentation, copies can be recognized.
    demo.write_digits(tmp_path / "train", tmp_path / "test", 3000)
    digits = []
    for name in ("train", "test"):
        with (tmp_path / name).open("rb") as file:
            digits.append(list(fastavro.reader(file)))
    train, test = digits
    assert (len(train), len(test)) == (3000, demo.TEST_ROWS)
    assert np.all(np.diff([row["label"] for row in train]) >= 0)
    assert not {tuple(row["pixels"]) for row in train} & {tuple(row["pixels"]) for row in test}


@pytest.mark.parametrize("option", ["--epochs=0", "--rows=399"])
def test_too_little_to_train_on(option: str, tmp_path: Path) -> None:
    done = run(option, f"--out={tmp_path / 'out'}")
    assert done.returncode == 2
    assert "--epochs must be at least 1 and --rows at least 400" in done.stderr
    assert not (tmp_path / "out").exists()
