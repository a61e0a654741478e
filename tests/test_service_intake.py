"""What a server receives before a request begins: who sends too much is cut off, and nobody else."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

import fastpipe
from apart import wait_until
from fastpipe.service._intake import INTAKE, Arrived
from fastpipe.service._wire import as_error
from processes import outputs, run
from servers import free_port
from service_faults import ServerProcess, serving

flight = pytest.importorskip("pyarrow.flight")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a connection has received")

MiB = 1 << 20
# As in the product: so many bytes of a connection that belong to no request.
EACH = 2 * MiB

CONFIG = """
import numpy as np
import fastpipe

reader = fastpipe.from_arrays({"id": np.arange(20_000)}, batch_size=100, shuffle=True, seed=7)
"""


def read(rows: int = 2000) -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(rows)}, batch_size=100, shuffle=True, seed=7)


def client_of(url: str, **options: Any) -> Any:
    """A client with its own connection. By default, the clients of a process share one.

    Nor does it ask once more by itself, by another connection, which would be closed as well.
    """
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    return flight.FlightClient(url, generic_options=own, **options)


def refused(client: Any, size: int, timeout: float = 60) -> str:
    """How a ticket of this size is refused by name."""
    (chunk,) = client.do_get(flight.Ticket(b" " * size), flight.FlightCallOptions(timeout=timeout))
    return str(as_error(chunk.app_metadata.to_pybytes(), "a server"))


def cut_off(client: Any, size: int) -> None:
    """Sends a ticket of this size, whose connection is closed."""
    with pytest.raises(flight.FlightUnavailableError):
        list(client.do_get(flight.Ticket(b" " * size), flight.FlightCallOptions(timeout=60)))


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(CONFIG, tmp_path) as found:
        yield found


def test_huge_requests_take_little_memory(process: ServerProcess) -> None:
    assert process.process is not None
    watched = psutil.Process(process.process.pid)
    remote = fastpipe.connect(process.url, timeout=60)
    expected = [batch["id"].tolist() for batch in remote]
    before = watched.memory_info().rss
    most, ended = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.005):
            most = max(most, watched.memory_info().rss)

    def send() -> None:
        cut_off(client_of(process.url), 100 * MiB)

    threads = [threading.Thread(target=send) for _ in range(6)]
    looking = threading.Thread(target=look)
    for thread in [looking, *threads]:
        thread.start()
    # Meanwhile another client has all batches.
    for _ in range(3):
        remote.set_epoch(0)
        assert [batch["id"].tolist() for batch in remote] == expected
    for thread in threads:
        thread.join()
    ended.set()
    looking.join()
    # 600 MiB were to be sent, which take 3 GiB in the server.
    assert most - before < 500 * MiB, f"{(most - before) >> 20} MiB"
    metrics = next(iter(flight.FlightClient(process.url).do_action(flight.Action("metrics", b"")))).body.to_pybytes()
    assert "\nfastpipe_service_closed_total 6\n" in metrics.decode()


@pytest.mark.parametrize(("count", "size"), [(20, 7 * MiB), (60, 3 * MiB // 2), (400, 19 * MiB // 10)])
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
        # Some are refused by name, what is too much is cut off, and others wait until there is room.
        with suppress(flight.FlightUnavailableError, flight.FlightTimedOutError):
            assert "a ticket has 1048576 bytes at most" in refused(client, size, timeout=5)

    def look() -> None:
        nonlocal most
        while any(thread.is_alive() for thread in threads):
            most = max(most, watched.memory_info().rss)
            time.sleep(0.003)

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
    # Each is in memory four times when it begins: that would be 560 MiB, 360 MiB, and 3 GiB.
    assert most - before < 350 * MiB, f"{(most - before) >> 20} MiB"


def test_requests_count_until_they_have_begun() -> None:
    told: list[int] = []
    arrived = Arrived(lambda: told.append(5))
    assert told == []
    arrived.begun()
    arrived.begun()
    del arrived
    assert told == [5]
    # Nobody has asked what is in it, and its client has gone.
    Arrived(lambda: told.append(7))
    assert told == [5, 7]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])
def test_requests_that_begin_keep_a_connection(host: str, caplog: pytest.LogCaptureFixture) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("there is no IPv6")
    caplog.set_level(logging.CRITICAL, "fastpipe.service")
    with fastpipe.service.Server(read(), host=host) as server:
        client = client_of(server.url)
        # Each is refused by name, and is no more than a ticket may have by much. Together they are more than a
        # connection may send that no request begins with.
        size = 3 * MiB // 2
        for _ in range(3 * EACH // size):
            assert "a ticket has 1048576 bytes at most" in refused(client, size)
        body = b" " * size
        for _ in range(3 * EACH // size):
            with pytest.raises(flight.FlightError, match="a request has 65536 bytes at most"):
                list(client.do_action(flight.Action("describe", body)))
        assert server.stats()["closed"] == 0
        caplog.clear()
        caplog.set_level(logging.WARNING, "fastpipe.service")
        cut_off(client, 50 * MiB)
        assert wait_until(lambda: server.stats()["closed"] == 1)
    (told,) = [record.getMessage() for record in caplog.records if "closed" in record.getMessage()]
    assert "closed its connection, which sent" in told
    assert "bytes that belong to no request" in told


def test_encrypted_and_locked_doors(certificates: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "fastpipe.service")
    tls = (certificates / "server.pem", certificates / "server.key")
    trusted = (certificates / "ca.pem").read_bytes()
    with fastpipe.service.Server(read(), tls=tls, token="sesame") as server:
        remote = fastpipe.connect(server.url, ca=certificates / "ca.pem", token="sesame")
        # Without the token, no request begins.
        cut_off(client_of(server.url, tls_root_certs=trusted), 50 * MiB)
        assert wait_until(lambda: server.stats()["closed"] == 1)
        assert len(list(remote)) == 20
        remote.set_epoch(1)
        assert len(list(remote)) == 20
        assert server.stats()["closed"] == 1


def test_two_servers_and_one_that_has_stopped() -> None:
    first, second = fastpipe.service.Server(read()), fastpipe.service.Server(read())
    cut_off(client_of(first.url), 50 * MiB)
    assert wait_until(lambda: first.stats()["closed"] == 1)
    assert second.stats()["closed"] == 0
    first.stop()
    first.stop()
    cut_off(client_of(second.url), 50 * MiB)
    assert wait_until(lambda: second.stats()["closed"] == 1)
    second.stop()
    # Another one begins to look again.
    with fastpipe.service.Server(read()) as third:
        cut_off(client_of(third.url), 50 * MiB)
        assert wait_until(lambda: third.stats()["closed"] == 1)


def threads() -> set[str]:
    """The names of this process's threads, of Python's and others."""
    names = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # One that ended just now.
            names.add(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return names


def test_nothing_looks_when_nobody_serves() -> None:
    with fastpipe.service.Server(read()):
        assert wait_until(lambda: "fastpipe-intake" in threads())
        assert "fastpipe-closed" in {thread.name for thread in threading.enumerate()}
    assert "fastpipe-closed" not in {thread.name for thread in threading.enumerate()}
    assert wait_until(lambda: "fastpipe-intake" not in threads())


def test_a_program_that_ends_while_it_serves() -> None:
    # What looks has ended when Python takes its modules apart.
    script = """
        import os, threading, numpy as np, fastpipe

        class Last:
            def __del__(self, exists=os.path.exists):
                print(exists(f"/proc/self/task/{self.thread.native_id}"))

        last = Last()
        server = fastpipe.from_arrays({"id": np.arange(2000)}, batch_size=100).serve()
        last.thread = next(thread for thread in threading.enumerate() if thread.name == "fastpipe-closed")
        print(sum(len(batch["id"]) for batch in fastpipe.connect(server.url)))
    """
    assert outputs(run(script)) == ["2000\nFalse\n"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_looks_at_nothing() -> None:
    with fastpipe.service.Server(read()) as server:
        assert len(list(fastpipe.connect(server.url))) == 20
        if (child := os.fork()) == 0:
            quiet = not INTAKE._watched and INTAKE._thread is None and "fastpipe-intake" not in threads()
            os._exit(0 if quiet else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(fastpipe.connect(server.url))) == 20


def test_what_is_no_peer_harms_nothing() -> None:
    with fastpipe.service.Server(read()) as server:
        for peer in ("", "unix:x:1", "ipv4:1.2.3.4", "ipv4:1.2.3.4:99999", "\0", "ipv6:%5B"):
            INTAKE.begun(peer, 1 << 62)
        with pytest.raises(OverflowError):
            INTAKE.begun("ipv4:1.2.3.4:5", -1)
        cut_off(client_of(server.url), 50 * MiB)
        assert wait_until(lambda: server.stats()["closed"] == 1)


def test_a_server_that_cannot_be_looked_after_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start"):
            fastpipe.service.Server(read(), port=port)
    assert not INTAKE._watched
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert wait_until(lambda: "fastpipe-intake" not in threads())
    with fastpipe.service.Server(read(), port=port) as server:
        cut_off(client_of(server.url), 50 * MiB)
        assert wait_until(lambda: server.stats()["closed"] == 1)
