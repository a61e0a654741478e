"""Random samples of every source and of CSV files, and the distribution of their rows."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from csv_rows import by_length, naive_rows, write
from fastpipe import DenseSpec, col
from fastpipe._reader.sampling import rows_of_sample

scipy_stats = pytest.importorskip("scipy.stats")

ROWS = 20_000


def of_arrays(**options: Any) -> fastpipe.Reader:
    return fastpipe.from_arrays({"i": np.arange(ROWS)}, **{"batch_size": 100} | options)


def ids(reader: fastpipe.Reader) -> list[int]:
    return [int(i) for batch in reader for i in batch["i"]]


@pytest.mark.parametrize("rows", [1, 99, 100, 5000, ROWS])
@pytest.mark.parametrize("replace", [False, True])
def test_a_sample_has_rows_in_file_order(rows: int, replace: bool) -> None:
    drawn = of_arrays().sample(rows, replace=replace, seed=3)
    assert drawn.num_rows == rows
    assert len(drawn) == -(-rows // 100)
    found = ids(drawn)
    assert found == sorted(found)
    assert len(found) == rows
    assert found == rows_of_sample(drawn).tolist()
    if not replace:
        assert len(set(found)) == rows
    if rows > 1000:
        # Compares the number of distinct rows with the expected one.
        distinct = ROWS * (1 - (1 - 1 / ROWS) ** rows) if replace else rows
        assert abs(len(set(found)) - distinct) < 4 * np.sqrt(rows) + 1
    again = of_arrays(num_threads=3, batch_size=7).sample(rows, replace=replace, seed=3)
    assert ids(again) == found
    assert ids(of_arrays().sample(rows, replace=replace, seed=4)) != found or rows == ROWS


@pytest.mark.parametrize("replace", [False, True])
def test_epochs_may_have_different_rows(replace: bool) -> None:
    drawn = of_arrays(epochs=3).sample(1000, seed=3, replace=replace, redraw=True)
    found = np.array(ids(drawn)).reshape(3, 1000)
    for epoch in range(3):
        assert (rows_of_sample(drawn, epoch) == found[epoch]).all()
    assert len(np.unique(found)) > 2500
    fixed = of_arrays(epochs=3).sample(1000, seed=3, replace=replace)
    assert (np.array(ids(fixed)).reshape(3, 1000) == found[0]).all()
    assert drawn.seed == 3
    with pytest.raises(ValueError, match="pass only one of weights, redraw"):
        of_arrays().sample(9, weights=np.ones(ROWS), redraw=True)
    ranks = [
        of_arrays(epochs=3, rank=rank, world_size=2, on_uneven="allow").sample(
            1000, seed=3, replace=replace, redraw=True
        )
        for rank in range(2)
    ]
    assert sorted(ids(ranks[0]) + ids(ranks[1])) == np.sort(found.reshape(-1)).tolist()


def test_parts_share_no_row() -> None:
    parts = [ids(of_arrays().sample(4000, seed=9, part=part)) for part in range(5)]
    assert sorted(i for part in parts for i in part) == list(range(ROWS))
    with pytest.raises(ValueError, match=r"rows=4000 \(parts 0 to 5, 4000 rows each\) exceeds the 20000"):
        of_arrays().sample(4000, seed=9, part=5)
    drawn = [ids(of_arrays().sample(4000, replace=True, seed=9, part=part)) for part in (5, 6)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("how", [{}, {"redraw": True}])
def test_a_state_resumes_at_every_step(how: dict[str, Any]) -> None:
    drawn = of_arrays(epochs=2).sample(550, seed=1, part=2, **how)
    whole = ids(drawn)
    drawn.set_epoch(0)
    batches = iter(drawn)
    for step in range(12):
        again = of_arrays(epochs=2).sample(550, seed=1, part=2, **how)
        again.load_state_dict(drawn.state_dict())
        assert ids(again) == whole[step % 6 * 100 + step // 6 * 550 :]
        next(batches)
    assert [ids_of(drawn.batch_at(step, epoch=1)) for step in (5, 0)] == [whole[1050:], whole[550:650]]
    assert drawn.locate(0, 7, epoch=1).row == whole[557]
    for other in (
        of_arrays().sample(550, seed=1, part=1, **how),
        of_arrays().sample(550, seed=1, part=2, replace=True, **how),
        of_arrays().sample(550, seed=1, part=2, redraw=not how),
        of_arrays(),
    ):
        with pytest.raises(fastpipe.errors.StateError, match="cannot resume from this state"):
            other.load_state_dict(drawn.state_dict())
    assert ids(pickle.loads(pickle.dumps(of_arrays().sample(550, seed=1)))) == whole_of(550)


def ids_of(batch: dict[str, Any]) -> list[int]:
    return [int(i) for i in batch["i"]]


def whole_of(rows: int) -> list[int]:
    return ids(of_arrays().sample(rows, seed=1))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"rows": 0}, ValueError, "rows must be between 1"),
        ({"rows": ROWS + 1}, ValueError, "exceeds the 20000 rows of the dataset: .*replace=True"),
        ({"rows": 2.0}, TypeError, "rows must be an integer"),
        ({"rows": 1, "replace": 1}, TypeError, "replace must be True or False"),
        ({"rows": 1, "seed": -1}, ValueError, "seed must be between"),
        ({"rows": 1, "part": -1}, ValueError, "part must be between"),
        ({"rows": 1, "batch_size": 0}, ValueError, "batch_size must be between"),
    ],
)
def test_errors_of_arguments(options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        of_arrays().sample(**options)


def test_readers_that_cannot_be_sampled() -> None:
    with pytest.raises(ValueError, match="every rank must draw the same rows"):
        of_arrays(world_size=2, seed=1).sample(1)
    with pytest.raises(ValueError, match=r"sample\(\) cannot select rows of samples that are drawn for each epoch"):
        of_arrays().sample(10, redraw=True).sample(1)
    with pytest.raises(ValueError, match=r"take\(\) cannot select rows of samples that are drawn for each epoch"):
        of_arrays().sample(10, redraw=True).take([1])
    for how in ({}, {"weights": []}, {"balance": []}):
        with pytest.raises(ValueError, match="the dataset has no rows"):
            fastpipe.from_arrays({"i": np.arange(0)}, batch_size=1).sample(1, replace=True, **how)
    with pytest.raises(fastpipe.errors.LimitError, match=r"a sample of rows=2147483648; rows=.* would fit"):
        of_arrays().sample(2**31, replace=True)


# --- Files ---


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"replace": True},
        {"stratify": np.arange(50_000) % 3},
        {"stratify": np.arange(50_000) % 3, "replace": True},
        {"weights": np.full(50_000, 2.5)},
        {"weights": np.full(50_000, 2.5), "replace": True},
    ],
    ids=["exact", "with replacement", "strata", "strata with replacement", "weights", "weights with replacement"],
)
def test_long_and_short_rows_are_equally_likely(tmp_path: Path, how: dict[str, Any]) -> None:
    """Draws twenty samples. The smallest of 40 p-values is below 0.001 / 40 with a probability of 0.001."""
    count = 50_000
    size, before = write(tmp_path / "x.csv", count)
    values = []
    for seed in range(20):
        drawn = fastpipe.csv.sample_csv(tmp_path / "x.csv", 5000, seed=seed, columns=["i"], dtype="int64", **how)
        assert (drawn.values[:, 0] == drawn.rows).all()
        values += [by_length(drawn.rows, size), by_length(drawn.rows, before)]
    assert min(values) > 0.001 / 40
    # Proves that the test detects bias: picking the rows at random bytes is biased.
    assert by_length(naive_rows(size, 5000), size) < 1e-9


def test_means_vary_as_in_simple_random_sampling(tmp_path: Path) -> None:
    """Samples a file that is sorted by its target. The tolerance of one fifth is five standard deviations of 1,000
    samples.
    """
    count, rows = 2000, 100
    path = tmp_path / "x.csv"
    path.write_text("y\n" + "".join(f"{i * i}\n" for i in range(count)))
    reader = fastpipe.read_csv(path, features={"y": DenseSpec((), "float64")}, batch_size=rows)
    means = []
    for seed in range(1000):
        (batch,) = reader.sample(rows, seed=seed)
        means.append(batch["y"].mean())
    population = np.arange(count, dtype=float) ** 2
    expected = population.var(ddof=1) / rows * (1 - rows / count)
    assert abs(np.var(means, ddof=1) / expected - 1) < 0.22
    assert abs(np.mean(means) - population.mean()) < 5 * np.sqrt(expected / 1000)


def test_samples_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    draw = np.random.default_rng(1)
    table = draw.standard_normal((5000, 3)).astype(np.float32)
    lines = [",".join(map(repr, map(float, row))) for row in table]
    path.write_text("a,b,c\n" + "\n".join(lines[:4999]) + "\n1,,x")
    drawn = fastpipe.csv.sample_csv(path, 300, seed=2, columns=["c", "a"], null_values=["", "x"])
    assert (drawn.values.dtype, drawn.values.flags.c_contiguous, drawn.columns) == (np.float32, True, ["c", "a"])
    table[4999] = [1, np.nan, np.nan]
    assert np.array_equal(drawn.values, table[drawn.rows][:, [2, 0]], equal_nan=True)
    whole = fastpipe.csv.sample_csv(path, 5000, dtype="float64", order="F", null_values=["", "x"])
    assert whole.values.flags.f_contiguous
    assert np.array_equal(whole.values.astype(np.float32), table, equal_nan=True)
    assert whole.rows.tolist() == list(range(5000))
    same = fastpipe.csv.sample_csv(path, 5000, seed=whole.seed, null_values=["", "x"], memory_limit="64MB")
    assert np.array_equal(same.values, table, equal_nan=True)
    with pytest.raises(fastpipe.errors.SchemaError, match=r"can't hold the columns 'c'.*columns=\['a', 'b'\]"):
        fastpipe.csv.sample_csv(path, 3)
    with pytest.raises(fastpipe.errors.ValueRangeError, match=r"feature 'b': cannot parse .* as int64"):
        fastpipe.csv.sample_csv(path, 5000, columns=["b"], dtype="int64")
    with pytest.raises(ValueError, match="exceeds the 5000 rows"):
        fastpipe.csv.sample_csv(path, 5001, columns=["a"])
    with pytest.raises(ValueError, match='order must be "C" or "F"'):
        fastpipe.csv.sample_csv(path, 1, columns=["a"], order="K")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype must be numeric"):
        fastpipe.csv.sample_csv(path, 1, columns=["a"], dtype="bytes")
    with pytest.raises(ValueError, match="columns is empty"):
        fastpipe.csv.sample_csv(path, 1, columns=[])


@pytest.mark.parametrize("method", ["exact", "block", "estimate", "stream"])
def test_floats_keep_integers_and_finite_numbers(method: Any) -> None:
    def drawn(text: str, **options: Any) -> Any:
        data = b"a,b\n" + b"1,2\n" * 30 + f"3,{text}\n".encode() + b"1,2\n" * 30
        how = {"seed": 1, "method": method, "columns": ["b"]} | options
        rows = 61 if method != "estimate" else 50
        return fastpipe.csv.sample_csv(data, rows, replace=method == "estimate", **how).values

    for text, dtype, hint in (
        ("16777217", "float32", 'dtype="float64"'),
        (" -16777219", "float32", 'dtype="float64"'),
        ("1e39", "float32", 'dtype="float64"'),
        ("2049", "float16", 'dtype="float64"'),
        ("70000.5", "float16", 'dtype="float64"'),
        ("9007199254740993", "float32", 'dtype="int64"'),
        ("9007199254740993", "float64", 'dtype="int64"'),
        ("18446744073709551615", "float64", 'dtype="uint64"'),
        ("1e400", "float64", "leave the column out"),
    ):
        with pytest.raises(
            fastpipe.errors.ValueRangeError, match=f"feature 'b': .*{text.strip()}.* exact as {dtype}.*{hint}"
        ):
            # Sampling at random byte offsets misses a row with some seeds.
            [drawn(text, dtype=dtype, seed=seed) for seed in range(20 if method == "estimate" else 1)]
    for text in ("16777216", "0.1", "123456789.5", "1e38", "inf", "-Infinity", "33554436", "-0", ""):
        found = drawn(text, dtype="float32")
        assert method == "estimate" or np.float32(text or "nan") in found or np.isnan(found).any()
    assert method == "estimate" or drawn("16777217", dtype="float64").max() == 16_777_217
    assert method == "estimate" or drawn("9007199254740993", dtype="int64").max() == 2**53 + 1


def test_several_files_form_one_population(tmp_path: Path) -> None:
    for number in range(3):
        numbers = range(number * 100, number * 100 + 100)
        (tmp_path / f"{number}.csv").write_text("i\n" + "\n".join(map(str, numbers)))
    drawn = fastpipe.csv.sample_csv(tmp_path, 50, seed=1)
    assert drawn.values[:, 0].tolist() == drawn.rows.tolist()
    assert drawn.rows.max() > 200


def test_only_units_of_batches_in_flight_are_held(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("i,pad\n" + "".join(f"{i},{'x' * 1000}\n" for i in range(40_000)))
    reader = fastpipe.read_csv(path, columns=["i"], batch_size=20, num_threads=2)
    drawn = reader.sample(600, seed=1)
    assert len(ids(drawn)) == 600
    stats: Any = drawn.stats()
    assert stats["memory"]["most_reserved"] < 16 << 20
    assert stats["rows_reopened"] == 0


# --- Shuffles, strata and weights ---


@pytest.mark.parametrize("shuffle", [True, "block", "buffer"])
def test_a_shuffle_is_not_ignored(shuffle: Any) -> None:
    reader = of_arrays(shuffle=shuffle, seed=3)
    for how in ({}, {"replace": True}, {"stratify": np.zeros(ROWS, int)}, {"weights": np.ones(ROWS)}):
        found = ids(reader.sample(500, seed=1, **how))
        assert sorted(found) == ids(of_arrays().sample(500, seed=1, **how))
        # All rows are in one block, whose rows keep their order.
        assert (found == sorted(found)) == (shuffle == "block")
    with pytest.raises(fastpipe.errors.UnsupportedError, match=rf"shuffle={shuffle!r}.*rebatch\(") as told:
        reader.sample(5, redraw=True)
    # The code in the hint works.
    drawn = of_arrays().sample(500, redraw=True)
    hint = str(told.value).rpartition(" then ")[2]
    found = ids(eval(hint, {"fastpipe": fastpipe, "drawn": drawn}))
    assert found != sorted(found)
    assert sorted(found) == rows_of_sample(drawn).tolist()


def learned(batches: Any, weights: np.ndarray) -> None:
    """Performs a step of logistic regression with each batch."""
    for batch in batches:
        x, y = batch["x"], batch["y"]
        weights += 0.5 * x.T @ (y - 1 / (1 + np.exp(-x @ weights))) / len(y)


def test_cross_validation_on_sorted_data() -> None:
    """Checks that the manual's recipe learns as well as a plain shuffle from files whose rows are sorted by class."""
    draw = np.random.default_rng(2)
    y = np.repeat([0.0, 1.0], 2000)
    x = np.column_stack([draw.normal(size=(4000, 4)) + 0.35 * (2 * y - 1)[:, np.newaxis], np.ones(4000)])
    reader = fastpipe.from_arrays({"x": x, "y": y, "i": np.arange(4000)}, batch_size=50)
    folds = np.array_split(np.random.default_rng(1).permutation(4000), 5)
    accuracy: dict[str, list[float]] = {"plain": [], "recipe": [], "in file order": []}
    for number, fold in enumerate(folds):
        rows = np.concatenate(folds[:number] + folds[number + 1 :])
        train, test = reader.take(np.sort(rows)), reader.take(fold)
        plain = fastpipe.from_arrays(
            {"x": x[np.sort(rows)], "y": y[np.sort(rows)]}, batch_size=50, shuffle=True, seed=7
        )
        orders = []
        weights = {name: np.zeros(5) for name in accuracy}
        for epoch in range(3):
            shuffled = list(train.rebatch(50, shuffle_buffer=train.num_rows, seed=7, epoch=epoch))
            orders.append([int(i) for batch in shuffled for i in batch["i"]])
            learned(shuffled, weights["recipe"])
            learned(plain, weights["plain"])
            learned(train, weights["in file order"])
            again = reader.take(np.sort(rows)).rebatch(50, shuffle_buffer=len(rows), seed=7, epoch=epoch)
            assert [int(i) for batch in again for i in batch["i"]] == orders[-1]
        assert all(sorted(order) == sorted(rows.tolist()) for order in orders)
        assert orders[0] != orders[1] != orders[2]
        for name, found in accuracy.items():
            found.append(np.mean([(batch["x"] @ weights[name] > 0) == batch["y"] for batch in test]))
    mean = {name: float(np.mean(found)) for name, found in accuracy.items()}
    assert abs(mean["recipe"] - mean["plain"]) < 0.01, mean
    assert mean["in file order"] < mean["plain"] - 0.05, mean


