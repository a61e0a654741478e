"""Nothing that comes from the network is unpickled: pickles in each place that a hostile client or server chooses."""

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
from service_faults import connect_patiently
from service_tickets import act, entries

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")


def read() -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(500)}, batch_size=64, shuffle=True, seed=7)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


_unpickled: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    # Python's own protocol of what is looked up by name while something is unpickled.
    if _unpickled is not None and event == "pickle.find_class":
        _unpickled.append(".".join(map(str, arguments)))


@pytest.fixture(scope="module", autouse=True)
def _audited() -> None:
    sys.addaudithook(_audit)


class Watched:
    """A pickle that makes a file, and whether anything was unpickled meanwhile, by whichever thread."""

    def __init__(self, folder: Path) -> None:
        self.made = folder / "made"
        self.pickle = pickle.dumps(Evil(self.made))
        self.text = self.pickle.decode("latin-1")

    def check(self) -> None:
        """Whether nothing was."""
        assert _unpickled == []
        assert not self.made.exists()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    global _unpickled
    found = Watched(tmp_path)
    _unpickled = []
    pickle.loads(found.pickle)
    assert found.made.exists(), "it would be seen"
    assert any("touch" in name or "Path" in name for name in _unpickled)
    found.made.unlink()
    _unpickled = []
    yield found
    _unpickled = None


def test_nothing_is_unpickled_where_all_goes_well(watched: Watched) -> None:
    with read().serve(token="open sesame") as server:
        remote = fastpipe.connect(server.url, token="open sesame")
        assert ids(remote) == ids(read())
        remote.load_state_dict(remote.state_dict())
        remote.locate(3, 5)
        server.stats()
    watched.check()


def tickets(ticket: dict[str, Any], evil: Watched) -> Iterator[bytes]:
    """Tickets with a pickle in each place."""
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


def test_no_client_gets_a_pickle_unpickled(watched: Watched) -> None:
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
                # As if it was changed on its way: its checksum differs.
                continue
            if not found[0].startswith(b"fpe1"):
                taken.append(data)
        assert len(sent) > 60
        # What else a progress says is read by nobody.
        assert [b'"places": [], "more"' in data for data in taken] == [True]
        actions = [(name, watched.pickle) for name in ("describe", "place")]
        for entry in ("reader", "data", "unit", "record"):
            request = {"reader": "default", "data": ticket["data"], "unit": 0, "record": 0} | {entry: watched.text}
            actions += [("place", sealed(request)), ("place", json.dumps(request).encode())]
        for name, body in actions:
            with pytest.raises((pa.ArrowException, fastpipe.FastpipeError), match=r"request|no reader|damaged"):
                act(client, name, body, options)
        with pytest.raises(pa.ArrowInvalid, match="there is no action"):
            list(client.do_action(flight.Action(watched.text, watched.pickle), options))
        # Headers, and what the server doesn't take at all.
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
    """Sends a pickle where a server might read it."""
    writer, _ = client.do_put(descriptor, extension(data), options)
    with suppress(pa.ArrowException):
        writer.write_metadata(data)
    writer.close()


def extension(data: bytes) -> Any:
    """A schema whose column's type is a pickle: old versions of pyarrow unpickled it as they read the schema."""
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": data}
    return pa.schema([pa.field("batch", pa.large_binary(), nullable=False, metadata=metadata)], metadata={"m": data})


