"""Selects a random forest by grid search, cross-validated on a random sample of a CSV file that fills one device.

    python examples/forests.py run/                       # writes a file of 200,000 rows and searches on the CPU
    python examples/forests.py run/ --device cuda:0       # fills a GPU with as many rows as fit
    python examples/forests.py run/ --rows 50000 --folds 10

The file is read once. Folds are sets of row indices on the device, so all forests train on the same copy of the rows.
For each point of the grid, the example prints the mean and the standard deviation of the squared error over the folds.
It then refills the device with unseen rows and prints the error of the best forest on them.
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
    """Writes a file with a known target function plus noise. Rows are sorted by target, as logs are sorted by time."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-2, 2, (rows, len(FEATURES)))
    y = 2 * np.sin(2 * x[:, 0]) + x[:, 1] + np.abs(x[:, 2]) + NOISE * draw.standard_normal(rows)
    table = np.column_stack([x, y])[np.argsort(y)]
    np.savetxt(path, table, fmt="%.6g", delimiter=",", header=",".join([*FEATURES, "y"]), comments="")


def train(values: Any, rows: Any, parameters: dict[str, Any], device: str, trees: int) -> xgboost.Booster:
    """Trains a random forest with XGBoost. Each tree uses a different sample of rows and columns."""
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
    """Returns the mean squared error of the predictions for the rows."""
    predicted = booster.inplace_predict(values[rows][:, :-1])
    return float(((predicted - values[rows][:, -1]) ** 2).mean())


def main() -> None:
    """Runs the grid search and writes the results to `forests.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="rows on the device; default: 20,000, or all that fit on a GPU")
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
    print(f"{len(filled[0])} of the file's rows are on {filled[0].device}")
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
    print(f"best forest on {len(filled[0])} unseen rows: {unseen:.4f}; the noise variance is {NOISE**2:.4f}")
    found = {"grid": measured, "unseen": unseen, "rows": len(filled[0])}
    (arguments.folder / "forests.json").write_text(json.dumps(found, indent=2))


def framework(arguments: argparse.Namespace) -> Any:
    """Returns the array framework to use. XGBoost reads CuPy arrays on a GPU."""
    return None if arguments.device == "cpu" else "cupy"


if __name__ == "__main__":
    main()