def test_rows_are_taken_by_index() -> None:
    taken = of_arrays().take([70, 3, 19_999, 3])
    assert ids(taken) == [70, 3, 19_999, 3]
    assert taken.num_rows == 4
    state = taken.state_dict()
    again = of_arrays().take([70, 3, 19_999, 3])
    again.load_state_dict(state)
    assert ids(pickle.loads(pickle.dumps(of_arrays(epochs=2).take([5, 2])))) == [5, 2, 5, 2]
    for other in ([3, 70, 19_999], [3, 3, 70, 19_999], [70, 3, 19_998, 3]):
        with pytest.raises(fastpipe.errors.StateError, match="cannot resume from this state"):
            of_arrays().take(other).load_state_dict(state)
    assert ids(taken.take([2, 0, 2])) == [19_999, 70, 19_999]
    assert ids(taken.without(rows=[0])) == [3, 19_999, 3]
    assert ids(taken.take([3, 0, 1]).sample(2, seed=1)) in ([3, 70], [3, 3], [70, 3])
    (part,) = taken.partition(3)
    assert ids(taken.read_partition(part)) == [70, 3, 19_999, 3]
    for wrong, error, match in (
        ([20_000], ValueError, "row 20000 does not exist in 20000 rows"),
        ([-1], ValueError, "row -1 does not exist"),
        ([2**64 - 1], ValueError, "row 18446744073709551615 does not exist"),
        ([], ValueError, "rows is empty: pass at least one row index"),
        (np.zeros(0), ValueError, "rows is empty"),
        ([[]], TypeError, "rows must be integers"),
        ([[1]], ValueError, "must be a list"),
        ([1.0], TypeError, "rows must be integers"),
        ([True], TypeError, "rows must be integers"),
    ):
        with pytest.raises(error, match=match):  # type: ignore[arg-type]
            of_arrays().take(wrong)
    with pytest.raises(ValueError, match="row 0 does not exist in 0 rows"):
        fastpipe.from_arrays({"i": np.arange(0)}, batch_size=1).take([0])


