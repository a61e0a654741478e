"""The first rows of a reader as a table, compared with its batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fastpipe
import samples

ROWS = 44


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> samples.Data:
    return samples.write(tmp_path_factory.mktemp("head"), [samples.blocks_of(30), samples.blocks_of(14)])


@pytest.mark.parametrize("ranks", [{}, {"rank": 1, "world_size": 2}, {"epochs": None}])
@pytest.mark.parametrize("shuffle", samples.SHUFFLES)
def test_the_first_rows_are_those_of_the_first_batches(data: samples.Data, shuffle: Any, ranks: dict[str, Any]) -> None:
    options = {"batch_size": 7, "shard_by": "batch"} | samples.order_of(shuffle) | ranks
    reader, twin = data.read(**options), data.read(**options | {"epochs": 1})
    batches = iter(reader)
    for epoch in range(2):
        whole = pa.Table.from_batches(twin.to_arrow_reader())
        for n in (0, 1, 6, 7, 8, ROWS, 2**31 - 1):
            assert reader.head(n) == whole.slice(0, n)
        assert reader.head().num_rows == 5
        assert reader.epoch == epoch
        reader.set_epoch(1)
    assert reader.head(3).schema == whole.schema
    assert len(next(batches)["id"]) == 7  # The pass is still active.


def test_padding_and_no_rows() -> None:
    reader = fastpipe.from_arrays({"x": np.arange(10)}, batch_size=4, rank=1, world_size=2, on_uneven="pad")
    assert reader.head(9).column_names == ["x", "valid"]
    assert reader.head(0).column_names == ["x", "valid"]
    assert fastpipe.from_arrays({"x": np.arange(0)}, batch_size=4).head().num_rows == 0


def test_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("x\n1\n2\noops\n")
    reader = fastpipe.read_csv(path, features={"x": fastpipe.DenseSpec((), "int64")}, batch_size=2)
    assert reader.head(2)["x"].to_pylist() == [1, 2]
    with pytest.raises(fastpipe.FastpipeError, match="oops"):
        reader.head(3)
    with pytest.raises(ValueError, match="n must be between 0 and"):
        reader.head(-1)
    with pytest.raises(TypeError, match="n must be an integer"):
        reader.head(1.5)  # type: ignore[arg-type]
