"""A crowd at one server: connections that say nothing, and clients that don't read what they have asked for."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

import fastpipe
from apart import wait_until
from service_faults import ServerProcess

flight = pytest.importorskip("pyarrow.flight")

CONNECTIONS = int(os.environ.get("FASTPIPE_CONNECTIONS", "200"))
# Streams that are begun and not read: fewer, since each is a connection and a thread of the server's.
READERS = CONNECTIONS * 3 // 10
MiB = 1 << 20

CONFIG = """
import numpy as np
import fastpipe

arrays = {"id": np.arange(30_000), "x": np.random.default_rng(1).random((30_000, 500), "float32")}
reader = fastpipe.from_arrays(arrays, batch_size=128, shuffle=True, seed=7)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    config = tmp_path / "crowd.py"
    config.write_text(CONFIG)
    found = ServerProcess(config)
    found.start()
    found.wait()
    yield found
    found.end()


def client_of(server: ServerProcess) -> Any:
    """A client with a connection of its own; those of one process share one otherwise."""
    return flight.FlightClient(server.url, generic_options=[("grpc.use_local_subchannel_pool", 1)])


def ticket(client: Any, seed: int) -> Any:
    """Of a whole epoch, shuffled so."""
    answer = next(iter(client.do_action(flight.Action("describe", b'{"reader": "default"}'))))
    about = json.loads(answer.body.to_pybytes())
    said = {"version": 1, "reader": "default", "data": about["fingerprints"]["2"], "epoch": 0, "progress": None}
    said |= {"order": about["order"] | {"seed": seed}, "start": 0, "stop": 234, "until": 234, "csr": False}
    return flight.Ticket(json.dumps(said).encode())


@pytest.mark.timeout(300 + CONNECTIONS)
def test_a_crowd_costs_bounded_memory_and_keeps_nobody_out(server: ServerProcess) -> None:
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    remote = fastpipe.connect(server.url, timeout=60)
    expected = [batch["id"].tolist() for batch in remote]
    assert len(expected) == 235
    before = process.memory_info().rss

    with ExitStack() as open_:
        for _ in range(CONNECTIONS):
            open_.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        clients = [open_.enter_context(client_of(server)) for _ in range(READERS)]
        # Half of them one order, the others each another: some 60 MB, of which each has taken one batch.
        streams = [client.do_get(ticket(client, 7 if number % 2 else number)) for number, client in enumerate(clients)]
        for stream in streams[:8]:
            assert len(stream.read_chunk().data) == 1
        assert wait_until(lambda: len(process.net_connections()) > CONNECTIONS + READERS, 30)

        # Whoever does read isn't kept waiting by them.
        remote.set_epoch(0)
        assert [batch["id"].tolist() for batch in remote] == expected
        most = process.memory_info().rss - before
        # What is kept for other clients, 16 passes at most, and a message and a thread for each stream.
        assert most < (320 + 1.5 * READERS) * MiB, f"{most >> 20} MiB"
        for stream in streams:
            stream.cancel()

        # A connection lasts as long as its client.
        del stream, streams, clients

    # The crowd has gone, and so has what it took.
    assert wait_until(lambda: len(process.net_connections()) < 20, 60)
    remote.set_epoch(0)
    assert [batch["id"].tolist() for batch in remote] == expected
