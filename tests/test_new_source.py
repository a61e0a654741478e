"""Adding a source changes only its own crate and files, and a few lines where sources are listed.

`toy_source/rust.patch` adds a source of square numbers. If it no longer applies, apply it by hand and regenerate it
with `git diff --cached -U1 -- . ':!Cargo.lock'`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCH = Path(__file__).with_name("toy_source") / "rust.patch"

# Maximum number of lines added to existing files: members and dependencies of the workspace, one line or one class in
# each of the bindings and stubs, and a line that says what may import the source.
LISTS = {
    "Cargo.toml": 2,
    "rust/fastpipe-python/Cargo.toml": 1,
    "rust/fastpipe-python/src/lib.rs": 1,
    "rust/fastpipe-python/src/sources/mod.rs": 1,
    "python/fastpipe/_fastpipe.pyi": 5,
    "python/fastpipe/__init__.pyi": 1,
    "pyproject.toml": 1,
}
OWN = {
    "rust/fastpipe-toy/Cargo.toml",
    "rust/fastpipe-toy/src/lib.rs",
    "rust/fastpipe-python/src/sources/toy.rs",
    "python/fastpipe/toy.py",
}

PROGRAM = """
import numpy as np
import fastpipe

make = lambda **options: fastpipe.read_squares(2500, batch_size=64, shuffle=True, seed=3, shuffle_buffer=500, **options)
whole = [batch["square"].tolist() for batch in make()]
assert sorted(sum(whole, [])) == [i * i for i in range(2500)]
reader = make(num_threads=3)
batches = iter(reader)
for _ in range(10):
    next(batches)
again = make()
again.load_state_dict(reader.state_dict())
assert [batch["square"].tolist() for batch in again] == whole[10:]
assert again.locate(3, 4, epoch=0).number ** 2 == whole[3][4]
"""


def test_a_source_touches_its_own_files_and_the_lists() -> None:
    files = {}
    for part in re.split(r"^diff --git ", PATCH.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        name = re.match(r"a/(\S+)", part)
        assert name is not None
        body = part.split("\n@@", 1)[1]
        assert not re.search(r"^-", body, re.MULTILINE), f"{name[1]}: existing lines must not change"
        files[name[1]] = ("new file mode" in part, len(re.findall(r"^\+", body, re.MULTILINE)))
    assert {name for name, (new, _) in files.items() if new} == OWN
    assert {name: lines for name, (new, lines) in files.items() if not new} == LISTS


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_patch_applies() -> None:
    done = subprocess.run(["git", "apply", "--check", str(PATCH)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("FASTPIPE_TOY" not in os.environ, reason="builds the extension: make soak")
@pytest.mark.timeout(3600)
def test_the_new_source_works(tmp_path: Path) -> None:
    tree = tmp_path / "fastpipe"
    ignored = shutil.ignore_patterns("target", ".venv", ".git", "*.so", ".*_cache", ".hypothesis", ".envs", ".cache")
    shutil.copytree(ROOT, tree, ignore=ignored)
    subprocess.run(["git", "apply", str(PATCH)], cwd=tree, check=True)
    target = os.environ.get("CARGO_TARGET_DIR", str(tree / "target"))
    env = os.environ | {"PYO3_PYTHON": sys.executable, "CARGO_TARGET_DIR": target}
    subprocess.run(["cargo", "build", "-p", "fastpipe-python"], cwd=tree, env=env, check=True)
    shutil.copy(Path(target) / "debug/lib_fastpipe.so", tree / "python/fastpipe/_fastpipe.abi3.so")
    env["PYTHONPATH"] = str(tree / "python")
    subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, timeout=300)
