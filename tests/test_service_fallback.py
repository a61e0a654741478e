"""A reader of this process that makes the batches where no server does, and servers that come and go meanwhile."""

from __future__ import annotations

import itertools
import json
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from servers import free_port
from service_faults import ServerProcess, through

pytest.importorskip("pyarrow.flight")

import pyarrow as pa

from apart import wait_until
from fastpipe.service import Server

ARRAYS = {"id": np.arange(6000), "x": np.random.default_rng(1).random((6000, 700), "float32")}


def read(epoch: int = 0, **options: Any) -> fastpipe.Reader:
    """120 batches, few of which are under way at once."""
    reader = fastpipe.from_arrays(ARRAYS, **{"batch_size": 50, "shuffle": True, "seed": 7} | options)
    reader.set_epoch(epoch)
    return reader


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def made(server: Server) -> float:
    return server.stats()["batches"]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def gone(port: int) -> str:
    """The URL of a server that isn't there."""
    return f"grpc://127.0.0.1:{port}"


def test_without_servers_batches_are_made_here_at_once(gone: str) -> None:
    begun = time.monotonic()
    remote = fastpipe.connect([gone, gone], fallback=read(epochs=2), timeout=600)
    assert ids(remote) == ids(read(epochs=2))
    assert ids([remote.batch_at(3, epoch=5)]) == ids([read().batch_at(3, epoch=5)])
    assert remote.locate(3, 5, epoch=2) == read().locate(3, 5, epoch=2)
    assert time.monotonic() - begun < 100, "nobody waits for servers that aren't there"
    assert (remote.features, len(remote), remote.num_rows) == (read().features, 240, 6000)


def test_what_is_asked_for_holds_without_servers(gone: str) -> None:
    remote = fastpipe.connect(gone, rank=1, world_size=3, seed=9, epochs=2, fallback=read())
    assert ids(remote) == ids(read(rank=1, world_size=3, seed=9, epochs=2))
    assert ids(fastpipe.connect(gone, fallback=read()).shard(2, 1)) == ids(read(rank=1, world_size=2))
    theirs, ours = (fastpipe.rebatch(of, batch_size=70) for of in (fastpipe.connect(gone, fallback=read()), read()))
    assert ids(theirs) == ids(ours)


def test_states_pass_from_the_fallback_to_readers_and_back(gone: str) -> None:
    remote, local = fastpipe.connect(gone, fallback=read()), read()
    batches, here = iter(remote), iter(local)
    for _ in range(31):
        assert ids([next(batches)]) == ids([next(here)])
    state = json.loads(json.dumps(remote.state_dict()))
    assert state == local.state_dict()
    again = pickle.loads(pickle.dumps(fastpipe.connect(gone, fallback=read(), timeout=60)))
    again.load_state_dict(state)
    assert ids(again) == ids(read())[31:]
    with read().serve() as server:
        remote = fastpipe.connect(server.url)
        remote.load_state_dict(state)
        assert ids(remote) == ids(read())[31:]


class Units:
    """120 units of 50 rows, which are counted when they are read."""

    rows = [50] * 120
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("x", pa.int64(), nullable=False)])

    def __init__(self, fingerprint: str) -> None:
        self.said = fingerprint
        self.read_units = 0

    def read(self, unit: int) -> Any:
        self.read_units += 1
        rows = np.arange(50 * unit, 50 * unit + 50)
        return pa.table({"id": rows, "x": rows}, self.schema)

    def fingerprint(self) -> str:
        return self.said


@pytest.mark.parametrize("fingerprint", ["same", "other"])
def test_a_server_that_comes_is_used_if_it_has_the_data(gone: str, port: int, fingerprint: str) -> None:
    here = Units("same")
    fallback = fastpipe.read_units(here, batch_size=50, epochs=None)
    remote = fastpipe.connect(gone, fallback=fallback, epochs=None, prefetch=2, timeout=60)
    batches = iter(remote)
    found = ids(next(batches) for _ in range(20))
    assert here.read_units >= 20
    with Server(fastpipe.read_units(Units(fingerprint), batch_size=50, epochs=None), port=port) as server:
        if fingerprint == "other":
            with pytest.raises(fastpipe.StateError, match=r"other data.*connect anew"):
                found.extend(map(_id, _for_a_while(batches)))
        else:
            found.extend(map(_id, _until(batches, lambda: made(server) > 20)))
            # Nothing more is made here, but for a batch that was begun.
            before = here.read_units
            found += ids(next(batches) for _ in range(100))
            assert here.read_units <= before + 1
            assert made(server) >= 100
    whole = itertools.islice(fastpipe.read_units(Units("same"), batch_size=50, epochs=None), len(found))
    assert found == ids(whole)


def _id(batch: dict[str, Any]) -> list[int]:
    found: list[int] = batch["id"].tolist()
    return found


