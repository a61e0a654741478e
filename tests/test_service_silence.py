"""Servers that hang or are gone: whoever waits for them hears of it in time, and slow ones are waited for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from service_faults import ServerProcess, free_port, several, through

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.flight")

# Seconds, and what an error may come later. Twice the timeout, as if it were counted again, is more than both.
TIMEOUT, MARGIN = 2.0, 1.5

CONFIG = """
import numpy as np
import fastpipe

reader = fastpipe.from_arrays({"id": np.arange(100_000)}, batch_size=10, shuffle=True, seed=7)
"""


def read() -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(100_000)}, batch_size=10, shuffle=True, seed=7)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    config = tmp_path / "readers.py"
    config.write_text(CONFIG)
    with several(config, 2) as found:
        yield found


def fails_in_time(ask: Callable[[], object], match: str, timeout: float = TIMEOUT) -> None:
    begun = time.monotonic()
    with pytest.raises(fastpipe.ServiceError, match=match):
        ask()
    assert time.monotonic() - begun < timeout + MARGIN


def test_servers_that_hang_are_an_error_within_the_timeout(two: list[ServerProcess]) -> None:
    urls = [server.url for server in two]
    remote = fastpipe.connect(urls, prefetch=4, timeout=TIMEOUT)
    batches = iter(remote)
    found = ids(next(batches) for _ in range(30))
    for server in two:
        server.send(signal.SIGSTOP)
    both = f":{two[0].port}.*:{two[1].port}"
    fails_in_time(lambda: found.extend(batch["id"].tolist() for batch in batches), both)
    assert found == ids(read())[: len(found)]
    # What is asked of them first hangs, too.
    fails_in_time(lambda: next(iter(remote)), both)
    fails_in_time(lambda: remote.batch_at(5), both)
    fails_in_time(lambda: remote.locate(5, 0), both)
    fails_in_time(lambda: fastpipe.connect(urls, timeout=TIMEOUT), both)
    two[1].send(signal.SIGCONT)
    remote.set_epoch(0)
    begun = time.monotonic()
    assert ids([fastpipe.connect(urls, timeout=20).batch_at(0)]) == ids([read().batch_at(0)])
    assert remote.locate(5, 0) == read().locate(5, 0)
    assert time.monotonic() - begun < 10, "one that hangs doesn't keep from asking the other one"
    assert ids(next(iter(remote)) for _ in range(1)) == ids([read().batch_at(0)])


def test_one_server_is_gone_and_the_other_one_hangs(two: list[ServerProcess]) -> None:
    remote = fastpipe.connect([server.url for server in two], prefetch=4, timeout=TIMEOUT)
    batches = iter(remote)
    found = ids(next(batches) for _ in range(30))
    two[0].end()
    found += ids(next(batches) for _ in range(30))
    two[1].send(signal.SIGSTOP)
    fails_in_time(lambda: found.extend(batch["id"].tolist() for batch in batches), f":{two[1].port}")
    assert found == ids(read())[: len(found)]


def test_a_connection_that_breaks_without_a_word_is_replaced() -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, prefetch=8, timeout=TIMEOUT)
        network.silent_after, network.silent_most = 20_000, 1
        assert ids(remote) == ids(read())
        assert network.faults == 1


@pytest.mark.parametrize("silent_after", [0, 300, 3_000])
def test_connections_that_fall_silent_are_an_error_within_the_timeout(silent_after: int) -> None:
    with read().serve() as server, through(server.port) as network:
        network.silent_after = silent_after
        found: list[list[int]] = []
        begun = time.monotonic()

        def consume() -> None:
            nonlocal begun
            for batch in fastpipe.connect(network.url, prefetch=8, timeout=TIMEOUT):
                found.append(batch["id"].tolist())
                begun = time.monotonic()

        with pytest.raises(fastpipe.ServiceError, match=f":{network.port}"):
            consume()
        assert time.monotonic() - begun < TIMEOUT + MARGIN
        assert found == ids(read())[: len(found)]


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
        self.rows = [2, 2, 2]
        self.schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])

    def read(self, unit: int) -> Any:
        time.sleep(0.6 * TIMEOUT)
        return pa.table({"id": [2 * unit, 2 * unit + 1]}, self.schema)

    def fingerprint(self) -> str:
        return "slow"


def test_a_server_that_is_merely_slow_is_waited_for() -> None:
    gone = f"grpc://127.0.0.1:{free_port()}"
    with fastpipe.read_units(Slow(), batch_size=2, num_threads=1).serve() as server:
        remote = fastpipe.connect([gone, server.url], prefetch=1, timeout=TIMEOUT)
        begun = time.monotonic()
        assert ids(remote) == [[0, 1], [2, 3], [4, 5]]
        assert time.monotonic() - begun > TIMEOUT
