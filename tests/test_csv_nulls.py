"""Nulls of CSV files that are larger than the sample for type inference.

An integer or bool column is masked if and only if any of its rows is null.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fastpipe
from fastpipe import DenseSpec

ROWS = 300_000
# In files above 16 MiB, types are inferred from the first rows of 64 chunks, which exclude these two rows.
LAST, UNSEEN = ROWS - 1, 2000
LONG_AGO = 1_600_000_000

Lines = list[bytes]


def lines(ends: bytes = b"\n") -> Lines:
    """Returns a header and rows of an integer, a float, a bool and a text."""
    names = b"id,x,flag,text" + ends
    return [names, *[b"%d,1.5,true,%s" % (row, b"x" * 50) + ends for row in range(ROWS)]]


def written(path: Path, rows: Lines, time: int = LONG_AGO) -> Path:
    """Writes the file with an old timestamp, so that its index is stored."""
    data = b"".join(rows)
    assert len(data) > 16 << 20
    path.write_bytes(data)
    os.utime(path, (time, time))
    return path


def masked(source: object, **options: object) -> dict[str, int]:
    """Reads all rows. Returns the number of nulls in each masked column."""
    reader = fastpipe.read_csv(source, columns=["id", "flag"], batch_size=50_000, **options)  # type: ignore[arg-type]
    found = {name: 0 for name, spec in reader.features.items() if spec.on_null == "mask"}
    for batch in reader:
        for name in found:
            found[name] += int((~batch[name].valid).sum())
    return found


NULLS: dict[str, tuple[bytes, dict[str, int]]] = {
    "empty": (b",1.5,true,x\n", {"id": 1}),
    "at the end": (b"7,1.5,,\n", {"flag": 1}),
    "word": (b" NA,1.5,null ,x\n", {"id": 1, "flag": 1}),
    "quoted": (b'"",1.5,"NA",x\n', {"id": 1, "flag": 1}),
    "blank": (b" ,1.5,true,x\n", {"id": 1}),
    "other columns": (b"7,,true,\n", {}),
    "in quotes": (b'7,1.5,true,"x,,NA,\n,,"\n', {}),
}


@pytest.mark.parametrize("at", [UNSEEN, LAST])
@pytest.mark.parametrize("null", NULLS)
def test_a_null_in_a_row_that_types_are_not_inferred_from(tmp_path: Path, null: str, at: int) -> None:
    text, expected = NULLS[null]
    rows = lines()
    rows[at + 1] = text
    path = written(tmp_path / "x.csv", rows)
    assert masked(path) == expected
    assert masked(path, shuffle=True, seed=1) == expected


@pytest.mark.parametrize(("last", "expected"), [(b",true", {"id": 1}), (b"7,", {"flag": 1}), (b"7,NA", {"flag": 1})])
def test_a_null_in_a_last_row_without_newline(tmp_path: Path, last: bytes, expected: dict[str, int]) -> None:
    rows = [b"text,id,flag\n", *[b"%s,%d,true\n" % (b"x" * 50, row) for row in range(ROWS)], b"x," + last]
    assert masked(written(tmp_path / "x.csv", rows)) == expected


def test_carriage_returns(tmp_path: Path) -> None:
    rows = lines(b"\r\n")
    assert masked(written(tmp_path / "none.csv", rows)) == {}
    rows[UNSEEN] = b"7,1.5,,x\r\n"
    rows[LAST] = b",1.5,true,\r\n"
    assert masked(written(tmp_path / "two.csv", rows)) == {"id": 1, "flag": 1}


def test_other_null_values(tmp_path: Path) -> None:
    rows = lines()
    rows[UNSEEN] = b"-1,1.5,true,x\n"
    path = written(tmp_path / "x.csv", rows)
    assert masked(path, null_values=["-1"]) == {"id": 1}
    assert masked(path) == masked(path, null_values=[]) == {}
    # Different null values have separate indexes.
    for _ in range(2):
        assert masked(path, null_values=["-1"], index_cache=tmp_path / "cache") == {"id": 1}
        assert masked(path, index_cache=tmp_path / "cache") == {}


def test_skipped_lines_have_no_nulls(tmp_path: Path) -> None:
    rows = lines()
    rows[UNSEEN] = b"#,,,\n"
    rows[UNSEEN + 1] = b"\n"
    path = written(tmp_path / "comments.csv", rows)
    assert masked(path, comment="#") == {}
    rows[UNSEEN] = b",1.5,\n"
    path = written(tmp_path / "ragged.csv", rows)
    assert masked(path, on_ragged="skip") == {}


@pytest.mark.parametrize("null_in", ["1.csv", "2.csv"])
def test_a_null_in_any_of_several_files(tmp_path: Path, null_in: str) -> None:
    """The files have their columns in different orders."""
    rows = lines()
    if null_in == "1.csv":
        rows[UNSEEN] = b",1.5,true,x\n"
    written(tmp_path / "1.csv", rows)
    flag = b"" if null_in == "2.csv" else b"true"
    (tmp_path / "2.csv").write_bytes(b"flag,text,id,x\ntrue,x,7,1.5\n" + flag + b",x,8,1.5\n")
    assert masked(tmp_path) == ({"id": 1} if null_in == "1.csv" else {"flag": 1})


def of_members(data: bytes) -> bytes:
    """Returns a gzip file of several members."""
    return b"".join(gzip.compress(data[at : at + (4 << 20)], 1) for at in range(0, len(data), 4 << 20))


@pytest.mark.parametrize("compress", [lambda data: gzip.compress(data, 1), of_members], ids=["one piece", "members"])
@pytest.mark.parametrize("null", [True, False])
def test_compressed_files(tmp_path: Path, compress: Callable[[bytes], bytes], null: bool) -> None:
    rows = lines()
    if null:
        rows[LAST] = b",1.5,true,x\n"
    path = tmp_path / "x.csv.gz"
    path.write_bytes(compress(b"".join(rows)))
    os.utime(path, (LONG_AGO, LONG_AGO))
    for cache in [None, tmp_path / "cache", tmp_path / "cache"]:
        assert masked(path, index_cache=cache) == ({"id": 1} if null else {})


def test_an_index_stores_nulls(tmp_path: Path) -> None:
    """An index that was made for explicit features doesn't contain nulls, and is rebuilt."""
    cache, rows = tmp_path / "cache", lines()
    rows[UNSEEN] = b"7,1.5,,x\n"
    path = written(tmp_path / "x.csv", rows)
    features = {"id": DenseSpec((), "int64")}
    for _ in range(2):
        reader = fastpipe.read_csv(path, features=features, batch_size=50_000, index_cache=cache)
        assert sum(int(batch["id"].sum()) for batch in reader) == sum(range(ROWS)) - (UNSEEN - 1) + 7
        assert masked(path, index_cache=cache) == masked(path, index_cache=cache) == {"flag": 1}


