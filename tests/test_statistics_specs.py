"""Specs from statistics: `FeatureStatistics.to_spec` compared with its `bin_edges` and `vocabulary`."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import oracle
from fastpipe import BucketSpec, VocabularySpec

pa = pytest.importorskip("pyarrow")
pytest.importorskip("datasketches")


def statistics(**columns: Any) -> Any:
    return fastpipe.from_arrow(pa.table(columns), batch_size=7).describe()


@settings(max_examples=15, deadline=None)
@given(
    integers=st.lists(st.one_of(st.none(), st.integers(-99, 99)), min_size=2, max_size=40),
    width=st.sampled_from([2, 3, 10, 50]),
    data=st.data(),
)
def test_specs_of_statistics_read_the_same_table(integers: list[Any], width: int, data: Any) -> None:
    numbers = st.one_of(st.none(), st.floats(-9, 9, width=32), st.just(math.nan))
    words = st.one_of(st.none(), st.sampled_from(["a", "b", "ä", ""]))
    count = len(integers)
    floats = data.draw(st.lists(numbers, min_size=count, max_size=count))
    texts = data.draw(st.lists(words, min_size=count, max_size=count))
    table = pa.table(
        {
            "integer": pa.array([*integers, 1, 2], pa.int64()),
            "float": pa.array([*floats, 0.5, 1.5], pa.float32()),
            "text": [*texts, "b", "b"],
        }
    )
    found = fastpipe.from_arrow(table, batch_size=7).describe()
    specs: Any = {name: found[name].to_spec(num_buckets=width) for name in found}
    assert isinstance(specs["integer"], BucketSpec)
    assert isinstance(specs["text"], VocabularySpec)
    (batch,) = fastpipe.from_arrow(table, features=specs, batch_size=100)
    for name in ("integer", "float"):
        edges = tuple(found[name].bin_edges(width))
        assert specs[name].edges == edges or (not edges and specs[name].edges[0] > found[name].min)
        assert 2 <= specs[name].size - bool(found[name].nan_count) <= width
        expected = []
        for value in table[name].to_pylist():
            is_nan = value is not None and math.isnan(value)
            place = specs[name].size - 1 if is_nan else value is not None and np.digitize(value, specs[name].edges)
            expected.append(None if value is None else int(place))
        assert oracle.rows(batch[name]) == expected
    ordered = [
        key
        for key, _ in sorted(
            Counter(filter(lambda t: t is not None, [*texts, "b", "b"])).items(), key=lambda pair: (-pair[1], pair[0])
        )
    ]
    keys = {key: place for place, key in enumerate(ordered)}
    assert oracle.rows(batch["text"]) == [None if text is None else keys[text] for text in table["text"].to_pylist()]
    assert {spec.on_null for spec in specs.values()} <= {"mask", "error"}


def test_buckets_have_similar_counts_of_values() -> None:
    values = np.random.default_rng(3).lognormal(size=5000)
    spec = fastpipe.from_arrays({"x": values}, batch_size=64).describe()["x"].to_spec(num_buckets=8)
    (batch,) = fastpipe.from_arrays({"x": values}, features={"x": spec}, batch_size=5000)
    assert spec.size == 8
    assert np.bincount(batch["x"], minlength=8).min() > 0.8 * 5000 / 8


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("rare", [1, 30, 400])
def test_a_frequent_smallest_value_has_its_own_bucket(kind: Any, rare: int) -> None:
    values = np.array([0] * 10_000 + [*range(1, rare + 1)], kind)
    spec = fastpipe.from_arrays({"x": values}, batch_size=4096).describe()["x"].to_spec(num_buckets=4)
    assert spec.size == 2
    assert 0 < spec.edges[0] <= rare


def test_one_rare_value_has_its_own_bucket() -> None:
    # The value is rarer than the last of 65,536 quantiles.
    values = np.array([0] * 150_000 + [7])
    spec = fastpipe.from_arrays({"x": values}, batch_size=50_000).describe()["x"].to_spec(field="y")
    assert spec == BucketSpec([7], field="y")


def test_options_of_vocabularies() -> None:
    feature = statistics(x=["a", "b", "b", "c", "c", "c", None])["x"]
    assert feature.to_spec() == VocabularySpec(["c", "b", "a"], on_unknown="bucket", on_null="mask")
    expected = VocabularySpec(["c", "b"], on_unknown="error", on_null="mask", field="y")
    assert feature.to_spec(min_count=2, on_unknown="error", field="y") == expected
    assert feature.to_spec(limit=1).size == 2
    with pytest.raises(ValueError, match="no text occurs 9 times"):
        feature.to_spec(min_count=9)


def test_codes_and_lists() -> None:
    table = pa.table({"code": pa.array(["b", "a", "b"]).dictionary_encode(), "many": [[1.0, 2.0], [], [3.0]]})
    overrides = {"code": fastpipe.DenseSpec((), "int8")}
    found = fastpipe.from_arrow(table, overrides=overrides, batch_size=2).describe()
    specs: Any = {name: feature.to_spec() for name, feature in found.items()}
    assert specs["code"].vocabulary == VocabularySpec(["b", "a"]).vocabulary
    (batch,) = fastpipe.from_arrow(table, features=specs, batch_size=9)
    assert batch["code"].tolist() == [0, 1, 0]
    assert oracle.rows(batch["many"]) == [[0, 1], [], [2]]


def test_statistics_of_queries(tmp_path: Path) -> None:
    pytest.importorskip("adbc_driver_sqlite")
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (i INTEGER PRIMARY KEY, city TEXT NOT NULL)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", enumerate(["Rome", "Oslo", "Rome", "Bonn"]))
    connection.close()
    uri = f"sqlite:///{tmp_path / 't.db'}"
    found = fastpipe.sql.describe("SELECT * FROM t", uri)
    specs: Any = {name: feature.to_spec(num_buckets=2) for name, feature in found.items()}
    (batch,) = fastpipe.read_sql("SELECT * FROM t", uri, features=specs, batch_size=9)
    assert batch["city"].tolist() == [0, 2, 0, 1]
    assert batch["i"].tolist() == np.digitize(range(4), specs["i"].edges).tolist()


@pytest.mark.parametrize(
    ("values", "options", "error", "match"),
    [
        ([1, 1], {}, ValueError, r"min=1, max=1"),
        ([math.inf, math.nan], {}, ValueError, "no two different finite values"),
        (pa.array([None], pa.int64()), {}, ValueError, r"min=None, max=None"),
        ([True, False], {}, fastpipe.errors.UnsupportedError, "bools have neither"),
        ([np.datetime64(1, "s")], {}, fastpipe.errors.UnsupportedError, "dates, times and durations"),
        ([1, 2], {"num_buckets": 1}, ValueError, "num_buckets"),
        ([1, 2], {"num_buckets": 2**17}, ValueError, "num_buckets"),
        (["a"], {"num_buckets": "2"}, TypeError, "num_buckets"),
        (["a"], {"limit": 0}, ValueError, "limit"),
        (["a"], {"min_count": 0}, ValueError, "min_count"),
        (["a"], {"on_unknown": "keep"}, ValueError, "on_unknown"),
    ],
)
def test_features_without_a_spec(values: Any, options: Any, error: type[Exception], match: str) -> None:
    feature = statistics(x=values)["x"]
    with pytest.raises(error, match=match):
        feature.to_spec(**options)
