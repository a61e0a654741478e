"""Connections to a server: many, silent, slow, too large or forked ones cost little and don't delay other clients."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

import fastpipe
from apart import wait_until
from fastpipe.service import Server
from processes import outputs, run, together
from samples import ids_by_batch as ids
from service_faults import rows_of, serving
from service_tickets import Highest, client_of, ticket

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")

CONNECTIONS = int(os.environ.get("FASTPIPE_CONNECTIONS", "300"))
# Streams that no client reads. There are fewer, because each takes a thread of the server.
READERS = CONNECTIONS * 3 // 10
MiB = 1 << 20
TOO_LARGE = "a request must have at most 1048592 bytes"


def read() -> fastpipe.Reader:
    return rows_of(2000, batch_size=100)


def refused(client: Any, size: int) -> str:
    """Returns the error of a ticket of this size."""
    with pytest.raises(pa.ArrowException) as raised:
        client.do_get(flight.Ticket(b" " * size), flight.FlightCallOptions(timeout=60)).read_all()
    return str(raised.value)


# Many connections.


@pytest.mark.timeout(300 + CONNECTIONS)
def test_many_connections_cost_bounded_memory_and_delay_no_other_client(tmp_path: Path) -> None:
    reader = rows_of(30_000, 500, batch_size=128)
    expected = ids(reader)
    with serving(reader, tmp_path) as server:
        process = server.watched()
        remote = fastpipe.connect(server.url, timeout=60)
        assert ids(remote) == expected
        before = process.memory_info().rss

        with ExitStack() as open_:
            for _ in range(CONNECTIONS):
                open_.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            clients = [open_.enter_context(client_of(server.url)) for _ in range(READERS)]
            # Every second stream has the same order. An epoch has 60 MB.
            streams = [
                client.do_get(ticket(client, 0, len(expected), seed=7 if number % 2 else number))
                for number, client in enumerate(clients)
            ]
            for stream in streams[:8]:
                assert len(stream.read_chunk().data) == 1
            assert wait_until(lambda: len(process.net_connections()) > CONNECTIONS + READERS)

            # A client that reads gets its batches all the same.
            remote.set_epoch(0)
            assert ids(remote) == expected
            most = process.memory_info().rss - before
            # The kept batches, 16 passes, and a thread and a message for each stream.
            assert most < (320 + 1.5 * READERS) * MiB, f"{most >> 20} MiB"
            for stream in streams:
                stream.cancel()
            # Streams and clients keep their connections open.
            del stream, streams, clients

        # Afterwards the server serves as before.
        assert wait_until(lambda: len(process.net_connections()) < 20)
        remote.set_epoch(0)
        assert ids(remote) == expected


# Large requests.


@pytest.mark.parametrize(("count", "size"), [(2, 300 * MiB), (20, 7 * MiB), (60, 3 * MiB // 2), (400, 19 * MiB // 10)])
def test_many_large_requests_at_once_take_little_memory(tmp_path: Path, count: int, size: int) -> None:
    with serving(rows_of(20_000, batch_size=100), tmp_path) as server:
        watched = server.watched()
        remote = fastpipe.connect(server.url, timeout=60)
        assert len(list(remote)) == 200
        clients = [client_of(server.url) for _ in range(count)]
        for client in clients:
            client.wait_for_available()
        told: list[str] = []
        threads = [threading.Thread(target=lambda of=of: told.append(refused(of, size))) for of in clients]
        before = watched.memory_info().rss
        with Highest(lambda: watched.memory_info().rss) as most:
            for thread in threads:
                thread.start()
            # At the same time, an older and a new client get all batches.
            remote.set_epoch(1)
            assert len(list(remote)) == 200
            assert len(list(fastpipe.connect(server.url, timeout=60))) == 200
            for thread in threads:
                thread.join()
    assert len(told) == count
    assert all(TOO_LARGE in one or "busy: large requests" in one for one in told), set(told)
    # 16 MiB, twice while the array that they are read into grows, and the buffers of connections.
    assert most.value - before < 100 * MiB, f"{(most.value - before) >> 20} MiB"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])
def test_a_connection_survives_refused_requests(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("there is no IPv6")
    with Server(read(), host=host) as server:
        client = client_of(server.url)
        for size in (MiB + 17, MiB + 300, 3 * MiB // 2, 3 * MiB // 2):
            assert TOO_LARGE in refused(client, size)
        for _ in range(4):
            with pytest.raises(pa.ArrowInvalid, match="a request must have at most 589824 bytes"):
                list(client.do_action(flight.Action("describe", b" " * (MiB * 3 // 4))))
        assert server.stats()["closed"] == 0
        assert len(list(fastpipe.connect(server.url))) == 20


def test_large_requests_of_encrypted_clients_without_a_token_are_refused(certificates: Path) -> None:
    tls = (certificates / "server.pem", certificates / "server.key")
    with Server(read(), tls=tls, token="sesame") as server:
        remote = fastpipe.connect(server.url, ca=certificates / "ca.pem", token="sesame")
        # Without the token, the server doesn't read the request.
        trusted = (certificates / "ca.pem").read_bytes()
        assert "token" in refused(client_of(server.url, tls_root_certs=trusted), 50 * MiB)
        for _ in range(2):
            assert len(list(remote)) == 20


# Addresses and ports.


def listening(process: psutil.Process, port: int) -> set[str]:
    """Returns the addresses at which a process listens at a port."""
    found = process.net_connections(kind="tcp")
    return {
        one.laddr.ip.removeprefix("::ffff:")
        for one in found
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }


def test_servers_listen_at_loopback_by_default(tmp_path: Path) -> None:
    here = psutil.Process()
    with read().serve() as server:
        assert listening(here, server.port) == {"127.0.0.1"}
    with Server(read()) as server:
        assert listening(here, server.port) == {"127.0.0.1"}
    for arguments, addresses in ((), ({"127.0.0.1"},)), (("--host", "0.0.0.0"), ({"0.0.0.0"}, {"::"})):
        with serving(read(), tmp_path, *arguments) as process:
            assert listening(process.watched(), process.port) in addresses
            assert ids(fastpipe.connect(process.url)) == ids(read())


def test_two_servers_cannot_listen_at_one_port() -> None:
    with Server(read()) as server:
        with pytest.raises(OSError, match=f"can't listen at 127.0.0.1:{server.port}"):
            Server(read(), port=server.port)
        assert len(list(fastpipe.connect(server.url))) == 20
    with Server(read(), port=server.port) as again:
        assert len(list(fastpipe.connect(again.url))) == 20


# Threads and forks.


def test_two_threads_read_one_pass() -> None:
    with read().serve() as server:
        batches, found = iter(fastpipe.connect(server.url)), list[list[int]]()
        together(threading.Thread(target=lambda: found.extend(ids(batches))) for _ in range(2))
        assert sorted(found) == sorted(ids(read()))


def test_a_program_may_end_while_it_serves() -> None:
    script = """
        import numpy as np, fastpipe
        server = fastpipe.from_arrays({"id": np.arange(2000)}, batch_size=100).serve()
        print(sum(len(batch["id"]) for batch in fastpipe.connect(server.url)))
    """
    assert outputs(run(script)) == ["2000\n"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("stop", [False, True])
def test_a_forked_child_does_not_affect_the_server(stop: bool) -> None:
    with Server(read()) as server:
        assert len(list(fastpipe.connect(server.url))) == 20
        if (child := os.fork()) == 0:
            if stop:
                server.close()
            del server
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(fastpipe.connect(server.url))) == 20


def test_a_forked_child_opens_a_new_connection() -> None:
    script = """
        import os, sys, fastpipe
        remote = fastpipe.connect(sys.argv[1])
        begun = iter(remote)
        next(begun)
        if (child := os.fork()) == 0:
            try:
                next(begun)
            except fastpipe.errors.PassClosedError:
                os._exit(7 if len(list(remote)) == len(list(fastpipe.connect(sys.argv[1]))) == 20 else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(list(begun)) == 19
        print("both")
    """
    with read().serve() as server:
        assert outputs(run(script, server.url)) == ["both\n"]
