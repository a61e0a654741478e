"""Clients that ask for much at once: streams, requests and tickets are bounded, and whoever is refused asks again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import psutil
import pytest

import fastpipe
from apart import wait_until
from fastpipe.service import Server, _server
from service_tickets import answer, client_of, ticket
from toy_units import Numbers

flight = pytest.importorskip("pyarrow.flight")

ROWS, BATCHES = 20_000, 40


def read(**options: Any) -> fastpipe.Reader:
    """20 MB, in batches of 0.5 MB: more than connections hold that nobody reads."""
    arrays = {"id": np.arange(ROWS), "x": np.zeros((ROWS, 250), "float32")}
    return fastpipe.from_arrays(arrays, **{"batch_size": 500, "shuffle": True, "seed": 7} | options)


EXPECTED = [batch["id"].tolist() for batch in read()]


@contextmanager
def holding(server: Server, count: int, **options: Any) -> Iterator[list[Any]]:
    """Requests that have begun, and of which no more is taken."""
    with ExitStack() as open_:
        asking = open_.enter_context(client_of(server.url))
        # Asked first: a server that is busy doesn't describe its readers.
        asked = ticket(asking, 0, BATCHES, **options)
        streams = []
        for _ in range(count):
            stream = open_.enter_context(client_of(server.url)).do_get(asked)
            stream.read_chunk()
            streams.append(stream)
        try:
            yield streams
        finally:
            for stream in streams:
                stream.cancel()
            del stream, streams


def answers(client: Any, asked: Any) -> bool:
    """Whether the server isn't busy."""
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
            # It serves, though, and says so.
            assert next(iter(client.do_action(flight.Action("health", b"")))).body.to_pybytes() == b'{"serving": true}'
            assert b"refused_total 6\n" in next(iter(client.do_action(flight.Action("metrics", b"")))).body.to_pybytes()
            assert server.stats()["refused"] == 6
        assert wait_until(lambda: server.stats()["clients"] == 0)
        assert isinstance(answer(client, asked), int)
    for wrong in (0, -1, 1 << 30):
        with pytest.raises(ValueError, match="max_requests"):
            read().serve(max_requests=wrong)


def test_a_client_that_is_refused_asks_another_server() -> None:
    with read().serve(max_requests=1) as busy, read().serve() as other:
        remote = fastpipe.connect([other.url, busy.url], timeout=60)
        with holding(busy, 1):
            assert [batch["id"].tolist() for batch in remote] == EXPECTED
            assert other.stats()["batches"] >= BATCHES
            assert busy.stats()["refused"] > 0
        # It has been asked again and again, with pauses that grow.
        assert busy.stats()["refused"] < 100


def test_a_client_that_is_refused_asks_again_later() -> None:
    with read().serve(max_requests=1) as server:
        remote = fastpipe.connect(server.url, timeout=60)
        found: list[Any] = []
        with holding(server, 1):
            thread = threading.Thread(target=lambda: found.extend(batch["id"].tolist() for batch in remote))
            thread.start()
            assert wait_until(lambda: server.stats()["refused"] >= 2)
            assert not found
        thread.join()
        assert found == EXPECTED


def test_a_client_that_nobody_serves_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # The request that holds the server isn't closed to make room.
    monkeypatch.setattr(_server, "_IDLE", 1000.0)
    with read().serve(max_requests=1) as server:
        remote = fastpipe.connect(server.url, timeout=3)
        with holding(server, 1):
            with pytest.raises(fastpipe.ServiceError, match="this server is busy") as told:
                next(iter(remote))
            assert "max_requests" in str(told.value) or "1 requests" in str(told.value)
            with pytest.raises(fastpipe.ServiceError, match="this server is busy"):
                fastpipe.connect(server.url, timeout=3)
        assert wait_until(lambda: server.stats()["clients"] == 0)
        assert [batch["id"].tolist() for batch in remote] == EXPECTED


def test_passes_that_are_all_at_work_for_long_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_crowd_takes_few_threads() -> None:
    with read().serve(max_requests=8) as server, ExitStack() as open_:
        process = psutil.Process()
        with client_of(server.url) as client:
            asked = ticket(client, 0, BATCHES)
        clients = [open_.enter_context(client_of(server.url)) for _ in range(100)]
        for client in clients:
            client.wait_for_available()
        before = process.num_threads()
        streams, refused = [], 0
        for client in clients:
            try:
                stream = client.do_get(asked)
                stream.read_chunk()
                streams.append(stream)
            except flight.FlightUnavailableError:
                refused += 1
        assert (len(streams), refused) == (8, 92)
        # Those that read connections, the client's among them, and one for each request.
        assert process.num_threads() - before < 40
        for stream in streams:
            stream.cancel()
        del stream, streams


def test_large_tickets_are_answered_a_few_at_a_time() -> None:
    with read().serve() as server, client_of(server.url) as client:
        asked = ticket(client, padding=1 << 20)
        told = pytest.raises(flight.FlightUnavailableError, match="busy: large requests take all")
        with holding(server, 16, padding=1 << 20), told:
            answer(client, asked)
        assert wait_until(lambda: server.stats()["clients"] == 0)
        assert isinstance(answer(client, ticket(client, padding=1 << 20)), int)


def test_streams_of_the_past_are_forgotten() -> None:
    with read(batch_size=10).serve() as server, client_of(server.url) as client:
        for seed in range(300):
            assert isinstance(answer(client, ticket(client, seed=seed)), int)
        stats = server.stats()
        # Those of which something is kept, and those of passes that wait for someone who goes on.
        assert stats["streams"] <= 64 + 16 + 1
        assert stats["passes"] <= 16
        assert stats["begun"] == 300
        # What was asked for last is kept.
        assert isinstance(answer(client, ticket(client, seed=299)), int)
        assert server.stats()["kept_hits"] == 1


def test_small_batches_are_not_kept_for_nothing() -> None:
    """Each takes some memory, beside its bytes."""
    tiny = fastpipe.from_arrays({"id": np.arange(1000, dtype="int8")}, batch_size=1, shuffle=True, seed=7)
    with tiny.serve(keep="100kB") as server, client_of(server.url) as client:
        for step in range(200):
            assert isinstance(answer(client, ticket(client, step, step + 1)), int)
        stats = server.stats()
        assert 0 < stats["kept_bytes"] <= 100_000
        # The last one is kept, and the first one isn't any more.
        assert isinstance(answer(client, ticket(client, 199, 200)), int)
        assert server.stats()["decoded"] == stats["decoded"]
        assert isinstance(answer(client, ticket(client, 0, 1)), int)
        assert server.stats()["decoded"] > stats["decoded"]
