"""Writing Avro: any reader of Avro returns exactly what was written, and data that doesn't fit raises an error."""

from __future__ import annotations

import datetime
import decimal
import io
import itertools
import json
import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from arrow_tables import tables
from avro_rows import MisfitError, read, rows_of
from fastpipe import Masked, Ragged, Sparse, Strings
from fastpipe.batch import SparseCSR

CODECS = ("null", "deflate", "snappy", "zstandard", "bzip2", "xz")
# Codecs that fastavro reads without further packages.
OF_FASTAVRO = ("null", "deflate", "snappy", "zstandard", "bzip2", "xz")

DAY = datetime.datetime(2024, 2, 29)

pytestmark = pytest.mark.usefixtures("plain_values")


@given(given_table=tables(), codec=st.sampled_from(OF_FASTAVRO), block_bytes=st.sampled_from((1, 40, 1 << 16)))
def test_any_table(given_table: Any, codec: Any, block_bytes: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    table, _ = given_table
    path = tmp_path_factory.mktemp("any") / "out.avro"
    try:
        expected = rows_of(table)
    except MisfitError:
        with pytest.raises(fastpipe.errors.ValueRangeError):
            fastpipe.write_avro(path, table, codec=codec, block_bytes=block_bytes)
        assert not list(path.parent.iterdir())
        return
    written = fastpipe.write_avro(path, table, codec=codec, block_bytes=block_bytes)
    assert read(path) == expected
    assert (written.rows, written.size) == (table.num_rows, path.stat().st_size)
    if block_bytes == 1:
        assert written.blocks == table.num_rows


@given(given_table=tables(), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4), threads=st.integers(1, 4))
def test_blocks_do_not_depend_on_batches_or_threads(
    given_table: Any, cuts: list[int], threads: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    table, _ = given_table
    folder = tmp_path_factory.mktemp("cuts")

    def slices() -> Iterator[pa.Table]:
        start = 0
        for size in itertools.cycle(cuts):
            if start >= table.num_rows:
                break
            yield table.slice(start, size)
            start += size

    try:
        fastpipe.write_avro(folder / "whole.avro", table, block_bytes=64, num_threads=1)
    except fastpipe.errors.ValueRangeError:
        return
    schema = fastpipe.avro.AvroFile(folder / "whole.avro").schema
    fastpipe.write_avro(folder / "cut.avro", slices(), schema, block_bytes=64, num_threads=threads)
    assert bodies(folder / "cut.avro") == bodies(folder / "whole.avro")


def bodies(path: Path) -> list[tuple[int, bytes]]:
    """Returns the number of rows and the stored bytes of each block."""
    with path.open("rb") as file:
        return [(block.num_records, block.bytes_.getvalue()) for block in fastavro.block_reader(file)]


BATCH = {
    "dense": np.arange(12, dtype="float32").reshape(3, 2, 2),
    "flag": np.array([True, False, True]),
    "small": np.array([1, -2, 3], "int8"),
    "ragged": Ragged(np.array([1, 2, 3]), np.array([0, 2, 2, 3])),
    "deep": Ragged(Ragged(np.array([1, 2, 3]), np.array([0, 2, 2, 3])), np.array([0, 1, 1, 3])),
    "text": Strings(np.frombuffer("aé€".encode(), "uint8"), np.array([0, 1, 3, 6]), (3,), False),
    "raw": Strings(np.frombuffer(b"\xff\x00z", "uint8"), np.array([0, 1, 1, 3]), (3,), True),
    "masked": Masked(np.array([1.5, 0.0, 2.5]), np.array([True, False, True])),
    "sparse": Sparse(np.array([[0, 3], [2, 1]]), np.array([0.5, 1.5]), np.array([3, 5])),
    "csr": SparseCSR(np.array([0, 1, 1, 3]), np.array([3, 0, 1]), np.array([0.5, 1.5, 2.5]), np.array([3, 5])),
    "rec.a": np.array([1, 2, 3]),
    "rec.b.c": np.array([4, 5, 6]),
    "day": np.array(["2020-01-01", "NaT", "2021-01-01"], "datetime64[D]"),
}
ROWS = [
    {
        "dense": [[0, 1], [2, 3]], "flag": True, "small": 1, "ragged": [1, 2], "deep": [[1, 2]], "text": "a",
        "raw": b"\xff", "masked": 1.5, "sparse": {"indices0": [3], "values": [0.5]},
        "csr": {"indices0": [3], "values": [0.5]}, "rec": {"a": 1, "b": {"c": 4}}, "day": 18262,
    },
    {
        "dense": [[4, 5], [6, 7]], "flag": False, "small": -2, "ragged": [], "deep": [], "text": "é", "raw": b"",
        "masked": None, "sparse": {"indices0": [], "values": []}, "csr": {"indices0": [], "values": []},
        "rec": {"a": 2, "b": {"c": 5}}, "day": None,
    },
    {
        "dense": [[8, 9], [10, 11]], "flag": True, "small": 3, "ragged": [3], "deep": [[], [3]], "text": "€",
        "raw": b"\x00z", "masked": 2.5, "sparse": {"indices0": [1], "values": [1.5]},
        "csr": {"indices0": [0, 1], "values": [1.5, 2.5]}, "rec": {"a": 3, "b": {"c": 6}}, "day": 18628,
    },
]  # fmt: skip


def test_array_types(tmp_path: Path) -> None:
    path = tmp_path / "out.avro"
    assert fastpipe.write_avro(path, BATCH)[:2] == (3, 1)
    assert read(path) == ROWS
    assert fastpipe.avro.AvroFile(path).codec == "deflate"  # The specification requires all readers to support it.
    # Only nullable columns are written as unions.
    unions = [
        field["name"] for field in fastpipe.avro.AvroFile(path).schema["fields"] if isinstance(field["type"], list)
    ]
    assert unions == ["masked", "day"]


@pytest.mark.parametrize("codec", CODECS)
def test_read_back_by_fastpipe(tmp_path: Path, codec: Any) -> None:
    path, again = tmp_path / "out.avro", tmp_path / "again.avro"
    fastpipe.write_avro(path, [BATCH, BATCH], codec=codec, block_bytes=200)
    reader = fastpipe.read_avro(path, batch_size=4, shuffle=True, seed=3)
    fastpipe.write_avro(again, reader, codec=codec)
    rows, shuffled = read(path), read(again)
    assert rows == 2 * ROWS
    assert sorted(map(repr, shuffled)) == sorted(map(repr, rows))
    features = dict(reader.features)
    for name, form in next(iter(fastpipe.read_avro(again, features=features, batch_size=6))).items():
        expected = next(iter(fastpipe.read_avro(path, features=features, batch_size=6, shuffle=True, seed=3)))[name]
        assert (
            np.array_equal(np.asarray(form), np.asarray(expected))
            if isinstance(form, np.ndarray)
            else (form.to_list() == expected.to_list())
        )


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (fastpipe.SparseSpec((9,), "float64", on_null="mask"), [([1, 2], [0.5, 1.5]), None, ([], [])]),
        (fastpipe.SparseSpec((9,), "float64", fill=math.nan), [([1, 2], [0.5, None]), ([], [])]),
        (fastpipe.SparseSpec((9, 5), "datetime64[ms]", on_null="fill"), [([1, 2], [DAY, None]), ([3], [DAY])]),
    ],
    ids=["mask", "nan", "nat"],
)
def test_sparse_rows_with_nulls_are_read_back(tmp_path: Path, spec: Any, rows: list[Any]) -> None:
    names = [f"indices{i}" for i in range(len(spec.shape))]
    kind = pa.struct(
        [*((name, pa.list_(pa.int64())) for name in names), ("values", pa.list_(pa.from_numpy_dtype(spec.dtype)))]
    )
    entries = [None if row is None else {**dict.fromkeys(names, row[0]), "values": row[1]} for row in rows]
    reader = fastpipe.from_arrow(pa.table({"x": pa.array(entries, kind)}), features={"x": spec}, batch_size=2)
    path = tmp_path / "out.avro"
    fastpipe.write_avro(path, reader)
    again = fastpipe.read_avro(path, features={"x": spec}, batch_size=2)
    assert pa.table(again)["x"].to_pylist() == entries


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy"])
def test_read_back_by_polars(tmp_path: Path, codec: Any) -> None:
    frame = pl.DataFrame(
        {"a": [1, None, 3], "b": ["x", "yé", None], "c": [[1.5], [], [2.5, 3.5]], "d": [True, False, None]}
    )
    fastpipe.write_avro(tmp_path / "out.avro", frame, codec=codec)
    assert pl.read_avro(tmp_path / "out.avro").equals(frame)


