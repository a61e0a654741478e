"""Selects a random forest by grid search, cross-validated on random samples of a CSV file that fill several devices.

    python examples/forests.py run/                                  # 200,000 rows; two samples in plain memory
    python examples/forests.py run/ --devices cuda:0 cuda:1          # fills GPUs with as many rows as fit
    python examples/forests.py run/ --compare                        # also trains one after another, draws forests.svg

The file is read once, and each device receives different rows. One thread per device trains the forests of all grid
points. No row is copied: a fold is a set of row indices on the device, and each row has the weight 0 or 1. XGBoost
compresses the rows once per fold, and all forests of the fold share this matrix. Each fold is on one device, so all
grid points are compared on the same rows.

The example prints the accuracy of each grid point in each fold. Then it trains the best forest, refills the devices
with unseen rows, and prints its accuracy on them beside that of the best possible classifier.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xgboost

import fastpipe.cuda

FEATURES = [f"x{i}" for i in range(8)]
NOISE = 0.5
GRID = {"max_depth": [4, 8], "colsample_bynode": [0.5, 1.0], "min_child_weight": [1, 20]}
POINTS = [dict(zip(GRID, point, strict=True)) for point in itertools.product(*GRID.values())]


class Score(NamedTuple):
    """The accuracy of a forest on its fold, and the seconds since the search began."""

    point: int
    fold: int
    accuracy: float
    seconds: float


def signal(x: Any) -> Any:
    """Returns the quantity that, with noise, decides the class of each row."""
    return 2 * np.sin(2 * x[:, 0]) + x[:, 1] + abs(x[:, 2]) - 1


def make(path: Path, rows: int) -> None:
    """Writes a file with two classes. Rows are sorted, as logs are sorted by time."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-2, 2, (rows, len(FEATURES)))
    y = signal(x) + NOISE * draw.standard_normal(rows)
    table = np.column_stack([x, y > 0])[np.argsort(y)]
    np.savetxt(path, table, fmt="%.6g", delimiter=",", header=",".join([*FEATURES, "class"]), comments="")


def train(matrix: xgboost.QuantileDMatrix, point: dict[str, Any], device: str, trees: int, threads: int) -> Any:
    """Trains a random forest. Each tree uses a different sample of the rows and columns."""
    forest = {
        "objective": "binary:logistic",
        "num_parallel_tree": trees,
        "subsample": 0.63,
        "learning_rate": 1,
        "tree_method": "hist",
        "device": device,
        "nthread": threads,
    }
    return xgboost.train(forest | point, matrix, num_boost_round=1)


def accuracy(predicted: Any, classes: Any) -> float:
    """Returns the fraction of rows whose class is predicted."""
    return float(((predicted > 0.5) == (classes > 0.5)).mean())


def search(table: Any, folds: list[int], options: argparse.Namespace, threads: int, began: float) -> list[Score]:
    """Trains the forests of all grid points on a device, for some of the folds."""
    values, classes, device, found = table.values, table.values[:, -1], str(table.device), []
    for fold, (training, testing) in enumerate(table.folds(options.folds, seed=1)):
        if fold not in folds:
            continue
        weights = np.zeros_like(classes)  # On the device, as `classes` is.
        weights[training] = 1
        matrix = xgboost.QuantileDMatrix(values[:, :-1], classes, weight=weights, nthread=threads)
        for number, point in enumerate(POINTS):
            predicted = train(matrix, point, device, options.trees, threads).predict(matrix)
            known = classes if device == "cpu" else classes.get()
            chosen = testing if device == "cpu" else testing.get()
            score = accuracy(predicted[chosen], known[chosen])
            found.append(Score(number, fold, score, time.perf_counter() - began))
    return found


def run(filled: Any, options: argparse.Namespace, *, together: bool) -> list[Score]:
    """Searches the grid on all devices, with a thread for each, or one device after another."""
    began = time.perf_counter()
    threads = max(options.threads // len(filled), 1) if together else options.threads
    shares = [list(range(number, options.folds, len(filled))) for number in range(len(filled))]
    with ThreadPoolExecutor(len(filled) if together else 1) as pool:
        found = pool.map(lambda table, folds: search(table, folds, options, threads, began), filled, shares)
        return sorted(itertools.chain.from_iterable(found), key=lambda score: score.seconds)


def draw(searches: dict[str, list[Score]], path: Path) -> None:
    """Draws how many forests are done after how many seconds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fastpipe"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, scores in searches.items():
        axes.step([0, *(score.seconds for score in scores)], range(len(scores) + 1), where="post", label=name)
    axes.set(xlabel="seconds", ylabel="forests trained and tested", xlim=(0, None), ylim=(0, None))
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Runs the grid search and writes the results to `forests.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], help="default: cpu cpu")
    parser.add_argument("--rows", type=int, help="rows on each device; default: 20,000, or all that fit on GPUs")
    parser.add_argument("--file-rows", type=int, default=200_000)
    parser.add_argument("--trees", type=int, default=50)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of XGBoost on the CPU")
    parser.add_argument("--compare", action="store_true", help="also train one after another, and draw both")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True, parents=True)
    path = arguments.folder / "rows.csv"
    if not path.exists():
        make(path, arguments.file_rows)
    gpus = [device for device in arguments.devices if device != "cpu"]
    rows = arguments.rows or (None if len(gpus) == len(arguments.devices) else 20_000)
    framework = "cupy" if gpus else None  # XGBoost reads CuPy arrays on a GPU.
    filled = fastpipe.cuda.fill(path, arguments.devices, rows=rows, order="F", framework=framework, seed=7)
    print(f"{len(filled[0])} of the file's rows are on each of {', '.join(str(table.device) for table in filled)}")
    print(filled.explain())

    searches = {"a thread per device": run(filled, arguments, together=True)}
    if arguments.compare:
        searches["one after another"] = run(filled, arguments, together=False)
        draw(searches, arguments.folder / "forests.svg")
    scores = searches["a thread per device"]
    by_fold = np.full((len(POINTS), arguments.folds), math.nan)
    for score in scores:
        by_fold[score.point, score.fold] = score.accuracy
    titles = [*GRID, *(f"fold {fold}" for fold in range(arguments.folds)), "mean", "deviation"]
    print(" | ".join(titles))
    for point, found in zip(POINTS, by_fold, strict=True):
        cells = [*map(str, point.values()), *(f"{value:.4f}" for value in (*found, found.mean(), found.std()))]
        print(" | ".join(cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True)))
    for name, search_scores in searches.items():
        print(f"{name}: {len(search_scores)} forests in {search_scores[-1].seconds:.1f} s")

    best, table = int(by_fold.mean(axis=1).argmax()), filled[0]
    matrix = xgboost.QuantileDMatrix(table.values[:, :-1], table.values[:, -1])
    forest = train(matrix, POINTS[best], str(table.device), arguments.trees, arguments.threads)
    filled.refill()
    x, classes = table.values[:, :-1], table.values[:, -1]
    predicted = forest.inplace_predict(x)
    unseen, limit = accuracy(predicted, classes), accuracy(signal(x) > 0, classes)
    print(f"best forest on {len(table)} unseen rows: {unseen:.4f}; the best possible classifier: {limit:.4f}")
    report = {
        "points": [
            {**point, "accuracies": found.tolist(), "mean": found.mean(), "deviation": found.std()}
            for point, found in zip(POINTS, by_fold, strict=True)
        ],
        "seconds": {name: found[-1].seconds for name, found in searches.items()},
        "unseen": unseen,
        "best_possible": limit,
        "rows": len(table),
    }
    (arguments.folder / "forests.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
