"""What Prometheus and probes ask a server over HTTP: `/metrics` and `/healthz`, and nothing else.

A connection is for one request. Its head must be there within seconds, however slowly it is sent, and is small; the
body of a request isn't read. Where there are too many connections, the one that has been open for longest is closed:
whoever wants an answer has it within milliseconds.
"""

from __future__ import annotations

import io
import os
import socket
import socketserver
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

__all__ = ["MetricsEndpoint", "shown"]

# Seconds that a connection may take: to send its request, and to take the answer.
_PATIENCE = 5.0
_LARGEST_HEAD = 8 << 10
# Pieces of a body, of 4 KiB at most.
_MOST_UNREAD = 16
_MOST_CONNECTIONS = 16
# How often it looks whether it is to end, in seconds.
_TICK = 0.1
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"


def shown(host: str) -> str:
    """An address as it is written in front of a port."""
    return f"[{host}]" if ":" in host else host


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Listener
    server_version, sys_version = "fastpipe", ""

    def handle(self) -> None:
        """Reads the head of the request, and answers it."""
        with suppress(OSError):  # Whoever doesn't wait for the answer gets none.
            end = time.monotonic() + _PATIENCE
            head = self._head(end)
            self.rfile = io.BytesIO(head)
            self.raw_requestline = self.rfile.readline()
            if len(head) > _LARGEST_HEAD:
                self.request_version, self.requestline, self.command = "HTTP/1.0", "", ""
                self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            elif head and self.parse_request():
                self._answer()
            self.connection.shutdown(socket.SHUT_WR)
            # A body that nobody has read would take the answer with it when the connection is closed.
            for _ in range(_MOST_UNREAD):
                if not self._some(end):
                    return

    def _head(self, end: float) -> bytes:
        """All in front of the body of the request; empty if that doesn't come, and too long if it is."""
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head and len(head) <= _LARGEST_HEAD:
            some = self._some(end)
            if not some:
                return b""
            head += some
        return head

    def _some(self, end: float) -> bytes:
        """The next bytes of the client; none if there are no more until then."""
        left = end - time.monotonic()
        if left <= 0:
            return b""
        self.connection.settimeout(left)
        some: bytes = self.connection.recv(4 << 10)
        return some

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if path not in ("/metrics", "/healthz"):
            self.send_error(HTTPStatus.NOT_FOUND)
        elif self.command not in ("GET", "HEAD"):
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        elif path == "/metrics":
            self._send(HTTPStatus.OK, _PROMETHEUS, self.server.metrics())
        elif self.server.serving():
            self._send(HTTPStatus.OK, _TEXT, "serving\n")
        else:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, "stopping\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Says what is wrong, and nothing of what was asked."""
        self._send(HTTPStatus(code), _TEXT, HTTPStatus(code).phrase + "\n")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.connection.settimeout(_PATIENCE)
        self.connection.sendall(b"" if self.command == "HEAD" else body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: probes ask every few seconds."""


class _Listener(socketserver.ThreadingTCPServer):
    """Accepts connections, each of which has a thread."""

    allow_reuse_address, allow_reuse_port = True, False
    daemon_threads, block_on_close = True, False
    request_queue_size = 128

    def __init__(self, host: str, port: int, metrics: Callable[[], str], serving: Callable[[], bool]) -> None:
        (self.address_family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self.metrics, self.serving = metrics, serving
        # Those that are open, the oldest first.
        self._open: dict[socket.socket, None] = {}
        self._changed = threading.Condition()
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Makes room for a connection, and has it answered."""
        with self._changed:
            if len(self._open) >= _MOST_CONNECTIONS:
                _end(next(iter(self._open)))
            if not self._changed.wait_for(lambda: len(self._open) < _MOST_CONNECTIONS, _PATIENCE):
                self.close_request(request)
                return
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        super().shutdown_request(request)
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a connection that fails is its client's."""

    def end_all(self) -> None:
        """Ends all connections."""
        with self._changed:
            for one in self._open:
                _end(one)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # It has ended.
        connection.shutdown(socket.SHUT_RDWR)


class MetricsEndpoint:
    """Answers `/metrics` and `/healthz` over HTTP, on threads of its own.

    Args:
        host: the address to listen at.
        port: 0 for any that is free.
        metrics: says them, in Prometheus' text format.
        serving: says whether the server takes requests.

    Raises:
        OSError: if it can't listen there.
    """

    def __init__(self, host: str, port: int, metrics: Callable[[], str], serving: Callable[[], bool]) -> None:
        try:
            self._listener = _Listener(host, port, metrics, serving)
        except (OSError, OverflowError) as error:
            raise OSError(f"can't listen for metrics at {shown(host)}:{port}: {error}") from error
        _ENDPOINTS.add(self)
        self._process, self.host = os.getpid(), host
        self.port: int = self._listener.server_address[1]
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(_TICK,), name="fastpipe-metrics", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:
            self._listener.server_close()
            raise

    def close(self) -> None:
        """Listens no more, and ends all connections. Twice does no harm."""
        if self._process != os.getpid():
            return
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()
        self._listener.end_all()

    def forked(self) -> None:
        """Lets go of the port, in a child, where nobody would answer."""
        self._listener.socket.close()


_ENDPOINTS: weakref.WeakSet[MetricsEndpoint] = weakref.WeakSet()


def _forked() -> None:
    for one in _ENDPOINTS:
        one.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
