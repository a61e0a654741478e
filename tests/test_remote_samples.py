"""Samples of CSV files by URL, in arrays and on devices: the rows that the same files on a disk have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

import fastpipe
import fastpipe.cuda
from fastpipe._fastpipe import RemoteFile
from s3_server import Bucket, serving_bucket
from web_server import Fault, Handler, WebServer, serving

FILES, ROWS = 2, 20_000
"""Number of files, and of rows in each file."""

QUICK = {"max_retries": 2, "retry_timeout": 2, "timeout": "5s", "connect_timeout": "1s"}
"""Options that let reads of failing servers end soon."""

METHODS: list[dict[str, Any]] = [
    {"rows": 700},
    {"rows": 700, "part": 2},
    {"fraction": 0.02},
    {"rows": 700, "replace": True},
    {"rows": 700, "stratify": "group"},
    {"rows": 700, "weights": "w"},
    {"rows": 700, "method": "block"},
    {"rows": 5_000, "method": "buffered"},
    {"rows": 100, "method": "buffered"},
    {"rows": 700, "method": "buffered", "share": 0.02},
]
methods = pytest.mark.parametrize("method", METHODS, ids=str)


def write(folder: Path) -> None:
    """Writes files with rows of very different lengths. The last line lacks its newline."""
    for number in range(FILES):
        draw = np.random.default_rng(number)
        ids = range(number * ROWS, (number + 1) * ROWS)
        lengths = np.where(draw.random(ROWS) < 0.1, 20, 1) * draw.integers(1, 9, ROWS)
        lines = [f'{i},{i % 7},{1 + i % 3},"{"x," * n}"' for i, n in zip(ids, lengths, strict=True)]
        (folder / f"{number}.csv").write_text("\n".join(["id,group,w,pad", *lines]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("csv")
    write(found)
    return found


@pytest.fixture
def web(folder: Path) -> Iterator[WebServer]:
    with serving(folder) as found:
        yield found


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Iterator[WebServer]:
    """Serves files that a test changes."""
    served = tmp_path / "served"
    served.mkdir()
    for path in folder.iterdir():
        (served / path.name).write_bytes(path.read_bytes())
    with serving(served) as found:
        yield found


@pytest.fixture(scope="module")
def bucket(folder: Path) -> Iterator[Bucket]:
    with serving_bucket() as found:
        for path in folder.iterdir():
            found.put(f"rides/{path.name}", path.read_bytes())
        yield found


def urls(server: WebServer) -> list[str]:
    return [server.url(f"{number}.csv") for number in range(FILES)]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def sample(source: Any, **options: Any) -> fastpipe.csv.CsvSample:
    return fastpipe.csv.sample_csv(source, **{"columns": ["id", "group"], "dtype": "int64", "seed": 3} | options)


def assert_same(found: fastpipe.csv.CsvSample, expected: fastpipe.csv.CsvSample) -> None:
    for name in ("values", "rows", "design_effect", "offsets", "files"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    assert (found.columns, found.seed, found.estimate) == (expected.columns, expected.seed, expected.estimate)


@methods
def test_samples_equal_those_of_local_files(web: WebServer, folder: Path, method: dict[str, Any]) -> None:
    expected = sample(folder, **method)
    assert expected.values.any()
    assert_same(sample(urls(web), **method), expected)
    assert set(web.methods) == {"GET"}


@methods
def test_samples_of_an_object_store(bucket: Bucket, folder: Path, method: dict[str, Any]) -> None:
    expected = sample(folder, **method)
    for source in ("s3://data/rides/", "s3://data/rides/*.csv"):
        assert_same(sample(source, storage_options=bucket.options, **method), expected)


def test_the_environment_says_how_to_reach_a_store(
    bucket: Bucket, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    assert_same(sample("s3://data/rides", rows=50), sample(folder, rows=50))


def test_remote_and_local_files_are_mixed(web: WebServer, folder: Path) -> None:
    for method in ({"rows": 700}, {"rows": 700, "method": "buffered"}):
        assert_same(sample([folder / "0.csv", web.url("1.csv")], **method), sample(folder, **method))


def test_compressed_files(folder: Path, tmp_path: Path) -> None:
    text = (folder / "0.csv").read_bytes()
    half = text.index(b"\n", len(text) // 2) + 1
    parts = [bytes(pyarrow.compress(part, "zstd")) for part in (text[:half], text[half:])]
    (tmp_path / "0.csv.zst").write_bytes(b"".join(parts))
    with serving(tmp_path) as server:
        assert_same(sample(server.url("0.csv.zst"), rows=300), sample(folder / "0.csv", rows=300))
        with pytest.raises(fastpipe.errors.UnsupportedError, match="compressed"):
            sample(server.url("0.csv.zst"), rows=300, method="buffered")


def test_an_index_saves_the_scan(copy: WebServer, tmp_path: Path) -> None:
    for path in copy.folder.iterdir():
        os.utime(path, (1.6e9, 1.6e9))
    options: dict[str, Any] = {"rows": 20, "index_cache": tmp_path / "cache"}
    first = sample(urls(copy), **options)
    copy.reset()
    assert_same(sample(urls(copy), **options), first)
    assert copy.bytes_sent < 0.8 * size(copy.folder)


def test_a_block_cache_saves_requests(web: WebServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options: dict[str, Any] = {"rows": 700, "block_cache": (cache, "100MB")}
    kept = RemoteFile.open(web.url("0.csv"), [], (str(cache), 100_000_000))
    first = sample(urls(web), **options)
    kept.wait_for_cache()
    web.reset()
    assert_same(sample(urls(web), **options), first)
    # Opening a file takes a request.
    assert (web.requests, web.bytes_sent) == (FILES, FILES << 16)


def test_a_buffered_sample_reads_a_part_of_a_large_file(tmp_path: Path) -> None:
    lines = "".join(f"{i},{i % 10},{'x' * (i % 90)}\n" for i in range(400_000))
    (tmp_path / "0.csv").write_text("id,group,pad\n" + lines)
    with serving(tmp_path) as server:
        found = sample(server.url("0.csv"), rows=64, method="buffered")
        assert len(set(found.values[:, 0])) == 64
        assert server.bytes_sent < 0.4 * size(tmp_path)
        assert server.requests < 1000


def test_ranges_are_requested_at_the_same_time(web: WebServer) -> None:
    # Eight requests wait for each other. Three requests open a file: for its beginning, its end and its last byte.
    together = threading.Barrier(8)
    first = 3 * FILES

    def fault(handler: Handler, number: int) -> bool:
        if first <= number < first + 8:
            together.wait(60)
        return False

    web.fault = fault
    sample(urls(web), rows=100, method="buffered", num_threads=1)
    assert not together.broken
    assert web.requests > first + 8


# --- Faults of servers ---


def dropped(handler: Handler, number: int) -> bool:
    if number >= FILES:
        handler.close_connection = True
    return number >= FILES


def cut(handler: Handler, number: int) -> bool:
    if number >= FILES:
        handler.respond(cut=1)
    return number >= FILES


def changed(handler: Handler, number: int) -> bool:
    if number == FILES:
        for path in handler.server.folder.iterdir():
            path.write_bytes(path.read_bytes()[:-1] + b"'")
    return False


faults = pytest.mark.parametrize(
    ("fault", "text"),
    [(dropped, "can't be read"), (cut, "can't be read"), (changed, "changed while it was read")],
    ids=["dropped", "cut", "changed"],
)


@faults
@pytest.mark.parametrize("method", ["exact", "block", "buffered"])
def test_faults_of_a_server_are_typed_errors(copy: WebServer, method: Any, fault: Fault, text: str) -> None:
    copy.fault = fault
    with pytest.raises(fastpipe.errors.StorageError, match=text) as caught:
        sample(urls(copy), rows=700, method=method, storage_options=QUICK)
    assert caught.value.path in urls(copy)


@pytest.mark.parametrize("method", ["exact", "block", "buffered"])
def test_a_missing_object_is_a_typed_error(web: WebServer, bucket: Bucket, method: Any) -> None:
    with pytest.raises(fastpipe.errors.MissingFileError, match=r"none\.csv"):
        sample(web.url("none.csv"), rows=5, method=method)
    with pytest.raises(fastpipe.errors.MissingFileError, match="none"):
        sample("s3://data/none/*.csv", rows=5, method=method, storage_options=bucket.options)


def test_methods_that_read_no_urls_say_what_to_do(web: WebServer) -> None:
    for method, hint in (("estimate", 'use method="buffered"'), ("stream", "pass a file object")):
        with pytest.raises(fastpipe.errors.UnsupportedError, match=hint) as caught:
            sample(web.url("0.csv"), rows=5, method=method)
        assert caught.value.path == web.url("0.csv")


def test_storage_options_are_checked(web: WebServer) -> None:
    for call in (sample, fill):
        with pytest.raises(TypeError, match="storage_options must be a mapping"):
            call(web.url("0.csv"), rows=5, storage_options="key")
        with pytest.raises(TypeError, match="block_cache must be a pair"):
            call(web.url("0.csv"), rows=5, block_cache="folder")


# --- Devices ---


def fill(source: Any, **options: Any) -> fastpipe.cuda.Fill:
    options = {"rows": [300, 500], "seed": 5, "memory_limit": "64MB", "columns": ["id", "group"]} | options
    if not isinstance(options["rows"], list):
        options["rows"] = [options["rows"]] * 2
    return fastpipe.cuda.fill(source, ["cpu", "cpu"], dtype="int64", **options)


fills = pytest.mark.parametrize(
    "options",
    [{}, {"method": "block"}, {"method": "block", "share": 0.5}, {"method": "buffered"}, {"order": "F"}],
    ids=str,
)


@fills
def test_devices_hold_the_rows_of_local_files(
    web: WebServer, bucket: Bucket, folder: Path, options: dict[str, Any]
) -> None:
    local = fill(folder, **options)
    remote = [fill(urls(web), **options), fill("s3://data/rides", storage_options=bucket.options, **options)]
    for refill in range(3):
        for filled in remote:
            assert filled.num_rows == local.num_rows
            assert filled.estimate == local.estimate
            for found, expected in zip(filled, local, strict=True):
                np.testing.assert_array_equal(found.values, expected.values)
        if refill < 2:
            for filled in (local, *remote):
                filled.refill()


def test_options_of_files_are_refused_for_readers(web: WebServer) -> None:
    with fastpipe.read_csv(urls(web), columns=["id", "group"], batch_size=10) as reader:
        for name, value in {"storage_options": {}, "block_cache": ("cache", "1GB")}.items():
            with pytest.raises(ValueError, match="set them when you create the reader"):
                fill(reader, **{name: value})


@faults
@fills
def test_a_refill_that_fails_is_a_typed_error(
    copy: WebServer, fault: Fault, text: str, options: dict[str, Any]
) -> None:
    filled = fill(urls(copy), storage_options=QUICK, **options)
    copy.reset().fault = lambda handler, number: fault(handler, number + FILES)
    with pytest.raises(fastpipe.errors.StorageError, match=text):
        filled.refill()


def test_a_refill_after_an_error_has_its_own_rows(web: WebServer, folder: Path) -> None:
    """The rows of a refill don't depend on how far the refill before it came."""
    local = fill(folder, method="buffered")
    local.refill()
    local.refill()
    for served in (0, 3, 9):
        web.fault = None
        filled = fill(urls(web), method="buffered", storage_options=QUICK)

        def fault(handler: Handler, number: int, served: int = served) -> bool:
            return number >= served and dropped(handler, number + FILES)

        web.reset().fault = fault
        with pytest.raises(fastpipe.errors.StorageError):
            filled.refill()
        web.fault = None
        filled.refill()
        assert filled.refills == 2
        for found, expected in zip(filled, local, strict=True):
            np.testing.assert_array_equal(found.values, expected.values)


