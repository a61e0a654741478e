"""Measures the anonymous memory of a process: buffers, batches, and the heap, without file pages and libraries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MB = 1e6


def rss_anon(process: int | str = "self") -> int:
    """Returns the RssAnon of a process in bytes."""
    with open(f"/proc/{process}/status", "rb") as file:
        for line in file:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel doesn't report RssAnon, or the process has ended")


class Peak:
    """The first sample of a process's RssAnon, the maximum, and the number of samples."""

    def __init__(self, process: int | str = "self") -> None:
        self._process = process
        self.idle = self.bytes = rss_anon(process)
        self.samples = 1

    def sample(self) -> None:
        """Takes a sample."""
        self.bytes = max(self.bytes, rss_anon(self._process))
        self.samples += 1


@contextmanager
def sampled(interval: float = 0.002) -> Iterator[Peak]:
    """Samples RssAnon from a thread while the block runs."""
    peak, stop = Peak(), threading.Event()

    def run() -> None:
        while not stop.wait(interval):
            peak.sample()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.sample()