@pytest.mark.parametrize(
    ("codec", "level"), [("deflate", 12), ("zstandard", -7), ("zstandard", 19), ("bzip2", 1), ("xz", 0)]
)
def test_levels(tmp_path: Path, codec: Any, level: int) -> None:
    fastpipe.write_avro(tmp_path / "out.avro", {"a": np.arange(1000)}, codec=codec, level=level)
    assert [row["a"] for row in read(tmp_path / "out.avro")] == list(range(1000))


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(tmp_path: Path, rows: int) -> None:
    table = pa.table({"a": pa.array(range(rows), pa.int64()), "b": pa.array(["x"] * rows, pa.string())})
    for data in (table, table.to_reader(), [table], iter([table, table.slice(rows)])):
        written = fastpipe.write_avro(tmp_path / "out.avro", data)
        assert written[:2] == (rows, rows)
        assert read(tmp_path / "out.avro") == table.to_pylist()


def test_no_batches(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass schema="):
        fastpipe.write_avro(tmp_path / "out.avro", [])
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}
    assert fastpipe.write_avro(tmp_path / "out.avro", [], schema).rows == 0
    assert read(tmp_path / "out.avro") == []
    empty = pa.RecordBatchReader.from_batches(pa.schema([("a", pa.int64())]), [])
    assert fastpipe.write_avro(tmp_path / "out.avro", empty).rows == 0


