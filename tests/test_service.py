"""The data service: batches, states, ranks and places of remote readers are the local ones, from any servers."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import fastpipe
from apart import wait_until
from every_source import ORDERS, SOURCES, Make, digests, make, order
from grouped_pipelines import Documents, Grouping
from samples import ids_by_batch as ids
from servers import free_port
from service_faults import check_states, rows_of

pytest.importorskip("pyarrow.flight")

from fastpipe.service import Server

__all__ = ["make"]


def read(**options: Any) -> fastpipe.Reader:
    return rows_of(5000, 7, **options)


# Each source and order.


@contextmanager
def by_server(reader: fastpipe.Reader) -> Iterator[fastpipe.Reader]:
    with reader.serve() as server:
        yield fastpipe.connect(server.url)


@contextmanager
def by_local_service(reader: fastpipe.Reader) -> Iterator[fastpipe.Reader]:
    with fastpipe.service.LocalService(reader) as service:
        yield service.reader


linux = pytest.mark.skipif(sys.platform != "linux", reason="sharing memory between processes requires Linux")
connected = pytest.mark.parametrize(
    "connected", [by_server, pytest.param(by_local_service, marks=linux)], ids=["server", "local"]
)


def check_batches(local: fastpipe.Reader, remote: fastpipe.Reader, row: int) -> list[dict[str, Any]]:
    """Checks the batches and states of two readers, and where a row of some batches is. Returns the states."""
    there, here = (digests(of.batch_at(step, epoch=2) for step in range(len(local))) for of in (remote, local))
    assert there == here
    for step in (0, len(local) - 1):
        assert remote.locate(step, row, epoch=2) == local.locate(step, row, epoch=2)
    return check_states(local, remote)


def check_reader(local: fastpipe.Reader, remote: fastpipe.Reader) -> None:
    """Checks that a remote reader has the specs, sizes, batches, places, states and epochs of a local one."""
    assert remote.features == local.features
    assert remote.categories == local.categories
    sizes = (len(local), local.num_rows, local.shuffle_buffer)
    assert (len(remote), remote.num_rows, remote.shuffle_buffer) == sizes
    states = check_batches(local, remote, row=5)
    # The next epoch.
    for reader in (remote, local):
        reader.load_state_dict(states[-1])
    assert digests(remote) == digests(local) == []
    assert digests(remote) == digests(local) != []


@order
def test_batches_places_and_states_are_the_local_ones(make: Make, order: dict[str, Any]) -> None:
    local = make(**{"batch_size": 32, "seed": 3} | order)
    with by_server(local) as remote:
        check_reader(local, remote)


@linux
def test_a_local_service_has_the_local_batches(make: Make, request: pytest.FixtureRequest) -> None:
    """Each source has one of the orders: a local service is a server, whose orders the test above checks."""
    order = ORDERS[SOURCES.index(request.node.callspec.params["make"]) % len(ORDERS)]
    local = make(**{"batch_size": 32, "seed": 3} | order)
    with by_local_service(local) as remote:
        check_reader(local, remote)


@order
def test_ranks_have_the_local_batches_from_every_state(make: Make, order: dict[str, Any]) -> None:
    world, options = 3, {"batch_size": 8, "on_uneven": "pad", "seed": 3, **order}
    if len(make(**options)._data.handle.unit_rows()) < world and "shuffle" in order:
        # There are fewer blocks than ranks.
        options["shard_by"] = "batch"
    with make(**options).serve() as server:
        for rank in range(world):
            options |= {"rank": rank, "world_size": world}
            check_states(make(**options), fastpipe.connect(server.url, rank=rank, world_size=world))
            assert digests(fastpipe.connect(server.url).shard(world, rank)) == digests(make(**options))


@order
def test_rebatched_batches_are_the_local_ones(make: Make, order: dict[str, Any]) -> None:
    reader = make(batch_size=32, **order)
    with reader.serve() as server:
        remote = fastpipe.connect(server.url)
        ours, theirs = (of.rebatch(batch_size=20) for of in (reader, remote))
        assert digests(theirs) == digests(ours)
        # From the middle of the next epoch, and shuffled.
        middle = iter(reader)
        for _ in range(len(reader) // 2):
            next(middle)
        state = json.loads(json.dumps(reader.state_dict()))
        found = []
        for of in (reader, remote):
            of.load_state_dict(state)
            found.append(digests(of.rebatch(batch_size=20, shuffle_buffer=50, seed=5)))
        assert found[0] == found[1]
        assert len(found[0]) < len(reader) * 32 // 20


def shaped(make: Make, shape: str) -> Any:
    """Returns a mixture, rows in a sequence, packs, or batches of rows with similar lengths."""
    # Packs have several rows. A test resumes at every step, so more steps only take longer.
    options: dict[str, Any] = {"batch_size": 8 if "packs" in shape else 20}
    if shape == "rows in a sequence":
        rows = np.random.default_rng(5).integers(make(**options).num_rows, size=100)
        return make(shuffle=False, batch_size=7, seed=1).take(rows)
    orders: dict[str, dict[str, Any]] = {"one": {"shuffle": True}, "other": {}, "third": {"shuffle": "block"}}
    weights = [(0, {"one": 0.7, "other": 0.3}), (9, {"one": 1, "other": 2, "third": 2})]
    if shape == "mixture":
        readers = {name: make(**options | orders[name], seed=seed) for seed, name in enumerate(orders, 1)}
        return fastpipe.mix(readers, weights=weights, seed=7, assignment="random")
    documents = Documents(make)
    how = Grouping(12, 50, "split", padded=True) if "packs" in shape else Grouping(240, 50, None, padded=False)
    if "mixture" not in shape:
        return documents.group(documents.make(**options, shuffle=True, seed=1), how)
    groups = {
        name: documents.group(documents.make(**options, shuffle=True, seed=seed), how)
        for seed, name in enumerate(orders)
    }
    return fastpipe.mix(groups, weights=weights, seed=7)


SHAPES = ["mixture", "rows in a sequence", "packs", "buckets", "mixture of packs", "mixture of buckets"]
# The features of "bags" can't be packed.
SHAPED = [
    (source, shape)
    for source in ("avro", "parquet", "bags")
    for shape in SHAPES
    if source != "bags" or "packs" not in shape
]


@connected
@pytest.mark.parametrize(("make", "shape"), SHAPED, indirect=["make"])
@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
def test_mixtures_packs_and_taken_rows_are_the_local_ones(make: Make, shape: str, connected: Any) -> None:
    local = shaped(make, shape)
    with connected(local) as remote:
        assert type(remote) is type(local)
        assert (remote.features, len(remote)) == (local.features, len(local))
        check_batches(local, remote, row=0)
        with pytest.raises(IndexError, match=r"row .* does not exist"):
            remote.locate(0, 99)
        for rank in range(3):
            theirs, ours = (of.shard(3, rank) for of in (remote, local))
            for share in (theirs, ours):
                share.set_epoch(1)
            assert digests(theirs) == digests(ours)


def test_several_servers_and_a_fallback_of_a_mixture_of_packs() -> None:
    pa = pytest.importorskip("pyarrow")
    docs = [np.arange(each % 7 + 1, dtype="int32") for each in range(600)]
    table = pa.table({"id": np.arange(600), "tokens": docs})
    halves = [fastpipe.from_arrow(half, batch_size=4, shuffle=True, seed=3) for half in (table[:200], table[200:])]
    packs = fastpipe.mix([half.pack("tokens", length=16) for half in halves], weights=[0.4, 0.6])
    whole = digests(packs)
    with packs.serve() as one, packs.serve() as other:
        remote = fastpipe.connect([one.url, other.url], fallback=packs, timeout=2)
        assert digests(remote) == whole
        mapped = fastpipe.connect(one.url).map(lambda batch: batch["tokens"].sum())
        packs.set_epoch(0)
        assert list(mapped) == [batch["tokens"].sum() for batch in packs]
        with pytest.raises(ValueError, match=r"a mixture has the seeds of its readers.*pass seed to mix"):
            fastpipe.connect(one.url, seed=1)
        other_pad = fastpipe.mix([half.pack("tokens", length=16, pad=9) for half in halves], weights=[0.4, 0.6])
        with pytest.raises(fastpipe.errors.UnsupportedError, match="with other specs"):
            fastpipe.connect(one.url, fallback=other_pad)
        middle = iter(remote)
        first = digests(itertools.islice(middle, 3))
    # Both servers have ended.
    assert remote.locate(2, 1, epoch=1) == packs.locate(2, 1, epoch=1)
    packs.set_epoch(1)
    assert first + digests(middle) == digests(packs)


# Arguments, conversions and sharing.


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_that_change_within_an_epoch(shuffle: bool) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 7}
    with read(**options).serve() as server:
        remotes = [fastpipe.connect(server.url, rank=rank, world_size=3) for rank in range(3)]
        locals_ = [read(**options, rank=rank, world_size=3) for rank in range(3)]
        for remote, local in zip(remotes, locals_, strict=True):
            theirs, ours = iter(remote), iter(local)
            assert ids([next(theirs) for _ in range(5)]) == ids([next(ours) for _ in range(5)])
        state = remotes[0].state_dict()
        assert state == locals_[0].state_dict()
        for rank in range(2):
            remote, local = (
                fastpipe.connect(server.url, rank=rank, world_size=2),
                read(**options, rank=rank, world_size=2),
            )
            remote.load_state_dict(state)
            local.load_state_dict(state)
            whole = ids(local)
            assert ids(remote) == whole
            # Again from the middle of that pass.
            remote.load_state_dict(state)
            theirs = iter(remote)
            begun = ids([next(theirs) for _ in range(3)])
            remote.load_state_dict(remote.state_dict())
            assert begun + ids(remote) == whole


@pytest.mark.parametrize(
    ("own", "asked"), [(2, {}), (2, {"epochs": 1}), (2, {"epochs": None}), (None, {"epochs": 3}), (1, {"epochs": 2})]
)
@pytest.mark.parametrize("local", [False, pytest.param(True, marks=linux)])
def test_epochs_are_those_of_the_served_reader_unless_others_are_requested(
    own: int | None, asked: dict[str, Any], local: bool
) -> None:
    with read(epochs=own).serve() as server, ExitStack() as stack:
        remote = fastpipe.connect(server.url, seed=9, **asked)
        if local:
            remote = stack.enter_context(fastpipe.service.LocalService(read(epochs=own), seed=9, **asked)).reader
        expected = ids(itertools.islice(read(**{"epochs": own, "seed": 9} | asked), 300))
        assert ids(itertools.islice(remote, 300)) == expected
        assert len(expected) == min(300, 79 * (asked.get("epochs", own) or 300))


@pytest.mark.parametrize("epochs", [0, -1, 2**31, 1.5, "2", "all", b"served"])
def test_wrong_epochs_are_refused(epochs: Any) -> None:
    with read().serve() as server, pytest.raises((TypeError, ValueError), match="epochs"):
        fastpipe.connect(server.url, epochs=epochs)


def test_arrays_are_views_of_what_was_received() -> None:
    """The columns of a batch are adjacent in the received memory, without copies."""
    with read().serve() as server:
        batch = next(iter(fastpipe.connect(server.url)))
        spans = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in batch.values())
        assert not any(array.flags.owndata for array in batch.values())
        assert spans[-1][1] - spans[0][0] <= sum(array.nbytes for array in batch.values()) + 128
        assert len({id(_root(array)) for array in batch.values()}) == 1


def _root(array: Any) -> Any:
    """Returns the object that owns the memory of an array."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


