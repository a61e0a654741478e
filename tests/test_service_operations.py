"""Running servers: the commands `serve` and `health`, logs for people and programs, and metrics over HTTP."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
import psutil
import pytest

import fastpipe
from apart import wait_until
from fastpipe import cli
from fastpipe.service import Server, _metrics_http
from fastpipe.service._logs import JsonLines, say
from processes import outputs, run, together
from samples import ids_by_batch as ids
from servers import free_port
from service_faults import ServerProcess, config_of, rows_of, serving

flight = pytest.importorskip("pyarrow.flight")
parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(rows_of(5000), tmp_path) as found:
        yield found


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.1])
def test_several_sigterms_are_as_one(process: ServerProcess, pause: float) -> None:
    # A pass that isn't read to its end.
    batches = iter(fastpipe.connect(process.url, prefetch=2))
    next(batches)
    for _ in range(5):
        process.send(signal.SIGTERM)
        time.sleep(pause)
    assert process.end(signal.SIGTERM) == 0


def test_wrong_bounds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(rows_of(5000), tmp_path)
    for options, status, told in [
        (["--memory-limit", "much"], 2, "fastpipe: memory_limit must be a number of bytes or a size"),
        (["--memory-limit", "1MiB"], 2, "nothing is left for 16 passes; raise memory_limit, or lower cache_bytes"),
        (["--memory-limit", "129MiB", "--max-passes", "1000"], 1, "doesn't fit its share of the server's memory_limit"),
        (["--max-requests", "0"], 2, "fastpipe: max_requests "),
        (["--metrics-port", "70000"], 2, "fastpipe: metrics_port "),
    ]:
        assert cli.main(["serve", str(config), "--port", "0", *options]) == status
        assert told in capsys.readouterr().err


def test_clients_may_name_servers_that_do_not_exist_yet() -> None:
    with rows_of(100).serve() as server:
        urls = ["grpc://fastpipe-9.invalid:8815", server.url, f"grpc://127.0.0.1:{free_port()}"]
        assert ids(fastpipe.connect(urls, timeout=60)) == ids(rows_of(100))


# Health.


def health(*arguments: object) -> int:
    return cli.main(["health", *map(str, arguments)])


def test_health_of_a_process(process: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert health(process.url) == 0
    assert capsys.readouterr().out == f"{process.url} accepts requests\n"
    process.send(signal.SIGSTOP)
    begun = time.monotonic()
    assert health(process.url, "--timeout", "0.5") == 1
    # The default is five seconds.
    assert time.monotonic() - begun < 5
    assert process.url in capsys.readouterr().err
    process.send(signal.SIGCONT)
    assert health(process.url) == 0
    process.end()
    capsys.readouterr()
    assert health(process.url, "--timeout", "2") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fastpipe: {process.url}: ")
    assert err.count("\n") == 1


def test_health_with_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("open sesame\n")
    with rows_of(100).serve(token="open sesame") as server:
        assert health(server.url, "--token-file", token) == 0
        assert health(server.url) == 1
        assert "token" in capsys.readouterr().err
        assert health(server.url, "--token-file", tmp_path / "none") == 1
        assert "none" in capsys.readouterr().err


def test_wrong_arguments_of_health(capsys: pytest.CaptureFixture[str]) -> None:
    assert health("http://a:1") == 2
    assert "grpc://host:port" in capsys.readouterr().err
    for seconds in ("0", "nan", "soon"):
        with pytest.raises(SystemExit) as exit_:
            health("grpc://a:1", "--timeout", seconds)
        assert exit_.value.code == 2


# Logs.

SECRET = "open sesame"


def logged(folder: Path, *arguments: str) -> list[str]:
    """Returns the lines on stderr of a server that answers, refuses a client, and reads a damaged file."""
    fastpipe.write_avro(folder / "broken.avro", {"id": np.arange(1000)}, codec="snappy")
    data = bytearray((folder / "broken.avro").read_bytes())
    # The file's checksums detect this.
    data[-200] ^= 0xFF
    (folder / "broken.avro").write_bytes(data)
    broken = fastpipe.read_avro(folder / "broken.avro", columns=["id"], batch_size=10)
    (folder / "token").write_text(SECRET)
    log, given = folder / "log", ("--token-file", folder / "token", *arguments)
    readers = {"reader": rows_of(1000, batch_size=10), "broken": broken}
    with serving(readers, folder, *given, log=log) as server:
        assert len(list(fastpipe.connect(server.url, token=SECRET))) == 100
        with pytest.raises(fastpipe.errors.ServiceError, match="token"):
            fastpipe.connect(server.url, token="open barley", timeout=60)
        with pytest.raises(fastpipe.errors.MalformedFileError):
            list(fastpipe.connect(server.url, name="broken", token=SECRET))
        assert server.end(signal.SIGTERM) == 0
    lines = log.read_text().splitlines()
    assert SECRET not in "\n".join(lines)
    return lines


def test_logs_for_programs_have_an_object_per_line(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = [json.loads(line) for line in logged(tmp_path, "--log-format", "json", "--verbose")]
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


def test_logs_for_people_have_only_failures(tmp_path: Path) -> None:
    lines = logged(tmp_path)
    assert not [line for line in lines if "batches" in line and "seconds" in line], "needs --verbose"
    (refused, *_) = [line for line in lines if "refused a client that doesn't know the token" in line]
    assert "WARNING fastpipe.service: " in refused
    assert any("MalformedFileError: " in line and "broken.avro" in line for line in lines)


def test_clients_that_leave_are_logged(caplog: pytest.LogCaptureFixture) -> None:
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
    server.close(grace=0.5)
    # A request that waits for its client ends when the client has left.
    batches.close()  # type: ignore[attr-defined]
    assert wait_until(lambda: len([each for each in outcomes() if each != "sent"]) >= 2)


def test_any_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("fastpipe.service")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    # pytest can't print such characters.
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


# Metrics.


def small() -> fastpipe.Reader:
    return rows_of(1000, batch_size=100)


@pytest.fixture
def server() -> Iterator[Server]:
    with small().serve(metrics_port=0) as found:
        yield found


def url_of(server: Server) -> str:
    """Returns the URL without the path."""
    assert server.metrics_url is not None
    assert server.metrics_url.endswith("/metrics")
    return server.metrics_url.removesuffix("/metrics")


def port_of(server: Server) -> int:
    return int(url_of(server).rsplit(":", 1)[1])


def get(url: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    """Returns status, text and headers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=100) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def test_prometheus_reads_the_metrics(server: Server) -> None:
    assert len(list(fastpipe.connect(server.url))) == 10
    assert server.metrics_url is not None
    assert get(urljoin(server.metrics_url, "/healthz"))[0] == 200
    status, text, headers = get(server.metrics_url)
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert {name.removeprefix("fastpipe_service_") for name in families} == set(server.stats())
    (batches,) = families["fastpipe_service_batches"].samples
    assert (batches.name, batches.value) == ("fastpipe_service_batches_total", 10.0)
    assert families["fastpipe_service_passes"].type == "gauge"
    for family in families.values():
        (sample,) = family.samples
        assert sample.name == family.name + ("_total" if family.type == "counter" else "")
        assert family.documentation
    # Flight reports the same metrics, without prometheus_client.
    (answer,) = flight.FlightClient(server.url).do_action(flight.Action("metrics", b""))
    told = parser.text_string_to_metric_families(answer.body.to_pybytes().decode())
    own = {(family.name, family.type) for family in told}
    assert own == {(family.name, family.type) for family in families.values()}


