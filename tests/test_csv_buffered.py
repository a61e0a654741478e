"""Samples of random cells of CSV files: which rows they contain, and what they cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import fastpipe.cuda
from csv_rows import scipy_stats, write
from fastpipe.csv._drawing import Asked
from fastpipe.csv._line_buffer import LineBuffer
from fastpipe.csv._reading import LosslessDialect

SEEDS = 200
CELL = 8 << 10
"""Bytes of a cell of a small file."""


def buffered(source: Any, rows: int, **options: Any) -> fastpipe.csv.CsvSample:
    return fastpipe.csv.sample_csv(source, rows, **{"method": "buffered", "seed": 0} | options)


def uniform(samples: list[np.ndarray], size: np.ndarray) -> float:
    """Returns the p-value of the hypothesis that the rows of all deciles of `size` are equally likely.

    The rows of a sample come in clusters, so only samples are independent of each other. Hotelling's test compares the
    mean counts of deciles with the expected ones (H. Hotelling, The generalization of Student's ratio, 1931).
    """
    decile = np.argsort(np.argsort(size, kind="stable")) * 10 // len(size)
    counts = np.array([np.bincount(decile[rows], minlength=10)[:9] for rows in samples], float)
    expected = len(samples[0]) * np.bincount(decile)[:9] / len(size)
    there, of = counts.shape
    off = counts.mean(0) - expected
    squared = there * off @ np.linalg.pinv(np.cov(counts.T)) @ off
    return float(scipy_stats.f.sf(squared * (there - of) / (of * (there - 1)), of, there - of))


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("rows", [20, 3000])
@pytest.mark.parametrize("ascending", [False, True])
def test_rows_of_any_length_are_equally_likely(tmp_path: Path, rows: int, share: float, ascending: bool) -> None:
    """Each p-value is below 0.001 with a probability of 0.001."""
    size, before = write(tmp_path / "x.csv", 30_000, ascending=ascending)
    samples = []
    for seed in range(SEEDS):
        drawn = buffered(tmp_path / "x.csv", rows, seed=seed, share=share, columns=["i"], dtype="int64")
        samples.append(drawn.values[:, 0])
        assert len(np.unique(drawn.values)) == rows
    assert uniform(samples, size) > 0.001
    assert uniform(samples, before) > 0.001


def test_biased_samples_are_detected(tmp_path: Path) -> None:
    """The rows after random bytes are biased, and so are rows of random cells without a uniform first row."""
    draw = np.random.default_rng(2)
    size, _ = write(tmp_path / "x.csv", 30_000)
    ends = np.cumsum(size + 7)
    firsts = np.searchsorted(ends, draw.integers(0, ends[-1], SEEDS))
    assert uniform([np.r_[i : i + 20] % len(size) for i in firsts], size) < 1e-5
    size, _ = write(tmp_path / "x.csv", 30_000, ascending=True)
    ends = np.cumsum(size + 7)
    cells = np.searchsorted(ends, CELL * np.arange(ends[-1] // CELL))
    counts = np.diff(np.r_[cells, len(size)])
    chosen = draw.integers(0, len(cells) - 1, SEEDS)
    samples = [cells[i] + draw.permutation(counts[i])[:20] for i in chosen]
    assert uniform(samples, size) < 1e-5


def line_buffer(source: Any, share: float = 0.25, seed: int = 0, threads: int | None = 2) -> LineBuffer:
    dialect = LosslessDialect.given({})
    asked = Asked.of(1, seed, dialect, ["i"], "int64", "C", {"num_threads": threads})
    return LineBuffer([os.fspath(source)], asked, share)


def drawn_from(buffer: LineBuffer, rows: int, nbytes: int) -> list[tuple[int, int]]:
    """Returns the cell and the offset of each row of the next lines, in the order of drawing."""
    lines = buffer.next(rows, nbytes)
    order = np.argsort(lines.places)
    return list(zip(lines.cells[order].tolist(), lines.offsets[order].tolist(), strict=True))


@pytest.mark.parametrize("share", [1.0, 0.4, 0.1])
def test_laps_take_every_row_once(tmp_path: Path, share: float) -> None:
    size, _ = write(tmp_path / "x.csv", 5000)
    buffer = line_buffer(tmp_path / "x.csv", share)
    rows: list[tuple[int, int]] = []
    while len(rows) < len(size):
        rows += drawn_from(buffer, 700, 20_000)
    assert len({offset for _, offset in rows}) == len(rows) == len(size)
    with pytest.raises(LookupError):
        buffer.next(1, 1000)
    estimate = buffer.estimate()
    assert (estimate.rows, estimate.low, estimate.high) == (5000, 5000, 5000)
    # Each cell of a lap contributes its share: within five standard deviations.
    for cell, count in zip(*np.unique([cell for cell, _ in rows], return_counts=True), strict=True):
        first = sum(found == cell for found, _ in rows[: int(5000 * share)])
        assert abs(first - count * share) <= 5 * np.sqrt(count * share * (1 - share)) + count * (share == 1) + 1


def test_the_order_depends_only_on_the_seed(tmp_path: Path) -> None:
    write(tmp_path / "x.csv", 5000)
    whole = drawn_from(line_buffer(tmp_path / "x.csv"), 4000, 1 << 30)
    for threads, rows, nbytes in ((1, 4000, 5_000), (2, 333, 1 << 30), (7, 50, 100)):
        buffer = line_buffer(tmp_path / "x.csv", threads=threads)
        again: list[tuple[int, int]] = []
        while len(again) < 4000:
            again += drawn_from(buffer, min(rows, 4000 - len(again)), nbytes)
        assert again == whole
    assert drawn_from(line_buffer(tmp_path / "x.csv", seed=1), 4000, 1 << 30) != whole


def test_drawn_rows_are_stable() -> None:
    """Expected values: a seed draws the same rows of the same file in all versions."""
    data = b"i,p\n" + b"".join(b"%d,%s\n" % (i, b"x" * (i % 50)) for i in range(10_000))
    drawn = buffered(data, 8, share=0.25, seed=42, columns=["i"], dtype="int64")
    assert drawn.values[:, 0].tolist() == [9580, 9587, 9589, 9594, 9601, 9605, 9608, 9610]
    drawn = buffered(data, 8, seed=42, columns=["i"], dtype="int64")
    assert drawn.values[:, 0].tolist() == [1399, 2880, 2971, 7874, 868, 925, 964, 4036]


def test_results(tmp_path: Path) -> None:
    write(tmp_path / "x.csv", 50_000)
    drawn = buffered(tmp_path / "x.csv", 1000, share=0.25, columns=["i"], dtype="int64")
    assert drawn.rows is None
    assert drawn.files is not None
    assert drawn.offsets is not None
    assert len(np.unique(drawn.offsets)) == 1000
    data = (tmp_path / "x.csv").read_bytes()
    assert all(
        data[offset:].startswith(b"%d," % i) for offset, i in zip(drawn.offsets, drawn.values[:, 0], strict=True)
    )
    # The file is sorted by `i`, so neighbors are alike, and a smaller share carries more information.
    assert drawn.design_effect is not None
    other = buffered(tmp_path / "x.csv", 1000, share=0.05, columns=["i"], dtype="int64")
    assert other.design_effect is not None
    assert other.design_effect[0] < drawn.design_effect[0] / 2
    with pytest.raises(ValueError, match="rows=50001 exceeds the 50000 rows of the files"):
        buffered(tmp_path / "x.csv", 50_001, columns=["i"])
    with pytest.raises(fastpipe.errors.SchemaError, match="can't hold the columns 'pad'"):
        buffered(tmp_path / "x.csv", 1)


def test_few_rows_come_from_many_cells(tmp_path: Path) -> None:
    """By default, few rows come from many cells, and many rows from as few cells as with a share of a quarter."""
    write(tmp_path / "x.csv", 100_000)
    for rows, cells in ((50, 25), (1000, 50)):
        drawn = buffered(tmp_path / "x.csv", rows, columns=["i"], dtype="int64")
        assert drawn.offsets is not None
        assert len(np.unique(drawn.offsets // CELL)) >= cells
        other = buffered(tmp_path / "x.csv", rows, columns=["i"], dtype="int64", memory_limit="16MB", num_threads=1)
        assert (drawn.offsets == other.offsets).all()
    many = [buffered(tmp_path / "x.csv", 40_000, share=share, columns=["i"]).offsets for share in (None, 0.25)]
    assert (many[0] == many[1]).all()  # type: ignore[union-attr]


def test_the_design_effect_is_that_of_means(tmp_path: Path) -> None:
    """The mean of the estimates is within a fifth of the measured variance of 400 means."""
    write(tmp_path / "x.csv", 100_000)
    found = [buffered(tmp_path / "x.csv", 1500, seed=seed, columns=["i"], dtype="float64") for seed in range(400)]
    measured = np.var([drawn.values.mean() for drawn in found]) / (np.arange(100_000).var() / 1500)
    told = np.mean([drawn.design_effect for drawn in found])
    assert abs(told / measured - 1) < 0.2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"replace": True}, 'method="buffered" doesn\'t scan all rows: leave out replace'),
        ({"part": 1}, "leave out part"),
        ({"stratify": "a", "weights": np.ones(3)}, "leave out stratify and weights"),
        ({"index_cache": True}, "leave out index_cache"),
        ({"on_ragged": "skip"}, "leave out on_ragged"),
        ({"share": 0}, "share must be at least 0.001 and at most 1; got 0"),
        ({"share": 1e-4}, "share must be at least 0.001 and at most 1; got 0.0001"),
        ({"share": float("nan")}, "share must be at least 0.001"),
        ({"share": 1.5}, "share must be at least 0.001"),
        ({"rows": 2**31}, "rows=2147483648 exceeds the number of rows of the files, which is at most 1"),
        ({"rows": None, "fraction": 0.5}, "doesn't know the number of rows: pass rows="),
        ({"method": "exact", "share": 0.5}, "leave out share"),
        ({"rows": None}, "pass either rows or fraction"),
        ({"method": "exact", "rows": None, "fraction": 2}, "fraction must be above 0 and at most 1; got 2"),
    ],
)
def test_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        buffered(b"a\n1\n", **{"rows": 1} | options)


@pytest.mark.parametrize("method", ["exact", "block"])
def test_a_fraction_of_the_rows(tmp_path: Path, method: Any) -> None:
    write(tmp_path / "x.csv", 5000)
    drawn = fastpipe.csv.sample_csv(tmp_path / "x.csv", fraction=0.01, seed=3, method=method, columns=["i"])
    same = fastpipe.csv.sample_csv(tmp_path / "x.csv", 50, seed=3, method=method, columns=["i"])
    assert (drawn.values == same.values).all()


def test_small_files() -> None:
    for data in (b"a,b\n1,2", b"a,b\n#c\n\n1,2\n#d"):
        one = buffered(data, 1, comment="#")
        assert one.values.tolist() == [[1, 2]]
        assert one.estimate is not None
        assert (one.estimate.low, one.estimate.rows, one.estimate.high) == (1, 1, 1) or one.estimate.high >= 1
    assert sorted(buffered(b"a\n1\n2\n3\n", 3).values[:, 0]) == [1, 2, 3]
    for empty in (b"a,b\n", b"a\n\n\n\n"):
        with pytest.raises(ValueError, match="the dataset has no rows to draw from"):
            buffered(empty, 1, columns=["a"])
    with pytest.raises(fastpipe.errors.MalformedFileError, match="a quote is never closed"):
        buffered(b"a,b\n" + b"1,2\n" * 10_000 + b'"3,4\n', 10_000, columns=["a"])


def test_long_rows(tmp_path: Path) -> None:
    """Rows that are longer than cells are drawn, and rows that are longer than memory allows are an error."""
    path = tmp_path / "x.csv"
    path.write_text("i,t\n" + "".join(f"{i},{'x' * (40_000 if i % 2 else 3)}\n" for i in range(100)))
    drawn = buffered(path, 100, columns=["i"], dtype="int64")
    assert sorted(drawn.values[:, 0]) == list(range(100))
    for size, match in ((3_000_000, "memory_limit is 4.0 MB"), (5_000_000, "or the row is longer")):
        path.write_text("i,t\n1," + "x" * size + "\n")
        with pytest.raises(fastpipe.errors.LimitError, match=match):
            buffered(path, 1, columns=["i"], memory_limit="8MB")


# --- Devices ---


def fill(source: Any, devices: int = 2, **options: Any) -> fastpipe.cuda.Fill:
    given = {"seed": 5, "memory_limit": "64MB", "method": "buffered", "columns": ["i"], "dtype": "int64"}
    return fastpipe.cuda.fill(source, ["cpu"] * devices, **given | options)


def refill_often(filled: fastpipe.cuda.Fill) -> None:
    for _ in range(5):
        filled.refill()


def rows_of(filled: fastpipe.cuda.Fill) -> list[np.ndarray]:
    return [device.values[:, 0].copy() for device in filled]


def test_devices_and_refills_share_no_row(tmp_path: Path) -> None:
    write(tmp_path / "x.csv", 20_000)
    filled = fill(tmp_path / "x.csv", rows=[3000, 1000])
    assert filled.num_rows == [3000, 1000]
    seen = rows_of(filled)
    arrays = [device.values for device in filled]
    for refill in range(1, 5):
        filled.refill()
        assert filled.refills == refill
        seen += rows_of(filled)
    assert len(np.unique(np.concatenate(seen))) == 20_000
    assert all(device.values is array for device, array in zip(filled, arrays, strict=True))
    with pytest.raises(
        ValueError, match="4000 rows for 2 devices after 5 refills of the same size are more than the 20000 rows"
    ):
        filled.refill()
    assert filled.estimate == fastpipe.csv.RowEstimate(20_000, 20_000, 20_000)
    assert filled.design_effect is not None
    with pytest.raises(fastpipe.errors.UnsupportedError, match='for their indices, use method="exact"'):
        _ = filled[0].rows
    # The rows of a device come from everywhere in the sample.
    first, second = seen[:2]
    assert abs(first.mean() - second.mean()) < 5 * first.std() * np.sqrt(1 / 3000 + 1 / 1000)


def test_refills_depend_only_on_the_seed(tmp_path: Path) -> None:
    write(tmp_path / "x.csv", 20_000)
    wanted = fill(tmp_path / "x.csv", rows=2000, num_threads=1)
    wanted.refill()
    again = fill(tmp_path / "x.csv", rows=2000, memory_limit=16 << 20, num_threads=3)
    again.refill()
    for one, other in zip(rows_of(wanted), rows_of(again), strict=True):
        assert sorted(one) == sorted(other)


def test_refills_may_draw_from_all_rows(tmp_path: Path) -> None:
    write(tmp_path / "x.csv", 20_000)
    filled = fill(tmp_path / "x.csv", rows=4000, replace=True)
    seen = [set(np.concatenate(rows_of(filled)).tolist())]
    for _ in range(3):
        filled.refill()
        seen.append(set(np.concatenate(rows_of(filled)).tolist()))
    assert all(len(rows) == 8000 for rows in seen)
    assert len(set().union(*seen)) > 13_000


def test_a_refill_after_a_failed_one_is_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.csv", 20_000)
    wanted = fill(tmp_path / "x.csv", rows=2000)
    wanted.refill()
    wanted.refill()
    filled = fill(tmp_path / "x.csv", rows=2000)
    with monkeypatch.context() as patched:
        patched.setattr(fastpipe.cuda._fill._fill.Fill, "_put", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            filled.refill()
    filled.refill()
    for one, other in zip(rows_of(wanted), rows_of(filled), strict=True):
        assert sorted(one) == sorted(other)


def test_files_may_grow_but_not_change(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write(path, 20_000)
    filled = fill(path, rows=2000)
    with path.open("a") as file:
        file.writelines(f"{i},x\n" for i in range(20_000, 40_000))
    for _ in range(4):
        filled.refill()
        assert np.concatenate(rows_of(filled)).max() < 20_000
    os.truncate(path, 100_000)
    with pytest.raises(fastpipe.errors.StorageError, match=r"file changed|became shorter") as caught:
        refill_often(filled)
    assert caught.value.path == str(path)


def test_a_last_row_that_grows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("i,pad\n" + "1,x\n" * 3000 + "12,x")
    filled = fill(path, 1, rows=1500)
    with path.open("a") as file:
        file.write("34,x\n")
    with pytest.raises(fastpipe.errors.StorageError, match="file changed"):
        filled.refill()


def test_dialects(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("".join(f"{i};1,5\n" for i in range(5000)))
    for method in ("exact", "block", "buffered"):
        filled = fill(
            path, rows=100, method=method, columns=None, dtype="float64", delimiter=";", decimal=",", header=["i", "x"]
        )
        assert filled.columns == ["i", "x"]
        assert (filled[1].values[:, 1] == 1.5).all()
    with pytest.raises(TypeError, match="unknown argument 'delimeter'"):
        fill(path, rows=100, delimeter=";")
    with pytest.raises(ValueError, match='on_ragged must be "error" with method="buffered"'):
        fill(path, rows=100, on_ragged="skip")
    with pytest.raises(ValueError, match='method="buffered" needs no index'):
        fill(path, rows=100, index_cache=True)
    with pytest.raises(TypeError, match='method="buffered" reads CSV files: pass their paths'):
        fill(fastpipe.read_csv(path, batch_size=1), rows=100)
    with pytest.raises(ValueError, match="rows must have an entry for each of 2 devices; got 3"):
        fill(path, rows=[1, 2, 3])


@pytest.mark.parametrize("method", ["exact", "block", "buffered"])
def test_integers_are_not_rounded(tmp_path: Path, method: str) -> None:
    (tmp_path / "x.csv").write_text("i\n16777217\n")
    with pytest.raises(fastpipe.errors.ValueRangeError, match="float32"):
        fill(tmp_path / "x.csv", 1, rows=1, method=method, dtype="float32", quote=None)
