"""Batches of sequential reads: as large as the memory limit allows, also if the reader's own batches are small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from every_source import Make, Slices, digests, make
from fastpipe import Ragged, col
from fastpipe._reader.sequential_reads import columns_of, in_sequence
from fastpipe.errors import LimitError

pa = pytest.importorskip("pyarrow")

__all__ = ["make"]

MANY = 70_000
LIMITS = ["1B", "30KB", "100KB", "300KB", "1MB", "4MB", "64MB", None]


def test_batches_grow_with_the_limit_and_fit(make: Make) -> None:
    sizes = []
    for limit in LIMITS:
        reader = make(batch_size=3, memory_limit=limit, num_threads=2)
        found = in_sequence(reader, reader._data, 128)
        sizes.append(found.batch_size)
        try:
            read = digests(found)
        except LimitError:
            # The reader's own batches don't fit either.
            assert found.batch_size == 3
            with pytest.raises(LimitError):
                list(reader)
        else:
            assert read == digests(make(batch_size=found.batch_size))
    assert sizes == sorted(sizes)
    assert set(sizes) <= {3, 8, 32, 128}
    assert (sizes[0], sizes[-1]) == (3, 128)
    large = make(batch_size=200, memory_limit="1B")
    assert in_sequence(large, large._data, 128).batch_size == 128


def test_no_unit_is_read_twice() -> None:
    numbers: list[int] = []

    class Counted(Slices):
        def read(self, unit: int) -> Any:
            numbers.append(unit)
            return super().read(unit)

    table = pa.table({"id": range(600), "text": ["x" * 500] * 600, "t": [[1]] * 600})
    sizes = set()
    for limit in range(20_000, 220_000, 10_000):
        reader = fastpipe.read_units(Counted(table, 60), batch_size=1, memory_limit=limit, num_threads=1)
        sizes.add(in_sequence(reader, reader._data, 600).batch_size)
    assert {1, 600} < sizes
    assert numbers == []
    assert reader.filter(col("id") < 9).num_rows == 9
    assert sorted(numbers) == list(range(10))


METHODS: dict[str, Callable[[fastpipe.Reader], Any]] = {
    "filter": lambda rows: rows.filter(col("x") % 3 == 0),
    "split": lambda rows: rows.split(0.3, 0.7, by="x")[0],
    "folds": lambda rows: rows.folds(3, stratify="b")[1][0],
    "weights": lambda rows: rows.sample(900, weights="x", seed=1),
    "strata": lambda rows: rows.sample(900, balance=col("b"), seed=1),
    "pack": lambda rows: rows.pack("items", length=40),
    "bucket": lambda rows: rows.bucket("items"),
    "cache": lambda rows: rows.cache(),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file whose later rows are larger than the earlier ones."""
    path = tmp_path_factory.mktemp("rows") / "rows.avro"
    lengths = np.where(np.arange(MANY) < MANY // 2, 2, 5)
    items = Ragged(np.arange(lengths.sum(), dtype=np.int32), np.r_[0, np.cumsum(lengths)])
    fastpipe.write_avro(path, [{"x": np.arange(MANY), "b": np.arange(MANY) % 7, "items": items}])
    return path


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_the_same_rows_with_a_limit(path: Path, method: str) -> None:
    def reader_of(limit: str | None) -> fastpipe.Reader:
        return fastpipe.read_avro(path, batch_size=8, memory_limit=limit, num_threads=2, seed=1)

    expected = METHODS[method](reader_of(None)).state_dict()
    for limit in ("1MB", "16MB"):
        assert METHODS[method](reader_of(limit)).state_dict() == expected
    with pytest.raises(LimitError, match=r"batches of [18] rows"):
        METHODS[method](reader_of("1KB"))


def test_larger_rows_stay_within_the_limit(path: Path) -> None:
    for limit in (1 << 20, 1 << 22):
        reader = fastpipe.read_avro(path, batch_size=8, memory_limit=limit, num_threads=2)
        with columns_of(reader, ["items"]) as columns:
            assert 1_000 < columns.batch_size < 1 << 16
            assert sum(len(batch["items"]) for batch in columns) == MANY
            assert columns.stats()["memory"]["most_reserved"] <= limit
