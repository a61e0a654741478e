"""Mixtures of readers, beside the rows of each reader in its own order."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
import samples
from every_source import ROWS, Make, digests, make
from fastpipe import mix
from fastpipe._reader.mixing import shares_of
from pipelines import STOPS, Model, cut, expected, located, rows_of, size, values_of

pytest.importorskip("pyarrow")

__all__ = ["make"]

ORDERS: list[dict[str, Any]] = [
    {},
    {"shuffle": True, "shuffle_buffer": 50, "seed": 5},
    {"shuffle": "buffer", "shuffle_buffer": 20, "seed": 6},
]


@pytest.fixture(scope="module")
def model(make: Make) -> Model:
    return Model(make)


@pytest.mark.parametrize("stop", STOPS)
def test_rows_come_in_the_order_of_each_reader(make: Make, model: Model, stop: Any) -> None:
    readers = [make(batch_size=17, **order) for order in ORDERS]
    shares = [5, 2, 3]
    mixed = mix(readers, shares, batch_size=16, stop=stop, num_threads=2)
    counts = list(mixed._data.rows().values())
    passes = [max(1, math.ceil(count / ROWS)) for count in counts]
    epoch = 1
    rows = {
        number: rows_of(model, reader, range(epoch * passes[number], (epoch + 1) * passes[number]))
        for number, reader in enumerate(readers)
    }
    naive = expected(rows, shares, stop)
    assert [list(own) for own in zip(*naive, strict=True)] == [
        list(own) for own in zip(*itertools.chain(*located(model, mixed, epoch)), strict=True)
    ]
    assert len(naive) == mixed.num_rows == sum(counts)
    mixed.set_epoch(epoch)
    batches = list(mixed)
    parts = cut(naive, 16)
    assert [size(batch) for batch in batches] == [len(part) for part in parts]
    if "user" not in model.batch:  # Negatives are drawn by the epoch.
        for part, batch in zip(parts, batches, strict=True):
            assert digests([batch]) == digests([values_of(model.batch, [row for _, row in part])])


def test_random_draws_are_those_of_the_readers(make: Make, model: Model) -> None:
    """A mixture of one reader is that reader."""
    for order in ORDERS:
        reader = make(batch_size=16, **order)
        assert digests(mix([reader])) == digests(reader)


def test_states_resume_with_any_number_of_ranks(make: Make) -> None:
    def made(ranks: int, rank: int, threads: int = 1) -> fastpipe.Reader:
        readers = [make(batch_size=20, **order) for order in ORDERS]
        options: dict[str, Any] = {"num_threads": threads, "on_uneven": "allow"}
        return mix(readers, [5, 2, 3], batch_size=30, stop="all_exhausted", world_size=ranks, rank=rank, **options)

    whole = digests(made(1, 0))
    for step in range(0, len(whole), 3):
        reader = made(1, 0, threads=2)
        passing = iter(reader)
        assert digests(itertools.islice(passing, step)) == whole[:step]
        state = json.loads(json.dumps(reader.state_dict()))
        assert len(json.dumps(state)) < 2048
        ranks = 1 + step % 4
        found = []
        for rank in range(ranks):
            again = pickle.loads(pickle.dumps(made(ranks, rank)))
            again.load_state_dict(state)
            found.append(digests(again))
        assert [batch for each in itertools.zip_longest(*found) for batch in each if batch is not None] == whole[step:]


def numbers(*counts: int, **options: Any) -> list[fastpipe.Reader]:
    """Returns readers of the given numbers of rows. Column x has the index of the reader."""
    return [
        fastpipe.from_arrays({"x": np.full(count, number), "row": np.arange(count)}, batch_size=8, **options)
        for number, count in enumerate(counts)
    ]


def column(reader: fastpipe.Reader, name: str = "x") -> list[int]:
    return [value for batch in reader for value in batch[name].tolist()]


def pairs(reader: fastpipe.Reader) -> list[tuple[int, int]]:
    """Returns the columns x and row."""
    batches = list(reader)
    return [pair for batch in batches for pair in zip(batch["x"].tolist(), batch["row"].tolist(), strict=True)]


@pytest.mark.parametrize("readers", [2, 3, 7, 20, 100])
def test_every_prefix_is_within_one_row_of_each_share(readers: int) -> None:
    draw = np.random.default_rng(readers)
    weights = draw.pareto(0.7, readers) + 1e-3
    mixed = mix(numbers(*[5] * readers), weights, batch_size=1000, stop=100_000)
    owners = np.array(column(mixed))
    shares = weights / weights.sum()
    # Shares are rounded to multiples of 2^-20, and each is at least one of these.
    rounding = 2.0**-20 * np.arange(1, len(owners) + 1)
    for number, share in enumerate(shares):
        deviation = np.abs(np.cumsum(owners == number) - share * np.arange(1, len(owners) + 1))
        assert (deviation <= 1 + rounding).all()
    assert mixed._data.rows() == {str(number): int((owners == number).sum()) for number in range(readers)}


@given(st.lists(st.one_of(st.just(0.0), st.floats(0, 1e6), st.integers(0, 99).map(float)), min_size=1, max_size=40))
def test_shares_are_exact_or_the_nearest_multiples(weights: list[float]) -> None:
    exact = [Fraction(repr(weight)) for weight in weights]
    if not sum(exact):
        with pytest.raises(ValueError, match="at least one weight"):
            shares_of(exact)
        return
    shares = shares_of(exact)
    total, period = sum(exact), sum(shares)
    assert 1 <= period <= 2**20
    assert [share > 0 for share in shares] == [weight > 0 for weight in exact]
    if period < 2**20:
        assert [Fraction(share, period) for share in shares] == [weight / total for weight in exact]
    else:
        # Readers with the least share take it from the largest ones.
        assert all(
            abs(share - weight * 2**20 / total) < len(weights) for share, weight in zip(shares, exact, strict=True)
        )


def test_simple_shares_are_exact() -> None:
    assert shares_of([Fraction("0.7"), Fraction("0.3")]) == [7, 3]
    assert shares_of([Fraction(2), Fraction(4), Fraction(0)]) == [1, 2, 0]
    assert shares_of([Fraction(10**9), Fraction(1)]) == [2**20 - 1, 1]


def test_epochs_end_as_stop_says() -> None:
    first = mix(numbers(70, 70), [0.7, 0.3], batch_size=9)
    assert (first.num_rows, len(first), first._data.rows()) == (100, 12, {"0": 70, "1": 30})
    every = mix(numbers(70, 70), [0.7, 0.3], batch_size=9, stop="all_exhausted")
    rows = every._data.rows()
    assert rows["1"] == 70
    assert 162 <= rows["0"] <= 164
    assert sorted(set(pairs(every))) == [(x, row) for x in (0, 1) for row in range(70)]
    # A reader without a share neither yields rows nor ends an epoch.
    assert column(mix(numbers(5, 3), [1, 0])) == [0] * 5
    assert column(mix(numbers(5, 0), [1, 0], stop="all_exhausted")) == [0] * 5
    assert len(column(mix(numbers(5, 3), stop=1000, drop_last=True, batch_size=300))) == 900
    assert column(mix(numbers(1), stop="all_exhausted")) == [0]


def test_epochs_of_a_reader_that_starts_again_have_different_orders() -> None:
    small, large = numbers(20, 100, shuffle=True, seed=1)
    mixed = mix([small, large], stop="all_exhausted", epochs=2)
    rows = [row for reader, row in pairs(mixed) if reader == 0]
    epochs = [tuple(epoch) for epoch in cut(rows, 20)]
    assert len(epochs) == len(set(epochs)) == 10
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)


def test_weights_change_at_the_given_steps() -> None:
    mixed = mix(numbers(500, 500), [(0, [1, 0]), (3, [1, 1]), (7, {"0": 1, "1": 3})], batch_size=8, stop=96)
    found = [batch["x"].tolist() for batch in mixed]
    assert [sum(batch) for batch in found] == [0, 0, 0, 4, 4, 4, 4, 6, 6, 6, 6, 6]
    rows = pairs(mixed)
    assert [row for reader, row in rows if reader == 0] == list(range(50))
    mixed.set_epoch(0)
    passing = iter(mixed)
    for step in range(12):
        assert mixed.batch_at(step)["x"].tolist() == next(passing)["x"].tolist() == found[step]
    other = mix(numbers(500, 500), [(0, [1, 0]), (4, [1, 1]), (7, [1, 3])], batch_size=8, stop=96)
    assert len(list(itertools.islice(other, 5))) == 5
    with pytest.raises(fastpipe.errors.StateError):
        mixed.load_state_dict(other.state_dict())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("step", [1, 4, 5])
def test_a_running_job_changes_its_weights(ranks: int, step: int) -> None:
    def mixed(weights: Any, rank: int = 0, ranks: int = ranks, stop: Any = 2000) -> fastpipe.Reader:
        readers = numbers(500, 300, shuffle=True, seed=1)
        return mix(readers, weights, batch_size=16, stop=stop, rank=rank, world_size=ranks)

    before = mixed([1, 1])
    passing = iter(before)
    for _ in range(step):
        next(passing)
    state = json.loads(json.dumps(before.state_dict()))
    changed = [(0, [1, 1]), (step * ranks, [1, 9])]
    whole = digests(mixed(changed, ranks=1, stop=1000))
    found = []
    for rank in range(ranks):
        after = mixed(changed, rank, stop=1000)
        after.load_state_dict(state)
        found.append(digests(after))
    assert [batch for each in zip(*found, strict=True) for batch in each] == whole[step * ranks :][
        : len(found[0]) * ranks
    ]
    # The weights of batches that were read can't change.
    earlier = step * ranks - 1
    for other in ([(0, [1, 1]), (earlier, [1, 9])] if earlier else [2, 1], [1, 9]):
        with pytest.raises(fastpipe.errors.StateError, match="weights"):
            mixed(other).load_state_dict(state)
    # In a later epoch, each reader must begin as many epochs as before.
    before.set_epoch(2)
    next(iter(before))
    state = before.state_dict()
    mixed([(0, [1, 1]), (ranks, [10, 11])]).load_state_dict(state)
    with pytest.raises(fastpipe.errors.StateError, match="passes"):
        mixed([(0, [1, 1]), (ranks, [1, 9])]).load_state_dict(state)


def test_seeds_of_the_mixture_are_used_where_readers_have_none() -> None:
    def rows(seed: int | None, own: int | None) -> list[int]:
        return column(mix(numbers(50, 50, shuffle=True, seed=own), seed=seed), "row")

    with pytest.raises(ValueError, match="reader '0' depends on a random seed: pass seed= to mix"):
        rows(None, None)
    assert rows(1, None) == rows(1, None) != rows(2, None)
    assert rows(None, 4) == rows(1, 4) != rows(1, None)
    one, two = (rows(1, None)[reader::2] for reader in (0, 1))
    assert one != two


def test_mixtures_of_mixtures() -> None:
    a, b, c = numbers(60, 40, 30, shuffle=True, seed=2)
    inner = mix({"a": a, "b": b}, [2, 1], batch_size=5, stop="all_exhausted")
    mixed = mix({"inner": inner, "c": c}, [1, 1], batch_size=16, stop=500)
    alone = [pair for pair in pairs(mixed) if pair[0] != 2]
    passes = math.ceil(len(alone) / inner.num_rows)
    naive: list[tuple[int, int]] = []
    for epoch in range(passes):
        inner.set_epoch(epoch)
        naive += pairs(inner)
    assert alone == naive[: len(alone)]
    assert len(alone) == 250
    where = mixed.locate(0, 0)
    assert isinstance(where, fastpipe.typing.MixtureLocation)
    assert isinstance(where.location, fastpipe.typing.MixtureLocation)
    assert (where.reader, where.location.reader) == ("inner", "a")


def files(directory: Path) -> dict[str, fastpipe.Reader]:
    """Returns readers of the same features from different kinds of files."""
    pa = pytest.importorskip("pyarrow")
    pq, feather = (pytest.importorskip(f"pyarrow.{name}") for name in ("parquet", "feather"))
    table = pa.table({"x": np.arange(300), "name": [f"n{i}" * (i % 5) for i in range(300)]})
    pq.write_table(table, directory / "a.parquet", row_group_size=40)
    feather.write_feather(table, directory / "a.arrow", chunksize=40)
    (directory / "a.csv").write_text("x,name\n" + "".join(f'{i},"n{i}"\n' for i in range(300)))
    fastpipe.write_avro(directory / "a.avro", table)
    read = {
        "avro": fastpipe.read_avro,
        "arrow": fastpipe.read_arrow,
        "parquet": fastpipe.read_parquet,
        "csv": fastpipe.read_csv,
    }
    features = {"x": fastpipe.DenseSpec((), "int64"), "name": fastpipe.DenseSpec((), "string")}
    options: dict[str, Any] = {"features": features, "batch_size": 32, "shuffle": True, "shuffle_buffer": 64, "seed": 1}
    return {name: function(directory / f"a.{name}", **options) for name, function in read.items()} | {
        "table": fastpipe.from_arrow(table, **options)
    }


@pytest.mark.parametrize("threads", [1, 3])
def test_readers_of_different_sources_are_mixed(tmp_path: Path, threads: int) -> None:
    readers = files(tmp_path)
    mixed = mix(readers, batch_size=50, stop="all_exhausted", num_threads=threads)
    assert set(mixed.files) == {str(tmp_path / f"a.{name}") for name in readers if name != "table"}
    found: dict[str, list[tuple[int, str]]] = {name: [] for name in readers}
    for step, batch in enumerate(mixed):
        for row, values in enumerate(zip(batch["x"].tolist(), batch["name"].to_list(), strict=True)):
            found[mixed.locate(step, row, 0).reader].append(values)
    for name, reader in readers.items():
        batches = list(reader)
        own = [pair for batch in batches for pair in zip(batch["x"].tolist(), batch["name"].to_list(), strict=True)]
        assert found[name] == own
    limited = mix(readers, batch_size=50, memory_limit="20MB", stop="all_exhausted")
    mixed.set_epoch(0)
    assert digests(limited) == digests(mixed)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    readers = files(tmp_path)
    mixed = mix(readers, batch_size=50)
    path = tmp_path / "a.parquet"
    content = bytearray(path.read_bytes())
    content[100:2000] = bytes(1900)
    path.write_bytes(content)
    with pytest.raises(fastpipe.FastpipeError, match=r"a\.parquet"):
        list(mixed)


def test_changed_files_are_noticed(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[20] * 6, [20] * 6])
    mixed = mix([data.read(batch_size=16), data.read(batch_size=16)])
    path = Path(mixed.files[0])
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(fastpipe.FastpipeError, match="changed"):
        list(mixed)


def test_arrow_streams_have_the_same_rows(make: Make) -> None:
    pa = pytest.importorskip("pyarrow")
    mixed = mix([make(batch_size=20), make(batch_size=20, shuffle=True, seed=1)], [2, 1])
    table = pa.table(mixed)
    mixed.set_epoch(0)
    whole = pa.Table.from_batches([fastpipe.to_arrow(batch, features=mixed.features) for batch in mixed])
    assert table.equals(whole)
    assert table.num_rows == mixed.num_rows


def test_maps_and_heads_of_mixtures() -> None:
    mixed = mix(numbers(40, 40))
    doubled = mixed.map(lambda batch: {"x": batch["x"] * 2})
    assert [value for batch in doubled for value in batch["x"].tolist()] == [2 * value for value in column(mixed)]
    assert mixed.head(4)["x"].to_pylist() == column(mixed)[:4]
    assert mixed.describe()["x"].count == 80


def test_plans_name_the_readers() -> None:
    shuffled, other = numbers(40, 20, shuffle=True, seed=5)[0], numbers(40, 20)[1]
    mixed = mix({"a": shuffled, "b": other.filter(fastpipe.col("row") < 10)}, [3, 1])
    assert mixed.plan().stages == [
        ("a: source", "a table of 40 rows (rows: 40; units: 1)"),
        ("a: order", 'shuffle="window", shuffle_buffer=40, seed=5'),
        ("a: mix", "32 rows in an epoch of the mixture"),
        ("b: source", "a table of 20 rows (rows: 20; units: 1)"),
        ("b: filter", 'col("row") < 10: 10 of 20 rows'),
        ("b: order", "as in the source"),
        ("b: mix", "10 rows in an epoch of the mixture"),
        ("order", "rows of the readers in the proportion of their weights"),
        ("batches", "6 batches of batch_size=8 in an epoch"),
    ]


def test_states_of_other_mixtures_are_refused() -> None:
    def state(*weights: float, stop: Any = 300, seed: int = 3) -> tuple[fastpipe.Reader, dict[str, Any]]:
        mixed = mix(numbers(50, 60, shuffle=True, seed=seed), weights, batch_size=10, stop=stop)
        next(iter(mixed))
        return mixed, mixed.state_dict()

    _, own = state(2, 1)
    state(4, 2)[0].load_state_dict(own)
    state(2, 1, stop=301)[0].load_state_dict(own)
    for other in (state(1, 2)[0], state(2, 1, seed=4)[0]):
        with pytest.raises(fastpipe.errors.StateError, match="cannot resume"):
            other.load_state_dict(own)


def test_what_is_not_supported_says_what_to_do() -> None:
    mixed = mix(numbers(20, 20))
    for call in (
        lambda: mixed.filter(fastpipe.col("x") == 1),
        lambda: mixed.split(0.5, 0.5),
        lambda: mixed.without(rows=[1]),
        lambda: mixed.sample(3),
        lambda: mixed.take([1]),
        lambda: mixed.partition(2),
        mixed.cache,
        lambda: mixed.shuffle_report(),
    ):
        with pytest.raises(fastpipe.errors.UnsupportedError, match="readers"):
            call()


def test_bad_arguments_are_refused() -> None:
    a, b = numbers(5, 5)
    ranks = numbers(50, rank=0, world_size=2)[0]
    other = fastpipe.from_arrays({"x": np.zeros(5)}, batch_size=8)
    floats = fastpipe.from_arrays({"x": np.zeros(5), "row": np.arange(5)}, batch_size=8)
    turned = fastpipe.from_arrays({"row": np.arange(5), "x": np.arange(5)}, batch_size=8)
    large = fastpipe.from_arrays({"x": np.arange(5), "row": np.arange(5)}, batch_size=9)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "a dict or a list", lambda: mix(a)),  # type: ignore[arg-type]
        (TypeError, "'1' is 3", lambda: mix([a, 3])),  # type: ignore[list-item]
        (TypeError, "Call map\\(\\) on the mixture", lambda: mix([a.map(dict)])),  # type: ignore[list-item]
        (TypeError, "names of readers must be strings", lambda: mix({1: a})),  # type: ignore[dict-item]
        (ValueError, "1 to 4096 readers; got 0", lambda: mix([])),
        (ValueError, "2 readers and 1 weights", lambda: mix([a, b], [1])),
        (ValueError, "'b' has no weight", lambda: mix({"a": a, "b": b}, {"a": 1})),
        (ValueError, "no reader is named 'c'", lambda: mix({"a": a}, {"a": 1, "c": 1})),
        (ValueError, "at least one weight", lambda: mix([a, b], [0, 0])),
        (ValueError, "finite and at least 0; the weight of '1' is -1", lambda: mix([a, b], [1, -1])),
        (ValueError, "finite", lambda: mix([a, b], [1, math.nan])),
        (TypeError, "weights must be numbers", lambda: mix([a, b], [1, "2"])),  # type: ignore[list-item]
        (TypeError, "weights must be a dict or a list", lambda: mix([a, b], "12")),  # type: ignore[arg-type]
        (ValueError, "stop must be", lambda: mix([a, b], stop="never")),  # type: ignore[arg-type]
        (ValueError, "stop must be between 1", lambda: mix([a, b], stop=0)),
        (ValueError, "stop must be between 1", lambda: mix([a, b], stop=2**63)),
        (ValueError, "steps of weights must ascend from 0", lambda: mix([a, b], [(1, [1, 1])])),
        (ValueError, "steps of weights must ascend", lambda: mix([a, b], [(0, [1, 1]), (0, [1, 2])])),
        (ValueError, "at most 64 times", lambda: mix([a, b], [(step, [1, 1]) for step in range(65)])),
        (TypeError, "pairs \\(step, weights\\)", lambda: mix([a, b], [(0, [1, 1]), 3])),  # type: ignore[list-item]
        (
            ValueError,
            "weight of reader 1 is 0",
            lambda: mix([a, b], [(0, [1, 1]), (1, [1, 0])], stop="all_exhausted", batch_size=2),
        ),
        (ValueError, "divided among 2 ranks", lambda: mix([ranks])),
        (ValueError, "'1' has a weight above 0, but no rows", lambda: mix(numbers(5, 0))),
        (fastpipe.errors.SchemaError, "only '0' has 'row'", lambda: mix([a, other])),
        (fastpipe.errors.SchemaError, "feature 'x' is", lambda: mix([a, floats])),
        (fastpipe.errors.SchemaError, "different sequences", lambda: mix([a, turned])),
        (ValueError, "pass batch_size", lambda: mix([a, large])),
        (ValueError, "batch_size must be between", lambda: mix([a, b], batch_size=0)),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()
