"""Requests that aren't for batches, tokens, and handshakes, mutated: typed refusals, and the server stays up and small.

`FASTPIPE_TICKETS` says how many there are of each.
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
from service_faults import ServerProcess, through
from service_tickets import identity

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")

MANY = int(os.environ.get("FASTPIPE_TICKETS", "2000"))
MB = 1 << 20
pytestmark = pytest.mark.timeout(300 + MANY // 20)
TOKEN = "open sesame"
CONFIG = """
import numpy as np
import fastpipe

reader = fastpipe.from_arrays({"id": np.arange(2000)}, batch_size=64, shuffle=True, seed=7)
"""


def read() -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(2000)}, batch_size=64, shuffle=True, seed=7)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "readers.py").write_text(CONFIG)
    (folder / "token").write_text(TOKEN)
    server = ServerProcess(folder / "readers.py", "--token-file", str(folder / "token"))
    server.start()
    server.wait()
    yield server
    server.end()


@pytest.fixture(autouse=True)
def _stays_up_and_small(server: ServerProcess) -> Iterator[None]:
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    whole = [batch["id"].tolist() for batch in read()]
    assert [batch["id"].tolist() for batch in fastpipe.connect(server.url, token=TOKEN)] == whole
    before = process.memory_info().rss
    yield
    assert server.process.poll() is None
    assert [batch["id"].tolist() for batch in fastpipe.connect(server.url, token=TOKEN)] == whole
    assert wait_until(lambda: process.memory_info().rss - before < 100 * MB), process.memory_info().rss - before
    assert wait_until(lambda: process.num_fds() < 200), process.num_fds()


def options(token: bytes = TOKEN.encode()) -> Any:
    return flight.FlightCallOptions(timeout=100, headers=[(b"authorization", b"Bearer " + token)])


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    31,
    2**31,
    2**63,
    10**30,
    1e300,
    float("nan"),
    "",
    "x",
    "../../etc/passwd",
    [],
    [[]],
    {},
]


def body(draw: random.Random, place: dict[str, Any]) -> bytes:
    """The body of a request: nearly right, or anything."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.randbytes(draw.randrange(300))
    if kind == 1:
        return draw.choice([b"[", b'{"a":']) * draw.randrange(1, 30_000)
    if kind == 2:
        return b"x" * draw.choice([0, 1 << 16, (1 << 16) + 1, MB])
    changed = json.loads(json.dumps(place))
    for _ in range(draw.randrange(3)):
        of = draw.choice([changed, changed, changed["data"]]) if isinstance(changed.get("data"), dict) else changed
        name = draw.choice([*of, "more"])
        if draw.random() < 0.2:
            of.pop(name, None)
        else:
            # A copy: more may be put into it.
            of[name] = copy.deepcopy(draw.choice(VALUES))
    data = sealed(changed) if draw.random() < 0.7 else json.dumps(changed).encode()
    if kind == 3:
        at = draw.randrange(len(data))
        return data[:at] + draw.randbytes(draw.randrange(1, 4)) + data[at + draw.randrange(3) :]
    return data


ACTIONS = ["describe", "place", "place", "health", "metrics", "", "Describe", "shell", "x" * 70_000, "\u00e4\u0000"]


def test_actions_are_answered_or_refused(server: ServerProcess) -> None:
    client, draw = flight.FlightClient(server.url), random.Random(11)
    described = intact([one.body.to_pybytes() for one in ask(client, "describe", sealed({"reader": "default"}))])
    data = identity(json.loads(described[0]))
    place = {"reader": "default", "data": data, "unit": 0, "record": 5}
    counts = dict.fromkeys(("answered", "told", "refused"), 0)
    for _ in range(MANY):
        action = draw.choice(ACTIONS)
        said = ""
        try:
            parts = [one.body.to_pybytes() for one in ask(client, action, body(draw, place))]
        except (pa.ArrowInvalid, flight.FlightUnavailableError) as error:
            said = str(error)
        if said:
            assert "Traceback" not in said
            counts["refused"] += 1
            continue
        if action not in ("health", "metrics"):
            parts = intact(parts)
        told = as_error(parts[0], "a server")
        if told is None:
            assert action != "place" or set(json.loads(parts[0])) == {"kind", "fields"}
            counts["answered"] += 1
        else:
            # Other data, or a row that there isn't.
            assert isinstance(told, fastpipe.FastpipeError)
            counts["told"] += 1
    assert min(counts.values()) > MANY // 50, counts


def ask(client: Any, action: str, data: bytes) -> list[Any]:
    return list(client.do_action(flight.Action(action, data), options()))


def test_tokens_that_are_none_are_refused(server: ServerProcess) -> None:
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
        asked = random.Random(number).choice([health, batches])
        # gRPC itself refuses headers that aren't text, and HTTP/2 those of more than 16 KiB.
        refused = "this server requires a token|Invalid metadata|metadata size|status: 431|header_list"
        with pytest.raises(pa.ArrowException, match=refused):
            asked(client, call)


def health(client: Any, call: Any) -> None:
    list(client.do_action(flight.Action("health", b""), call))


def batches(client: Any, call: Any) -> None:
    client.do_get(flight.Ticket(b"{}"), call).read_all()


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


def listed(client: Any, descriptor: Any) -> None:
    list(client.list_flights(str(descriptor).encode(), options()))


def authenticated(client: Any, descriptor: Any) -> None:
    client.authenticate_basic_token(str(descriptor), TOKEN)


def information(client: Any, descriptor: Any) -> None:
    client.get_flight_info(descriptor, options())


def schema(client: Any, descriptor: Any) -> None:
    client.get_schema(descriptor, options())


def test_other_calls_are_refused(server: ServerProcess) -> None:
    client, draw = flight.FlightClient(server.url), random.Random(13)
    for _ in range(MANY // 5):
        said = draw.randbytes(draw.randrange(100))
        descriptor = flight.FlightDescriptor.for_command(said)
        if draw.random() < 0.5:
            descriptor = flight.FlightDescriptor.for_path(said.hex(), said.hex())
        call = draw.choice([put, exchange, listed, authenticated, information, schema])
        with pytest.raises((pa.ArrowException, NotImplementedError)) as raised:
            call(client, descriptor)
        assert "/fastpipe/" not in str(raised.value)


def test_handshakes_that_are_changed(server: ServerProcess) -> None:
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
