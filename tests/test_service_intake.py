"""What a server receives before a request begins: too much is refused, and others are served meanwhile."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import fastpipe
from processes import outputs, run
from service_faults import ServerProcess, serving

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")

MiB = 1 << 20
TOO_LARGE = "a request has 1048592 bytes at most"

CONFIG = """
import numpy as np
import fastpipe

reader = fastpipe.from_arrays({"id": np.arange(20_000)}, batch_size=100, shuffle=True, seed=7)
"""


def read(rows: int = 2000) -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(rows)}, batch_size=100, shuffle=True, seed=7)


def client_of(url: str, **options: Any) -> Any:
    """A client with its own connection. By default, the clients of a process share one."""
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    return flight.FlightClient(url, generic_options=own, **options)


def refused(client: Any, size: int, timeout: float = 60) -> str:
    """How a ticket of this size is refused."""
    with pytest.raises(pa.ArrowException) as raised:
        client.do_get(flight.Ticket(b" " * size), flight.FlightCallOptions(timeout=timeout)).read_all()
    return str(raised.value)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(CONFIG, tmp_path) as found:
        yield found


@pytest.mark.parametrize(("count", "size"), [(2, 300 * MiB), (20, 7 * MiB), (60, 3 * MiB // 2), (400, 19 * MiB // 10)])
def test_many_large_requests_at_once_take_little_memory(process: ServerProcess, count: int, size: int) -> None:
    assert process.process is not None
    watched = psutil.Process(process.process.pid)
    remote = fastpipe.connect(process.url, timeout=60)
    assert len(list(remote)) == 200
    clients = [client_of(process.url) for _ in range(count)]
    for client in clients:
        client.wait_for_available()
    before = most = watched.memory_info().rss

    def send(client: Any) -> None:
        told.append(refused(client, size))

    def look() -> None:
        nonlocal most
        while any(thread.is_alive() for thread in threads):
            most = max(most, watched.memory_info().rss)
            time.sleep(0.003)

    told: list[str] = []
    threads = [threading.Thread(target=send, args=(client,)) for client in clients]
    looking = threading.Thread(target=look)
    for thread in [*threads, looking]:
        thread.start()
    # Meanwhile another client has all batches, and so has a new one.
    remote.set_epoch(1)
    assert len(list(remote)) == 200
    assert len(list(fastpipe.connect(process.url, timeout=60))) == 200
    for thread in [*threads, looking]:
        thread.join()
    assert len(told) == count
    assert all(TOO_LARGE in one or "busy: large requests" in one for one in told), set(told)
    # 16 MiB, twice while the array grows that they are read into, and what connections hold.
    assert most - before < 100 * MiB, f"{(most - before) >> 20} MiB"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])
def test_a_connection_outlives_what_it_is_refused(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("there is no IPv6")
    with fastpipe.service.Server(read(), host=host) as server:
        client = client_of(server.url)
        for _ in range(4):
            assert TOO_LARGE in refused(client, 3 * MiB // 2)
        for _ in range(4):
            with pytest.raises(pa.ArrowInvalid, match="a request has 65536 bytes at most"):
                list(client.do_action(flight.Action("describe", b" " * (MiB // 2))))
        assert server.stats()["closed"] == 0
        assert len(list(fastpipe.connect(server.url))) == 20


def test_encrypted_and_locked_doors(certificates: Path) -> None:
    tls = (certificates / "server.pem", certificates / "server.key")
    trusted = (certificates / "ca.pem").read_bytes()
    with fastpipe.service.Server(read(), tls=tls, token="sesame") as server:
        remote = fastpipe.connect(server.url, ca=certificates / "ca.pem", token="sesame")
        # Without the token, nothing of it is read.
        assert "token" in refused(client_of(server.url, tls_root_certs=trusted), 50 * MiB)
        assert len(list(remote)) == 20
        remote.set_epoch(1)
        assert len(list(remote)) == 20


def test_a_program_that_ends_while_it_serves() -> None:
    script = """
        import numpy as np, fastpipe
        server = fastpipe.from_arrays({"id": np.arange(2000)}, batch_size=100).serve()
        print(sum(len(batch["id"]) for batch in fastpipe.connect(server.url)))
    """
    assert outputs(run(script)) == ["2000\n"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("stop", [False, True])
def test_a_forked_child_leaves_the_server_alone(stop: bool) -> None:
    with fastpipe.service.Server(read()) as server:
        assert len(list(fastpipe.connect(server.url))) == 20
        if (child := os.fork()) == 0:
            if stop:
                server.stop()
            del server
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(fastpipe.connect(server.url))) == 20


def test_two_servers_cannot_listen_at_one_port() -> None:
    with fastpipe.service.Server(read()) as server:
        with pytest.raises(OSError, match=f"can't listen at 127.0.0.1:{server.port}"):
            fastpipe.service.Server(read(), port=server.port)
        assert len(list(fastpipe.connect(server.url))) == 20
    with fastpipe.service.Server(read(), port=server.port) as again, suppress(fastpipe.ServiceError):
        assert len(list(fastpipe.connect(again.url))) == 20


def test_requests_that_never_end_hold_nobody_up() -> None:
    with read().serve() as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        assert len(list(fastpipe.connect(server.url))) == 20
        for one in silent:
            one.close()
