"""Writing that fails, is interrupted or killed, and appending: the file is either complete or unchanged."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fastpipe
from avro_rows import read
from fastpipe import _fastpipe
from fastpipe._boundary import AvroWriting
from processes import together

pytestmark = pytest.mark.usefixtures("plain_values")

BATCH = {"a": np.arange(100)}


def endless() -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(1)
    while True:
        yield {"a": random.integers(0, 2**62, 10_000)}


def raising(error: BaseException, after: int = 30) -> Iterator[dict[str, Any]]:
    for number, batch in enumerate(endless()):
        if number == after:
            raise error
        yield batch


def of_pyarrow(batches: Iterator[dict[str, Any]]) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(pa.schema([("a", pa.int64())]), map(pa.RecordBatch.from_pydict, batches))


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), GeneratorExit(), MemoryError()])
@pytest.mark.parametrize("stream", [iter, of_pyarrow])
@pytest.mark.parametrize("append", [False, True])
def test_data_that_raises(tmp_path: Path, error: BaseException, stream: Any, append: bool) -> None:
    path = tmp_path / "out.avro"
    fastpipe.write_avro(path, BATCH)
    before = path.read_bytes()
    with pytest.raises(type(error)) as caught:
        fastpipe.write_avro(path, stream(raising(error)), codec=None, append=append)
    assert caught.value is error or isinstance(error, GeneratorExit)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["out.avro"]


def test_a_failing_reader(tmp_path: Path) -> None:
    source, path = tmp_path / "in.avro", tmp_path / "out.avro"
    fastpipe.write_avro(source, BATCH, codec="zstandard", block_bytes=50)
    data = bytearray(source.read_bytes())
    reader = fastpipe.read_avro(source, batch_size=10)
    data[-20] ^= 0xFF
    source.write_bytes(data)
    with pytest.raises(fastpipe.FastpipeError):
        fastpipe.write_avro(path, reader)
    assert not path.exists()


def test_ctrl_c(tmp_path: Path) -> None:
    def interrupted() -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(endless()):
            if number == 5:
                signal.raise_signal(signal.SIGINT)
            yield batch

    with pytest.raises(KeyboardInterrupt):
        fastpipe.write_avro(tmp_path / "out.avro", interrupted())
    assert not os.listdir(tmp_path)


ENDLESS = """
import sys, numpy as np, fastpipe
def endless():
    random = np.random.default_rng(1)
    while True:
        yield {"a": random.integers(0, 2**62, 10_000)}
