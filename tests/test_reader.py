"""The reader: batches in order with any number of threads, memory, errors, and ways to stop."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import fastavro
import numpy as np
import psutil
import pytest

import fastpipe
import samples
import wire

SCHEMA = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "vector", "type": {"type": "array", "items": "float"}},
        {"name": "items", "type": {"type": "array", "items": "int"}},
        {"name": "text", "type": "string"},
        {
            "name": "terms",
            "type": {
                "type": "record",
                "name": "Terms",
                "fields": [
                    {"name": "indices0", "type": {"type": "array", "items": "long"}},
                    {"name": "values", "type": {"type": "array", "items": "float"}},
                ],
            },
        },
    ],
}


def rows(start: int, stop: int) -> list[dict]:
    return [
        {
            "id": i,
            "vector": [float(i), 0.5, -1.0],
            "items": list(range(i % 5)),
            "text": f"row {i}",
            "terms": {"indices0": list(range(i % 4)), "values": [0.25 * k for k in range(i % 4)]},
        }
        for i in range(start, stop)
    ]


def write(path: Path, records: list[dict], codec: str = "null", block: int = 2000) -> str:
    with path.open("wb") as file:
        fastavro.writer(file, SCHEMA, records, codec=codec, sync_interval=block)
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Writes three files with 1,000 rows in total, in blocks of different sizes and codecs, and an empty file."""
    folder = tmp_path_factory.mktemp("data")
    return [
        write(folder / "a.avro", rows(0, 400), "deflate", 500),
        write(folder / "b.avro", []),
        write(folder / "c.avro", rows(400, 450), "snappy", 1),
        write(folder / "d.avro", rows(450, 1000), "zstandard", 100_000),
    ]


def same(a: object, b: object) -> bool:
    """Returns whether two batches, or parts of batches, contain the same bytes, shapes and types."""
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    assert type(a) is type(b)
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def arrays(value: object) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [array for part in parts for array in arrays(part)]


def test_files_with_different_field_orders_types_and_symbols(tmp_path: Path) -> None:
    def record(fields: list[dict]) -> dict:
        return {"type": "record", "name": "R", "fields": fields}

    def kind(symbols: list[str]) -> dict:
        return {"type": "enum", "name": "K", "symbols": symbols}

    first = record([{"name": "x", "type": "int"}, {"name": "k", "type": kind(["A", "B"])}])
    second = record(
        [
            {"name": "extra", "type": "string"},
            {"name": "k", "type": ["null", kind(["B", "A"])]},
            {"name": "x", "type": "long"},
        ]
    )
    for name, schema, data in [
        ("1.avro", first, [{"x": 1, "k": "A"}, {"x": 2, "k": "B"}]),
        ("2.avro", second, [{"extra": "", "k": "A", "x": 3}, {"extra": "?", "k": "B", "x": 4}]),
    ]:
        with (tmp_path / name).open("wb") as file:
            fastavro.writer(file, schema, data)
    features = {"x": fastpipe.DenseSpec((), "int64"), "k": fastpipe.DenseSpec((), "int8")}
    reader = fastpipe.read_avro(tmp_path, features=features, batch_size=10)
    (batch,) = reader
    assert batch["x"].tolist() == [1, 2, 3, 4]
    assert batch["k"].tolist() == [0, 1, 0, 1]
    assert reader.categories == {"k": ["A", "B"]}
    with pytest.raises(fastpipe.errors.SchemaError, match="no field 'extra'") as caught:
        fastpipe.read_avro(tmp_path, features={"extra": fastpipe.DenseSpec((), "string")}, batch_size=1)
    assert caught.value.path == str(tmp_path / "1.avro")
    assert caught.value.feature == "extra"


