from __future__ import annotations

import datetime
import decimal
import gc
import gzip
import json
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import fastpipe
import fixtures
import tfrecords
from fastpipe import cli
from fastpipe._text import size_text, table
from fastpipe.avro._schemas import schema_fields
from fastpipe.cli import _inspect
from fastpipe.cli._inspect import batch_rows
from fixtures import Run
from processes import together

USER = {
    "type": "record",
    "name": "User",
    "namespace": "com.example",
    "fields": [
        {"name": "id", "type": "long", "doc": "the key"},
        {"name": "name", "type": "string"},
        {
            "name": "home",
            "type": [
                "null",
                {"type": "record", "name": "Home", "fields": [{"name": "city", "type": ["null", "string"]}]},
            ],
        },
        {"name": "suit", "type": {"type": "enum", "name": "Suit", "symbols": ["HEARTS", "SPADES"]}},
        {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}},
        {"name": "pixels", "type": {"type": "array", "items": "float"}},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
        {
            "name": "words",
            "type": {
                "type": "record",
                "name": "Words",
                "fields": [
                    {"name": "indices0", "type": {"type": "array", "items": "long"}},
                    {"name": "values", "type": {"type": "array", "items": "float"}},
                ],
            },
        },
        {"name": "score", "type": ["null", "double"]},
    ],
}
AWKWARD = {
    "type": "record",
    "name": "Awkward",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}]},
        {
            "name": "part",
            "type": {
                "type": "record",
                "name": "Part",
                "fields": [{"name": "size", "type": "int"}, {"name": "either", "type": ["int", "string"]}],
            },
        },
        {
            "name": "prices",
            "type": {
                "type": "array",
                "items": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
            },
        },
        {"name": "days", "type": {"type": "map", "values": ["null", {"type": "int", "logicalType": "date"}]}},
        {
            "name": "tree",
            "type": {
                "type": "record",
                "name": "Tree",
                "fields": [{"name": "size", "type": "int"}, {"name": "left", "type": ["null", "Tree"]}],
            },
        },
    ],
}


def user(i: int) -> dict[str, Any]:
    return {
        "id": i,
        "name": f"näme {i}",
        "home": None if i % 5 == 0 else {"city": None if i % 3 == 0 else "Roma"},
        "suit": ("HEARTS", "SPADES")[i % 2],
        "tags": [None if j == 1 else f"t{j}" for j in range(i % 4)],
        "pixels": [float(i % 2 + j) for j in range(64)],
        "counts": {f"k{j}": j for j in range(i % 3)},
        "words": {"indices0": list(range(i % 3)), "values": [0.5] * (i % 3)},
        "score": None if i % 7 == 0 else i % 2 + i / 1000,
    }


def awkward(i: int) -> dict[str, Any]:
    part = {"size": i, "either": "x"}
    row = {"id": i, "at": 1_700_000_000_000 + i, "part": part, "tree": {"size": i, "left": None}}
    days = {str(k): datetime.date(1970, 1, k + 1) if k else None for k in range(i % 3)}
    return row | {"prices": [decimal.Decimal("1.25")] * (i % 4), "days": days}


def write(path: Path, schema: Any, records: list[Any], codec: str = "deflate", **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), records, codec=codec, sync_interval=4000, **options)
    return path


@pytest.fixture
def users(tmp_path: Path) -> Path:
    return write(tmp_path / "users.avro", USER, [user(i) for i in range(200)], metadata={"made.by": "a test"})


@pytest.fixture
def broken(users: Path, tmp_path: Path) -> Path:
    path = tmp_path / "broken.avro"
    data = users.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    return path


run = fixtures.command(100)


# --- The program ---


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastpipe", "--version"], capture_output=True, text=True, check=True, timeout=500
    )
    assert done.stdout == f"fastpipe {fastpipe.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["head"], ["head", "x.avro", "-n", "0"], ["inspect"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: fastpipe" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "head"])