def test_arrow_and_pickles() -> None:
    import pyarrow as pa

    with read().serve() as server:
        remote = pickle.loads(pickle.dumps(fastpipe.connect(server.url, seed=9, epochs=3)))
        assert pa.table(remote).equals(pa.table(read(seed=9, epochs=3)))


def test_samples_are_served() -> None:
    plain = read(shuffle=False)
    with plain.sample(300, seed=5, replace=True).serve() as server:
        remote = fastpipe.connect(server.url)
        assert ids(remote) == ids(plain.sample(300, seed=5, replace=True))
        assert remote.locate(0, 3) == plain.sample(300, seed=5, replace=True).locate(0, 3)
    with plain.serve() as server:
        remote = fastpipe.connect(server.url)
        for options in ({"replace": False}, {"replace": True}):
            theirs, ours = (of.sample(300, seed=5, batch_size=50, redraw=True, **options) for of in (remote, plain))
            assert ids(theirs) == ids(ours)
        with pytest.raises(fastpipe.errors.UnsupportedError, match="needs the data itself"):
            remote.take(np.arange(10), batch_size=5)
        with pytest.raises(fastpipe.errors.UnsupportedError, match="needs the data itself"):
            remote.sample(10)
        part = remote.partition(3)[0]
        assert part.rows == plain.partition(3)[0].rows
        with pytest.raises(fastpipe.errors.UnsupportedError, match="serve a reader of the partition"):
            remote.read_partition(part)