def test_sources(files: list[str], tmp_path: Path) -> None:
    nested = tmp_path / "part=1" / "deep"
    nested.mkdir(parents=True)
    write(nested / "x.avro", rows(5, 10))
    write(tmp_path / "w.avro", rows(0, 5))
    (tmp_path / "notes.txt").write_text("no data")
    for source in (tmp_path, str(tmp_path / "**/*.avro"), [tmp_path / "part=1", str(tmp_path / "w.avro")]):
        ids = np.concatenate([b["id"] for b in fastpipe.read_avro(source, columns=["id"], batch_size=3)])
        assert sorted(ids.tolist()) == list(range(10))
    assert fastpipe.read_avro(Path(files[0]), batch_size=1).files == [files[0]]
    odd = tmp_path / "[odd].avro"
    write(odd, rows(0, 2))
    assert fastpipe.read_avro(odd, batch_size=1).num_rows == 2
    for missing in (tmp_path / "nothing.avro", str(tmp_path / "*.none"), tmp_path / "part=2"):
        with pytest.raises(FileNotFoundError) as caught:
            fastpipe.read_avro(missing, batch_size=1)
        assert isinstance(caught.value, fastpipe.errors.MissingFileError)
        assert caught.value.path == str(missing)
    with pytest.raises(fastpipe.errors.MissingFileError):
        fastpipe.read_avro([], batch_size=1)
    with pytest.raises(TypeError, match="source must be a path"):
        fastpipe.read_avro(3, batch_size=1)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": 2**31}, ValueError),
        ({"batch_size": 1.5}, TypeError),
        ({"batch_size": True}, TypeError),
        ({"batch_size": 1, "num_threads": 0}, ValueError),
        ({"batch_size": 1, "prefetch": -1}, ValueError),
        ({"batch_size": 1, "epochs": 0}, ValueError),
        ({"batch_size": 1, "columns": []}, ValueError),
        ({"batch_size": 1, "columns": "nothing"}, fastpipe.errors.SchemaError),
        ({"batch_size": 1, "columns": ["nothing"]}, fastpipe.errors.SchemaError),
        ({"batch_size": 1, "features": {}}, ValueError),
        ({"batch_size": 1, "columns": ["id"], "features": {"id": fastpipe.DenseSpec((), "int64")}}, ValueError),
        ({"batch_size": 1, "features": {"id": fastpipe.DenseSpec((), "string")}}, fastpipe.errors.SchemaError),
        ({"batch_size": 1, "features": {"id": fastpipe.DenseSpec((2,), "int64")}}, fastpipe.errors.SchemaError),
        ({"batch_size": 1, "features": {"terms": fastpipe.DenseSpec((), "int64")}}, fastpipe.errors.SchemaError),
        ({"batch_size": 1, "features": {"terms": fastpipe.SparseSpec((5, 5), "float32")}}, fastpipe.errors.SchemaError),
    ],
)
def test_invalid_arguments_are_refused_at_once(files: list[str], arguments: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        fastpipe.read_avro(files, **arguments)


def test_errors_have_file_block_and_feature(files: list[str]) -> None:
    features = {"items": fastpipe.DenseSpec((2,), "int32")}
    batches = iter(fastpipe.read_avro(files[3], features=features, batch_size=100))
    with pytest.raises(fastpipe.errors.ShapeError, match="expected 2 items, found") as caught:
        next(batches)
    error = caught.value
    assert (error.path, error.block, error.feature) == (files[3], 0, "items")
    assert error.offset is not None
    assert error.record == 0
    with pytest.raises(
        fastpipe.errors.ShapeError
    ):  # Not StopIteration, which the program would take for the end of the data.
        next(batches)
    index = {"terms": fastpipe.SparseSpec((2,), "float32")}
    with pytest.raises(fastpipe.errors.ValueRangeError, match="below 2"):
        list(fastpipe.read_avro(files[3], features=index, batch_size=100))
    narrow = {"id": fastpipe.DenseSpec((), "int8")}
    with pytest.raises(fastpipe.errors.ValueRangeError, match="128 doesn't fit int8") as caught_range:
        list(fastpipe.read_avro(files[0], features=narrow, batch_size=64))
    assert caught_range.value.feature == "id"


def test_batches_before_damage_are_delivered(tmp_path: Path) -> None:
    path = write(tmp_path / "x.avro", rows(0, 300), block=300)
    blocks = fastpipe.avro.AvroFile(path).blocks
    features = fastpipe.infer_features(path)
    damaged = bytearray(Path(path).read_bytes())
    hit = len(blocks) // 2
    # Turns the id at the start of the block into a varint that never ends.
    start = int(blocks["offset"][hit]) + 4
    damaged[start : start + 11] = b"\xff" * 11
    Path(path).write_bytes(damaged)
    good = int(blocks["rows"][:hit].sum())
    for num_threads in (1, 4):
        batches = iter(fastpipe.read_avro(path, features=features, batch_size=1, num_threads=num_threads))
        assert [next(batches)["id"].tolist() for _ in range(good)] == [[i] for i in range(good)]
        with pytest.raises(fastpipe.errors.MalformedFileError) as caught:
            next(batches)
        assert (caught.value.block, caught.value.offset) == (hit, int(blocks["offset"][hit]))


def test_arrays_are_views_of_engine_memory(files: list[str]) -> None:
    for batch in fastpipe.read_avro(files, batch_size=100):
        found = arrays(batch)
        bases = {id(a.base) for a in found if a is not batch["terms"].dense_shape}
        assert len(bases) == 1, "each batch must have one owner"
        assert type(found[0].base).__name__ == "Memory"
        for array in found:
            assert array.flags.c_contiguous
            assert array.flags.writeable
            assert array.flags.aligned
        for array in (batch["id"], batch["vector"], batch["items"].values, batch["items"].offsets):
            assert array.ctypes.data % 64 == 0
        spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in found if a.nbytes)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "arrays must not overlap"


