"""Samples of CSV streams of unknown length: compared with Algorithm L in Python and `csv`, and tested statistically."""

from __future__ import annotations

import csv
import gc
import io
import itertools
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import fastpipe
import order_model
from csv_rows import by_length, naive_rows, starts_of, write
from processes import interrupt, run

scipy_stats = pytest.importorskip("scipy.stats")

# The purpose id of a reservoir's draws.
RESERVOIR = 8


def stream(source: Any, rows: int, **options: Any) -> fastpipe.csv.CsvSample:
    return fastpipe.csv.sample_csv(source, rows, **{"method": "stream", "seed": 0} | options)


def chosen(rows: int, total: int, seed: int) -> list[int]:
    """Returns the rows that Algorithm L chooses.

    It uses the same words as fastpipe: the first three of each block of NumPy's Philox.
    """
    words = iter(order_model.words(seed, 0, RESERVOIR, 0, 4 * total))

    def unit(word: int) -> float:
        return ((word >> 12) + 0.5) * 2.0**-52

    kept, row, weight = list(range(rows)), rows - 1, 1.0
    while True:
        first, second, third, _ = itertools.islice(words, 4)
        weight *= math.exp(math.log(unit(first)) / rows)
        row += math.floor(math.log(unit(second)) / math.log1p(-weight)) + 1
        if row >= total:
            return sorted(kept)
        kept[order_model.below(third, rows)] = row


def numbered(count: int) -> bytes:
    return b"i\n" + b"".join(b"%d\n" % i for i in range(count))


@pytest.mark.parametrize(("rows", "total"), [(1, 1), (1, 50), (3, 3), (10, 11), (7, 10_000), (500, 20_000)])
def test_rows_match_algorithm_l(rows: int, total: int) -> None:
    for seed in (0, 5, 2**64 - 1):
        drawn = stream(numbered(total), rows, seed=seed, dtype="int64")
        assert drawn.rows is not None
        assert drawn.rows.tolist() == drawn.values[:, 0].tolist() == chosen(rows, total, seed)


def test_rows_of_any_length_are_equally_likely(tmp_path: Path) -> None:
    """Twenty samples. The minimum of 40 p-values is below 0.001 / 40 with a probability of 0.001."""
    size, before = write(tmp_path / "x.csv", 50_000)
    values = []
    for seed in range(20):
        drawn = stream(tmp_path / "x.csv", 5000, seed=seed, columns=["i"], dtype="int64")
        assert drawn.rows is not None
        assert (drawn.values[:, 0] == drawn.rows).all()
        assert len(set(drawn.rows.tolist())) == 5000
        values += [by_length(drawn.rows, size), by_length(drawn.rows, before)]
    assert min(values) > 0.001 / 40
    # The rows at random bytes are biased, and the test detects that.
    assert by_length(naive_rows(size, 5000), size) < 1e-9


def test_pairs_of_rows_are_equally_likely() -> None:
    """Counts all 28 pairs of eight rows. The test fails by chance with a probability of 0.001."""
    counts = np.zeros((8, 8))
    for seed in range(1400):
        drawn = stream(numbered(8), 2, seed=seed).rows
        assert drawn is not None
        counts[tuple(drawn)] += 1
    pairs = counts[np.triu_indices(8, 1)]
    assert pairs.sum() == 1400
    assert scipy_stats.chisquare(pairs).pvalue > 0.001


# --- Streams ---


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def quoted(count: int) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["i", 't"\n', "x"])
    for i in range(count):
        writer.writerow([i, 'a,"\n' * (i % 5), i / 7])
    return out.getvalue().encode()


@pytest.mark.parametrize("size", [1, 7, 64 << 10])
def test_rows_do_not_depend_on_the_pieces(size: int) -> None:
    data = quoted(6000)
    whole = stream(data, 100, columns=["x", "i"], dtype="float64")
    assert whole.rows is not None
    assert (whole.values[:, 1] == whole.rows).all()
    assert whole.values[:, 0].tolist() == [i / 7 for i in whole.rows.tolist()]
    again = stream(pieces(data, size), 100, columns=["x", "i"], dtype="float64")
    assert np.array_equal(again.values, whole.values)
    assert np.array_equal(again.rows, whole.rows)


def test_sources(tmp_path: Path) -> None:
    path, data = tmp_path / "é.csv", quoted(3000)
    path.write_bytes(data)
    expected = stream(data, 50, columns=["i"]).rows
    sources: list[Any] = [path, str(path), io.BytesIO(data), bytearray(data), [b"", data, memoryview(b"")]]
    for source in sources:
        assert np.array_equal(stream(source, 50, columns=["i"]).rows, expected)
    with path.open("rb") as file:
        assert np.array_equal(stream(file, 50, columns=["i"], memory_limit="64MB").rows, expected)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe(tmp_path: Path) -> None:
    pipe, data = tmp_path / "pipe", quoted(3000)
    os.mkfifo(pipe)

    def feed() -> None:
        with pipe.open("wb", buffering=0) as file:
            for piece in pieces(data, 5000):
                file.write(piece)

    feeder = threading.Thread(target=feed)
    feeder.start()
    drawn = stream(pipe, 50, columns=["i"])
    feeder.join()
    assert np.array_equal(drawn.rows, stream(data, 50, columns=["i"]).rows)


