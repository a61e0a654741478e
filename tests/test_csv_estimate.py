"""Samples of CSV files without a scan: at random bytes, and of random cells.

They are compared with Python's `csv` module and tested statistically.
"""

from __future__ import annotations

import csv
import io
import random
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import fastpipe
from csv_rows import by_length, naive_rows, starts_of, write
from processes import interrupt, run

scipy_stats = pytest.importorskip("scipy.stats")


def estimate(source: Any, rows: int, **options: Any) -> fastpipe.csv.CsvSample:
    return fastpipe.csv.sample_csv(source, rows, **{"method": "estimate", "seed": 0} | options)


@pytest.mark.parametrize("replace", [False, True])
def test_rows_of_any_length_are_equally_likely(tmp_path: Path, replace: bool) -> None:
    """Twenty samples. The minimum of 40 p-values is below 0.001 / 40 with a probability of 0.001."""
    count = 50_000
    size, before = write(tmp_path / "x.csv", count)
    values = []
    for seed in range(20):
        drawn = estimate(tmp_path / "x.csv", 3000, seed=seed, replace=replace, columns=["i"], dtype="int64")
        assert drawn.offsets is not None
        assert drawn.rows is None
        rows = drawn.values[:, 0]
        assert (np.diff(drawn.offsets) >= 0).all()
        assert replace or len(set(rows.tolist())) == 3000
        values += [by_length(rows, size), by_length(rows, before)]
    assert min(values) > 0.001 / 40
    # The rows at random bytes are biased, and the test detects that.
    assert by_length(naive_rows(size, 3000), size) < 1e-9


def test_sampling_with_replacement() -> None:
    """Among 2,000 draws from 1,000 rows about 865 rows are distinct. Five standard deviations are allowed."""
    data = b"i\n" + b"".join(b"%d\n" % i for i in range(1000))
    drawn = estimate(data, 2000, replace=True, quote=None)
    assert abs(len(np.unique(drawn.values)) - 1000 * (1 - np.exp(-2))) < 5 * np.sqrt(1000 * 0.135 * 0.6)
    assert drawn.estimate is not None
    assert drawn.estimate.low <= 1000 <= drawn.estimate.high


@pytest.mark.parametrize("method", ["estimate", "buffered"])
def test_the_row_count_is_within_the_interval(tmp_path: Path, method: str) -> None:
    """Checks 200 intervals of 95 %.

    By chance, 180 or fewer contain the row count in one of 400 runs with other seeds.
    """
    count = 20_000
    write(tmp_path / "x.csv", count)
    found = [estimate(tmp_path / "x.csv", 600, method=method, seed=seed, columns=["i"]).estimate for seed in range(200)]
    intervals = [interval for interval in found if interval is not None]
    assert len(intervals) == 200
    assert sum(interval.low <= count <= interval.high for interval in intervals) >= 180
    assert all(interval.confidence == 0.95 for interval in intervals)
    widths = np.array([interval.high - interval.low for interval in intervals])
    assert (widths < 0.3 * count).all()
    # The estimate is unbiased: the mean is within four standard errors.
    rows = np.array([interval.rows for interval in intervals])
    assert abs(rows.mean() - count) < 4 * rows.std() / np.sqrt(200)


# --- The starts of rows ---