SAMPLE = 'fastpipe.csv.sample_csv(url, rows=300, columns=["id"], method={method!r})'
FILL = 'fastpipe.cuda.fill(url, ["cpu"], rows=300, columns=["id"], method={method!r}, memory_limit="64MB")'


@pytest.mark.timeout(120)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize(
    ("call", "method"),
    [
        (SAMPLE, "exact"),
        (SAMPLE, "buffered"),
        (FILL, "exact"),
        (FILL, "buffered"),
    ],
    ids=str,
)
def test_ctrl_c_ends_a_call_that_waits_for_a_server(web: WebServer, call: str, method: str) -> None:
    waits, ends = threading.Event(), threading.Event()

    def fault(handler: Handler, number: int) -> bool:
        # The first request of a sample opens the file.
        if number >= 1:
            waits.set()
            ends.wait(100)
        return False

    program = textwrap.dedent("""
        import sys
        import fastpipe.cuda
        url = sys.argv[1]
        print("ready", flush=True)
        input()
        try:
            CALL
        except KeyboardInterrupt:
            sys.exit(7)
    """)
    program = program.replace("CALL", call.format(method=method))
    command = [sys.executable, "-c", program, web.url("0.csv")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            web.reset().fault = fault
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert waits.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.wait(25) == 7
        finally:
            process.kill()
            ends.set()
