"""Files in memory and file objects yield the same batches as paths, for each format."""

from __future__ import annotations

import array
import functools
import gc
import io
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import fastpipe
import tfrecords
import wire

pa = pytest.importorskip("pyarrow")
import column_files  # noqa: E402
from toy_units import until  # noqa: E402

SCHEMA = wire.record("Row", x="long", t="string", v=wire.list_of("float"))
ORDERS: list[dict[str, Any]] = [
    {},
    {"shuffle": True, "seed": 1},
    {"shuffle": True, "shuffle_buffer": 7, "seed": 3},
    {"shuffle": "block", "shuffle_buffer": 5, "seed": 1},
    {"shuffle": "buffer", "shuffle_buffer": 5, "seed": 1},
]


class Format(NamedTuple):
    """A file format.

    Attributes:
        name: The suffix of its files.
        read: The function that reads them.
        contents: A function that returns a file of 90 rows in 10 units. Its argument is the first value of `x`.
        damaged: Files that can't be opened, made from a file.
    """

    name: str
    read: Callable[..., fastpipe.Reader]
    contents: Callable[[int], bytes]
    damaged: Callable[[bytes], list[bytes]]


def contents(first: int = 0, codec: str = "deflate") -> bytes:
    """Returns an Avro file of 90 rows in blocks of 9."""
    row = lambda i: wire.long(i) + wire.text("t" * (i % 5)) + wire.array(*[wire.float_(i)] * (i % 3))  # noqa: E731
    blocks = [(9, b"".join(map(row, range(at, at + 9)))) for at in range(first, first + 90, 9)]
    return wire.container(SCHEMA, blocks, codec)


def columns(kind: str, first: int) -> bytes:
    """Returns a Parquet or Arrow file of 90 rows in units of 9."""
    numbers = range(first, first + 90)
    lists = [[i / 2] * (i % 3) for i in numbers]
    texts = ["t" * (i % 5) for i in numbers]
    table = pa.table({"x": numbers, "t": texts, "v": pa.array(lists, pa.list_(pa.float32()))})
    file = io.BytesIO()
    column_files.FORMATS[kind].write(table, file, rows=9)
    return file.getvalue()


def lines(first: int) -> bytes:
    """Returns a CSV file of 90 rows of 8 KB, in chunks of 64 KiB."""
    return b"x,t\n" + b"".join(b"%d,%s\n" % (i, b"t" * (8000 + i % 5)) for i in range(first, first + 90))


def records(first: int) -> bytes:
    """Returns a TFRecord file of 90 rows of 8 KB, in chunks of 64 KiB."""
    return tfrecords.file({"x": i, "t": "t" * (8000 + i % 7), "v": [i / 2] * (i % 3)} for i in range(first, first + 90))


