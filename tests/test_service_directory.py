"""Servers that come and go while a pass runs: a directory lists them, and batches are the local ones all the same."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import fastpipe

pytest.importorskip("pyarrow.flight")

from apart import wait_until
from fastpipe.service import Directory, Server
from fastpipe.service._metrics import text_of

# A batch of 25 rows is sent by itself, so that clients can hold its server back.
ARRAYS = {"id": np.arange(5000), "x": np.random.default_rng(1).random((5000, 1500), "float32")}


class Listed:
    """A directory whose list is changed by the test.

    Attributes:
        listed: what it says; an exception is raised.
        asked: how often it has been asked.
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


def read(**options: Any) -> fastpipe.Reader:
    return fastpipe.from_arrays(ARRAYS, **{"batch_size": 25, "shuffle": True, "seed": 7} | options)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    servers = [Server(read()) for _ in range(3)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpipe.service._directory._PAUSE", 0.05)


def batches_of(server: Server) -> float:
    return server.stats()["batches"]


def test_servers_that_come_are_used_and_those_that_go_are_left(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    batches = iter(fastpipe.connect(directory, prefetch=6, epochs=None))
    found: list[list[int]] = []

    def read_until(true: Callable[[], bool]) -> None:
        while not true():
            found.append(next(batches)["id"].tolist())
            time.sleep(0.003)

    read_until(lambda: len(found) == 40)
    assert batches_of(servers[1]) == batches_of(servers[2]) == 0
    directory.listed = [server.url for server in servers]
    read_until(lambda: batches_of(servers[1]) > 0 and batches_of(servers[2]) > 0)
    directory.listed = [servers[2].url]
    # The third answer from now on was asked for when the pass had the first one.
    asked = directory.asked
    read_until(lambda: directory.asked >= asked + 3)
    # What the others were asked for before comes, too.
    before = len(found)
    read_until(lambda: len(found) == before + 30)
    left = batches_of(servers[0]) + batches_of(servers[1])
    read_until(lambda: len(found) == before + 100)
    assert batches_of(servers[0]) + batches_of(servers[1]) == left
    assert found == ids(itertools.islice(read(epochs=None), len(found)))
    assert directory.threads == {"MainThread", "fastpipe-directory"}
    assert isinstance(directory, Directory)


def test_all_servers_are_replaced_by_others(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    remote = fastpipe.connect(directory, prefetch=2, timeout=60)
    found = []
    for number, batch in enumerate(remote):
        found.append(batch["id"].tolist())
        if number in (30, 90):
            servers[number // 60].stop()
            directory.listed = [servers[number // 60 + 1].url]
    assert found == ids(read())


def test_errors_of_a_directory_end_no_pass(servers: list[Server]) -> None:
    directory = Listed([server.url for server in servers])
    remote = fastpipe.connect(directory, prefetch=4)
    found = []
    for number, batch in enumerate(remote):
        found.append(batch["id"].tolist())
        time.sleep(0.002)
        if number == 20:
            directory.listed = RuntimeError("nobody is in")
        if number == 60:
            servers[0].stop()
        if number == 100:
            directory.listed = ["no URL"]
    assert found == ids(read())


def test_a_pass_may_begin_before_its_servers(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    remote = fastpipe.connect(directory)
    directory.listed = []
    servers[0].stop()
    threading.Timer(0.5, lambda: setattr(directory, "listed", [servers[1].url])).start()
    assert ids(remote) == ids(read())
    assert batches_of(servers[1]) > 0


def test_without_servers_the_directory_says_why(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    remote = fastpipe.connect(directory, prefetch=2, timeout=3, epochs=None)
    batches = iter(remote)
    begun = [next(batches)["id"].tolist() for _ in range(3)]
    directory.listed = []
    with pytest.raises(fastpipe.ServiceError, match="for 3 seconds: the directory lists no server"):
        begun.extend(batch["id"].tolist() for batch in batches)
    assert begun == ids(itertools.islice(read(epochs=None), len(begun)))
    directory.listed = RuntimeError("nobody is in")
    servers[0].stop()
    with pytest.raises(fastpipe.ServiceError, match="nobody is in"):
        list(remote)
    with pytest.raises(RuntimeError, match="nobody is in"):
        fastpipe.connect(directory, timeout=1)
    directory.listed = []
    with pytest.raises(fastpipe.ServiceError, match=r"listed no server for 0\.5 seconds"):
        fastpipe.connect(directory, timeout=0.5)
    directory.listed = ["no URL"]
    with pytest.raises(ValueError, match="grpc://host:port"):
        fastpipe.connect(directory)


def test_a_reader_is_pickled_with_the_servers_that_were_known(servers: list[Server]) -> None:
    directory = Listed([servers[0].url])
    remote = pickle.loads(pickle.dumps(fastpipe.connect(directory)))
    directory.listed = []
    assert ids(remote) == ids(read())


def test_a_consumer_who_waits_longer_than_servers_may_is_no_error(servers: list[Server]) -> None:
    remote = fastpipe.connect([server.url for server in servers], prefetch=2, timeout=3)
    batches = iter(remote)
    found = [next(batches)]
    # What the one that stops was to bring waits for room at another one.
    servers[0].stop()
    time.sleep(4)
    servers[1].stop()
    assert ids(found) + ids(batches) == ids(read())


def test_servers_say_who_waits_for_whom() -> None:
    with read(batch_size=1000).serve() as server:
        remote = iter(fastpipe.connect(server.url, prefetch=1))
        next(remote)
        assert wait_until(lambda: server.stats()["batches"] >= 2)
        before = server.stats()

        def waits_for_none() -> bool:
            """Whether no request waits for a batch now."""
            nonlocal before
            last, before = before, server.stats()
            return before["making_seconds"] == last["making_seconds"]

        assert wait_until(waits_for_none)
        time.sleep(0.5)
        stats = server.stats()
        # Since then no request has waited long for a batch.
        assert stats["making_seconds"] - before["making_seconds"] < 0.4
        remote.close()  # type: ignore[attr-defined]
        text = text_of(server.stats())
        assert "fastpipe_service_making_seconds_total " in text
        assert "fastpipe_service_held_back_seconds_total " in text