"""


@pytest.mark.parametrize("append", [False, True])
def test_killed_writers(tmp_path: Path, append: bool) -> None:
    path = tmp_path / "out.avro"
    fastpipe.write_avro(path, BATCH)
    before = path.read_bytes()
    program = f"{ENDLESS}\nfastpipe.write_avro({str(path)!r}, endless(), append={append})"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        until = time.monotonic() + 60
        while sum(entry.stat().st_size for entry in tmp_path.iterdir()) < 3_000_000:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        process.kill()
    if append:
        data = path.read_bytes()
        assert data.startswith(before)
        # If the file is cut within a block, appending removes the incomplete block and keeps all other blocks.
        cut = data[: len(data) // 2 + 5]
        path.write_bytes(cut)
        with pytest.warns(RuntimeWarning, match="bytes are cut off") as caught:
            fastpipe.write_avro(path, BATCH, append=True)
        torn = int(str(caught[0].message).partition(" bytes")[0].rpartition(" ")[2])
        assert 0 < torn < 200_000
        assert path.read_bytes().startswith(cut[:-torn])
        rows = [row["a"] for row in read(path)]
        assert rows[:100] == rows[-100:] == list(range(100))
        assert fastpipe.read_avro(path, batch_size=10).num_rows == len(rows) > 1000
    else:
        assert path.read_bytes() == before
        (left,) = {entry.name for entry in tmp_path.iterdir()} - {"out.avro"}
        assert left.startswith(".fastpipe-")
        # Readers of the directory skip the temporary file.
        assert fastpipe.read_avro(tmp_path, batch_size=100).num_rows == 100


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on file sizes")
@pytest.mark.parametrize("append", [False, True])
def test_full_disk(tmp_path: Path, append: bool) -> None:
    path = tmp_path / "out.avro"
    fastpipe.write_avro(path, BATCH)
    before = path.read_bytes()
    program = f"""{ENDLESS}
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    fastpipe.write_avro({str(path)!r}, endless(), append={append})
except fastpipe.errors.StorageError as error:
    print(error.errno, error.path)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=500)
    assert done.stdout.split() == [str(errno.EFBIG), str(path)]
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["out.avro"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
def test_forked_child(tmp_path: Path) -> None:
    program = f"""{ENDLESS}
import itertools, os
path = {str(tmp_path)!r}
few = lambda: itertools.islice(endless(), 100)
fastpipe.write_avro(path + "/parent.avro", few(), num_threads=4)
child = os.fork()
if not child:
    fastpipe.write_avro(path + "/child.avro", few(), num_threads=4)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0

def forking():  # The child raises an error, and doesn't change the parent's file.
    for number, batch in enumerate(few()):
        if number == 30 and not os.fork():
            raise SystemExit(0)
        yield batch
fastpipe.write_avro(path + "/forking.avro", forking())
os.wait()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=500)
    parent, child, forking = (read(tmp_path / f"{name}.avro") for name in ("parent", "child", "forking"))
    assert len(parent) == 1_000_000
    assert parent == child == forking
    assert len(os.listdir(tmp_path)) == 3


def test_two_threads(tmp_path: Path) -> None:
    path = tmp_path / "out.avro"
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            fastpipe.write_avro(path, ({"a": np.full(1000, number)} for _ in range(50)), num_threads=2)
        except BaseException as error:
            errors.append(error)

    together([threading.Thread(target=work, args=(number,)) for number in range(4)])
    assert not errors
    rows = [row["a"] for row in read(path)]
    assert rows == [rows[0]] * 50_000
    assert os.listdir(tmp_path) == ["out.avro"]


def test_a_writer_used_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "out.avro"
    path.touch()
    writer = _fastpipe.AvroWriter(
        str(path), shown="x", schema=None, writing=AvroWriting("null", None, 10, 1, b"x" * 16, [])
    )

    def again() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"a": [1]})
        with pytest.raises(RuntimeError, match="another thread"):
            writer.finish()
        yield pa.record_batch({"a": [2]})

    stream = pa.RecordBatchReader.from_batches(pa.schema([("a", pa.int64())]), again())
    writer.write(stream, [], None)
    assert writer.finish()[0] == 2
    for call in (lambda: writer.finish(), lambda: writer.write(pa.table({"a": [1]}), [], None)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    writer.close()


def test_links_and_modes(tmp_path: Path) -> None:
    target, link = tmp_path / "real.avro", tmp_path / "link.avro"
    target.touch(0o640)
    target.chmod(0o640)
    link.symlink_to(target)
    fastpipe.write_avro(link, BATCH)
    assert link.is_symlink()
    assert len(read(target)) == 100
    assert target.stat().st_mode & 0o777 == 0o640
    mask = os.umask(0)
    os.umask(mask)
    fastpipe.write_avro(tmp_path / "new.avro", BATCH)
    assert (tmp_path / "new.avro").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "zstandard", "bzip2", "xz"])
def test_append(tmp_path: Path, codec: Any) -> None:
    path = tmp_path / "out.avro"
    fastpipe.write_avro(path, BATCH, codec=codec, metadata={"k": "v"})
    before = path.read_bytes()
    for given in (None, codec):
        added = fastpipe.write_avro(path, BATCH, codec=given, append=True)
        assert added.rows == 100
    data = path.read_bytes()
    assert data.startswith(before)
    assert len(data) == len(before) + 2 * added.size
    assert [row["a"] for row in read(path)] == 3 * list(range(100))
    assert sum(len(batch["a"]) for batch in fastpipe.read_avro(path, batch_size=64)) == 300
    # Appending no rows adds no block.
    assert fastpipe.write_avro(path, {"a": np.arange(0)}, append=True) == (0, 0, 0)
    assert path.read_bytes() == data


def test_append_to_an_incompatible_file(tmp_path: Path) -> None:
    path = tmp_path / "out.avro"
    fastpipe.write_avro(path, BATCH)
    before = path.read_bytes()
    other = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}
    same = {"type": "record", "name": "Other", "doc": "x", "fields": [{"name": "a", "type": "long", "default": 3}]}
    with pytest.raises(ValueError, match="codec is deflate"):
        fastpipe.write_avro(path, BATCH, codec="null", append=True)
    with pytest.raises(fastpipe.errors.SchemaError, match="differs from the schema of the existing file"):
        fastpipe.write_avro(path, BATCH, other, append=True)
    for data in ({"b": np.arange(3)}, {"a": np.array([0.5])}, {"a": np.arange(3), "b": np.arange(3)}):
        with pytest.raises(fastpipe.errors.SchemaError):
            fastpipe.write_avro(path, data, append=True)
    assert path.read_bytes() == before
    fastpipe.write_avro(path, BATCH, same, append=True)
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    with pytest.raises(fastpipe.errors.MalformedFileError):
        fastpipe.write_avro(path, BATCH, append=True)
    assert path.read_bytes() == whole[:20]
    for tail in (b"\0" * 18, b"\1", b"\0\1", b"\xff" * 20):
        path.write_bytes(whole + tail)
        with pytest.raises(fastpipe.FastpipeError):
            fastpipe.write_avro(path, BATCH, append=True)
        assert path.read_bytes() == whole + tail


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_append_after_a_kill_at_any_byte(tmp_path: Path, codec: Any) -> None:
    path = tmp_path / "out.avro"
    fastpipe.write_avro(path, BATCH, codec=codec, block_bytes=50)
    ends = [int(block["offset"]) for block in fastpipe.avro.AvroFile(path).blocks]
    whole = path.read_bytes()
    rows = [row["a"] for row in read(path)]
    kept = len(rows) - int(fastpipe.avro.AvroFile(path).blocks[-1]["rows"])
    for cut in range(ends[-1] + 1, len(whole)):
        path.write_bytes(whole[:cut])
        match = rf"its {cut - ends[-1]} bytes are cut off.*{path.name}"
        with pytest.warns(RuntimeWarning, match=match) as caught:
            added = fastpipe.write_avro(path, BATCH, append=True)
        assert caught[0].filename == __file__
        data = path.read_bytes()
        assert data[: ends[-1]] == whole[: ends[-1]]
        assert len(data) == ends[-1] + added.size
        # Read with fastavro.
        assert [row["a"] for row in read(path)] == rows[:kept] + rows
        (batch,) = fastpipe.read_avro(path, batch_size=200, drop_last=False)
        assert batch["a"].tolist() == rows[:kept] + rows
    for cut in (ends[-1], len(whole)):
        path.write_bytes(whole[:cut])
        fastpipe.write_avro(path, BATCH, append=True)
        assert path.read_bytes().startswith(whole[:cut])


def test_append_removes_only_an_incomplete_last_block(tmp_path: Path) -> None:
    path = tmp_path / "out.avro"
    fastpipe.write_avro(path, BATCH, codec="null", block_bytes=50)
    blocks = fastpipe.avro.AvroFile(path).blocks
    whole = path.read_bytes()
    for block in (blocks[0], blocks[len(blocks) // 2], blocks[-1]):
        size = int(block["offset"]) + 1
        # A size that extends beyond the end of the file, and a wrong sync marker.
        for damaged in (
            whole[:size] + b"\xfe\xff\x03" + whole[size + 1 :],
            whole[: size + block["size"] + 5] + b"?" + whole[size + block["size"] + 6 :],
        ):
            for data in (damaged, damaged[:-1]):
                path.write_bytes(data)
                if block["offset"] == blocks[-1]["offset"] and data is not damaged:
                    continue  # Killing a writer leaves exactly this state.
                with pytest.raises(fastpipe.errors.MalformedFileError):
                    fastpipe.write_avro(path, BATCH, append=True)
                assert path.read_bytes() == data


def test_memory_stays_bounded(tmp_path: Path) -> None:
    program = f"""{ENDLESS}
import itertools, resource
fastpipe.write_avro({str(tmp_path / "a.avro")!r}, itertools.islice(endless(), 50), codec="null")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fastpipe.write_avro({str(tmp_path / "b.avro")!r}, itertools.islice(endless(), 2000), codec="null")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=500)
    # The program writes 160 MB.
    assert int(done.stdout) < 30_000