@pytest.mark.parametrize("name", ["missing.avro", "nothing*.avro", "."])
def test_missing_files_are_one_line_on_stderr(command: str, name: str, run: Run, tmp_path: Path) -> None:
    code, out, err = run(command, tmp_path / name)
    assert code == 1
    assert re.fullmatch(r"fastpipe: .+\n", err)
    assert "Traceback" not in out


@pytest.mark.parametrize("command", ["inspect", "head"])
def test_files_of_another_kind_are_one_line_on_stderr(command: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.avro"
    path.write_bytes(b"PAR1 and no more")
    code, _, err = run(command, path)
    assert code == 1
    assert re.fullmatch(r"fastpipe: .*x\.avro.*\n", err)


def test_a_closed_pipe_ends_it_quietly(users: Path) -> None:
    # The test reads none of the output and closes the pipe first.
    with subprocess.Popen(
        [sys.executable, "-m", "fastpipe", "head", str(users), "-n", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_ctrl_c_ends_it_with_130(monkeypatch: pytest.MonkeyPatch, run: Run, users: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_inspect, "summarize", interrupt)
    assert run("inspect", users) == (130, "", "\n")


# --- inspect ---


def test_inspect_shows_schema_and_figures(run: Run, users: Path) -> None:
    code, out, err = run("inspect", users)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["codec", "deflate"] in lines
    assert ["records", "200"] in lines
    assert ["made.by", "a", "test"] in lines
    assert ["id", "long", "no", "the", "key"] in lines
    assert ["home", "record", "Home", "yes"] in lines
    assert ["home.city", "string", "yes"] in lines
    assert ["suit", "enum", "Suit", "(2", "symbols)", "no"] in lines
    assert ["tags", "array<string?>", "no"] in lines
    assert re.search(r"compression +[\d.]+ : 1", out)


def test_inspect_shows_features_that_can_be_pasted(run: Run, users: Path) -> None:
    _, out, _ = run("inspect", users)
    features = eval(out.partition("Features\n")[2], {"fastpipe": fastpipe})
    assert features == fastpipe.infer_features(users)
    assert features["pixels"] == fastpipe.DenseSpec((64,), "float32")
    with fastpipe.read_avro(users, features=features, batch_size=200) as reader:
        assert next(iter(reader))["id"].tolist() == list(range(200))


def test_inspect_as_json(run: Run, users: Path) -> None:
    code, out, _ = run("inspect", users, "--json")
    assert code == 0
    found = json.loads(out)
    (file,) = found["files"]
    assert file["schema"] == fastpipe.avro.AvroFile(users).schema
    assert (file["records"], file["codec"], file["size"]) == (200, "deflate", users.stat().st_size)
    assert file["bytes_per_record"] == users.stat().st_size / 200
    assert file["compression_ratio"] > 1
    assert file["error"] is None
    assert found["totals"]["files"] == 1
    assert found["features"]["pixels"] == {"kind": "dense", "shape": [64], "dtype": "float32", "on_null": "error"}
    assert eval(found["features_code"], {"fastpipe": fastpipe}) == fastpipe.infer_features(users)


def test_inspect_of_several_files_counts_together(run: Run, tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / f"{i}.avro", USER, [user(j) for j in range(100)])
    code, out, _ = run("inspect", tmp_path)
    assert code == 0
    assert "All schemas agree." in out
    assert re.search(r"^3 files .* 300 ", out, re.MULTILINE)


def test_inspect_says_how_schemas_differ(run: Run, tmp_path: Path) -> None:
    fields: list[Any] = USER["fields"]  # type: ignore[assignment]
    other = {**USER, "fields": [{"name": "id", "type": "int"}, *fields[2:], {"name": "new", "type": "boolean"}]}
    documented = {**USER, "doc": "This changes nothing."}
    write(tmp_path / "a.avro", USER, [])
    write(tmp_path / "b.avro", documented, [])
    write(tmp_path / "c.avro", other, [])
    code, out, _ = run("inspect", tmp_path)
    assert code == 0
    assert "The schemas differ. 2 files" in out
    for line in ("lacks name: string", "adds new: boolean", "has id: int instead of long"):
        assert f"    {line}\n" in out
    assert json.loads(run("inspect", tmp_path, "--json")[1])["schemas_agree"] is False
    assert json.loads(run("inspect", tmp_path / "a.avro", tmp_path / "b.avro", "--json")[1])["schemas_agree"] is True


def test_inspect_shows_the_readable_part_of_a_broken_file(run: Run, broken: Path, users: Path) -> None:
    code, out, err = run("inspect", broken)
    assert code == 1
    assert re.fullmatch(r"fastpipe: .*broken\.avro.*\n", err)
    assert "deflate" in out
    assert "array<string?>" in out
    code, out, err = run("inspect", broken, users, "--json")
    assert code == 1
    first, second = json.loads(out)["files"]
    assert first["error"]["type"] == "MalformedFileError"
    assert first["schema"] == second["schema"]
    assert second["error"] is None
    out = run("inspect", users, broken, users.with_name("missing.avro"))[1]
    assert re.search(r"^users\.avro .* ok$", out, re.MULTILINE)
    assert re.search(r"^broken\.avro .* broken$", out, re.MULTILINE)
    assert re.search(r"^missing\.avro .* missing$", out, re.MULTILINE)
    assert re.search(r"^3 files .* 2 failed$", out, re.MULTILINE)


def test_inspect_lists_unsupported_columns(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "awkward.avro", AWKWARD, [awkward(i) for i in range(20)])
    code, out, err = run("inspect", path)
    assert (code, err) == (0, "")
    assert '"id": fastpipe.DenseSpec((), "int32"),\n' in out
    assert '"at": fastpipe.DenseSpec((), "datetime64[ms]", on_null="mask"),\n' in out
    assert '"part.size": fastpipe.DenseSpec((), "int32"),\n' in out
    assert '"part.either:string": fastpipe.DenseSpec((), "string", on_null="mask"),\n' in out
    assert '"tree.size": fastpipe.DenseSpec((), "int32"),\n' in out
    assert re.search(r"left out: tree\.left: .+", out)
    assert '"prices": fastpipe.RaggedSpec((None,), "int64", scale=2),\n' in out
    assert '"days.values": fastpipe.RaggedSpec((None,), "datetime64[D]", on_null="mask"),\n' in out
    assert "columns=" not in out
    assert "record Tree (recursive)" in out
    features = eval(re.search(r"Features\n(.*?\n  \})", out, re.DOTALL)[1], {"fastpipe": fastpipe})  # type: ignore[index]
    with fastpipe.read_avro(path, features=features, batch_size=20) as reader:
        times = next(iter(reader))["at"]
    assert times.values.view("int64").tolist() == [1_700_000_000_000 + i for i in range(20)]


def test_inspect_escapes_control_characters(run: Run, tmp_path: Path) -> None:
    field = {"name": "x", "type": "int", "doc": "red \x1b[31m\r\n over"}
    schema = {"type": "record", "name": "R", "fields": [field]}
    _, out, _ = run("inspect", write(tmp_path / "x.avro", schema, [], metadata={"evil": "\x1b]0;title\x07"}))
    assert "\x1b" not in out
    assert "red \\x1b[31m over" in out


# --- head ---


def test_head_shows_a_table_if_it_fits(run: Run, tmp_path: Path) -> None:
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": n, "type": ["null", "int"]} for n in ("a", "long_name")],
    }
    path = write(tmp_path / "x.avro", schema, [{"a": i, "long_name": None if i else 1} for i in range(9)])
    code, out, err = run("head", path, "-n", "2")
    assert (code, err) == (0, "")
    assert out == "a  long_name\n-  ---------\n0  1\n1  null\n"
    assert len(run("head", path)[1].splitlines()) == 2 + 5
    assert len(run("head", path, "-n", 99)[1].splitlines()) == 2 + 9


def test_head_shows_paragraphs_if_a_table_does_not_fit(run: Run, users: Path) -> None:
    code, out, _ = run("head", users, "-n", "6")
    assert code == 0
    assert all(len(line) <= 100 for line in out.splitlines())
    records = out.split("\n\n")
    assert len(records) == 6
    lines = records[5].splitlines()
    assert lines[0] == "record 5"
    assert dict(line.split(maxsplit=1) for line in lines[1:]) == {
        "id": "5",
        "name": "'näme 5'",
        "home.city": "null",
        "suit": "SPADES",
        "tags": "['t0']",
        "pixels": "[1 2 3 ... 62 63 64]",
        "counts.keys": "['k0' 'k1']",
        "counts.values": "[0 1]",
        "words": "{0: 0.5, 1: 0.5}",
        "score": "1.005",
    }


def test_head_of_a_directory_continues_with_the_next_file(run: Run, tmp_path: Path) -> None:
    for name, values in (("a", [1, 2]), ("b", []), ("c", [3, 4])):
        write(tmp_path / f"{name}.avro", "long", values)
    assert run("head", tmp_path, "-n", "3")[1].split() == ["value", "-----", "1", "2", "3"]
    assert run("head", tmp_path / "b.avro")[1] == "no records\n"


def test_head_skips_unsupported_columns(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "awkward.avro", AWKWARD, [awkward(i) for i in range(20)])
    code, out, err = run("head", path, "-n", "1")
    assert code == 0
    first, *values = out.splitlines()
    assert first == "record 0"
    assert [value.split() for value in values] == [
        ["id", "0"],
        ["at", "2023-11-14T22:13:20.000"],
        ["part.size", "0"],
        ["part.either", "string"],
        ["part.either:int", "null"],
        ["part.either:string", "'x'"],
        ["prices", "[]"],
        ["days.keys", "[]"],
        ["days.values", "[]"],
        ["tree.size", "0"],
    ]
    assert re.match(r"tree\.left: left out: ", err)


# --- Other formats ---

# File names with their format and the format's name for a unit.
OTHERS = {
    "x.csv": ("csv", "chunks"),
    "x.tsv": ("tsv", "chunks"),
    "x.csv.gz": ("csv", "chunks"),
    "x.parquet": ("parquet", "row groups"),
    "x.pq": ("parquet", "row groups"),
    "x.feather": ("arrow", "record batches"),
    "x.tfrecord": ("tfrecord", "chunks"),
    "part-0": ("parquet", "row groups"),
    "part-1": ("arrow", "record batches"),
}


def write_other(path: Path, first: int = 0, rows: int = 30) -> Path:
    """Writes rows of a number and a text."""
    numbers = list(range(first, first + rows))
    table = pa.table({"n": pa.array(numbers, pa.int64()), "text": pa.array([f"t{n}" for n in numbers])})
    match OTHERS[path.name.removeprefix("second-")][0]:
        case "parquet":
            pa.parquet.write_table(table, path, row_group_size=10)
        case "arrow":
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=10)
        case "tfrecord":
            path.write_bytes(tfrecords.file({"n": n, "text": f"t{n}"} for n in numbers))
        case kind:
            tab = "\t" if kind == "tsv" else ","
            content = "".join(f"{n}{tab}{text}\n" for n, text in [("n", "text"), *((n, f"t{n}") for n in numbers)])
            path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


@pytest.mark.parametrize("name", OTHERS)
def test_head_shows_rows_of_each_format(name: str, run: Run, tmp_path: Path) -> None:
    write_other(tmp_path / name)
    code, out, err = run("head", tmp_path / name, "-n", "2")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()[2:]] == [["0", "'t0'"], ["1", "'t1'"]]
    if "." in name:
        write_other(tmp_path / f"second-{name}", first=30)
        assert len(run("head", tmp_path, "-n", "100")[1].splitlines()) == 62


