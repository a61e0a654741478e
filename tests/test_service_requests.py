"""Requests that no reader of fastpipe sends: a server refuses them with typed errors, stays up, and stays small.

`FASTPIPE_TICKETS` says how many random requests there are of each kind.
"""

from __future__ import annotations

import copy
import json
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest

import fastpipe
from apart import wait_until
from fastpipe.service._wire import as_error, intact, sealed
from samples import ids_by_batch as ids
from service_faults import ServerProcess, rows_of, serving, through
from service_tickets import act, entries

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")

TICKETS = int(os.environ.get("FASTPIPE_TICKETS", "200"))
MANY = max(TICKETS, 2000)
MB = 1 << 20
pytestmark = pytest.mark.timeout(300 + MANY // 20)
TOKEN = "open sesame"
READER = rows_of(2000, 5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "token").write_text(TOKEN)
    with serving(READER, folder, "--token-file", folder / "token") as found:
        yield found


@pytest.fixture(scope="module")
def ticket(server: ServerProcess) -> dict[str, Any]:
    """The entries of a valid ticket for two batches."""
    return entries(flight.FlightClient(server.url), options()) | {"stop": 2, "until": 2}


@pytest.fixture(autouse=True)
def _stays_up_and_small(server: ServerProcess) -> Iterator[None]:
    process = server.watched()
    READER.set_epoch(0)
    whole = ids(READER)
    assert ids(fastpipe.connect(server.url, token=TOKEN)) == whole
    before = process.memory_info().rss
    yield
    assert process.is_running()
    assert process.status() != psutil.STATUS_ZOMBIE
    assert ids(fastpipe.connect(server.url, token=TOKEN)) == whole
    assert wait_until(lambda: process.memory_info().rss - before < 100 * MB), process.memory_info().rss - before
    assert wait_until(lambda: process.num_fds() < 200), process.num_fds()


def options(token: bytes = TOKEN.encode()) -> Any:
    return flight.FlightCallOptions(timeout=100, headers=[(b"authorization", b"Bearer " + token)])


def answer(client: Any, said: bytes | dict[str, Any]) -> list[Any]:
    """Returns the metadata of the messages that answer a ticket."""
    data = said if isinstance(said, bytes) else json.dumps(said).encode()
    stream = client.do_get(flight.Ticket(data), options())
    return [None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes() for chunk in stream]


def batches(found: list[Any]) -> int:
    """Returns the number of batches in messages."""
    assert all(said.startswith(b"fpg1") for said in found)
    return sum(int.from_bytes(said[4:8], "little") for said in found)


VALUES: list[Any] = [None, True, -1, 0, 1, 31, 2**31, 2**62, 2**63, 2**64, 10**30, 1.5, 1e300, float("nan")]
VALUES += ["", "x", "../../etc/passwd", [], [1], [[]], {}, {"a": 1}]


def change(entries: dict[str, Any], draw: random.Random) -> None:
    """Removes, replaces or adds an entry."""
    name = draw.choice([*entries, "more"])
    if draw.random() < 0.2:
        entries.pop(name, None)
    else:
        # A copy, because entries may be added to it.
        entries[name] = copy.deepcopy(draw.choice(VALUES))


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Returns data with some bytes replaced, removed and added."""
    at = draw.randrange(len(data))
    return data[:at] + draw.randbytes(draw.randrange(1, 5)) + data[at + draw.randrange(3) :]


# Tickets.


def mutated(ticket: dict[str, Any], draw: random.Random) -> bytes:
    """Returns random bytes, or a ticket with wrong, missing or additional entries."""
    kind = draw.randrange(10)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return damaged(json.dumps(ticket).encode(), draw)
    if kind == 2:
        return b"[" * draw.randrange(1, 100_000)
    changed = copy.deepcopy(ticket)
    order = json.loads(changed["order"])
    of = draw.choice([changed, changed, order])
    for _ in range(draw.randrange(1, 3)):
        change(of, draw)
    if of is order:
        changed["order"] = json.dumps(order)
    if draw.random() < 0.2:
        progress = {"epoch": 0, "world_size": 1, "step": 3, "taken": 3, "next": 0, "open": [], "late": [], "places": []}
        progress[draw.choice(list(progress))] = draw.choice(VALUES)
        changed["progress"] = progress
    return json.dumps(changed).encode()


def test_tickets_are_answered_or_refused(server: ServerProcess, ticket: dict[str, Any]) -> None:
    client, draw, refused = flight.FlightClient(server.url), random.Random(5), 0
    for _ in range(TICKETS):
        try:
            found = answer(client, mutated(ticket, draw))
        except flight.FlightUnavailableError as error:
            # fastpipe's clients send the request again.
            if "was damaged in transit" not in str(error):
                raise
            refused += 1
            continue
        refused += any(header is not None and header[:4] == b"fpe1" for header in found)
        for header in found:
            assert header is None or header[:4] == b"fpg1" or isinstance(as_error(header, "a server"), Exception)
    assert refused > TICKETS // 2
    assert batches(answer(client, ticket)) == 2


def test_damaged_sealed_tickets_are_requested_again(server: ServerProcess, ticket: dict[str, Any]) -> None:
    client, draw, whole = flight.FlightClient(server.url), random.Random(6), sealed(ticket)
    assert batches(answer(client, whole)) == 2
    for number in range(300):
        changed = bytearray(whole)
        # In the seal, the checksum or the content. Without a seal, the first byte of a ticket is a bracket.
        first, last = [(0, 4), (4, 8), (8, len(whole))][number % 3]
        for at in draw.sample(range(first, last), draw.randrange(1, 5)):
            changed[at] ^= draw.randrange(1, 128)
        if bytes(changed[:1]) in (b"{", b"["):
            continue
        with pytest.raises(flight.FlightUnavailableError, match="was damaged in transit"):
            answer(client, bytes(changed))


def test_refused_tickets_leave_nothing(ticket: dict[str, Any]) -> None:
    with READER.serve(cache_bytes=1) as server:
        client = flight.FlightClient(server.url)
        for step in range(30):
            after_the_end = {"start": 10**6, "stop": 10**6 + 1, "until": 10**9, "epoch": step}
            for wrong in (after_the_end, {"progress": {"epoch": step, "more": "x" * 1000}}):
                (told,) = answer(client, ticket | wrong)
                assert told.startswith(b"fpe1")
        # A pass that is read to its end, and whose batches aren't kept.
        assert len(list(fastpipe.connect(server.url))) == 32
        assert wait_until(lambda: server.stats()["streams"] == server.stats()["passes"] == 0)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"batch_size": 64', '"batch_size": 2147483648', "'batch_size' of an order must be between 1 and 2147483647"),
        ('"skipped": 0', '"skipped": 0, "more": 1', "unknown field `more`"),
        ('"shard_by": "window"', f'"shard_by": {"[" * 200_000}', "'shard_by' of an order"),
    ],
    ids=["bound", "field", "deep"],
)
def test_wrong_orders_are_refused(server: ServerProcess, ticket: dict[str, Any], old: str, new: str, said: str) -> None:
    """The tests of `fastpipe-order` have the other errors."""
    assert old in ticket["order"]
    (refused,) = answer(flight.FlightClient(server.url), ticket | {"order": ticket["order"].replace(old, new)})
    assert said in str(as_error(refused, "a server"))


def test_an_order_must_be_text(server: ServerProcess, ticket: dict[str, Any]) -> None:
    for order in (json.loads(ticket["order"]), None, 1):
        (refused,) = answer(flight.FlightClient(server.url), ticket | {"order": order})
        assert "the order of a ticket must be JSON text" in str(as_error(refused, "a server"))


# Actions, and other calls.


def body(draw: random.Random, place: dict[str, Any]) -> bytes:
    """Returns random bytes, or the body of a request with changes."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.randbytes(draw.randrange(300))
    if kind == 1:
        return draw.choice([b"[", b'{"a":']) * draw.randrange(1, 30_000)
    if kind == 2:
        return b"x" * draw.choice([0, 1 << 16, (1 << 16) + 1, MB])
    changed = copy.deepcopy(place)
    for _ in range(draw.randrange(3)):
        inner = changed.get("data")
        change(draw.choice([changed, changed, inner]) if isinstance(inner, dict) else changed, draw)
    data = sealed(changed) if draw.random() < 0.7 else json.dumps(changed).encode()
    return damaged(data, draw) if kind == 3 else data


ACTIONS = ["describe", "locate", "locate", "health", "metrics", "", "Describe", "shell", "x" * 70_000, "\u00e4\u0000"]


def test_actions_are_answered_or_refused(server: ServerProcess, ticket: dict[str, Any]) -> None:
    client, draw = flight.FlightClient(server.url), random.Random(11)
    place = {"reader": "default", "data": ticket["data"], "order": ticket["order"], "epoch": 0, "step": 0, "row": 5}
    counts, said = {"answered": 0, "told": 0}, list[str]()
    for _ in range(MANY):
        action = draw.choice(ACTIONS)
        try:
            request = flight.Action(action, body(draw, place))
            parts = [one.body.to_pybytes() for one in client.do_action(request, options())]
        except (pa.ArrowInvalid, flight.FlightUnavailableError) as error:
            said.append(str(error))
            continue
        if action not in ("health", "metrics"):
            parts = intact(parts)
        told = as_error(parts[0], "a server")
        if told is None:
            assert action != "locate" or set(json.loads(parts[0])) in ({"kind", "fields"}, {"missing"})
            counts["answered"] += 1
        else:
            # The request is for other data, or for a row that doesn't exist.
            assert isinstance(told, fastpipe.FastpipeError)
            counts["told"] += 1
    assert min(len(said), *counts.values()) > MANY // 50, (len(said), counts)
    assert not [text for text in said if "Traceback" in text]


def test_wrong_actions_are_refused(server: ServerProcess, ticket: dict[str, Any]) -> None:
    client = flight.FlightClient(server.url)
    with pytest.raises(pa.ArrowInvalid, match="an action must be describe, locate, health or metrics; got") as raised:
        list(client.do_action(flight.Action("shell", b"{}"), options()))
    assert "Traceback" not in str(raised.value)
    row = {name: ticket[name] for name in ("reader", "data", "order", "epoch")} | {"step": 0, "row": 0}
    for action, body in [
        ("describe", b""),
        ("describe", b"{}"),
        ("describe", b"[" * 50_000),
        ("describe", b"x" * (1 << 17)),
        ("describe", b'{"reader": "../x"}'),
        ("locate", b'{"reader": "default", "data": {}, "order": "", "epoch": 0, "step": 0, "row": 0}'),
        ("locate", json.dumps(row | {"epoch": 1e99}).encode()),
        ("locate", json.dumps(row | {"step": -1}).encode()),
        ("locate", json.dumps(row | {"row": 2**70}).encode()),
        ("locate", json.dumps(row | {"order": "{}"}).encode()),
    ]:
        with pytest.raises((pa.ArrowException, fastpipe.FastpipeError), match=r"request|no reader|other data"):
            act(client, action, body, options())
    assert len({action.type for action in client.list_actions(options())}) == 4


def health(client: Any, call: Any) -> None:
    list(client.do_action(flight.Action("health", b""), call))


def get(client: Any, call: Any) -> None:
    client.do_get(flight.Ticket(b"{}"), call).read_all()


def test_wrong_tokens_are_refused(server: ServerProcess) -> None:
    client, draw = flight.FlightClient(server.url), random.Random(12)
    right = TOKEN.encode()
    for number in range(MANY // 5):
        at = draw.randrange(len(right))
        token = draw.choice(
            [
                b"",
                right[:at],
                right + b"x",
                right[:at] + bytes([draw.randrange(32, 127)]) + right[at + 1 :],
                bytes(draw.randrange(32, 127) for _ in range(draw.randrange(1, 4000))),
                "\u00fc\u20ac".encode() * draw.randrange(1, 100),
            ]
        )
        if token == right:
            continue
        name = draw.choice([b"authorization", b"authorization", b"proxy-authorization", b"authorization-bin"])
        scheme = draw.choice([b"Bearer ", b"Bearer ", b"bearer ", b"Basic ", b""])
        headers = [(name, scheme + token)] * draw.choice([1, 1, 2, 20])
        call = flight.FlightCallOptions(timeout=100, headers=headers if number % 50 else [])
        # gRPC itself refuses headers that aren't text, and HTTP/2 refuses headers of more than 16 KiB.
        refused = "this server requires a token|Invalid metadata|metadata size|status: 431|header_list"
        with pytest.raises(pa.ArrowException, match=refused):
            random.Random(number).choice([health, get])(client, call)


def put(client: Any, descriptor: Any) -> None:
    table = pa.table({"a": np.arange(10)})
    writer, _ = client.do_put(descriptor, table.schema, options())
    writer.write_table(table)
    writer.close()


def exchange(client: Any, descriptor: Any) -> None:
    table = pa.table({"a": np.arange(10)})
    writer, reader = client.do_exchange(descriptor, options())
    writer.begin(table.schema)
    writer.write_table(table)
    writer.done_writing()
    reader.read_all()


CALLS = [
    put,
    exchange,
    lambda client, descriptor: list(client.list_flights(str(descriptor).encode(), options())),
    lambda client, descriptor: client.authenticate_basic_token(str(descriptor), TOKEN),
    lambda client, descriptor: client.get_flight_info(descriptor, options()),
    lambda client, descriptor: client.get_schema(descriptor, options()),
]


def test_other_calls_are_refused(server: ServerProcess) -> None:
    client, draw = flight.FlightClient(server.url), random.Random(13)
    for _ in range(MANY // 5):
        said = draw.randbytes(draw.randrange(100))
        descriptor = flight.FlightDescriptor.for_command(said)
        if draw.random() < 0.5:
            descriptor = flight.FlightDescriptor.for_path(said.hex(), said.hex())
        with pytest.raises((pa.ArrowException, NotImplementedError)) as raised:
            draw.choice(CALLS)(client, descriptor)
        assert "/fastpipe/" not in str(raised.value)


def test_damaged_handshakes_do_no_harm(server: ServerProcess) -> None:
    with through(server.port) as network:
        network.sent = bytearray()
        fastpipe.connect(network.url, token=TOKEN)
        said = bytes(network.sent)
    assert said.startswith(b"PRI * HTTP/2.0")
    assert b"describe" in said
    draw = random.Random(14)
    for _ in range(MANY // 5):
        changed = bytearray(said)
        for _ in range(draw.randrange(1, 5)):
            at = draw.randrange(len(changed))
            changed[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(4))
        if draw.random() < 0.3:
            del changed[draw.randrange(len(changed) + 1) :]
        if draw.random() < 0.1:
            changed = bytearray(draw.randbytes(draw.randrange(1, 100_000)))
        # The server may have closed it already.
        with socket.create_connection(("127.0.0.1", server.port)) as connection, suppress(OSError):
            connection.settimeout(0.02)
            connection.sendall(changed)
            while connection.recv(1 << 16):
                pass
