"""`fastpipe bench`. What it finds depends on the machine, so no test looks at how fast anything was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

import fastpipe
import samples
import wire
from fastpipe import _bench, _bench_cli, cli

Run = Callable[..., tuple[int, str, str]]
QUICK = ("--seconds", "0.03")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = samples.write(tmp_path_factory.mktemp("bench"), [samples.blocks_of(400)], "deflate", 100)
    return Path(data.paths[0])


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def is_picture(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_run(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, numbers = tmp_path / "x.png", tmp_path / "x.json"
    options = ["--batch-size", "16,64", "--threads", "1,auto", "--out", str(picture), "--json", str(numbers)]
    done = subprocess.run(
        [sys.executable, "-m", "fastpipe", "bench", str(file), *QUICK, *options],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("00.avro: 400 records; 8 features, ")
    assert "8 cells, at least 0 s" in lines[0]
    assert " ".join(lines[2].split()) == "shuffle threads batch records/s ± MB/s ms/batch CPU s/M memory"
    table = lines[4:12]
    assert [(line.split()[0], line.split()[1]) for line in table[::2]] == [
        (shuffle, count) for shuffle in ("off", "window") for count in ("1", "auto")
    ]
    assert sum(line.endswith("  best") for line in table) == 1
    assert sum("  best of " in line for line in table) == 1
    assert re.search(r"^The best: shuffle=\w+, num_threads=.+, batch_size=\d+\.", done.stdout, re.MULTILINE)
    assert re.search(r"^  \w+-bound on ", done.stdout, re.MULTILINE)

    found = json.loads(numbers.read_text())
    assert set(found) == {
        *("files", "rows", "features", "processors", "seconds", "memory_limit", "shuffle_buffer"),
        *("cells", "best", "explain", "code"),
    }
    assert (found["rows"], found["files"], found["features"]) == (400, [str(file)], ["rest", *samples.FEATURES])
    assert len(found["cells"]) == 8
    for cell in found["cells"]:
        positive = ("records_per_second", "megabytes_per_second", "milliseconds_per_batch", "threads", "batch_size")
        assert all(cell[name] > 0 for name in positive)
        assert cell["cpu_seconds_per_million"] >= 0
        assert cell["spread"] >= 0
        assert (cell["peak_memory"] is None) == (not sys.platform.startswith("linux"))
        assert cell["refused"] is None
        assert len(cell["rounds"]) == _bench.ROUNDS
        for counted in cell["rounds"]:
            assert counted["rows"] > 0
            assert counted["batches"] > 0
            assert counted["seconds"] > 0
    assert 0 <= found["best"] < 8
    assert found["explain"]
    assert is_picture(picture)
    assert all(code in done.stdout for code in found["code"].values())


def test_the_code_to_paste_runs(file: Path, run: Run, tmp_path: Path) -> None:
    numbers = tmp_path / "x.json"
    code, out, _ = run(
        *("bench", file, *QUICK, "--columns", "id, words", "--shuffle", "off,window,block,buffer"),
        *("--shuffle-buffer", 50, "--threads", "2", "--batch-size", "32", "--memory-limit", "100MB"),
        *("--json", numbers, "--out", tmp_path / "x.png"),
    )
    assert code == 0
    codes = json.loads(numbers.read_text())["code"]
    assert list(codes) == ["off", "window", "block", "buffer"]
    for shuffle, text in codes.items():
        assert text in out
        with eval(text, {"fastpipe": fastpipe}) as reader:
            assert list(reader.features) == ["id", "words"]
            assert (reader.batch_size, reader.shuffle_buffer is None) == (32, shuffle == "off")
            assert sorted(samples.ids_of(reader)) == list(range(400))
    assert "memory_limit=100_000_000" in codes["off"]
    assert "shuffle=True,\n    shuffle_buffer=50," in codes["window"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".arrow"])
def test_other_formats(suffix: str, run: Run, tmp_path: Path) -> None:
    path, numbers = tmp_path / f"x{suffix}", tmp_path / "x.json"
    table = pa.table({"id": pa.array(range(300), pa.int64()), "text": ["t"] * 300})
    match suffix:
        case ".parquet":
            pa.parquet.write_table(table, path, row_group_size=100)
        case ".arrow":
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=100)
        case _:
            tab = "\t" if suffix == ".tsv" else ","
            path.write_text(f"id{tab}text\n" + "".join(f"{i}{tab}t\n" for i in range(300)))
    for columns in ([], ["--columns", "id"]):
        code, out, _ = run(
            *("bench", path, *QUICK, "--threads", "1", "--batch-size", "32", "--json", numbers),
            *("--out", tmp_path / "x.png", *columns),
        )
        assert code == 0
        assert f"x{suffix}: 300 rows; {1 if columns else 2} feature" in out
        for text in json.loads(numbers.read_text())["code"].values():
            with eval(text, {"fastpipe": fastpipe}) as reader:
                assert list(reader.features) == ["id"] if columns else ["id", "text"]
                assert sorted(samples.ids_of(reader)) == list(range(300))


def test_the_picture_lies_beside_the_first_file(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = samples.write(tmp_path, [[30], [30]])
    code, out, _ = run("bench", *data.paths, *QUICK, "--threads", "1", "--batch-size", "8")
    assert code == 0
    assert out.startswith("2 files: 60 records; ")
    picture = Path(data.paths[0]).with_name("00-bench.png")
    assert f"\nPicture: {picture}\n" in out
    assert is_picture(picture)


def test_without_matplotlib_there_are_numbers_all_the_same(
    file: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = (*QUICK, "--threads", "1", "--batch-size", "64", "--shuffle", "off")
    code, out, err = run("bench", file, *options)
    reason = "a picture needs matplotlib: pip install 'fastpipe-data[bench]'"
    assert (code, err) == (0, f"no picture: {reason}\n")
    assert "fastpipe.read_avro(" in out
    # Who asked for one learns before anything is measured.
    assert run("bench", file, *options, "--out", tmp_path / "x.png") == (1, "", f"fastpipe: {reason}\n")
    assert not (tmp_path / "x.png").exists()


def test_without_tqdm_there_is_no_bar(file: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    options = ("--threads", "1", "--batch-size", "64", "--shuffle", "off", "--out", tmp_path / "x.png")
    code, _, err = run("bench", file, *QUICK, *options)
    assert (code, err) == (0, "")


def test_what_is_not_inferred_is_left_out(run: Run, tmp_path: Path) -> None:
    more = ["null", "R"]
    schema = wire.record("R", a="long", more=more, either=["int", "string"], day={"type": "int", "logicalType": "date"})
    rows = b"".join(wire.long(i) + wire.long(0) + wire.long(0) + wire.long(i) + wire.long(i) for i in range(40))
    path = tmp_path / "x.avro"
    path.write_bytes(wire.container(schema, [(40, rows)]))
    options = ("--threads", "1", "--batch-size", "8", "--shuffle", "off", "--out", tmp_path / "x.png")
    code, out, err = run("bench", path, *QUICK, *options)
    assert code == 0
    assert re.match(r"more: left out: ", err)
    text = re.search(r"^fastpipe\.read_avro\(.*?^\)", out, re.MULTILINE | re.DOTALL)
    assert text is not None
    with eval(text[0], {"fastpipe": fastpipe}) as reader:
        assert list(reader.features) == ["a", "either", "either:int", "either:string", "day"]
        assert next(iter(reader))["day"].view("int64").tolist() == list(range(8))


def test_default_grid(file: Path) -> None:
    arguments = cli._parser().parse_args(["bench", str(file)])
    assert (arguments.shuffle, arguments.seconds) == (("off", "window"), 1.0)
    cells = _bench.grid((64, 128), (1, "auto"), ("off", "window"))
    assert len(set(cells)) == 8
    bench = object.__new__(_bench_cli._Bench)
    bench._arguments, bench.rows = arguments, 400
    for processors, threads in ((1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))):
        bench._processors = processors
        assert bench._threads() == (*threads, "auto")
    for rows, most in ((10, 64), (400, 256), (10**6, 8192)):
        bench.rows = rows
        sizes = bench._batch_sizes()
        assert (sizes[0], sizes[-1]) == (64, most)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--batch-size", "0"), "'0' isn't a number of at least 1; say 1024 or 64,1024"),
        (("--batch-size", "64,"), "'' isn't a number"),
        (("--threads", "many"), "'many' isn't a number of at least 1; say auto or 1,2,auto"),
        (("--shuffle", "well"), "'well' is none of off, window, block, buffer; say window or off,window"),
        (("--columns", "a,,b"), "there is an empty name in 'a,,b'"),
        (("--seconds", "0"), "'0' isn't a number of seconds above 0"),
        (("--seconds", "nan"), "'nan' isn't a number of seconds above 0"),
        (("--memory-limit", "lots"), 'such as "512MB" or "1.5GiB", not \'lots\''),
        (("--shuffle-buffer", "-1"), "'-1' isn't a number of at least 1"),
    ],
)
def test_bad_arguments(options: tuple[str, str], reason: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", str(file), *options])
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--shuffle", "off", "--shuffle-buffer", "9"), "fastpipe bench: --shuffle-buffer goes with a --shuffle"),
        (("--threads", "4097"), "fastpipe: num_threads is between 1 and 4096, not 4097"),
        (("--batch-size", "2147483648"), "fastpipe: batch_size is between 1 and 2147483647"),
    ],
)
def test_arguments_out_of_range(options: tuple[str, ...], reason: str, file: Path, run: Run) -> None:
    code, out, err = run("bench", file, *options)
    assert (code, out) == (2, "")
    assert err.startswith(reason)


@pytest.mark.parametrize("name", ["missing.avro", "nothing*.avro", "."])
def test_missing_files(name: str, run: Run, tmp_path: Path) -> None:
    code, out, err = run("bench", tmp_path / name)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"fastpipe: .+\n", err)


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_what_can_not_be_written_is_known_before(option: str, file: Path, run: Run, tmp_path: Path) -> None:
    code, out, err = run("bench", file, option, tmp_path / "missing" / "x.png")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"fastpipe: .*No such file or directory.*\n", err)


def test_unknown_columns_and_damage(file: Path, run: Run, tmp_path: Path) -> None:
    code, _, err = run("bench", file, "--columns", "nobody")
    assert code == 1
    assert "nobody" in err
    broken = tmp_path / "broken.avro"
    broken.write_bytes(file.read_bytes()[:-40])
    code, out, err = run("bench", broken)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"fastpipe: .+\n", err)


def test_no_records(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.avro"
    path.write_bytes(wire.container(wire.record("R", a="long"), []))
    assert run("bench", path) == (1, "", "fastpipe: there are no records to read\n")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 MB of rows of 20 kB, 4 in a block."""
    return Path(samples.write(tmp_path_factory.mktemp("large"), [[4] * 100], rest=20_000).paths[0])


def test_cells_that_take_too_much_memory_are_refused(large: Path, run: Run, tmp_path: Path) -> None:
    numbers = tmp_path / "x.json"
    options = (*QUICK, "--threads", "1", "--batch-size", "8", "--memory-limit", "1MB")
    code, out, _ = run("bench", large, *options, "--json", numbers, "--out", tmp_path / "x.png")
    assert code == 0
    assert re.search(r"^window +1 +8( +-){6}$", out, re.MULTILINE)
    assert re.search(r"^-: memory_limit is 1\.0 MB, and this takes at least ", out, re.MULTILINE)
    cells: list[dict[str, Any]] = json.loads(numbers.read_text())["cells"]
    refused = {cell["shuffle"]: cell["refused"] for cell in cells}
    assert refused["off"] is None
    assert "at least" in refused["window"]
    assert cells[1]["records_per_second"] is None

    code, _, err = run("bench", large, *options, "--shuffle", "window")
    assert code == 1
    assert re.fullmatch(r"fastpipe: memory_limit is 1\.0 MB, and this takes at least .+\n", err)


def test_inspect_still_takes_shuffle_without_a_kind(file: Path, run: Run) -> None:
    assert run("inspect", "--shuffle", file)[0] == 0
