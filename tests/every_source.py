"""Readers of 240 rows from each source, and the orders, for tests that all sources must pass."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fastavro
import numpy as np
import pytest

import fastpipe
import samples
import tfrecords
import wire

__all__ = ["ORDERS", "ROWS", "SOURCES", "Make", "Slices", "digests", "make", "order", "part"]

ROWS = 240
Make = Callable[..., fastpipe.Reader]


SOURCES = [
    *("avro", "interactions", "arrays", "arrow", "units", "parquet", "arrow file", "csv", "tfrecord"),
    *("scales and codes", "units with scales and codes", "bags"),
    *("part of avro", "part of parquet", "sql"),
]


@pytest.fixture(scope="module", params=SOURCES)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that makes readers of 240 rows."""
    if request.param == "avro":
        data = samples.write(tmp_path_factory.mktemp("sources"), [[20] * 6, [20] * 6])
        return lambda **options: data.read(**options)
    if request.param == "interactions":
        ids = np.arange(120)
        positives = fastpipe.recsys.Interactions.from_arrays(ids % 20, ids % 20 + ids // 20)
        default: dict[str, Any] = {"shuffle": False, "seed": 3}
        return lambda **options: fastpipe.recsys.read_interactions(positives, num_negatives=1, **default | options)
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
        # A chunk ends with the row that fills 64 KiB.
        lines = [f'{i},"{text * 400}\n{text}",{i / 7}\n' for i, text in enumerate(texts)]
        path.write_text("id,text,x\n" + "".join(lines))
        return lambda **options: fastpipe.read_csv(path, **options)
    if request.param == "tfrecord":
        rows = ({"id": i, "text": text, "t": list(range(i % 4)), "pad": "x" * 2000} for i, text in enumerate(texts))
        path.write_bytes(tfrecords.file(rows))
        return lambda **options: fastpipe.read_tfrecord(path, **options)
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
    """Returns a function that reads the rows of a query. Some rows have null values."""
    pytest.importorskip("adbc_driver_sqlite")
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT NOT NULL, x REAL)")
    rows = [(i, text, None if i % 5 == 0 else i / 7) for i, text in enumerate(texts)]
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return lambda **options: fastpipe.read_sql("SELECT * FROM t", f"sqlite:///{path}", num_partitions=7, **options)


def part(whole: fastpipe.Reader, number: int, partitions: int) -> fastpipe.Reader:
    """Returns a reader of one partition, which has 240 rows."""
    parts = whole.partition(partitions)
    assert parts[number].rows == ROWS
    return whole.read_partition(parts[number])


def bags_of(path: Path) -> Make:
    """Returns a function that reads names, terms, values and strings as vocabulary indices, without some of the
    indices.
    """
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
        "a": fastpipe.VocabularySpec(["n3", "n1"], field="word", on_unknown="bucket", num_buckets=5),
        "bag": fastpipe.VocabularySpec(pairs, on_unknown="drop", on_null="mask"),
        "hashed": fastpipe.HashSpec(100, field="bag", on_null="fill"),
        "words": fastpipe.VocabularySpec([f"n{n}" for n in range(9)], on_unknown="drop"),
    }
    return lambda **options: fastpipe.read_avro(path, features=features, **options)


def scales_and_codes(units: bool, **options: Any) -> fastpipe.Reader:
    """Returns a reader of columns stored with dictionaries, runs and views. Their values are read as integers."""
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
    """A table divided into units of `size` rows."""

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
