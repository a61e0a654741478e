"""Tests of `fastpipe convert`."""

from __future__ import annotations

import datetime
import decimal
import gzip
import random
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
from fastpipe import cli
from fastpipe.cli import _convert_files

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
    file = fastpipe.avro.AvroFile(out)
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
def test_round_trips(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"i": [1, None, 3], "s": ["a", "b", None], "l": [[1.5], [], [2.5, 3.5]], "r": [{"x": 1}] * 3})
    begin, between, back = (str(tmp_path / name) for name in ("in.avro", f"x{suffix}", "out.avro"))
    fastpipe.write_avro(begin, table)
    assert cli.main(["convert", begin, between]) == 0
    assert cli.main(["convert", between, back, "--columns", "i,s,l,r.x"]) == 0
    assert records(back) == table.to_pylist()
    assert fastpipe.avro.AvroFile(back).codec == "deflate"
    found = pq.read_table(between) if suffix == ".parquet" else pyarrow.feather.read_table(between)
    assert found["i"].to_pylist() == [1, None, 3]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_csv(tmp_path: Path, suffix: str) -> None:
    """Types are inferred as in `read_csv`, and empty cells are nulls, except in text."""
    rows = [("id", "size", "count", "day"), ("007", "1.5", "", "2024-01-02"), ("", "", "3", "")]
    text = "".join(("\t" if suffix == ".tsv" else ",").join(row) + "\n" for row in rows).encode()
    source, target = tmp_path / f"in{suffix}", str(tmp_path / "out.parquet")
    source.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    assert cli.main(["convert", str(source), target]) == 0
    day = datetime.datetime(2024, 1, 2)
    assert [list(row.values()) for row in pq.read_table(target).to_pylist()] == [
        ["007", 1.5, None, day.date()],
        ["", None, 3, None],
    ]
    assert cli.main(["convert", str(source), str(tmp_path / "out.avro"), "--columns", "count", "--shuffle"]) == 0
    assert sorted(row["count"] or 0 for row in records(str(tmp_path / "out.avro"))) == [0, 3]
    assert cli.main(["convert", target, str(tmp_path / "out.csv")]) == 2


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
    # A file can be converted onto itself, because it is replaced only after everything was read.
    assert cli.main(["convert", str(out), str(out), "--force", "--codec", "null"]) == 0
    assert records(str(out)) == RECORDS


# --- Several files ---


@pytest.fixture
def sources(source: str, tmp_path: Path) -> dict[str, str]:
    """Returns files of each format with the same number of rows, in several blocks or row groups."""
    found = {"avro": source, "csv": str(tmp_path / "in.csv")}
    Path(found["csv"]).write_text("number,text\n" + "".join(f"{i},t{i}\n" for i in range(500)))
    for name in ("parquet", "arrow"):
        found[name] = str(tmp_path / f"in.{name}")
        assert cli.main(["convert", found["csv"], found[name], "--batch-size", "70"]) == 0
    return found


def rows_of(path: Path) -> list[Any]:
    if path.suffix == ".avro":
        return records(str(path))
    table: pa.Table = pq.read_table(path) if path.suffix == ".parquet" else pyarrow.feather.read_table(path)
    return table.to_pylist()


@pytest.mark.parametrize("order", [[], ["--shuffle", "--seed", "3"]], ids=["in order", "shuffled"])
@pytest.mark.parametrize("to", ["avro", "parquet", "arrow"])
@pytest.mark.parametrize("origin", ["avro", "parquet", "arrow", "csv"])
def test_files_have_the_rows_of_a_single_file(
    sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], origin: str, to: str, order: list[str]
) -> None:
    options = ["--to", to, "--batch-size", "64", *order]
    if origin == "avro" and to != "avro":
        options += ["--columns", "at,home,tags"]
    assert cli.main(["convert", sources[origin], str(tmp_path / f"one.{to}"), *options]) == 0
    expected = rows_of(tmp_path / f"one.{to}")
    assert len(expected) == 500
    for split, counts in (
        (["--files", "7"], [71, 71, 72, 71, 72, 71, 72]),
        (["--files", "1"], [500]),
        (["--rows-per-file", "150"], [150, 150, 150, 50]),
        (["--rows-per-file", "250"], [250, 250]),
        (["--rows-per-file", "501"], [500]),
    ):
        out = tmp_path / "-".join(split)
        capsys.readouterr()
        assert cli.main(["convert", sources[origin], str(out), *options, *split]) == 0
        plural = "s" if len(counts) > 1 else ""
        assert f"500 rows in {len(counts)} file{plural}, " in capsys.readouterr().out
        files = sorted(out.iterdir())
        assert [file.name for file in files] == [
            f"part-{number:05}-of-{len(counts):05}.{to}" for number in range(len(counts))
        ]
        found = [rows_of(file) for file in files]
        assert [len(rows) for rows in found] == counts
        assert [row for rows in found for row in rows] == expected
    assert not list(tmp_path.glob(".fastpipe*"))


