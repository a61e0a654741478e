"""Clients that ask for much at once or don't read: a server bounds its work, and serves other clients."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import psutil
import pytest

import fastpipe
from apart import wait_until
from fastpipe.service import Server, _server
from samples import ids_by_batch as ids
from service_faults import rows_of, through
from service_tickets import answer, client_of, entries, ticket
from toy_units import Numbers

flight = pytest.importorskip("pyarrow.flight")

BATCHES = 40


def read(**options: Any) -> fastpipe.Reader:
    """20 MB in batches of 0.5 MB: more than connections buffer."""
    return rows_of(20_000, 250, **{"batch_size": 500} | options)


EXPECTED = ids(read())


def describes(client: Any) -> bool:
    """Returns whether the server isn't too busy to describe its readers."""
    try:
        return bool(entries(client))
    except flight.FlightUnavailableError:
        return False


@contextmanager
def holding(server: Server, count: int, *, reads: bool = True, **options: Any) -> Iterator[None]:
    """Open requests, whose clients read one message. If `reads` is false they read none, and each has another order."""
    with ExitStack() as open_:
        clients = [open_.enter_context(client_of(server.url)) for _ in range(count + 1)]
        # Made first, since a busy server doesn't describe its readers. A reader's first request may still be open.
        assert wait_until(lambda: describes(clients[0]))
        tickets = [
            ticket(clients[0], 0, BATCHES, **options, **({} if reads else {"seed": seed}))
            for seed in range(1 if reads else count)
        ]
        streams = []
        for number, client in enumerate(clients[1:]):
            stream = client.do_get(tickets[number % len(tickets)])
            if reads:
                stream.read_chunk()
            streams.append(stream)
        try:
            yield
        finally:
            for stream in streams:
                stream.cancel()
            del stream, streams


def answers(client: Any, asked: Any) -> bool:
    """Returns whether the server isn't busy."""
    try:
        return isinstance(answer(client, asked), int)
    except flight.FlightUnavailableError:
        return False


def test_requests_are_bounded() -> None:
    with read().serve(max_requests=3, metrics_port=0) as server, client_of(server.url) as client:
        asked = ticket(client)
        with holding(server, 3):
            assert server.stats()["clients"] == 3
            for _ in range(5):
                with pytest.raises(flight.FlightUnavailableError, match="this server is busy: it answers 3 requests"):
                    answer(client, asked)
            with pytest.raises(flight.FlightUnavailableError, match="busy"):
                ticket(client)
            # It still serves the admitted requests, and reports so.
            assert next(iter(client.do_action(flight.Action("health", b"")))).body.to_pybytes() == b'{"serving": true}'
            assert b"refused_total 6\n" in next(iter(client.do_action(flight.Action("metrics", b"")))).body.to_pybytes()
            assert server.stats()["refused"] == 6
        assert wait_until(lambda: server.stats()["clients"] == 0)
        assert isinstance(answer(client, asked), int)
    for wrong in (0, -1, 1 << 30):
        with pytest.raises(ValueError, match="max_requests"):
            read().serve(max_requests=wrong)


def test_a_refused_client_asks_another_server() -> None:
    with read().serve(max_requests=1) as busy, read().serve() as other:
        remote = fastpipe.connect([other.url, busy.url], timeout=60)
        with holding(busy, 1):
            assert ids(remote) == EXPECTED
            assert other.stats()["batches"] >= BATCHES
            assert busy.stats()["refused"] > 0
        # The client has retried with growing pauses.
        assert busy.stats()["refused"] < 100


def test_a_refused_client_retries() -> None:
    with read().serve(max_requests=1) as server:
        remote = fastpipe.connect(server.url, timeout=60)
        found: list[Any] = []
        with holding(server, 1):
            thread = threading.Thread(target=lambda: found.extend(ids(remote)))
            thread.start()
            assert wait_until(lambda: server.stats()["refused"] >= 2)
            assert not found
        thread.join()
        assert found == EXPECTED


def test_the_error_of_a_client_without_a_server_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # The open request isn't closed to make room.
    monkeypatch.setattr(_server, "_IDLE", 1000.0)
    with read().serve(max_requests=1) as server:
        remote = fastpipe.connect(server.url, timeout=3)
        with holding(server, 1):
            with pytest.raises(fastpipe.errors.ServiceError, match="this server is busy") as told:
                next(iter(remote))
            assert "max_requests" in str(told.value) or "1 requests" in str(told.value)
            with pytest.raises(fastpipe.errors.ServiceError, match="this server is busy"):
                fastpipe.connect(server.url, timeout=3)
        assert wait_until(lambda: server.stats()["clients"] == 0)
        assert ids(remote) == EXPECTED


def test_the_refusal_says_that_all_passes_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_PATIENCE", 0.5)
    begun, go_on = threading.Event(), threading.Event()

    def act(unit: int) -> None:
        begun.set()
        assert go_on.wait(60)

    numbers = fastpipe.read_units(Numbers([50] * 4, act), batch_size=50, shuffle=True, seed=7)
    with Server({"slow": numbers, "other": read()}, max_passes=1) as server, ExitStack() as open_:
        asking, waiting = (open_.enter_context(client_of(server.url)) for _ in range(2))
        asked = ticket(asking, 0, 4, reader="slow")
        thread = threading.Thread(target=lambda: list(waiting.do_get(asked)))
        thread.start()
        try:
            assert begun.wait(60)
            with pytest.raises(flight.FlightUnavailableError, match="none of its 1 passes is idle, and its max_pa"):
                answer(asking, ticket(asking, reader="other"))
        finally:
            go_on.set()
            thread.join()
        assert wait_until(lambda: answers(asking, ticket(asking, reader="other")))


