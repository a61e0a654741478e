"""Servers that start and stop during a pass: a fallback replaces them, or a directory lists others."""

from __future__ import annotations

import itertools
import json
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from apart import wait_until
from fastpipe.service import Directory, Server
from fastpipe.service._metrics import text_of
from processes import together
from samples import ids_by_batch as ids
from servers import free_port
from service_faults import rows_of, serving, through
from toy_units import Numbers

pytest.importorskip("pyarrow.flight")


def read(epoch: int = 0, rows: int = 6000, **options: Any) -> fastpipe.Reader:
    """120 batches, large enough that few are in flight at once."""
    reader = rows_of(rows, 700, **{"batch_size": 50} | options)
    reader.set_epoch(epoch)
    return reader


def made(server: Server) -> float:
    return server.stats()["batches"]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def gone(port: int) -> str:
    """The URL of a server that doesn't listen."""
    return f"grpc://127.0.0.1:{port}"


def test_without_servers_the_fallback_makes_batches_at_once(gone: str) -> None:
    begun = time.monotonic()
    remote = fastpipe.connect([gone, gone], fallback=read(epochs=2), timeout=600)
    assert ids(remote) == ids(read(epochs=2))
    assert ids([remote.batch_at(3, epoch=5)]) == ids([read().batch_at(3, epoch=5)])
    assert remote.locate(3, 5, epoch=2) == read().locate(3, 5, epoch=2)
    assert time.monotonic() - begun < 100, "no wait for servers"
    assert (remote.features, len(remote), remote.num_rows) == (read().features, 240, 6000)


def test_arguments_hold_without_servers(gone: str) -> None:
    remote = fastpipe.connect(gone, rank=1, world_size=3, seed=9, epochs=2, fallback=read())
    assert ids(remote) == ids(read(rank=1, world_size=3, seed=9, epochs=2))
    assert ids(fastpipe.connect(gone, fallback=read()).shard(2, 1)) == ids(read(rank=1, world_size=2))
    theirs, ours = (of.rebatch(batch_size=70) for of in (fastpipe.connect(gone, fallback=read()), read()))
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


class Versioned(Numbers):
    """120 units of 50 rows, of a version of the data."""

    def __init__(self, version: str) -> None:
        super().__init__([50] * 120)
        self.version = version

    def fingerprint(self) -> str:
        return self.version


@pytest.mark.parametrize("version", ["same", "other"])
def test_a_server_that_comes_is_used_if_it_has_the_data(gone: str, port: int, version: str) -> None:
    here, options = Versioned("same"), {"batch_size": 50, "epochs": None}
    remote = fastpipe.connect(gone, fallback=fastpipe.read_units(here, **options), epochs=None, prefetch=2, timeout=60)
    batches = iter(remote)
    found = [next(batches) for _ in range(20)]
    assert len(here.calls) >= 20
    with Server(fastpipe.read_units(Versioned(version), **options), port=port) as server:
        if version == "other":
            with pytest.raises(fastpipe.errors.StateError, match=r"other data.*connect again"):
                found.extend(_until(batches, lambda: False))
        else:
            found += _until(batches, lambda: made(server) > 20)
            # The fallback makes no more batches, except for one that it had begun.
            before = len(here.calls)
            found += [next(batches) for _ in range(100)]
            assert len(here.calls) <= before + 1
            assert made(server) >= 100
    whole = itertools.islice(fastpipe.read_units(Versioned("same"), **options), len(found))
    assert [batch["x"].tolist() for batch in found] == [batch["x"].tolist() for batch in whole]


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
        server.close()
        found += ids(next(batches) for _ in range(30))
        server = Server(read(), port=port)
        found += ids(_until(batches, lambda server=server: made(server) > 10))
    server.close()
    assert found == ids(next_ for _, next_ in zip(range(len(found)), read(epochs=None), strict=False))


def test_a_server_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    with serving(read(), tmp_path) as server:
        server.send(signal.SIGSTOP)
        remote = fastpipe.connect(server.url, fallback=read(), timeout=2)
        begun, whole = time.monotonic(), [ids(read(epoch)) for epoch in range(3)]
        assert [ids(remote) for _ in whole] == whole
        assert [remote.locate(0, row, 0) for row in range(46)] == [read().locate(0, row) for row in range(46)]
        assert ids([remote.batch_at(0, 0)]) == whole[0][:1]
        # Three passes, 46 places and a batch would each have waited for two seconds.
        assert time.monotonic() - begun < 90


