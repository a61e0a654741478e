"""`Reader.describe` matches NumPy, statistics and Counter for every array type, source and split."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import statistics
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from processes import together


def described(columns: Any, **options: Any) -> fastpipe.typing.Description:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    return fastpipe.from_arrow(table, batch_size=7).describe(**options)


@given(st.lists(st.one_of(st.none(), st.integers(-(2**62), 2**62), st.integers(-3, 3)), min_size=1, max_size=60))
def test_integers(values: list[int | None]) -> None:
    found = described({"x": pa.array(values, pa.int64())})["x"]
    known = sorted(value for value in values if value is not None)
    assert (found.count, found.null_count) == (len(known), len(values) - len(known))
    assert found.value_counts() == dict(sorted(Counter(known).items(), key=lambda pair: (-pair[1], pair[0])))
    different = len(set(known))
    assert (found.n_unique, found.n_unique_interval) == (different, (different, different))
    assert (found.value_counts_error, found.quantile_error) == (0, 0.0)
    if known:
        assert (found.min, found.max, found.mean) == (known[0], known[-1], sum(known) / len(known))
        assert found.std == pytest.approx(statistics.pstdev(known), rel=1e-9)
        for share in (0.0, 0.25, 0.5, 0.9, 1.0):
            assert found.quantile(share) == known[max(math.ceil(share * len(known)), 1) - 1]
    else:
        assert (found.min, found.max, found.quantile(0.5)) == (None, None, None)
        assert math.isnan(found.mean)


@given(st.lists(st.one_of(st.none(), st.floats(width=32), st.just(math.nan)), min_size=1, max_size=60))
def test_floats(values: list[float | None]) -> None:
    found = described({"x": pa.array(values, pa.float32())})["x"]
    known = [value for value in values if value is not None]
    finite = sorted(value for value in known if math.isfinite(value))
    assert (found.count, found.null_count) == (len(known), len(values) - len(known))
    assert found.nan_count == sum(map(math.isnan, known))
    assert found.inf_count == sum(map(math.isinf, known))
    if finite:
        assert (found.min, found.max) == (finite[0], finite[-1])
        assert found.mean == pytest.approx(statistics.fmean(finite), rel=1e-9, abs=1e-9 * max(map(abs, finite)))
        assert found.quantile([0.0, 1.0]) == [finite[0], finite[-1]]
    with pytest.raises(fastpipe.errors.UnsupportedError, match="a feature of float32 doesn't support value counts"):
        found.value_counts()


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=1, max_size=60), st.booleans())
def test_text_and_bytes(values: list[str | None], binary: bool) -> None:
    stored: list[Any] = [None if v is None else v.encode() for v in values] if binary else values
    found = described({"x": pa.array(stored, pa.binary() if binary else pa.string())})["x"]
    known = Counter(value for value in stored if value is not None)
    assert found.value_counts() == dict(known)
    assert found.null_fraction == stored.count(None) / len(stored)
    assert found.vocabulary(min_count=2) == sorted(
        (value for value, count in known.items() if count >= 2), key=lambda value: (-known[value], value)
    )
    with pytest.raises(fastpipe.errors.UnsupportedError, match="doesn't support mean"):
        _ = found.mean
    with pytest.raises(fastpipe.errors.UnsupportedError, match="doesn't support quantiles"):
        found.quantile(0.5)


def test_times() -> None:
    days = np.array(["2026-01-01", "2026-01-03", "NaT", "2026-01-05"], "datetime64[D]")
    spans = np.array([5, 7, 9, 11], "timedelta64[s]")
    found = fastpipe.from_arrays({"day": days, "span": spans}, batch_size=3).describe()
    day, span = found["day"], found["span"]
    assert (day.null_count, day.mean, day.min, day.max) == (1, days[1], days[0], days[3])
    assert day.quantile(0.5) == days[1]
    assert day.value_counts() == {days[0]: 1, days[1]: 1, days[3]: 1}
    assert (span.mean, span.std) == (np.timedelta64(8, "s"), np.timedelta64(2, "s"))
    assert day.std == np.timedelta64(2, "D")
    unknown = fastpipe.from_arrays({"day": days[2:3]}, batch_size=1).describe()["day"].std
    assert np.isnat(unknown)
    assert unknown.dtype == "timedelta64[D]"


def test_bools_and_codes(tmp_path: Path) -> None:
    city = pa.array(["Oslo", "Rome", "Rome", None]).dictionary_encode()
    table = pa.table({"ok": [True, False, True, True], "city": city})
    features = {"ok": fastpipe.DenseSpec((), "bool"), "city": fastpipe.DenseSpec((), "int32", on_null="mask")}
    reader = fastpipe.from_arrow(table, features=features, batch_size=3)
    found = reader.describe()
    assert found["ok"].value_counts() == {True: 3, False: 1}
    assert (found["ok"].mean, found["ok"].max) == (0.75, True)
    assert reader.categories["city"] == ["Oslo", "Rome"]
    assert found["city"].value_counts() == {"Rome": 2, "Oslo": 1}
    assert found["city"].vocabulary() == ["Rome", "Oslo"]


def test_rows_of_several_values() -> None:
    lists = [[1, 2], None, [], [3, None, 3]]
    table = pa.table({"list": lists, "fixed": pa.array([[1.0, 2.0]] * 3 + [None], pa.list_(pa.float64(), 2))})
    found = described(table)
    assert found["list"].value_counts() == {3: 2, 1: 1, 2: 1}
    assert found["list"].null_count == 2
    assert found["list"].lengths is not None
    assert found["list"].lengths.value_counts() == {0: 1, 2: 1, 3: 1}
    assert (found["fixed"].count, found["fixed"].mean) == (6, 1.5)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_rows(layout: Any) -> None:
    dense = np.array([[0, 1.5, 0], [0, 0, 0], [2.5, 0, 3.5]])
    rows, columns = np.nonzero(dense)
    spec = fastpipe.SparseSpec((3,), "float64", layout=layout)
    bags = [
        {"indices": [int(c) for c in columns[rows == r]], "values": dense[r][dense[r] != 0].tolist()} for r in range(3)
    ]
    kind = pa.struct([("indices", pa.list_(pa.int64())), ("values", pa.list_(pa.float64()))])
    table = pa.table({"x": pa.array(bags, kind)})
    found = fastpipe.from_arrow(table, features={"x": spec}, batch_size=2).describe()["x"]
    assert (found.count, found.mean) == (3, 2.5)
    assert found.lengths is not None
    assert found.lengths.value_counts() == {0: 1, 1: 1, 2: 1}


TABLE = pa.table(
    {
        "i": np.arange(1000) % 37,
        "f": np.sin(np.arange(1000.0)),
        "s": [None if i % 11 == 0 else f"c{i % 23}" for i in range(1000)],
        "l": [[i % 5] * (i % 4) for i in range(1000)],
    }
)


def same(one: fastpipe.typing.Description, other: fastpipe.typing.Description) -> None:
    assert one.num_rows == other.num_rows
    for name in one:
        mine, its = one[name], other[name]
        assert (mine.count, mine.null_count) == (its.count, its.null_count)
        if mine.kind not in ("string", "bytes"):
            assert (mine.min, mine.max) == (its.min, its.max)
            assert mine.mean == pytest.approx(its.mean, rel=1e-12, abs=1e-12)
            assert mine.std == pytest.approx(its.std, rel=1e-9)
        if mine.kind != "float":
            assert mine.value_counts() == its.value_counts()


@pytest.mark.parametrize("shuffle", [False, True, "block", "buffer"])
def test_merged_ranks_and_partitions_equal_the_whole(shuffle: Any) -> None:
    options = {"batch_size": 64, "shuffle": shuffle, "seed": 3}
    whole = fastpipe.from_arrow(TABLE, **options).describe()
    ranks = [
        fastpipe.from_arrow(TABLE, **options, rank=rank, world_size=3, on_uneven=on_uneven, shard_by="batch").describe()
        for rank, on_uneven in enumerate(["pad", "allow", "drop"])
    ]
    same(fastpipe.typing.Description.merged(ranks), whole)
    reader = fastpipe.from_arrow(TABLE.combine_chunks(), **options)
    parts = [reader.read_partition(part).describe() for part in reader.partition(4)]
    same(fastpipe.typing.Description.merged(parts), whole)
    # Merging leaves its inputs unchanged.
    assert sum(part.num_rows for part in parts) == 1000


def test_files_and_tables_have_equal_descriptions(tmp_path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(TABLE, tmp_path / "t.parquet", row_group_size=100)
    fastpipe.write_avro(tmp_path / "t.avro", TABLE)
    whole = described(TABLE)
    same(fastpipe.read_parquet(tmp_path / "t.parquet", batch_size=64).describe(), whole)
    same(fastpipe.read_avro(tmp_path / "t.avro", batch_size=64).describe(), whole)


def test_the_readers_pass_continues() -> None:
    reader = fastpipe.from_arrow(TABLE, batch_size=100, shuffle=True, seed=1, epochs=None)
    batches = iter(reader)
    first = next(batches)["i"].tolist()
    state = reader.state_dict()
    assert reader.describe().num_rows == 1000
    assert reader.state_dict() == state
    assert next(batches)["i"].tolist() != first
    assert reader.batch_at(0)["i"].tolist() == first


def test_a_sample_of_rows() -> None:
    reader = fastpipe.from_arrow(TABLE, batch_size=100)
    found = reader.describe(rows=300, seed=5)
    assert found.num_rows == 300
    same(found, reader.sample(300, seed=5).describe())
    # The order does not affect which rows are drawn.
    shuffled = fastpipe.from_arrow(TABLE, batch_size=100, shuffle="block", shuffle_buffer=300, seed=1)
    same(found, shuffled.describe(rows=300, seed=5))


def test_sketches_keep_their_error_bounds() -> None:
    draw = np.random.default_rng(7)
    rows = 200_000
    ids = (draw.zipf(1.3, rows) % 50_000).astype(np.int64)
    values = draw.lognormal(size=rows)
    found = fastpipe.from_arrays({"id": ids, "x": values}, batch_size=4096).describe(exact_values=1000)
    feature = found["id"]
    exact = Counter(ids.tolist())
    assert 0 < feature.value_counts_error < rows / 1000
    for value, count in feature.value_counts(20).items():
        assert abs(count - exact[value]) <= feature.value_counts_error
    least = feature.value_counts_error + 1
    frequent = {value for value, count in exact.items() if count >= 2 * least}
    assert frequent <= set(feature.vocabulary(min_count=least))
    with pytest.raises(ValueError, match=rf"less than {least} times may be missing: increase min_count to that"):
        feature.vocabulary()
    low, high = feature.n_unique_interval
    assert low < feature.n_unique < high
    assert abs(feature.n_unique - len(exact)) < 0.05 * len(exact)
    # The error bound holds for 99 of 100 sketches. Twice the bound holds for practically all.
    for part in (feature, found["x"]):
        assert 0 < part.quantile_error < 0.01
        ordered = np.sort(ids if part is feature else values)
        for share in (0.01, 0.25, 0.5, 0.75, 0.99):
            value = part.quantile(share)
            low_rank, high_rank = (
                np.searchsorted(ordered, [value, value], "left")[0],
                np.searchsorted(ordered, value, "right"),
            )
            assert low_rank / rows - 2 * part.quantile_error <= share <= high_rank / rows + 2 * part.quantile_error


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=200), st.integers(1, 5))
def test_merged_sketches_keep_counts(values: list[int], limit: int) -> None:
    half = len(values) // 2
    parts = [
        described({"x": pa.array(each, pa.int64())}, exact_values=limit) for each in (values[:half], values[half:])
    ]
    found = fastpipe.typing.Description.merged(parts)["x"]
    assert found.count == len(values)
    # The values are few enough for the sketch to store all of them, although exact values aren't requested.
    assert found.value_counts() == dict(Counter(values))
    if values:
        shares = [0.0, 0.3, 0.5, 1.0]
        assert found.quantile(shares) == [sorted(values)[max(math.ceil(each * len(values)), 1) - 1] for each in shares]


@pytest.mark.parametrize("few", [(), (0,), (1,), (0, 1)])
def test_quantiles_of_integers_outlive_their_counts(few: tuple[int, ...]) -> None:
    """Merges descriptions with exact counts and descriptions with sketches, which then provide the quantiles."""
    draw = np.random.default_rng(3)
    halves = [draw.integers(0, 100 if half in few else 5000, 300_000) for half in range(2)]
    parts = [fastpipe.from_arrays({"x": each}, batch_size=4096).describe(exact_values=1000) for each in halves]
    found, values = fastpipe.typing.Description.merged(parts)["x"], np.sort(np.concatenate(halves))
    assert (found.quantile_error == 0) == (found.value_counts_error == 0) == (len(few) == 2)
    for share in (0.01, 0.25, 0.5, 0.75, 0.99):
        value = found.quantile(share)
        ranks = [np.searchsorted(values, value, side) / len(values) for side in ("left", "right")]
        assert ranks[0] - 0.01 <= share <= ranks[1] + 0.01


def test_descriptions_round_trip_through_json_and_pickle() -> None:
    found = described(TABLE, exact_values=10)
    for copy in (fastpipe.typing.Description.from_json(found.to_json()), pickle.loads(pickle.dumps(found))):
        same(copy, found)
        assert copy["f"].quantile([0.1, 0.5]) == found["f"].quantile([0.1, 0.5])
        assert copy["s"].value_counts_error == found["s"].value_counts_error > 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 9}', '{"version": 1, "num_rows": 1, "features": {"a": {}}}']
)
def test_damaged_descriptions(text: str) -> None:
    with pytest.raises(fastpipe.errors.StateError, match="the description "):
        fastpipe.typing.Description.from_json(text)


def test_damage_anywhere_is_an_error_or_harmless() -> None:
    whole = json.loads(described(TABLE, exact_values=10).to_json())
    for name, feature in whole["features"].items():
        for key in feature:
            for wrong in ("x", -1, None, {}, {"n": 1}):
                damaged = json.loads(json.dumps(whole))
                damaged["features"][name][key] = wrong
                with contextlib.suppress(fastpipe.errors.StateError):
                    fastpipe.typing.Description.from_json(json.dumps(damaged))


def test_incompatible_descriptions_are_not_merged() -> None:
    numbers, texts, other = (described({name: values}) for name, values in (("a", [1]), ("a", ["x"]), ("b", [1])))
    before = numbers.to_json()
    with pytest.raises(fastpipe.errors.SchemaError, match="'a' is int64 in one description, and string in the other"):
        numbers.merge(texts)
    with pytest.raises(fastpipe.errors.SchemaError, match="different features"):
        numbers.merge(other)
    with pytest.raises(TypeError, match="other must be a Description"):
        numbers.merge({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="merging requires at least one description"):
        fastpipe.typing.Description.merged([])
    assert numbers.to_json() == before


def test_no_rows() -> None:
    empty = fastpipe.from_arrow(TABLE.slice(0, 0), batch_size=5).describe()
    assert (empty.num_rows, dict(empty)) == (0, {})
    whole = described(TABLE)
    both = fastpipe.typing.Description.merged([empty, whole])
    same(both, whole)
    assert str(empty).startswith("0 rows")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"exact_values": 0}, ValueError, "exact_values"),
        ({"rows": "all"}, TypeError, "rows"),
        ({"progress": 1}, TypeError, "progress must be True or False"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    reader = fastpipe.from_arrow(TABLE, batch_size=5)
    with pytest.raises(error, match=match):
        reader.describe(**arguments)


@pytest.mark.parametrize(
    ("ask", "error", "match"),
    [
        (lambda f: f.quantile(1.5), ValueError, "q must be between 0 and 1; got 1.5"),
        (lambda f: f.quantile(["a"]), TypeError, "q must be a number; got 'a'"),
        (lambda f: f.quantile(None), TypeError, "q must be a number; got None"),
        (lambda f: f.bin_edges(1), ValueError, "bins must be between 2 and 2147483647; got 1"),
        (lambda f: f.bin_edges(2.5), TypeError, "bins must be an integer; got 2.5"),
        (lambda f: f.value_counts(-1), ValueError, "limit must be between 0 and 9223372036854775807; got -1"),
        (lambda f: f.vocabulary(limit="all"), TypeError, "limit must be an integer; got 'all'"),
        (lambda f: f.vocabulary(min_count=0), ValueError, "min_count must be between 1 and 9223372036854775807; got 0"),
    ],
)
def test_wrong_questions(ask: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ask(described({"x": [1, 2]})["x"])


def test_unknown_features_are_named() -> None:
    with pytest.raises(KeyError, match="the features are 'i', 'f', 's', 'l'"):
        described(TABLE)["nosuch"]


def test_bin_edges_digitize() -> None:
    values = np.random.default_rng(3).normal(size=5000)
    found = fastpipe.from_arrays({"x": values}, batch_size=64).describe()["x"]
    edges = found.bin_edges(8)
    assert edges == found.quantile(np.arange(1, 8, dtype=np.float32) / 8)
    assert edges[3] == found.quantile(np.float32(0.5))
    counts = np.bincount(np.digitize(values, edges), minlength=8)
    assert len(counts) == 8
    assert counts.min() > 0.8 * 5000 / 8
    assert described({"x": [1, 1, 1, 1]})["x"].bin_edges(4) == []


def test_vocabularies_are_used_in_specs(tmp_path: Path) -> None:
    path = tmp_path / "t.avro"
    fastpipe.write_avro(path, pa.table({"city": ["Rome", "Oslo", "Rome", "Bonn"]}))
    vocabulary = fastpipe.read_avro(path, batch_size=2).describe()["city"].vocabulary(limit=2)
    features = {"city": fastpipe.VocabularySpec(vocabulary, on_unknown="bucket")}
    (batch,) = fastpipe.read_avro(path, features=features, batch_size=4)
    assert vocabulary == ["Rome", "Bonn"]
    assert batch["city"].tolist() == [0, 2, 0, 1]


def test_two_threads_describe_one_reader() -> None:
    reader = fastpipe.from_arrow(TABLE, batch_size=100)
    found: list[fastpipe.typing.Description] = []
    together([threading.Thread(target=lambda: found.append(reader.describe())) for _ in range(2)])
    same(*found)


def test_the_table_shows_all() -> None:
    text = str(described(TABLE))
    assert text.startswith("1,000 rows")
    assert all(name in text for name in ("int64", "float64", "string", "9.1%", "c1"))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    with pytest.raises(ImportError, match=r"pip install 'fastpipe-data\[describe\]'"):
        described(TABLE)


@pytest.mark.parametrize("spec", [None, fastpipe.DenseSpec((), "float32", fill=math.nan)])
def test_fields_without_a_value_are_nulls(spec: Any) -> None:
    data = b"x,y\n1.5,1\n,2\nNA,3\n-2.5,4\n"
    reader = fastpipe.read_csv(data, features=None if spec is None else {"x": spec}, batch_size=3)
    found = reader.describe()["x"]
    assert (found.null_count, found.nan_count, found.count, found.null_fraction) == (2, 0, 2, 0.5)
    assert (found.mean, found.min, found.max) == (-0.5, -2.5, 1.5)
    # Merged and stored descriptions include nulls.
    parts = [reader.read_partition(part).describe() for part in reader.partition(1)]
    assert fastpipe.typing.Description.merged([*parts, *parts])["x"].null_count == 4
    # If nulls are masked, NaN is a value.
    arrays = {"x": np.array([1.0, math.nan])}
    table = fastpipe.from_arrays(arrays, batch_size=3).describe()["x"]
    assert (table.null_count, table.nan_count, table.count) == (0, 1, 2)