def test_many_clients_take_few_threads() -> None:
    with read().serve(max_requests=8) as server, ExitStack() as open_:
        process = psutil.Process()
        with client_of(server.url) as client:
            asked = ticket(client, 0, BATCHES)
        clients = [open_.enter_context(client_of(server.url)) for _ in range(100)]
        for client in clients:
            client.wait_for_available()
        before = process.num_threads()
        streams = []
        for client in clients:
            with suppress(flight.FlightUnavailableError):
                stream = client.do_get(asked)
                stream.read_chunk()
                streams.append(stream)
        assert len(streams) == 8
        # Threads that read connections, including the clients', and a thread for each request.
        assert process.num_threads() - before < 40
        for stream in streams:
            stream.cancel()
        del stream, streams


def test_large_tickets_are_bounded() -> None:
    with read().serve() as server, client_of(server.url) as client:
        asked = ticket(client, padding=1 << 20)
        told = pytest.raises(flight.FlightUnavailableError, match="busy: large requests use all")
        with holding(server, 16, padding=1 << 20), told:
            answer(client, asked)
        assert wait_until(lambda: server.stats()["clients"] == 0)
        assert isinstance(answer(client, ticket(client, padding=1 << 20)), int)


def test_old_streams_are_dropped() -> None:
    with read(batch_size=10).serve() as server, client_of(server.url) as client:
        for seed in range(300):
            assert isinstance(answer(client, ticket(client, seed=seed)), int)
        stats = server.stats()
        # Streams with a kept batch, and streams of idle passes.
        assert stats["streams"] <= 64 + 16 + 1
        assert stats["passes"] <= 16
        assert stats["begun"] == 300
        # The last batch is kept.
        assert isinstance(answer(client, ticket(client, seed=299)), int)
        assert server.stats()["kept_hits"] == 1


def test_the_memory_of_small_kept_batches_is_bounded() -> None:
    """Each batch takes some memory in addition to its bytes."""
    tiny = fastpipe.from_arrays({"id": np.arange(1000, dtype="int8")}, batch_size=1, shuffle=True, seed=7)
    with tiny.serve(cache_bytes="100kB") as server, client_of(server.url) as client:
        for step in range(200):
            assert isinstance(answer(client, ticket(client, step, step + 1)), int)
        stats = server.stats()
        assert 0 < stats["kept_bytes"] <= 100_000
        # The last batch is kept, and the first batch isn't.
        assert isinstance(answer(client, ticket(client, 199, 200)), int)
        assert server.stats()["decoded"] == stats["decoded"]
        assert isinstance(answer(client, ticket(client, 0, 1)), int)
        assert server.stats()["decoded"] > stats["decoded"]


@pytest.mark.parametrize(
    ("options", "count"),
    [({"memory_limit": "32MiB", "cache_bytes": "4MiB", "max_passes": 2}, 30), ({"max_requests": 5}, 5)],
    ids=["memory", "requests"],
)
def test_clients_that_do_not_read_make_room_for_others(
    options: dict[str, Any], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fastpipe.service")
    with read().serve(**options) as server:
        remote = fastpipe.connect(server.url, timeout=60)
        with holding(server, count, reads=False):
            assert wait_until(lambda: server.stats()["clients"] >= 5)
            assert ids(remote) == EXPECTED
            assert 1 <= server.stats()["closed"] < count
    told = [text for record in caplog.records if "took nothing while others waited" in (text := record.getMessage())]
    assert 1 <= len(told) < count


def test_a_client_that_pauses_loses_nothing() -> None:
    with read().serve(max_requests=1) as server:
        paused = fastpipe.connect(server.url, timeout=60, prefetch=1)
        batches = iter(paused)
        found = ids(next(batches) for _ in range(3))
        assert wait_until(lambda: server.stats()["clients"] == 1)
        other = fastpipe.connect(server.url, timeout=60)
        assert ids(other) == EXPECTED
        assert server.stats()["closed"] >= 1
        found += ids(batches)
    assert found == EXPECTED


def test_a_client_with_a_slow_network_is_served_to_its_end() -> None:
    """It reads 200 KB per second, so a message takes ten seconds."""
    reader = read(batch_size=2000)
    with reader.serve(max_requests=1) as server, through(server.port) as proxy, client_of(server.url) as other:
        asked = ticket(other)
        batches = iter(fastpipe.connect(proxy.url, timeout=60))
        proxy.delay = 0.3
        found = ids([next(batches)])
        end = time.monotonic() + 8
        while time.monotonic() < end:
            with suppress(flight.FlightUnavailableError):
                list(other.do_get(asked))
            time.sleep(0.1)
        assert server.stats()["refused"] > 0
        assert server.stats()["closed"] == 0
        proxy.heal()
        found += ids(batches)
    assert found == ids(reader)


def test_a_client_that_does_not_read_stays_while_no_other_waits() -> None:
    with read().serve(max_requests=2) as server, holding(server, 1, reads=False):
        assert wait_until(lambda: server.stats()["clients"] == 1)
        time.sleep(4)
        assert ids(fastpipe.connect(server.url)) == EXPECTED
        assert server.stats()["closed"] == 0
