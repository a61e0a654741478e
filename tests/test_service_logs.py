"""What a server logs: lines for people, or an object a line for programs."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from apart import wait_until
from fastpipe.service._logs import JsonLines, say
from servers import free_port

pytest.importorskip("pyarrow.flight")

CONFIG = """
import numpy as np
import fastpipe

reader = fastpipe.from_arrays({"id": np.arange(1000)}, batch_size=10, shuffle=True, seed=7)
broken = fastpipe.read_avro("broken.avro", columns=["id"], batch_size=10)
"""
SECRET = "open sesame"


def logged(folder: Path, *arguments: str) -> list[str]:
    """What is on stderr of a server that answers and refuses, and is told to end."""
    token = folder / "token"
    token.write_text(SECRET)
    url = f"grpc://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "fastpipe", "serve", "readers.py", "--port", str(port), "--token-file", "token"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder, encoding="utf-8"
        )
    try:
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        assert len(list(fastpipe.connect(url, token=SECRET))) == 100
        with pytest.raises(fastpipe.ServiceError, match="token"):
            fastpipe.connect(url, token="open barley", timeout=60)
        remote = fastpipe.connect(url, reader="broken", token=SECRET)
        with pytest.raises(fastpipe.MalformedFileError):
            list(remote)
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(100)
        process.stdout.close()
    assert status == 0
    return (folder / "log").read_text().splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a file that is damaged where a checksum tells."""
    fastpipe.write_avro(tmp_path / "broken.avro", {"id": np.arange(1000)}, codec="snappy")
    data = bytearray((tmp_path / "broken.avro").read_bytes())
    data[-200] ^= 0xFF
    (tmp_path / "broken.avro").write_bytes(data)
    (tmp_path / "readers.py").write_text(CONFIG)
    return tmp_path


def test_programs_read_each_line(folder: Path) -> None:
    lines = logged(folder, "--log-format", "json", "--verbose")
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert SECRET not in "\n".join(lines)
    events = [each["event"] for each in found]
    assert (events[0], events[-1]) == ("listening", "stopped")
    assert found[0]["readers"] == ["broken", "default"]
    assert all(each["logger"] == "fastpipe.service" and each["message"] for each in found)
    assert all(each["time"].endswith("+00:00") for each in found)
    assert [each["time"] for each in found] == sorted(each["time"] for each in found)

    sent = [each for each in found if each["event"] == "request" and each["outcome"] == "sent"]
    assert sum(each["batches"] for each in sent) >= 100
    assert {each["reader"] for each in sent} == {"default"}
    for each in sent:
        assert each["level"] == "info"
        assert each["peer"].startswith("127.0.0.1:")
        assert (each["epoch"], each["batches"]) == (0, each["stop"] - each["start"])
        assert each["bytes"] >= 80 * each["batches"]
        assert 0 < each["seconds"] < 60

    assert {each["level"] for each in found if each["event"] == "unauthenticated"} == {"warning"}
    (error, *_) = [each for each in found if each["event"] == "error"]
    assert (error["level"], error["reader"], error["error"]) == ("warning", "broken", "MalformedFileError")
    assert "broken.avro" in error["reason"]
    assert any(each["event"] == "request" and each["outcome"] == "error" for each in found)


def test_people_read_what_went_wrong(folder: Path) -> None:
    lines = logged(folder)
    assert not [line for line in lines if "batches" in line and "seconds" in line], "not asked for"
    (refused, *_) = [line for line in lines if "refused a client that doesn't know the token" in line]
    assert "WARNING fastpipe.service: " in refused
    assert any("MalformedFileError: " in line and "broken.avro" in line for line in lines)
    assert SECRET not in "\n".join(lines)


def test_clients_that_leave_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe.service")

    def outcomes() -> list[str]:
        told = [getattr(record, "fastpipe", {}) for record in caplog.records]
        return [each["outcome"] for each in told if each["event"] == "request"]

    arrays = {"x": np.zeros((20_000, 1000), "float32")}
    server = fastpipe.from_arrays(arrays, batch_size=256).serve()
    batches = iter(fastpipe.connect(server.url, prefetch=1))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert wait_until(lambda: {"left", "cancelled"} & set(outcomes()))
    batches = iter(fastpipe.connect(server.url, prefetch=1))
    next(batches)
    server.stop(grace=0.5)
    # What waits for a client ends when that has gone.
    batches.close()  # type: ignore[attr-defined]
    assert wait_until(lambda: len([each for each in outcomes() if each != "sent"]) >= 2)


def test_any_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("fastpipe.service")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    # pytest can't tell of such names.
    logger.propagate = False
    try:
        say(logging.WARNING, "error", "%(reason)s", reason="two\nlines, 100 % and \udc80", path=Path("a"))
        say(logging.WARNING, "plain", "100 % of it")
        logging.getLogger("fastpipe.service.other").warning("of %s", "another", exc_info=ValueError("x\ny"))
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == first["reason"] == "two\nlines, 100 % and \udc80"
    assert (first["path"], first["event"], second["message"]) == ("a", "error", "100 % of it")
    assert (third["logger"], third["message"]) == ("fastpipe.service.other", "of another")
    assert third["exception"].endswith("ValueError: x\ny")
    assert "event" not in third
