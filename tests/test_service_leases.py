"""Leases on remote readers: workers of servers, of a local service and of local readers share a ledger."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from every_source import Make, digests, make, order
from processes import together
from service_faults import rows_of

pytest.importorskip("pyarrow.flight")

from fastpipe.service import Server

__all__ = ["make"]


def read(**options: Any) -> fastpipe.Reader:
    return rows_of(400, **{"batch_size": 10, "seed": 5} | options)


def used(worker: fastpipe.leases.LeaseWorker, most: int | None = None) -> list[tuple[fastpipe.leases.StepOfEpoch, str]]:
    """Uses and commits all batches, or this many."""
    found = []
    for batch in worker:
        assert worker.position is not None
        found.append((worker.position, *digests([batch])))
        worker.commit()
        if len(found) == most:
            break
    return found


def expected(reader: fastpipe.Reader, epochs: int = 1) -> dict[tuple[int, int], str]:
    """Returns the batches of a reader without leases."""
    steps = range(len(reader))
    return {(epoch, step): digests([reader.batch_at(step, epoch)])[0] for epoch in range(epochs) for step in steps}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started = [read(epochs=2).serve() for _ in range(2)]
    yield started
    for server in started:
        server.close()


@order
def test_remote_and_local_workers_continue_each_other(make: Make, order: dict[str, Any], url: str) -> None:
    options = {"batch_size": 32, "seed": 3, **order}
    with make(**options).serve() as server:
        found = []
        for number in range(8):
            reader = fastpipe.connect(server.url) if number % 2 else make(**options)
            with reader.lease(url, worker_name=f"w{number}", stretch=2) as worker:
                found += used(worker, 1)
    assert len(found) == 8
    assert dict(found) == expected(make(**options))
    assert fastpipe.leases.Ledger(url).status().finished


def test_remote_workers_share_the_batches_though_a_server_stops(url: str, servers: list[Server]) -> None:
    found: list[tuple[fastpipe.leases.StepOfEpoch, str]] = []
    begun = threading.Barrier(4)

    def work(name: str) -> None:
        remote = fastpipe.connect([server.url for server in servers], prefetch=2)
        with remote.lease(url, worker_name=name, stretch=3, copies=False) as worker:
            first = used(worker, 1)
            begun.wait(60)
            if name == "w0":
                servers[0].close()
            found.extend(first + used(worker))

    together(threading.Thread(target=work, args=(f"w{i}",)) for i in range(4))
    assert len(found) == 80
    assert dict(found) == expected(read(), 2)
    status = fastpipe.leases.Ledger(url).status()
    assert status.finished
    assert sum(worker.batches for worker in status.workers) == 80


def test_without_servers_uncommitted_batches_become_free(url: str, servers: list[Server]) -> None:
    remote = fastpipe.connect(servers[0].url, prefetch=2, timeout=1)
    servers[0].close()
    with (
        pytest.raises(fastpipe.errors.ServiceError, match=str(servers[0].port)),
        remote.lease(url, worker_name="first", stretch=40) as worker,
    ):
        used(worker)
    with fastpipe.connect(servers[1].url).lease(url, worker_name="second", stretch=40) as worker:
        found = used(worker)
    assert sorted(position for position, _ in found) == sorted(expected(read(), 2))


def test_other_data_at_the_server_is_another_job(url: str, servers: list[Server]) -> None:
    with fastpipe.connect(servers[0].url).lease(url, worker_name="one") as worker:
        used(worker, 1)
    with (
        read(batch_size=20, epochs=2).serve() as server,
        pytest.raises(fastpipe.errors.StateError, match=r"batch_size was 10 and is 20"),
    ):
        fastpipe.connect(server.url).lease(url, worker_name="two")


def test_a_remote_reader_without_a_seed_is_refused(url: str) -> None:
    with read(seed=None).serve() as server:
        with pytest.raises(ValueError, match="set a seed"):
            fastpipe.connect(server.url).lease(url, worker_name="one")
        with fastpipe.connect(server.url, seed=5).lease(url, worker_name="one") as worker:
            assert dict(used(worker)) == expected(read())


@pytest.mark.skipif(sys.platform != "linux", reason="sharing memory between processes requires Linux")
def test_a_worker_on_a_local_service(url: str) -> None:
    local = fastpipe.service.LocalService(read(), prefetch=2)
    with local, local.reader.lease(url, worker_name="one", stretch=7) as worker:
        assert dict(used(worker)) == expected(read())
