"""What holds for one source holds for all: states, ranks, threads, memory limits and adapters."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fastavro
import numpy as np
import pytest

import fastpipe
import samples
import wire

ROWS = 240
Make = Callable[..., fastpipe.Reader]


SOURCES = [
    *("avro", "interactions", "arrays", "arrow", "units", "parquet", "arrow file", "csv"),
    *("scales and codes", "units with scales and codes", "bags"),
    *("part of avro", "part of parquet", "sql"),
]


@pytest.fixture(scope="module", params=SOURCES)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes readers of 240 rows."""
    if request.param == "avro":
        data = samples.write(tmp_path_factory.mktemp("sources"), [[20] * 6, [20] * 6])
        return lambda **options: data.read(**options)
    if request.param == "interactions":
        ids = np.arange(120)
        positives = fastpipe.Interactions.from_arrays(ids % 20, ids % 20 + ids // 20)
        default: dict[str, Any] = {"shuffle": False, "seed": 3}
        return lambda **options: fastpipe.read_interactions(positives, negatives=1, **default | options)
    if request.param == "bags":
        return bags_of(tmp_path_factory.mktemp("bags") / "bags.avro")
    if request.param == "part of avro":
        more = samples.write(tmp_path_factory.mktemp("parts"), [[20] * 10, [20] * 26])
        return lambda **options: part(more.read(**options), 1, 3)
    draw = np.random.default_rng(1)
    lengths = draw.integers(0, 4, ROWS)
    offsets = np.r_[0, np.cumsum(lengths)]
    arrays = {
        "id": np.arange(ROWS),
        "x": draw.random((ROWS, 3), "float32"),
        "tokens": fastpipe.Ragged(draw.integers(0, 99, offsets[-1]), offsets),
    }
    if request.param == "arrays":
        return lambda **options: fastpipe.from_arrays(arrays, **options)
    pa = pytest.importorskip("pyarrow")
    texts, lists = [str(i) * (i % 3) for i in range(ROWS)], [[i] * (i % 4) for i in range(ROWS)]
    table = pa.table({"id": arrays["id"], "text": texts, "t": lists})
    parts = pa.concat_tables([table.slice(i, 50) for i in range(0, ROWS, 50)])
    if request.param == "arrow":
        return lambda **options: fastpipe.from_arrow(parts, **options)
    if "codes" in request.param:
        return lambda **options: scales_and_codes(request.param.startswith("units"), **options)
    if request.param == "units":
        return lambda **options: fastpipe.read_units(Slices(table, 17), **options)
    path = tmp_path_factory.mktemp("columns") / "table"
    if request.param == "sql":
        return rows_of_sqlite(path, texts)
    if request.param == "csv":
        # Stretches end with the row that fills 64 KiB.
        lines = [f'{i},"{text * 400}\n{text}",{i / 7}\n' for i, text in enumerate(texts)]
        path.write_text("id,text,x\n" + "".join(lines))
        return lambda **options: fastpipe.read_csv(path, **options)
    if "parquet" in request.param:
        parquet = pytest.importorskip("pyarrow.parquet")
        if request.param == "part of parquet":
            parquet.write_table(pa.concat_tables([table, table]), path, row_group_size=30)
            return lambda **options: part(fastpipe.read_parquet(path, **options), 0, 2)
        parquet.write_table(table, path, row_group_size=33)
        return lambda **options: fastpipe.read_parquet(path, **options)
    feather = pytest.importorskip("pyarrow.feather")
    feather.write_feather(table, path, chunksize=29)
    return lambda **options: fastpipe.read_arrow(path, **options)


def rows_of_sqlite(path: Path, texts: list[str]) -> Make:
    """A query's rows, some of which have no value."""
    pytest.importorskip("adbc_driver_sqlite")
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT NOT NULL, x REAL)")
    rows = [(i, text, None if i % 5 == 0 else i / 7) for i, text in enumerate(texts)]
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return lambda **options: fastpipe.read_sql("SELECT * FROM t", f"sqlite:///{path}", partitions=7, **options)


def part(whole: fastpipe.Reader, number: int, partitions: int) -> fastpipe.Reader:
    """A part of a reader, of 240 rows."""
    parts = whole.partition(partitions)
    assert parts[number].rows == ROWS
    return whole.read_partition(parts[number])