@pytest.mark.parametrize("name", OTHERS)
def test_inspect_shows_files_of_each_format(name: str, run: Run, tmp_path: Path) -> None:
    path = write_other(tmp_path / name)
    kind, units = OTHERS[name]
    code, out, err = run("inspect", path)
    assert (code, err) == (0, "")
    assert ["rows", "30"] in [line.split() for line in out.splitlines()]
    assert re.search(rf"^  {units} +{'3' if kind in ('parquet', 'arrow') else '1'}$", out, re.MULTILINE)
    features = eval(out.partition("Features\n")[2], {"fastpipe": fastpipe})
    assert list(features) == ["n", "text"]
    found = json.loads(run("inspect", path, "--json")[1])
    assert (found["format"], found["totals"]["records"]) == (kind, 30)
    assert eval(found["features_code"], {"fastpipe": fastpipe}) == features
    assert found["schemas_agree"] is True
    write_other(tmp_path / f"second-{name}", rows=12)
    code, out, err = run("inspect", path, tmp_path / f"second-{name}")
    assert (code, err) == (0, "")
    assert re.search(rf"^file +size +{units} +rows +state$", out, re.MULTILINE)
    assert re.search(r"^2 files .* 42 +ok$", out, re.MULTILINE)


def test_broken_files_of_other_formats_are_reported(run: Run, tmp_path: Path) -> None:
    write_other(tmp_path / "x.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    code, out, err = run("inspect", tmp_path)
    assert code == 1
    assert re.fullmatch(r"fastpipe: .*broken\.parquet.*\n", err)
    assert re.search(r"^broken\.parquet .* broken$", out, re.MULTILINE)
    assert '"text"' in out


@pytest.mark.parametrize("command", ["head", "inspect", "bench"])
def test_unknown_formats(command: str, run: Run, users: Path, tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    unknown.write_text("a,b\n1,2\n")
    code, _, err = run(command, unknown)
    assert code == 1
    assert re.fullmatch(r"fastpipe: cannot detect the format of .*unknown .* ends in one of \.avro, .*\.csv, .*\n", err)
    if command != "head":
        code, _, err = run(command, users, write_other(tmp_path / "x.csv"))
        assert code == 1
        assert re.match(r"fastpipe: the files have several formats: Avro \(.*users\.avro\), CSV \(.*x\.csv\)", err)


def test_only_avro_and_tfrecord_files_are_indexed(run: Run, tmp_path: Path) -> None:
    code, _, err = run("index", write_other(tmp_path / "x.csv"))
    assert code == 1
    instead = r"x\.csv is CSV\. read_csv creates its index with index_cache="
    assert re.fullmatch(rf"fastpipe: fastpipe .* supports only Avro and TFRecord files, but .*{instead}.*\n", err)


# --- Text ---


def test_cells_of_every_form() -> None:
    strings = fastpipe.Strings(np.frombuffer(b"abcd", np.uint8), np.array([0, 1, 2, 3, 4]), (2, 2), False)
    long_text = fastpipe.Strings(np.full(20, ord("x"), np.uint8), np.array([0, 20, 20]), (2,), True)
    ints = np.arange(10)
    batch = {
        "matrix": np.arange(8.0).reshape(2, 2, 2),
        "some": fastpipe.Masked(np.arange(4).reshape(2, 2), np.array([[True, False], [True, True]])),
        "text": fastpipe.Masked(strings, np.array([[True, False], [True, True]])),
        "none": fastpipe.Masked(strings, np.array([False, True])),
        "long": long_text,
        "deep": fastpipe.Ragged(fastpipe.Ragged(ints, np.array([0, 8, 8, 10])), np.array([0, 2, 3])),
        "many": fastpipe.Ragged(fastpipe.Masked(ints, ints != 1), np.array([0, 9, 10])),
        "flag": np.array([True, False]),
        "code": np.array([1, 0], np.int32),
        "coo": fastpipe.Sparse(np.array([[0, 1], [0, 4]]), np.array([0.5, 2]), np.array([2, 5])),
        "csr": fastpipe.Masked(
            fastpipe.batch.SparseCSR(np.array([0, 1, 1]), np.array([[1, 2]]), np.array([0.5]), np.array([2, 5, 5])),
            np.array([True, False]),
        ),
    }
    first, second = batch_rows(batch, {"code": ["A", "B"]}, width=10)
    assert dict(zip(batch, first, strict=True)) == {
        "matrix": "[[0 1] [2 3]]",
        "some": "[0 null]",
        "text": "['a' null]",
        "none": "null",
        "long": "b'xxxxxxxxxx'…",
        "deep": "[[0 1 2 ... 5 6 7] []]",
        "many": "[0 null 2 ... 6 7 8]",
        "flag": "true",
        "code": "B",
        "coo": "{1: 0.5, 4: 2}",
        "csr": "{(1, 2): 0.5}",
    }
    assert second[3:6] == ["['c' 'd']", "b''", "[[8 9]]"]
    assert second[8:] == ["A", "{}", "null"]


def test_tables_shrink_their_widest_columns() -> None:
    text = table(["name", "text"], [["a", "x" * 50], ["b" * 12, "日本語" * 9]], width=30, right=(0,))
    assert text.splitlines() == [
        "        name  text",
        "------------  ----------------",
        "           a  xxxxxxxxxxxxxxx…",
        "bbbbbbbbbbbb  日本語日本語日…",
    ]
    assert table(["path"], [["data/of/a/file.avro"]], width=12, keep_end=(0,)).endswith("\n…a/file.avro")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (123_456, "123 kB"), (1.5e9, "1.5 GB"), (2e15, "2000 TB")],
)
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