class Hostile(flight.FlightServerBase):  # type: ignore[misc]
    """Answers as a real server does, but for what is changed.

    Args:
        real: the URL of that one.
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
    """The path to each value in JSON."""
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


def test_no_description_gets_a_pickle_unpickled(hostile: Hostile, watched: Watched) -> None:
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
    # These are any text, or have some in them.
    assert taken <= {"reader", "fingerprints", "files", "words", "text", "features"}
    watched.check()


def test_no_place_gets_a_pickle_unpickled(hostile: Hostile, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_patiently(monkeypatch)
    remote = fastpipe.connect(hostile.url, timeout=0.6)
    text = watched.text
    for told in (
        watched.pickle,
        *(json.dumps(found).encode() for found in (text, {"kind": text, "fields": {"a": 1}})),
        *(json.dumps({"kind": "Place", "fields": fields}).encode() for fields in (text, {text: 1}, [text], {"_a": 1})),
        json.dumps({"kind": "Place(): __import__('os')", "fields": {"x=print()": 1}}).encode(),
    ):
        hostile.change_answer = lambda action, _, told=told: summed([told])
        with pytest.raises(fastpipe.ServiceError, match="place that can't be read"):
            remote.locate(0, 0)
    hostile.change_answer = lambda action, _: summed([])
    with pytest.raises(fastpipe.ServiceError, match="place that can't be read"):
        remote.locate(0, 0)
    hostile.change_answer = lambda action, _: [watched.pickle]
    with pytest.raises(fastpipe.ServiceError, match="no checksum"):
        remote.locate(0, 0)
    watched.check()


def streams(evil: bytes) -> Iterator[Callable[[], Any]]:
    """Streams of batches with a pickle in each place."""
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


def test_no_stream_of_batches_gets_a_pickle_unpickled(
    hostile: Hostile, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def forwarded(url: str, change: dict[str, Any]) -> Callable[[], Any]:
    """What a server answers to a ticket that is changed, whatever was asked for."""
    client = flight.FlightClient(url)
    ticket = flight.Ticket(json.dumps(entries(client) | change).encode())

    def stream() -> Any:
        reader = client.do_get(ticket)
        return flight.GeneratorStream(reader.schema, ((chunk.data, chunk.app_metadata) for chunk in reader))

    return stream


@pytest.mark.parametrize(
    ("change", "match"),
    [({"start": 1}, "batch 1 of epoch 0, which was not requested"), ({"epoch": 1}, "epoch 1, which was not")],
)
def test_batches_that_were_not_asked_for_are_refused(change: dict[str, Any], match: str) -> None:
    with read().serve() as server, Hostile(server.url) as hostile:
        hostile.batches = forwarded(server.url, {"stop": 8, "until": 8} | change)
        with pytest.raises(fastpipe.ServiceError, match=match):
            next(iter(fastpipe.connect(hostile.url, timeout=1)))


def test_batches_that_do_not_fit_are_refused() -> None:
    """They are another data set's, whole and with the right checksums."""
    other = fastpipe.from_arrays({"y": np.arange(500, dtype="float32")}, batch_size=64, shuffle=True, seed=7)
    with read().serve() as server, Hostile(server.url) as hostile, other.serve() as liar:
        hostile.batches = forwarded(liar.url, {"stop": 8, "until": 8})
        with pytest.raises(fastpipe.ServiceError, match="feature 'id'"):
            next(iter(fastpipe.connect(hostile.url, timeout=1)))


# Who unpickles, by the text of the package.

PACKAGE = Path(fastpipe.__file__).parent
# The process that `LocalService` starts gets its reader from there, by a socket that nobody else has.
OF_A_CHILD = "fastpipe.service._local_server"
UNPICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def imports(tree: ast.AST) -> set[str]:
    """The modules that a module names in imports, wherever they stand."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.AST]:
    """The modules of the service but the child's, and all that these import of the package, directly or not."""
    paths = {
        ".".join(("fastpipe", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in PACKAGE.rglob("*.py")
    }
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found: dict[str, ast.AST] = {}
    left = [name for name in paths if name.startswith("fastpipe.service") and name != OF_A_CHILD]
    while left:
        name = left.pop()
        if name in paths and name not in found:
            found[name] = ast.parse(paths[name].read_text())
            left += imports(found[name])
    assert {
        "fastpipe.service._server",
        "fastpipe.service._connection",
        "fastpipe._reader.state",
        "fastpipe.specs",
    } <= set(found)
    return found


def test_what_the_service_imports_has_nothing_that_unpickles(modules: dict[str, ast.AST]) -> None:
    assert OF_A_CHILD not in modules
    having = {name for name, tree in modules.items() if {of.split(".")[0] for of in imports(tree)} & UNPICKLES}
    # It hands the reader over to the child.
    assert having == {"fastpipe.service._local"}
    uses = {
        node.attr
        for node in ast.walk(modules["fastpipe.service._local"])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle"
    }
    assert uses == {"dumps", "HIGHEST_PROTOCOL"}


def test_nothing_of_the_service_runs_text_or_loads_objects(modules: dict[str, ast.AST]) -> None:
    for name, tree in modules.items():
        for node in ast.walk(tree) if name.startswith("fastpipe.service") else ():
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                assert called not in {"eval", "exec", "__import__", "import_module"}, name
                assert not [word for word in node.keywords if word.arg == "allow_pickle"], name