def test_a_silent_network_loses_nothing() -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, fallback=read(), prefetch=2, timeout=1)
        network.silent_after = 1_000_000
        assert ids(remote) == ids(read())
        assert network.faults > 0


def test_permanent_refusals_are_raised_despite_a_fallback() -> None:
    with read().serve(token="open sesame") as server:
        with pytest.raises(fastpipe.errors.ServiceError, match="token"):
            fastpipe.connect(server.url, fallback=read(), timeout=60)
        with pytest.raises(fastpipe.errors.ServiceError, match="no reader 'other'"):
            fastpipe.connect(server.url, "other", token="open sesame", fallback=read(), timeout=60)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"rows": 9}, "other data"),
        ({"batch_size": 20}, "batch_size is 20, and 50 there"),
        ({"shuffle": "block", "shuffle_buffer": 100}, "shuffle is 'block', and 'window' there"),
        ({"seed": 8}, "seed is 8, and 7 there"),
        ({"epochs": 3}, "epochs is 3, and 1 there"),
        ({"rank": 1, "world_size": 2}, "rank is 1, and 0 there"),
    ],
)
def test_a_fallback_has_the_order_of_the_servers(other: dict[str, Any], match: str) -> None:
    with read().serve() as server:
        with pytest.raises(fastpipe.errors.UnsupportedError, match=match):
            fastpipe.connect(server.url, fallback=read(**other))
        if "seed" in other:
            assert len(ids(fastpipe.connect(server.url, fallback=read(**other), seed=3))) == 120
        if "rank" in other:
            fastpipe.connect(server.url, fallback=read(**other), rank=0, world_size=2)


def test_two_threads_read_one_pass_and_leave_no_threads(gone: str) -> None:
    # Threads that wait for a server's answer end at the timeout at the latest.
    remote = fastpipe.connect(gone, fallback=read(), prefetch=1, timeout=5)
    next(iter(remote))
    remote.set_epoch(0)
    batches, found = iter(remote), list[list[int]]()
    together(threading.Thread(target=lambda: found.extend(ids(batches))) for _ in range(2))
    assert sorted(found) == sorted(ids(read()))
    ours = lambda: [one for one in threading.enumerate() if one.name.startswith("fastpipe-")]  # noqa: E731
    assert wait_until(lambda: not ours()), ours()


class Listed:
    """A directory whose list the test changes.

    Attributes:
        listed: The list, or an exception to raise.
        asked: The number of calls.
        threads: The names of the threads that called.
    """

    def __init__(self, listed: list[str] | Exception) -> None:
        self.listed = listed
        self.asked = 0
        self.threads: set[str] = set()

    def urls(self) -> Sequence[str]:
        self.threads.add(threading.current_thread().name)
        self.asked += 1
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed


