"""Networks and servers that fail, hang or have other data: each batch is the local one, or an error comes in time."""

from __future__ import annotations

import itertools
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe.service import Server
from samples import ids_by_batch as ids
from servers import free_port
from service_faults import ServerProcess, config_of, rows_of, several, through
from toy_units import Numbers

pytest.importorskip("pyarrow.flight")


def read(**options: Any) -> fastpipe.Reader:
    return rows_of(30_000, 16, **options)


def few() -> fastpipe.Reader:
    return rows_of(500, 1, batch_size=16)


def same(batch: dict[str, Any]) -> bytes:
    return b"".join(column.tobytes() for column in batch.values())


def slowly(batches: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for batch in batches:
        yield same(batch)
        time.sleep(0.015)


EXPECTED = [same(batch) for batch in read()]


# Other data.


@pytest.fixture
def configs(tmp_path: Path) -> tuple[Path, Path]:
    """Files of servers: one of the data, one of other data."""
    return config_of(read(), tmp_path, "ours"), config_of(rows_of(30_000, 16, 2), tmp_path, "other")


@pytest.fixture
def servers(configs: tuple[Path, Path]) -> Iterator[list[ServerProcess]]:
    with several(configs[0], 3) as found:
        yield found


def test_a_server_with_other_data_is_an_error(servers: list[ServerProcess], configs: tuple[Path, Path]) -> None:
    # Without end, because two servers may send an epoch before the third one listens again.
    batches = iter(fastpipe.connect([server.url for server in servers], prefetch=4, timeout=60, epochs=None))
    found = [same(next(batches))]
    servers[1].end()
    servers[1].start(configs[1])
    servers[1].wait()
    with pytest.raises(fastpipe.errors.StateError, match="other"):
        found.extend(slowly(batches))
    assert found == [same(batch) for batch in itertools.islice(read(epochs=None), len(found))]


def test_a_server_with_other_data_locates_no_row() -> None:
    with Server(few(), port=free_port()) as server:
        remote = fastpipe.connect(server.url, timeout=60)
        assert remote.locate(3, 5) == few().locate(3, 5)
        with pytest.raises(IndexError, match="row 99 does not exist"):
            remote.locate(3, 99)
    with Server(rows_of(500, 1, 2, batch_size=16), port=server.port):
        with pytest.raises(fastpipe.errors.StateError) as of_batches:
            remote.batch_at(3)
        with pytest.raises(fastpipe.errors.StateError, match=r"other data.*connect again") as of_places:
            remote.locate(3, 5)
        assert str(of_places.value) == str(of_batches.value)
    with Server(few(), port=server.port):
        assert remote.locate(3, 5) == few().locate(3, 5)


def test_any_server_that_listens_locates_rows() -> None:
    gone = f"grpc://127.0.0.1:{free_port()}"
    with few().serve() as server:
        remote = fastpipe.connect([gone, server.url, gone], timeout=5)
        assert remote.locate(3, 5) == few().locate(3, 5)
    with pytest.raises(fastpipe.errors.ServiceError, match=r"127\.0\.0\.1"):
        fastpipe.connect([gone, gone], timeout=0.5)
    with pytest.raises(fastpipe.errors.ServiceError, match=f"{gone}.*{server.url}"):
        remote.locate(3, 5)


# Damage, and other failures of the network.


@pytest.mark.parametrize(
    ("fault", "value"), [("delay", 0.02), ("cut_after", 300_000), ("corrupt_at", 200_000), ("silent_after", 100_000)]
)
def test_one_of_two_networks_fails(fault: str, value: float) -> None:
    with read().serve() as server, through(server.port) as network, through(server.port) as sound:
        urls = [network.url, sound.url]
        setattr(network, fault, value)
        found = []
        for batch in fastpipe.connect(urls, prefetch=8, timeout=60):
            found.append(same(batch))
            time.sleep(0.001)
        assert found == EXPECTED
        assert fault == "delay" or network.faults > 0


def flipped(data: bytes, at: int = -1) -> tuple[bytes, bytes]:
    """Returns data, and the same data with one bit changed."""
    changed = bytearray(data)
    changed[at] ^= 1
    return data, bytes(changed)


REQUESTS = [
    (b'seed\\": 7', b'seed\\": 6'),
    (b"fps1", b"fpx1"),
    (b"fps1", b"{ps1"),
    (b'"start"', b'"staRt"'),
    (b"{", b"["),
]


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        *(("corrupt_at", at) for at in (5_000, 60_000, 61_007, 150_003)),
        *(("change_request", change) for change in REQUESTS),
    ],
)
def test_damaged_batches_and_requests_are_requested_again(attribute: str, value: Any) -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, prefetch=8, timeout=60)
        setattr(network, attribute, value)
        assert [same(batch) for batch in remote] == EXPECTED
        assert network.faults == 1


