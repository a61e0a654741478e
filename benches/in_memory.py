"""Compares shuffled batches of arrays in memory with `numpy.take` of the same permutation, on one thread.

NumPy gathers each column into preallocated memory (`out=`) with a precomputed permutation. fastpipe also computes the
permutation, and returns new arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import fastpipe
from harness import Bench, take_turns
from harness.data import drain

BATCH_SIZE = 1024
WANTED = {"float32[128] and a label": 0.8, "20 scalar columns": 0.7}


def cases(rows: int) -> dict[str, dict[str, npt.NDArray[np.generic]]]:
    """Returns the arrays of each case."""
    draw = np.random.default_rng(1)
    kinds = ("int32", "float32", "int64", "float64", "uint8")
    return {
        "float32[128] and a label": {
            "x": draw.random((rows // 4, 128), "float32"),
            "label": draw.integers(0, 2, rows // 4, "int8"),
        },
        "20 scalar columns": {f"c{i}": draw.integers(0, 100, rows * 4).astype(kinds[i % 5]) for i in range(20)},
    }


def numpy_pass(arrays: dict[str, npt.NDArray[np.generic]]) -> Callable[[], None]:
    """Returns a function that gathers all batches of a permutation with NumPy."""
    order = np.random.default_rng(2).permutation(len(next(iter(arrays.values()))))
    out = {name: np.empty((BATCH_SIZE, *array.shape[1:]), array.dtype) for name, array in arrays.items()}

    def run() -> None:
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            for name, array in arrays.items():
                # In other modes, NumPy gathers into a temporary buffer first.
                np.take(array, rows, axis=0, out=out[name], mode="clip")

    return run


def main(bench: Bench) -> None:
    """Measures both cases."""
    row = bench.table("arrays", "fastpipe, ms|,.1f", "numpy.take, ms|,.1f", "times as fast|,.2f", "wanted|g", "met")
    for name, arrays in cases(bench.args.rows).items():
        options: dict[str, Any] = {"shuffle": True, "seed": 7, "drop_last": True, "num_threads": 1, "epochs": 1}
        reader = fastpipe.from_arrays(arrays, batch_size=BATCH_SIZE, **options)
        turns = take_turns({"ours": partial(drain, reader), "numpy": numpy_pass(arrays)}, bench.rounds)
        mine, numpys = (turns.median(side) * 1e3 for side in ("ours", "numpy"))
        met = bench.bound(name, numpys / mine, least=WANTED[name])
        row(name, mine, numpys, numpys / mine, WANTED[name], met)


if __name__ == "__main__":
    Bench("in_memory", __doc__, rows=(500_000, 50_000), packages=("numpy",)).run(main)
