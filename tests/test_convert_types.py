"""`fastpipe convert` keeps types between Avro, Parquet and Arrow, or reports the column whose type it can't keep."""

from __future__ import annotations

import datetime
import decimal
import random
import struct
from pathlib import Path
from typing import Any

import fastavro
import hypothesis
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import avro_schemas
import fastpipe
import oracle
from arrow_of_avro import arrow_type, held, refused, stored, without_nullability
from fastpipe import cli


def read(path: Path) -> pa.Table:
    return pq.read_table(path) if path.suffix == ".parquet" else pyarrow.feather.read_table(path)


class Values(avro_schemas.Values):
    """Values that Arrow types can represent."""

    def of(self, node: oracle.Type) -> Any:
        if node.logical.startswith("time-"):
            return self.rng.randrange(86_400_000 * (1000 if node.kind == "long" else 1))
        if node.logical == "duration":
            return struct.pack("<III", *(self.rng.choice([0, 1, 2**31 - 1]) for _ in range(3)))
        return super().of(node)

    def decimal(self, node: oracle.Type) -> bytes:
        most = 10**node.precision - 1
        value = self.rng.choice([0, -1, most, -most, self.rng.randint(-most, most)])
        return value.to_bytes(node.size or value.bit_length() // 8 + 1 + self.rng.randint(0, 2), "big", signed=True)


@hypothesis.given(avro_schemas.schemas(), st.integers(0, 2**32), st.booleans())
def test_any_types_to_arrow_and_back(schema: Any, seed: int, shuffle: bool) -> None:
    root = oracle.resolve(schema)
    rows = Values(seed).rows(root, 15)
    with avro_schemas.files(avro_schemas.container(schema, rows, seed)) as (source,):
        out, back = Path(f"{source}.arrow"), f"{source}.back.avro"
        order = ["--shuffle", "--seed", str(seed)] if shuffle else []
        keeps = [name for name, part in root.parts if not refused(part)]
        columns = [] if len(keeps) == len(root.parts) else ["--columns", ",".join(keeps)]
        if columns:
            assert cli.main(["convert", source, str(out)]) == 1
            assert not out.exists()
        assert cli.main(["convert", source, str(out), *columns, *order, "--batch-size", "4"]) == 0
        table = read(out)
        table.validate(full=True)
        assert table.column_names == keeps
        parts = dict(root.parts)
        for field in table.schema:
            assert without_nullability(field.type) == without_nullability(arrow_type(parts[field.name])), field
        found = {name: held(table[name].combine_chunks()) for name in keeps}
        at = found["id"]
        assert sorted(at) == list(range(15))
        for name in keeps:
            expected = [stored(parts[name], rows[i][name]) for i in at]
            assert repr(found[name]) == repr(expected), name
        # A file that was converted to Arrow converts back to the same values in Avro.
        if cli.main(["convert", str(out), back]) == 0:
            again = Path(f"{source}.again.arrow")
            assert cli.main(["convert", back, str(again)]) == 0
            for name in keeps:
                assert repr(held(read(again)[name].combine_chunks())) == repr(found[name]), name


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_types_of_a_file(tmp_path: Path, suffix: str) -> None:
    """The types that the manual lists survive a round trip."""
    schema = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 2}},
            {"name": "suit", "type": ["null", {"type": "enum", "name": "Suit", "symbols": ["A", "B"]}]},
            {"name": "counts", "type": {"type": "map", "values": "long"}},
            {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
            {"name": "fine", "type": {"type": "long", "logicalType": "time-micros"}},
            {
                "name": "home",
                "type": ["null", {"type": "record", "name": "H", "fields": [{"name": "zip", "type": "int"}]}],
            },
            {"name": "visits", "type": {"type": "array", "items": ["null", "H"]}},
        ],
    }
    rows = [
        {
            "price": decimal.Decimal("12345678901234567890123456.78"),
            "suit": "B",
            "counts": {"x": 1},
            "clock": datetime.time(1, 2, 3, 4000),
            "fine": datetime.time(1, 2, 3, 4),
            "home": {"zip": 5},
            "visits": [None, {"zip": 6}],
        },
        {
            "price": decimal.Decimal("-0.01"),
            "suit": None,
            "counts": {},
            "clock": datetime.time(0),
            "fine": datetime.time(23),
            "home": None,
            "visits": [],
        },
    ]
    source, between, back = tmp_path / "in.avro", tmp_path / f"x{suffix}", tmp_path / "back.avro"
    with source.open("wb") as file:
        fastavro.writer(file, schema, rows)
    assert cli.main(["convert", str(source), str(between)]) == 0
    table = read(between)
    assert table.to_pylist(maps_as_pydicts="strict") == rows
    assert table.schema.field("suit").type == pa.dictionary(pa.int32(), pa.string())
    assert cli.main(["convert", str(between), str(back)]) == 0
    with back.open("rb") as file:
        assert list(fastavro.reader(file)) == rows
    for command in (["--columns", "home.zip"], ["--columns", "home.zip,suit", "--shuffle"]):
        out = tmp_path / f"columns{suffix}"
        assert cli.main(["convert", str(source), str(out), "--force", *command]) == 0
        assert sorted(read(out)["home.zip"].to_pylist(), key=str) == [5, None]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_arrow_types_to_avro(tmp_path: Path, suffix: str) -> None:
    table = pa.table(
        {
            "s": pa.array([datetime.time(1, 2, 3), None], pa.time32("s" if suffix == ".arrow" else "ms")),
            "us": pa.array([datetime.time(1, 2, 3, 4), None], pa.time64("us")),
            "d": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(20, 2)),
            "e": pa.array(["x", None]).dictionary_encode(),
            "m": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32())),
            "r": pa.array([[{"x": 1, "y": None}], []], pa.list_(pa.struct([("x", pa.int8()), ("y", pa.string())]))),
            "at": pa.array([datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), None], pa.timestamp("us", "UTC")),
            "day": pa.array([datetime.date(2020, 1, 1), None]),
        }
    )
    source, out = tmp_path / f"in{suffix}", tmp_path / "out.avro"
    write = pq.write_table if suffix == ".parquet" else pyarrow.feather.write_feather
    write(table, source)
    assert cli.main(["convert", str(source), str(out)]) == 0
    with out.open("rb") as file:
        reader = fastavro.reader(file)
        assert list(reader) == table.to_pylist(maps_as_pydicts="strict")
    kinds = {field["name"]: field["type"][1] for field in fastpipe.avro.AvroFile(out).schema["fields"]}
    assert kinds["s"] == {"type": "int", "logicalType": "time-millis"}
    assert kinds["us"] == {"type": "long", "logicalType": "time-micros"}
    # Conversions between Parquet and Arrow keep all types.
    other = tmp_path / ("out.arrow" if suffix == ".parquet" else "out.parquet")
    assert cli.main(["convert", str(source), str(other)]) == 0
    assert read(other).to_pylist() == table.to_pylist()