@pytest.mark.parametrize(
    ("attribute", "change"),
    [
        *(("change_request", change) for change in (flipped(b'"reader": "default"', -2), (b"fps1", b"fps2"))),
        *(("change_answer", flipped(sent)) for sent in (b'"epochs": 1', b'seed\\": 7', b"\xf4\x01\x00\x00")),
        ("change_answer", flipped(b'batch_size\\": 16')),
    ],
)
def test_a_damaged_description_is_requested_again(attribute: str, change: tuple[bytes, bytes]) -> None:
    with few().serve() as server, through(server.port) as network:
        setattr(network, attribute, change)
        remote = fastpipe.connect(network.url, timeout=60)
        assert [same(batch) for batch in remote] == [same(batch) for batch in few()]
        assert network.faults == 1


@pytest.mark.parametrize(
    ("attribute", "sent"),
    [
        *(("change_request", sent) for sent in (b'"step": ', b'"digest"', b"fps1", b'"epoch"')),
        *(("change_answer", sent) for sent in (b'"fields"', b'"row": ', b'"kind"')),
    ],
)
def test_a_damaged_place_is_requested_again(attribute: str, sent: bytes) -> None:
    with few().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, timeout=60)
        setattr(network, attribute, flipped(sent, -2))
        assert remote.locate(3, 5) == few().locate(3, 5)
        assert network.faults == 1


@pytest.mark.parametrize("every", [30_000, 20_000])
def test_a_link_that_damages_most_batches_ends_the_pass(every: int) -> None:
    """A few batches arrive intact, so the link is never silent, but the pass would not end."""
    timeout = 3.0
    data = {"id": np.arange(30_000), "x": np.zeros((30_000, 16), "float32")}
    reader = fastpipe.from_arrays(data, batch_size=300, shuffle=True, seed=7, epochs=None)
    with reader.serve() as server, through(server.port) as network:
        batches = iter(fastpipe.connect(network.url, timeout=timeout))
        whole = [next(batches)["id"].tolist()]
        network.corrupt_every = every
        with pytest.raises(
            fastpipe.errors.ServiceError, match=r"most batches are damaged on their way: \d+ of the last \d+"
        ):
            whole.extend(batch["id"].tolist() for batch in batches)
        again = iter(reader)
        assert whole == [next(again)["id"].tolist() for _ in whole]


def test_a_link_that_damages_few_batches_does_not_end_the_pass() -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, timeout=60)
        network.corrupt_every = 60_000
        assert [same(batch) for batch in remote] == EXPECTED
        assert network.faults > 10


def test_the_fallback_replaces_a_link_that_damages_most_batches() -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, timeout=1, fallback=read())
        network.corrupt_every = 2_000
        assert [same(batch) for batch in remote] == EXPECTED
        assert network.faults > 0


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_connections_to_this_machine_use_no_proxy(variable: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "example.com")
    with Server(read(), host=host.strip("[]")) as server:
        remote = fastpipe.connect(f"grpc://{host}:{server.port}", timeout=60)
        assert same(next(iter(remote))) == EXPECTED[0]


# Seconds, and the tolerance on a busy machine. A second wait would exceed their sum.
TIMEOUT, MARGIN = 6.0, 5.5