@pytest.mark.parametrize("to", ["avro", "parquet", "arrow"])
def test_more_files_than_rows(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file has at least one row, unless the input has no rows."""

    def convert(text: str, files: int, out: Path) -> int:
        (tmp_path / "in.csv").write_text(text)
        return cli.main(["convert", str(tmp_path / "in.csv"), str(out), "--to", to, "--files", str(files)])

    assert convert("x\n1\n2\n", 3, tmp_path / "out") == 2
    assert "--files 3 is more than 2 rows, and each file needs one: use fewer files" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert convert("x\n1\n2\n", 2, tmp_path / "out") == 0
    assert [row["x"] for file in sorted((tmp_path / "out").iterdir()) for row in rows_of(file)] == [1, 2]
    reader = {"avro": fastpipe.read_avro, "parquet": fastpipe.read_parquet, "arrow": fastpipe.read_arrow}[to]
    assert reader(tmp_path / "out", batch_size=2, columns=["x"]).num_rows == 2
    assert convert("x\n", 1, tmp_path / "none") == 0
    assert convert("x\n", 2, tmp_path / "two") == 2


@hypothesis.given(st.integers(0, 10**15), st.integers(1, 500))
def test_counts_of_files(rows: int, files: int) -> None:
    even = _convert_files.even_counts(rows, files)
    assert (sum(even), len(even)) == (rows, files)
    assert max(even) - min(even) <= 1
    most = rows // files + 1
    full = _convert_files.full_counts(rows, most)
    assert sum(full) == rows
    assert set(full[:-1]) <= {most}
    assert full == [0] if rows == 0 else 0 < full[-1] <= most


@pytest.mark.parametrize(
    "options", [["--files", "0"], ["--rows-per-file", "many"], ["--files", "2", "--rows-per-file", "3"]]
)
def test_wrong_numbers_of_files(source: str, tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["convert", source, str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_the_format_of_several_files_is_that_of_the_source(source: str, tmp_path: Path) -> None:
    assert cli.main(["convert", source, str(tmp_path / "out"), "--files", "2"]) == 0
    assert [file.suffix for file in (tmp_path / "out").iterdir()] == [".avro"] * 2
    assert fastpipe.avro.AvroFile(next((tmp_path / "out").iterdir())).schema == SCHEMA
    (tmp_path / "in.csv").write_text("x\n1\n")
    assert cli.main(["convert", str(tmp_path / "in.csv"), str(tmp_path / "csv"), "--files", "2"]) == 2


@pytest.mark.parametrize("content", [None, {}, {"mine": "precious"}], ids=["file", "empty", "directory"])
def test_an_existing_directory_is_not_touched(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, str] | None
) -> None:
    out = tmp_path / "out"
    if content is None:
        out.write_text("precious")
    else:
        out.mkdir()
        for name, text in content.items():
            (out / name).write_text(text)
    for force in ([], ["--force"]):
        assert cli.main(["convert", source, str(out), "--to", "avro", "--files", "2", *force]) == 2
        assert "already exists; remove it, or name another directory" in capsys.readouterr().err
    assert out.read_text() == "precious" if content is None else len(list(out.iterdir())) == len(content)


def test_a_directory_appears_when_all_of_its_files_are_complete(source: str, tmp_path: Path) -> None:
    """Until then, readers of the parent directory ignore the files, even if a killed process left them there."""
    out = tmp_path / "parts" / "out"
    out.parent.mkdir()
    table, written = pa.table({"x": range(10)}), []

    def write(path: str, tables: Any) -> int:
        written.append(path)
        assert not out.exists()
        rows = fastpipe.write_avro(path, tables).rows
        with pytest.raises(fastpipe.errors.MissingFileError):
            fastpipe.read_avro(out.parent, batch_size=2)
        return rows

    _convert_files.write_files(str(out), ".avro", [5, 5], iter([table]), write)
    assert len(written) == 2
    assert fastpipe.read_avro(out.parent, batch_size=2).num_rows == 10


@pytest.mark.parametrize(
    ("count", "taken", "message"),
    [
        (10, True, "second"),  # Another program has created the directory.
        (9, False, "internal error: there are more than 9 rows"),
        (11, False, "internal error: file 0 has 10 instead of 11 rows"),
    ],
)
def test_an_incomplete_directory_is_removed(tmp_path: Path, count: int, taken: bool, message: str) -> None:
    out = tmp_path / "second"

    def write(path: str, tables: Any) -> int:
        if taken:
            out.mkdir()
            (out / "mine").write_text("precious")
        return fastpipe.write_avro(path, tables).rows

    with pytest.raises(fastpipe.FastpipeError, match=message):
        _convert_files.write_files(str(out), ".avro", [count], iter([pa.table({"x": range(10)})]), write)
    assert [path.name for path in tmp_path.rglob("*")] == (["second", "mine"] if taken else [])


def test_an_error_leaves_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(oracle.container("string", ["abc"] * 900, random.Random(1)))
    data[data.rindex(b"\x06abc")] = 0x7E  # Declares a text of 63 bytes, in the last file.
    (tmp_path / "bad.avro").write_bytes(data)
    assert cli.main(["convert", str(tmp_path / "bad.avro"), str(tmp_path / "out"), "--files", "3"]) == 1
    assert "bad.avro" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.avro"]


@hypothesis.given(avro_schemas.schemas(), st.integers(0, 2**32), st.sampled_from(["null", "deflate"]))
def test_encoded_records_are_copied(schema: Any, seed: int, codec: str) -> None:
    """Records of any types are copied byte by byte, into blocks of a different size."""
    rows = avro_schemas.Values(seed).rows(oracle.resolve(schema), 20)
    with avro_schemas.files(avro_schemas.container(schema, rows, seed, codec)) as (source,):
        out = f"{source}.out"
        convert = ["convert", source, out, "--to", "avro", "--codec", "deflate"]
        assert cli.main([*convert, "--block-bytes", "50"]) == 0
        assert fastpipe.avro.AvroFile(out).schema_json == fastpipe.avro.AvroFile(source).schema_json
        first, second = ([data for _, data in oracle.split(Path(path).read_bytes())[1]] for path in (source, out))
        assert b"".join(first) == b"".join(second)
        assert all(len(block) >= 50 for block in second[:-1])
        assert cli.main([*convert, "--force", "--shuffle", "--seed", str(seed)]) == 0
        shuffled = sorted(oracle.load(out)[1], key=lambda row: row["id"])
        assert repr(oracle.load(source)[1]) == repr(shuffled)


@pytest.mark.parametrize(
    ("schema", "rows"),
    [
        pytest.param(["null", "long", "string"], [None, 5, "x"], id="union"),
        pytest.param("null", [None] * 300, id="null"),
        pytest.param({"type": "map", "values": ["int", "string"]}, [{"a": 1, "b": "c"}, {}], id="map"),
        pytest.param({"type": "record", "name": "Empty", "fields": []}, [{}] * 5, id="empty records"),
        pytest.param(
            {
                "type": "record",
                "name": "Node",
                "aliases": ["Leaf"],
                "fields": [
                    {"name": "value", "type": "int", "default": 3, "doc": "A number."},
                    {"name": "next", "type": ["null", "Node"]},
                ],
            },
            [{"value": 1, "next": {"value": 2, "next": None}}, {"value": 3, "next": None}],
            id="recursive",
        ),
    ],
)
def test_roots_of_any_type_are_copied(tmp_path: Path, schema: Any, rows: list[Any]) -> None:
    source, out = str(tmp_path / "in.avro"), str(tmp_path / "out.avro")
    with open(source, "wb") as file:
        fastavro.writer(file, schema, rows, metadata={"writer": "me"})
    assert cli.main(["convert", source, out]) == 0
    assert records(out) == rows
    assert fastpipe.avro.AvroFile(out).schema == fastpipe.avro.AvroFile(source).schema
    assert fastpipe.avro.AvroFile(out).metadata["writer"] == b"me"


def test_damage_is_found(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(oracle.container("string", ["abc"] * 9, random.Random(1)))
    at = data.index(b"\x06abc")
    data[at] = 0x7E  # Declares a text of 63 bytes.
    (tmp_path / "bad.avro").write_bytes(data)
    assert cli.main(["convert", str(tmp_path / "bad.avro"), str(tmp_path / "out.avro")]) == 1
    assert "bad.avro" in capsys.readouterr().err
    assert not (tmp_path / "out.avro").exists()


def test_unsupported_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "a", "type": "long"}, {"name": "r", "type": ["null", "R"]}],
    }
    source, out = str(tmp_path / "in.avro"), str(tmp_path / "out.parquet")
    with open(source, "wb") as file:
        fastavro.writer(file, schema, [{"a": 1, "r": {"a": 2, "r": None}}])
    assert cli.main(["convert", source, out]) == 1
    assert "'r" in capsys.readouterr().err
    assert cli.main(["convert", source, out, "--columns", "a"]) == 0
    assert pq.read_table(out).to_pylist() == [{"a": 1}]


@pytest.mark.parametrize(
    "options",
    [
        ["--codec", "brotli"],
        ["--columns", "at,at"],
        ["--seed", "1"],
        ["--to", "parquet", "--block-bytes", "9"],
        ["--to", "parquet", "--codec", "xz"],
    ],
)
def test_conflicting_options(source: str, tmp_path: Path, options: list[str]) -> None:
    assert cli.main(["convert", source, str(tmp_path / "out.avro"), *options]) == 2
    assert not (tmp_path / "out.avro").exists()
