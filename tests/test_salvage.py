"""`fastpipe check` and `fastpipe salvage`: all damage is found, and all intact blocks are copied."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

import fastpipe
import wire
from fastpipe._formats import AVRO
from fastpipe.avro._salvage import salvage
from fastpipe.cli import main
from fastpipe.cli._check import checked
from test_damage import SCHEMA, Block, Files, encoded, write


@pytest.fixture
def some(tmp_path: Path) -> Files:
    return write(tmp_path, [Block(5), Block(7, None), Block(6, frozenset({0, 4})), Block(8)], "deflate")


def ids(path: Path) -> list[int]:
    with path.open("rb") as file:
        return [record["id"] for record in fastavro.reader(file)]


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    code = main(list(map(str, arguments)))
    return code, capsys.readouterr().out


def test_check_lists_all_damage(some: Files, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "check", some.clean, some.damaged)
    assert code == 1
    assert f"{some.clean}: ok, 26 records can be read\n" in text
    assert f"{some.damaged}: DAMAGED, 17 records can be read\n" in text
    assert "block 1, bytes" in text
    assert "2 files, 1 damaged" in text
    code, text = run(capsys, "check", "--json", some.damaged)
    (file,) = json.loads(text)["files"]
    assert (code, file["ok"], file["rows"]) == (1, False, 17)
    found = [(loss["block"], loss["start"], loss["end"], loss["rows"]) for loss in file["losses"]]
    assert found == some.blocks
    assert run(capsys, "check", some.clean)[0] == 0


def test_check_reads_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"x": np.arange(1000)})
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, compression="zstd")
    assert run(capsys, "check", path) == (0, f"{path}: ok, 1,000 rows can be read\n")
    data = bytearray(path.read_bytes())
    data[20:200] = bytes(180)
    path.write_bytes(data)
    code, text = run(capsys, "check", path)
    assert (code, "DAMAGED" in text) == (1, True)
    csv = tmp_path / "x.csv"
    csv.write_text("a,b\n1,2\n3\n")
    assert run(capsys, "check", csv)[0] == 1


def test_salvage_copies_the_intact_blocks(some: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.avro"
    code, text = run(capsys, "salvage", some.damaged, new)
    assert (code, ids(new)) == (0, [*range(5), *range(18, 26)])
    assert f"{new}: 2 blocks with 13 records\n" in text
    assert text.count("lost: bytes") == 2
    assert fastpipe.avro.AvroFile(new).metadata == fastpipe.avro.AvroFile(some.damaged).metadata
    # Nothing is lost from a clean file, whose copy is equal.
    assert run(capsys, "salvage", some.clean, new)[0] == 0
    assert new.read_bytes() == some.clean.read_bytes()


def test_salvage_refuses_what_it_cannot_read(some: Files, tmp_path: Path) -> None:
    link = tmp_path / "link.avro"
    link.symlink_to(some.clean)
    before = some.clean.read_bytes()
    for source, target in [(some.clean, some.clean), (some.clean, link), (link, some.clean)]:
        with pytest.raises(fastpipe.errors.StorageError, match="salvage writes a new file: pass another path"):
            salvage(source, target)
    assert some.clean.read_bytes() == before
    for target in (tmp_path / "new.avro", some.clean):
        with pytest.raises(fastpipe.errors.MissingFileError):
            salvage(tmp_path / "none.avro", target)
    with pytest.raises(fastpipe.errors.MissingFileError):
        salvage(some.clean, tmp_path / "none" / "new.avro")
    for directory in ((some.clean, tmp_path), (tmp_path, tmp_path / "new.avro")):
        with pytest.raises(fastpipe.errors.StorageError):
            salvage(*directory)
    header = some.clean.read_bytes()[:20]
    (tmp_path / "cut.avro").write_bytes(header)
    with pytest.raises(fastpipe.FastpipeError):
        salvage(tmp_path / "cut.avro", tmp_path / "new.avro")
    assert not (tmp_path / "new.avro").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no sizes of files")
def test_salvage_reports_a_failed_write(some: Files, tmp_path: Path) -> None:
    """A file that exceeds the limit of its size fails like a file on a full disk."""
    import resource

    new, before = tmp_path / "new.avro", resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(fastpipe.errors.StorageError) as error:
            salvage(some.damaged, new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (error.value.path, error.value.errno) == (str(new), errno.EFBIG)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_pipes_are_refused(some: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No pipe has a writer, so opening one for reading would wait forever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for arguments in (["check", pipe], ["salvage", pipe, tmp_path / "new.avro"]):
        assert main(list(map(str, arguments))) == 1
        outputs = "".join(capsys.readouterr())
        assert f"expected a file, found a pipe or device (file {pipe})" in outputs
    with pytest.raises(fastpipe.errors.StorageError, match="isn't a regular file"):
        salvage(some.clean, pipe)


@pytest.mark.parametrize("kind", [fastpipe.errors.OutOfMemoryError, MemoryError])
def test_lack_of_memory_is_not_damage(
    kind: type[MemoryError], some: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*arguments: Any) -> None:
        raise kind("no more memory")

    with pytest.raises(kind, match="no more memory"):
        checked(str(some.clean), AVRO, exhausted)
    monkeypatch.setattr("fastpipe.cli._check.salvage", exhausted)
    assert main(["salvage", str(some.clean), "new.avro"]) == 1
    assert capsys.readouterr() == ("", "fastpipe: no more memory\n")


@pytest.mark.parametrize("seed", range(40))
def test_any_damage_costs_only_the_blocks_that_it_hits(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    codec = draw.choice(wire.CODECS)
    head, blocks, first = wire.header(SCHEMA, codec), [], 0
    for count in [draw.randrange(1, 9) for _ in range(draw.randrange(1, 9))]:
        records = b"".join(map(encoded, range(first, first + count)))
        blocks.append((range(first, first + count), wire.block(count, records, codec)))
        first += count
    whole = bytearray(head + b"".join(data for _, data in blocks))
    ends = np.cumsum([len(head), *(len(data) for _, data in blocks)]).tolist()
    hit: set[int] = set()
    for _ in range(draw.randrange(3)):
        at = draw.randrange(len(head), len(whole))
        whole[at] ^= 1 << draw.randrange(8)
        hit.add(int(np.searchsorted(ends, at, side="right")) - 1)
    if draw.random() < 0.3:
        cut = draw.randrange(len(head), len(whole))
        del whole[cut:]
        hit |= {number for number in range(len(blocks)) if ends[number + 1] > cut}
    path, new = tmp_path / "x.avro", tmp_path / "new.avro"
    path.write_bytes(whole)
    kept = salvage(path, new)
    found = ids(new)
    # A flip within uncompressed values may not be noticed. A damaged header may take the block after it along.
    intact = [row for number, (rows, _) in enumerate(blocks) if not {number, number - 1} & hit for row in rows]
    assert set(intact) <= set(found)
    assert kept.rows == len(found)
    assert hit or (not kept.lost and new.read_bytes() == bytes(whole))
