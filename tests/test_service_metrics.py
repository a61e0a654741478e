"""What a server reports to Prometheus and to probes over HTTP."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urljoin

import numpy as np
import psutil
import pytest

import fastpipe
from processes import outputs, run
from servers import free_port

pytest.importorskip("pyarrow.flight")
pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families
from pyarrow import flight

from fastpipe.service import _metrics_http


def read() -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(1000)}, batch_size=100, shuffle=True, seed=7)


@pytest.fixture
def server() -> Iterator[fastpipe.service.Server]:
    with read().serve(metrics_port=0) as found:
        yield found


def url_of(server: fastpipe.service.Server) -> str:
    """Returns the URL without the path."""
    assert server.metrics_url is not None
    assert server.metrics_url.endswith("/metrics")
    return server.metrics_url.removesuffix("/metrics")


def port_of(server: fastpipe.service.Server) -> int:
    return int(url_of(server).rsplit(":", 1)[1])


def get(url: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    """Status, text and headers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=100) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def test_prometheus_reads_what_was_done(server: fastpipe.service.Server) -> None:
    assert len(list(fastpipe.connect(server.url))) == 10
    status, text, headers = get(url_of(server) + "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name.removeprefix("fastpipe_service_") for name in families} == set(server.stats())
    (batches,) = families["fastpipe_service_batches"].samples
    assert (batches.name, batches.value) == ("fastpipe_service_batches_total", 10.0)
    assert families["fastpipe_service_passes"].type == "gauge"
    for family in families.values():
        (sample,) = family.samples
        assert sample.name == family.name + ("_total" if family.type == "counter" else "")
        assert family.documentation
    # The same by Flight, without prometheus_client.
    (answer,) = flight.FlightClient(server.url).do_action(flight.Action("metrics", b""))
    told = text_string_to_metric_families(answer.body.to_pybytes().decode())
    own = {(family.name, family.type) for family in told}
    assert own == {(family.name, family.type) for family in families.values()}


def test_health_ends_with_the_server() -> None:
    server = read().serve(metrics_port=0)
    url, port = url_of(server), port_of(server)
    assert get(url + "/healthz")[:2] == (200, "serving\n")
    # While it stops: before connections are closed.
    server._ending.set()
    assert get(url + "/healthz")[:2] == (503, "stopping\n")
    assert get(url + "/metrics")[0] == 200
    server.stop()
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert not [thread for thread in threading.enumerate() if thread.name == "fastpipe-metrics"]
    # The port is free again at once.
    with read().serve(metrics_port=port) as again:
        assert get(url_of(again) + "/healthz")[0] == 200


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/healthz/x", "/../etc/passwd", "/%2e%2e"])
def test_nothing_else_is_there(server: fastpipe.service.Server, path: str) -> None:
    assert get(url_of(server) + path)[:2] == (404, "Not Found\n")


def test_metrics_are_only_read(server: fastpipe.service.Server) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert get(url_of(server) + "/metrics", method)[0] == 405
    assert get(url_of(server) + "/healthz?verbose=1")[0] == 200


def test_clients_that_send_nothing_or_nonsense_are_left(
    server: fastpipe.service.Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
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


def test_many_at_once(server: fastpipe.service.Server) -> None:
    found: list[int] = []

    def ask() -> None:
        found.extend(get(url_of(server) + "/metrics")[0] for _ in range(10))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 80


def test_the_url_of_metrics_has_them(server: fastpipe.service.Server) -> None:
    assert server.metrics_url is not None
    status, text, _ = get(server.metrics_url)
    assert (status, "fastpipe_service_batches_total" in text) == (200, True)
    assert get(urljoin(server.metrics_url, "/healthz"))[0] == 200


def test_where_it_listens() -> None:
    with read().serve() as server:
        assert server.metrics_url is None
    with fastpipe.service.Server(read(), host="0.0.0.0", metrics_port=0, metrics_host="127.0.0.1") as server:
        own = [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
        assert [address.ip for address in own if address.port == port_of(server)] == ["127.0.0.1"]
    if socket.has_ipv6:
        with fastpipe.service.Server(read(), host="::1", metrics_port=0) as server:
            assert url_of(server).startswith("http://[::1]:")
            assert get(url_of(server) + "/healthz")[0] == 200
    with pytest.raises(ValueError, match="metrics_port"):
        read().serve(metrics_host="127.0.0.1")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, free = taken.getsockname()[1], free_port()
        with pytest.raises(OSError, match=f"can't listen for metrics at 127.0.0.1:{port}"):
            read().serve(f"grpc://127.0.0.1:{free}", metrics_port=port)
        # The server doesn't listen, either.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", free))
    for wrong in (-1, 1 << 16, 1 << 20):
        with pytest.raises(ValueError, match="metrics_port"):
            read().serve(metrics_port=wrong)


def test_a_token_and_encryption_do_not_hide_numbers(certificates: Path) -> None:
    tls = (certificates / "server.pem", certificates / "server.key")
    with fastpipe.service.Server(read(), tls=tls, token="sesame", metrics_port=0) as server:
        assert url_of(server).startswith("http://")
        status, text, _ = get(url_of(server) + "/metrics")
        assert status == 200
        assert "sesame" not in text


def test_the_command(tmp_path: Path) -> None:
    config = tmp_path / "readers.py"
    config.write_text(
        "import numpy as np, fastpipe\nreader = fastpipe.from_arrays({'id': np.arange(100)}, batch_size=10)\n"
    )
    command = [sys.executable, "-m", "fastpipe", "serve", str(config), "--port", "0", "--metrics-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = process.stdout.readline()
            match = re.fullmatch(r"serving default at grpc://\S+, metrics at (http://127\.0\.0\.1:\d+)/metrics\n", told)
            assert match is not None, told
            assert get(match[1] + "/healthz")[0] == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(100) == 0
        finally:
            process.kill()