def test_wide_and_large_rows(tmp_path: Path) -> None:
    wide = pa.table({f"c{i}": [i, i + 1] for i in range(3000)})
    fastpipe.write_avro(tmp_path / "out.avro", wide)
    assert read(tmp_path / "out.avro") == wide.to_pylist()
    large = pa.table({"a": ["x" * 3_000_000, "y"]})
    assert fastpipe.write_avro(tmp_path / "out.avro", large, block_bytes=100).blocks == 2
    assert read(tmp_path / "out.avro") == large.to_pylist()


@pytest.mark.parametrize("name", ["a b", "9a", "ä", "", "a-b", "a..b", "a.", ".a", "a\tb"])
def test_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(fastpipe.errors.SchemaError, match=r"rename|name of") as caught:
        fastpipe.write_avro(tmp_path / "out.avro", pa.table({name: [1]}))
    assert caught.value.feature is not None
    with pytest.raises(fastpipe.errors.SchemaError):
        fastpipe.write_avro(
            tmp_path / "out.avro", pa.table({"a": [{name: 1}]}) if "\0" not in name else pa.table({name: [1]})
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("columns", [["a", "a"], ["a", "a.b"], ["a.b", "a"], ["x.a", "x.a.b"]])
def test_colliding_names(tmp_path: Path, columns: list[str]) -> None:
    table = pa.table([[1]] * len(columns), names=columns)
    with pytest.raises(fastpipe.errors.SchemaError, match=r"rename one|two fields"):
        fastpipe.write_avro(tmp_path / "out.avro", table)


SCHEMA = {
    "type": "record",
    "name": "R",
    "namespace": "org.x",
    "fields": [
        {"name": "suit", "type": {"type": "enum", "name": "Suit", "symbols": ["A", "B"]}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "price", "type": ["null", {"type": "fixed", "name": "P", "size": 5, "logicalType": "decimal",
                                              "precision": 9, "scale": 2}]},
        {"name": "at", "type": [{"type": "long", "logicalType": "timestamp-millis"}, "null"]},
        {"name": "raw", "type": {"type": "fixed", "name": "F", "size": 2}},
        {"name": "again", "type": "F"},
        {"name": "f", "type": "float"},
        {"name": "n", "type": "int"},
        {"name": "span", "type": {"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}},
        {"name": "m", "type": {"type": "map", "values": ["null", "long"]}},
        {"name": "nothing", "type": "null"},
    ],
}  # fmt: skip
UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")


def given_schema_table() -> pa.Table:
    return pa.table(
        {
            # In a different order than in the schema.
            "nothing": pa.nulls(2),
            "n": pa.array([1, 2], pa.uint64()),
            "suit": pa.array(["B", "A"]).dictionary_encode(),
            "id": pa.array([UUID.bytes] * 2, pa.binary(16)),
            "price": pa.array([decimal.Decimal("-1.5"), None], pa.decimal128(20, 1)),
            "at": pa.array([datetime.datetime(2020, 1, 1), None], pa.timestamp("us")),
            "raw": pa.array([b"ab", b"cd"]),
            "again": pa.array([b"ab", b"cd"], pa.binary(2)),
            "f": pa.array([0.5, 0.25]),
            "span": pa.array([(1, 2, 3_000_000), (0, 0, 0)], pa.month_day_nano_interval()),
            "m": pa.array([[("k", 1), ("l", None)], []], pa.map_(pa.string(), pa.int32())),
        }
    )


def test_given_schema(tmp_path: Path) -> None:
    path = tmp_path / "out.avro"
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        fastpipe.write_avro(path, given_schema_table(), schema)
        assert fastpipe.avro.AvroFile(path).schema == SCHEMA
        first, second = read(path)
        assert first == {
            "suit": "B", "id": str(UUID), "price": -150, "at": 1577836800000, "raw": b"ab", "again": b"ab", "f": 0.5,
            "n": 1, "span": bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]), "m": {"k": 1, "l": None}, "nothing": None,
        }  # fmt: skip
        assert (second["price"], second["at"], second["m"]) == (None, None, {})


@pytest.mark.parametrize(
    ("column", "values", "error"),
    [
        ("suit", pa.array(["C", "A"]), fastpipe.errors.ValueRangeError),
        ("suit", pa.array([2, 0]), fastpipe.errors.ValueRangeError),
        ("suit", pa.array([None, "A"]), fastpipe.errors.NullValueError),
        ("suit", pa.array([1.5, 2.5]), fastpipe.errors.SchemaError),
        ("id", pa.array([1, 2]), fastpipe.errors.SchemaError),
        ("id", pa.array([b"\xff", b"a"]), fastpipe.errors.ValueRangeError),
        ("price", pa.array([decimal.Decimal("0.125"), None]), fastpipe.errors.ValueRangeError),
        ("price", pa.array([decimal.Decimal(10**8), None]), fastpipe.errors.ValueRangeError),
        ("price", pa.array([1.5, 2.5]), fastpipe.errors.SchemaError),
        ("at", pa.array([1, None], pa.timestamp("us")), fastpipe.errors.ValueRangeError),
        ("at", pa.array(["2020", None]), fastpipe.errors.SchemaError),
        ("raw", pa.array([b"abc", b"ab"]), fastpipe.errors.ValueRangeError),
        ("again", pa.array([b"abc"] * 2, pa.binary(3)), fastpipe.errors.SchemaError),
        ("f", pa.array(["x", "y"]), fastpipe.errors.SchemaError),
        ("n", pa.array([2**31, 0]), fastpipe.errors.ValueRangeError),
        ("n", pa.array([1.0, 2.0]), fastpipe.errors.SchemaError),
        ("n", pa.array([None, 1]), fastpipe.errors.NullValueError),
        ("span", pa.array([(0, 0, 5), (0, 0, 0)], pa.month_day_nano_interval()), fastpipe.errors.ValueRangeError),
        ("m", pa.array([["k"], []]), fastpipe.errors.SchemaError),
        ("m", pa.array([[(1, 1)], []], pa.map_(pa.int32(), pa.int32())), fastpipe.errors.SchemaError),
        ("nothing", pa.array([1, 2]), fastpipe.errors.SchemaError),
        ("more", pa.array([1, 2]), fastpipe.errors.SchemaError),
        ("nothing", None, fastpipe.errors.SchemaError),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, column: str, values: Any, error: type[Exception]) -> None:
    table = given_schema_table()
    if column in table.column_names:
        table = table.drop_columns([column])
    if values is not None:
        table = table.append_column(column, values)
    with pytest.raises(error) as caught:
        fastpipe.write_avro(tmp_path / "out.avro", table, SCHEMA)
    if column != "span":
        assert caught.value.feature is not None
        assert caught.value.feature.split(".")[0] == column
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ("{", fastpipe.errors.SchemaError),
        ('"long"', fastpipe.errors.SchemaError),
        ({"type": "record", "name": "R"}, fastpipe.errors.SchemaError),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "lnog"}]}, fastpipe.errors.SchemaError),
        ({"type": "record", "name": "R", "fields": [{"name": "a b", "type": "long"}]}, fastpipe.errors.SchemaError),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": ["int", "string"]}]},
         fastpipe.errors.UnsupportedError),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": ["null", "R"]}]},
         fastpipe.errors.UnsupportedError),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "bytes", "logicalType": "decimal",
          "precision": 2, "scale": 3}}]}, fastpipe.errors.SchemaError),
    ],
)  # fmt: skip
def test_schemas_that_are_refused(tmp_path: Path, schema: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        fastpipe.write_avro(tmp_path / "out.avro", {"a": np.arange(3)}, schema)


def test_a_null_in_a_later_batch(tmp_path: Path) -> None:
    batches = [{"a": np.arange(2)}, {"a": Masked(np.arange(2), np.array([True, False]))}]
    with pytest.raises(fastpipe.errors.NullValueError, match="pass a schema"):
        fastpipe.write_avro(tmp_path / "out.avro", batches)
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": ["null", "long"]}]}
    fastpipe.write_avro(tmp_path / "out.avro", batches, schema)
    assert [row["a"] for row in read(tmp_path / "out.avro")] == [0, 1, 0, None]


@pytest.mark.parametrize("kind", [pa.dense_union([pa.field("a", pa.int64())])])
def test_types_that_are_refused(tmp_path: Path, kind: pa.DataType) -> None:
    array = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])
    with pytest.raises(fastpipe.errors.UnsupportedError, match="aren't written"):
        fastpipe.write_avro(tmp_path / "out.avro", pa.table({"u": array}))