def test_health_ends_with_the_server() -> None:
    server = small().serve(metrics_port=0)
    url, port = url_of(server), port_of(server)
    assert get(url + "/healthz")[:2] == (200, "serving\n")
    # The server is stopping, and connections are still open.
    server._ending.set()
    assert get(url + "/healthz")[:2] == (503, "stopping\n")
    assert get(url + "/metrics")[0] == 200
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert not [thread for thread in threading.enumerate() if thread.name == "fastpipe-metrics"]
    # The port is free again at once.
    with small().serve(metrics_port=port) as again:
        assert get(url_of(again) + "/healthz")[0] == 200


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/healthz/x", "/../etc/passwd", "/%2e%2e"])
def test_other_paths_do_not_exist(server: Server, path: str) -> None:
    assert get(url_of(server) + path)[:2] == (404, "Not Found\n")


def test_other_methods_are_refused(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert get(url_of(server) + "/metrics", method)[0] == 405
    assert get(url_of(server) + "/healthz?verbose=1")[0] == 200


def test_silent_and_wrong_clients_are_disconnected(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_metrics_http._Handler, "timeout", 2.0)
    with ExitStack() as stack:
        connections = []
        for data in (b"", b"GET /metrics HTTP/1.1\r\n", b"\x00\xff\r\n\r\n", b"GET /" + b"x" * 100_000):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(server)), timeout=60))
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(data)
            connections.append(connection)
        assert get(url_of(server) + "/healthz")[0] == 200
        for connection in connections:
            with suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass
    assert capfd.readouterr().err == ""