def test_two_clients_of_a_stream_cause_one_decoding() -> None:
    with read().serve() as server:
        one, other = iter(fastpipe.connect(server.url)), iter(fastpipe.connect(server.url))
        both = [(ids([first]), ids([second])) for first, second in zip(one, other, strict=True)]
        assert all(first == second for first, second in both)
        stats = server.stats()
        assert (stats["batches"], stats["decoded"], stats["begun"]) == (158, 79, 1)


def test_a_closed_pass_ends() -> None:
    with read().serve() as server:
        remote = fastpipe.connect(server.url)
        batches = iter(remote)
        next(batches)
        remote.close()
        with pytest.raises(fastpipe.errors.PassClosedError):
            next(batches)
        assert wait_until(lambda: server.stats()["clients"] == 0)


def test_stats_and_explain() -> None:
    with read().serve() as server:
        remote = fastpipe.connect(server.url)
        assert len(list(remote)) == 79
        stats = remote.stats()
        assert (stats["batches"], stats["rows"]) == (79, 5000)
        assert json.loads(json.dumps(stats)) == stats
        assert re.match("(server-bound|consumer-bound|not a bottleneck): ", remote.explain())
        assert "127.0.0.1" in repr(remote)


# Several servers, and errors.


@pytest.fixture
def three() -> Iterator[list[Server]]:
    servers = [Server(read()) for _ in range(3)]
    yield servers
    for server in servers:
        server.close()


