"""TFRecord files that are written or read under adverse conditions: kills, forks, threads, links and little memory."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe import _fastpipe, errors
from fastpipe.tfrecord import write_tfrecord
from processes import together
from tfrecords import crc, file

pa = pytest.importorskip("pyarrow")
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits address space")

BATCH = {"x": np.arange(1000)}
FORMATS: dict[str, Any] = {
    "fastpipe.write_avro": (".avro", fastpipe.write_avro, fastpipe.read_avro),
    "write_tfrecord": (".tfrecord", write_tfrecord, fastpipe.read_tfrecord),
}
ONE = {"x": fastpipe.DenseSpec((), "int64")}


def rows(path: Any, **options: Any) -> list[int]:
    with fastpipe.read_tfrecord(path, features=ONE, batch_size=300, **options) as reader:
        return [x for batch in reader for x in batch["x"].tolist()]


def run(program: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    start = "import os, signal, sys, numpy as np, fastpipe\nfrom fastpipe.tfrecord import write_tfrecord\n"
    command = [sys.executable, "-W", "ignore", "-c", start + textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@posix
@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("batches", [0, 2])
def test_a_killed_writer_leaves_only_a_hidden_file(tmp_path: Path, write: str, batches: int) -> None:
    end, function, read = FORMATS[write]
    path = tmp_path / f"out{end}"
    function(path, BATCH)
    before = path.read_bytes()
    program = f"""
        def killing():
            for _ in range({batches}):
                yield {{"x": np.arange(50_000)}}
            os.kill(os.getpid(), signal.SIGKILL)
            yield
        {write}(sys.argv[1], killing())
    """
    assert run(program, path).returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    (left,) = {entry.name for entry in tmp_path.iterdir()} - {path.name}
    assert left.startswith(".fastpipe-")
    # Readers of the directory skip the temporary file.
    assert read(tmp_path, batch_size=100).num_rows == 1000
    assert read(f"{tmp_path}/*", batch_size=100).num_rows == 1000


@posix
@pytest.mark.parametrize("write", FORMATS)
def test_a_forked_child_cannot_continue_its_parents_file(tmp_path: Path, write: str) -> None:
    """The child is forked while the parent draws data, and would write and rename the same temporary file."""
    program = f"""
        child = None
        def forking():
            global child
            for number in range(4):
                if number == 2:
                    child = os.fork()
                yield {{"x": np.arange(1000) + 1000 * number}}
        try:
            {write}(sys.argv[1], forking())
        except RuntimeError as error:
            assert child == 0
            print(error)
            {write}(sys.argv[1] + ".child", {{"x": np.arange(3)}})
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    path = tmp_path / "out"
    done = run(program, path)
    assert done.returncode == 0, done.stderr
    assert "which only the parent can complete" in done.stdout
    *_, read = FORMATS[write]
    with read(path, batch_size=4000) as reader:
        assert [batch["x"].tolist() for batch in reader] == [list(range(4000))]
    assert read(f"{path}.child", batch_size=9).num_rows == 3
    assert sorted(os.listdir(tmp_path)) == ["out", "out.child"]


@posix
def test_a_forked_child_reads_with_its_parents_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    write_tfrecord(path, BATCH)
    program = """
        reader = fastpipe.read_tfrecord(sys.argv[1], batch_size=300, shuffle=True, seed=1)
        read = lambda: [batch["x"].tolist() for batch in reader]
        expected = read()
        reader.set_epoch(0)
        batches = iter(reader)
        next(batches)
        child = os.fork()
        if not child:
            reader.set_epoch(0)
            os._exit(read() != expected)
        assert os.waitpid(child, 0)[1] == 0
        assert [batch["x"].tolist() for batch in batches] == expected[1:]
    """
    done = run(program, path)
    assert done.returncode == 0, done.stderr


def test_threads_that_write_one_path_replace_each_others_file(tmp_path: Path) -> None:
    path, barrier = tmp_path / "x.tfrecord", threading.Barrier(4, timeout=60)

    def batches(number: int) -> Iterator[Any]:
        for _ in range(5):
            barrier.wait()
            yield {"x": np.full(100, number)}

    together([threading.Thread(target=write_tfrecord, args=(path, batches(number))) for number in range(4)])
    found = rows(path)
    assert found == [found[0]] * 500
    assert os.listdir(tmp_path) == ["x.tfrecord"]


