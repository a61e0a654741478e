"""Training XGBoost from readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe import DenseSpec

xgboost = pytest.importorskip("xgboost")

from fastpipe.xgboost import DataIter, data_iter  # noqa: E402

ROWS = 3000


def arrays() -> dict[str, Any]:
    draw = np.random.default_rng(1)
    x = draw.standard_normal((ROWS, 2), "float32")
    n = draw.integers(0, 9, ROWS)
    y = (x[:, 0] * x[:, 1] + n > 4).astype("float32")
    return {"n": n, "x": x, "y": y, "w": draw.random(ROWS)}


def reader(**options: Any) -> fastpipe.Reader:
    return fastpipe.from_arrays(arrays(), **{"batch_size": 256} | options)


def trained(matrix: Any) -> Any:
    return xgboost.train({"tree_method": "hist", "max_bin": 32, "seed": 1, "objective": "binary:logistic"}, matrix, 5)


def whole() -> tuple[Any, dict[str, Any]]:
    data = arrays()
    return np.column_stack([data["n"], data["x"]]).astype("float32"), data


def test_a_matrix_matches_one_of_arrays() -> None:
    table, data = whole()
    fed = data_iter(reader(), label="y", weight="w")
    assert isinstance(fed, DataIter)
    assert fed.columns == ["n", "x(0)", "x(1)"]
    matrix = xgboost.QuantileDMatrix(fed, max_bin=32)
    assert (matrix.num_row(), matrix.num_col(), matrix.feature_names) == (ROWS, 3, fed.columns)
    assert np.array_equal(matrix.get_label(), data["y"])
    assert np.array_equal(matrix.get_weight(), data["w"].astype("float32"))
    plain = xgboost.QuantileDMatrix(table, data["y"], weight=data["w"], max_bin=32, feature_names=fed.columns)
    test = xgboost.DMatrix(table, feature_names=fed.columns)
    found, expected = trained(matrix).predict(test), trained(plain).predict(test)
    # XGBoost merges the quantiles of a stream batch by batch, so the models differ slightly.
    assert np.mean((found > 0.5) == (expected > 0.5)) > 0.98


def test_a_dense_matrix_is_bit_identical(tmp_path: Path) -> None:
    table, data = whole()
    fed = data_iter(reader(), label="y", columns=["n", "x"], cache_prefix=str(tmp_path / "cache"))
    test = xgboost.DMatrix(table, feature_names=fed.columns)
    found = trained(xgboost.DMatrix(fed)).predict(test)
    plain = xgboost.DMatrix(table, data["y"], feature_names=fed.columns)
    assert np.array_equal(found, trained(plain).predict(test))


def test_external_memory(tmp_path: Path) -> None:
    """Requests the batches of a shuffled epoch repeatedly."""
    fed = data_iter(reader(shuffle=True, seed=3), label="y", weight="w", cache_prefix=str(tmp_path / "cache"), epoch=2)
    matrix = xgboost.ExtMemQuantileDMatrix(fed, max_bin=32)
    assert matrix.num_row() == ROWS
    booster = trained(matrix)
    table, data = whole()
    found = booster.predict(xgboost.DMatrix(table, feature_names=fed.columns)) > 0.5
    assert np.mean(found == (data["y"] > 0.5)) > 0.8


def batches(fed: DataIter) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    fed.reset()
    while fed.next(lambda **given: found.append(given)):
        pass
    return found


def test_batches_are_the_same_each_time() -> None:
    fed = data_iter(reader(shuffle=True, seed=3), label="y", epoch=1)
    first, second = batches(fed), batches(fed)
    fed.reset()
    fed.next(lambda **given: None)  # Stops reading in the middle.
    assert len(first) == 12
    for again in (second, batches(fed)):
        assert all(np.array_equal(a["data"], b["data"]) for a, b in zip(first, again, strict=True))
    other = batches(data_iter(reader(shuffle=True, seed=3), label="y", epoch=0))
    assert not np.array_equal(first[0]["data"], other[0]["data"])


def test_nulls_are_missing_and_padding_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b,y\n1,2.5,0\n,NA,1\n3,1,0\n4,2,1\n5,3,1\n")
    source = fastpipe.read_csv(path, batch_size=2, world_size=2, rank=1, on_uneven="pad")
    (found, *rest) = batches(data_iter(source, label="y"))
    assert np.array_equal(found["data"], [[3, 1], [4, 2]])
    assert sum(len(more["data"]) for more in rest) == 0
    whole = batches(data_iter(fastpipe.read_csv(path, batch_size=5), label="y"))[0]
    assert np.array_equal(whole["data"], [[1, 2.5], [np.nan, np.nan], [3, 1], [4, 2], [5, 3]], equal_nan=True)
    with pytest.raises(ValueError, match="'a' is null in a row"):
        batches(data_iter(fastpipe.read_csv(path, batch_size=5), label="a"))


def test_unsupported_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,s\n1,x\n")
    source = fastpipe.read_csv(path, batch_size=1)
    with pytest.raises(fastpipe.errors.SchemaError, match="requires numbers, but 's' is"):
        data_iter(source)
    with pytest.raises(fastpipe.errors.SchemaError, match="unknown feature 'z'; the features are 'a', 's'"):
        data_iter(source, label="z", columns="a")
    with pytest.raises(ValueError, match="columns is empty"):
        data_iter(source, label="a", columns=[])
    with pytest.raises(ValueError, match="no columns are left"):
        data_iter(fastpipe.read_csv(path, columns="a", batch_size=1), label="a")
    with pytest.raises(ValueError, match="epochs=2, but XGBoost needs exactly one"):
        data_iter(reader(epochs=2), label="y")
    with pytest.raises(TypeError, match=r"reader must be a fastpipe\.Reader"):
        data_iter([1])  # type: ignore[arg-type]
    broken = fastpipe.read_csv(
        b"a,y\n1,0\nx,1\n", features={"a": DenseSpec((), "int64"), "y": DenseSpec((), "int8")}, batch_size=1
    )
    with pytest.raises(fastpipe.errors.ValueRangeError, match='cannot parse "x" as int64'):
        xgboost.QuantileDMatrix(data_iter(broken, label="y"))