def test_several_servers_share_the_work_and_may_stop(three: list[Server]) -> None:
    remote = fastpipe.connect([server.url for server in three], prefetch=8)
    found = []
    for number, batch in enumerate(remote):
        found += ids([batch])
        time.sleep(0.002)
        if number == 30:
            assert sum(server.stats()["batches"] > 0 for server in three) >= 2
        if number in (30, 50):
            three[number // 50].close()
    assert found == ids(read())


def test_a_server_that_comes_back_is_used_again() -> None:
    port = free_port()
    server = Server(read(), port=port)
    remote = fastpipe.connect(server.url, prefetch=2, timeout=60)
    found = []
    for number, batch in enumerate(remote):
        found += ids([batch])
        if number == 20:
            server.close()
            server = Server(read(), port=port)
    server.close()
    assert found == ids(read())


def test_wrong_servers_and_readers_are_named() -> None:
    with pytest.raises(fastpipe.errors.ServiceError, match=r"127\.0\.0\.1:9"):
        fastpipe.connect("grpc://127.0.0.1:9", timeout=0.3)
    with read().serve() as server, pytest.raises(fastpipe.errors.ServiceError, match=r"no reader 'other'.*default"):
        fastpipe.connect(server.url, "other")
    for url in ("127.0.0.1:80", "http://a:80", "grpc://a", "", 7):
        with pytest.raises(ValueError, match="grpc://host:port"):
            fastpipe.connect([url])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="empty"):
        fastpipe.connect([])
    with pytest.raises(fastpipe.errors.UnsupportedError, match="rebatch"):
        Server(read().rebatch(batch_size=7))  # type: ignore[arg-type]
