"""`Ragged.to_padded`, `Ragged.to_counts`, `Sparse.to_dense` and `SparseCSR.to_dense`, compared with lists."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from fastpipe import Masked, Ragged, Sparse

rows_of_numbers = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6)


def ragged(rows: list[list[Any]], dtype: str = "int64") -> Ragged:
    offsets = np.cumsum([0, *map(len, rows)])
    return Ragged(np.array([item for row in rows for item in row], dtype), offsets)


def plain(rows: list[list[Any]], length: int, value: Any) -> list[list[Any]]:
    return [(row + [value] * length)[:length] for row in rows]


@given(rows=rows_of_numbers, length=st.one_of(st.none(), st.integers(0, 7)), start=st.integers(0, 3))
def test_padded_rows_match_lists(rows: list[list[int]], length: int | None, start: int) -> None:
    whole = ragged(rows, "int16")
    # The offsets of a slice don't begin at 0.
    forms = [(whole, rows), (whole[start:], rows[start:]), (Ragged(whole.values, whole.offsets[start:]), rows[start:])]
    for form, expected in forms:
        if len(form.offsets) == 0:
            continue
        longest = max(map(len, expected), default=0) if length is None else length
        found = form.to_padded(length, value=-1)
        assert (found.dtype, found.shape) == (np.int16, (len(expected), longest))
        assert found.tolist() == plain(expected, longest, -1)
        found[:] = 7
    assert whole.to_list() == rows


@given(
    rows=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3), max_size=4),
    lengths=st.tuples(st.one_of(st.none(), st.integers(0, 4)), st.one_of(st.none(), st.integers(0, 4))),
)
def test_nested_rows_match_lists(rows: list[list[list[int]]], lengths: tuple[int | None, int | None]) -> None:
    inner = ragged([items for row in rows for items in row])
    form = Ragged(inner, np.cumsum([0, *map(len, rows)]))
    outer = max(map(len, rows), default=0) if lengths[0] is None else lengths[0]
    within = max((len(items) for row in rows for items in row), default=0) if lengths[1] is None else lengths[1]
    expected = plain(rows, outer, [])
    found = form.to_padded(lengths, value=5)
    assert found.shape == (len(rows), outer, within)
    assert found.tolist() == [plain(row, within, 5) for row in expected]


def test_other_items() -> None:
    pairs = Ragged(np.arange(6.0).reshape(3, 2), np.array([0, 1, 3]))
    assert pairs.to_padded(value=math.inf).tolist() == [[[0, 1], [math.inf] * 2], [[2, 3], [4, 5]]]
    masked = Ragged(Masked(np.array([1, 0, 3]), np.array([True, False, True])), np.array([0, 2, 3]))
    assert masked.to_padded(3, value=9).tolist() == [[1, 9, 9], [3, 9, 9]]
    assert masked.to_counts(4).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    inner = Masked(ragged([[1], []]), np.array([True, False]))
    assert Ragged(inner, np.array([0, 2])).to_padded(value=4).tolist() == [[[1], [4]]]
    days = Ragged(np.array(["2026-01-02"], "M8[D]"), np.array([0, 1, 1]))
    assert days.to_padded(value=np.datetime64("NaT")).tolist()[1] == [None]


@given(rows=rows_of_numbers, dtype=st.sampled_from(["float32", "int64", "uint8"]), start=st.integers(0, 3))
def test_counts_match_lists(rows: list[list[int]], dtype: str, start: int) -> None:
    whole, start = ragged(rows, "int32"), min(start, len(rows))
    for form in (whole[start:], Ragged(whole.values, whole.offsets[start:])):
        found = form.to_counts(10, dtype)
        assert (found.dtype, found.shape) == (dtype, (len(rows) - start, 10))
        assert found.tolist() == [[row.count(i) for i in range(10)] for row in rows[start:]]


entries = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 4), st.integers(-9, 9)), max_size=20)


@given(entries=entries, dtype=st.sampled_from(["float32", "float64", "int32", "bool"]), rank=st.sampled_from([1, 2]))
def test_sparse_rows_match_lists(entries: Any, dtype: str, rank: int) -> None:
    entries = sorted(entries, key=lambda entry: entry[0])
    values = np.array([entry[-1] for entry in entries], dtype)
    indices = np.array([entry[: rank + 1] for entry in entries], np.int64).reshape(-1, rank + 1)
    shape = np.array([4, 3, 5][: rank + 1])
    expected = np.zeros(shape, dtype)
    for index, value in zip(map(tuple, indices.tolist()), values, strict=True):
        expected[index] = expected[index] + value
    coo = Sparse(indices, values, shape)
    offsets = np.searchsorted(indices[:, 0], np.arange(5))
    csr = fastpipe.batch.SparseCSR(offsets, indices[:, 1] if rank == 1 else indices[:, 1:], values, shape)
    for form in (coo, csr):
        found = form.to_dense()
        assert found.dtype == dtype
        assert found.tolist() == expected.tolist()


def test_columns_of_a_reader() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"words": [["a", "b", "z"], [], ["b"]]})
    spec = fastpipe.VocabularySpec(["a", "b"], on_unknown="bucket")
    (batch,) = fastpipe.from_arrow(table, features={"words": spec}, batch_size=3)
    assert batch["words"].to_padded(2, value=spec.size).tolist() == [[0, 1], [3, 3], [1, 3]]
    assert batch["words"].to_counts(spec.size).tolist() == [[1, 1, 1], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ragged([[1]]).to_padded(-1), ValueError, "length"),
        (lambda: ragged([[1]]).to_padded(1.5), TypeError, "length"),
        (lambda: ragged([[1]]).to_padded((1, 2)), ValueError, "more entries than the rows have levels"),
        (lambda: ragged([[1]]).to_padded([]), ValueError, "at least one"),
        (lambda: ragged([[1]], "int8").to_padded(value=300), ValueError, "doesn't fit the items' dtype int8"),
        (lambda: ragged([[1]]).to_padded(value=0.5), ValueError, "doesn't fit"),
        (lambda: ragged([[1]], "bool").to_padded(value=2), ValueError, "doesn't fit the items' dtype bool"),
        (lambda: ragged([[1]]).to_padded(value=math.nan), ValueError, "doesn't fit"),
        (lambda: ragged([[1]]).to_padded(value="a"), TypeError, "doesn't fit"),
        (lambda: ragged([[1]]).to_padded(value=[1, 2]), TypeError, "single value"),
        (lambda: ragged([[1], [2]]).to_padded(2**62), MemoryError, "exceeds the memory"),
        (lambda: ragged([[1]]).to_counts(1), ValueError, "index 1 is out of range: size is 1"),
        (lambda: ragged([[-1]]).to_counts(1), ValueError, "index -1 is out of range"),
        (lambda: ragged([[1.0]], "float32").to_counts(9), TypeError, "must be integers"),
        (lambda: ragged([[1]]).to_counts(-1), ValueError, "size"),
        (lambda: ragged([[1]]).to_counts(2**60), MemoryError, "exceeds the memory"),
        (
            lambda: Sparse(np.array([[0, 5]]), np.array([1.0]), np.array([1, 5])).to_dense(),
            ValueError,
            "index 5 is out of range: dimension 1 is 5",
        ),
        (lambda: Sparse(np.array([[0, 5]]), np.array(["a"]), np.array([1, 9])).to_dense(), TypeError, "of numbers"),
    ],
)
def test_arguments_are_checked(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_text_is_not_padded() -> None:
    pa = pytest.importorskip("pyarrow")
    (batch,) = fastpipe.from_arrow(pa.table({"words": [["a"]]}), batch_size=1)
    with pytest.raises(TypeError, match="the items are Strings"):
        batch["words"].to_padded()
    with pytest.raises(TypeError, match="must be integers"):
        batch["words"].to_counts(3)
