"""Opening many files at once has the same outcome as opening them one by one, and Ctrl-C interrupts it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import wire
from fastpipe import _fastpipe
from fastpipe._files._in_memory_files import lowered

ONE, TWO = wire.record("R", id="long"), wire.record("R", id="long", more="long")
ID = {"id": fastpipe.DenseSpec((), "int64")}


def write(folder: Path, count: int) -> list[str]:
    """Writes files of one row. Every third file has a different schema."""
    paths = []
    for i in range(count):
        path = folder / f"{i:03}.avro"
        more = [0] if i % 3 == 2 else []
        path.write_bytes(wire.container(TWO if more else ONE, [(1, wire.longs(i, *more))]))
        paths.append(str(path))
    return paths


def test_files_keep_their_order(tmp_path: Path) -> None:
    paths = write(tmp_path, 300)
    reader = fastpipe.read_avro(paths[::-1], features=ID, batch_size=300)
    assert next(iter(reader))["id"].tolist() == list(range(300))[::-1]
    assert reader.files == paths[::-1]


@pytest.mark.parametrize("bad", [[0], [299], [7, 150, 298], list(range(100, 300))])
def test_the_first_file_that_fails_is_reported(tmp_path: Path, bad: list[int]) -> None:
    paths = write(tmp_path, 300)
    for i in bad:
        Path(paths[i]).write_bytes(b"Obj\x01 damaged")
    os.unlink(paths[bad[-1]])
    for _ in range(10):
        with pytest.raises(fastpipe.FastpipeError) as error:
            fastpipe.read_avro(paths, features=ID, batch_size=1)
        assert error.value.path == paths[bad[0]]
        assert isinstance(error.value, fastpipe.errors.MissingFileError) == (len(bad) == 1)


def test_each_schema_is_checked_once_in_the_order_of_the_files(tmp_path: Path) -> None:
    paths = write(tmp_path, 30)
    checked: list[str] = []

    def check(path: str, schema: str) -> None:
        assert schema in (wire.schema_bytes(ONE).decode(), wire.schema_bytes(TWO).decode())
        checked.append(path)

    _fastpipe.AvroDataset(lowered(paths), ["id"], check=check)
    assert checked == [paths[0], paths[2]]
    # The error of `check` is raised before the error of a later file.
    os.unlink(paths[20])

    def refuse(path: str, schema: str) -> None:
        raise LookupError(path)

    with pytest.raises(LookupError, match=r"000\.avro"):
        _fastpipe.AvroDataset(lowered(paths), ["id"], check=refuse)


def test_small_files_have_no_entry_in_the_cache(tmp_path: Path) -> None:
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    for path in write(folder, 10):
        os.utime(path, ns=(10**18, 10**18))
    for _ in range(2):
        assert fastpipe.read_avro(folder, features=ID, batch_size=1, index_cache=cache).num_rows == 10
    assert list(cache.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal.setitimer")
@pytest.mark.parametrize("paths", [100_000, 1])
def test_ctrl_c_ends_opening(tmp_path: Path, paths: int) -> None:
    (path,) = write(tmp_path, 1)
    if paths == 1:
        Path(path).write_bytes(wire.container('"long"', [(1, wire.long(1))]) + wire.block(1, wire.long(1)) * 2_000_000)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    files = lowered([path] * paths)

    def interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        _fastpipe.AvroDataset(files, None)

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
