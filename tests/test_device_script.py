"""The benchmark script for machines with a GPU, run over host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHES = Path(__file__).parents[1] / "benches"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHES))
    import device

    return device


def test_all_parts_run_over_host_memory(tmp_path: Path, device: Any) -> None:
    out = tmp_path / "device.json"
    command = ["bash", str(BENCHES / "device.sh"), "--wheels", str(tmp_path), "--dry-run", "--out", str(out)]
    ended = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    found = json.loads(out.read_text())
    assert found["failures"] == {}
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert list(found["figures"]) == [part.name for part in device.PARTS]
    assert found["dry_run"]
    # The tables list each figure.
    text = "\n".join(device.table(found))
    assert all(f"| {name} |" in text for figures in found["figures"].values() for name in figures)


@pytest.mark.parametrize(
    ("program", "figures", "failure"),
    [
        ('print(\'figure ["x", {"y": 1}]\')', {"x": {"y": 1}}, None),
        ("print('figure [\"x\", {\"y\": 1}]'); raise SystemExit('no such GPU')", {"x": {"y": 1}}, "no such GPU"),
        ('print(\'figure ["x", {"y": 1}]\', flush=True); import time; time.sleep(600)', {"x": {"y": 1}}, "more than"),
        ("import os; os.abort()", None, "exit status -6"),
        ("print('nothing')", None, "it printed no figure"),
    ],
)
def test_a_failing_part_does_not_affect_others(device: Any, program: str, figures: Any, failure: str | None) -> None:
    results = device.Results(dry_run=True)
    limit = 5 if "sleep" in program else 60
    device.run(device.Part("part", limit), [sys.executable, "-c", program], limit, results)
    assert results.figures.get("part") == figures
    assert failure in results.failures["part"] if failure else results.failures == {}


def test_parts_fit_the_budget(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import device_parts

    assert [part.name for part in device.PARTS] == list(device_parts.PARTS)
    assert device.BUDGET < 480