def many(**options: Any) -> fastpipe.Reader:
    return rows_of(100_000, batch_size=10, **options)


def first(number: int) -> list[list[int]]:
    """Returns the first batches of a pass without end. A whole epoch may be in flight when its servers stop."""
    return ids(itertools.islice(many(epochs=None), number))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    with several(config_of(many(), tmp_path), 2) as found:
        yield found


def fails_in_time(match: str, *ask: Callable[[], object]) -> None:
    """Checks that simultaneous calls fail within the timeout."""

    def fails(ask: Callable[[], object]) -> float:
        begun = time.monotonic()
        with pytest.raises(fastpipe.errors.ServiceError, match=match):
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
    # First requests also hang.
    fails_in_time(
        both,
        lambda: next(iter(remote)),
        lambda: remote.batch_at(5),
        lambda: remote.locate(5, 0),
        lambda: fastpipe.connect(urls, timeout=TIMEOUT),
    )
    two[1].send(signal.SIGCONT)
    remote.set_epoch(0)
    # A server that hangs doesn't keep the client from asking the other one.
    begun = time.monotonic()
    patient = fastpipe.connect(urls, timeout=300)
    assert ids([patient.batch_at(0)]) == ids([many().batch_at(0)])
    assert patient.locate(5, 0) == many().locate(5, 0)
    assert time.monotonic() - begun < 100
    assert ids(next(iter(remote)) for _ in range(1)) == ids([many().batch_at(0)])


def test_one_server_has_ended_and_the_other_hangs(two: list[ServerProcess]) -> None:
    remote = fastpipe.connect([server.url for server in two], prefetch=4, timeout=TIMEOUT, epochs=None)
    batches = iter(remote)
    found = ids(next(batches) for _ in range(30))
    two[0].end()
    found += ids(next(batches) for _ in range(30))
    two[1].send(signal.SIGSTOP)
    fails_in_time(f":{two[1].port}", lambda: found.extend(batch["id"].tolist() for batch in batches))
    assert found == first(len(found))


def test_a_silent_connection_is_replaced() -> None:
    with many().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, prefetch=8, timeout=TIMEOUT)
        network.silent_after, network.silent_most = 20_000, 1
        assert ids(remote) == ids(many())
        assert network.faults == 1


def test_silent_connections_are_an_error_within_the_timeout() -> None:
    with many().serve() as server, ThreadPoolExecutor(3) as threads:
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

        with pytest.raises(fastpipe.errors.ServiceError, match=f":{network.port}"):
            consume()
        assert time.monotonic() - begun < TIMEOUT + MARGIN
        assert found == first(len(found))


def test_a_slow_link_carries_batches_that_take_long() -> None:
    """Each message takes 0.4 of the timeout, and messages that are queued wait for longer than the timeout."""
    timeout = 8.0
    data = {"id": np.arange(4), "x": np.zeros((4, 1 << 19), "uint8")}
    with fastpipe.from_arrays(data, batch_size=1).serve() as server, through(server.port) as network:
        network.rate = (1 << 19) / (0.4 * timeout)
        batches = iter(fastpipe.connect(network.url, timeout=timeout))
        found = ids([next(batches)])
        connections = network.connections
        assert found + ids(batches) == [[0], [1], [2], [3]]
        assert network.connections == connections, "the connection stays"


def test_a_client_waits_for_a_slow_server() -> None:
    gone = f"grpc://127.0.0.1:{free_port()}"
    slow = Numbers([2] * 7, lambda unit: time.sleep(0.2 * TIMEOUT))
    with fastpipe.read_units(slow, batch_size=2, num_threads=1, num_fetches=1).serve() as server:
        remote = fastpipe.connect([gone, server.url], prefetch=1, timeout=TIMEOUT)
        begun = time.monotonic()
        assert [batch["x"].tolist() for batch in remote] == [[2 * unit, 2 * unit + 1] for unit in range(7)]
        assert time.monotonic() - begun > TIMEOUT
