"""`AvroFile`, `fastpipe index`, `convert` and other commands by URL: the same output as for local files."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import fastpipe
import samples
from every_source import digests
from fastpipe.avro import AvroFile
from fastpipe.cli import _convert, _formats, main
from s3_server import Bucket, serving_bucket
from web_server import Fault, Handler, WebServer, serving

FILES, ROWS = 3, 4000
"""Number of files, and of rows in each file."""

READ = {"avro": fastpipe.read_avro, "tfrecord": fastpipe.read_tfrecord, "csv": fastpipe.read_csv}
QUICK = {"max_retries": 2, "retry_timeout": 2, "timeout": "5s", "connect_timeout": "1s"}
"""Options that let reads of failing servers end soon."""

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "x", "type": {"type": "fixed", "name": "x", "size": 40}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}


def table(number: int) -> pa.Table:
    """Returns the rows of a file. They can't be compressed well."""
    draw = np.random.default_rng(number)
    ids = np.arange(number * ROWS, (number + 1) * ROWS)
    return pa.table({"id": ids, "x": draw.random(ROWS), "text": [draw.bytes(20).hex() for _ in ids]})


def write(path: Path, number: int) -> None:
    """Writes a file with more bytes than the first request asks for."""
    if path.suffix == ".avro":
        draw = np.random.default_rng(number)
        rows = [{"id": number * ROWS + i, "x": draw.bytes(40), "at": i} for i in range(ROWS)]
        with path.open("wb") as file:
            fastavro.writer(file, SCHEMA, rows, sync_interval=4000)
    elif path.suffix == ".csv":
        columns = table(number).to_pydict()
        lines = (",".join(map(str, row)) for row in zip(*columns.values(), strict=True))
        path.write_text("\n".join([",".join(columns), *lines, ""]))
    else:
        fastpipe.tfrecord.write_tfrecord(path, table(number))
    # Files that were modified a moment ago have no index.
    os.utime(path, (1.6e9, 1.6e9))


@pytest.fixture(scope="module", params=READ)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with files of one format. It has the name of the format."""
    found = tmp_path_factory.mktemp("data") / request.param
    found.mkdir()
    for number in range(FILES):
        write(found / f"part-{number}.{request.param}", number)
    return found


@pytest.fixture
def web(folder: Path) -> Iterator[WebServer]:
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with serving_bucket() as found:
        yield found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands that read failing servers end soon."""
    expander = _formats.expander
    for module in (_formats, _convert):
        monkeypatch.setattr(module, "expander", lambda options: expander(QUICK))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def data(tmp_path: Path) -> samples.Data:
    return samples.write(tmp_path, [samples.blocks_of(100), samples.blocks_of(57)])


@pytest.fixture
def server(data: samples.Data) -> Iterator[WebServer]:
    with serving(Path(data.paths[0]).parent) as found:
        yield found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_avro_file_reads_urls(data: samples.Data, server: WebServer) -> None:
    (local,) = map(AvroFile, data.paths[:1])
    remote = AvroFile(server.url(Path(local.path).name))
    assert remote.path.startswith("http://")
    for name in ("schema", "codec", "metadata", "sync_marker", "size", "num_records"):
        assert getattr(remote, name) == getattr(local, name)
    assert np.array_equal(remote.blocks, local.blocks)
    assert remote.sample_uncompressed(2) == local.sample_uncompressed(2)
    with pytest.raises(fastpipe.errors.MissingFileError):
        AvroFile(server.url("none.avro"))
    with pytest.raises(TypeError, match="storage_options must be a mapping"):
        AvroFile(local.path, storage_options="key")  # type: ignore[arg-type]


def test_commands_read_urls(data: samples.Data, server: WebServer, capsys: pytest.CaptureFixture[str]) -> None:
    urls = [server.url(Path(path).name) for path in data.paths]
    assert printed(capsys, "head", urls[0]) == printed(capsys, "head", data.paths[0])
    there, here = (json.loads(printed(capsys, "inspect", "--json", *files)) for files in (urls, data.paths))
    assert [file.pop("path") for file in there["files"]] == urls
    assert [file.pop("path") for file in here["files"]] == data.paths
    assert there == here
    assert urls[1].rpartition("/")[2] in printed(capsys, "inspect", *urls)


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 1) -> str:
    assert main(list(map(str, arguments))) == code
    return capsys.readouterr().err


def test_commands_say_why_a_url_cannot_be_read(server: WebServer, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["head"], ["index"], ["convert", "--to", "avro"]):
        out = ["out"] if command[0] == "convert" else []
        assert "none.avro" in refused(capsys, *command, server.url("none.avro"), *out)


# --- Faults of servers, with the text of the error that they cause ---


