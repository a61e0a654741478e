"""`fastpipe convert`."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import fastpipe
from fastpipe import cli

SCHEMA = {
    "type": "record",
    "name": "User",
    "namespace": "com.example",
    "fields": [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}]},
        {
            "name": "home",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "Home",
                    "fields": [{"name": "city", "type": "string"}, {"name": "zip", "type": ["null", "int"]}],
                },
            ],
        },
        {"name": "suit", "type": {"type": "enum", "name": "Suit", "symbols": ["A", "B"]}},
        {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}},
        {"name": "counts", "type": ["null", {"type": "map", "values": ["int", "null"]}]},
        {"name": "raw", "type": {"type": "fixed", "name": "Raw", "size": 4}},
        {"name": "day", "type": [{"type": "int", "logicalType": "date"}, "null"]},
        {"name": "deep", "type": {"type": "array", "items": {"type": "array", "items": "boolean"}}},
    ],
}
START = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
RECORDS = [
    {
        "at": START + datetime.timedelta(seconds=i),
        "price": None if i % 3 == 0 else decimal.Decimal(i) / 4,
        "home": None if i % 4 == 0 else {"city": f"c{i}", "zip": None if i % 2 else i},
        "suit": "AB"[i % 2],
        "tags": [None if (i + j) % 3 == 0 else f"t{j}" for j in range(i % 4)],
        "counts": None if i % 5 == 0 else {f"k{j}": None if j == 1 else j for j in range(i % 3)},
        "raw": b"%04d" % i,
        "day": None if i % 6 == 0 else datetime.date(2020, 1, 1 + i % 20),
        "deep": [[(i + k) % 3 == 0 for k in range(j)] for j in range(i % 3)],
    }
    for i in range(500)
]


@pytest.fixture
def source(tmp_path: Path) -> str:
    with (tmp_path / "in.avro").open("wb") as file:
        fastavro.writer(file, SCHEMA, RECORDS, codec="deflate")
    return str(tmp_path / "in.avro")


def records(path: str) -> list[Any]:
    with open(path, "rb") as file:
        return list(fastavro.reader(file))


def test_avro_keeps_its_schema(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.avro")
    assert cli.main(["convert", source, out, "--codec", "snappy", "--block-bytes", "100", "--batch-size", "64"]) == 0
    file = fastpipe.AvroFile(out)
    assert (file.schema, file.codec) == (SCHEMA, "snappy")
    assert len(file.blocks) > 100
    assert records(out) == RECORDS
    assert "500 rows" in capsys.readouterr().out


def test_shuffled(source: str, tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("a.avro", "b.avro", "c.avro"))
    for out, seed in ((first, "1"), (second, "1"), (third, "2")):
        assert cli.main(["convert", source, out, "--shuffle", "--seed", seed]) == 0
    assert records(first) == records(second) != records(third)
    for out in (first, third):
        assert records(out) != RECORDS
        assert sorted(records(out), key=lambda record: record["at"]) == RECORDS


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_there_and_back(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"i": [1, None, 3], "s": ["a", "b", None], "l": [[1.5], [], [2.5, 3.5]], "r": [{"x": 1}] * 3})
    begin, between, back = (str(tmp_path / name) for name in ("in.avro", f"x{suffix}", "out.avro"))
    fastpipe.write_avro(begin, table)
    assert cli.main(["convert", begin, between]) == 0
    assert cli.main(["convert", between, back, "--columns", "i,s,l,r.x"]) == 0
    assert records(back) == table.to_pylist()
    found = pq.read_table(between) if suffix == ".parquet" else pyarrow.feather.read_table(between)
    assert found["i"].to_pylist() == [1, None, 3]


def test_directories_and_names_without_suffix(source: str, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(2):
        assert cli.main(["convert", source, str(folder / f"{number}.avro")]) == 0
    out = str(tmp_path / "out")
    assert cli.main(["convert", str(folder), out]) == 2
    assert cli.main(["convert", str(folder), out, "--to", "avro"]) == 0
    assert records(out) == 2 * RECORDS
    assert cli.main(["convert", out, str(tmp_path / "again.avro")]) == 2
    assert cli.main(["convert", out, str(tmp_path / "again.avro"), "--from", "avro"]) == 0
    with (folder / "2.avro").open("wb") as file:
        fastavro.writer(file, {**SCHEMA, "name": "Other"}, RECORDS)
    assert cli.main(["convert", str(folder / "*.avro"), out, "--to", "avro", "--force"]) == 1
    assert records(out) == 2 * RECORDS


def test_refuses_to_overwrite(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.avro"
    out.write_text("precious")
    assert cli.main(["convert", source, str(out)]) == 2
    assert out.read_text() == "precious"
    assert "--force" in capsys.readouterr().err
    assert cli.main(["convert", source, str(out), "--force"]) == 0
    assert records(str(out)) == RECORDS
    # Onto itself, too: it is replaced when all was read.
    assert cli.main(["convert", str(out), str(out), "--force", "--codec", "null"]) == 0
    assert records(str(out)) == RECORDS


def test_a_column_that_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "a", "type": "long"},
            {"name": "u", "type": ["int", "string", {"type": "array", "items": "int"}]},
        ],
    }
    source, out = str(tmp_path / "in.avro"), str(tmp_path / "out.avro")
    with open(source, "wb") as file:
        fastavro.writer(file, schema, [{"a": 1, "u": "x"}])
    assert cli.main(["convert", source, out]) == 1
    assert "'u'" in capsys.readouterr().err
    assert cli.main(["convert", source, out, "--columns", "a"]) == 0
    assert records(out) == [{"a": 1}]


@pytest.mark.parametrize(
    "options",
    [
        ["--codec", "brotli"],
        ["--seed", "1"],
        ["--to", "parquet", "--block-bytes", "9"],
        ["--to", "parquet", "--codec", "xz"],
    ],
)
def test_options_that_do_not_go_together(source: str, tmp_path: Path, options: list[str]) -> None:
    assert cli.main(["convert", source, str(tmp_path / "out.avro"), *options]) == 2
    assert not (tmp_path / "out.avro").exists()
