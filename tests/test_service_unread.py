"""Clients that take nothing: nobody is kept out by them, and they lose nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest

import fastpipe
from apart import wait_until
from fastpipe.service import Server
from service_faults import through
from service_tickets import client_of, ticket

flight = pytest.importorskip("pyarrow.flight")

ROWS, BATCHES, MiB = 20_000, 40, 1 << 20


def read(**options: Any) -> fastpipe.Reader:
    """20 MB, in batches of 0.5 MB: more than connections hold that nobody reads."""
    arrays = {"id": np.arange(ROWS), "x": np.zeros((ROWS, 250), "float32")}
    return fastpipe.from_arrays(arrays, **{"batch_size": 500, "shuffle": True, "seed": 7} | options)


EXPECTED = [batch["id"].tolist() for batch in read()]


@contextmanager
def holding(server: Server, count: int) -> Iterator[None]:
    """Clients that ask for batches, of orders of their own, and take none."""
    with ExitStack() as open_:
        clients = [open_.enter_context(client_of(server.url)) for _ in range(count)]
        streams = [client.do_get(ticket(client, 0, BATCHES, seed=place)) for place, client in enumerate(clients)]
        try:
            yield
        finally:
            for stream in streams:
                stream.cancel()
            del stream, streams


@pytest.mark.parametrize(
    ("options", "count"),
    [({"memory_limit": "32MiB", "keep": "4MiB", "max_passes": 2}, 30), ({"max_requests": 5}, 5)],
    ids=["memory", "requests"],
)
def test_those_who_take_nothing_keep_nobody_out(
    options: dict[str, Any], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fastpipe.service")
    with read().serve(**options) as server:
        remote = fastpipe.connect(server.url, timeout=60)
        with holding(server, count):
            assert wait_until(lambda: server.stats()["clients"] >= 5)
            assert [batch["id"].tolist() for batch in remote] == EXPECTED
            assert 1 <= server.stats()["closed"] < count
    told = [text for record in caplog.records if "took nothing while others waited" in (text := record.getMessage())]
    assert 1 <= len(told) < count


def test_a_client_that_pauses_loses_nothing() -> None:
    with read().serve(max_requests=1) as server:
        paused = fastpipe.connect(server.url, timeout=60, prefetch=1)
        batches = iter(paused)
        found = [next(batches)["id"].tolist() for _ in range(3)]
        assert wait_until(lambda: server.stats()["clients"] == 1)
        other = fastpipe.connect(server.url, timeout=60)
        assert [batch["id"].tolist() for batch in other] == EXPECTED
        assert server.stats()["closed"] >= 1
        found += [batch["id"].tolist() for batch in batches]
    assert found == EXPECTED


def test_a_client_with_a_slow_network_is_served_to_its_end() -> None:
    """It takes 200 KB a second, so that a message lasts for ten."""
    reader = read(batch_size=2000)
    with reader.serve(max_requests=1) as server, through(server.port) as proxy, client_of(server.url) as other:
        asked = ticket(other)
        batches = iter(fastpipe.connect(proxy.url, timeout=60))
        proxy.delay = 0.3
        found = [next(batches)["id"].tolist()]
        end = time.monotonic() + 8
        while time.monotonic() < end:
            with suppress(flight.FlightUnavailableError):
                list(other.do_get(asked))
            time.sleep(0.1)
        assert server.stats()["refused"] > 0
        assert server.stats()["closed"] == 0
        proxy.heal()
        found += [batch["id"].tolist() for batch in batches]
    assert found == [batch["id"].tolist() for batch in reader]


def test_one_that_takes_nothing_stays_while_nobody_waits() -> None:
    with read().serve(max_requests=2) as server, holding(server, 1):
        assert wait_until(lambda: server.stats()["clients"] == 1)
        time.sleep(4)
        assert [batch["id"].tolist() for batch in fastpipe.connect(server.url)] == EXPECTED
        assert server.stats()["closed"] == 0
