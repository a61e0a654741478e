"""What a server has done, in numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastpipe.service._streams import Streams

_TOLD = {
    "requests": ("counter", "Streams of batches that were asked for."),
    "batches": ("counter", "Batches sent."),
    "bytes": ("counter", "Bytes of batches sent."),
    "errors": ("counter", "Errors told to clients."),
    "decoded": ("counter", "Batches decoded."),
    "begun": ("counter", "Passes begun."),
    "kept_hits": ("counter", "Batches sent that were decoded for another request."),
    "refused": ("counter", "Requests refused since the server was busy."),
    "closed": ("counter", "Connections that were closed because they sent what belongs to no request."),
    "clients": ("gauge", "Streams of batches that are being sent."),
    "streams": ("gauge", "Orders and epochs that are being read."),
    "passes": ("gauge", "Passes that are open."),
    "kept_bytes": ("gauge", "Bytes of batches that are kept."),
    "batch_bytes": ("gauge", "Bytes of batches that are in memory: kept, or being sent."),
    "making_seconds": ("counter", "Seconds that requests have waited for batches being made, over all requests."),
    "held_back_seconds": ("counter", "Seconds that batches have waited for clients to take them, over all requests."),
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
        self.errors = self._closed = self._refused = 0
        # Requests that wait just now: for a batch, or for their client; seconds of these so far, and until when.
        self._waiting = {"making": 0, "held_back": 0}
        self._seconds = dict.fromkeys(self._waiting, 0.0)
        self._until = time.monotonic()

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

    def refused_one(self) -> None:
        """A request was refused, since there was too much to do."""
        with self._lock:
            self._refused += 1

    def closed_one(self) -> None:
        """A connection was closed, because of what it sent."""
        with self._lock:
            self._closed += 1

    def sent(self, count: int, nbytes: int) -> None:
        """Batches were sent."""
        with self._lock:
            self._batches += count
            self._bytes += nbytes

    def timed(self, messages: Iterator[Any]) -> Iterator[Any]:
        """The same messages: of their time, what passes until there is one, and until it was taken."""
        self._wait(making=1)
        try:
            for message in messages:
                self._wait(making=-1, held_back=1)
                try:
                    yield message
                finally:
                    self._wait(making=1, held_back=-1)
        finally:
            self._wait(making=-1)

    def _wait(self, **change: int) -> None:
        """So many requests more or fewer wait from now on."""
        with self._lock:
            self._count_seconds()
            for kind, number in change.items():
                self._waiting[kind] += number

    def _count_seconds(self) -> None:
        """Counts up to now, so that waits show that haven't ended."""
        now = time.monotonic()
        for kind, number in self._waiting.items():
            self._seconds[kind] += number * (now - self._until)
        self._until = now

    def numbers(self) -> dict[str, float]:
        """All of them, by name."""
        counts = self._streams.counts
        with self._lock:
            self._count_seconds()
            found: dict[str, float] = {
                "requests": self._requests,
                "batches": self._batches,
                "bytes": self._bytes,
                "errors": self.errors,
                "decoded": counts.decoded,
                "begun": counts.passes,
                "kept_hits": counts.kept_hits,
                "refused": self._refused,
                "closed": self._closed,
                "clients": self._clients,
                **{f"{kind}_seconds": seconds for kind, seconds in self._seconds.items()},
            }
        return found | self._streams.look()

    def described(self) -> Iterator[tuple[str, str, str, float]]:
        """Yields the name, kind, description and value of each metric. Samples of counters end with `_total`."""
        for name, value in self.numbers().items():
            kind, text = _TOLD[name]
            yield f"fastpipe_service_{name}", kind, text, value

    def text(self) -> str:
        """Returns all of them in Prometheus' text format."""
        lines = []
        for name, kind, text, value in self.described():
            sample = f"{name}_total" if kind == "counter" else name
            lines += [f"# HELP {sample} {text}", f"# TYPE {sample} {kind}", f"{sample} {value}"]
        return "\n".join(lines) + "\n"


def shown(host: str) -> str:
    """Returns an address as it is written before a port."""
    return f"[{host}]" if ":" in host else host
