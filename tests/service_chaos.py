"""Faults by chance: of servers, and of the networks before them. A seed says which ones, and in which order."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence

from service_faults import Proxy, ServerProcess

__all__ = ["NETWORK", "SERVERS", "Chaos"]

SERVERS = ("kill", "terminate", "stop", "restart", "all")
"""Faults of servers, all of which may be gone for a moment."""

NETWORK = ("stop", "delay", "cut", "corrupt", "corrupt_request", "silent")
"""Faults that leave the processes as they are."""


class Chaos:
    """Servers, each behind a network of its own, that fail by chance.

    Args:
        servers: that listen.
        networks: one for each.
        draw: of the faults.

    Attributes:
        done: what has failed, for whoever looks for the reason.
    """

    def __init__(self, servers: Sequence[ServerProcess], networks: Sequence[Proxy], draw: random.Random) -> None:
        self._servers, self._networks, self._draw = servers, networks, draw
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.done: list[str] = []

    def start(self, kinds: Sequence[str]) -> None:
        """Lets things fail, in another thread, until the end."""
        self._thread = threading.Thread(target=self._run, args=(kinds,))
        self._thread.start()

    def end(self) -> None:
        """Nothing more fails. What has failed stays so."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def heal(self) -> None:
        """All servers listen, and all networks carry what they should."""
        self.end()
        for network in self._networks:
            network.heal()
        for server in self._servers:
            server.send(signal.SIGCONT)
            if server.process is None:
                server.start()
        for server in self._servers:
            server.wait()

    def ends_all(self) -> None:
        """No server answers any more: each is killed, stopped, or its network silent."""
        self.end()
        for number in range(len(self._servers)):
            self._fails(number, self._draw.choice(["kill for good", "stop for good", "silent for good"]))

    def _run(self, kinds: Sequence[str]) -> None:
        while not self._end.wait(self._draw.uniform(0.02, 0.4)):
            number = self._draw.randrange(len(self._servers))
            self._fails(number, self._draw.choice(kinds))

    def _fails(self, number: int, kind: str) -> None:
        server, network, draw = self._servers[number], self._networks[number], self._draw
        self.done.append(f"{kind} {number}")
        if kind in ("kill", "terminate"):
            if server.process is not None:
                # On a machine that is busy, servers that start slowly would be ended before any of them listens.
                server.wait()
            server.end(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            # It stays away, at times, until something restarts it.
            if draw.random() < 0.5:
                server.start()
        elif kind == "restart":
            for other in self._servers:
                if other.process is None:
                    other.start()
        elif kind == "all":
            for other in self._servers:
                other.end() if draw.random() < 0.5 else other.send(signal.SIGSTOP)
            self._end.wait(draw.uniform(0.1, 1.0))
            for other in self._servers:
                other.send(signal.SIGCONT)
                if other.process is None:
                    other.start()
        elif kind == "stop":
            server.send(signal.SIGSTOP)
            self._end.wait(draw.uniform(0.1, 1.0))
            server.send(signal.SIGCONT)
        elif kind == "delay":
            network.delay = draw.choice([0.005, 0.02])
            self._end.wait(draw.uniform(0.1, 0.5))
            network.delay = 0.0
        elif kind == "cut":
            network.cut_after = draw.choice([0, draw.randrange(500_000)])
            self._end.wait(draw.uniform(0.1, 0.5))
            network.cut_after = None
        elif kind == "corrupt":
            network.corrupt_at = draw.randrange(300_000)
        elif kind == "corrupt_request":
            network.corrupt_request_at = draw.randrange(3_000)
        elif kind == "silent":
            network.silent_after = draw.randrange(200_000)
            self._end.wait(draw.uniform(0.1, 1.0))
            network.silent_after = None
        elif kind == "kill for good":
            server.end()
        elif kind == "stop for good":
            server.send(signal.SIGSTOP)
        else:
            assert kind == "silent for good"
            network.silent_after = 0