def test_memory_is_reused_only_after_release(files: list[str]) -> None:
    kept = []
    copies = []
    for batch in fastpipe.read_avro(files, batch_size=10):
        kept.append(batch)
        copies.append(pickle.loads(pickle.dumps(batch)))
    assert all(same(a, b) for a, b in zip(kept, copies, strict=True)), "kept batches must not change"
    addresses = {b["id"].ctypes.data for b in kept}
    assert len(addresses) == len(kept)
    # A single array keeps the memory of its whole batch.
    last = kept[-1]["vector"]
    expected = last.copy()
    del kept, batch
    gc.collect()
    for _ in fastpipe.read_avro(files, batch_size=10):
        pass
    assert np.array_equal(last, expected)


def test_dropped_batches_are_recycled(tmp_path: Path) -> None:
    path = write(tmp_path / "x.avro", rows(0, 5000), block=4000)
    reader = fastpipe.read_avro(path, batch_size=20, num_threads=1)
    addresses = []
    for _ in range(3):
        for batch in reader:
            addresses.append(batch["id"].ctypes.data)
            del batch
    assert len(addresses) == 750
    assert len(set(addresses)) <= 12, "the number of slabs must not exceed the batches in flight by much"


def test_epochs(files: list[str]) -> None:
    reader = fastpipe.read_avro(files, batch_size=300, epochs=2)
    assert reader.epoch == 0
    assert len(reader) == 8
    sizes = [len(b["id"]) for b in reader]
    assert sizes == [300, 300, 300, 100] * 2, "batches must not span epochs"
    assert reader.epoch == 2
    reader.set_epoch(7)
    batches = iter(reader)
    next(batches)
    assert reader.epoch == 7
    for _ in range(4):
        next(batches)
    assert reader.epoch == 8


def test_a_second_pass_closes_the_first(files: list[str]) -> None:
    reader = fastpipe.read_avro(files, batch_size=10)
    first = iter(reader)
    next(first)
    second = iter(reader)
    with pytest.raises(fastpipe.FastpipeError, match="closed"):
        next(first)
    assert sum(len(b["id"]) for b in second) == 1000


def test_several_readers_at_once(files: list[str]) -> None:
    readers = [iter(fastpipe.read_avro(files, batch_size=50)) for _ in range(5)]
    for expected in range(0, 1000, 50):
        for batches in readers:
            assert next(batches)["id"][0] == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_leaving_early_stops_the_threads(files: list[str]) -> None:
    assert samples.threads_are(0)
    reader = fastpipe.read_avro(files, batch_size=1, num_threads=3)
    for _ in reader:
        assert samples.threads_are(3)
        break
    assert samples.threads_are(0), "a dropped pass must stop its threads"
    with reader:
        kept = iter(reader)
        next(kept)
        assert samples.threads_are(3)
    assert samples.threads_are(0), "a closed reader must stop its threads"
    kept = iter(reader)
    next(kept)
    del reader
    assert samples.threads_are(3), "a pass must outlive its reader"
    del kept
    assert samples.threads_are(0)

    def fail() -> None:
        with fastpipe.read_avro(files, batch_size=1) as failing:
            for _ in failing:
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert samples.threads_are(0), "an exception in the consumer must stop the threads"