def test_errors_of_an_iterator_are_raised() -> None:
    class OwnError(Exception):
        pass

    raised = OwnError("mine")

    def failing() -> Iterator[bytes]:
        yield b"i\n1\n"
        raise raised

    with pytest.raises(OwnError) as caught:
        stream(failing(), 1)
    assert caught.value is raised
    ended = []

    def closes() -> Iterator[bytes]:
        try:
            yield b"i,j\n1,2\n" * 20_000
            yield b"more"
        finally:
            ended.append(True)

    with pytest.raises(fastpipe.errors.SchemaError, match='no column "k"'):
        stream(closes(), 1, columns=["k"])
    gc.collect()
    # The error is raised before everything was read.
    assert ended == [True]


def test_huge_rows() -> None:
    data = b"i,t\n" + b"".join(b'%d,"%s"\n' % (i, b"x\n" * (4 << 20)) for i in range(3)) + b"3,\n4,\n"
    drawn = stream(pieces(data, 10_000), 5, columns=["i"])
    assert drawn.values[:, 0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(fastpipe.errors.LimitError, match=r"memory_limit=1000000: draw fewer rows"):
        stream(pieces(data, 10_000), 2, columns=["i"], memory_limit="1MB")
    unclosed = (b'i,t\n1,"' + b"x\n" * 100 if k == 0 else b"x\n" * (1 << 20) for k in range(200))
    with pytest.raises(fastpipe.errors.LimitError, match="more than 268435456 bytes") as caught:
        stream(unclosed, 1, columns=["i"])
    assert caught.value.offset == 4


@pytest.mark.parametrize(
    ("data", "options", "error", "match"),
    [
        (b"", {}, fastpipe.errors.MalformedFileError, "found no rows"),
        (b"i\n1\n2\n", {"rows": 3}, ValueError, "rows=3 exceeds the 2 rows of the stream"),
        (b"i\n", {}, ValueError, "exceeds the 0 rows"),
        (b'i,j\n1,"2\n3,4\n', {}, fastpipe.errors.MalformedFileError, r"ends within quotes.*<bytes>, byte offset 4"),
        (b'"i\n', {}, fastpipe.errors.MalformedFileError, "ends within quotes"),
        (b"i,j\n1,2\n3\n", {"rows": 2}, fastpipe.errors.MalformedFileError, r"1 fields.*byte offset 8, record 1"),
        (b"i,j\n1\n" + b"3,x\n" * 10, {"on_ragged": "skip"}, fastpipe.errors.SchemaError, "can't hold the columns 'j'"),
        (b"i,i\n1,2\n", {}, fastpipe.errors.SchemaError, 'two columns are called "i"'),
        (b"\x1f\x8b....", {}, fastpipe.errors.UnsupportedError, "gzip"),
        (b"i\n1\n", {"replace": True}, ValueError, "reads each row once: leave out replace"),
        (b"i\n1\n", {"part": 1}, ValueError, "leave out part"),
        (b"i\n1\n", {"stratify": "i"}, ValueError, "leave out stratify"),
        (b"i\n1\n", {"weights": "i", "index_cache": True}, ValueError, "leave out weights and index_cache"),
        (["i\n1\n"], {}, TypeError, "an iterable must yield bytes; got 'i"),
        (7, {}, TypeError, "an iterable of bytes; got int"),
        (io.StringIO("i\n1\n"), {}, TypeError, "opened as text"),
        ("gone.csv", {}, fastpipe.errors.MissingFileError, "the path of one file or pipe"),
        ("/", {}, fastpipe.errors.StorageError, "directory"),
    ],
)
def test_errors_name_location_and_cause(data: Any, options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        stream(data, **{"rows": 1} | options)


def test_errors_locate_values() -> None:
    data = b"a,b\n" + b"1,2\n" * 5000 + b"3,zwei\n" + b"1,2\n" * 5000
    with pytest.raises(fastpipe.errors.ValueRangeError, match='cannot parse "zwei" as int64') as caught:
        stream(pieces(data, 3000), 10_001, columns=["b"], dtype="int64")
    assert (caught.value.path, caught.value.offset, caught.value.record) == ("<generator>", 4 + 20_000 + 2, 5000)
    # Rows that aren't drawn aren't parsed.
    seed = next(seed for seed in range(50) if 5000 not in chosen(3, 10_001, seed))
    assert stream(data, 3, columns=["b"], dtype="int64", seed=seed).values.tolist() == [[2]] * 3


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    rows=st.lists(st.lists(st.text('ab," \n', max_size=8), min_size=2, max_size=2), min_size=1, max_size=60),
    newline=st.sampled_from(["\n", "\r\n"]),
    size=st.integers(1, 50),
    last=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_any_rows(rows: list[list[str]], newline: str, size: int, last: bool, seed: int, data: st.DataObject) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator=newline).writerows([[*row, i] for i, row in enumerate(rows)])
    text = out.getvalue()
    text = text if last else text.removesuffix(newline)
    count = data.draw(st.integers(1, len(rows)))
    drawn = stream(pieces(text.encode(), size), count, seed=seed, header=["s", "t", "i"], columns=["i"])
    assert drawn.rows is not None
    assert drawn.values[:, 0].tolist() == drawn.rows.tolist() == chosen(count, len(rows), seed)
    assert len(starts_of(text.encode())) == len(rows)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_ctrl_c_ends_a_wait_for_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = f"""
        import os
        import fastpipe
        writer = os.open({str(pipe)!r}, os.O_RDWR)
        os.write(writer, b"i\\n1\\n2\\n")
        try:
            print("waits", flush=True)
            fastpipe.csv.sample_csv({str(pipe)!r}, 1, method="stream")
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
    """
    interrupt(run(script), 60)