def dropped(handler: Handler, number: int) -> bool:
    """Closes each connection after the requests that open the files."""
    if number < FILES:
        return False
    handler.close_connection = True
    return True


def cut(handler: Handler, number: int) -> bool:
    """Sends only a part of each response after the requests that open the files."""
    if number >= FILES:
        handler.respond(cut=100)
    return number >= FILES


def changed(handler: Handler, number: int) -> bool:
    """Changes all files after they were opened."""
    if number == FILES:
        for path in handler.server.folder.iterdir():
            contents = path.read_bytes()
            path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    return False


faults = pytest.mark.parametrize(
    ("fault", "text"),
    [(dropped, "can't be read"), (cut, "can't be read"), (changed, "changed while it was read")],
    ids=["dropped", "cut", "changed"],
)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Iterator[WebServer]:
    """Serves files that a test changes."""
    served = tmp_path / "served"
    served.mkdir()
    for name in names(folder):
        (served / name).write_bytes((folder / name).read_bytes())
    with serving(served) as found:
        yield found


# --- Indexes ---

indexed = pytest.mark.parametrize("folder", ["avro", "tfrecord"], indirect=True)


def read(files: list[Any], **options: Any) -> list[bytes]:
    kind = str(files[0]).rpartition(".")[2]
    return digests(READ[kind](files, batch_size=100, shuffle=True, seed=3, **options))