def bags_of(path: Path) -> Make:
    """Names, terms and values, and strings, that become indices; some are left out."""
    entry = wire.record("NTV", name="string", term=["null", "string"], value="float")
    schema = wire.record("R", bag=["null", wire.list_of(entry)], words=wire.list_of("string"), word="string")
    rows = []
    for i in range(ROWS):
        keys = [(f"n{i * k % 11}", None if k % 5 == 0 else f"t{k % 3}") for k in range(i % 40)]
        bag = [{"name": name, "term": term, "value": float(i)} for name, term in keys]
        words = [name for name, _ in keys]
        rows.append({"bag": None if i % 7 == 0 else bag, "words": words, "word": f"n{i % 13}"})
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), rows, sync_interval=3000)
    pairs = [f"n{n}\x01{term}" for n in range(9) for term in ("", "t0", "t1")]
    features = {
        "a": fastpipe.VocabularySpec(["n3", "n1"], field="word", unknown="bucket", buckets=5),
        "bag": fastpipe.VocabularySpec(pairs, nulls="mask"),
        "hashed": fastpipe.HashSpec(100, field="bag", nulls="fill"),
        "words": fastpipe.VocabularySpec([f"n{n}" for n in range(9)]),
    }
    return lambda **options: fastpipe.read_avro(path, features=features, **options)


def scales_and_codes(units: bool, **options: Any) -> fastpipe.Reader:
    """Columns whose rows lie behind keys, runs and views, and whose values become integers."""
    pa = pytest.importorskip("pyarrow")
    keys = pa.array([i % 7 % 3 for i in range(ROWS)], pa.int8())
    table = pa.table(
        {
            "price": pa.array(range(ROWS)).cast(pa.decimal128(21, 2)),
            "country": pa.DictionaryArray.from_arrays(keys, pa.array(["AT", "DE", "CH"])),
            "text": pa.array([str(i) * (i % 9) for i in range(ROWS)]).cast(pa.string_view()),
            "run": pa.RunEndEncodedArray.from_arrays(pa.array([100, ROWS], pa.int16()), pa.array(["a", "b"])),
        }
    )
    features = {
        "price": fastpipe.DenseSpec((), "int32", scale=3),
        "country": fastpipe.DenseSpec((), "int16"),
        "text": fastpipe.DenseSpec((), "string"),
        "run": fastpipe.DenseSpec((), "string"),
    }
    if not units:
        return fastpipe.from_arrow(table, features=features, **options)
    return fastpipe.read_units(Slices(table, 17, table.schema), features=features, **options)


class Slices:
    """A table as units of some rows."""

    dictionaries: ClassVar = {"country": ["CH", "DE", "AT"]}

    def __init__(self, table: Any, size: int, schema: Any = None) -> None:
        self.table, self.size = table, size
        pa = pytest.importorskip("pyarrow")
        items = pa.list_(pa.field("item", pa.int64(), nullable=False))
        fields = [("id", pa.int64()), ("text", pa.string()), ("t", items)]
        self.schema = schema or pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])
        self.rows = [len(table.slice(at, size)) for at in range(0, len(table), size)]

    def read(self, unit: int) -> Any:
        return self.table.slice(unit * self.size, self.size)

    def fingerprint(self) -> str:
        return "a table"


ORDERS = [
    {},
    {"shuffle": True, "shuffle_buffer": 64, "seed": 3},
    {"shuffle": "block", "shuffle_buffer": 30, "seed": 3},
    {"shuffle": "buffer", "shuffle_buffer": 30, "seed": 3},
]
order = pytest.mark.parametrize("order", ORDERS, ids=["sequential", "window", "block", "buffer"])


def digests(batches: Any) -> list[str]:
    return samples.digests(batches)


@order
def test_a_state_resumes_at_every_step(make: Make, order: dict[str, Any]) -> None:
    reader = make(batch_size=32, **order)
    whole = digests(reader)
    reader.set_epoch(0)
    batches, states = iter(reader), [reader.state_dict()]
    states.extend(reader.state_dict() for _ in batches)
    for step, state in enumerate(states):
        again = make(batch_size=32, **order)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert digests(again) == whole[step:]


@order
def test_threads_and_memory_change_nothing(make: Make, order: dict[str, Any]) -> None:
    whole = digests(make(batch_size=32, **order))
    for options in ({"num_threads": 1}, {"num_threads": 4, "prefetch": 1}, {"memory_limit": "64MB"}):
        assert digests(make(batch_size=32, **order, **options)) == whole


