"""Builds and releases depend only on pinned versions, which can't change later."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text("utf-8"))
    assert used
    for action, comment in used:
        if action.startswith("./"):
            continue
        assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+@[0-9a-f]{40}", action), f"{action} is mutable: pin it to a commit"
        assert re.fullmatch(r" # v\d+(\.\d+)+", comment), f"add the version of {action} as a comment"


def test_nothing_is_published_untested_or_unlocked() -> None:
    release = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    publish = release[release.index("\n  publish:") :]
    needed = re.search(r"needs: \[(.*)\]", publish)
    assert needed
    assert {"tests", "wheels", "sdist"} <= set(needed[1].split(", "))
    assert re.search(r"\n  tests:\n(    .*\n)*?    uses: ./.github/workflows/ci.yml\n", release)
    assert "workflow_call:" in (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    builds = re.findall(r"args: --release.*", release)
    assert builds
    assert all("--locked" in build for build in builds)
    assert "MATURIN_PEP517_ARGS=--locked python -m pip install dist/*.tar.gz" in release
    assert "THIRD-PARTY-LICENSES" in release


def test_test_dependencies_are_not_shipped() -> None:
    for manifest in (ROOT / "rust").glob("*/Cargo.toml"):
        dependencies = tomllib.loads(manifest.read_text("utf-8")).get("dependencies", {})
        assert not {"apache-avro", "criterion", "proptest"} & dependencies.keys(), manifest
