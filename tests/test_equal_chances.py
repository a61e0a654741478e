"""Each row is equally likely by every method that draws rows.

Over 200 seeds, rows are counted by deciles of their length, of the length of the previous row, and of their position in
the file. Files are written in runs of rows of similar length, so that some chunks have 100 times the rows of other
chunks. FASTPIPE_CHANCES sets the number of seeds. `make soak` uses 2,000.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import fastpipe
import fastpipe.cuda
from fastpipe._reader.sampling import rows_of_sample

scipy_stats = pytest.importorskip("scipy.stats")

SEEDS = range(int(os.environ.get("FASTPIPE_CHANCES", "200")))


class File(NamedTuple):
    """A CSV file and facts about its rows."""

    path: Path
    data: bytes
    reader: fastpipe.Reader
    lengths: np.ndarray
    """The bytes of each row."""
    groups: np.ndarray
    """The decile of each row by its length, by the length of the previous row, and by its position: `[3, rows]`."""
    drawn: int
    """Number of rows in a sample."""

    @property
    def rows(self) -> int:
        """Number of rows in the file."""
        return self.groups.shape[1]

    def strata(self, size: int) -> np.ndarray:
        """Returns strata of `size` neighboring rows each."""
        return np.arange(self.rows) // size


def written(path: Path, rows: int, run: int, longest: float, drawn: int) -> File:
    draw = np.random.default_rng(3)
    scale = np.repeat(longest ** draw.random(-(-rows // run)), run)[:rows]
    sizes = (scale * draw.uniform(1, 1.5, rows)).astype(int)
    lines = [f"{i},{'x' * size}\n" for i, size in enumerate(sizes)]
    path.write_text("i,pad\n" + "".join(lines))
    lengths = np.array(list(map(len, lines)))
    by = (lengths, np.r_[0, lengths[:-1]], np.arange(rows))
    deciles = [np.argsort(np.argsort(values, kind="stable")) * 10 // rows for values in by]
    reader = fastpipe.read_csv(path, columns=["i"], batch_size=64, num_threads=1)
    return File(path, path.read_bytes(), reader, lengths, np.array(deciles), drawn)


@pytest.fixture(scope="module", params=["few rows a chunk", "many rows a chunk"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> File:
    folder = tmp_path_factory.mktemp("chances")
    if request.param == "few rows a chunk":
        return written(folder / "few.csv", 400, 20, 6_000, 20)
    return written(folder / "many.csv", 10_000, 500, 400, 100)


def in_array(file: File, seed: int, **how: object) -> np.ndarray:
    """Returns the rows that `sample_csv` draws."""
    source = file.data if how.get("method") == "stream" else file.path
    options = {"columns": ["i"], "dtype": "int64", "num_threads": 1} | how
    return fastpipe.csv.sample_csv(source, file.drawn, seed=seed, **options).values[:, 0]  # type: ignore[arg-type]


def in_reader(file: File, seed: int, **how: object) -> np.ndarray:
    """Returns the rows that `sample` draws."""
    return rows_of_sample(file.reader.sample(file.drawn, seed=seed, **how))  # type: ignore[arg-type]


def in_strata(file: File, seed: int, size: int, **how: object) -> np.ndarray:
    return in_reader(file, seed, stratify=file.strata(size), **how)


def in_devices(file: File, seed: int, **how: object) -> np.ndarray:
    """Returns the rows of the second of two devices."""
    source = file.path if how.get("method") == "buffered" else file.reader
    options = {"columns": ["i"], "dtype": "int64", "memory_limit": "32MB"} | how
    filled = fastpipe.cuda.fill(source, ["cpu"] * 2, rows=file.drawn, seed=seed, **options)  # type: ignore[arg-type]
    return filled[1].values[:, 0]


ONE_BY_ONE: dict[str, Callable[[File, int], np.ndarray]] = {
    "sample": in_reader,
    "sample, part 2": lambda file, seed: in_reader(file, seed, part=2),
    "sample, replace": lambda file, seed: in_reader(file, seed, replace=True),
    "sample_csv": in_array,
    "sample_csv, strata": lambda file, seed: in_array(file, seed, stratify=file.strata(2)),
    "estimate": lambda file, seed: in_array(file, seed, method="estimate"),
    "stream": lambda file, seed: in_array(file, seed, method="stream"),
    "strata of 1": lambda file, seed: in_strata(file, seed, 1),
    "strata of 2": lambda file, seed: in_strata(file, seed, 2),
    "strata of 4": lambda file, seed: in_strata(file, seed, 4),
    "strata of 4, part 3": lambda file, seed: in_strata(file, seed, 4, part=3),
    "strata of 4, replace": lambda file, seed: in_strata(file, seed, 4, replace=True),
    "strata of 30": lambda file, seed: in_strata(file, seed, 30),
    "weights": lambda file, seed: in_reader(file, seed, weights=np.full(file.rows, 0.7)),
    "fill": in_devices,
}
IN_UNITS: dict[str, Callable[[File, int], np.ndarray]] = {
    "sample_csv": lambda file, seed: in_array(file, seed, method="block"),
    "sample_csv, part 2": lambda file, seed: in_array(file, seed, method="block", part=2),
    "fill": lambda file, seed: in_devices(file, seed, method="block"),
    "fill, share": lambda file, seed: in_devices(file, seed, method="block", share=0.3),
    "sample_csv, buffered": lambda file, seed: in_array(file, seed, method="buffered"),
    "sample_csv, buffered, whole cells": lambda file, seed: in_array(file, seed, method="buffered", share=1),
    "fill, buffered": lambda file, seed: in_devices(file, seed, method="buffered"),
}


def counted(file: File, draw: Callable[[File, int], np.ndarray]) -> np.ndarray:
    """Counts the drawn rows of each decile for each seed: `[3, seeds, 10]`."""
    drawn = [draw(file, seed) for seed in SEEDS]
    return np.array([[np.bincount(of[rows], minlength=10) for rows in drawn] for of in file.groups])


def least_t(counts: np.ndarray, expected: np.ndarray) -> float:
    """Returns the Bonferroni-corrected p-value of ten t-tests of the counts by seed.

    Rows of one draw are not independent, so each draw yields one count.
    """
    deviations = counts - expected
    # Counts that don't vary have a standard error of 0.
    error = np.maximum(deviations.std(0, ddof=1) / np.sqrt(len(counts)), 1e-12)
    t = deviations.mean(0) / error
    return float(2 * scipy_stats.t.sf(abs(t).max(), len(counts) - 1) * 10)


@pytest.mark.parametrize("how", ONE_BY_ONE)
def test_rows_drawn_one_by_one(file: File, how: str) -> None:
    for counts in counted(file, ONE_BY_ONE[how]):
        assert counts.sum() == len(SEEDS) * file.drawn
        assert scipy_stats.chisquare(counts.sum(0)).pvalue > 0.001


@pytest.mark.parametrize("how", IN_UNITS)
def test_rows_drawn_in_units(file: File, how: str) -> None:
    for counts in counted(file, IN_UNITS[how]):
        assert (counts.sum(1) == file.drawn).all()
        assert least_t(counts, np.full(10, file.drawn / 10)) > 0.001


def test_rows_drawn_by_weight(file: File) -> None:
    """Draws with replacement are proportional to weights, which don't depend on the length of rows."""
    weights = np.random.default_rng(5).gamma(0.5, size=file.rows)

    def weighted(file: File, seed: int) -> np.ndarray:
        return in_reader(file, seed, weights=weights, replace=True)

    for counts, of in zip(counted(file, weighted), file.groups, strict=True):
        expected = np.bincount(of, weights) / weights.sum() * counts.sum()
        assert scipy_stats.chisquare(counts.sum(0), expected).pvalue > 0.001


