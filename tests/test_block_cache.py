"""Files of a web server that are read through a block cache on a local disk."""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

import fastpipe
from every_source import ORDERS, digests
from fastpipe._fastpipe import RemoteFile
from web_server import WebServer, serving

KILLS = int(os.environ.get("FASTPIPE_CACHE_KILLS", "10"))
FILES = 3
ROWS = 600
"""Number of rows in each file."""

SCHEMA = {"type": "record", "name": "row", "fields": [{"name": "id", "type": "long"}, {"name": "x", "type": "bytes"}]}


def write(folder: Path, size: int = 1747) -> None:
    """Writes rows of `size` bytes that can't be compressed, by default 3 MiB, in blocks of about 30 KiB."""
    draw = np.random.default_rng(3)
    for number in range(FILES):
        rows = [{"id": i, "x": draw.bytes(size)} for i in range(number * ROWS, (number + 1) * ROWS)]
        with (folder / f"part-{number}.avro").open("wb") as file:
            fastavro.writer(file, SCHEMA, rows, sync_interval=30_000)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder)
    return folder


@pytest.fixture
def web(data: Path) -> Iterator[WebServer]:
    with serving(data) as server:
        yield server


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """Serves files of 12 MiB. A request of several blocks is a small part of them."""
    folder = tmp_path_factory.mktemp("large")
    write(folder, 7000)
    with serving(folder) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def urls(server: WebServer) -> list[str]:
    return [server.url(f"part-{number}.avro") for number in range(FILES)]


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def used(cache: Path) -> int:
    """Returns the bytes that a cache takes on the disk."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in cache.iterdir())


def read(server: WebServer, cache: Path, size: int | str = "10MB", **options: Any) -> fastpipe.Reader:
    return fastpipe.read_avro(urls(server), block_cache=(cache, size), **{"batch_size": 50} | options)


def opened(server: WebServer, cache: Path, size: int = 10_000_000) -> RemoteFile:
    """Opens a file, which keeps the cache open and counts its bytes."""
    return RemoteFile.open(urls(server)[0], [], (str(cache), size))


def stored(server: WebServer, cache: Path, size: int = 10_000_000) -> None:
    """Waits until the cache has stored what this process has read."""
    opened(server, cache, size).wait_for_cache()


def ids_of(reader: fastpipe.Reader) -> list[int]:
    return [int(i) for batch in reader for i in batch["id"]]


@pytest.mark.parametrize("options", ORDERS)
def test_the_batches_equal_those_of_local_files(
    data: Path, web: WebServer, cache: Path, options: dict[str, Any]
) -> None:
    shared = {"batch_size": 30, "seed": 3} | options
    local = fastpipe.read_avro(data, **shared)
    remote = read(web, cache, "1.5MB", **shared)
    for epoch in range(3):
        assert digests(remote) == digests(local)
        stored(web, cache, 1_500_000)
        step = epoch * 7
        assert digests([remote.batch_at(step, epoch=epoch)]) == digests([local.batch_at(step, epoch=epoch)])
        assert used(cache) <= 1_500_000


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("is_opened", [False, True], ids=["filled by reading", "filled by opening"])
def test_half_of_an_epoch_comes_from_half_of_the_data(
    large: WebServer, cache: Path, tmp_path: Path, shuffle: bool, is_opened: bool
) -> None:
    web, size = large, total(large.folder)
    options: dict[str, Any] = {"index_cache": tmp_path / "index", "shuffle": shuffle, "seed": 1}
    # Inference would read the data.
    options["features"] = {"id": fastpipe.DenseSpec((), "int64")}
    if not is_opened:
        read(web, tmp_path / "other", **options).close()
    reader = read(web, cache, size // 2, **options)
    file = opened(web, cache, size // 2)
    file.wait_for_cache()
    for epoch in range(3):
        before = file.cache_counts
        assert sorted(ids_of(reader)) == list(range(FILES * ROWS))
        file.wait_for_cache()
        cached, fetched = np.subtract(file.cache_counts, before)
        assert used(cache) <= size // 2
        # Shuffled requests for neighbors include the gaps between them.
        assert shuffle or cached + fetched <= 1.02 * size
        if epoch or is_opened:
            assert cached >= 0.49 * size
    counts = reader.stats()["block_cache"]
    assert (counts["bytes_cached"], counts["bytes_fetched"]) == file.cache_counts


def test_a_whole_cache_needs_no_storage(web: WebServer, cache: Path) -> None:
    reader = read(web, cache)
    for _ in range(2):
        stored(web, cache)
        web.reset()
        assert ids_of(reader) == list(range(FILES * ROWS))
    assert web.requests == 0


def program(server: WebServer, cache: Path, body: str) -> list[str]:
    """Returns a command that reads through the cache in another process."""
    start = f"""
        import os, sys, time, fastpipe
        from fastpipe._fastpipe import RemoteFile
        urls, cache = {urls(server)!r}, ({str(cache)!r}, 10_000_000)
        def ids():
            reader = fastpipe.read_avro(urls, batch_size=50, block_cache=cache)
            return [int(i) for batch in reader for i in batch["id"]]
    """
    return [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(body)]


def test_processes_share_a_cache(web: WebServer, cache: Path) -> None:
    body = f"assert ids() == list(range({FILES * ROWS})); RemoteFile.open(urls[0], [], cache).wait_for_cache()"
    programs = [subprocess.Popen(program(web, cache, body)) for _ in range(2)]
    assert [process.wait(120) for process in programs] == [0, 0]
    assert used(cache) <= 1.02 * total(web.folder) + 5 * 4096
    web.reset()
    assert ids_of(read(web, cache)) == list(range(FILES * ROWS))
    # Opening a file always asks the server for its version.
    assert (web.requests, web.bytes_sent) == (FILES, FILES << 16)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_readers_are_pickled_and_forked(web: WebServer, cache: Path) -> None:
    reader = read(web, cache)
    assert ids_of(reader) == list(range(FILES * ROWS))
    stored(web, cache)
    web.reset()
    assert ids_of(pickle.loads(pickle.dumps(reader))) == list(range(FILES * ROWS))
    child = os.fork()
    if not child:
        reader.set_epoch(0)
        os._exit(0 if ids_of(reader) == list(range(FILES * ROWS)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert web.requests == 0


@pytest.mark.timeout(60 + 5 * KILLS)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be killed like this")
def test_a_killed_process_leaves_a_usable_cache(data: Path, tmp_path: Path) -> None:
    """The child of a program is killed at a random point; importing fastpipe for each would take too long."""
    draw, size = random.Random(5), 2_000_000
    cache = tmp_path / "cache"
    with serving(data) as web:
        body = f"""
            cache = (cache[0], {size})
            for line in sys.stdin:
                child = os.fork()
                if not child:
                    for _ in range(1000):
                        assert ids() == list(range({FILES * ROWS}))
                time.sleep(float(line))
                os.kill(child, 9)
                status = os.waitpid(child, 0)[1]
                print(os.waitstatus_to_exitcode(status), flush=True)
        """
        server = subprocess.Popen(program(web, cache, body), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            for run in range(KILLS):
                print(draw.uniform(0, 0.5), file=server.stdin, flush=True)
                assert int(server.stdout.readline()) == -signal.SIGKILL
                if not cache.exists():
                    continue
                assert used(cache) <= size
                if run % 5 == 4:
                    # Every fifth time, the cache begins again, so that it is often being filled.
                    for path in cache.glob("*.blocks"):
                        path.unlink()
        finally:
            server.communicate(timeout=60)
        file = opened(web, cache, size)
        reader = read(web, cache, size)
        for _ in range(3):
            before = file.cache_counts
            assert ids_of(reader) == list(range(FILES * ROWS))
            file.wait_for_cache()
        cached, _ = np.subtract(file.cache_counts, before)
        assert used(cache) <= size
        assert cached >= 0.9 * size


@pytest.mark.parametrize("damage", ["cut", "zeros", "garbage", "gone"])
def test_damaged_files_are_read_from_the_storage(web: WebServer, cache: Path, damage: str) -> None:
    reader = read(web, cache)
    stored(web, cache)
    for path in cache.glob("*.blocks"):
        contents = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
            continue
        half = len(contents) // 2
        if damage == "cut":
            del contents[half:]
        else:
            contents[half:] = bytes(half) if damage == "zeros" else np.random.default_rng(1).bytes(half)
        path.write_bytes(contents)
    web.reset()
    assert ids_of(reader) == list(range(FILES * ROWS))
    assert web.bytes_sent >= 0.4 * total(web.folder)
    for _ in range(2):
        stored(web, cache)
        web.reset()
        assert ids_of(reader) == list(range(FILES * ROWS))
    assert web.requests == 0


def test_another_version_is_another_object(tmp_path: Path) -> None:
    write(tmp_path)
    cache = tmp_path / "cache"
    with serving(tmp_path) as web:
        assert ids_of(read(web, cache)) == list(range(FILES * ROWS))
        stored(web, cache)
        path = tmp_path / "part-1.avro"
        rows = [{"id": -i, "x": b"y" * 1747} for i in range(ROWS)]
        with path.open("wb") as file:
            fastavro.writer(file, SCHEMA, rows, sync_interval=30_000)
        expected = [*range(ROWS), *(-i for i in range(ROWS)), *range(2 * ROWS, 3 * ROWS)]
        assert ids_of(read(web, cache)) == expected
        stored(web, cache)
        assert len(list(cache.glob("*.blocks"))) == FILES


def test_files_without_versions_are_read_with_a_warning(
    web: WebServer, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    web.has_tags = False  # type: ignore[misc]
    with caplog.at_level(logging.WARNING, "fastpipe"):
        reader = read(web, cache)
    assert ids_of(reader) == list(range(FILES * ROWS))
    assert [record for record in caplog.messages if "ETag" in record] == [caplog.messages[0]]
    assert not list(cache.glob("*.blocks"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
@pytest.mark.parametrize("fault", ["folder removed", "disk full", "not writable"])
def test_a_cache_that_fails_warns_once(web: WebServer, cache: Path, fault: str) -> None:
    body = {
        "folder removed": "import shutil; ids(); shutil.rmtree(cache[0])",
        "disk full": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))",
        "not writable": """
            RemoteFile.open(urls[0], [], cache)
            kept = RemoteFile.open(urls[0], [], cache)
            path = os.path.join(cache[0], "fastpipe-blocks.lock")
            os.unlink(path); os.mkdir(path)
        """,
    }[fault]
    body = textwrap.dedent(body) + textwrap.dedent(f"""
        for _ in range(3):
            assert ids() == list(range({FILES * ROWS}))
    """)
    if fault == "folder removed":
        # One reader stays open, so the folder isn't created again.
        body = body.replace("ids(); ", "kept = RemoteFile.open(urls[0], [], cache); ids(); kept.wait_for_cache(); ", 1)
    body += "RemoteFile.open(urls[0], [], cache).wait_for_cache()\n"
    found = subprocess.run(program(web, cache, body), capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("block cache") == 1, found.stderr
    if fault == "disk full":
        assert all(path.stat().st_size <= 100_000 for path in cache.iterdir())


def test_a_folder_that_is_unusable_is_an_error(web: WebServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in ("file", "missing/below"):
        web.reset()
        with pytest.raises(fastpipe.errors.StorageError, match="block cache") as caught:
            read(web, tmp_path / folder)
        assert caught.value.path == str(tmp_path / folder)
        assert web.requests == 0


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("/nvme", TypeError, "must be a pair"),
        (("/nvme",), TypeError, "must be a pair"),
        ((1, "1GB"), TypeError, "must be a path"),
        (("/nvme", 1.5), TypeError, "whole number"),
        (("/nvme", "much"), ValueError, "number of bytes"),
        (("/nvme", 4096), ValueError, "at least 1MiB"),
        (("", "1GB"), ValueError, "local disk"),
        (("s3://bucket/cache", "1GB"), ValueError, "local disk"),
    ],
)
def test_arguments_are_checked(data: Path, value: Any, error: type[Exception], text: str) -> None:
    for function in (fastpipe.read_avro, fastpipe.read_csv, fastpipe.read_tfrecord):
        with pytest.raises(error, match=text):
            function(data, batch_size=1, block_cache=value)
    with pytest.raises(error, match=text):
        fastpipe.infer_features(data, block_cache=value)


def test_local_files_ignore_the_cache(data: Path, cache: Path) -> None:
    reader = fastpipe.read_avro(data, batch_size=50, block_cache=(cache, "1GB"))
    assert ids_of(reader) == list(range(FILES * ROWS))
    assert not cache.exists()
    assert "block_cache" not in reader.stats()


def test_features_are_inferred_through_the_cache(web: WebServer, cache: Path) -> None:
    assert set(fastpipe.infer_features(urls(web), block_cache=(cache, "10MB"))) == {"id", "x"}
    assert list(cache.glob("*.blocks"))


def test_writes_do_not_delay_a_reader(web: WebServer, cache: Path) -> None:
    """While another program has the lock, reading goes on, and bytes are left out."""
    fcntl = pytest.importorskip("fcntl")
    kept = RemoteFile.open(urls(web)[0], [], (str(cache), 10_000_000))
    with (cache / "fastpipe-blocks.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        assert ids_of(read(web, cache)) == list(range(FILES * ROWS))
        assert time.monotonic() - start < 60
        assert not list(cache.glob("*.blocks"))
    assert ids_of(read(web, cache)) == list(range(FILES * ROWS))
    kept.wait_for_cache()
    assert list(cache.glob("*.blocks"))