def _for_a_while(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return _until(batches, lambda: False)


def _until(batches: Iterator[dict[str, Any]], done: Any, seconds: float = 100) -> Iterator[dict[str, Any]]:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        yield next(batches)
        time.sleep(0.005)


def test_servers_go_and_come_back_within_a_pass(port: int) -> None:
    server = Server(read(), port=port)
    remote = fastpipe.connect(server.url, fallback=read(epochs=None), epochs=None, prefetch=2, timeout=0.5)
    batches = iter(remote)
    found = ids(next(batches) for _ in range(10))
    for _ in range(2):
        server.stop()
        found += ids(next(batches) for _ in range(30))
        server = Server(read(), port=port)
        found.extend(map(_id, _until(batches, lambda server=server: made(server) > 10)))
    server.stop()
    assert found == ids(next_ for _, next_ in zip(range(len(found)), read(epochs=None), strict=False))


def test_a_server_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    (tmp_path / "readers.py").write_text(
        "import numpy as np, fastpipe\n"
        "arrays = {'id': np.arange(6000), 'x': np.random.default_rng(1).random((6000, 700), 'float32')}\n"
        "reader = fastpipe.from_arrays(arrays, batch_size=50, shuffle=True, seed=7)\n"
    )
    server = ServerProcess(tmp_path / "readers.py")
    server.start()
    try:
        server.wait()
        server.send(signal.SIGSTOP)
        remote = fastpipe.connect(server.url, fallback=read(), timeout=2)
        begun, whole = time.monotonic(), [ids(read(epoch)) for epoch in range(3)]
        assert [ids(remote) for _ in whole] == whole
        assert [remote.locate(0, row, 0) for row in range(46)] == [read().locate(0, row) for row in range(46)]
        assert ids([remote.batch_at(0, 0)]) == whole[0][:1]
        # Three passes, 46 places and a batch: each would have waited for as long.
        assert time.monotonic() - begun < 90
    finally:
        server.end()


def test_a_network_that_falls_silent_loses_nothing() -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, fallback=read(), prefetch=2, timeout=1)
        network.silent_after = 1_000_000
        assert ids(remote) == ids(read())
        assert network.faults > 0


def test_what_refuses_for_good_is_told_in_spite_of_a_fallback() -> None:
    with read().serve(token="open sesame") as server:
        with pytest.raises(fastpipe.ServiceError, match="token"):
            fastpipe.connect(server.url, fallback=read(), timeout=60)
        with pytest.raises(fastpipe.ServiceError, match="no reader 'other'"):
            fastpipe.connect(server.url, "other", token="open sesame", fallback=read(), timeout=60)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"batch_size": 20}, "batch_size is 20, and 50 there"),
        ({"shuffle": "block", "shuffle_buffer": 100}, "shuffle is 'block', and 'window' there"),
        ({"seed": 8}, "seed is 8, and 7 there"),
        ({"epochs": 3}, "epochs is 3, and 1 there"),
        ({"rank": 1, "world_size": 2}, "rank is 1, and 0 there"),
    ],
)
def test_a_fallback_has_the_order_of_the_servers(other: dict[str, Any], match: str) -> None:
    with read().serve() as server:
        with pytest.raises(fastpipe.UnsupportedError, match=match):
            fastpipe.connect(server.url, fallback=read(**other))
        if "seed" in other:
            assert len(ids(fastpipe.connect(server.url, fallback=read(**other), seed=3))) == 120
        if "rank" in other:
            fastpipe.connect(server.url, fallback=read(**other), rank=0, world_size=2)


def test_errors_of_the_data_come_from_the_fallback_as_they_are(tmp_path: Path, gone: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("a\n" + "1\n" * 100 + "x\n")
    make = lambda: fastpipe.read_csv(path, features={"a": fastpipe.DenseSpec((), "int64")}, batch_size=10)  # noqa: E731
    with pytest.raises(fastpipe.FastpipeError) as expected:
        list(make())
    with pytest.raises(type(expected.value)) as raised:
        list(fastpipe.connect(gone, fallback=make()))
    assert str(raised.value) == str(expected.value)


def test_two_threads_and_passes_that_are_left(gone: str) -> None:
    # Threads that wait for a server's answer end with that, at the latest when it is overdue.
    remote = fastpipe.connect(gone, fallback=read(), prefetch=1, timeout=5)
    next(iter(remote))
    remote.set_epoch(0)
    batches, found = iter(remote), list[list[int]]()
    threads = [threading.Thread(target=lambda: found.extend(map(_id, batches))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(ids(read()))
    ours = lambda: [one for one in threading.enumerate() if one.name.startswith("fastpipe-")]  # noqa: E731
    assert wait_until(lambda: not ours()), ours()