def at_bytes(file: File, seed: int) -> np.ndarray:
    """Draws the rows that contain random bytes, which favors long rows."""
    ends = np.cumsum(file.lengths)
    return np.searchsorted(ends, np.random.default_rng(seed).integers(0, ends[-1], file.drawn), side="right")


def after_bytes(file: File, seed: int) -> np.ndarray:
    """Draws the rows after random bytes, which favors those after long rows."""
    return (at_bytes(file, seed) + 1) % file.rows


def by_length(file: File, seed: int) -> np.ndarray:
    """Draws with weights that depend on the length a little."""
    return in_reader(file, seed, weights=file.lengths**0.2, replace=True)


def late_rows(file: File, seed: int) -> np.ndarray:
    """Draws with a reservoir that each row enters with the same probability, which favors late rows."""
    draw = np.random.default_rng(seed)
    kept = np.arange(file.drawn)
    for row in range(file.drawn, file.rows):
        if draw.random() < 2 * file.drawn / file.rows:
            kept[draw.integers(file.drawn)] = row
    return kept


def in_chunks(file: File, seed: int) -> np.ndarray:
    """Draws whole chunks until there are enough rows, which favors chunks with few rows."""
    chunks = file.reader._data.handle.unit_rows().astype(int)
    firsts = np.cumsum(chunks) - chunks
    order = np.random.default_rng(seed).permutation(len(chunks))
    return np.concatenate([np.arange(firsts[i], firsts[i] + chunks[i]) for i in order])[: file.drawn]


def in_cells(file: File, seed: int) -> np.ndarray:
    """Draws cells in random order, and rows of each with a probability, without a uniform first row."""
    draw = np.random.default_rng(seed)
    cells = (np.cumsum(file.lengths) - file.lengths) // (8 << 10)
    turn = draw.permutation(cells[-1] + 1)[cells]
    taken = np.flatnonzero(draw.random(file.rows) < 0.6)
    return taken[np.argsort(turn[taken], kind="stable")][: file.drawn]


@pytest.mark.parametrize("biased", [at_bytes, after_bytes, by_length, late_rows])
def test_biased_draws_of_rows_are_detected(file: File, biased: Callable[[File, int], np.ndarray]) -> None:
    found = [scipy_stats.chisquare(counts.sum(0)).pvalue for counts in counted(file, biased)]
    assert min(found) < 1e-6


@pytest.mark.parametrize("biased", [in_chunks, in_cells])
def test_biased_draws_of_units_are_detected(file: File, biased: Callable[[File, int], np.ndarray]) -> None:
    found = [least_t(counts, np.full(10, file.drawn / 10)) for counts in counted(file, biased)]
    assert min(found) < 1e-4
