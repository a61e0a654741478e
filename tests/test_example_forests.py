"""The random forests example: the forest chosen by cross-validation performs equally well on unseen rows."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastpipe.cuda

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "forests.py"

pytest.importorskip("xgboost")


def test_the_best_forest_generalizes(tmp_path: Path) -> None:
    options = ["--file-rows=20000", "--rows=4000", "--trees=10", "--folds=3", "--threads=1", "--compare"]
    command = [sys.executable, str(EXAMPLE), str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "4000 of the file's rows are on each of cpu, cpu" in done.stdout
    assert "24 forests" in done.stdout
    found = json.loads((tmp_path / "forests.json").read_text())
    assert len(found["points"]) == 8
    assert all(len(point["accuracies"]) == 3 for point in found["points"]), "each point is tested on each fold"
    mean = {
        (point["max_depth"], point["min_child_weight"], point["colsample_bynode"]): point["mean"]
        for point in found["points"]
    }
    # Deeper trees fit more of the structure.
    assert mean[8, 1, 1.0] > mean[4, 1, 1.0]
    # Half of the rows have either class, and the noise can't be predicted.
    assert 0.8 < found["unseen"] <= found["best_possible"] < 0.95
    assert abs(found["unseen"] - max(mean.values())) < 0.03
    assert found["seconds"].keys() == {"a thread per device", "one after another"}
    assert "<svg" in (tmp_path / "forests.svg").read_text()


def test_each_fold_is_trained_without_its_own_rows() -> None:
    """Labels that are random can't be predicted, unless the forests have seen the rows that test them."""
    spec = importlib.util.spec_from_file_location("forests", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    forests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forests)
    random = np.random.default_rng(3)
    values = random.random((3_000, 9), np.float32)
    values[:, -1] = random.integers(0, 2, len(values))
    reader = fastpipe.from_arrays({"x": values}, batch_size=100)
    filled = fastpipe.cuda.fill(reader, ["cpu", "cpu", "cpu"], rows=900, seed=1)
    scores = forests.run(filled, argparse.Namespace(folds=4, trees=5, threads=1), together=True)
    assert sorted((score.point, score.fold) for score in scores) == [(p, f) for p in range(8) for f in range(4)]
    assert abs(np.mean([score.accuracy for score in scores]) - 0.5) < 0.05
