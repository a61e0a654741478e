"""Servers and networks that fail by chance: each batch comes once, in order, bit for bit, or the right error in time.

`FASTPIPE_SERVICE_RUNS` says how many runs there are, each of which has another seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from service_chaos import NETWORK, SERVERS, Chaos
from service_faults import Proxy, ServerProcess, several, through

pytest.importorskip("pyarrow.flight")

RUNS = int(os.environ.get("FASTPIPE_SERVICE_RUNS", "2"))
# Seconds: what no run of transient faults exceeds; what servers that end for good are waited for, and an error may come
# later. A machine that runs other tests, too, may take its time.
LONG, SHORT, MARGIN = (40.0, 4.0, 1.5) if "FASTPIPE_SERVICE_RUNS" in os.environ else (250.0, 8.0, 20.0)
ROWS = 20_000

CONFIG = """
import numpy as np
import fastpipe

arrays = {{"id": np.arange({rows}), "x": np.random.default_rng({seed}).random(({rows}, 16), "float32")}}
reader = fastpipe.from_arrays(arrays, batch_size=64, shuffle=True, seed=7)
"""


def read(**options: Any) -> fastpipe.Reader:
    arrays = {"id": np.arange(ROWS), "x": np.random.default_rng(1).random((ROWS, 16), "float32")}
    return fastpipe.from_arrays(arrays, batch_size=64, shuffle=True, seed=7, **options)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of the data, and of other data."""
    folder = tmp_path_factory.mktemp("configs")
    ours, other = folder / "ours.py", folder / "other.py"
    ours.write_text(CONFIG.format(rows=ROWS, seed=1))
    other.write_text(CONFIG.format(rows=ROWS, seed=2))
    return ours, other


@pytest.fixture(scope="module")
def servers(configs: tuple[Path, Path]) -> Iterator[list[ServerProcess]]:
    with several(configs[0], 3) as found:
        yield found


class Consumer:
    """Takes batches, and holds them against those of a local reader.

    Attributes:
        taken: batches so far.
        last: when the last of them came.
    """

    def __init__(self, remote: fastpipe.Reader, draw: random.Random, epochs: int | None) -> None:
        self._batches, self._expected = iter(remote), iter(read(epochs=epochs))
        self._pause = draw.choice([0.0, 0.002, 0.005])
        self.taken = 0
        self.last = time.monotonic()

    def take(self, most: int | None = None) -> None:
        """Takes so many batches, or all that there are."""
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
    """No server comes back, and there is no fallback."""
    remote = fastpipe.connect(urls, epochs=None, prefetch=draw.choice([1, 8, None]), timeout=SHORT)
    consumer = Consumer(remote, draw, None)
    chaos.start(NETWORK)
    consumer.take(draw.randrange(300))
    chaos.ends_all()
    ended = time.monotonic()
    with pytest.raises(fastpipe.ServiceError, match=rf"no server has answered for {SHORT:g} seconds: .*127"):
        consumer.take()
    assert time.monotonic() - max(ended, consumer.last) < SHORT + MARGIN
    here = read(epochs=None)
    here.load_state_dict(remote.state_dict())
    assert next(iter(here))["id"].tobytes() == batch_of(consumer.taken)["id"].tobytes()


def batch_of(number: int) -> dict[str, Any]:
    """A batch of a pass without end."""
    epoch, step = divmod(number, ROWS // 64 + 1)
    return read().batch_at(step, epoch)


def replaced_by_the_fallback(urls: list[str], chaos: Chaos, draw: random.Random) -> None:
    """No server answers for a while, and the fallback does; then there are servers again."""
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
    """A server has other data when it comes back."""
    consumer = Consumer(fastpipe.connect(urls, epochs=None, prefetch=8, timeout=LONG), draw, None)
    chaos.start(NETWORK)
    consumer.take(draw.randrange(200))
    server.end()
    server.start(other)
    server.wait()
    try:
        with pytest.raises(fastpipe.StateError, match="other data"):
            consumer.take(100_000)
    finally:
        server.end()


@pytest.mark.timeout(600 + 60 * RUNS)
@pytest.mark.parametrize("first", range(0, RUNS, 10))
def test_what_fails_by_chance(servers: list[ServerProcess], configs: tuple[Path, Path], first: int) -> None:
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
