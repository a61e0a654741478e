"""The random forests example: the forest chosen by cross-validation performs equally well on unseen rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "forests.py"

pytest.importorskip("xgboost")


def test_the_best_forest_generalizes(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), str(tmp_path), "--file-rows=30000", "--rows=6000", "--trees=20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "6000 of the file's rows are on cpu" in done.stdout
    found = json.loads((tmp_path / "forests.json").read_text())
    assert len(found["grid"]) == 8
    errors = {
        (point["max_depth"], point["min_child_weight"], point["colsample_bynode"]): point["error"]
        for point in found["grid"]
    }
    # Deeper trees fit more of the structure.
    assert errors[8, 1, 1.0] < errors[4, 1, 1.0]
    # The target's variance is above 4, and the noise can't be predicted.
    assert 0.25 < found["unseen"] < 0.6
    assert abs(found["unseen"] - min(errors.values())) < 0.1