def test_a_file_that_grows(tmp_path: Path) -> None:
    """A truncated row has a null only until it is complete."""
    cache, rows = tmp_path / "cache", lines()
    path = tmp_path / "x.csv"
    steps: list[tuple[bytes, dict[str, int]]] = [
        (b"7,1.5,", {"flag": 1}),
        (b"true,x\n", {}),
        (b"8,1.5,true,x\n" * 20_000, {}),
        (b",1.5,true,x\n", {"id": 1}),
        (b"9,1.5,true,x\n" * 20_000, {"id": 1}),
        (b"9,1.5,NA,x\n", {"id": 1, "flag": 1}),
    ]
    for number, (more, expected) in enumerate(steps):
        rows.append(more)
        written(path, rows, LONG_AGO + number)
        if number == 0:
            # The row is incomplete, so only the inferred features can be checked.
            reader = fastpipe.read_csv(path, batch_size=1, index_cache=cache, on_ragged="error")
            assert {name for name, spec in reader.features.items() if spec.on_null == "mask"} == set(expected)
            continue
        # Extending an index keeps its nulls, whether or not the reader needs them.
        if number % 2:
            fastpipe.read_csv(path, features={"x": DenseSpec((), "float64")}, batch_size=1, index_cache=cache)
        assert masked(path, index_cache=cache) == masked(path) == expected


def test_samples(tmp_path: Path) -> None:
    rows = lines()
    rows[UNSEEN] = b",1.5,true,x\n"
    path = written(tmp_path / "x.csv", rows)
    reader = fastpipe.read_csv(path, columns=["id"], batch_size=1000)
    [ids] = [batch["id"] for batch in reader.sample(ROWS, seed=1, batch_size=ROWS)]
    assert np.array_equal(np.flatnonzero(~ids.valid), [UNSEEN - 1])
    assert np.array_equal(ids.values[ids.valid], np.delete(np.arange(ROWS), UNSEEN - 1))
