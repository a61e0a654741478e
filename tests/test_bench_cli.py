"""`fastpipe bench`. Its results depend on the machine, so no test checks a speed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet
import pytest

import fixtures
import samples
import wire
from fastpipe import cli
from fastpipe.cli import _bench
from fixtures import Run

QUICK = ("--seconds", "0.03")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = samples.write(tmp_path_factory.mktemp("bench"), [samples.blocks_of(400)], "deflate", 100)
    return Path(data.paths[0])


run = fixtures.command(120)


def test_a_table(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastpipe", "bench", str(file), *QUICK, "--batch-size", "16,64", "--threads", "1,auto"],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"1 file, 400 records, 8 features; \d+ processors?; at least 0 s", lines[0])
    assert lines[2].split() == ["shuffle", "threads", "batch_size", "records/s", "±", "MB/s", "ms/batch"]
    table = lines[4:]
    assert len(table) == 8
    assert [(line.split()[0], line.split()[1]) for line in table[::2]] == [
        (shuffle, count) for shuffle in ("off", "window") for count in ("1", "auto")
    ]
    assert [line.split()[0] for line in table if line.endswith("  fastest")] == ["off", "window"]


def test_numbers_as_json(file: Path, run: Run) -> None:
    options = ("--columns", "id, words", "--shuffle", "off,window,block,buffer", "--shuffle-buffer", 50)
    code, out, err = run("bench", file, *QUICK, *options, "--threads", "2,auto", "--batch-size", "32", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"files", "rows", "features", "processors", "cells"}
    assert (found["rows"], found["files"], found["features"]) == (400, [str(file)], ["id", "words"])
    assert [(cell["shuffle"], cell["num_threads"], cell["batch_size"]) for cell in found["cells"]] == [
        (shuffle, threads, 32) for shuffle in ("off", "window", "block", "buffer") for threads in (2, "auto")
    ]
    for cell in found["cells"]:
        assert all(cell[name] > 0 for name in ("megabytes_per_second", "milliseconds_per_batch", "threads"))
        assert len(cell["rounds"]) == _bench._ROUNDS
        assert cell["records_per_second"] == sorted(cell["rounds"])[1]
        assert cell["spread"] >= 0
        assert cell["refused"] is None


class Pass:
    """Imitates a reader of batches of 10 rows, with a clock that each batch advances."""

    def __init__(self, shuffle_buffer: int | None, clock: list[float]) -> None:
        self.shuffle_buffer, self.num_rows, self._clock = shuffle_buffer, 1000, clock
        self.drawn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        while True:
            # The first batch of a window opens its blocks.
            self._clock[0] += 50 if self.drawn * 10 % (self.shuffle_buffer or 10) == 0 else 1
            self.drawn += 1
            yield {"x": [0] * 10}

    def stats(self) -> dict[str, Any]:
        return {"bytes_delivered": 80, "rows": 10, "threads": {"chosen": 1}}


@pytest.mark.parametrize(
    ("shuffle", "buffer", "seconds_per_window"), [("off", None, 50), ("window", 200, 69), ("window", 400, 89)]
)
def test_whole_windows_are_counted(
    shuffle: str, buffer: int | None, seconds_per_window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(_bench.time, "perf_counter", lambda: clock[0])
    cell = _bench.Cell(shuffle, 1, 10)
    cell.visit(lambda *_: Pass(buffer, clock), 20)
    # Otherwise the measurement would end within the first window, whose blocks the warm-up opens, at 10 rows a second.
    assert cell.records_per_second == pytest.approx((buffer or 10) / seconds_per_window)
    assert cell.milliseconds_per_batch == pytest.approx(1e4 / cell.records_per_second)
    assert cell.megabytes_per_second == pytest.approx(cell.records_per_second * 8 / 1e6)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".arrow"])
def test_other_formats(suffix: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
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
        code, out, _ = run("bench", path, *QUICK, "--threads", "1", "--batch-size", "32", "--json", *columns)
        found = json.loads(out)
        assert (code, found["rows"], len(found["cells"])) == (0, 300, 2)
        assert found["features"] == (["id"] if columns else ["id", "text"])


def test_several_files(run: Run, tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[30], [30]])
    code, out, _ = run("bench", *data.paths, *QUICK, "--threads", "1", "--batch-size", "8")
    assert code == 0
    assert out.startswith("2 files, 60 records, ")


def test_unsupported_columns_are_skipped(run: Run, tmp_path: Path) -> None:
    more = ["null", "R"]
    schema = wire.record("R", a="long", more=more, either=["int", "string"], day={"type": "int", "logicalType": "date"})
    rows = b"".join(wire.long(i) + wire.long(0) + wire.long(0) + wire.long(i) + wire.long(i) for i in range(40))
    path = tmp_path / "x.avro"
    path.write_bytes(wire.container(schema, [(40, rows)]))
    code, out, err = run("bench", path, *QUICK, "--threads", "1", "--batch-size", "8", "--shuffle", "off", "--json")
    assert code == 0
    assert re.match(r"more: left out: ", err)
    assert json.loads(out)["features"] == ["a", "either", "either:int", "either:string", "day"]


@pytest.mark.parametrize(("rows", "sizes"), [(10, [64]), (400, [64, 128, 256])])
def test_default_grid(rows: int, sizes: list[int], run: Run, tmp_path: Path) -> None:
    path = samples.write(tmp_path, [samples.blocks_of(rows)]).paths[0]
    code, out, _ = run("bench", path, "--seconds", "0.003", "--json")
    assert code == 0
    found = json.loads(out)
    processors = found["processors"]
    powers = [2**n for n in range(10) if 2**n < processors]
    assert [(cell["shuffle"], cell["num_threads"], cell["batch_size"]) for cell in found["cells"]] == [
        (shuffle, threads, size)
        for shuffle in ("off", "window")
        for threads in (*powers, processors, "auto")
        for size in sizes
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--batch-size", "0"), "argument --batch-size: must be an integer of at least 1; got '0'"),
        (("--batch-size", "64,"), "must be an integer of at least 1; got ''"),
        (("--threads", "many"), "argument --threads: must be an integer of at least 1; got 'many'"),
        (("--shuffle", "well"), "argument --shuffle: 'well' must be one of off, window, block, buffer"),
        (("--seconds", "soon"), "argument --seconds: invalid float value: 'soon'"),
        (("--shuffle-buffer", "-1"), "must be an integer of at least 1; got '-1'"),
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
        (("--shuffle", "off", "--shuffle-buffer", "9"), "--shuffle-buffer requires a --shuffle"),
        (("--seconds", "0"), "--seconds must be a positive number; got 0.0"),
        (("--seconds", "nan"), "--seconds must be a positive number; got nan"),
        (("--memory-limit", "lots"), 'memory_limit must be a number of bytes or a size such as "512MB"'),
        (("--threads", "4097"), "num_threads must be between 1 and 4096; got 4097"),
        (("--batch-size", "2147483648"), "batch_size must be between 1 and 2147483647"),
        (("--shuffle-buffer", "2147483649"), "shuffle_buffer must be between 1 and 2147483648"),
    ],
)
def test_arguments_out_of_range(options: tuple[str, ...], reason: str, run: Run, tmp_path: Path) -> None:
    code, out, err = run("bench", tmp_path / "never-opened.avro", *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"fastpipe: {reason}")


@pytest.mark.parametrize("name", ["missing.avro", "nothing*.avro", "."])
def test_missing_files(name: str, run: Run, tmp_path: Path) -> None:
    code, out, err = run("bench", tmp_path / name)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"fastpipe: .+\n", err)


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
    assert run("bench", path) == (1, "", "fastpipe: the files have no records\n")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of 8 MB of rows of 20 kB, with 4 rows per block."""
    return Path(samples.write(tmp_path_factory.mktemp("large"), [[4] * 100], rest=20_000).paths[0])


def test_cells_beyond_the_memory_limit_are_refused(large: Path, run: Run) -> None:
    options = (*QUICK, "--threads", "1", "--batch-size", "8", "--memory-limit", "1MB")
    code, out, _ = run("bench", large, *options)
    assert code == 0
    assert re.search(r"^window +1 +8( +-){4}$", out, re.MULTILINE)
    assert re.search(r"^-: memory_limit is 1\.0 MB, and this takes at least ", out, re.MULTILINE)
    off, window = json.loads(run("bench", large, *options, "--json")[1])["cells"]
    assert off["refused"] is None
    assert "at least" in window["refused"]
    assert (window["records_per_second"], window["rounds"]) == (None, [])

    code, _, err = run("bench", large, *options, "--shuffle", "window")
    assert code == 1
    assert re.fullmatch(r"fastpipe: memory_limit is 1\.0 MB, and this takes at least .+\n", err)


def test_inspect_accepts_shuffle_without_a_kind(file: Path, run: Run) -> None:
    assert run("inspect", "--shuffle", file)[0] == 0
