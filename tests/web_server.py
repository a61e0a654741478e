"""A web server on the loopback interface that serves a folder by ranges, and that can fail in many ways."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import unquote

__all__ = ["Fault", "WebServer", "serving"]

Fault = Callable[["Handler", int], bool]
"""A function that is called with each request and its number. If it returns True, it has answered the request."""


class Handler(BaseHTTPRequestHandler):
    """Answers requests for files."""

    protocol_version = "HTTP/1.1"
    server: WebServer

    def do_GET(self) -> None:
        """Sends a file or a range of it."""
        served = self.server
        with served.lock:
            number = served.requests
            served.requests += 1
            served.methods[self.command] += 1
        if served.fault is not None and served.fault(self, number):
            return
        self.respond()

    do_HEAD = do_POST = do_PUT = do_GET

    def respond(self, *, cut: int = 0, extra: int = 0) -> None:
        """Sends the answer. `cut` bytes are missing at its end, and `extra` bytes more are promised than asked for."""
        path = self.server.folder / unquote(self.path.lstrip("/"))
        if not path.is_file():
            self.refuse(404)
            return
        whole = path.read_bytes()
        tag = self.server.tag(whole)
        if self.server.has_tags and self.headers.get("If-Match", tag) != tag:
            self.refuse(412)
            return
        start, end = 0, len(whole)
        asked = self.headers.get("Range")
        if asked is not None and self.server.has_ranges:
            first, last = asked.removeprefix("bytes=").split("-")
            start, end = int(first), min(len(whole), int(last or len(whole)) + 1)
            if start >= len(whole):
                self.refuse(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(whole)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - start + extra))
        self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        if self.server.has_tags:
            self.send_header("ETag", tag)
        self.end_headers()
        # Counted first, because the client may look at the number as soon as it has the bytes.
        with self.server.lock:
            self.server.bytes_sent += end - cut - start
        self.wfile.write(whole[start : end - cut])
        if cut or extra:
            self.close_connection = True

    def refuse(self, status: int) -> None:
        """Sends an error without a body."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


class WebServer(ThreadingHTTPServer):
    """The server. Its counters begin with it, or with `reset`.

    Attributes:
        folder: The folder that is served.
        fault: Answers some requests in place of the server.
        has_tags: Whether the server sends and checks entity tags.
        has_ranges: Whether the server can send a part of a file.
        requests: Number of requests.
        bytes_sent: Bytes of all bodies.
        methods: Number of requests of each method.
    """

    daemon_threads = True
    request_queue_size = 128
    has_tags: ClassVar[bool] = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.fault: Fault | None = None
        self.has_ranges = True
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> Self:
        """Sets the counters to zero."""
        self.requests = self.bytes_sent = 0
        self.methods: Counter[str] = Counter()
        return self

    def url(self, name: str = "") -> str:
        """Returns the URL of a file."""
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def tag(self, contents: bytes) -> str:
        """Returns the entity tag of a file."""
        return f'"{hashlib.md5(contents).hexdigest()}"'

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that leave."""


@contextmanager
def serving(folder: Path) -> Iterator[WebServer]:
    """Serves a folder until the context ends."""
    server = WebServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def stall(seconds: float, *numbers: int) -> Fault:
    """Returns a fault that delays some requests."""

    def fault(handler: Handler, number: int) -> bool:
        if number in numbers:
            time.sleep(seconds)
        return False

    return fault
