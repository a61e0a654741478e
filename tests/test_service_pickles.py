"""Data from the network is never unpickled, wherever a hostile client or server puts a pickle."""

from __future__ import annotations

import ast
import json
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import fastpipe.service
from fastpipe.service._wire import sealed, summed
from samples import ids_by_batch as ids
from service_faults import connect_patiently, rows_of
from service_tickets import act, entries

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")


def read() -> fastpipe.Reader:
    return rows_of(500)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


_unpickled: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    # Python raises this event for each name that a pickle looks up.
    if _unpickled is not None and event == "pickle.find_class":
        _unpickled.append(".".join(map(str, arguments)))


@pytest.fixture(scope="module", autouse=True)
def _audited() -> None:
    sys.addaudithook(_audit)


class Watched:
    """A pickle that creates a file, and a check that no thread has unpickled any data."""

    def __init__(self, folder: Path) -> None:
        self.made = folder / "made"
        self.pickle = pickle.dumps(Evil(self.made))
        self.text = self.pickle.decode("latin-1")

    def check(self) -> None:
        """Checks that no data was unpickled."""
        assert _unpickled == []
        assert not self.made.exists()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    global _unpickled
    found = Watched(tmp_path)
    _unpickled = []
    pickle.loads(found.pickle)
    assert found.made.exists()
    assert any("touch" in name or "Path" in name for name in _unpickled)
    found.made.unlink()
    _unpickled = []
    yield found
    _unpickled = None


def test_normal_use_unpickles_nothing(watched: Watched) -> None:
    with read().serve(token="open sesame") as server:
        remote = fastpipe.connect(server.url, token="open sesame")
        assert ids(remote) == ids(read())
        remote.load_state_dict(remote.state_dict())
        remote.locate(3, 5)
        server.stats()
    watched.check()


def tickets(ticket: dict[str, Any], evil: Watched) -> Iterator[bytes]:
    """Yields tickets with a pickle in each place."""
    yield evil.pickle
    yield b"fps1" + evil.pickle
    yield b"fps1" + zlib.crc32(evil.pickle).to_bytes(4, "little") + evil.pickle
    order, data = json.loads(ticket["order"]), ticket["data"]
    changes: list[dict[str, Any]] = [{name: evil.text} for name in [*ticket, "more"]]
    changes += [{"order": json.dumps(order | {name: evil.text})} for name in [*order, "more"]]
    changes += [{"data": data | {name: evil.text}} for name in [*data, "more"]]
    for change in changes:
        yield sealed(ticket | change)
        yield json.dumps(ticket | change).encode()
    progress = {"epoch": 0, "world_size": 1, "step": 3, "taken": 3, "next": 0, "open": [], "late": [], "places": []}
    for name in [*progress, "more"]:
        yield sealed(ticket | {"progress": progress | {name: evil.text}})
    yield sealed(ticket | {"progress": {evil.text: evil.text}})


def test_requests_are_not_unpickled(watched: Watched) -> None:
    with read().serve(token="open sesame") as server:
        headers = [(b"authorization", b"Bearer open sesame")]
        options = flight.FlightCallOptions(timeout=100, headers=headers)
        client = flight.FlightClient(server.url)
        ticket = entries(client, options) | {"stop": 2, "until": 2}
        sent, taken = list(tickets(ticket, watched)), []
        for data in sent:
            try:
                found = [chunk.app_metadata.to_pybytes() for chunk in client.do_get(flight.Ticket(data), options)]
            except flight.FlightUnavailableError:
                # The checksum differs.
                continue
            if not found[0].startswith(b"fpe1"):
                taken.append(data)
        assert len(sent) > 60
        # Additional entries of a progress are ignored.
        assert [b'"places": [], "more"' in data for data in taken] == [True]
        actions = [(name, watched.pickle) for name in ("describe", "locate")]
        whole = {name: ticket[name] for name in ("reader", "data", "order", "epoch")} | {"step": 0, "row": 0}
        for entry in whole:
            request = whole | {entry: watched.text}
            actions += [("locate", sealed(request)), ("locate", json.dumps(request).encode())]
        for name, body in actions:
            with pytest.raises((pa.ArrowException, fastpipe.FastpipeError), match=r"request|no reader|damaged"):
                act(client, name, body, options)
        with pytest.raises(pa.ArrowInvalid, match="an action must be"):
            list(client.do_action(flight.Action(watched.text, watched.pickle), options))
        # Headers, and unsupported calls.
        for name in (b"authorization", b"x-evil-bin"):
            given = flight.FlightCallOptions(timeout=100, headers=[(name, watched.pickle.hex().encode())])
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_action(flight.Action("health", b""), given))
        descriptor = flight.FlightDescriptor.for_command(watched.pickle)
        with pytest.raises((pa.ArrowException, NotImplementedError)):
            client.get_flight_info(descriptor, options)
        with pytest.raises((pa.ArrowException, NotImplementedError)):
            put(client, descriptor, watched.pickle, options)
        client.close()
        assert ids(fastpipe.connect(server.url, token="open sesame")) == ids(read())
    watched.check()


