"""Servers that are killed, stopped or replaced, and networks that fail: each batch comes once and in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from service_faults import ServerProcess, several, through

pytest.importorskip("pyarrow.flight")

ROWS = 30_000

CONFIG = """
import numpy as np
import fastpipe

arrays = {{"id": np.arange({rows}), "x": np.random.default_rng({seed}).random(({rows}, 16), "float32")}}
reader = fastpipe.from_arrays(arrays, batch_size=64, shuffle=True, seed=7)
"""


def arrays(seed: int = 1) -> dict[str, Any]:
    return {"id": np.arange(ROWS), "x": np.random.default_rng(seed).random((ROWS, 16), "float32")}


def read() -> fastpipe.Reader:
    return fastpipe.from_arrays(arrays(), batch_size=64, shuffle=True, seed=7)


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
    remote = fastpipe.connect([server.url for server in servers], prefetch=4, timeout=20)
    batches = iter(remote)
    found = [same(next(batches))]
    servers[1].end()
    servers[1].start(configs[1])
    servers[1].wait()
    with pytest.raises(fastpipe.StateError, match="other"):
        found.extend(slowly(batches))
    assert found == expected[: len(found)]


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
        for batch in fastpipe.connect(urls, prefetch=8, timeout=15):
            found.append(same(batch))
            time.sleep(0.001)
        assert found == expected
        assert fault == "delay" or network.faults > 0


@pytest.mark.parametrize("at", [5_000, 60_000, 61_007, 150_003])
def test_a_network_alone_that_changes_bytes(at: int, expected: list[bytes]) -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, prefetch=8, timeout=15)
        network.corrupt_at = at
        assert [same(batch) for batch in remote] == expected
        assert network.faults == 1


@pytest.mark.parametrize(
    ("sent", "came"),
    [(b'"seed": 7', b'"seed": 6'), (b"fps1", b"fpx1"), (b"fps1", b"{ps1"), (b'"start"', b'"staRt"'), (b"{", b"[")],
)
def test_a_network_that_changes_requests(sent: bytes, came: bytes, expected: list[bytes]) -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, prefetch=8, timeout=15)
        network.change_request = (sent, came)
        assert [same(batch) for batch in remote] == expected
        assert network.faults == 1


@pytest.mark.parametrize(("sent", "came"), [(b'"reader": "default"', b'"reader": "defaulu"'), (b"fps1", b"fps2")])
def test_a_network_that_changes_what_is_asked_first(sent: bytes, came: bytes, expected: list[bytes]) -> None:
    with read().serve() as server, through(server.port) as network:
        network.change_request = (sent, came)
        assert [same(batch) for batch in fastpipe.connect(network.url, timeout=15)] == expected
        assert network.faults == 1