def test_a_reader_can_be_pickled(files: list[str]) -> None:
    reader = fastpipe.read_avro(files, columns=["id", "items"], batch_size=90, drop_last=True, num_threads=2)
    reader.set_epoch(4)
    copy = pickle.loads(pickle.dumps(reader))
    assert (copy.epoch, copy.features, copy.files) == (4, reader.features, reader.files)
    assert all(same(a, b) for a, b in zip(copy, reader, strict=True))
    active = iter(reader)
    with pytest.raises(TypeError, match="pass is active"):
        pickle.dumps(reader)
    del active


def _sum_ids(reader: fastpipe.Reader, out: multiprocessing.queues.Queue) -> None:  # type: ignore[name-defined]
    out.put(sum(int(b["id"].sum()) for b in reader))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_readers_in_other_processes(files: list[str], method: str) -> None:
    reader = fastpipe.read_avro(files, batch_size=8, num_threads=2)
    if method == "fork":
        # A pass with running threads. The child has none of the threads, and must neither use nor wait for them.
        active = iter(reader)
        next(active)
    context = multiprocessing.get_context(method)
    out = context.Queue()
    process = context.Process(target=_sum_ids, args=(reader, out))
    process.start()
    assert out.get(timeout=60) == sum(range(1000))
    process.join(timeout=500)
    assert process.exitcode == 0
    if method == "fork":
        assert 8 + sum(len(b["id"]) for b in active) == 1000, "the parent's pass must continue"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_pass_of_the_parent_fails_in_the_child(files: list[str]) -> None:
    batches = iter(fastpipe.read_avro(files, batch_size=1))
    kept = next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except fastpipe.FastpipeError as error:
            del kept, batches
            gc.collect()
            os._exit(0 if "another process" in str(error) else 3)
        os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert next(batches)["id"].tolist() == [1]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no os.kill with SIGINT")
def test_ctrl_c_interrupts_at_once(tmp_path: Path) -> None:
    """Interrupts the main thread while it waits for a slow batch of a single huge block."""
    schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": {"type": "array", "items": "long"}}]}
    path = tmp_path / "huge.avro"
    with path.open("wb") as file:
        fastavro.writer(file, schema, ({"x": list(range(1000))} for _ in range(20_000)), sync_interval=1 << 30)
    program = f"""
        import os, signal, sys, threading, time
        import fastpipe

        features = {{"x": fastpipe.RaggedSpec((None,), "int64")}}
        reader = fastpipe.read_avro([{str(path)!r}] * 200, features=features, batch_size=1_000_000, num_threads=1)
        batches = iter(reader)
        try:
            threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
            next(batches)
        except KeyboardInterrupt:
            print(reader.stats()["units"])
        reader.close()
        print(reader.stats()["units"])
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=500, check=False
    )
    assert ran.returncode == 0, ran.stderr
    interrupted, closed = map(int, ran.stdout.split())
    # The batch has 50 blocks. A busy machine may decode some of them before it wakes the thread.
    assert interrupted < 50
    # The block in progress may be decoded to its end, but no other block begins.
    assert closed <= interrupted + 1


PRIVATE = """
def private():  # Megabytes.
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) // 1024
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_private_memory_is_bounded(tmp_path: Path) -> None:
    """Reads 128 MB in batches of 1,024 rows. The memory that the reader holds doesn't grow with the file."""
    values = np.arange(400, dtype=np.float32).tolist()
    path = write(tmp_path / "x.avro", [{**row, "vector": values} for row in rows(0, 2000)], block=1 << 20)
    program = f"""
        import fastpipe

        before = private()
        peak = 0
        rows = 0
        for batch in fastpipe.read_avro([{path!r}] * 40, batch_size=1024):
            peak = max(peak, private())
            rows += len(batch["id"])
        print(rows, peak - before)
    """
    program = PRIVATE + textwrap.dedent(program)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    found, grown = map(int, ran.stdout.split())
    assert found == 80_000
    assert grown < 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_readers_share_memory_except_with_a_limit(tmp_path: Path) -> None:
    """Checks that 40 successive readers use as much memory as one, with few page faults, and that a limit counts from
    the start.
    """
    values = np.arange(400, dtype=np.float32).tolist()
    path = write(tmp_path / "x.avro", [{**row, "vector": values} for row in rows(0, 2000)], block=1 << 20)
    program = f"""
        import resource
        import fastpipe

        def read(**options):
            with fastpipe.read_avro([{path!r}] * 5, batch_size=512, num_threads=2, **options) as reader:
                rows = sum(len(batch["id"]) for batch in reader)
            assert rows == 10_000
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        before = private()
        faults = [read() for _ in range(40)]
        kept = private() - before
        read(memory_limit="16MB")
        print(faults[0], (faults[-1] - faults[9]) // 30, kept, private() - before)
    """
    program = PRIVATE + textwrap.dedent(program)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    first, later, kept, limited = map(int, ran.stdout.split())
    assert first > 1000 > 200 > later, ran.stdout
    assert kept < 80, ran.stdout
    assert limited < min(20, kept), ran.stdout


