"""CSV files with rows of very different lengths, and checks of samples drawn from them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

scipy_stats = pytest.importorskip("scipy.stats")


def lengths(count: int, seed: int) -> np.ndarray:
    """Returns random row lengths. One row in ten is about 20 times as long as the other rows."""
    draw = np.random.default_rng(seed)
    return np.where(draw.random(count) < 0.1, 20, 1) * draw.integers(8, 17, count)


def write(path: Path, count: int, seed: int = 0, *, ascending: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Writes a file of rows of random lengths. Returns the length of each row and of the row before it."""
    size = np.sort(lengths(count, seed)) if ascending else lengths(count, seed)
    path.write_text("i,pad\n" + "".join(f"{i},{'x' * n}\n" for i, n in enumerate(size)))
    return size, np.r_[0, size[:-1]]


def by_length(drawn: np.ndarray, size: np.ndarray) -> float:
    """Returns the p-value of the hypothesis that the draws are uniform over the deciles of row length."""
    ranks = np.argsort(np.argsort(size, kind="stable"))
    counts = np.bincount(ranks[drawn] * 10 // len(size), minlength=10)
    return float(scipy_stats.chisquare(counts).pvalue)


def naive_rows(size: np.ndarray, count: int) -> np.ndarray:
    """Returns the rows that contain uniformly drawn bytes of the file, which favors long rows."""
    ends = np.cumsum(size + np.char.str_len(np.arange(len(size)).astype(str)) + 2)
    return np.searchsorted(ends, np.random.default_rng(1).integers(0, ends[-1], count))


def starts_of(data: bytes) -> list[int]:
    """Returns the byte offset at which each row starts according to Python's csv module. The text must be ASCII."""
    at, starts = 0, []

    def lines() -> object:
        nonlocal at
        for line in io.StringIO(data.decode(), newline=""):
            at += len(line)
            yield line

    before = 0
    for row in csv.reader(lines()):  # type: ignore[arg-type]
        if row:
            starts.append(before)
        before = at
    return starts
