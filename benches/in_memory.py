"""Compares shuffled batches of arrays in memory with `numpy.take` of the same permutation, on one thread.

    python benches/in_memory.py [--rows 500000] [--rounds 7]

NumPy gathers each column of a batch to memory that it has (`out=`), with a permutation that it is given. fastpipe also
makes the permutation, and hands out arrays of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import fastpipe

BATCH_SIZE = 1024
WANTED = {"float32[128] and a label": 0.8, "20 scalar columns": 0.7}


def cases(rows: int) -> dict[str, dict[str, npt.NDArray[np.generic]]]:
    """The arrays of each case."""
    draw = np.random.default_rng(1)
    kinds = ("int32", "float32", "int64", "float64", "uint8")
    return {
        "float32[128] and a label": {
            "x": draw.random((rows // 4, 128), "float32"),
            "label": draw.integers(0, 2, rows // 4, "int8"),
        },
        "20 scalar columns": {f"c{i}": draw.integers(0, 100, rows * 4).astype(kinds[i % 5]) for i in range(20)},
    }


def numpy_pass(arrays: dict[str, npt.NDArray[np.generic]], order: npt.NDArray[np.int64]) -> Callable[[], None]:
    """Gathers all batches of an order with NumPy."""
    out = {name: np.empty((BATCH_SIZE, *array.shape[1:]), array.dtype) for name, array in arrays.items()}

    def run() -> None:
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            for name, array in arrays.items():
                # With another mode NumPy gathers to a buffer of its own first.
                np.take(array, rows, axis=0, out=out[name], mode="clip")

    return run


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print("| arrays | fastpipe, ms | numpy.take, ms | times as fast | wanted |")
    print("|---|---|---|---|---|")
    reached = True
    for name, arrays in cases(arguments.rows).items():
        reader = fastpipe.from_arrays(
            arrays, batch_size=BATCH_SIZE, shuffle=True, seed=7, drop_last=True, num_threads=1, epochs=1
        )
        rows = len(next(iter(arrays.values())))
        order = np.random.default_rng(2).permutation(rows)
        theirs = numpy_pass(arrays, order)

        def ours(reader: fastpipe.Reader = reader) -> None:
            for _ in reader:
                pass

        sides: list[tuple[Callable[[], None], list[float]]] = [(ours, []), (theirs, [])]
        for turn in range(arguments.rounds + 1):
            for run, times in sides if turn % 2 else sides[::-1]:
                began = time.perf_counter()
                run()
                if turn:  # The first one makes both ready.
                    times.append(time.perf_counter() - began)
        mine, numpys = (statistics.median(times) * 1e3 for _, times in sides)
        reached &= numpys / mine >= WANTED[name]
        print(f"| {name} | {mine:.1f} | {numpys:.1f} | {numpys / mine:.2f} | {WANTED[name]} |", flush=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
