"""Each row is equally likely by every method that draws rows.

Over 200 seeds, rows are counted by deciles of their length, of the length of the previous row, and of their position in
the file. Files are written in runs of rows of similar length, so that some chunks have 100 times the rows of other
chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import fastpipe
import fastpipe.cuda
from fastpipe._reader.sampling import rows_of_sample

scipy_stats = pytest.importorskip("scipy.stats")

SEEDS = range(200)


class File(NamedTuple):
    """A CSV file and facts about its rows."""

    path: Path
    data: bytes
    reader: fastpipe.Reader
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
    return File(path, path.read_bytes(), reader, np.array(deciles), drawn)


@pytest.fixture(scope="module", params=["few rows a chunk", "many rows a chunk"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> File:
    folder = tmp_path_factory.mktemp("chances")
    if request.param == "few rows a chunk":
        return written(folder / "few.csv", 400, 20, 20_000, 20)
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
    options = {"columns": ["i"], "memory_limit": "32MB"} | how
    filled = fastpipe.cuda.fill(file.reader, ["cpu"] * 2, rows=file.drawn, seed=seed, **options)  # type: ignore[arg-type]
    return filled[1].rows


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
}


def counted(file: File, draw: Callable[[File, int], np.ndarray]) -> np.ndarray:
    """Counts the drawn rows of each decile for each seed: `[3, seeds, 10]`."""
    drawn = [draw(file, seed) for seed in SEEDS]
    return np.array([[np.bincount(of[rows], minlength=10) for rows in drawn] for of in file.groups])


def least_t(counts: np.ndarray, expected: np.ndarray) -> float:
    """Returns the Bonferroni-corrected p-value of ten t-tests of the counts by seed.

    Rows drawn together are one count.
    """
    deviations = counts - expected
    # Counts that never vary are certainly right or wrong.
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


def test_biased_draws_are_detected(file: File) -> None:
    """Tests draws of rows at random bytes, and draws of whole chunks until there are enough rows."""
    draw = np.random.default_rng(1)
    ends = np.flatnonzero(np.frombuffer(file.data, np.uint8) == ord("\n"))
    chunks = file.reader._data.handle.unit_rows().astype(int)
    firsts = np.cumsum(chunks) - chunks

    def at_bytes(file: File, seed: int) -> np.ndarray:
        return np.searchsorted(ends[1:], draw.integers(ends[0] + 1, len(file.data), file.drawn))

    def in_chunks(file: File, seed: int) -> np.ndarray:
        order = draw.permutation(len(chunks))
        return np.concatenate([np.arange(firsts[i], firsts[i] + chunks[i]) for i in order])[: file.drawn]

    by_length, _, _ = counted(file, at_bytes)
    assert scipy_stats.chisquare(by_length.sum(0)).pvalue < 1e-9
    assert min(least_t(counts, np.full(10, file.drawn / 10)) for counts in counted(file, in_chunks)) < 1e-4
