"""Splits, folds, and readers without some rows: which rows they have."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
import samples
from every_source import ROWS, Make, make
from fastpipe._reader.selection import select
from fastpipe._reader.splits import dealt, sides_of
from xxh3_oracle import xxh3

scipy_stats = pytest.importorskip("scipy.stats")
pa = pytest.importorskip("pyarrow")

# The fixture that makes readers of each source.
__all__ = ["make"]


def ids(reader: fastpipe.Reader, name: str = "i") -> list[int]:
    reader.set_epoch(0)
    return [int(i) for batch in reader for i in batch[name]]


def sides(parts: Iterable[fastpipe.Reader], name: str = "i") -> dict[int, int]:
    """Returns the part of each row. Each row must be in one part."""
    found = [(i, number) for number, part in enumerate(parts) for i in ids(part, name)]
    assert len(dict(found)) == len(found)
    return dict(found)


def side_of(hashed: int, fractions: list[Fraction]) -> int:
    """Returns the part of a hash, as the documentation defines it."""
    sums = itertools.accumulate(fractions[:-1])
    return sum(hashed >= sum_.numerator * 2**64 // sum_.denominator for sum_ in sums)


def int64(value: int) -> bytes:
    return (value % 2**64).to_bytes(8, "little")


def test_the_oracle_has_the_hashes_of_the_reference_implementation() -> None:
    # As computed by xxhash.xxh3_64_intdigest.
    assert xxh3(b"") == 0x2D06800538D394C2
    assert xxh3(b"", 0x9E3779B185EBCA8D) == 0xA8A6B918B2F0364A


def values_of(kind: str) -> tuple[Any, list[bytes | None]]:
    """Returns a column, and the bytes of each key; None for null."""
    numbers = [*range(-60, 60), *([None] * 5), 7, 7]
    as_bytes = [None if number is None else int64(number) for number in numbers]
    texts = [None if number is None else f"key {number}"[: 2 * (number % 7)] for number in numbers]
    if kind in ("text", "bytes", "codes"):
        encoded = [None if text is None else text.encode() for text in texts]
        column = pa.array(encoded, pa.binary()) if kind == "bytes" else pa.array(texts, pa.string())
        return (column.dictionary_encode() if kind == "codes" else column), encoded
    if kind == "bool":
        bools = [None if number is None else number % 3 == 0 for number in numbers]
        return pa.array(bools), [None if value is None else int64(int(value)) for value in bools]
    if kind == "uint64":
        large = [2**64 - 1, 2**63, 5]
        return pa.array(large, pa.uint64()), [int64(value) for value in large]
    types = {"int8": pa.int8(), "int64": pa.int64(), "date": pa.date32(), "time": pa.timestamp("us")}
    if kind == "date":
        days = [
            None if number is None else datetime.date(1970, 1, 1) + datetime.timedelta(number) for number in numbers
        ]
        return pa.array(days, pa.date32()), as_bytes
    return pa.array(numbers, types[kind]), as_bytes


@pytest.mark.parametrize("kind", ["text", "bytes", "codes", "bool", "int8", "int64", "uint64", "date", "time"])
@pytest.mark.parametrize("seed", [0, 5, 2**64 - 1])
def test_a_row_is_where_the_hash_of_its_key_says(kind: str, seed: int) -> None:
    column, keys = values_of(kind)
    table = pa.table({"i": np.arange(len(keys)), "key": column})
    reader = fastpipe.from_arrow(table, batch_size=11)
    fractions = [Fraction(0.5), Fraction(0.3), Fraction(0.2)]
    hashes = [xxh3(b"", (seed + 1) % 2**64) if key is None else xxh3(key, seed) for key in keys]
    expected = {i: side_of(hashed, fractions) for i, hashed in enumerate(hashes)}
    assert sides(reader.split(0.5, 0.3, 0.2, by="key", seed=seed)) == expected
    assert sides(part for _, part in reader.folds(3, by="key", seed=seed)) == {
        i: side_of(hashed, [Fraction(1, 3)] * 3) for i, hashed in enumerate(hashes)
    }


def test_nulls_that_a_spec_fills_are_the_fill_value_or_nat() -> None:
    table = pa.table({"i": np.arange(40), "day": pa.array([None, 3] * 20, pa.timestamp("us")), "k": [None, 3] * 20})
    masked = fastpipe.from_arrow(table, batch_size=7)
    features = {"i": fastpipe.DenseSpec((), "int64"), "day": fastpipe.DenseSpec((), "datetime64[us]", on_null="fill")}
    filled = fastpipe.from_arrow(
        table, batch_size=7, features=features | {"k": fastpipe.DenseSpec((), "int64", fill=9)}
    )
    for seed in range(9):
        by_day = sides(masked.split(0.5, 0.5, by="day", seed=seed))
        assert by_day == sides(filled.split(0.5, 0.5, by="day", seed=seed))
        assert sides(filled.split(0.5, 0.5, by="k", seed=seed))[0] == side_of(
            xxh3(int64(9), seed), [Fraction(1, 2)] * 2
        )


def csv(path: Path, rows: Iterable[int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("i,user\n" + "".join(f"{i},u{i % 97}\n" for i in rows))
    return path


def test_a_row_of_a_file_is_where_its_name_and_index_say(tmp_path: Path) -> None:
    csv(tmp_path / "a/x.csv", range(50))
    csv(tmp_path / "b/y.csv", range(100, 180))
    expected = {}
    for name, start, rows in (("x.csv", 0, 50), ("y.csv", 100, 80)):
        for row in range(rows):
            expected[start + row] = side_of(xxh3(int64(row), xxh3(name.encode(), 3)), [Fraction(0.7), Fraction(0.3)])
    reader = fastpipe.read_csv([tmp_path / "a/x.csv", tmp_path / "b/y.csv"], batch_size=16)
    assert sides(reader.split(0.7, 0.3, seed=3)) == expected
    # Parts of a part, and parts of a partition, have the same keys.
    first = reader.split(0.5, 0.5, seed=1)[0]
    assert sides(first.split(0.7, 0.3, seed=3)) == {i: expected[i] for i in ids(first)}
    (tmp_path / "moved").mkdir()
    for path in ("a/x.csv", "b/y.csv"):
        (tmp_path / path).rename(tmp_path / "moved" / path[2:])
    moved = fastpipe.read_csv(tmp_path / "moved", batch_size=7, shuffle=True, seed=1)
    assert sides(moved.split(0.7, 0.3, seed=3)) == expected


def test_rows_that_were_taken_keep_the_side_of_their_place(tmp_path: Path) -> None:
    for name, rows in (("a", range(50)), ("b", range(50, 130))):
        csv(tmp_path / f"{name}.csv", rows)
    reader = fastpipe.read_csv(tmp_path, batch_size=16)
    expected = sides(reader.split(0.5, 0.3, 0.2, seed=3))
    taken = np.random.default_rng(1).permutation(130)[:90]
    parts = reader.take(taken).split(0.5, 0.3, 0.2, seed=3)
    assert sides(parts) == {int(row): expected[int(row)] for row in taken}
    assert [ids(part) for part in parts] == [[row for row in taken if expected[row] == side] for side in range(3)]


def test_decimals_are_scaled_integers() -> None:
    table = pa.table({"i": np.arange(60), "price": pa.array(range(60)).cast(pa.decimal128(21, 2))})
    for scale in (2, 3):
        features = {"i": fastpipe.DenseSpec((), "int64"), "price": fastpipe.DenseSpec((), "int64", scale=scale)}
        parts = fastpipe.from_arrow(table, batch_size=9, features=features).split(0.5, 0.5, by="price", seed=2)
        assert sides(parts) == {i: side_of(xxh3(int64(i * 10**scale), 2), [Fraction(1, 2)] * 2) for i in range(60)}


def test_rows_of_memory_are_where_their_index_says() -> None:
    reader = fastpipe.from_arrays({"i": np.arange(70)}, batch_size=16)
    expected = {i: side_of(xxh3(int64(i), 4), [Fraction(1, 4)] * 4) for i in range(70)}
    assert sides(reader.split(0.25, 0.25, 0.25, 0.25, seed=4)) == expected


def test_units_of_other_sizes_change_nothing(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"i": np.arange(500)})
    found = []
    for size in (7, 100, 500):
        parquet.write_table(table, tmp_path / "t.parquet", row_group_size=size)
        for options in ({}, {"shuffle": True, "seed": 1}, {"shuffle": "block", "seed": 1, "num_threads": 3}):
            reader = fastpipe.read_parquet(tmp_path / "t.parquet", batch_size=32, **options)
            found.append(sides(reader.split(0.6, 0.4)))
            parts = reader.partition(3)
            halves = [reader.read_partition(part).split(0.6, 0.4) for part in parts]
            found.append({i: side for both in halves for i, side in sides(both).items()})
    assert all(each == found[0] for each in found)


def test_data_that_is_added_moves_no_row(tmp_path: Path) -> None:
    csv(tmp_path / "a.csv", range(2000))
    csv(tmp_path / "c.csv", range(5000, 7000))

    def now(by: str | None) -> dict[int, int]:
        return sides(fastpipe.read_csv(tmp_path, batch_size=300).split(0.8, 0.1, 0.1, by=by))

    before = {by: now(by) for by in (None, "user")}
    csv(tmp_path / "a.csv", range(2200))
    csv(tmp_path / "b.csv", range(10_000, 10_200))
    for by, sides_before in before.items():
        after = now(by)
        assert len(after) == len(sides_before) + 400
        assert {i: after[i] for i in sides_before} == sides_before
        # Keys with a fraction at the end that is divided stay in earlier parts.
        assert {i for i, side in now(by).items() if side == 0} == {i for i, side in after.items() if side == 0}
    whole = fastpipe.read_csv(tmp_path, batch_size=300)
    assert ids(whole.split(0.8, 0.2)[0]) == ids(whole.split(0.8, 0.05, 0.05, 0.1)[0])


def test_files_of_one_name_are_told_apart_by_their_partition_or_refused(tmp_path: Path) -> None:
    for day in range(40):
        csv(tmp_path / f"day={day}/x.csv", [day])
    found = sides(fastpipe.read_csv(tmp_path, batch_size=8).split(0.5, 0.5))
    expected = {day: xxh3(int64(0), xxh3(f"day={day}/x.csv".encode())) >= 2**63 for day in range(40)}
    assert found == expected
    (tmp_path / "day=1").rename(tmp_path / "other")
    (tmp_path / "day=2").rename(tmp_path / "another")
    reader = fastpipe.read_csv(tmp_path, batch_size=8)
    with pytest.raises(ValueError, match=r"another/x.csv and .*other/x.csv have the same name.*by="):
        reader.split(0.5, 0.5)
    assert len(sides(reader.split(0.5, 0.5, by="user"))) == 40
    twice = fastpipe.read_csv([tmp_path / "other/x.csv"] * 2, batch_size=8)
    assert sorted(part.num_rows for part in twice.split(0.5, 0.5)) == [0, 2]


def test_every_source_is_divided(make: Make) -> None:
    full = make(batch_size=ROWS, seed=3)
    names = ["id"] if "id" in full.features else ["user"] if "user" in full.features else []
    for by in (None, *names):
        parts = full.split(0.5, 0.3, 0.2, by=by, seed=1)
        places = [part.locate(0, row) for part in parts for row in range(part.num_rows)]
        assert sorted(map(str, places)) == sorted(str(full.locate(0, row)) for row in range(ROWS))
        others = make(batch_size=16, shuffle=True, seed=3, num_threads=1).split(0.5, 0.3, 0.2, by=by, seed=1)
        assert [part.num_rows for part in others] == [part.num_rows for part in parts]
        if by is not None:
            keys = [{int(key) for batch in part for key in batch[by]} for part in parts]
            assert not any(one & other for one, other in itertools.combinations(keys, 2))
    folds = full.folds(3, seed=1)
    assert sum(valid.num_rows for _, valid in folds) == ROWS
    for train, valid in folds:
        places = [reader.locate(0, row) for reader in (train, valid) for row in range(reader.num_rows)]
        assert len(set(map(str, places))) == ROWS
    kept = full.without(rows=[0, 5, 5, ROWS - 1])
    assert [kept.locate(0, row) for row in (0, 4, 236)] == [full.locate(0, row) for row in (1, 6, 238)]


@pytest.mark.parametrize("seed", range(3))
def test_parts_have_binomial_sizes(seed: int) -> None:
    rows, users = 20_000, 4_000
    reader = fastpipe.from_arrays({"i": np.arange(rows), "user": np.arange(rows) % users}, batch_size=1000)
    fractions = (0.9, 0.07, 0.03)
    for by, keys in ((None, rows), ("user", users)):
        for part, fraction in zip(reader.split(*fractions, by=by, seed=seed), fractions, strict=True):
            found = part.num_rows * keys // rows
            assert scipy_stats.binomtest(found, keys, fraction).pvalue > 0.001
    # Other seeds are independent: one tenth of a tenth of the rows is in both last parts.
    masks = [np.isin(np.arange(rows), ids(reader.split(0.9, 0.1, seed=seed + more)[1])) for more in (0, 100)]
    assert scipy_stats.binomtest(int((masks[0] & masks[1]).sum()), rows, 0.01).pvalue > 0.001


def test_stratified_folds_have_equal_shares() -> None:
    draw = np.random.default_rng(3)
    words = np.array(["rare", "common", "", "é"])[draw.choice(4, 1003, p=[0.01, 0.59, 0.2, 0.2])]
    table = pa.table({"i": np.arange(1003), "word": pa.array(words).dictionary_encode(), "text": words})
    reader = fastpipe.from_arrow(table, batch_size=100)
    found = []
    for column in ("word", "text"):
        folds = reader.folds(7, stratify=column, seed=2)
        side = sides(valid for _, valid in folds)
        found.append(side)
        for train, valid in folds:
            assert sorted(ids(train) + ids(valid)) == list(range(1003))
        counts = np.zeros((4, 7), int)
        for i, fold in side.items():
            counts[["rare", "common", "", "é"].index(words[i]), fold] += 1
        assert (counts.max(1) - counts.min(1) <= 1).all()
        assert np.ptp(counts.sum(0)) <= 1
    assert found[0] == found[1]
    assert sides(valid for _, valid in reader.folds(7, stratify="word", seed=3)) != found[0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**64 - 1)), max_size=60), st.integers(2, 9))
def test_dealing_matches_a_naive_one(rows: list[tuple[int, int]], count: int) -> None:
    strata = np.array([stratum for stratum, _ in rows], np.uint64)
    keys = np.array([key for _, key in rows], np.uint64)
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    expected = {row: place % count for place, row in enumerate(order)}
    assert dict(enumerate(dealt(strata, keys, count).tolist())) == expected


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.lists(st.integers(1, 2**70), min_size=1, max_size=6))
def test_thresholds_are_exact(hashes: list[int], weights: list[int]) -> None:
    fractions = [Fraction(weight, sum(weights)) for weight in weights]
    sums = list(itertools.accumulate(fractions))
    near = [
        min(max(sum_.numerator * 2**64 // sum_.denominator + off, 0), 2**64 - 1) for sum_ in sums for off in (-1, 0)
    ]
    arrays = [np.array(hashes, np.uint64), np.array(near, np.uint64)]
    found = sides_of(iter(arrays), len(hashes) + len(near), fractions).tolist()
    assert found == [side_of(hashed, fractions) for hashed in hashes + near]


def test_small_datasets() -> None:
    for rows in (0, 1):
        reader = fastpipe.from_arrays({"i": np.arange(rows)}, batch_size=8)
        for by in (None, "i"):
            assert sum(part.num_rows for part in reader.split(0.5, 0.5, by=by)) == rows
            assert sum(valid.num_rows for _, valid in reader.folds(5, by=by)) == rows
        assert sum(valid.num_rows for _, valid in reader.folds(5, stratify="i")) == rows
        assert reader.without(rows=range(rows)).num_rows == 0
        (all_rows,) = reader.split(1)
        assert ids(all_rows) == list(range(rows))


FEATURES = {"i": np.arange(100), "x": np.arange(100) / 7, "pair": np.zeros((100, 2), "int32")}


def reader_of_100(**options: Any) -> fastpipe.Reader:
    tags = fastpipe.Ragged(np.arange(100), np.arange(101))
    return fastpipe.from_arrays(FEATURES | {"tags": tags}, **{"batch_size": 8} | options)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda r: r.split(), ValueError, r"needs 1 to 65536 fractions, such as split\(0.9, 0.1\); got 0"),
        (lambda r: r.split(0.9, 0.2), ValueError, "0.9, 0.2 sum to 1.1"),
        (lambda r: r.split(0.9), ValueError, "Add a fraction for the remaining rows"),
        (lambda r: r.split(0.9, 0.1, 0), ValueError, "above 0 and at most 1; got 0"),
        (lambda r: r.split(1.5, -0.5), ValueError, "above 0 and at most 1; got 1.5"),
        (lambda r: r.split(float("nan"), 1), ValueError, "above 0 and at most 1; got nan"),
        (lambda r: r.split(float("inf")), ValueError, "above 0"),
        (lambda r: r.split("0.9", 0.1), TypeError, "fractions must be numbers"),
        (lambda r: r.split([0.9, 0.1]), TypeError, r"such as split\(0.9, 0.1\)"),
        (lambda r: r.split(True), TypeError, "fractions must be numbers"),
        (lambda r: r.split(0.5, 0.5, seed=-1), ValueError, "seed must be between 0 and"),
        (lambda r: r.split(0.5, 0.5, seed=2**64), ValueError, "seed must be between 0 and"),
        (lambda r: r.split(0.5, 0.5, seed=0.5), TypeError, "seed must be an integer"),
        (lambda r: r.split(0.5, 0.5, by="user"), fastpipe.errors.SchemaError, "by='user' is not a feature.*'i', 'x'"),
        (lambda r: r.split(0.5, 0.5, by=7), TypeError, "by must be the name of a feature"),
        (lambda r: r.split(0.5, 0.5, by="x"), fastpipe.errors.SchemaError, "has the dtype float64.*column of integers"),
        (lambda r: r.split(0.5, 0.5, by="pair"), fastpipe.errors.SchemaError, "has several values per row"),
        (lambda r: r.split(0.5, 0.5, by="tags"), fastpipe.errors.SchemaError, "has several values per row"),
        (lambda r: r.folds(1), ValueError, "num_folds must be between 2"),
        (lambda r: r.folds(2.0), TypeError, "num_folds must be an integer"),
        (lambda r: r.folds(2, by="i", stratify="i"), ValueError, "either by or stratify"),
        (lambda r: r.folds(2, stratify="x"), fastpipe.errors.SchemaError, "stratify='x' has the dtype float64"),
        (lambda r: r.without(rows=[100]), ValueError, "row 100 does not exist in 100 rows"),
        (lambda r: r.without(rows=[3, -1]), ValueError, "row -1 does not exist"),
        (lambda r: r.without(rows=[1.0]), TypeError, "rows must be a list or an array of integers"),
        (lambda r: r.without(rows=[True]), TypeError, "rows must be a list or an array of integers"),
        (lambda r: r.without(rows={1, 2}), TypeError, "rows must be a list or an array of integers"),
        (lambda r: r.without(rows="1"), TypeError, "rows must be a list or an array of integers"),
        (lambda r: r.without(rows=[[1]]), ValueError, r"got shape \(1, 1\)"),
        (lambda r: r.without(rows=[2**64]), TypeError, "rows must be a list or an array of integers"),
        (lambda r: r.sample(5, redraw=True).split(0.5, 0.5), ValueError, r"split\(\) cannot select rows of samples"),
    ],
)
def test_bad_arguments_are_refused(call: Any, error: type[Exception], match: str) -> None:
    reader = reader_of_100()
    with pytest.raises(error, match=match):
        call(reader)
    assert len(ids(reader)) == 100


def test_many_rows_are_hashed_in_several_steps(tmp_path: Path) -> None:
    rows = 150_000
    for name in "ab":
        fastpipe.write_avro(tmp_path / f"{name}.avro", {"i": np.arange(rows)})
    reader = fastpipe.read_avro(tmp_path, batch_size=rows)
    mask = np.arange(2 * rows) % 3 > 0
    hashes = [xxh3(int64(i % rows), xxh3(b"ab"[i // rows :][:1] + b".avro")) for i in range(0, 2 * rows, 997)]
    expected = np.array(hashes, np.uint64) >= 2**63
    halves = reader.split(0.5, 0.5)
    sides_ = np.concatenate([np.arange(2 * rows)[_rows_of(half)] for half in halves])
    assert len(np.unique(sides_)) == 2 * rows
    assert (np.isin(np.arange(0, 2 * rows, 997), sides_[halves[0].num_rows :]) == expected).all()
    of_two_thirds = select(reader, mask).split(0.5, 0.5)[1]
    assert (_rows_of(of_two_thirds) == _rows_of(halves[1])[mask[_rows_of(halves[1])]]).all()
    second = reader.partition(2)[1]
    start = 2 * rows - second.rows
    part = reader.read_partition(second).split(0.5, 0.5)[1]
    assert part.num_rows == (_rows_of(halves[1]) >= start).sum()


def _rows_of(reader: fastpipe.Reader) -> np.ndarray:
    """Returns the dataset rows of a selection."""
    return np.flatnonzero(reader._data.origin()[1])  # type: ignore[attr-defined]


def test_readers_keep_their_options() -> None:
    reader = reader_of_100(
        shuffle="buffer", shuffle_buffer=10, seed=3, rank=1, world_size=2, epochs=2, shard_by="batch"
    )
    part = reader.split(0.8, 0.2)[0]
    assert (part.rank, part.world_size, part.seed, part.batch_size) == (1, 2, 3, 8)
    assert part._ordering == reader._ordering
    assert len(list(part)) == len(part)
    next(iter(reader))
    assert reader.split(0.5, 0.5)[0].epoch == 0
    with pytest.raises(ValueError, match="would leave every rank without a batch"):
        reader.split(0.95, 0.05)


def test_a_damaged_row_moves_no_other_row(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[20] * 10])
    before = sides(data.read(batch_size=16).split(0.5, 0.5), "id")
    path = Path(data.paths[0])
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :][:4] = b"\xff" * 4
    path.write_bytes(content[: len(content) // 2] + b"\xff" * 4 + content[len(content) // 2 + 4 :])
    parts = data.read(batch_size=1, index_cache=None).split(0.5, 0.5)
    found: dict[int, int] = {}
    for number, part in enumerate(parts):
        for step in range(len(part)):
            try:
                found[int(part.batch_at(step)["id"][0])] = number
            except fastpipe.errors.FastpipeError:
                continue
    assert len(found) >= 170
    assert {i: before[i] for i in found if i in before} == {i: side for i, side in found.items() if i in before}