def test_nothing_grows_over_many_passes(files: list[str]) -> None:
    reader = fastpipe.read_avro(files, batch_size=100)
    process = psutil.Process()

    def passes(n: int) -> int:
        for _ in range(n):
            for _ in reader:
                pass
        gc.collect()
        return process.memory_info().rss

    passes(50)
    before = passes(50)
    assert passes(300) - before < 8 << 20


def test_progress(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    reader = fastpipe.read_avro(files, batch_size=300, progress=True)
    assert sum(len(b["id"]) for b in reader) == 1000
    assert "1.00k/1.00k" in capsys.readouterr().err


def test_passes_dropped_in_a_row_leak_nothing(files: list[str]) -> None:
    reader = fastpipe.read_avro(files, batch_size=16, num_threads=4, prefetch=4)
    for i in range(200):
        batches = iter(reader)
        for _ in range(i % 4):
            next(batches)
    del batches
    if sys.platform.startswith("linux"):
        assert samples.threads_are(0)


def test_container_file(files: list[str]) -> None:
    file = fastpipe.avro.AvroFile(files[0])
    assert (file.codec, file.num_records, len(file)) == ("deflate", 400, 400)
    assert file.schema["name"] == "Row"
    assert file.metadata["avro.codec"] == b"deflate"
    assert file.size == os.path.getsize(files[0])
    with open(files[0], "rb") as handle:
        blocks = list(fastavro.block_reader(handle))
    assert file.blocks["rows"].tolist() == [b.num_records for b in blocks]
    assert file.blocks["offset"].tolist() == [b.offset for b in blocks]
    data = Path(files[0]).read_bytes()
    for block in file.blocks[:3]:
        # A block consists of a header of two varints, the data and the sync marker.
        end = int(block["offset"] + block["size"])
        assert file.sync_marker in data[end + 2 : end + 8 + len(file.sync_marker)]


def test_no_signal_handlers_are_installed() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "fastpipe must not install handlers"


def test_files_that_change_between_epochs_are_refused(tmp_path: Path) -> None:
    """Checks that a reader compares the record offsets that it keeps between epochs with the data.

    This is the second line of defense. test_changed_files.py tests changes of a file's size or time.
    """
    path = tmp_path / "texts.avro"

    def write(*values: str) -> None:
        path.write_bytes(wire.container('"string"', [(len(values), b"".join(map(wire.text, values)))]))
        os.utime(path, ns=(10**18, 10**18))

    write("a", "bbb", "cc")
    reader = fastpipe.read_avro(path, batch_size=3, shuffle=True, seed=1)
    for _ in range(2):
        (batch,) = reader
        assert sorted(batch["value"].to_list()) == ["a", "bbb", "cc"]
    write("aaa", "b", "cc")
    with pytest.raises(fastpipe.errors.MalformedFileError, match=r"texts\.avro.*block 0.*record"):
        list(reader)