def test_damaged_arrow_data(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], "int32")), pa.py_buffer(b"\xff")])
    with pytest.raises(fastpipe.errors.MalformedFileError):
        fastpipe.write_avro(tmp_path / "out.avro", pa.table({"a": bad}))


def test_metadata(tmp_path: Path) -> None:
    fastpipe.write_avro(tmp_path / "out.avro", {"a": np.arange(3)}, metadata={"who": "é", "raw": b"\xff"})
    found = fastpipe.avro.AvroFile(tmp_path / "out.avro").metadata
    assert (found["who"], found["raw"]) == ("é".encode(), b"\xff")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"path": 5}, TypeError), ({"path": io.BytesIO()}, TypeError), ({"data": 5}, TypeError),
        ({"data": "x"}, TypeError),
        ({"data": [5]}, TypeError), ({"data": np.arange(3)}, TypeError), ({"data": {}}, ValueError),
        ({"data": {"a": "x"}}, TypeError), ({"data": pl.LazyFrame({"a": [1]})}, TypeError), ({"schema": 5}, TypeError),
        ({"schema": {"a": {1, 2}}}, TypeError), ({"codec": 5}, TypeError), ({"codec": "lz4"}, ValueError),
        ({"level": "x"}, TypeError), ({"level": 99}, ValueError), ({"codec": "null", "level": 1}, ValueError),
        ({"block_bytes": 0}, ValueError), ({"block_bytes": 1.5}, TypeError), ({"block_bytes": True}, TypeError),
        ({"block_bytes": 2**31}, ValueError), ({"append": "no"}, TypeError), ({"progress": 1}, TypeError),
        ({"metadata": [1]}, TypeError), ({"metadata": {1: "x"}}, TypeError), ({"metadata": {"a": 1}}, TypeError),
        ({"metadata": {"avro.codec": "x"}}, ValueError), ({"num_threads": 0}, ValueError),
        ({"num_threads": "x"}, ValueError),
        ({"num_threads": 1.5}, TypeError), ({"append": True, "metadata": {"a": "x"}}, ValueError),
        ({"append": True}, FileNotFoundError), ({"path": "no/such/folder.avro"}, FileNotFoundError),
        ({"path": "/"}, OSError),
    ],
)  # fmt: skip
def test_arguments(tmp_path: Path, arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        fastpipe.write_avro(**{"path": tmp_path / "out.avro", "data": {"a": np.arange(3)}, **arguments})
    assert not list(tmp_path.iterdir())


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = fastpipe.from_arrow(pa.table({"a": range(1000)}), batch_size=300)
    fastpipe.write_avro(tmp_path / "out.avro", reader, progress=True)
    assert "1.00k" in capsys.readouterr().err
