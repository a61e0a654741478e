"""What a server has done, in numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastpipe.service._streams import Streams

__all__ = ["Metrics"]

_TOLD = {
    "requests": ("counter", "Streams of batches that were asked for."),
    "batches": ("counter", "Batches sent."),
    "bytes": ("counter", "Bytes of batches sent."),
    "errors": ("counter", "Errors told to clients."),
    "decoded": ("counter", "Batches decoded."),
    "begun": ("counter", "Passes begun."),
    "kept_hits": ("counter", "Batches sent that were decoded for another request."),
    "clients": ("gauge", "Streams of batches that are being sent."),
    "streams": ("gauge", "Orders and epochs that are being read."),
    "passes": ("gauge", "Passes that are open."),
    "kept_bytes": ("gauge", "Bytes of batches that are kept."),
}


class Metrics:
    """Counts what a server does.

    Args:
        streams: of the server.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._requests = self._clients = self._batches = self._bytes = 0
        self.errors = 0

    @contextmanager
    def client(self) -> Iterator[None]:
        """Somebody is being answered."""
        with self._lock:
            self._requests += 1
            self._clients += 1
        try:
            yield
        finally:
            with self._lock:
                self._clients -= 1

    def sent(self, count: int, nbytes: int) -> None:
        """Batches were sent."""
        with self._lock:
            self._batches += count
            self._bytes += nbytes

    def numbers(self) -> dict[str, int]:
        """All of them, by name."""
        counts = self._streams.counts
        with self._lock:
            found = {
                "requests": self._requests,
                "batches": self._batches,
                "bytes": self._bytes,
                "errors": self.errors,
                "decoded": counts.decoded,
                "begun": counts.passes,
                "kept_hits": counts.kept_hits,
                "clients": self._clients,
            }
        return found | self._streams.look()

    def text(self) -> str:
        """All of them in Prometheus' text format."""
        lines = []
        for name, value in self.numbers().items():
            kind, text = _TOLD[name]
            shown = f"fastpipe_service_{name}" + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {shown} {text}", f"# TYPE {shown} {kind}", f"{shown} {value}"]
        return "\n".join(lines) + "\n"