@order
def test_batches_are_found_by_step(make: Make, order: dict[str, Any]) -> None:
    reader = make(batch_size=32, **order)
    whole = digests(reader)
    assert digests(reader.batch_at(step, epoch=0) for step in range(len(whole))) == whole
    assert len({reader.locate(step, row, epoch=0) for step in range(7) for row in range(32)}) == 7 * 32


def test_ranks_have_what_one_has(make: Make) -> None:
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "shuffle_buffer": 32, "seed": 3}
    whole = digests(make(**options))
    shares = [digests(make(**options, rank=rank, world_size=3)) for rank in range(3)]
    assert sorted(digest for share in shares for digest in share) == sorted(whole)


def test_readers_are_pickled(make: Make) -> None:
    reader = make(batch_size=32, shuffle=True, seed=3)
    again = pickle.loads(pickle.dumps(reader))
    assert digests(again) == digests(reader)
    assert again.features == reader.features


def test_a_limit_that_is_too_small_is_named(make: Make) -> None:
    with pytest.raises(fastpipe.LimitError, match="memory_limit is 10 B, and this takes at least"):
        next(iter(make(batch_size=32, shuffle=True, seed=3, memory_limit=10)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_tensors_of_torch(make: Make, request: pytest.FixtureRequest) -> None:
    torch = pytest.importorskip("torch")
    from fastpipe.torch import IterableDataset

    # Connections to databases can't be used after a fork.
    context = "spawn" if request.node.callspec.params["make"] == "sql" else None
    dataset = IterableDataset(make(batch_size=32))
    batches = list(
        torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context)
    )
    assert sum(len(next(iter(batch.values()))) for batch in batches) == ROWS


def test_arrays_of_jax(make: Make) -> None:
    pytest.importorskip("jax")
    from fastpipe import jax

    found = list(jax.iterator(make(batch_size=32)))
    assert sum(len(next(iter(batch.values()))) for batch in found) == ROWS


def test_a_dataset_of_tensorflow(make: Make) -> None:
    pytest.importorskip("tensorflow")
    from fastpipe import tf

    found = list(tf.dataset(make(batch_size=32)))
    assert sum(int(next(iter(batch.values())).shape[0]) for batch in found) == ROWS


def test_a_stream_of_arrow(make: Make, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    reader = make(batch_size=32, shuffle=True, seed=3)
    table = pa.table(reader)
    assert table.num_rows == ROWS
    reader.set_epoch(0)
    assert digests(fastpipe.from_arrow(table, batch_size=32)) == digests(reader)


def test_explain_and_stats(make: Make) -> None:
    reader = make(batch_size=32)
    list(reader)
    assert reader.stats()["rows"] == ROWS
    assert reader.explain()
    assert repr(reader).startswith("<fastpipe.Reader of ")


@order
def test_a_description_is_of_all_rows(make: Make, order: dict[str, Any], request: pytest.FixtureRequest) -> None:
    pytest.importorskip("datasketches")
    whole = fastpipe.describe(make(batch_size=32, **order))
    assert whole.rows == ROWS
    assert set(whole) == set(make(batch_size=32).features)
    if request.node.callspec.params["make"] == "interactions":
        return  # Which negatives are drawn depends on the order, and on ranks.
    # However many rows a batch has, in whatever order they come, and whoever reads them.
    same_description(fastpipe.describe(make(batch_size=7)), whole)
    ranks = [make(batch_size=8, **order, rank=rank, world_size=3, uneven="allow") for rank in range(3)]
    same_description(fastpipe.Description.merged(map(fastpipe.describe, ranks)), whole)


def same_description(mine: fastpipe.Description, other: fastpipe.Description) -> None:
    """Asserts that counts are the same, and moments but for rounding."""
    assert mine.rows == other.rows
    for name in other:
        here, there = mine[name], other[name]
        assert (here.kind, here.dtype, here.count, here.nulls) == (there.kind, there.dtype, there.count, there.nulls)
        if here.kind != "real":
            assert here.counts() == there.counts()
        if here.kind in ("real", "integer") and here.count:
            assert (here.minimum, here.maximum) == (there.minimum, there.maximum)
            assert here.mean == pytest.approx(there.mean, rel=1e-12)
            assert here.deviation == pytest.approx(there.deviation, rel=1e-9)
        if here.lengths is not None and there.lengths is not None:
            assert here.lengths.counts() == there.lengths.counts()
