"""Servers that are killed, stopped or replaced, and networks that fail: each batch comes once and in order."""

from __future__ import annotations

import itertools
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from servers import free_port
from service_faults import ServerProcess, several, through

pytest.importorskip("pyarrow.flight")

from fastpipe.service import Server

ROWS = 30_000

CONFIG = """
import numpy as np
import fastpipe

arrays = {{"id": np.arange({rows}), "x": np.random.default_rng({seed}).random(({rows}, 16), "float32")}}
reader = fastpipe.from_arrays(arrays, batch_size=64, shuffle=True, seed=7)
"""


def arrays(seed: int = 1) -> dict[str, Any]:
    return {"id": np.arange(ROWS), "x": np.random.default_rng(seed).random((ROWS, 16), "float32")}


def read(**options: Any) -> fastpipe.Reader:
    return fastpipe.from_arrays(arrays(), batch_size=64, shuffle=True, seed=7, **options)


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    return [batch["id"].tobytes() + batch["x"].tobytes() for batch in read()]


def same(batch: dict[str, Any]) -> bytes:
    return batch["id"].tobytes() + batch["x"].tobytes()


def slowly(batches: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for batch in batches:
        yield same(batch)
        time.sleep(0.015)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of the data, and of other data."""
    folder = tmp_path_factory.mktemp("configs")
    ours, other = folder / "ours.py", folder / "other.py"
    ours.write_text(CONFIG.format(rows=ROWS, seed=1))
    other.write_text(CONFIG.format(rows=ROWS, seed=2))
    return ours, other


@pytest.fixture
def servers(configs: tuple[Path, Path]) -> Iterator[list[ServerProcess]]:
    with several(configs[0], 3) as found:
        yield found


def test_a_server_with_other_data_is_an_error(
    servers: list[ServerProcess], configs: tuple[Path, Path], expected: list[bytes]
) -> None:
    # Without end: two servers may bring an epoch before the third one listens again.
    remote = fastpipe.connect([server.url for server in servers], prefetch=4, timeout=60, epochs=None)
    batches = iter(remote)
    found = [same(next(batches))]
    servers[1].end()
    servers[1].start(configs[1])
    servers[1].wait()
    with pytest.raises(fastpipe.StateError, match="other"):
        found.extend(slowly(batches))
    assert found == [same(batch) for batch in itertools.islice(read(epochs=None), len(found))]


def test_a_server_ends_by_sigterm_and_says_nothing_of_it(configs: tuple[Path, Path]) -> None:
    server = ServerProcess(configs[0])
    server.start()
    server.wait()
    next(iter(fastpipe.connect(server.url)))
    assert server.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("fault", ["delay", "cut", "corrupt", "silent"])
def test_networks_that_fail(fault: str, expected: list[bytes]) -> None:
    with read().serve() as server, through(server.port) as network, through(server.port) as sound:
        urls = [network.url, sound.url]
        if fault == "delay":
            network.delay = 0.02
        elif fault == "cut":
            network.cut_after = 300_000
        elif fault == "corrupt":
            network.corrupt_at = 200_000
        else:
            network.silent_after = 100_000
        found = []
        for batch in fastpipe.connect(urls, prefetch=8, timeout=60):
            found.append(same(batch))
            time.sleep(0.001)
        assert found == expected
        assert fault == "delay" or network.faults > 0


@pytest.mark.parametrize("at", [5_000, 60_000, 61_007, 150_003])
def test_a_network_alone_that_changes_bytes(at: int, expected: list[bytes]) -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, prefetch=8, timeout=60)
        network.corrupt_at = at
        assert [same(batch) for batch in remote] == expected
        assert network.faults == 1


@pytest.mark.parametrize(
    ("sent", "came"),
    [(b'seed\\": 7', b'seed\\": 6'), (b"fps1", b"fpx1"), (b"fps1", b"{ps1"), (b'"start"', b'"staRt"'), (b"{", b"[")],
)
def test_a_network_that_changes_requests(sent: bytes, came: bytes, expected: list[bytes]) -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, prefetch=8, timeout=60)
        network.change_request = (sent, came)
        assert [same(batch) for batch in remote] == expected
        assert network.faults == 1


@pytest.mark.parametrize(("sent", "came"), [(b'"reader": "default"', b'"reader": "defaulu"'), (b"fps1", b"fps2")])
def test_a_network_that_changes_what_is_asked_first(sent: bytes, came: bytes, expected: list[bytes]) -> None:
    with read().serve() as server, through(server.port) as network:
        network.change_request = (sent, came)
        assert [same(batch) for batch in fastpipe.connect(network.url, timeout=60)] == expected
        assert network.faults == 1


@pytest.mark.parametrize("every", [30_000, 20_000])
def test_a_link_that_damages_most_batches_ends_the_pass(every: int, expected: list[bytes]) -> None:
    """Some come whole, so something comes all the time; yet the pass would take for ever."""
    timeout = 3.0
    data = {"id": np.arange(ROWS), "x": np.zeros((ROWS, 16), "float32")}
    reader = fastpipe.from_arrays(data, batch_size=300, shuffle=True, seed=7, epochs=None)
    with reader.serve() as server, through(server.port) as network:
        batches = iter(fastpipe.connect(network.url, timeout=timeout))
        whole = [next(batches)["id"].tolist()]
        network.corrupt_every = every
        with pytest.raises(fastpipe.ServiceError, match=r"most batches are damaged on their way: \d+ of the last \d+"):
            whole.extend(batch["id"].tolist() for batch in batches)
        again = iter(reader)
        assert whole == [next(again)["id"].tolist() for _ in whole]


def test_a_link_that_damages_few_batches_ends_no_pass(expected: list[bytes]) -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, timeout=60)
        network.corrupt_every = 60_000
        assert [same(batch) for batch in remote] == expected
        assert network.faults > 10


def test_a_fallback_goes_on_where_a_link_damages_most_batches(expected: list[bytes]) -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, timeout=1, fallback=read())
        network.corrupt_every = 2_000
        assert [same(batch) for batch in remote] == expected
        assert network.faults > 0


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_no_proxy_stands_before_this_machine(
    variable: str, host: str, expected: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "example.com")
    with Server(read(), host=host.strip("[]")) as server:
        remote = fastpipe.connect(f"grpc://{host}:{server.port}", timeout=60)
        assert same(next(iter(remote))) == expected[0]
