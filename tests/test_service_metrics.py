"""What a server tells Prometheus and probes over HTTP, whatever is asked of it."""

from __future__ import annotations

import http.client
import importlib.util
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urljoin

import numpy as np
import psutil
import pytest

import fastpipe
from apart import wait_until
from fastpipe.service import _metrics_http
from processes import outputs, run
from service_faults import free_port

pytest.importorskip("pyarrow.flight")

REQUESTS = int(os.environ.get("FASTPIPE_REQUESTS", "500"))
CONNECTIONS = 16


def read() -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(1000)}, batch_size=100, shuffle=True, seed=7)


@pytest.fixture
def server() -> Iterator[fastpipe.service.Server]:
    with read().serve(metrics_port=0) as found:
        yield found


def url_of(server: fastpipe.service.Server) -> str:
    """What stands before the paths."""
    assert server.metrics_url is not None
    assert server.metrics_url.endswith("/metrics")
    return server.metrics_url.removesuffix("/metrics")


def port_of(server: fastpipe.service.Server) -> int:
    return int(url_of(server).rsplit(":", 1)[1])


def get(url: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    """Status, text and headers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=20) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def connected(server: fastpipe.service.Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(server)), timeout=20)


def answer_to(server: fastpipe.service.Server, data: bytes) -> bytes:
    """All that is answered to these bytes, behind which no more come."""
    with connected(server) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""


LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*) (-?[0-9.]+(?:e[+-]?[0-9]+)?)")


def parsed(text: str) -> dict[str, tuple[str, float]]:
    """Kind and value of each metric, of a text as Prometheus' format 0.0.4 has it."""
    assert text.endswith("\n")
    found: dict[str, tuple[str, float]] = {}
    lines = text.splitlines()
    assert len(lines) % 3 == 0
    for help_, kind, value in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        match = LINE.fullmatch(value)
        assert match is not None, value
        name = match[1]
        assert help_.startswith(f"# HELP {name} ")
        assert kind in (f"# TYPE {name} counter", f"# TYPE {name} gauge")
        assert name.endswith("_total") == kind.endswith(" counter")
        assert name not in found
        found[name] = kind.rsplit(" ", 1)[1], float(match[2])
    return found


def test_prometheus_reads_what_was_done(server: fastpipe.service.Server) -> None:
    assert len(list(fastpipe.connect(server.url))) == 10
    status, text, headers = get(url_of(server) + "/metrics")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = parsed(text)
    assert found["fastpipe_service_batches_total"] == ("counter", 10.0)
    assert found["fastpipe_service_passes"][0] == "gauge"
    assert {name.removeprefix("fastpipe_service_").removesuffix("_total") for name in found} == set(server.stats())
    # Where it is there, Prometheus' own parser says the same.
    if importlib.util.find_spec("prometheus_client"):
        parser = importlib.import_module("prometheus_client.parser")
        names = {family.name for family in parser.text_string_to_metric_families(text)}
        assert names == {name.removesuffix("_total") for name in found}


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


def test_nothing_else_is_there(server: fastpipe.service.Server) -> None:
    url = url_of(server)
    for path in ("/", "/metric", "/metrics/", "/healthz/x", "/../etc/passwd", "/%2e%2e", "/favicon.ico"):
        status, text, _ = get(url + path)
        assert (status, text) == (404, "Not Found\n"), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"):
        status, text, headers = get(url + "/metrics", method)
        assert (status, text, headers["Allow"]) == (405, "Method Not Allowed\n", "GET, HEAD"), method
    assert get(url + "/healthz?verbose=1")[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/other"])
def test_head_has_the_same_headers_and_no_body(server: fastpipe.service.Server, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=20)
    connection.request("HEAD", path)
    answer = connection.getresponse()
    assert answer.read() == b""
    status, text, headers = get(url_of(server) + path)
    assert (answer.status, answer.headers["Content-Type"]) == (status, headers["Content-Type"])
    if path != "/metrics":  # Whose numbers change.
        assert int(answer.headers["Content-Length"]) == len(text)
    connection.close()


def test_a_large_body_is_no_reason_not_to_answer(server: fastpipe.service.Server) -> None:
    head = b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"
    assert answer_to(server, head + b"x" * 60000).startswith(b"HTTP/1.0 405 ")
    with connected(server) as connection:
        connection.sendall(head)
        assert connection.recv(9) == b"HTTP/1.0 "
        # Whoever sends it behind the answer isn't interrupted.
        for _ in range(4):
            connection.sendall(b"x" * 15000)
            time.sleep(0.05)
    assert answer_to(server, b"GET /healthz HTTP/1.0\r\n\r\nmore").endswith(b"\r\n\r\nserving\n")


def test_long_heads_are_refused(server: fastpipe.service.Server) -> None:
    for head in (b"GET /" + b"x" * 20000, b"GET / HTTP/1.1\r\nx: " + b"y" * 20000):
        assert answer_to(server, head).startswith(b"HTTP/1.0 431 ")
    headers = b"".join(b"a%d: b\r\n" % number for number in range(300))
    assert answer_to(server, b"GET /metrics HTTP/1.1\r\n" + headers + b"\r\n").startswith(b"HTTP/1.0 431 ")


def test_nonsense_is_survived(server: fastpipe.service.Server) -> None:
    draw = random.Random(11)
    good = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Prometheus/3\r\nAccept: */*\r\n\r\n"
    for number in range(REQUESTS):
        if number % 3 == 0:
            data = draw.randbytes(draw.randrange(300))
        else:
            at = draw.randrange(len(good))
            data = good[:at] + draw.randbytes(draw.randrange(4)) + good[at + draw.randrange(4) :]
        found = answer_to(server, data + draw.choice([b"", b"\n", b"\n\n", b"\r\n\r\n"]))
        # A request without a version is of HTTP/0.9, whose answers have no head.
        assert re.match(rb"HTTP/1\.0 (200|400|404|405|431|505) |$|# HELP|[A-Z][A-Za-z ]+\n$", found), (data, found)
    assert get(url_of(server) + "/metrics")[0] == 200
    assert len(list(fastpipe.connect(server.url))) == 10


def test_clients_that_say_nothing_hold_nothing(server: fastpipe.service.Server) -> None:
    process = psutil.Process()
    before = process.num_threads()
    with ExitStack() as open_:
        slow = [open_.enter_context(connected(server)) for _ in range(4 * CONNECTIONS)]
        for number, connection in enumerate(slow):
            if number % 2:
                connection.send(b"GET /metrics HTTP/1.1\r\n")
        # Whoever asks is answered all the same, and needn't wait until their time is over.
        begun = time.monotonic()
        for _ in range(20):
            assert get(url_of(server) + "/healthz")[0] == 200
        assert time.monotonic() - begun < 0.9 * _metrics_http._PATIENCE
        assert process.num_threads() <= before + CONNECTIONS + 1
        # Those that came first were closed for those that came later; the others are, when their time is over.
        for connection in slow:
            assert connection.recv(1) == b""
        assert time.monotonic() - begun < 15
    assert wait_until(lambda: process.num_threads() <= before, 10)


def test_a_trickle_is_cut_off(server: fastpipe.service.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_metrics_http, "_PATIENCE", 1.0)
    begun = time.monotonic()

    def trickle(connection: socket.socket) -> None:
        while time.monotonic() - begun < 30:
            connection.send(b"x")
            time.sleep(0.05)

    with connected(server) as connection, pytest.raises(OSError, match=r"reset|[Bb]roken"):
        trickle(connection)
    assert time.monotonic() - begun < 15


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


def test_a_forked_child_keeps_no_port() -> None:
    script = """
        import os, socket, warnings, numpy as np, fastpipe
        warnings.simplefilter("ignore")  # Of forks beside threads.
        server = fastpipe.from_arrays({"id": np.arange(100)}, batch_size=10).serve(metrics_port=0)
        port = int(server.metrics_url.removesuffix("/metrics").rsplit(":", 1)[1])
        (ends, says), (runs, ready) = os.pipe(), os.pipe()
        if (child := os.fork()) == 0:
            os.close(says)
            os.write(ready, b"!")
            os.read(ends, 1)
            os._exit(0)
        os.read(runs, 1)
        server.stop()
        with socket.socket() as asks:
            print(asks.connect_ex(("127.0.0.1", port)) != 0)
        os.close(says)
        os.waitpid(child, 0)
    """
    assert outputs(run(script)) == ["True\n"]


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
            assert process.wait(20) == 0
        finally:
            process.kill()
