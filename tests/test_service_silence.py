"""Servers that hang or are gone: whoever waits for them hears of it in time, and slow ones are waited for."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from servers import free_port
from service_faults import ServerProcess, several, through

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.flight")

# Seconds, and what an error may come later on a busy machine. Twice the timeout, as if it were counted again, is more
# than both.
TIMEOUT, MARGIN = 6.0, 5.5

CONFIG = """
import numpy as np
import fastpipe

reader = fastpipe.from_arrays({"id": np.arange(100_000)}, batch_size=10, shuffle=True, seed=7)
"""


def read(**options: Any) -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(100_000)}, batch_size=10, shuffle=True, seed=7, **options)


def first(number: int) -> list[list[int]]:
    """The first batches of a pass without end: an epoch may be on its way as a whole when its servers stop."""
    return ids(itertools.islice(read(epochs=None), number))


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    config = tmp_path / "readers.py"
    config.write_text(CONFIG)
    with several(config, 2) as found:
        yield found


def fails_in_time(match: str, *ask: Callable[[], object]) -> None:
    """Each of these calls, which are made at once, fails when the timeout is over."""

    def fails(ask: Callable[[], object]) -> float:
        begun = time.monotonic()
        with pytest.raises(fastpipe.ServiceError, match=match):
            ask()
        return time.monotonic() - begun

    with ThreadPoolExecutor(len(ask)) as threads:
        assert max(threads.map(fails, ask)) < TIMEOUT + MARGIN


def test_servers_that_hang_are_an_error_within_the_timeout(two: list[ServerProcess]) -> None:
    urls = [server.url for server in two]
    remote = fastpipe.connect(urls, prefetch=4, timeout=TIMEOUT, epochs=None)
    batches = iter(remote)
    found = ids(next(batches) for _ in range(30))
    for server in two:
        server.send(signal.SIGSTOP)
    both = f":{two[0].port}.*:{two[1].port}"
    fails_in_time(both, lambda: found.extend(batch["id"].tolist() for batch in batches))
    assert found == first(len(found))
    # What is asked of them first hangs, too.
    fails_in_time(
        both,
        lambda: next(iter(remote)),
        lambda: remote.batch_at(5),
        lambda: remote.locate(5, 0),
        lambda: fastpipe.connect(urls, timeout=TIMEOUT),
    )
    two[1].send(signal.SIGCONT)
    remote.set_epoch(0)
    # One that hangs doesn't keep from asking the other one.
    begun = time.monotonic()
    patient = fastpipe.connect(urls, timeout=300)
    assert ids([patient.batch_at(0)]) == ids([read().batch_at(0)])
    assert patient.locate(5, 0) == read().locate(5, 0)
    assert time.monotonic() - begun < 100
    assert ids(next(iter(remote)) for _ in range(1)) == ids([read().batch_at(0)])


def test_one_server_is_gone_and_the_other_one_hangs(two: list[ServerProcess]) -> None:
    remote = fastpipe.connect([server.url for server in two], prefetch=4, timeout=TIMEOUT, epochs=None)
    batches = iter(remote)
    found = ids(next(batches) for _ in range(30))
    two[0].end()
    found += ids(next(batches) for _ in range(30))
    two[1].send(signal.SIGSTOP)
    fails_in_time(f":{two[1].port}", lambda: found.extend(batch["id"].tolist() for batch in batches))
    assert found == first(len(found))


def test_a_connection_that_breaks_without_a_word_is_replaced() -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, prefetch=8, timeout=TIMEOUT)
        network.silent_after, network.silent_most = 20_000, 1
        assert ids(remote) == ids(read())
        assert network.faults == 1


def test_connections_that_fall_silent_are_an_error_within_the_timeout() -> None:
    with read().serve() as server, ThreadPoolExecutor(3) as threads:
        list(threads.map(partial(falls_silent, server.port), (0, 300, 3_000)))


def falls_silent(port: int, silent_after: int) -> None:
    with through(port) as network:
        network.silent_after = silent_after
        found: list[list[int]] = []
        begun = time.monotonic()

        def consume() -> None:
            nonlocal begun
            for batch in fastpipe.connect(network.url, prefetch=8, timeout=TIMEOUT, epochs=None):
                found.append(batch["id"].tolist())
                begun = time.monotonic()

        with pytest.raises(fastpipe.ServiceError, match=f":{network.port}"):
            consume()
        assert time.monotonic() - begun < TIMEOUT + MARGIN
        assert found == first(len(found))


def test_a_slow_link_carries_batches_that_take_long() -> None:
    """Each of its messages takes 0.4 of the timeout, and what waits in between takes longer than that."""
    timeout = 8.0
    data = {"id": np.arange(4), "x": np.zeros((4, 1 << 19), "uint8")}
    with fastpipe.from_arrays(data, batch_size=1).serve() as server, through(server.port) as network:
        network.rate = (1 << 19) / (0.4 * timeout)
        batches = iter(fastpipe.connect(network.url, timeout=timeout))
        found = ids([next(batches)])
        connections = network.connections
        assert found + ids(batches) == [[0], [1], [2], [3]]
        assert network.connections == connections, "the connection stays"


class Slow:
    """Units that take their time."""

    def __init__(self) -> None:
        self.rows = [2] * 7
        self.schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])

    def read(self, unit: int) -> Any:
        time.sleep(0.2 * TIMEOUT)
        return pa.table({"id": [2 * unit, 2 * unit + 1]}, self.schema)

    def fingerprint(self) -> str:
        return "slow"


def test_a_server_that_is_merely_slow_is_waited_for() -> None:
    gone = f"grpc://127.0.0.1:{free_port()}"
    with fastpipe.read_units(Slow(), batch_size=2, num_threads=1, num_fetches=1).serve() as server:
        remote = fastpipe.connect([gone, server.url], prefetch=1, timeout=TIMEOUT)
        begun = time.monotonic()
        assert ids(remote) == [[2 * unit, 2 * unit + 1] for unit in range(7)]
        assert time.monotonic() - begun > TIMEOUT
