"""Many connections to one server: some send nothing, others request batches and never read them."""

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
from service_faults import ServerProcess, serving
from service_tickets import changed, identity

flight = pytest.importorskip("pyarrow.flight")

CONNECTIONS = int(os.environ.get("FASTPIPE_CONNECTIONS", "20"))
# Streams that nobody reads. There are fewer, since each takes a thread of the server.
READERS = CONNECTIONS * 3 // 10
BATCHES = 235
MiB = 1 << 20

CONFIG = """
import numpy as np
import fastpipe

arrays = {"id": np.arange(30_000), "x": np.random.default_rng(1).random((30_000, 500), "float32")}
reader = fastpipe.from_arrays(arrays, batch_size=128, shuffle=True, seed=7)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(CONFIG, tmp_path) as found:
        yield found


def client_of(server: ServerProcess) -> Any:
    """A client with its own connection. By default, the clients of a process share one."""
    return flight.FlightClient(server.url, generic_options=[("grpc.use_local_subchannel_pool", 1)])


def ticket(client: Any, seed: int) -> Any:
    """For all batches of an epoch with this seed."""
    answer = next(iter(client.do_action(flight.Action("describe", b'{"reader": "default"}'))))
    about = json.loads(answer.body.to_pybytes())
    said = {"version": about["version"], "reader": "default", "data": identity(about), "epoch": 0, "progress": None}
    said |= {"order": changed(about["order"], seed=seed), "start": 0, "stop": BATCHES, "until": BATCHES, "csr": False}
    return flight.Ticket(json.dumps(said).encode())


@pytest.mark.timeout(300 + CONNECTIONS)
def test_a_crowd_costs_bounded_memory_and_keeps_nobody_out(server: ServerProcess) -> None:
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    remote = fastpipe.connect(server.url, timeout=60)
    expected = [batch["id"].tolist() for batch in remote]
    assert len(expected) == BATCHES
    before = process.memory_info().rss

    with ExitStack() as open_:
        for _ in range(CONNECTIONS):
            open_.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        clients = [open_.enter_context(client_of(server)) for _ in range(READERS)]
        # Every second stream has the same order. An epoch has 60 MB.
        streams = [client.do_get(ticket(client, 7 if number % 2 else number)) for number, client in enumerate(clients)]
        for stream in streams[:8]:
            assert len(stream.read_chunk().data) == 1
        assert wait_until(lambda: len(process.net_connections()) > CONNECTIONS + READERS)

        # A client that reads gets its batches all the same.
        remote.set_epoch(0)
        assert [batch["id"].tolist() for batch in remote] == expected
        most = process.memory_info().rss - before
        # Batches that are kept, 16 passes, and for each stream a thread and a message.
        assert most < (320 + 1.5 * READERS) * MiB, f"{most >> 20} MiB"
        for stream in streams:
            stream.cancel()

        # Streams and clients keep their connections open.
        del stream, streams, clients

    # The crowd has gone, and the server serves as before.
    assert wait_until(lambda: len(process.net_connections()) < 20)
    remote.set_epoch(0)
    assert [batch["id"].tolist() for batch in remote] == expected