def test_type_names_are_resolved_in_their_namespace() -> None:
    inner = {"type": "record", "name": "x.Inner", "fields": [{"name": "a", "type": "int"}]}
    schema = {
        "type": "record",
        "name": "n.Outer",
        "fields": [
            {"name": "one", "type": inner},
            {"name": "two", "type": {"type": "array", "items": ["null", "x.Inner"]}},
            {"name": "code", "type": {"type": "enum", "name": "Code", "symbols": ["A"]}},
            {"name": "codes", "type": {"type": "map", "values": "n.Code"}},
            {"name": "again", "type": ["null", "Code"]},
            {"name": "day", "type": {"type": {"type": "int", "logicalType": "date"}}},
            {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        ],
    }
    fields = {field.path: field.full_type for field in schema_fields(schema)}
    assert fields == {
        "one": "record Inner",
        "one.a": "int",
        "two": "array<record Inner?>",
        "two.a": "int",
        "code": "enum Code (1 symbol)",
        "codes": "map<enum Code (1 symbol)>",
        "again": "enum Code (1 symbol)?",
        "day": "int (date)",
        "amount": "bytes (decimal(9, 2))",
    }


# --- Progress ---


def test_progress_counts_the_rows_of_any_consumer(capsys: pytest.CaptureFixture[str], users: Path) -> None:
    pytest.importorskip("tqdm")
    from fastpipe._progress import show

    with fastpipe.read_avro(users, batch_size=64, columns=["id"], progress=True) as reader:
        shown = iter(reader)
        drawn: list[int] = []
        together([threading.Thread(target=lambda: drawn.extend(i for b in shown for i in b["id"])) for _ in range(3)])
    assert sorted(drawn) == list(range(200))
    assert "200/200" in capsys.readouterr().err

    def failing() -> Iterator[dict[str, Any]]:
        yield {"x": np.zeros(2)}
        raise fastpipe.errors.ShapeError("no")

    with pytest.raises(fastpipe.errors.ShapeError, match="no"):
        list(show(failing(), total=2, batch_size=2))
    assert "2.00/4.00" in capsys.readouterr().err


def test_a_dropped_bar_drops_the_pass(users: Path) -> None:
    pytest.importorskip("tqdm")
    with fastpipe.read_avro(users, batch_size=64, progress=True) as reader:
        shown = iter(reader)
        next(shown)
        alive = weakref.ref(shown)
        del shown
        gc.collect()
        assert alive() is None
        pickle.dumps(reader)  # A reader can't be pickled during a pass.


def test_progress_needs_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpipe._progress import progress_bar

    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"pip install 'fastpipe-data\[progress\]'"):
        progress_bar(3)
