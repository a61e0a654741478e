"""Random failures of servers and networks: each batch comes once, in order and unchanged, or the right error in time.

`FASTPIPE_SERVICE_RUNS` is the number of runs. Each run has another seed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from service_faults import Proxy, ServerProcess, config_of, rows_of, several, through

pytest.importorskip("pyarrow.flight")

RUNS = int(os.environ.get("FASTPIPE_SERVICE_RUNS", "2"))
# Seconds: a timeout that no run of transient faults exceeds; the timeout of runs whose servers end for good; and the
# tolerance for its error. A machine that also runs other tests is slow.
LONG, SHORT, MARGIN = (40.0, 4.0, 1.5) if "FASTPIPE_SERVICE_RUNS" in os.environ else (250.0, 8.0, 20.0)
ROWS = 20_000

SERVERS = ("kill", "terminate", "stop", "restart", "all")
"""Faults of servers. For a moment, all servers may be gone."""

NETWORK = ("stop", "delay", "cut", "corrupt", "corrupt_request", "silent")
"""Faults after which the processes still run."""


class Chaos:
    """Random faults of servers and their networks.

    Args:
        servers: Servers that listen.
        networks: A network for each server.
        draw: The generator of the faults.

    Attributes:
        done: The faults so far.
    """

    def __init__(self, servers: Sequence[ServerProcess], networks: Sequence[Proxy], draw: random.Random) -> None:
        self._servers, self._networks, self._draw = servers, networks, draw
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.done: list[str] = []

    def start(self, kinds: Sequence[str]) -> None:
        """Makes faults in another thread, until `end`."""
        self._thread = threading.Thread(target=self._run, args=(kinds,))
        self._thread.start()

    def end(self) -> None:
        """Makes no more faults, and repairs nothing."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def heal(self) -> None:
        """Repairs all servers and networks."""
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
        """Ends the answers of all servers: each is killed or stopped, or its network carries no data."""
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
                # On a busy machine, slow servers would otherwise end before they listen.
                server.wait()
            server.end(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            # Otherwise it stays away until another fault restarts it.
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
        elif kind == "corrupt":
            network.corrupt_at = draw.randrange(300_000)
        elif kind == "corrupt_request":
            network.corrupt_request_at = draw.randrange(3_000)
        elif kind in ("delay", "cut", "silent"):
            attribute, value, healed, most = {
                "delay": ("delay", draw.choice([0.005, 0.02]), 0.0, 0.5),
                "cut": ("cut_after", draw.choice([0, draw.randrange(500_000)]), None, 0.5),
                "silent": ("silent_after", draw.randrange(200_000), None, 1.0),
            }[kind]
            setattr(network, attribute, value)
            self._end.wait(draw.uniform(0.1, most))
            setattr(network, attribute, healed)
        elif kind == "kill for good":
            server.end()
        elif kind == "stop for good":
            server.send(signal.SIGSTOP)
        else:
            assert kind == "silent for good"
            network.silent_after = 0


def read(**options: Any) -> fastpipe.Reader:
    return rows_of(ROWS, 16, **options)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of servers: one of the data, one of other data."""
    folder = tmp_path_factory.mktemp("configs")
    return config_of(read(), folder, "ours"), config_of(rows_of(ROWS, 16, 2), folder, "other")


@pytest.fixture(scope="module")
def servers(configs: tuple[Path, Path]) -> Iterator[list[ServerProcess]]:
    with several(configs[0], 3) as found:
        yield found


class Consumer:
    """Takes batches, and compares them with a local reader's.

    Attributes:
        taken: The number of batches so far.
        last: The time of the last batch.
    """

    def __init__(self, remote: fastpipe.Reader, draw: random.Random, epochs: int | None) -> None:
        self._batches, self._expected = iter(remote), iter(read(epochs=epochs))
        self._pause = draw.choice([0.0, 0.002, 0.005])
        self.taken = 0
        self.last = time.monotonic()

    def take(self, most: int | None = None) -> None:
        """Takes this many batches, or all."""
        stop = None if most is None else self.taken + most
        while self.taken != stop:
            batch = next(self._batches, None)
            if batch is None:
                assert next(self._expected, None) is None, f"{self.taken} batches are too few"
                return
            expected = next(self._expected)
            for name in expected:
                assert batch[name].tobytes() == expected[name].tobytes(), f"batch {self.taken}"
            self.taken += 1
            self.last = time.monotonic()
            time.sleep(self._pause)


def transient(urls: list[str], chaos: Chaos, draw: random.Random) -> None:
    """All servers may be gone, but not for long."""
    consumer = Consumer(fastpipe.connect(urls, prefetch=draw.choice([1, 8, None]), timeout=LONG), draw, 1)
    chaos.start([*SERVERS, *NETWORK])
    consumer.take()
    assert consumer.taken == ROWS // 64 + 1


def for_good(urls: list[str], chaos: Chaos, draw: random.Random) -> None:
    """All servers end for good, without a fallback."""
    remote = fastpipe.connect(urls, epochs=None, prefetch=draw.choice([1, 8, None]), timeout=SHORT)
    consumer = Consumer(remote, draw, None)
    chaos.start(NETWORK)
    consumer.take(draw.randrange(300))
    chaos.ends_all()
    ended = time.monotonic()
    with pytest.raises(
        fastpipe.errors.ServiceError, match=rf"no server has answered for {SHORT:g} seconds: .*{'.*'.join(urls)}"
    ):
        consumer.take()
    assert time.monotonic() - max(ended, consumer.last) < SHORT + MARGIN
    here = read(epochs=None)
    here.load_state_dict(remote.state_dict())
    assert next(iter(here))["id"].tobytes() == batch_of(consumer.taken)["id"].tobytes()


def batch_of(number: int) -> dict[str, Any]:
    """Returns a batch of a pass without end."""
    epoch, step = divmod(number, ROWS // 64 + 1)
    return read().batch_at(step, epoch)


def replaced_by_the_fallback(urls: list[str], chaos: Chaos, draw: random.Random) -> None:
    """The fallback replaces all servers for a while; then servers answer again."""
    prefetch = draw.choice([1, 8, None])
    remote = fastpipe.connect(urls, epochs=None, prefetch=prefetch, timeout=1, fallback=read())
    consumer = Consumer(remote, draw, None)
    chaos.start([*SERVERS, *NETWORK])
    consumer.take(draw.randrange(300))
    chaos.ends_all()
    begun = time.monotonic()
    consumer.take(400)
    assert time.monotonic() - begun < 30
    chaos.heal()
    consumer.take(100)


def replaced_by_others(urls: list[str], chaos: Chaos, draw: random.Random, server: ServerProcess, other: Path) -> None:
    """A server has other data after its restart."""
    consumer = Consumer(fastpipe.connect(urls, epochs=None, prefetch=8, timeout=LONG), draw, None)
    chaos.start(NETWORK)
    consumer.take(draw.randrange(200))
    server.end()
    server.start(other)
    server.wait()
    try:
        with pytest.raises(fastpipe.errors.StateError, match="other data"):
            consumer.take(100_000)
    finally:
        server.end()


@pytest.mark.timeout(600 + 60 * RUNS)
@pytest.mark.parametrize("first", range(0, RUNS, 10))
def test_random_failures(servers: list[ServerProcess], configs: tuple[Path, Path], first: int) -> None:
    for run in range(first, min(first + 10, RUNS)):
        draw = random.Random(run)
        with ExitStack() as stack:
            networks: list[Proxy] = [stack.enter_context(through(server.port)) for server in servers]
            chaos = Chaos(servers, networks, draw)
            stack.callback(chaos.heal)
            urls = [network.url for network in networks]
            try:
                if run % 4 == 0:
                    transient(urls, chaos, draw)
                elif run % 4 == 1:
                    for_good(urls, chaos, draw)
                elif run % 4 == 2:
                    replaced_by_the_fallback(urls, chaos, draw)
                else:
                    replaced_by_others(urls, chaos, draw, draw.choice(servers), configs[1])
            except BaseException as error:
                error.add_note(f"run {run}: {', '.join(chaos.done)}")
                raise