@pytest.mark.parametrize("shuffle", [True, "block", "buffer"])
def test_each_occurrence_of_a_row_is_shuffled(shuffle: Any) -> None:
    """The probability that the places of the first of two rows aren't uniform by chance is 0.001."""
    rows = [3, 1, 3, 8, 0, 3, 8, 15]
    taken = of_arrays(shuffle=shuffle, shuffle_buffer=100, batch_size=2, seed=1, epochs=400).take(rows)
    found = np.array(ids(taken)).reshape(400, 8)
    assert (np.sort(found) == np.sort(rows)).all()
    assert (
        ids(of_arrays(shuffle=shuffle, shuffle_buffer=100, batch_size=2, seed=1).take(sorted(rows)))
        == found[0].tolist()
    )
    if shuffle != "block":
        assert scipy_stats.chisquare(np.bincount(np.argmax(found == 15, axis=1), minlength=8)).pvalue > 0.001
    ranks = [
        of_arrays(shuffle=shuffle, shard_by="batch", batch_size=2, seed=1, rank=rank, world_size=2).take(rows)
        for rank in range(2)
    ]
    assert sorted(ids(ranks[0]) + ids(ranks[1])) == sorted(rows)


@pytest.mark.parametrize("replace", [False, True])
def test_balanced_samples(replace: bool) -> None:
    group = np.random.default_rng(2).choice(["a", "b", "c"], ROWS, p=[0.7, 0.29, 0.01])
    table = {"i": np.arange(ROWS), "g": codes(group)}
    reader = fastpipe.from_arrays(table, batch_size=100, shuffle=True, seed=3)
    drawn = reader.sample(301, seed=5, balance="g", replace=replace)
    found = ids(drawn)
    assert sorted(np.unique(group[found], return_counts=True)[1].tolist()) == [100, 100, 101]
    assert len(set(found)) == 301 or replace
    for balance in (group, col("g"), col("g") + 1):
        assert ids(reader.sample(301, seed=5, balance=balance, replace=replace)) == found
    if replace:
        return
    other = ids(reader.sample(150, seed=5, balance="g", part=1))
    assert not set(other) & set(ids(reader.sample(150, seed=5, balance="g")))
    few = int((group == "c").sum())
    with pytest.raises(
        ValueError, match=rf"{few} rows have the value c, fewer than the 667 .* rows={few * 3}, or set replace"
    ):
        reader.sample(2000, balance=group)
    assert reader.sample(few * 3, balance=group).num_rows == few * 3
    assert reader.sample(2, balance="g", seed=1).num_rows == 2


