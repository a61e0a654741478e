"""Compares `Reader.describe` with NumPy and Arrow's compute functions.

Each describes one column in memory: count, extremes, mean, standard deviation, and five quantiles of numbers; value
counts of integers and text. The libraries take turns, and their results are compared.

NumPy and Arrow process the whole column at once. `describe` reads batches, so it also works for files that don't fit
into memory. NumPy computes exact quantiles by partitioning the values, Arrow uses a t-digest, and fastpipe a KLL
sketch. Arrow's functions run sequentially on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import fastpipe
from harness import Bench, take_turns

BATCH = 16_384
FRACTIONS = [0.01, 0.25, 0.5, 0.75, 0.99]
DISTINCT = 1_000
MOST = 2.0
"""Target: maximum ratio of fastpipe's time to that of the faster peer."""


class Found(NamedTuple):
    """Statistics of a column. A statistic that doesn't apply to its type is 0 or empty."""

    values: int
    counts: dict[Any, int]
    mean: float = 0.0
    std: float = 0.0
    quantiles: Sequence[float] = ()


def by_fastpipe(column: pa.Array, batch_size: int) -> Found:
    """Describes a column with `Reader.describe`."""
    found = fastpipe.from_arrow(pa.table({"x": column}), batch_size=batch_size).describe()["x"]
    counts = {} if found.kind == "float" else found.value_counts()
    if found.kind == "string":
        return Found(found.count, counts)
    return Found(found.count, counts, found.mean, found.std, found.quantile(FRACTIONS))


def by_numpy(column: pa.Array) -> Found:
    """Describes a column with NumPy."""
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "O":
        values = values.astype("U")
    counts: dict[Any, int] = {}
    if values.dtype.kind != "f":
        counts = dict(zip(*(each.tolist() for each in np.unique(values, return_counts=True)), strict=True))
    if values.dtype.kind == "U":
        return Found(len(values), counts)
    finite = int(np.isfinite(values).sum())
    values.min(), values.max()
    quantiles = np.quantile(values, FRACTIONS).tolist()
    return Found(finite, counts, float(values.mean(dtype="f8")), float(values.std(dtype="f8")), quantiles)


def by_arrow(column: pa.Array) -> Found:
    """Describes a column with Arrow's compute functions."""
    counts: dict[Any, int] = {}
    if not pa.types.is_floating(column.type):
        found = pc.value_counts(column)
        counts = dict(zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True))
    if pa.types.is_string(column.type):
        return Found(pc.count(column).as_py(), counts)
    pc.min_max(column)
    quantiles = pc.tdigest(column, FRACTIONS).to_pylist()
    return Found(pc.count(column).as_py(), counts, pc.mean(column).as_py(), pc.stddev(column).as_py(), quantiles)


def columns(rows: int) -> dict[str, pa.Array]:
    """Returns one column of each type."""
    draw = np.random.default_rng(1)
    keys = draw.integers(0, DISTINCT, rows)
    texts = pa.array([f"value {key}" for key in range(DISTINCT)])
    return {
        "float32": pa.array(draw.normal(3.0, 2.0, rows).astype("float32")),
        "float64": pa.array(draw.normal(3.0, 2.0, rows)),
        "int64, 1,000 different": pa.array(keys),
        "text, 1,000 different": texts.take(pa.array(keys)),
    }


def check(name: str, mine: Found, other: Found) -> None:
    """Raises an error if two descriptions differ by more than the tolerance."""
    same = mine.values == other.values and mine.counts == other.counts
    same = same and np.allclose(mine[2:4], other[2:4], rtol=1e-6, atol=0)
    if not same or not np.allclose(mine.quantiles, other.quantiles, rtol=0, atol=0.25 * mine.std):
        raise RuntimeError(f"descriptions of {name} differ: {mine[2:]} and {other[2:]}")


def main(bench: Bench) -> None:
    """Measures each column."""
    numbers = ("fastpipe, ms|,.0f", "NumPy|,.0f", "Arrow|,.0f", "times as long as the quicker one|,.2f")
    row = bench.table("column", *numbers, "met")
    for name, column in columns(bench.args.rows).items():
        ways: dict[str, Callable[[], Found]] = {
            "fastpipe": partial(by_fastpipe, column, BATCH),
            "NumPy": partial(by_numpy, column),
            "Arrow": partial(by_arrow, column),
        }
        turns = take_turns(ways, bench.rounds)
        found = {who: turns.turns[who][0].result for who in ways}
        for who in ("NumPy", "Arrow"):
            check(name, found["fastpipe"], found[who])
        longer = max(turns.ratio("fastpipe", who).median for who in ("NumPy", "Arrow"))
        met = bench.target(f"describe of {name}, beside the quicker one", longer, most=MOST)
        row(name, *(turns.median(who) * 1e3 for who in ways), longer, met)


if __name__ == "__main__":
    Bench("describe", __doc__, packages=("numpy", "pyarrow"), rows=(4_000_000, 400_000)).run(main)