def quoted(draw: random.Random, newline: str) -> str:
    """Returns rows of three fields, many of them with quotes, delimiters and newlines."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=newline)
    for i in range(6000):
        text = "".join(draw.choices('ab ,"\n', k=draw.randrange(30))) if draw.random() < 0.5 else "plain"
        writer.writerow([i, text, draw.random()])
    return out.getvalue()


@pytest.mark.parametrize("method", ["estimate", "buffered"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("between", ["", "\n", '#a comment, with "a quote\n'])
def test_rows_match_the_csv_module(newline: str, last: bool, between: str, method: str) -> None:
    draw = random.Random(5)
    text = "i,t,x\n" + quoted(draw, newline)
    starts = starts_of(text.encode())
    if between:
        cuts = [*starts[::7], len(text)]
        text = between.join(text[a:b] for a, b in zip([0, *cuts], cuts, strict=False))
    text = text if last else text.rstrip("\r\n")
    data = text.encode()
    drawn = estimate(data, 700, method=method, columns=["i", "x"], dtype="float64", comment="#")
    lines = io.StringIO(text, newline="")
    kept = (line for line in lines)
    if between.startswith("#"):
        kept = (line for line in lines if line != between)
    rows = [row for row in csv.reader(kept) if row][1:]
    assert len(rows) == 6000
    assert drawn.offsets is not None
    assert len(set(drawn.offsets.tolist())) == 700
    for values, offset in zip(drawn.values.tolist(), drawn.offsets.tolist(), strict=True):
        number = int(values[0])
        assert float(rows[number][2]) == values[1]
        assert data[offset:].startswith(b"%d," % number)
        assert offset == 0 or data[offset - 1] == ord("\n")


def test_the_last_row_is_equally_likely() -> None:
    """The last row has no newline.

    Over 400 samples of 5 of 20 rows, its count is within five standard deviations of 100.
    """
    data = b"a,b\n" + b"1,x\n" * 19 + b"2,"
    hits = sum(2 in estimate(data, 5, seed=seed, columns=["a"]).values for seed in range(400))
    assert abs(hits - 100) < 5 * np.sqrt(75)


def test_tiny_files() -> None:
    one = estimate(b"a,b\n1,2", 1)
    assert (one.values.tolist(), one.columns) == ([[1, 2]], ["a", "b"])
    assert one.estimate == fastpipe.csv.RowEstimate(1, 1, 1)
    assert one.offsets is not None
    assert one.offsets.tolist() == [4]
    column = estimate(b'a\n7\n"8"\n\n9', 2, seed=3)
    assert set(column.values[:, 0].tolist()) < {7, 8, 9}
    three = estimate(b"\xef\xbb\xbf1,2\n3,4\n5,6\n", 3, header=False, seed=1)
    assert three.values.tolist() == [[1, 2], [3, 4], [5, 6]]
    for empty in (b"a,b\n", b"a,b", b"a\n\n\n\n"):
        with pytest.raises(ValueError, match=r"no rows to draw from|in about 0 rows"):
            estimate(empty, 1, columns=["a"])
    with pytest.raises(fastpipe.errors.MalformedFileError, match="found no rows"):
        estimate(b"", 1)
    with pytest.raises(ValueError, match="no rows to draw from"):
        estimate(b"", 1, header=["a"], columns=["a"])


def test_sampling_nearly_all_rows_needs_the_exact_method() -> None:
    data = b"a,b\n" + b"1,2\n" * 1000
    for rows in (1000, 1001, 10_000_000):
        with pytest.raises(ValueError, match=r'are in about 1000 rows\. Use method="exact"'):
            estimate(data, rows, replace=False)
    assert len(np.unique(estimate(data, 900).offsets)) == 900


def test_ambiguous_quotes() -> None:
    """The text after each newline is the same within quotes and outside of them."""
    data = b"a,b\n" + b'1,"\n1,"\n' * (10 << 20)
    with pytest.raises(
        fastpipe.errors.LimitError, match=r'cannot determine the row of this byte.*method="exact"'
    ) as caught:
        estimate(data, 10, columns=["a"])
    assert caught.value.offset is not None
    assert caught.value.path is not None


@pytest.mark.parametrize("method", ["estimate", "buffered"])
def test_ragged_rows(method: str) -> None:
    # Only rows near drawn bytes and rows of drawn cells are read.
    data = b"a,b\n" + (b"1.2\n" + b"1,2\n" * 49) * 2_000
    with pytest.raises(fastpipe.errors.MalformedFileError, match=r"don't have 2 fields.*method=\"exact\""):
        estimate(data, 1000, method=method)


@pytest.mark.parametrize("method", ["estimate", "buffered"])
def test_errors_locate_values(tmp_path: Path, method: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"a,b\n" + b"1,2\n" * 500 + b"3,zwei\n" + b"1,2\n" * 500)
    with pytest.raises(fastpipe.errors.ValueRangeError, match=r'cannot parse "zwei" as int64') as caught:
        estimate(path, 900, method=method, columns=["b"], dtype="int64")
    assert (caught.value.path, caught.value.offset, caught.value.feature) == (str(path), 4 + 2000 + 2, "b")
    assert caught.value.record is None
    with pytest.raises(fastpipe.errors.ValueRangeError, match=r'cannot parse "zwei" as int64'):
        estimate(path, 900, seed=1, columns=["b"], dtype="int64", replace=True)
    with pytest.raises(fastpipe.errors.SchemaError, match='no column "c"'):
        estimate(path, 1, method=method, columns=["c"])
    with pytest.raises(fastpipe.errors.SchemaError, match="can't hold the columns 'b'"):
        estimate(path, 900, method=method)


@pytest.mark.parametrize("method", ["estimate", "buffered"])
def test_several_files_are_one_population(tmp_path: Path, method: str) -> None:
    """All rows of several files are equally likely.

    The files have rows of different lengths and columns in different orders, and one file has no rows.
    """
    expected = {}
    for number, (names, pad) in enumerate([("i,pad", 3), ("pad,i", 200), ("i,pad", 0), ("pad,more,i", 5)]):
        rows = [] if number == 2 else range(number * 1000, number * 1000 + 1000)
        line = {"i,pad": "{i},{p}", "pad,i": "{p},{i}", "pad,more,i": "{p},,{i}"}[names]
        text = names + "\n" + "".join(line.format(i=i, p="x" * pad) + "\n" for i in rows)
        (tmp_path / f"{number}.csv").write_text(text)
        expected[number] = text.encode()
    counts = np.zeros(4)
    for seed in range(5):
        drawn = estimate(tmp_path, 600, method=method, seed=seed, columns=["i"], dtype="int64")
        assert drawn.files is not None
        assert drawn.offsets is not None
        rows = drawn.values[:, 0]
        assert (drawn.files == rows // 1000).all()
        for file, offset, row in zip(drawn.files, drawn.offsets, rows, strict=True):
            assert f"{row}".encode() in expected[file][offset:].split(b"\n")[0].split(b",")
        counts += np.bincount(drawn.files, minlength=4)
    assert counts[2] == 0
    # The rows of a cell come together, so the counts of files vary more.
    assert method == "buffered" or scipy_stats.chisquare(counts[[0, 1, 3]]).pvalue > 0.001


@pytest.mark.parametrize("method", ["estimate", "buffered"])
def test_a_sample_is_a_function_of_the_seed(tmp_path: Path, method: str) -> None:
    path = tmp_path / "x.csv"
    write(path, 5000)
    of = lambda **options: estimate(path, 500, method=method, columns=["i"], **options)  # noqa: E731
    first = of(seed=11)
    for threads in (1, 2, 7):
        again = of(seed=11, num_threads=threads)
        assert (again.values == first.values).all()
        assert again.estimate == first.estimate
    data = path.read_bytes()
    in_memory = estimate(data, 500, method=method, seed=11, columns=["i"], order="F", memory_limit="64MB")
    assert (in_memory.values == first.values).all()
    assert in_memory.values.flags.f_contiguous
    assert (of(seed=12).values != first.values).any()
    with path.open("rb") as file:
        assert (estimate(file, 500, method=method, seed=11, columns=["i"]).offsets == first.offsets).all()
    assert of(seed=None).seed != of(seed=None).seed


def test_drawn_rows_are_stable() -> None:
    """Expected values: a seed draws the same rows of the same file in all versions."""
    data = b"i,p\n" + b"".join(b"%d,%s\n" % (i, b"x" * (i % 50)) for i in range(10_000))
    drawn = estimate(data, 8, seed=42, columns=["i"], dtype="int64")
    assert drawn.values[:, 0].tolist() == [419, 559, 1134, 1749, 4605, 5630, 8600, 9154]
    assert drawn.estimate == fastpipe.csv.RowEstimate(10043, 9490, 10597)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"part": 1}, "leave out part, or"),
        ({"stratify": "a"}, "leave out stratify"),
        ({"weights": np.ones(3)}, "leave out weights"),
        ({"index_cache": True}, "leave out index_cache"),
        ({"on_ragged": "skip", "part": 2}, "leave out part and on_ragged"),
        ({"rows": 0}, "rows must be between 1"),
        ({"seed": -1}, "seed must be between"),
    ],
)
def test_errors_of_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        estimate(b"a\n1\n", **{"rows": 1} | options)


@pytest.mark.parametrize("method", ["estimate", "buffered"])
def test_other_files(tmp_path: Path, method: str) -> None:
    with pytest.raises(fastpipe.errors.UnsupportedError, match="compressed file"):
        estimate(b"\x1f\x8b....", 1, method=method)
    with pytest.raises(fastpipe.errors.MissingFileError):
        estimate(tmp_path / "gone.csv", 1, method=method)


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    rows=st.lists(st.lists(st.text('ab," \n', max_size=8), min_size=2, max_size=2), min_size=1, max_size=200),
    again=st.sampled_from([1, 1, 50]),
    newline=st.sampled_from(["\n", "\r\n"]),
    seed=st.integers(0, 2**64 - 1),
    method=st.sampled_from(["estimate", "buffered"]),
)
def test_any_rows(rows: list[list[str]], again: int, newline: str, seed: int, method: str) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator=newline).writerows([[i, *row] for i, row in enumerate(rows * again)])
    data = out.getvalue().encode()
    how = {"rows": 3, "replace": True} if method == "estimate" else {"rows": min(len(rows) * again, 3)}
    drawn = estimate(data, method=method, seed=seed, header=["i", "s", "t"], columns=["i"], **how)
    assert drawn.offsets is not None
    starts = starts_of(data)
    assert [starts[int(i)] for i in drawn.values[:, 0]] == drawn.offsets.tolist()


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    """Drawing from a file with one row within a long comment would take hours."""
    path = tmp_path / "x.csv"
    with path.open("wb") as file:
        file.write(b"a,b\n" + b"1,2\n" * 30_000)
        for _ in range(2000):
            file.write(b"#" + b"x" * 99_998 + b"\n")
    script = f"""
        import fastpipe
        try:
            print("waits", flush=True)
            fastpipe.csv.sample_csv({str(path)!r}, 20_000, method="estimate", comment="#", seed=1, num_threads=2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
    """
    interrupt(run(script), 60)