def test_without_prometheus_s_client_the_error_names_the_extra() -> None:
    script = """
        import sys
        sys.modules["prometheus_client"] = None
        import numpy as np, fastpipe
        reader = fastpipe.from_arrays({"id": np.arange(100)}, batch_size=10)
        with reader.serve() as server:
            print(len(list(fastpipe.connect(server.url))))
        try:
            reader.serve(metrics_port=0)
        except ImportError as error:
            print(error)
    """
    assert outputs(run(script)) == ["10\nmetrics_port needs prometheus_client: pip install 'fastpipe-data[metrics]'\n"]


def test_many_requests_at_once(server: Server) -> None:
    found: list[int] = []

    def ask() -> None:
        found.extend(get(url_of(server) + "/metrics")[0] for _ in range(10))

    together(threading.Thread(target=ask) for _ in range(8))
    assert found == [200] * 80


def test_the_address_of_metrics() -> None:
    with small().serve() as server:
        assert server.metrics_url is None
    with Server(small(), host="0.0.0.0", metrics_port=0, metrics_host="127.0.0.1") as server:
        own = [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
        assert [address.ip for address in own if address.port == port_of(server)] == ["127.0.0.1"]
    if socket.has_ipv6:
        with Server(small(), host="::1", metrics_port=0) as server:
            assert url_of(server).startswith("http://[::1]:")
            assert get(url_of(server) + "/healthz")[0] == 200
    with pytest.raises(ValueError, match="metrics_port"):
        small().serve(metrics_host="127.0.0.1")


def test_wrong_and_taken_ports_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, free = taken.getsockname()[1], free_port()
        with pytest.raises(OSError, match=f"can't listen for metrics at 127.0.0.1:{port}"):
            small().serve(host="127.0.0.1", port=free, metrics_port=port)
        # The server doesn't listen for clients either.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", free))
    for wrong in (-1, 1 << 16, 1 << 20):
        with pytest.raises(ValueError, match="metrics_port"):
            small().serve(metrics_port=wrong)


def test_metrics_need_no_token_and_no_encryption(certificates: Path) -> None:
    tls = (certificates / "server.pem", certificates / "server.key")
    with Server(small(), tls=tls, token="sesame", metrics_port=0) as server:
        assert url_of(server).startswith("http://")
        status, text, _ = get(url_of(server) + "/metrics")
        assert status == 200
        assert "sesame" not in text


def test_the_command_prints_the_url(tmp_path: Path) -> None:
    with serving(small(), tmp_path, "--metrics-port", 0) as server:
        pattern = r"serving default at grpc://\S+, metrics at (http://127\.0\.0\.1:\d+)/metrics\n"
        match = re.fullmatch(pattern, server.printed)
        assert match is not None, server.printed
        assert get(match[1] + "/healthz")[0] == 200
        assert server.end(signal.SIGTERM) == 0