def test_rows_of_a_class_are_equally_likely() -> None:
    """The probability that this fails by chance for any of the 40 tenths of classes is 0.001."""
    group = np.arange(ROWS) % 4
    for replace in (False, True):
        counts = np.zeros((4, 10))
        for seed in range(20):
            found = rows_of_sample(of_arrays().sample(402, seed=seed, balance=group, replace=replace))
            np.add.at(counts, (found % 4, found * 10 // ROWS), 1)
        assert abs(counts.sum(1) - 2010).max() <= 20
        assert min(scipy_stats.chisquare(row).pvalue for row in counts) > 0.001 / 8


def test_weights_by_expression() -> None:
    table = {"i": np.arange(ROWS), "w": np.arange(ROWS) % 5}
    for options in ({}, {"shuffle": True, "seed": 1}):
        reader = fastpipe.from_arrays(table, batch_size=100, **options)  # type: ignore[arg-type]
        found = ids(reader.sample(1000, seed=5, weights=col("w") * 2 - col("w")))
        assert (
            found
            == ids(reader.sample(1000, seed=5, weights="w"))
            == ids(reader.sample(1000, seed=5, weights=table["w"]))
        )
    bad = fastpipe.from_arrays({"x": np.array([1.0, np.nan, -1.0])}, batch_size=2, shuffle=True)
    with pytest.raises(ValueError, match="the weight of row 1 is nan"):
        bad.sample(1, weights=col("x"))
    with pytest.raises(ValueError, match="the weight of row 2 is -1"):
        bad.take([0, 0, 2]).sample(1, weights=col("x"))
    with pytest.raises(fastpipe.errors.SchemaError, match="'y', which isn't a feature"):
        bad.sample(1, weights=col("y"))
    pa = pytest.importorskip("pyarrow")
    nulls = fastpipe.from_arrow(pa.table({"w": pa.array([1, None, 3]), "t": ["a", "b", None]}), batch_size=2)
    for how in ("weights", "balance", "stratify"):
        with pytest.raises(ValueError, match=rf"{how}: col\(.w.\).* is null in row 1"):
            nulls.sample(1, **{how: col("w")})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"balance: col\(.t.\) is null in row 2"):
        nulls.sample(2, balance=col("t"))
    with pytest.raises(fastpipe.errors.SchemaError):
        nulls.sample(2, weights=col("t"))
    assert nulls.take([1, 0, 0]).sample(2, balance=col("t"), seed=1).num_rows == 2
    with pytest.raises(ValueError, match="pass only one of balance, weights"):
        nulls.sample(2, balance="t", weights="w")


@pytest.mark.parametrize("replace", [False, True])
def test_strata_are_sampled_proportionally(replace: bool) -> None:
    draw = np.random.default_rng(2)
    group = draw.choice(["a", "b", "c"], ROWS, p=[0.7, 0.29, 0.01])
    reader = fastpipe.from_arrays({"i": np.arange(ROWS), "g": codes(group)}, batch_size=100)
    found = ids(reader.sample(1000, seed=5, stratify="g", replace=replace))
    assert found == ids(reader.sample(1000, seed=5, stratify=group, replace=replace))
    sizes = {name: (group == name).sum() for name in "abc"}
    for name, size in sizes.items():
        assert abs((group[found] == name).sum() - 1000 * size / ROWS) < 1
    if not replace:
        assert len(set(found)) == 1000
        more = ids(reader.sample(1000, seed=5, part=1, stratify=group))
        assert not set(more) & set(found)


def test_parts_of_strata_cover_all_rows() -> None:
    """Covers row counts that aren't a multiple of the sample size, and strata with fewer rows than there are parts."""
    group = np.random.default_rng(2).integers(0, 300, ROWS)
    reader = of_arrays()
    parts = [ids(reader.sample(900, seed=5, part=part, stratify=group)) for part in range(22)]
    assert len({i for part in parts for i in part}) == 22 * 900
    for part in parts:
        assert (abs(np.bincount(group[part], minlength=300) - 900 * np.bincount(group) / ROWS) < 1).all()
    with pytest.raises(ValueError, match=r"rows=900 \(parts 0 to 22"):
        reader.sample(900, seed=5, part=22, stratify=group)


def test_all_sources_draw_the_same_strata(tmp_path: Path) -> None:
    """Text and numbers sort differently, but equal strata must yield equal samples."""
    path, group = tmp_path / "x.csv", np.random.default_rng(2).integers(0, 300, 3000)
    path.write_text("i,g\n" + "".join(f"{i},{g}\n" for i, g in enumerate(group)))
    drawn = [
        fastpipe.csv.sample_csv(path, 500, seed=3, columns=["i"], stratify=stratify).rows for stratify in ("g", group)
    ]
    readers = [
        fastpipe.read_csv(path, batch_size=64),
        fastpipe.read_csv(path, features={"g": DenseSpec((), "string")}, batch_size=64),
        fastpipe.from_arrays({"g": group}, batch_size=64),
    ]
    drawn += [rows_of_sample(reader.sample(500, seed=3, stratify="g")) for reader in readers]
    assert all(rows is not None and (rows == drawn[0]).all() for rows in drawn)


def codes(values: Any) -> Any:
    return np.unique(values, return_inverse=True)[1]


def test_rows_of_a_stratum_are_equally_likely() -> None:
    """The probability that this fails by chance for any of the 40 tenths of strata is 0.001."""
    group = np.arange(ROWS) % 4
    counts = np.zeros((4, 10))
    for seed in range(20):
        found = np.array(ids(of_arrays().sample(400, seed=seed, stratify=group)))
        np.add.at(counts, (found % 4, found * 10 // ROWS), 1)
    assert counts.sum(1).tolist() == [2000] * 4
    assert min(scipy_stats.chisquare(row).pvalue for row in counts) > 0.001 / 4


@pytest.mark.parametrize("replace", [False, True])
def test_rows_are_drawn_by_weight(replace: bool) -> None:
    weights = np.array([0.0, 1, 2, 5])[np.arange(ROWS) % 4]
    counts = np.zeros(4)
    for seed in range(20):
        found = np.array(ids(of_arrays().sample(100, seed=seed, weights=weights, replace=replace)))
        counts += np.bincount(found % 4, minlength=4)
    assert counts[0] == 0
    # The sample is so small that drawing without replacement hardly changes the proportions.
    assert scipy_stats.chisquare(counts[1:], 2000 * np.array([1, 2, 5]) / 8).pvalue > 0.001
    with pytest.raises(ValueError, match="15000 rows have weights above 0, fewer than the 15001"):
        of_arrays().sample(15_001, weights=weights)
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="the weight of row 7 is"):
            of_arrays().sample(1, weights=np.where(np.arange(ROWS) == 7, wrong, 1.0))
    with pytest.raises(ValueError, match="one value for each of the 20000 rows"):
        of_arrays().sample(1, weights=[1.0])
    with pytest.raises(ValueError, match="pass only one of stratify, weights"):
        of_arrays().sample(1, weights=weights, stratify=weights)


NUMBERS: list[tuple[str | None, bool, int, list[int]]] = [
    (None, False, 0, [1, 4, 8, 13, 22, 24]),
    (None, False, 1, [3, 5, 7, 14, 16, 39]),
    (None, True, 0, [2, 6, 21, 25, 30, 36]),
    ("stratify", False, 0, [1, 17, 21, 30, 38, 39]),
    ("stratify", False, 1, [3, 5, 12, 19, 20, 31]),
    ("stratify", True, 1, [0, 2, 14, 16, 22, 36]),
    ("balance", False, 0, [10, 12, 20, 21, 29, 31]),
    ("balance", False, 1, [2, 4, 9, 13, 27, 32]),
    ("balance", True, 1, [0, 6, 13, 14, 26, 34]),
    ("weights", False, 0, [8, 14, 25, 30, 35, 38]),
    ("weights", False, 1, [5, 7, 11, 16, 17, 28]),
    ("weights", True, 1, [9, 12, 17, 28, 33, 35]),
]


@pytest.mark.parametrize(("how", "replace", "part", "expected"), NUMBERS)
def test_samples_never_change(how: str | None, replace: bool, part: int, expected: list[int]) -> None:
    """A state that was saved with an earlier version must find the same rows."""
    options: dict[str, Any] = {} if how is None else {how: 1 + np.arange(40) % 3}
    reader = fastpipe.from_arrays({"i": np.arange(40)}, batch_size=40)
    assert ids(reader.sample(6, seed=5, replace=replace, part=part, **options)) == expected


@pytest.mark.parametrize("how", ["weights", "balance", "stratify"])
def test_errors_name_the_argument(how: str) -> None:
    rows = fastpipe.from_arrays({"i": np.arange(9), "pair": np.zeros((9, 2))}, batch_size=3)
    known = rf"{how} must be .*an expression such as fastpipe.col\('i'\) > 3; got 'w'. The features are 'i', 'pair'"
    for wrong, match in (
        ("w", known),
        (col("j") > 3, f"^{how}= names 'j', which isn't a feature of the reader; did you mean 'i'|^{how}= names 'j'"),
        (col("pair") > 3, f"^{how}= names 'pair', which has several values per row .*: use features with one value"),
    ):
        with pytest.raises(fastpipe.errors.SchemaError, match=match):
            rows.sample(1, **{how: wrong})


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("scale", [1e308, 1e-308, 1e-320, 2.0**-1022])
def test_weights_may_have_any_magnitude(scale: float, replace: bool) -> None:
    """Covers weights whose sum overflows, and weights so small that dividing by them overflows."""
    weights = np.array([0.0, 0.125, 0.25, 0.625])[np.arange(ROWS) % 4]
    many = weights * scale
    drawn = ids(of_arrays().sample(5000, seed=2, weights=many, replace=replace))
    counts = np.bincount(np.array(drawn) % 4, minlength=4)
    if scale == 2.0**-1022 or scale == 1e308:
        # Scaling by these factors is exact, or nearly exact.
        assert drawn == ids(of_arrays().sample(5000, seed=2, weights=weights, replace=replace))
    assert counts[0] == 0
    assert counts[1] < counts[2] < counts[3]
    # Rows with tiny weights are drawn only after the rows with large ones, and are equally likely.
    mixed = np.where(np.arange(ROWS) < 100, 1.0, np.where(np.arange(ROWS) % 2, 1e-320, 0.0))
    found = ids(of_arrays().sample(1000, seed=2, weights=mixed, replace=replace))
    assert set(found) >= set(range(100))
    if replace:
        assert max(found) < 100
    else:
        later = np.array(found[100:])
        assert (later % 2 == 1).all()
        assert scipy_stats.chisquare(np.bincount(later * 10 // ROWS, minlength=10)).pvalue > 0.001


def test_strata_and_weights_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    names = ["x", "long name, quoted", "é"]
    path.write_text("i,g,w\n" + "".join(f'{i},"{names[i % 3]}",{i % 5}\n' for i in range(900)), encoding="utf-8")
    drawn = fastpipe.csv.sample_csv(path, 90, seed=1, columns=["i"], stratify="g")
    assert np.bincount(drawn.rows % 3).tolist() == [30, 30, 30]
    assert (drawn.values[:, 0] == drawn.rows).all()
    drawn = fastpipe.csv.sample_csv(path, 90, seed=1, columns=["i"], weights="w")
    assert not (drawn.rows % 5 == 0).any()
    again = fastpipe.csv.sample_csv(path, 90, seed=1, columns=["i"], weights=np.arange(900) % 5)
    assert (again.rows == drawn.rows).all()


def test_block_samples_report_their_design_effect(tmp_path: Path) -> None:
    """Checks that the design effect that samples of a sorted column report is within 20 % of the measured one."""
    path = tmp_path / "x.csv"
    count, rows = 20_000, 2000
    draw = np.random.default_rng(4)
    noise = draw.standard_normal(count)
    path.write_text("y,z,pad\n" + "".join(f"{i},{noise[i]},{'x' * 800}\n" for i in range(count)))
    # The file is scanned once, because only files that weren't modified recently are indexed.
    os.utime(path, (1e9, 1e9))
    options: dict[str, Any] = {"method": "block", "columns": ["y", "z"], "dtype": "float64"}
    means, effects = [], []
    for seed in range(400):
        drawn = fastpipe.csv.sample_csv(path, rows, seed=seed, index_cache=tmp_path / "cache", **options)
        assert drawn.values[:, 0].tolist() == drawn.rows.tolist()
        assert len(drawn.rows) == rows
        assert drawn.design_effect is not None
        means.append(drawn.values.mean(0))
        effects.append(drawn.design_effect)
    table = np.column_stack([np.arange(count), noise])
    simple = table.var(0, ddof=1) / rows * (1 - rows / count)
    # 400 samples determine the variance to within 7 % (one standard deviation).
    actual = np.var(means, axis=0, ddof=1) / simple
    assert actual[0] > 40
    assert (abs(np.mean(effects, axis=0) / actual - 1) < 0.2).all()
    assert abs(np.mean(means, axis=0) - table.mean(0))[0] < 5 * np.sqrt(simple[0] * actual[0] / 400)


def test_blocks_of_parts_share_no_row(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("y,pad\n" + "".join(f"{i},{'x' * 800}\n" for i in range(5000)))
    parts = [fastpipe.csv.sample_csv(path, 500, seed=1, method="block", columns=["y"], part=part) for part in range(3)]
    found = np.concatenate([part.rows for part in parts])
    assert len(set(found.tolist())) == 1500
    # Blocks consist of adjacent rows.
    assert all((np.diff(part.rows) == 1).mean() > 0.9 for part in parts)
    whole = fastpipe.csv.sample_csv(path, 5000, seed=1, method="block", columns=["y"])
    assert whole.rows.tolist() == list(range(5000))
    # Parts are consecutive arcs, which together contain each row once.
    arcs = [
        fastpipe.csv.sample_csv(path, 1250, seed=1, method="block", columns=["y"], part=part).rows for part in range(4)
    ]
    assert np.sort(np.concatenate(arcs)).tolist() == list(range(5000))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 parts of 5000 rows each: the dataset has only 5000 rows"):
        fastpipe.csv.sample_csv(path, 5000, seed=1, method="block", columns=["y"], part=1)
    with pytest.raises(ValueError, match="rows=5001: the dataset has only 5000 rows"):
        fastpipe.csv.sample_csv(path, 5001, seed=1, method="block", columns=["y"])
    with pytest.raises(ValueError, match="equal probability: leave out replace, or draw"):
        fastpipe.csv.sample_csv(path, 5, method="block", columns=["y"], replace=True)
    with pytest.raises(ValueError, match='method must be "exact", "block", "buffered", "estimate" or "stream"; got'):
        fastpipe.csv.sample_csv(path, 5, method="naive", columns=["y"])  # type: ignore[arg-type]