def cut(data: bytes) -> list[bytes]:
    return [b"", data[:2], data[: len(data) // 2], data[:-1], b"Other" + data[5:-5] + b"Other"]


FORMATS = {
    "avro": Format("avro", fastpipe.read_avro, contents, cut),
    "parquet": Format("parquet", fastpipe.read_parquet, functools.partial(columns, "parquet"), cut),
    "arrow": Format("arrow", fastpipe.read_arrow, functools.partial(columns, "arrow"), cut),
    "tfrecord": Format("tfrecord", fastpipe.read_tfrecord, records, lambda data: cut(data)[1:]),
    "csv": Format("csv", fastpipe.read_csv, lines, lambda data: [b"x\n\xff", b"PK\x03\x04" + data]),
}


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def file_object(data: bytes) -> Any:
    return io.BytesIO(data)


def behind_a_header(data: bytes) -> Any:
    file = io.BytesIO(b"header" + data)
    file.seek(6)
    return file


def mapped(data: bytes) -> Any:
    anonymous = mmap.mmap(-1, len(data))
    anonymous.write(data)
    return anonymous


class Child:
    """The standard output of a process, which is read in small pieces."""

    def __init__(self, data: bytes) -> None:
        script = "import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            self.process = subprocess.Popen([sys.executable, "-c", script], stdin=file, stdout=subprocess.PIPE)

    def read(self, size: int) -> bytes:
        output = self.process.stdout
        assert output is not None
        found = output.read(min(size, 100))
        if not found:
            output.close()
            self.process.wait()
        return found


KINDS: dict[str, Callable[[bytes], Any]] = {
    "bytes": lambda data: data,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "part of a memoryview": lambda data: memoryview(b"junk" + data + b"junk")[4:-4],
    "part of a bytearray": lambda data: memoryview(bytearray(b"junk" + data))[4:],
    "numpy": lambda data: np.frombuffer(data, np.uint8),
    "array": lambda data: array.array("b", data),
    "mmap": mapped,
    "BytesIO": file_object,
    "BytesIO from a position": behind_a_header,
    "pipe": Child,
}


def plain(batch: dict[str, Any]) -> str:
    """Returns a batch as text."""
    return repr({key: getattr(value, "tolist", getattr(value, "to_list", None))() for key, value in batch.items()})


def read(form: Format, source: Any, **options: Any) -> list[str]:
    """Returns the batches as text."""
    return [plain(batch) for batch in form.read(source, batch_size=8, **options)]


@pytest.fixture
def path(form: Format, tmp_path: Path) -> Path:
    path = tmp_path / f"data.{form.name}"
    path.write_bytes(form.contents(0))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_batches_as_from_a_path(form: Format, kind: str, path: Path) -> None:
    make, data = KINDS[kind], path.read_bytes()
    if form.name != "csv":  # The first bytes of a CSV file don't determine the format.
        assert fastpipe.infer_features(make(data)) == fastpipe.infer_features(path)
    for order in ORDERS:
        assert read(form, make(data), **order) == read(form, path, **order), order


@pytest.mark.parametrize("kind", KINDS)
def test_files_to_inspect(kind: str, tmp_path: Path) -> None:
    make, data, path = KINDS[kind], contents(), tmp_path / "data.avro"
    path.write_bytes(data)
    file = fastpipe.avro.AvroFile(make(data))
    assert (file.codec, len(file), file.size) == ("deflate", 90, len(data))
    assert file.sample_uncompressed() == fastpipe.avro.AvroFile(path).sample_uncompressed()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_lists_may_mix_contents_and_paths(form: Format, order: dict[str, Any], path: Path) -> None:
    other, third = path.with_stem("other"), path.with_stem("third")
    other.write_bytes(form.contents(90))
    third.write_bytes(form.contents(180))
    mixed = [path.read_bytes(), other, io.BytesIO(third.read_bytes())]
    assert read(form, mixed, **order) == read(form, [path, other, third], **order)
    reader = form.read([*mixed[:2], bytearray(third.read_bytes())], batch_size=8)
    assert reader.files == ["<bytes #0>", str(other), "<bytearray #2>"]
    assert reader.locate(0, 0).file == "<bytes #0>"


def test_open_files_and_pipes(form: Format, path: Path) -> None:
    expected = read(form, path)
    with path.open("rb") as file:
        reader = form.read(file, batch_size=8)
    # The file was read when the reader was created.
    path.unlink()
    assert reader.files == [str(path)]
    assert [plain(batch) for batch in reader] == expected
    with pytest.raises(ValueError, match=f"the file object {path} can't be read: .* closed file"):
        form.read(file, batch_size=8)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows pipes are different")
def test_standard_input(form: Format) -> None:
    script = f"""
import sys, fastpipe
reader = fastpipe.{form.read.__name__}(sys.stdin.buffer, batch_size=8)
print(reader.files, sum(int(batch["x"].sum()) for batch in reader))
"""
    data = form.contents(0)
    ran = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True)
    assert ran.stdout.decode().split("\n")[0] == f"['<stdin>'] {sum(range(90))}"


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "BytesIO"])
def test_invalid_contents_are_reported_as_damage(form: Format, kind: str) -> None:
    make, data = KINDS[kind], form.contents(0)
    name = f"<{kind} #0>"
    for bad in form.damaged(data):
        with pytest.raises((fastpipe.errors.MalformedFileError, fastpipe.errors.UnsupportedError)) as error:
            list(form.read(make(bad), batch_size=1))
        assert error.value.path == name
        assert name in str(error.value)


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "BytesIO"])
def test_damage_within_contents(kind: str) -> None:
    make, data = KINDS[kind], contents()
    with pytest.raises(fastpipe.errors.MalformedFileError):
        len(fastpipe.avro.AvroFile(make(data[:-1])))
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 0xFF
    with pytest.raises(fastpipe.errors.MalformedFileError) as error:
        read(FORMATS["avro"], make(bytes(damaged)))
    assert error.value.path == f"<{kind} #0>"


class Broken:
    def __init__(self, found: Any) -> None:
        self.found = found

    def read(self, _: int) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_unsupported_sources(form: Format, path: Path) -> None:
    with path.open(encoding="latin-1") as text, pytest.raises(TypeError, match='open it with "rb"'):
        form.read(text, batch_size=1)
    for source in (io.StringIO("x"), [io.StringIO("x")]):
        with pytest.raises(TypeError, match='<StringIO #0> was opened as text: open it with "rb"'):
            form.read(source, batch_size=1)
    with pytest.raises(fastpipe.errors.MissingFileError):  # A str is a path.
        form.read("Obj", batch_size=1)
    for bad in (3, [3], [None], [b"x", 3.0]):
        with pytest.raises(TypeError, match="a binary file object or a list of these; got"):
            form.read(bad, batch_size=1)
    with pytest.raises(TypeError, match="contiguous"):
        form.read(memoryview(form.contents(0))[::2], batch_size=1)
    with pytest.raises(TypeError, match="must return bytes; got int"):
        form.read(Broken(3), batch_size=1)
    with pytest.raises(fastpipe.errors.StorageError, match="set its descriptor to blocking"):
        form.read(Broken(None), batch_size=1)
    with pytest.raises(fastpipe.errors.StorageError, match="no such disk") as error:
        fastpipe.avro.AvroFile(Broken(OSError("no such disk")))
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(fastpipe.errors.MissingFileError, match="empty"):
        form.read([], batch_size=1)


