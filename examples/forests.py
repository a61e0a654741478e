"""Chooses a random forest: a grid of parameters, cross-validated on random rows of a CSV file that fill one device.

    python examples/forests.py run/                       # makes a file of 200,000 rows, and measures
    python examples/forests.py run/ --device cuda:0       # on a GPU, as many rows as fit
    python examples/forests.py run/ --rows 50000 --folds 10

The file is read once. Folds are index sets on the device, so all forests of the grid are trained from the rows that lie
there. It prints, for each point of the grid, the mean squared error over folds and how far folds differ, then how the
best forest does on rows that it has never seen: those of a refill.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

import fastpipe.cuda

FEATURES = [f"x{i}" for i in range(8)]
NOISE = 0.5
GRID = {"max_depth": [4, 8], "colsample_bynode": [0.5, 1.0], "min_child_weight": [1, 20]}


def make(path: Path, rows: int) -> None:
    """Writes a file whose target is known but for noise. It is sorted by target, as logs are by time."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-2, 2, (rows, len(FEATURES)))
    y = 2 * np.sin(2 * x[:, 0]) + x[:, 1] + np.abs(x[:, 2]) + NOISE * draw.standard_normal(rows)
    table = np.column_stack([x, y])[np.argsort(y)]
    np.savetxt(path, table, fmt="%.6g", delimiter=",", header=",".join([*FEATURES, "y"]), comments="")


def train(values: Any, rows: Any, parameters: dict[str, Any], device: str, trees: int) -> xgboost.Booster:
    """A random forest of XGBoost's: trees side by side, each of other rows and columns."""
    matrix = xgboost.QuantileDMatrix(values[rows][:, :-1], values[rows][:, -1])
    forest = {
        "num_parallel_tree": trees,
        "subsample": 0.63,
        "learning_rate": 1,
        "tree_method": "hist",
        "device": device,
    }
    return xgboost.train(forest | parameters, matrix, num_boost_round=1)


def error(booster: xgboost.Booster, values: Any, rows: Any) -> float:
    """The mean squared error."""
    predicted = booster.inplace_predict(values[rows][:, :-1])
    return float(((predicted - values[rows][:, -1]) ** 2).mean())


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="that fill the device; by default 20,000, and on a GPU all that fit")
    parser.add_argument("--file-rows", type=int, default=200_000)
    parser.add_argument("--trees", type=int, default=50)
    parser.add_argument("--folds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True, parents=True)
    path = arguments.folder / "rows.csv"
    if not path.exists():
        make(path, arguments.file_rows)
    rows = arguments.rows or (20_000 if arguments.device == "cpu" else None)
    filled = fastpipe.cuda.fill(path, [arguments.device], rows=rows, order="F", framework=framework(arguments), seed=7)
    values = filled[0].values
    print(f"{len(filled[0])} of the file's rows lie on {filled[0].device}")
    print(filled.explain())
    measured = []
    for point in itertools.product(*GRID.values()):
        parameters = dict(zip(GRID, point, strict=True))
        started = time.perf_counter()
        errors = [
            error(train(values, training, parameters, arguments.device, arguments.trees), values, testing)
            for training, testing in filled[0].folds(arguments.folds, seed=1)
        ]
        seconds = time.perf_counter() - started
        measured.append({**parameters, "error": np.mean(errors), "deviation": np.std(errors), "seconds": seconds})
        print(f"{parameters}: {np.mean(errors):.4f} +- {np.std(errors):.4f} in {seconds:.1f} s")
    best = min(measured, key=lambda found: found["error"])
    booster = train(values, slice(None), {name: best[name] for name in GRID}, arguments.device, arguments.trees)
    filled.refill()
    unseen = error(booster, values, slice(None))
    print(f"the best on {len(filled[0])} rows that it has never seen: {unseen:.4f}; noise alone is {NOISE**2:.4f}")
    found = {"grid": measured, "unseen": unseen, "rows": len(filled[0])}
    (arguments.folder / "forests.json").write_text(json.dumps(found, indent=2))


def framework(arguments: argparse.Namespace) -> Any:
    """CuPy's arrays are what XGBoost takes on a GPU."""
    return None if arguments.device == "cpu" else "cupy"


if __name__ == "__main__":
    main()
