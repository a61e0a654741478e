"""What anybody may send to a server, and what a server may send: typed refusals, and the server stays up."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
import fastpipe.service
from apart import wait_until
from fastpipe._reader.ordering import Ordering
from fastpipe.service._wire import Ticket, as_error, sealed
from processes import outputs, run
from service_tickets import act, entries

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")

TICKETS = int(os.environ.get("FASTPIPE_TICKETS", "200"))
ROWS = 2000


def read(**options: Any) -> fastpipe.Reader:
    arrays = {"id": np.arange(ROWS), "x": np.random.default_rng(3).random((ROWS, 5), "float32")}
    return fastpipe.from_arrays(arrays, **{"batch_size": 64, "shuffle": True, "seed": 7} | options)


@pytest.fixture(scope="module")
def server() -> Iterator[fastpipe.service.Server]:
    with read().serve() as server:
        yield server


@pytest.fixture(scope="module")
def ticket(server: fastpipe.service.Server) -> dict[str, Any]:
    """A ticket that is answered."""
    return entries(flight.FlightClient(server.url)) | {"stop": 2, "until": 2}


def answer(client: Any, data: bytes) -> list[Any]:
    """The metadata of what comes."""
    stream = client.do_get(flight.Ticket(data), flight.FlightCallOptions(timeout=100))
    return [None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes() for chunk in stream]


def batches(found: list[Any]) -> int:
    """How many there are in the messages."""
    assert all(said.startswith(b"fpg1") for said in found)
    return sum(int.from_bytes(said[4:8], "little") for said in found)


def test_a_ticket_is_answered(server: fastpipe.service.Server, ticket: dict[str, Any]) -> None:
    found = answer(flight.FlightClient(server.url), json.dumps(ticket).encode())
    assert batches(found) == 2


NUMBERS = [None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**30, 1.5]
VALUES = [*NUMBERS, "", "x", "../../etc/passwd", [], [1], {}, {"a": 1}]


def mutated(ticket: dict[str, Any], draw: random.Random) -> bytes:
    """A ticket with entries that are wrong, missing or too many; or bytes that are none."""
    kind = draw.randrange(10)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    text = json.dumps(ticket).encode()
    if kind == 1:
        at = draw.randrange(len(text))
        return text[:at] + draw.randbytes(draw.randrange(1, 5)) + text[at + draw.randrange(3) :]
    if kind == 2:
        return b"[" * draw.randrange(1, 100_000)
    changed = json.loads(text)
    order = json.loads(changed["order"])
    of = draw.choice([changed, changed, order])
    for _ in range(draw.randrange(1, 3)):
        name = draw.choice([*of, "more"])
        if draw.random() < 0.2:
            of.pop(name, None)
        else:
            of[name] = draw.choice(VALUES)
    if of is order:
        changed["order"] = json.dumps(order)
    if draw.random() < 0.2:
        progress = {"epoch": 0, "world_size": 1, "step": 3, "taken": 3, "next": 0, "open": [], "late": [], "places": []}
        progress[draw.choice(list(progress))] = draw.choice(VALUES)
        changed["progress"] = progress
    return json.dumps(changed).encode()


@pytest.mark.timeout(300 + TICKETS // 200)
def test_tickets_are_answered_or_refused(
    server: fastpipe.service.Server, ticket: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    # pytest would keep every logged refusal and its ticket.
    caplog.set_level(logging.CRITICAL, "fastpipe.service")
    client, draw = flight.FlightClient(server.url), random.Random(5)
    good = json.dumps(ticket).encode()
    refused, process = 0, psutil.Process()
    before = process.memory_info().rss
    for number in range(TICKETS):
        if number == 1000:
            # Pools and caches are filled.
            before = process.memory_info().rss
        data = mutated(ticket, draw)
        try:
            found = answer(client, data)
        except flight.FlightUnavailableError as error:
            # Clients of fastpipe's ask again.
            if "was changed on its way" not in str(error):
                raise
            refused += 1
            continue
        refused += any(header is not None and header[:4] == b"fpe1" for header in found)
        for header in found:
            assert header is None or header[:4] == b"fpg1" or isinstance(as_error(header, "a server"), Exception)
    assert refused > TICKETS // 2
    assert process.memory_info().rss - before < 100 << 20
    assert batches(answer(client, good)) == 2


def test_sealed_tickets_that_were_changed_are_asked_again(
    server: fastpipe.service.Server, ticket: dict[str, Any]
) -> None:
    client, draw, whole = flight.FlightClient(server.url), random.Random(6), sealed(ticket)
    assert batches(answer(client, whole)) == 2
    for number in range(300):
        changed = bytearray(whole)
        # Of the seal, of the checksum, or of what is said; and more of the seal than tells that there was one.
        first, last = [(0, 4), (4, 8), (8, len(whole))][number % 3]
        for at in draw.sample(range(first, last), draw.randrange(1, 5)):
            changed[at] ^= draw.randrange(1, 128)
        if bytes(changed[:1]) in (b"{", b"["):
            continue
        with pytest.raises(flight.FlightUnavailableError, match="was changed on its way"):
            answer(client, bytes(changed))


def test_large_tickets_are_refused(server: fastpipe.service.Server, ticket: dict[str, Any]) -> None:
    client = flight.FlightClient(server.url)
    for size in (1 << 20, 3 << 19):
        with pytest.raises(pa.ArrowInvalid, match="a request has 1048592 bytes at most"):
            answer(client, json.dumps(ticket).encode() + b" " * size)
    assert batches(answer(client, json.dumps(ticket).encode())) == 2


def test_refused_tickets_leave_nothing(ticket: dict[str, Any]) -> None:
    with read().serve(keep=1) as server:
        client = flight.FlightClient(server.url)
        for step in range(30):
            # Steps behind the end, and a progress that none has.
            (told,) = answer(
                client, json.dumps(ticket | {"start": 10**6, "stop": 10**6 + 1, "until": 10**9, "epoch": step}).encode()
            )
            assert told.startswith(b"fpe1")
            (told,) = answer(client, json.dumps(ticket | {"progress": {"epoch": step, "more": "x" * 1000}}).encode())
            assert told.startswith(b"fpe1")
        # What is read to its end, and isn't kept.
        assert len(list(fastpipe.connect(server.url))) == 32
        assert wait_until(lambda: server.stats()["streams"] == server.stats()["passes"] == 0)


def test_requests_that_are_none(server: fastpipe.service.Server) -> None:
    client = flight.FlightClient(server.url)
    with pytest.raises(pa.ArrowInvalid, match="no action 'shell', only describe") as raised:
        list(client.do_action(flight.Action("shell", b"{}")))
    assert "Traceback" not in str(raised.value)
    for action, body in [
        ("describe", b""),
        ("describe", b"{}"),
        ("describe", b"[" * 50_000),
        ("describe", b"x" * (1 << 17)),
        ("describe", b'{"reader": "../x"}'),
        ("place", b'{"reader": "default", "unit": -1, "record": 0}'),
        ("place", b'{"reader": "default", "unit": 1e99, "record": 0}'),
        ("place", b'{"reader": "default", "unit": 10000000, "record": 0}'),
    ]:
        with pytest.raises((pa.ArrowException, fastpipe.FastpipeError), match=r"request|no reader|no unit"):
            act(client, action, body)
    assert json.loads(next(iter(client.do_action(flight.Action("health", b"")))).body.to_pybytes()) == {"serving": True}
    metrics = next(iter(client.do_action(flight.Action("metrics", b"")))).body.to_pybytes().decode()
    assert "\nfastpipe_service_batches_total " in metrics
    assert all(line.startswith(("#", "fastpipe_service_")) for line in metrics.splitlines())
    with pytest.raises((pa.ArrowException, NotImplementedError)):
        list(client.list_flights())
    assert len({action.type for action in client.list_actions()}) == 4


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '"skipped": 0',
            '"skipped": 9223372036854775808',
            "'skipped' of an order must be between 0 and 9223",
        ),
        ('"skipped": 0', '"skipped": 18446744073709551615', "'skipped' of an order must be between"),
        ('"skipped": 0', '"skipped": 0, "more": 1', "unknown field `more`"),
        (', "skipped": 0', "", "missing field `skipped`"),
        ('"skipped": 0', '"skipped": 0, "seed": 7', "duplicate field `seed`"),
        ('"seed": 7', '"seed": -1', "'seed' of an order: invalid value: integer `-1`, expected u64"),
        ('"seed": 7', '"seed": 18446744073709551616', "'seed' of an order"),
        ('"batch_size": 64', '"batch_size": 0', "'batch_size' of an order must be between 1 and 2147483647; got 0"),
        ('"batch_size": 64', '"batch_size": 2147483648', "'batch_size' of an order must be between 1 and 2147483647"),
        ('"batch_size": 64', '"batch_size": true', "'batch_size' of an order: invalid type: boolean"),
        ('"world_size": 1', '"world_size": 1048577', "'world_size' of an order must be between 1 and 1048576"),
        ('"rank": 0', '"rank": 1', "'rank' of an order must be between 0 and 0; got 1"),
        (
            '"shuffle_buffer": BUFFER',
            '"shuffle_buffer": 0',
            "'shuffle_buffer' of an order must be between 1 and 4294967296",
        ),
        ('"shuffle_buffer": BUFFER', '"shuffle_buffer": 4294967297', "'shuffle_buffer' of an order must be between"),
        ('"shuffle_buffer": BUFFER', '"shuffle_buffer": null', "'shuffle_buffer' of an order: invalid type: null"),
        ('"shard_by": "window"', f'"shard_by": {DEEP}', "'shard_by' of an order"),
        ('"shuffle": "window"', '"shuffle": "taken"', "'shuffle' of an order: unknown variant `taken`"),
    ],
    ids=lambda text: text[:40],
)
def test_orders_that_are_refused(
    server: fastpipe.service.Server, ticket: dict[str, Any], old: str, new: str, said: str
) -> None:
    order = ticket["order"]
    old = old.replace("BUFFER", str(json.loads(order)["shuffle_buffer"]))
    assert old in order
    changed = order.replace(old, new)
    with pytest.raises(ValueError, match=re.escape(said)):
        Ordering.read(changed)
    (refused,) = answer(flight.FlightClient(server.url), json.dumps(ticket | {"order": changed}).encode())
    assert said in str(as_error(refused, "a server"))


def test_an_order_that_is_no_text_is_refused(server: fastpipe.service.Server, ticket: dict[str, Any]) -> None:
    for order in (json.loads(ticket["order"]), None, 1):
        (refused,) = answer(flight.FlightClient(server.url), json.dumps(ticket | {"order": order}).encode())
        assert "the order of a ticket is a text" in str(as_error(refused, "a server"))


@given(st.binary(max_size=300))
def test_bytes_that_are_no_ticket(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"ticket|order|between|integer"):
        Ticket.read(data)


@given(st.dictionaries(st.text(max_size=9), st.integers() | st.text(max_size=5) | st.none()))
def test_dicts_that_are_no_order(order: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="order"):
        Ordering.read(json.dumps(order))


def test_many_connections_and_slow_readers(server: fastpipe.service.Server, ticket: dict[str, Any]) -> None:
    # Connections that say nothing.
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    # Streams that are begun and not read.
    slow = [flight.FlightClient(server.url).do_get(flight.Ticket(json.dumps(ticket).encode())) for _ in range(50)]
    found = [batch["id"].tolist() for batch in fastpipe.connect(server.url)]
    assert found == [batch["id"].tolist() for batch in read()]
    for stream in slow:
        stream.cancel()
    for one in silent:
        one.close()


def test_a_slow_reader_costs_bounded_memory() -> None:
    arrays = {"x": np.zeros((40_000, 1000), "float32")}
    with fastpipe.from_arrays(arrays, batch_size=256, shuffle=True, seed=1).serve(keep="8MiB") as server:
        remote = fastpipe.connect(server.url, prefetch=2)
        batches = iter(remote)
        next(batches)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        time.sleep(1.0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB, of 160 MB of data"
        assert server.stats()["batches"] < 40


def test_two_threads_draw_from_a_pass(server: fastpipe.service.Server) -> None:
    batches = iter(fastpipe.connect(server.url))
    found: list[list[int]] = []
    draw = lambda: found.extend(batch["id"].tolist() for batch in batches)  # noqa: E731
    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(batch["id"].tolist() for batch in read())


def test_a_forked_child_connects_anew(server: fastpipe.service.Server) -> None:
    script = """
        import os, sys, fastpipe
        remote = fastpipe.connect(sys.argv[1])
        begun = iter(remote)
        next(begun)
        if (child := os.fork()) == 0:
            try:
                next(begun)
            except fastpipe.PassClosedError:
                os._exit(7 if len(list(remote)) == len(list(fastpipe.connect(sys.argv[1]))) == 32 else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(list(begun)) == 31
        print("both")
    """
    assert outputs(run(script, server.url)) == ["both\n"]