def test_a_writer_is_used_by_one_thread_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.touch()
    writer = _fastpipe.TfRecordWriter(str(path), shown="x")
    refused: list[BaseException] = []

    def use() -> None:
        for call in (lambda: writer.write(pa.table({"x": [9]}), None), writer.finish, writer.close):
            try:
                call()
            except RuntimeError as error:
                refused.append(error)

    def batches() -> Iterator[Any]:
        yield pa.record_batch({"x": [1]})
        together([threading.Thread(target=use)])
        yield pa.record_batch({"x": [2]})

    writer.write(pa.RecordBatchReader.from_batches(pa.schema([("x", pa.int64())]), batches()), None)
    assert ["another thread" in str(error) for error in refused] == [True] * 3
    assert writer.finish() == (2, path.stat().st_size)
    for call in (writer.finish, lambda: writer.write(pa.table({"x": [1]}), None)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    writer.close()
    assert rows(path) == [1, 2]


def test_large_rows_are_encoded_a_few_at_a_time(tmp_path: Path) -> None:
    path, steps = tmp_path / "x.tfrecord", list[int]()
    path.touch()
    writer = _fastpipe.TfRecordWriter(str(path), shown="x")
    writer.write(pa.table({"raw": pa.array([b"x" * 100_000] * 200)}), steps.append)
    writer.write(pa.table({"x": range(20_000)}), steps.append)
    writer.finish()
    assert sum(steps) == 20_200
    assert max(steps[1 : steps.index(4096)]) <= 10
    filled = {"x": fastpipe.DenseSpec((), "int64", fill=-1)}
    (batch,) = fastpipe.read_tfrecord(path, features=filled, batch_size=30_000)
    assert batch["x"].tolist() == [-1] * 200 + list(range(20_000))


def test_links_are_followed(tmp_path: Path) -> None:
    real, link, dangling, loop = (tmp_path / name for name in ("real", "link", "dangling", "loop"))
    real.touch(0o640)
    real.chmod(0o640)
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "nothing")
    loop.symlink_to(loop)
    write_tfrecord(link, BATCH)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert rows(link) == rows(real) == list(range(1000))
    for broken in (dangling, loop):
        with pytest.raises(errors.MissingFileError, match="the link leads to"):
            rows(broken)


def test_directories_and_other_files_are_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(errors.StorageError, match="isn't a regular file"):
        write_tfrecord(tmp_path, BATCH)
    with pytest.raises(errors.StorageError, match="isn't a regular file"):
        write_tfrecord(os.devnull, BATCH)
    assert os.listdir(tmp_path) == []
    with pytest.raises(errors.MissingFileError, match="tfrecord"):
        rows(tmp_path)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_file_that_another_process_is_writing(tmp_path: Path, shuffle: bool) -> None:
    """A file that ends within a record is an error. A reader doesn't read records that are appended later."""
    path = tmp_path / "x.tfrecord"
    data = file({"x": i} for i in range(20))
    size = len(data) // 20
    order: dict[str, Any] = {"shuffle": True, "seed": 1} if shuffle else {}
    for end in (size * 10 - 1, size * 10 + 5):
        path.write_bytes(data[:end])
        with pytest.raises(errors.MalformedFileError, match="truncated") as caught:
            rows(path)
        assert caught.value.offset == size * (9 if end < size * 10 else 10)
    path.write_bytes(data[: size * 10])
    with fastpipe.read_tfrecord(path, features=ONE, batch_size=3, **order) as reader:
        assert reader.num_rows == 10
        with path.open("ab") as out:
            out.write(data[size * 10 :])
        with pytest.raises(errors.StorageError, match="changed"):
            list(reader)
    assert sorted(rows(path, **order)) == list(range(20))


LIMITED = """
    import resource, fastpipe.typing
    def limited(source, **options):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        reader = None
        try:
            reader = fastpipe.read_tfrecord(source, batch_size=1, num_threads=1, **options)
            resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))
            print(len(list(reader)), "batches")
        except (fastpipe.FastpipeError, MemoryError) as error:
            print(type(error).__name__)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        small = fastpipe.read_tfrecord(sys.argv[2], batch_size=1)
        print(len(list(small)), "batches")
"""


@linux
@pytest.mark.parametrize("kind", ["record", "list"])
def test_huge_records_and_lists_without_memory_are_typed_errors(tmp_path: Path, kind: str) -> None:
    huge, small = tmp_path / "huge.tfrecord", tmp_path / "small.tfrecord"
    small.write_bytes(file([{"x": 1}] * 3))
    if kind == "record":
        # A sparse file, whose record has 2^30 zeros after its length.
        head = struct.pack("<Q", 1 << 30)
        with huge.open("wb") as out:
            out.write(head + crc(head))
            out.truncate(16 + (1 << 30))
        spec = 'fastpipe.DenseSpec((), "int64", fill=0)'
        wanted = "features={'x': " + spec + "}"
        # Opening samples the record, which fails within the limit of memory or because of its checksum.
        expected = {"MalformedFileError", "OutOfMemoryError"}
    else:
        table = pa.table({"x": pa.array([np.zeros(45_000_000, "int8")], pa.list_(pa.int8()))})
        write_tfrecord(huge, table)
        wanted = "features={'x': fastpipe.RaggedSpec((None,), 'int64')}"
        expected = {"OutOfMemoryError", "MemoryError"}
    done = run(textwrap.dedent(LIMITED) + f"\nlimited(sys.argv[1], {wanted})", huge, small)
    assert done.returncode == 0, done.stderr
    error, again = done.stdout.split("\n")[:2]
    assert error in expected
    assert again == "3 batches"
