"""`fastpipe serve` and `fastpipe health` as whoever runs them sees them: signals, and exit statuses."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fastpipe
from fastpipe import cli
from servers import free_port
from service_faults import ServerProcess, serving

pytest.importorskip("pyarrow.flight")

CONFIG = """
import numpy as np
import fastpipe

reader = fastpipe.from_arrays({"id": np.arange(5000)}, batch_size=64, shuffle=True, seed=7)
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(CONFIG, tmp_path) as found:
        yield found


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.1])
def test_several_sigterms_are_as_one(process: ServerProcess, pause: float) -> None:
    # One that has begun, and isn't drawn to its end.
    batches = iter(fastpipe.connect(process.url, prefetch=2))
    next(batches)
    for _ in range(5):
        process.send(signal.SIGTERM)
        time.sleep(pause)
    assert process.end(signal.SIGTERM) == 0


def test_bounds_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "readers.py"
    config.write_text(CONFIG)
    for options, status, told in [
        (["--memory-limit", "much"], 2, "fastpipe: memory_limit must be a number of bytes or a size"),
        (["--memory-limit", "1MiB"], 2, "nothing is left for 16 passes; raise memory_limit, or lower keep"),
        (["--memory-limit", "129MiB", "--max-passes", "1000"], 1, "doesn't fit its share of the server's memory_limit"),
        (["--max-requests", "0"], 2, "fastpipe: max_requests "),
        (["--metrics-port", "70000"], 2, "fastpipe: metrics_port "),
    ]:
        assert cli.main(["serve", str(config), "--port", "0", *options]) == status
        assert told in capsys.readouterr().err


def read() -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(100)}, batch_size=10)


def health(*arguments: object) -> int:
    return cli.main(["health", *map(str, arguments)])


def test_health_of_a_process(process: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert health(process.url) == 0
    assert capsys.readouterr().out == f"{process.url} accepts requests\n"
    process.end()
    assert health(process.url, "--timeout", "2") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fastpipe: {process.url}: ")
    assert err.count("\n") == 1


def test_a_stopped_process_is_not_healthy(process: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    process.send(signal.SIGSTOP)
    begun = time.monotonic()
    assert health(process.url, "--timeout", "0.5") == 1
    # Five seconds are the default.
    assert time.monotonic() - begun < 5
    assert process.url in capsys.readouterr().err
    process.send(signal.SIGCONT)
    assert health(process.url) == 0


def test_health_with_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("open sesame\n")
    with read().serve(token="open sesame") as server:
        assert health(server.url, "--token-file", token) == 0
        assert health(server.url) == 1
        assert "token" in capsys.readouterr().err
        assert health(server.url, "--token-file", tmp_path / "none") == 1
        assert "none" in capsys.readouterr().err


def test_health_of_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert health("http://a:1") == 2
    assert "grpc://host:port" in capsys.readouterr().err
    for seconds in ("0", "nan", "soon"):
        with pytest.raises(SystemExit) as exit_:
            health("grpc://a:1", "--timeout", seconds)
        assert exit_.value.code == 2


def test_a_name_that_nobody_has_yet_is_no_hindrance() -> None:
    """Clients may name servers that are to come."""
    with read().serve() as server:
        urls = ["grpc://fastpipe-9.invalid:8815", server.url, f"grpc://127.0.0.1:{free_port()}"]
        found = [batch["id"].tolist() for batch in fastpipe.connect(urls, timeout=60)]
    assert found == [batch["id"].tolist() for batch in read()]
