"""Files of web servers and object stores, read by URL, beside the same files on disk."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import fastpipe
from every_source import ORDERS, digests
from s3_server import Bucket, serving_bucket
from web_server import Fault, Handler, WebServer, serving, stall

FILES = 3
ROWS = 400
"""Number of rows in each file."""

SCHEMA = {
    "type": "record",
    "name": "row",
    "fields": [{"name": "id", "type": "long"}, {"name": "x", "type": {"type": "array", "items": "float"}}],
}

QUICK = {"max_retries": 2, "retry_timeout": 2, "timeout": "5s", "connect_timeout": "1s"}
"""Options that let reads of failing servers end soon."""

READ = {
    "avro": fastpipe.read_avro,
    "csv": fastpipe.read_csv,
    "csv.zst": fastpipe.read_csv,
    "tfrecord": fastpipe.read_tfrecord,
}


def write(folder: Path, kind: str) -> list[str]:
    """Writes files of a format, and returns their names."""
    draw = np.random.default_rng(2)
    names = [f"part-{number}.{kind}" for number in range(FILES)]
    for number, name in enumerate(names):
        ids = np.arange(number * ROWS, (number + 1) * ROWS)
        x = draw.random((ROWS, 8), "float32")
        path = folder / name
        if kind == "avro":
            rows = [{"id": int(i), "x": list(map(float, values))} for i, values in zip(ids, x, strict=True)]
            with path.open("wb") as file:
                fastavro.writer(file, SCHEMA, rows, sync_interval=2000)
        elif kind.startswith("csv"):
            lines = [f"{i},{values[0]}\n".encode() for i, values in zip(ids, x, strict=True)]
            # Two parts, which can be read apart.
            parts = [b"id,x\n" + b"".join(lines[:100]), b"".join(lines[100:])]
            packed = map(pyarrow.compress, parts, itertools.repeat("zstd")) if kind == "csv.zst" else parts
            path.write_bytes(b"".join(map(bytes, packed)))
        else:
            fastpipe.tfrecord.write_tfrecord(path, {"id": ids, "x": x})
    return names


@pytest.fixture(scope="module", params=READ)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(kind)
    write(found, kind)
    return found


@pytest.fixture
def avro(tmp_path: Path) -> Path:
    write(tmp_path, "avro")
    return tmp_path


@pytest.fixture
def web(avro: Path) -> Iterator[WebServer]:
    with serving(avro) as server:
        yield server


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(server: WebServer, **options: Any) -> fastpipe.Reader:
    urls = [server.url(name) for name in names_in(server.folder)]
    return fastpipe.read_avro(urls, storage_options=QUICK, **{"batch_size": 32} | options)


def ids_of(reader: fastpipe.Reader) -> list[int]:
    return [int(i) for batch in reader for i in batch["id"]]


@pytest.mark.parametrize("options", ORDERS)
def test_the_batches_equal_those_of_local_files(folder: Path, kind: str, options: dict[str, Any]) -> None:
    names = names_in(folder)
    with serving(folder) as server:
        for ranks in (1, 2):
            for rank in range(ranks):
                shared = {
                    "batch_size": 30,
                    "seed": 3,
                    "rank": rank,
                    "world_size": ranks,
                    "on_uneven": "allow",
                } | options
                local = READ[kind]([folder / name for name in names], **shared)
                remote = READ[kind]([server.url(name) for name in names], **shared)
                whole = digests(local)
                assert digests(remote) == whole
                for step in (0, 7, len(remote) - 1):
                    assert digests([remote.batch_at(step, epoch=0)])[0] == whole[step]
                for stop in (1, len(whole) // 2):
                    remote.set_epoch(0)
                    for _ in itertools.islice(remote, stop):
                        pass
                    again = READ[kind]([server.url(name) for name in names], **shared)
                    again.load_state_dict(json.loads(json.dumps(remote.state_dict())))
                    assert digests(again) == whole[stop:]
        assert set(server.methods) == {"GET"}


def test_neighbors_are_read_with_one_request(web: WebServer) -> None:
    reader = read(web)
    size = sum(path.stat().st_size for path in web.folder.iterdir())
    web.reset()
    assert ids_of(reader) == list(range(FILES * ROWS))
    # The units of the first batches are requested at once, and the rest once more are known.
    assert web.requests <= 4 * FILES < len(reader)
    assert web.bytes_sent <= 1.02 * size


def test_opening_reads_each_file_once(web: WebServer) -> None:
    size = sum(path.stat().st_size for path in web.folder.iterdir())
    read(web, features={"id": fastpipe.DenseSpec((), "int64")})
    assert web.bytes_sent == size
    assert web.requests == FILES


def test_an_index_is_kept_until_its_file_changes(web: WebServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    # Files that fit in the first request need no index.
    rows = [{"id": i, "x": [float(i)] * 200} for i in range(1000)]
    for path in web.folder.iterdir():
        with path.open("wb") as file:
            fastavro.writer(file, SCHEMA, rows, sync_interval=2000)
        os.utime(path, (1e9, 1e9))
    options = {"index_cache": tmp_path_factory.mktemp("cache"), "features": {"id": fastpipe.DenseSpec((), "int64")}}
    first = read(web, **options)
    web.reset()
    second = read(web, **options)
    assert (web.requests, web.bytes_sent) == (FILES, FILES << 16)
    assert digests(second) == digests(first)
    # The same size and time, but other bytes: only the entity tag tells.
    path = web.folder / names_in(web.folder)[0]
    path.write_bytes(path.read_bytes().replace(rows_bytes(5), rows_bytes(7)))
    os.utime(path, (1e9, 1e9))
    web.reset()
    read(web, **options)
    assert web.requests > FILES


def rows_bytes(value: float) -> bytes:
    return np.full(200, value, "<f4").tobytes()


@pytest.mark.parametrize(
    "fault",
    [
        lambda handler, number: number % 3 == 1 and refused(handler, 503),
        lambda handler, number: number % 4 == 1 and refused(handler, 429),
        lambda handler, number: number % 3 == 1 and answered(handler, cut=100),
        lambda handler, number: number % 3 == 1 and dropped(handler),
    ],
    ids=["unavailable", "slow down", "cut", "dropped"],
)
def test_a_request_that_fails_is_repeated(web: WebServer, fault: Fault) -> None:
    web.fault = fault
    assert ids_of(read(web)) == list(range(FILES * ROWS))
    assert web.requests > FILES


def refused(handler: Handler, status: int) -> bool:
    handler.refuse(status)
    return True


def answered(handler: Handler, **how: int) -> bool:
    handler.respond(**how)
    return True


def dropped(handler: Handler) -> bool:
    handler.close_connection = True
    return True


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (lambda handler, _: refused(handler, 404), fastpipe.errors.MissingFileError, "no such object"),
        (lambda handler, _: refused(handler, 403), fastpipe.errors.StorageError, "denies access"),
        (lambda handler, _: refused(handler, 401), fastpipe.errors.StorageError, "credentials"),
        (lambda handler, _: refused(handler, 500), fastpipe.errors.StorageError, "can't be read"),
        (lambda handler, _: answered(handler, cut=10), fastpipe.errors.StorageError, "can't be read"),
        (lambda handler, _: answered(handler, extra=10), fastpipe.errors.StorageError, "can't be read"),
        (lambda handler, _: dropped(handler), fastpipe.errors.StorageError, "can't be read"),
    ],
    ids=["missing", "forbidden", "unauthorized", "broken", "cut", "too long", "dropped"],
)
def test_a_server_that_always_fails_is_a_typed_error(
    web: WebServer, fault: Fault, error: type[Exception], text: str
) -> None:
    web.fault = fault
    with pytest.raises(error, match=text) as caught:
        read(web)
    assert getattr(caught.value, "path", "").startswith(web.url())


def test_a_server_without_ranges_is_refused(web: WebServer) -> None:
    web.has_ranges = False
    with pytest.raises(fastpipe.errors.UnsupportedError, match="can't do this"):
        read(web)


def test_nobody_listens(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        url = server.url("a.avro")
    start = time.monotonic()
    with pytest.raises(fastpipe.errors.StorageError, match="can't be read"):
        fastpipe.read_avro(url, batch_size=1, storage_options=QUICK)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_file_that_changes_is_an_error(web: WebServer, shuffle: bool) -> None:
    reader = read(web, shuffle=shuffle, seed=1)
    path = web.folder / names_in(web.folder)[1]
    path.write_bytes(path.read_bytes()[:-5] + b"other")
    with pytest.raises(fastpipe.errors.StorageError, match="changed while it was read"):
        ids_of(reader)


def test_remote_files_are_mixed_with_others(web: WebServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("table") / "a.parquet"
    ids = pyarrow.array(range(2000, 2600))
    pyarrow.parquet.write_table(pyarrow.table({"id": ids}), path, row_group_size=50)
    found = []
    for source in ([web.url(name) for name in names_in(web.folder)], web.folder):
        options: dict[str, Any] = {"batch_size": 20, "shuffle": True, "seed": 4, "columns": ["id"]}
        avro, table = fastpipe.read_avro(source, **options), fastpipe.read_parquet(path, **options)
        found.append(digests(fastpipe.mix({"a": avro, "b": table}, {"a": 2, "b": 1}, seed=1)))
    assert found[0] == found[1]


def test_empty_files(web: WebServer) -> None:
    (web.folder / "empty.avro").write_bytes(b"")
    with pytest.raises(fastpipe.errors.MalformedFileError):
        fastpipe.read_avro(web.url("empty.avro"), batch_size=1)


def test_a_damaged_file_has_its_place(web: WebServer) -> None:
    path = web.folder / names_in(web.folder)[0]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(fastpipe.errors.MalformedFileError) as caught:
        read(web)
    assert caught.value.path == web.url(path.name)


@pytest.mark.timeout(60)
def test_a_stalled_request_gets_a_competitor(web: WebServer) -> None:
    reader = read(web)
    # A busy machine may use a part of the limit.
    for step in range(160):
        reader.batch_at(step % len(reader))
    web.reset().fault = stall(20, 0)
    start = time.monotonic()
    assert list(reader.batch_at(0)["id"]) == list(range(32))
    assert web.requests >= 2
    assert time.monotonic() - start < 15


@pytest.mark.timeout(60)
def test_leaving_early_cancels_requests(web: WebServer) -> None:
    reader = read(web, batch_size=8)
    web.fault = lambda handler, number: time.sleep(0.01) or (number > 3 and time.sleep(20) is not None)
    web.reset()
    start = time.monotonic()
    for _ in itertools.islice(reader, 2):
        pass
    reader.close()
    assert time.monotonic() - start < 10


@pytest.mark.timeout(120)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_opening_is_interrupted(web: WebServer) -> None:
    web.fault = stall(60, *range(1000))
    program = textwrap.dedent(f"""
        import os, signal, threading, time
        import fastpipe
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            fastpipe.read_avro("{web.url("part-0.avro")}", batch_size=1)
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - start < 20)
            os._exit(0)
    """)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert found.stdout.strip() == "interrupted True", found.stderr


def test_readers_are_pickled_and_forked(web: WebServer) -> None:
    reader = read(web, shuffle=True, seed=2)
    whole = digests(reader)
    reader.set_epoch(0)
    assert digests(pickle.loads(pickle.dumps(reader))) == whole
    if hasattr(os, "fork"):
        reader.set_epoch(0)
        child = os.fork()
        if not child:
            os._exit(0 if digests(reader) == whole else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("hdfs://host/a.avro", "hdfs"),
        ("http://127.0.0.1:1/*.avro", "name each file"),
        ("http://127.0.0.1:1/folder/", "no list of its files"),
        ("http://me:SECRET@127.0.0.1:1/a.avro", "password"),
        ("http://127.0.0.1:1/a.avro?sig=SECRET", "query"),
    ],
)
def test_what_is_not_supported_says_so(url: str, text: str) -> None:
    with pytest.raises(fastpipe.errors.UnsupportedError, match=text) as caught:
        fastpipe.read_avro(url, batch_size=1)
    assert "SECRET" not in str(caught.value)


def test_options_are_checked_and_secret() -> None:
    url = "s3://bucket/a.avro"
    with pytest.raises(TypeError, match="mapping"):
        fastpipe.read_avro(url, batch_size=1, storage_options="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'key'") as caught:
        fastpipe.read_avro(url, batch_size=1, storage_options={"key": b"SECRET"})
    assert "SECRET" not in str(caught.value)
    with pytest.raises(fastpipe.errors.UnsupportedError, match='"nonsense"'):
        fastpipe.read_avro(url, batch_size=1, storage_options={"nonsense": 1, "secret": "SECRET"})


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with serving_bucket() as found:
        yield found


def test_objects_are_found_as_files_are(bucket: Bucket, tmp_path: Path) -> None:
    write(tmp_path, "avro")
    keys = ["a/x=1/part-0.avro", "a/x=2/deep/part-1.avro", "a/part 2%.avro", "a/_temporary/part-3.avro", "a/n.txt"]
    sources = [*names_in(tmp_path), "part-0.avro", "part-0.avro"]
    for key, name in zip(keys, sources, strict=True):
        target = tmp_path / "disk" / key
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / name, target)
        bucket.put(key, target.read_bytes())
    bucket.put("a/empty.avro", b"")
    (tmp_path / "disk/a/empty.avro").write_bytes(b"")
    patterns = ["a", "a/", "a/*.avro", "a/**/*.avro", "a/x=[12]/*.avro", "a/{x=2/deep,x=1}/part-?.avro", "a/**"]
    patterns += ["a/x=1/part-0.avro", "a/_temporary/*", "a/part 2*.avro", "a/x=[!1]/**"]
    for pattern in patterns:
        options: dict[str, Any] = {"batch_size": 50, "columns": ["id"], "partitioning": None}
        if pattern == "a/**":
            pattern = "a/**/part*.avro"
        local = fastpipe.read_avro(f"{tmp_path}/disk/{pattern}", **options)
        remote = fastpipe.read_avro(f"s3://data/{pattern}", storage_options=bucket.options, **options)
        assert digests(remote) == digests(local), pattern
    hive = fastpipe.read_avro("s3://data/a/x=*/**", batch_size=10, storage_options=bucket.options)
    assert "x" in hive.features
    for pattern in ("b", "a/*.parquet", "a/x=3/"):
        with pytest.raises(fastpipe.errors.MissingFileError):
            fastpipe.read_avro(f"s3://data/{pattern}", storage_options=bucket.options, batch_size=1)
    assert "HIDDEN-KEY" not in repr(hive) + str(hive.explain()) + json.dumps(hive.state_dict())


def test_objects_are_read_in_pages(bucket: Bucket) -> None:
    for number in range(1001):
        bucket.put(f"many/{number:04}.csv", f"id\n{number}\n".encode())
    reader = fastpipe.read_csv("s3://data/many/*00.csv", batch_size=100, storage_options=bucket.options)
    assert ids_of(reader) == list(range(0, 1001, 100))


def test_an_object_that_changes_is_an_error(bucket: Bucket, tmp_path: Path) -> None:
    write(tmp_path, "avro")
    contents = (tmp_path / "part-0.avro").read_bytes()
    bucket.put("changed/a.avro", contents)
    reader = fastpipe.read_avro("s3://data/changed/", batch_size=8, storage_options=bucket.options)
    bucket.put("changed/a.avro", contents[:-1] + b"x")
    with pytest.raises(fastpipe.errors.StorageError, match="changed while it was read"):
        ids_of(reader)
    with pytest.raises(fastpipe.errors.StorageError) as caught:
        fastpipe.read_avro("s3://elsewhere/", batch_size=8, storage_options=bucket.options | QUICK)
    assert "HIDDEN-KEY" not in str(caught.value)