def test_types_that_are_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error names the unsupported column, and the other columns can be written."""

    def refuses(source: Path, target: str, column: str, *options: str) -> None:
        out = tmp_path / target
        assert cli.main(["convert", str(source), str(out), *options]) == 1
        error = capsys.readouterr().err
        assert f"'{column}'" in error
        assert "--columns" in error
        assert not out.exists()
        assert cli.main(["convert", str(source), str(out), "--columns", "a", *options]) == 0
        out.unlink()

    fields = {
        "union": ["int", "string"],
        "big": {"type": "bytes", "logicalType": "big-decimal"},
        "long": {"type": "bytes", "logicalType": "decimal", "precision": 77},
        "self": {"type": "array", "items": "R"},
    }
    for name, kind in fields.items():
        schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}, {"name": name, "type": kind}]}
        source = tmp_path / f"{name}.avro"
        source.write_bytes(oracle.container(schema, [], random.Random(1)))
        for target in ("x.parquet", "x.arrow"):
            refuses(source, target, name)
    duration = {"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}
    for kind in (duration, {"type": "record", "name": "Empty", "fields": []}):
        schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}, {"name": "d", "type": kind}]}
        source = tmp_path / "d.avro"
        source.write_bytes(oracle.container(schema, [], random.Random(1)))
        refuses(source, "x.parquet", "d")
    table = pa.table({"a": [1, 2], "t": pa.array([1, 2], pa.duration("us"))})
    pq.write_table(table, tmp_path / "t.parquet")
    refuses(tmp_path / "t.parquet", "x.avro", "t")
    table = pa.table({"a": [1, 2], "t": pa.array([1, 2], pa.time64("us"))})
    pq.write_table(table, tmp_path / "u.parquet")
    refuses(tmp_path / "u.parquet", "x.arrow", "t", "--shuffle")


def test_columns_of_folders(tmp_path: Path) -> None:
    for year in (2025, 2026):
        folder = tmp_path / "in" / f"year={year}"
        folder.mkdir(parents=True)
        fastpipe.write_avro(folder / "part.avro", pa.table({"x": [year]}))
    out = tmp_path / "out.parquet"
    assert cli.main(["convert", str(tmp_path / "in"), str(out)]) == 0
    assert pq.read_table(out).to_pylist() == [{"x": year, "year": year} for year in (2025, 2026)]
    assert cli.main(["convert", str(tmp_path / "in"), str(out), "--force", "--columns", "year"]) == 0
    assert pq.read_table(out).to_pylist() == [{"year": 2025}, {"year": 2026}]


def test_fields_of_avro_keep_their_types(tmp_path: Path) -> None:
    """If columns of an Avro file are selected, types that skipped fields define are defined at their first use."""
    suit = {"type": "enum", "name": "Suit", "symbols": ["A", "B"]}
    schema = {
        "type": "record",
        "name": "R",
        "namespace": "n",
        "fields": [
            {"name": "first", "type": suit},
            {"name": "second", "type": ["null", "Suit", "int"], "default": None},
            {"name": "third", "type": {"type": "map", "values": "n.Suit"}, "doc": "Kept."},
            {"name": "id", "type": "int"},
        ],
    }
    rows = [
        {"first": "A", "second": "B", "third": {"x": "B"}, "id": 1},
        {"first": "B", "second": 3, "third": {}, "id": 2},
    ]
    source, out = tmp_path / "in.avro", tmp_path / "out.avro"
    with source.open("wb") as file:
        fastavro.writer(file, schema, rows)
    assert cli.main(["convert", str(source), str(out), "--columns", "id,third,second"]) == 0
    with out.open("rb") as file:
        names = ("id", "third", "second")
        assert list(fastavro.reader(file)) == [{name: row[name] for name in names} for row in rows]
    found = fastpipe.avro.AvroFile(out).schema
    assert found["fields"][1]["type"]["values"]["symbols"] == ["A", "B"]
    assert found["fields"][1]["doc"] == "Kept."


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_shuffled_tables(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"i": range(100), "s": [f"s{i}" for i in range(100)], "l": [[i] for i in range(100)]})
    source, out = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    write = pq.write_table if suffix == ".parquet" else pyarrow.feather.write_feather
    write(table, source)
    assert cli.main(["convert", str(source), str(out), "--shuffle", "--seed", "1"]) == 0
    found = read(out)
    assert found.schema.types == table.schema.types
    assert found != table
    assert found.sort_by("i").to_pylist() == table.to_pylist()


def test_damaged_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "b", "type": "boolean"}]}
    data = oracle.container(schema, [{"b": True}] * 3, random.Random(1))
    at = data.index(b"\x01", data.index(b"avro.schema") + 100)
    (tmp_path / "in.avro").write_bytes(data[:at] + b"\x02" + data[at + 1 :])
    assert cli.main(["convert", str(tmp_path / "in.avro"), str(tmp_path / "out.parquet")]) == 1
    assert "boolean" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_nulls_of_a_huge_fixed(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tests a file of 2 kB that needs 2 TB of zeros."""
    huge = {"type": "fixed", "name": "F", "size": 2**31 - 1}
    schema = {"type": "record", "name": "R", "fields": [{"name": "f", "type": ["null", huge]}]}
    source, out = tmp_path / "in.avro", tmp_path / f"out.{suffix}"
    source.write_bytes(oracle.container(schema, [{"f": None}] * 1000, random.Random(1)))
    assert cli.main(["convert", str(source), str(out)]) == 1
    assert "--batch-size" in capsys.readouterr().err
    assert not out.exists()


def test_different_dictionaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.arrow"
    parts = [pa.table({"e": pa.array(list(texts)).dictionary_encode()}) for texts in ("ab", "cba")]
    with pq.ParquetWriter(source, parts[0].schema) as writer:
        for part in parts:
            writer.write_table(part)
    assert cli.main(["convert", str(source), str(out), "--batch-size", "2"]) == 1
    assert "'e'" in capsys.readouterr().err
    assert not out.exists()
    assert cli.main(["convert", str(source), str(out)]) == 0
    assert read(out)["e"].to_pylist() == list("abcba")


def test_metadata_of_tables_is_kept(tmp_path: Path) -> None:
    table = pa.table({"x": [1]}).replace_schema_metadata({"key": "value"})
    pq.write_table(table, tmp_path / "in.parquet")
    assert cli.main(["convert", str(tmp_path / "in.parquet"), str(tmp_path / "out.arrow")]) == 0
    assert read(tmp_path / "out.arrow").schema.metadata == {b"key": b"value"}
