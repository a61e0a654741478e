"""`Ragged.to_counts`, `Sparse.to_dense` and `SparseCSR.to_dense`, compared with lists."""

from __future__ import annotations

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


def test_null_items_do_not_count() -> None:
    masked = Ragged(Masked(np.array([1, 0, 3]), np.array([True, False, True])), np.array([0, 2, 3]))
    assert masked.to_counts(4).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]


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
    padded = batch["words"].to_padded(2, pad=spec.size, truncate="right")
    assert padded.values.tolist() == [[0, 1], [3, 3], [1, 3]]
    assert batch["words"].to_counts(spec.size).tolist() == [[1, 1, 1], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
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


def test_text_is_not_counted() -> None:
    pa = pytest.importorskip("pyarrow")
    (batch,) = fastpipe.from_arrow(pa.table({"words": [["a"]]}), batch_size=1)
    with pytest.raises(TypeError, match="must be integers"):
        batch["words"].to_counts(3)