def put(client: Any, descriptor: Any, data: bytes, options: Any) -> None:
    """Uploads a pickle as a schema, and as metadata."""
    writer, _ = client.do_put(descriptor, extension(data), options)
    with suppress(pa.ArrowException):
        writer.write_metadata(data)
    writer.close()


def extension(data: bytes) -> Any:
    """Returns a schema with a pickle as a type, which old versions of pyarrow unpickled."""
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": data}
    return pa.schema([pa.field("batch", pa.large_binary(), nullable=False, metadata=metadata)], metadata={"m": data})


class Hostile(flight.FlightServerBase):  # type: ignore[misc]
    """A server that changes the answers of a real server.

    Args:
        real: The URL of the real server.
    """

    def __init__(self, real: str) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._real = flight.FlightClient(real)
        self.change_answer: Callable[[str, list[bytes]], list[bytes]] = lambda action, told: told
        self.batches: Callable[[], Any] | None = None

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        told = [answer.body.to_pybytes() for answer in self._real.do_action(action)]
        return iter(self.change_answer(action.type, told))

    def do_get(self, context: Any, ticket: Any) -> Any:
        assert self.batches is not None
        return self.batches()


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with read().serve() as server, Hostile(server.url) as hostile:
        yield hostile


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path to each value in JSON."""
    yield path
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in inner:
        yield from places(value, (*path, name))


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = dict(node) if isinstance(node, dict) else list(node)
    copied[path[0]] = replaced(node[path[0]], path[1:], value)
    return copied


def test_descriptions_are_not_unpickled(hostile: Hostile, watched: Watched) -> None:
    hostile.batches = lambda: flight.RecordBatchStream(pa.table({"batch": pa.array([], pa.large_binary())}))
    described, rows, _ = hostile.do_action(None, flight.Action("describe", b'{"reader": "default"}'))
    told = json.loads(described)
    answers = [[watched.pickle, rows], [described, watched.pickle], [described, watched.pickle * 4], [watched.pickle]]
    answers += [[json.dumps(replaced(told, path, watched.text)).encode(), rows] for path in places(told)]
    specs = json.loads(told["features"])
    answers += [
        [json.dumps(told | {"features": json.dumps(replaced(specs, path, watched.text))}).encode(), rows]
        for path in places(specs)
    ]
    taken = set()
    for answer in answers:
        hostile.change_answer = lambda action, told, answer=answer: summed(answer)
        try:
            remote = fastpipe.connect(hostile.url, timeout=0.2)
        except fastpipe.FastpipeError:
            continue
        taken |= {name for name, value in json.loads(answer[0]).items() if value != told[name]}
        repr(remote)
        remote.explain()
        remote.close()
    # The entries that contain any text.
    assert taken <= {"reader", "fingerprints", "files", "words", "text", "features"}
    watched.check()


def test_places_are_not_unpickled(hostile: Hostile, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_patiently(monkeypatch)
    remote = fastpipe.connect(hostile.url, timeout=0.6)
    text = watched.text
    for told in (
        watched.pickle,
        *(json.dumps(found).encode() for found in (text, {"kind": text, "fields": {"a": 1}})),
        *(json.dumps({"kind": "Place", "fields": fields}).encode() for fields in (text, {text: 1}, [text], {"_a": 1})),
        json.dumps({"kind": "Place(): __import__('os')", "fields": {"x=print()": 1}}).encode(),
        json.dumps({"kind": "PackLocation", "fields": {"row": 1, "rows": text}}).encode(),
        json.dumps({"kind": "MixtureLocation", "fields": {"row": 1, "location": {"kind": [text]}}}).encode(),
        json.dumps({"kind": "MixtureLocation", "fields": [text]}).encode(),
    ):
        hostile.change_answer = lambda action, _, told=told: summed([told])
        with pytest.raises(fastpipe.errors.ServiceError, match="location that can't be read"):
            remote.locate(0, 0)
    hostile.change_answer = lambda action, _: summed([])
    with pytest.raises(fastpipe.errors.ServiceError, match="location that can't be read"):
        remote.locate(0, 0)
    hostile.change_answer = lambda action, _: [watched.pickle]
    with pytest.raises(fastpipe.errors.ServiceError, match="no checksum"):
        remote.locate(0, 0)
    watched.check()


def streams(evil: bytes) -> Iterator[Callable[[], Any]]:
    """Yields streams of batches with a pickle in each place."""
    plain = pa.schema([pa.field("batch", pa.large_binary(), nullable=False)])

    def stream(schema: Any, data: bytes, metadata: bytes | None) -> Callable[[], Any]:
        batch = pa.RecordBatch.from_arrays([pa.array([data], pa.large_binary())], schema=schema)
        return lambda: flight.GeneratorStream(schema, iter([batch if metadata is None else (batch, metadata)]))

    def refusal(error: type[Exception]) -> Callable[[], Any]:
        def refuse() -> Any:
            raise error("refused", evil)

        return refuse

    yield stream(plain, evil, None)
    for said in (evil, b"fpg1" + evil, b"fpg1\1\0\0\0" + evil, b"fpb1" + evil, b"fpe1" + evil):
        yield stream(plain, evil, said)
        yield stream(extension(evil), evil, said)
    text = evil.decode("latin-1")
    for error in ({"error": text}, {"message": text}, {"path": text}, {"offset": text}, {"record": [text]}):
        for name in ("MalformedFileError", "StateError", "ServiceError"):
            said = {"error": name, "message": "bad"} | error
            yield stream(plain, b"", b"fpe1" + json.dumps(said).encode())
    for error in (flight.FlightInternalError, flight.FlightServerError, flight.FlightUnauthorizedError):
        yield refusal(error)
    objects = pa.table({"batch": pa.array([evil], pa.binary())})
    yield lambda: flight.RecordBatchStream(objects)
    yield lambda: flight.RecordBatchStream(pa.table({evil.hex(): [evil], "batch": [1]}))


def test_batches_are_not_unpickled(hostile: Hostile, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_patiently(monkeypatch)
    remote = fastpipe.connect(hostile.url, timeout=0.1)
    tried = 0
    for batches in streams(watched.pickle):
        hostile.batches = batches
        with pytest.raises(fastpipe.FastpipeError):
            next(iter(remote))
        tried += 1
    assert tried == 31
    watched.check()


OTHER = {"y": np.arange(500, dtype="float32")}


@pytest.mark.parametrize(
    ("change", "other", "match"),
    [
        ({"start": 1}, False, "batch 1 of epoch 0, which was not requested"),
        ({"epoch": 1}, False, "epoch 1, which was not"),
        # Intact batches of another dataset, with the right checksums.
        ({}, True, "feature 'id'"),
    ],
)
def test_wrong_batches_are_refused(change: dict[str, Any], other: bool, match: str) -> None:
    reader = fastpipe.from_arrays(OTHER, batch_size=64, shuffle=True, seed=7) if other else read()
    with read().serve() as real, Hostile(real.url) as hostile, reader.serve() as liar:
        client = flight.FlightClient(liar.url)
        ticket = flight.Ticket(json.dumps(entries(client) | {"stop": 8, "until": 8} | change).encode())

        def forward() -> Any:
            """Returns the same batches for each request."""
            found = client.do_get(ticket)
            return flight.GeneratorStream(found.schema, ((chunk.data, chunk.app_metadata) for chunk in found))

        hostile.batches = forward
        with pytest.raises(fastpipe.errors.ServiceError, match=match):
            next(iter(fastpipe.connect(hostile.url, timeout=1)))


# The code of the package.

PACKAGE = Path(fastpipe.__file__).parent
# `LocalService` starts this process, and sends it a reader through a private socket.
OF_A_CHILD = "fastpipe.service._local_server"
UNPICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def imports(tree: ast.AST) -> set[str]:
    """Returns the modules in a module's imports, at any place."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_module_of_servers_and_clients_unpickles_or_runs_text() -> None:
    paths = {
        ".".join(("fastpipe", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in PACKAGE.rglob("*.py")
    }
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    # The modules of the service, and modules of the package that they import, directly or not.
    modules: dict[str, ast.AST] = {}
    left = [name for name in paths if name.startswith("fastpipe.service") and name != OF_A_CHILD]
    while left:
        name = left.pop()
        if name in paths and name not in modules:
            modules[name] = ast.parse(paths[name].read_text())
            left += imports(modules[name])
    assert {"fastpipe.service._server", "fastpipe.service._connection", "fastpipe._reader.state"} <= set(modules)
    assert OF_A_CHILD not in modules
    having = {name for name, tree in modules.items() if {of.split(".")[0] for of in imports(tree)} & UNPICKLES}
    # They pickle a reader for the child process, and check whether the function of a map can be pickled.
    assert having == {"fastpipe.service._local", "fastpipe._reader.map_processes"}
    uses = {
        node.attr
        for name in having
        for node in ast.walk(modules[name])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle"
    }
    assert uses == {"dumps", "HIGHEST_PROTOCOL"}
    for name, tree in modules.items():
        for node in ast.walk(tree) if name.startswith("fastpipe.service") else ():
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                assert called not in {"eval", "exec", "__import__", "import_module"}, name
                assert not [word for word in node.keywords if word.arg == "allow_pickle"], name