def test_later_changes_of_a_bytearray_have_no_effect(form: Format, path: Path) -> None:
    data = bytearray(path.read_bytes())
    reader = form.read(data, batch_size=8)
    data[:] = bytes(len(data))
    data.clear()  # Clearing it raises an error if a buffer is still exported.
    assert [plain(batch) for batch in reader] == read(form, path)


def test_bytes_are_read_in_place() -> None:
    from fastpipe._files._in_memory_files import opened

    data = b"junk" + contents()
    (whole,) = opened(data)
    assert not isinstance(whole, str)
    assert whole.whole is data
    (part,) = opened(memoryview(data)[4:9])
    assert not isinstance(part, str)
    assert part.whole is data
    assert (part.start, part.stop) == (4, 9)


def test_a_reader_keeps_its_contents_alive(form: Format) -> None:
    class Owner(np.ndarray):  # type: ignore[type-arg]
        pass

    owner = np.frombuffer(form.contents(0), np.uint8).view(Owner)
    reader = form.read(memoryview(owner), batch_size=8)
    kept = weakref.ref(owner)
    del owner
    gc.collect()
    assert kept() is None, "the reader must copy the data"
    assert sum(len(batch["x"]) for batch in reader) == 90
    data = form.contents(0)
    before = sys.getrefcount(data)
    reader = form.read(data, batch_size=8)
    assert sys.getrefcount(data) > before
    assert len(list(reader)) == 12
    del reader
    gc.collect()
    # The threads that read units end shortly after.
    until(lambda: sys.getrefcount(data) == before)


def test_rows_in_memory_are_not_files(form: Format) -> None:
    for source, advice in (({"x": [1, 2]}, "from_arrays"), ([{"x": 1}, {"x": 2}], "Table.from_pylist")):
        with pytest.raises(TypeError, match=f"source must be a path, .* got a dict: .*{advice}"):
            form.read(source, batch_size=1)


def test_two_readers_over_one_buffer(form: Format, path: Path) -> None:
    data = path.read_bytes()
    a, b = (iter(form.read(data, batch_size=8, shuffle=True, seed=seed)) for seed in (1, 2))
    rows = [[], []]  # type: list[list[int]]
    for left, right in zip(a, b, strict=True):
        rows[0] += left["x"].tolist()
        rows[1] += right["x"].tolist()
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(90))


def test_states_and_pickles(form: Format, path: Path) -> None:
    data = path.read_bytes()
    for source in (data, bytearray(data), memoryview(b"x" * 9999 + data)[9999:], io.BytesIO(data)):
        reader = form.read(source, batch_size=8, shuffle=True, seed=5)
        stored = pickle.dumps(reader)
        assert len(stored) < len(data) + 5500
        copy = pickle.loads(stored)
        batches = iter(reader)
        next(batches)
        state = reader.state_dict()
        copy.load_state_dict(state)
        rest = [batch["x"].tolist() for batch in batches]
        assert [batch["x"].tolist() for batch in copy] == rest
    other = form.read(form.contents(1), batch_size=8, shuffle=True, seed=5)
    with pytest.raises(fastpipe.errors.StateError):
        other.load_state_dict(state)


def total(reader: Any, queue: Any) -> None:
    queue.put(sum(int(batch["x"].sum()) for batch in reader))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_children(form: Format, method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"there is no {method} here")
    reader = form.read([form.contents(0), io.BytesIO(form.contents(90))], batch_size=8, shuffle=True)
    next(iter(form.read(form.contents(0), batch_size=8)))
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=total, args=(reader, queue))
    child.start()
    assert queue.get(timeout=60) == sum(range(180))
    child.join()
    assert child.exitcode == 0


def test_a_service_reads_contents(form: Format) -> None:
    source = [form.contents(0), io.BytesIO(form.contents(90))]
    with fastpipe.service.LocalService(form.read(source, batch_size=8, shuffle=True, seed=1)) as service:
        found = [batch["x"].tolist() for batch in service.reader]
    assert sorted(x for batch in found for x in batch) == list(range(180))


def test_contents_in_memory_are_not_indexed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    big = wire.container('"bytes"', [(1, wire.text(os.urandom(70_000)))])
    reader = fastpipe.read_avro(big, batch_size=1, index_cache=cache)
    assert len(list(reader)) == 1
    assert list(cache.iterdir()) == []


def test_large_contents() -> None:
    data = wire.container(wire.record("R", v=wire.list_of("double")), [(1, wire.array(*[bytes(8)] * 4))] * 5000)
    assert fastpipe.infer_features(data)["v"] == fastpipe.DenseSpec((4,), "float64")
    assert len(list(fastpipe.read_avro(data, batch_size=100, shuffle=True))) == 50
