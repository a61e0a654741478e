"""`AvroFile` and the command line by URL: the same output as for local files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import samples
from fastpipe.avro import AvroFile
from fastpipe.cli import main
from web_server import WebServer, serving


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


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(list(arguments)) == 1
    return capsys.readouterr().err


def test_commands_say_why_a_url_cannot_be_read(server: WebServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.avro" in refused(capsys, "head", server.url("none.avro"))
    assert "the first reader with index_cache= indexes remote files" in refused(capsys, "index", server.url("00.avro"))
