"""`/metrics` for Prometheus and `/healthz` for probes, over HTTP (extra `metrics`)."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as error:
    raise ImportError("metrics_port needs prometheus_client: pip install 'fastpipe-data[metrics]'") from error

from fastpipe.service._metrics import shown

Described: TypeAlias = "Callable[[], Iterable[tuple[str, str, str, float]]]"
"""Yields the name, kind, description and value of each metric."""

# Seconds between two checks of the thread whether it must stop.
_TICK = 0.1


class _Handler(WSGIRequestHandler):
    # Seconds without a byte after which a connection is closed.
    timeout = 5.0

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: probes ask every few seconds."""


class _Listener(ThreadingMixIn, WSGIServer):
    allow_reuse_port = False
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        (self.address_family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        super().__init__((str(address[0]), port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that the client closes before it gets the answer."""


class _Collector:
    """A collector of the server's metrics for `prometheus_client`."""

    def __init__(self, described: Described) -> None:
        self._described = described

    def collect(self) -> Iterator[Any]:
        """Yields the current values of all metrics."""
        for name, kind, text, value in self._described():
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield family(name, text, value=value)


class MetricsEndpoint:
    """Answers `/metrics` and `/healthz` over HTTP, in its own threads.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for any free port.
        described: Returns the metrics of the server.
        serving: Returns whether the server accepts requests.

    Raises:
        OSError: If it can't listen on this address and port.
    """

    def __init__(self, host: str, port: int, described: Described, serving: Callable[[], bool]) -> None:
        registry = CollectorRegistry()
        collector: Any = _Collector(described)
        registry.register(collector)
        prometheus: Any = make_wsgi_app(registry)

        def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            if path == "/metrics":
                return prometheus(environ, start_response)  # type: ignore[no-any-return]
            status, text = HTTPStatus.NOT_FOUND, "Not Found"
            if path == "/healthz" and serving():
                status, text = HTTPStatus.OK, "serving"
            elif path == "/healthz":
                status, text = HTTPStatus.SERVICE_UNAVAILABLE, "stopping"
            headers = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]
            start_response(f"{status.value} {status.phrase}", headers)
            return [f"{text}\n".encode()]

        try:
            self._listener = _Listener(host, port)
        except (OSError, OverflowError) as error:
            raise OSError(f"can't listen for metrics at {shown(host)}:{port}: {error}") from error
        self._listener.set_app(application)
        self._process, self.host = os.getpid(), host
        self.port: int = self._listener.server_port
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(_TICK,), name="fastpipe-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Closes the port. Closing twice has no effect."""
        # The thread doesn't run in a forked child.
        if self._process == os.getpid():
            self._listener.shutdown()
            self._thread.join()
            self._listener.server_close()