@indexed
def test_readers_use_the_indexes_of_urls(
    web: WebServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [web.url(name) for name in names(folder)]
    local = read([folder / name for name in names(folder)])
    out = printed(capsys, "index", *urls, "--cache", str(tmp_path))
    assert out.count("written") == FILES
    assert f"{FILES * ROWS:,}" in out
    assert len(list(tmp_path.iterdir())) == FILES
    kind = READ[folder.name]
    web.reset()
    kind(urls, batch_size=100, index_cache=tmp_path, columns=["id"])
    opening = web.bytes_sent
    web.reset()
    kind(urls, batch_size=100, columns=["id"])
    assert opening < 0.7 * web.bytes_sent
    assert read(urls, index_cache=tmp_path) == local
    assert printed(capsys, "index", *urls, "--cache", str(tmp_path)).count("was there") == FILES


@indexed
def test_folders_of_an_object_store_are_indexed(
    bucket: Bucket, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    for name in names(folder):
        bucket.put(f"indexed/{folder.name}/{name}", (folder / name).read_bytes())
    # The objects are new, so the command waits.
    out = printed(capsys, "index", f"s3://data/indexed/{folder.name}/", "--cache", str(tmp_path))
    assert out.count("written") == FILES
    urls = [f"s3://data/indexed/{folder.name}/{name}" for name in names(folder)]
    local = read([folder / name for name in names(folder)])
    assert read(urls, index_cache=tmp_path, storage_options=bucket.options) == local
    assert printed(capsys, "index", *urls, "--cache", str(tmp_path)).count("was there") == FILES


@indexed
@pytest.mark.usefixtures("quick")
@faults
def test_files_that_fail_have_no_index(
    copy: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: Fault, text: str
) -> None:
    copy.fault = fault
    cache = tmp_path / "cache"
    assert main(["index", *map(copy.url, names(copy.folder)), "--cache", str(cache)]) == 1
    out, err = capsys.readouterr()
    assert out.count("failed") == FILES + 1
    assert err.count(text) == FILES
    assert all(copy.url(name) in err for name in names(copy.folder))
    assert not list(cache.iterdir())


@indexed
@pytest.mark.usefixtures("quick")
def test_other_files_are_indexed(web: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = names(web.folder)

    def fault(handler: Handler, number: int) -> bool:
        if number >= FILES and handler.path.endswith(first):
            handler.refuse(403)
            return True
        return False

    web.fault = fault
    assert main(["index", *map(web.url, names(web.folder)), "--cache", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out.count("written") == len(others) == len(list(tmp_path.iterdir()))
    assert "denies access" in err
    assert f"(file {web.url(first)}" in err


@indexed
def test_remote_files_are_indexed_at_the_same_time(
    web: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each file is read only once all of them are asked for.
    together = threading.Barrier(FILES)

    def fault(handler: Handler, number: int) -> bool:
        if FILES <= number < 2 * FILES:
            together.wait(60)
        return False

    web.fault = fault
    out = printed(capsys, "index", *map(web.url, names(web.folder)), "--cache", str(tmp_path))
    assert out.count("written") == FILES
    assert not together.broken


@pytest.mark.timeout(120)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize("folder", ["avro"], indirect=True)
@pytest.mark.parametrize("command", ["index", "convert"])
def test_ctrl_c_ends_a_command_that_waits_for_a_server(web: WebServer, tmp_path: Path, command: str) -> None:
    waits, ends = threading.Event(), threading.Event()

    def fault(handler: Handler, number: int) -> bool:
        if number >= FILES:
            waits.set()
            ends.wait(100)
        return False

    web.fault = fault
    urls = [web.url(name) for name in names(web.folder)]
    arguments = [*urls, "--cache", tmp_path] if command == "index" else [urls[0], tmp_path / "out.avro"]
    if command == "convert":
        web.fault = lambda handler, number: fault(handler, number + FILES - 1)
    process = subprocess.Popen([sys.executable, "-m", "fastpipe", command, *map(str, arguments)])
    try:
        assert waits.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        ends.set()
    assert not list(tmp_path.iterdir())


# --- Conversion ---


def rows_in(path: Path) -> list[Any]:
    """Returns the rows of a file, or of the files in a directory."""
    if path.is_dir():
        return [row for part in sorted(path.iterdir()) for row in rows_in(part)]
    if path.suffix == ".avro":
        with path.open("rb") as file:
            return list(fastavro.reader(file))
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.parametrize(
    "options",
    [[], ["--shuffle", "--seed", "3"], ["--columns", "id"], ["--files", "4"]],
    ids=["all", "shuffled", "columns", "several files"],
)
@pytest.mark.parametrize("to", ["avro", "parquet"])
def test_urls_are_converted_as_files_are(
    web: WebServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, options: list[str]
) -> None:
    name = names(folder)[1]
    found = []
    for number, source in enumerate([str(folder / name), web.url(name)]):
        out = tmp_path / f"{number}.{to}"
        assert f"{ROWS:,} rows" in printed(capsys, "convert", source, str(out), "--to", to, *options)
        found.append(rows_in(out))
    assert found[0] == found[1]
    assert len(found[0]) == ROWS


def test_folders_of_an_object_store_are_converted(
    bucket: Bucket, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    # The names of objects have the suffix, but that of the folder doesn't.
    for name in names(folder):
        bucket.put(f"converted/of-{folder.name}/{name}", (folder / name).read_bytes())
    printed(capsys, "convert", str(folder), str(tmp_path / "local.parquet"))
    expected = rows_in(tmp_path / "local.parquet")
    assert len(expected) == FILES * ROWS
    sources = ["", "/", f"/*.{folder.name}"]
    for number, end in enumerate(sources):
        out = tmp_path / f"{number}.parquet"
        printed(capsys, "convert", f"s3://data/converted/of-{folder.name}{end}", str(out))
        assert rows_in(out) == expected
    assert "no such object" in refused(capsys, "convert", "s3://data/converted/none", tmp_path / "out.avro")
    assert "no object matches" in refused(capsys, "convert", "s3://data/none/*.avro", tmp_path / "out.avro")


@pytest.mark.usefixtures("quick")
@faults
def test_a_conversion_that_fails_writes_nothing(
    copy: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: Fault, text: str
) -> None:
    copy.fault = lambda handler, number: fault(handler, number + FILES - 1)
    url = copy.url(names(copy.folder)[0])
    for to in ("avro", "parquet"):
        copy.reset()
        out = tmp_path / f"out.{to}"
        message = refused(capsys, "convert", url, out)
        assert text in message
        assert url in message
    assert names(tmp_path) == ["served"]


@pytest.mark.parametrize("folder", ["avro"], indirect=True)
def test_remote_files_with_other_schemas_are_named(
    copy: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    for name in names(copy.folder):
        bucket.put(f"schemas/{name}", (copy.folder / name).read_bytes())
    other = io.BytesIO()
    fields = [{"name": "id", "type": "string"}, *SCHEMA["fields"][1:]]
    fastavro.writer(other, {**SCHEMA, "fields": fields}, [{"id": "1", "x": bytes(40), "at": 1}])
    bucket.put("schemas/part-9.avro", other.getvalue())
    for to, text in (("avro", "its schema differs from that of"), ("parquet", "its columns have other types")):
        message = refused(capsys, "convert", "s3://data/schemas", tmp_path / f"out.{to}")
        assert text in message
        assert "s3://data/schemas/part-0.avro" in message
        assert "(file s3://data/schemas/part-9.avro)" in message


def test_conversions_that_are_not_supported_say_so(
    server: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = "s3://bucket/out.avro"
    message = refused(capsys, "convert", server.url("00.avro"), target, code=2)
    assert message == f"fastpipe convert: {target} is a URL: write to a local disk, and upload the result\n"
    pyarrow.parquet.write_table(table(0), server.folder / "a.parquet")
    for options in ([], ["--shuffle"]):
        message = refused(capsys, "convert", server.url("a.parquet"), tmp_path / "out.avro", *options)
        assert "reads Parquet and Arrow files only from local disks" in message
    assert server.requests == 2