def slow(**options: Any) -> fastpipe.Reader:
    """Batches that are sent one by one, so that clients can slow their servers down."""
    return rows_of(5000, 1500, **{"batch_size": 25} | options)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    servers = [Server(slow()) for _ in range(3)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpipe.service._directory._PAUSE", 0.05)


def test_new_servers_are_used_and_removed_ones_are_not(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    batches = iter(fastpipe.connect(directory, prefetch=6, epochs=None))
    found: list[list[int]] = []

    def read_until(true: Callable[[], bool]) -> None:
        while not true():
            found.extend(ids([next(batches)]))
            time.sleep(0.003)

    read_until(lambda: len(found) == 40)
    assert made(servers[1]) == made(servers[2]) == 0
    directory.listed = [server.url for server in servers]
    read_until(lambda: made(servers[1]) > 0 and made(servers[2]) > 0)
    directory.listed = [servers[2].url]
    # The third list from now on was requested after the pass had received the first one.
    asked = directory.asked
    read_until(lambda: directory.asked >= asked + 3)
    # Batches that were requested earlier still arrive.
    before = len(found)
    read_until(lambda: len(found) == before + 30)
    left = made(servers[0]) + made(servers[1])
    read_until(lambda: len(found) == before + 100)
    assert made(servers[0]) + made(servers[1]) == left
    assert found == ids(itertools.islice(slow(epochs=None), len(found)))
    assert directory.threads == {"MainThread", "fastpipe-directory"}
    assert isinstance(directory, Directory)


def test_all_servers_are_replaced_by_others(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    remote = fastpipe.connect(directory, prefetch=2, timeout=60)
    found = []
    for number, batch in enumerate(remote):
        found += ids([batch])
        if number in (30, 90):
            servers[number // 60].close()
            directory.listed = [servers[number // 60 + 1].url]
    assert found == ids(slow())


def test_errors_of_a_directory_do_not_end_a_pass(servers: list[Server]) -> None:
    directory = Listed([server.url for server in servers])
    remote = fastpipe.connect(directory, prefetch=4)
    found = []
    for number, batch in enumerate(remote):
        found += ids([batch])
        time.sleep(0.002)
        if number == 20:
            directory.listed = RuntimeError("the office is closed")
        if number == 60:
            servers[0].close()
        if number == 100:
            directory.listed = ["no URL"]
    assert found == ids(slow())


def test_a_pass_may_begin_before_its_servers(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    remote = fastpipe.connect(directory)
    directory.listed = []
    servers[0].close()
    threading.Timer(0.5, lambda: setattr(directory, "listed", [servers[1].url])).start()
    assert ids(remote) == ids(slow())
    assert made(servers[1]) > 0


def test_without_servers_the_directory_says_why(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    remote = fastpipe.connect(directory, prefetch=2, timeout=3, epochs=None)
    batches = iter(remote)
    begun = [next(batches)["id"].tolist() for _ in range(3)]
    directory.listed = []
    with pytest.raises(fastpipe.errors.ServiceError, match="for 3 seconds: the directory lists no server"):
        begun.extend(batch["id"].tolist() for batch in batches)
    assert begun == ids(itertools.islice(slow(epochs=None), len(begun)))
    directory.listed = RuntimeError("the office is closed")
    servers[0].close()
    with pytest.raises(fastpipe.errors.ServiceError, match="the office is closed"):
        list(remote)
    with pytest.raises(RuntimeError, match="the office is closed"):
        fastpipe.connect(directory, timeout=1)
    directory.listed = []
    with pytest.raises(fastpipe.errors.ServiceError, match=r"listed no server for 0\.5 seconds"):
        fastpipe.connect(directory, timeout=0.5)
    directory.listed = ["no URL"]
    with pytest.raises(ValueError, match="grpc://host:port"):
        fastpipe.connect(directory)


def test_a_reader_is_pickled_with_the_servers_that_were_known(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    remote = pickle.loads(pickle.dumps(fastpipe.connect(directory)))
    directory.listed = []
    assert ids(remote) == ids(slow())


def test_a_consumer_may_pause_for_longer_than_the_timeout(servers: list[Server]) -> None:
    remote = fastpipe.connect([server.url for server in servers], prefetch=2, timeout=3)
    batches = iter(remote)
    found = [next(batches)]
    # The batches of the stopped server wait for room at another one.
    servers[0].close()
    time.sleep(4)
    servers[1].close()
    assert ids(found) + ids(batches) == ids(slow())


def test_metrics_show_the_time_of_making_and_waiting() -> None:
    with slow(batch_size=1000).serve() as server:
        remote = iter(fastpipe.connect(server.url, prefetch=1))
        next(remote)
        assert wait_until(lambda: server.stats()["batches"] >= 2)
        before = server.stats()

        def waits_for_none() -> bool:
            """Returns whether no request waits for a batch now."""
            nonlocal before
            last, before = before, server.stats()
            return before["making_seconds"] == last["making_seconds"]

        assert wait_until(waits_for_none)
        time.sleep(0.5)
        stats = server.stats()
        # No request has waited long for a batch since.
        assert stats["making_seconds"] - before["making_seconds"] < 0.4
        remote.close()  # type: ignore[attr-defined]
        text = text_of(server.stats())
        assert "fastpipe_service_making_seconds_total " in text
        assert "fastpipe_service_held_back_seconds_total " in text
