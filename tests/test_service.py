"""The data service: batches through it are the local ones, whatever they are of, and whoever dies."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from apart import wait_until
from every_source import Make, digests, make, order
from servers import free_port

pytest.importorskip("pyarrow.flight")

from fastpipe.service import Server

__all__ = ["make"]


@pytest.fixture
def arrays() -> dict[str, Any]:
    draw = np.random.default_rng(2)
    return {"id": np.arange(5000), "x": draw.random((5000, 7), "float32")}


def read(arrays: dict[str, Any], **options: Any) -> fastpipe.Reader:
    return fastpipe.from_arrays(arrays, **{"batch_size": 64, "shuffle": True, "seed": 7} | options)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


# The promise.


@order
def test_batches_are_the_local_ones(make: Make, order: dict[str, Any]) -> None:
    reader = make(batch_size=32, **order)
    with reader.serve() as server:
        remote = fastpipe.connect(server.url)
        assert digests(remote) == digests(reader)
        assert remote.features == reader.features
        assert remote.symbols == reader.symbols
        assert (len(remote), remote.num_rows, remote.shuffle_buffer) == (
            len(reader),
            reader.num_rows,
            reader.shuffle_buffer,
        )
        assert digests(remote) == digests(reader), "the second epoch"


@order
def test_states_pass_through_the_service_and_back_at_every_step(make: Make, order: dict[str, Any]) -> None:
    local = make(batch_size=32, **order)
    with local.serve() as server:
        remote, again = fastpipe.connect(server.url), fastpipe.connect(server.url)
        whole = digests(local)
        local.set_epoch(0)
        batches, states = iter(remote), [remote.state_dict()]
        states.extend(remote.state_dict() for _ in batches)
        here, states_here = iter(local), [local.state_dict()]
        states_here.extend(local.state_dict() for _ in here)
        assert states == states_here
        for step, state in enumerate(states):
            stored = json.loads(json.dumps(state))
            again.load_state_dict(stored)
            assert digests(again) == whole[step:]


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_that_change_within_an_epoch(arrays: dict[str, Any], shuffle: bool) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 7}
    with read(arrays, **options).serve() as server:
        remotes = [fastpipe.connect(server.url, rank=rank, world_size=3) for rank in range(3)]
        locals_ = [read(arrays, **options, rank=rank, world_size=3) for rank in range(3)]
        for remote, local in zip(remotes, locals_, strict=True):
            theirs, ours = iter(remote), iter(local)
            assert ids([next(theirs) for _ in range(5)]) == ids([next(ours) for _ in range(5)])
        state = remotes[0].state_dict()
        assert state == locals_[0].state_dict()
        for rank in range(2):
            remote, local = (
                fastpipe.connect(server.url, rank=rank, world_size=2),
                read(arrays, **options, rank=rank, world_size=2),
            )
            remote.load_state_dict(state)
            local.load_state_dict(state)
            whole = ids(local)
            assert ids(remote) == whole
            # Once more, in the middle of that.
            remote.load_state_dict(state)
            theirs = iter(remote)
            begun = ids([next(theirs) for _ in range(3)])
            remote.load_state_dict(remote.state_dict())
            assert begun + ids(remote) == whole


@pytest.mark.parametrize("asked", [{}, {"epochs": 1}, {"epochs": None}])
def test_epochs_are_those_of_the_served_reader_unless_others_are_asked_for(
    arrays: dict[str, Any], asked: dict[str, Any]
) -> None:
    with read(arrays, epochs=2).serve() as server:
        remote = fastpipe.connect(server.url, **asked)
        expected = ids(itertools.islice(read(arrays, **{"epochs": 2} | asked), 200))
        assert ids(itertools.islice(remote, 200)) == expected
        assert len(expected) == {1: 79, None: 200}.get(asked.get("epochs", 2), 158)


@pytest.mark.parametrize("epochs", [0, -1, 2**31, 1.5, "2", "all", b"served"])
def test_epochs_that_are_none(arrays: dict[str, Any], epochs: Any) -> None:
    with read(arrays).serve() as server, pytest.raises((TypeError, ValueError), match="epochs"):
        fastpipe.connect(server.url, epochs=epochs)


def test_batches_by_step_and_places(make: Make) -> None:
    reader = make(batch_size=32, shuffle=True, seed=3)
    with reader.serve() as server:
        remote = fastpipe.connect(server.url)
        steps = range(len(reader))
        assert digests(remote.batch_at(step, epoch=2) for step in steps) == digests(
            reader.batch_at(step, epoch=2) for step in steps
        )
        there, here = remote.locate(3, 5, epoch=2), reader.locate(3, 5, epoch=2)
        assert (type(there).__name__, len(there)) == (type(here).__name__, len(here))


def test_arrays_are_views_of_what_was_received(arrays: dict[str, Any]) -> None:
    """The columns of a batch lie beside each other, as they came: none of them was made from something else."""
    with read(arrays).serve() as server:
        batch = next(iter(fastpipe.connect(server.url)))
        spans = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in batch.values())
        assert not any(array.flags.owndata for array in batch.values())
        assert spans[-1][1] - spans[0][0] <= sum(array.nbytes for array in batch.values()) + 128
        assert len({id(_root(array)) for array in batch.values()}) == 1


def _root(array: Any) -> Any:
    """Whose memory an array has."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


def test_arrow_shards_and_epochs(arrays: dict[str, Any]) -> None:
    import pyarrow as pa

    with read(arrays).serve() as server:
        remote = fastpipe.connect(server.url, seed=9, epochs=3)
        assert pa.table(remote).equals(pa.table(read(arrays, seed=9, epochs=3)))
        shares = [ids(fastpipe.connect(server.url).shard(3, index)) for index in range(3)]
        assert shares == [ids(read(arrays).shard(3, index)) for index in range(3)]
        endless = iter(fastpipe.connect(server.url, epochs=None))
        assert ids([next(endless) for _ in range(200)]) == ids(read(arrays, epochs=3))[:200]


def test_a_remote_reader_is_pickled_and_rebatched(arrays: dict[str, Any]) -> None:
    with read(arrays).serve() as server:
        remote = fastpipe.connect(server.url)
        assert ids(pickle.loads(pickle.dumps(remote))) == ids(read(arrays))
        theirs, ours = (fastpipe.rebatch(of, batch_size=100) for of in (remote, read(arrays)))
        assert ids(theirs) == ids(ours)


def test_samples_come_from_servers_and_rows_by_number_do_not(arrays: dict[str, Any]) -> None:
    plain = read(arrays, shuffle=False)
    with plain.serve() as server:
        remote = fastpipe.connect(server.url)
        for options in ({"replace": False}, {"replace": True}):
            theirs, ours = (fastpipe.sample(of, 300, seed=5, batch_size=50, **options) for of in (remote, plain))
            assert ids(theirs) == ids(ours)
        with pytest.raises(fastpipe.UnsupportedError, match="do not support rows by index"):
            fastpipe.take(remote, np.arange(10), batch_size=5)
        part = remote.partition(3)[0]
        assert part.rows == plain.partition(3)[0].rows
        with pytest.raises(fastpipe.UnsupportedError, match="serve a reader of the partition"):
            remote.read_partition(part)


# Sharing.


def test_two_clients_of_a_stream_cause_one_decoding(arrays: dict[str, Any]) -> None:
    with read(arrays).serve() as server:
        one, other = iter(fastpipe.connect(server.url)), iter(fastpipe.connect(server.url))
        both = [(ids([first]), ids([second])) for first, second in zip(one, other, strict=True)]
        assert all(first == second for first, second in both)
        stats = server.stats()
        assert (stats["batches"], stats["decoded"], stats["begun"]) == (158, 79, 1)


def test_passes_are_bounded(arrays: dict[str, Any]) -> None:
    with Server(read(arrays), max_passes=2, keep=1) as server:
        remotes = [iter(fastpipe.connect(server.url, seed=seed, prefetch=1)) for seed in range(5)]
        found = [ids([next(remote) for _ in range(4)]) for remote in remotes]
        assert found == [ids(read(arrays, seed=seed))[:4] for seed in range(5)]
        assert server.stats()["passes"] <= 2
        for remote in remotes:
            remote.close()  # type: ignore[attr-defined]


# Several servers, and what becomes of them.


@pytest.fixture
def three(arrays: dict[str, Any]) -> Iterator[list[Server]]:
    servers = [Server(read(arrays)) for _ in range(3)]
    yield servers
    for server in servers:
        server.stop()


def test_several_servers_share_the_work(arrays: dict[str, Any], three: list[Server]) -> None:
    remote = fastpipe.connect([server.url for server in three], prefetch=8)
    found = []
    for batch in remote:
        found.append(batch["id"].tolist())
        time.sleep(0.002)
    assert found == ids(read(arrays))
    assert sum(server.stats()["batches"] > 0 for server in three) >= 2


def test_servers_that_stop_lose_nothing(arrays: dict[str, Any], three: list[Server]) -> None:
    remote = fastpipe.connect([server.url for server in three], prefetch=4)
    found = []
    for number, batch in enumerate(remote):
        found.append(batch["id"].tolist())
        if number in (10, 30):
            three[number // 20].stop()
    assert found == ids(read(arrays))


def test_a_server_that_comes_back_is_used_again(arrays: dict[str, Any]) -> None:
    port = free_port()
    server = Server(read(arrays), port=port)
    remote = fastpipe.connect(server.url, prefetch=2, timeout=60)
    found = []
    for number, batch in enumerate(remote):
        found.append(batch["id"].tolist())
        if number == 20:
            server.stop()
            server = Server(read(arrays), port=port)
    server.stop()
    assert found == ids(read(arrays))


def test_without_servers_a_pass_ends_in_an_error_that_names_them(arrays: dict[str, Any], three: list[Server]) -> None:
    remote = fastpipe.connect([server.url for server in three[:2]], prefetch=2, timeout=4)
    batches = iter(remote)
    begun = [next(batches) for _ in range(3)]
    for server in three:
        server.stop()
    with pytest.raises(fastpipe.ServiceError, match=rf":{three[0].port}.*:{three[1].port}"):
        begun.extend(batches)
    assert ids(begun) == ids(read(arrays))[: len(begun)]
    state = remote.state_dict()
    local = read(arrays)
    local.load_state_dict(state)
    assert ids(begun) + ids(local) == ids(read(arrays))


def test_the_fallback_goes_on_without_servers(arrays: dict[str, Any], three: list[Server]) -> None:
    remote = fastpipe.connect([server.url for server in three], prefetch=2, timeout=4, fallback=read(arrays))
    found = []
    for number, batch in enumerate(remote):
        found.append(batch["id"].tolist())
        if number == 5:
            for server in three:
                server.stop()
    assert found == ids(read(arrays))
    with pytest.raises(fastpipe.UnsupportedError, match="other data"), read(arrays).serve() as server:
        fastpipe.connect(server.url, fallback=read({"id": np.arange(9)}))


def test_other_data_is_an_error(arrays: dict[str, Any]) -> None:
    server = Server(read(arrays), port=free_port())
    # Without end: all batches of an epoch may be here before the server has stopped.
    remote = fastpipe.connect(server.url, prefetch=2, epochs=None)
    batches = iter(remote)
    begun = ids([next(batches)])
    server.stop()
    server = Server(read(arrays | {"x": arrays["x"][::-1].copy()}), port=server.port)
    with server, pytest.raises(fastpipe.StateError, match="other"):
        begun.extend(batch["id"].tolist() for batch in batches)
    assert begun == ids(itertools.islice(read(arrays, epochs=None), len(begun)))


# What is wrong.


def test_an_error_of_the_data_comes_out_where_it_is(tmp_path: Any) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("a\n" + "1\n" * 100 + "x\n")
    features = {"a": fastpipe.DenseSpec((), "int64")}
    make = lambda: fastpipe.read_csv(path, features=features, batch_size=10)  # noqa: E731
    with make().serve() as server:
        batches = iter(fastpipe.connect(server.url))
        with pytest.raises(fastpipe.FastpipeError) as raised:
            list(batches)
        with pytest.raises(fastpipe.FastpipeError) as expected:
            list(make())
        assert (type(raised.value), str(raised.value)) == (type(expected.value), str(expected.value))
        assert (raised.value.feature, raised.value.path) == (expected.value.feature, expected.value.path)
        assert server.stats()["errors"] >= 1


def test_what_can_not_be_connected_to_is_named(arrays: dict[str, Any]) -> None:
    with pytest.raises(fastpipe.ServiceError, match=r"127\.0\.0\.1:9"):
        fastpipe.connect("grpc://127.0.0.1:9", timeout=0.3)
    with read(arrays).serve() as server, pytest.raises(fastpipe.ServiceError, match=r"no reader 'other'.*default"):
        fastpipe.connect(server.url, "other")
    for url in ("127.0.0.1:80", "http://a:80", "grpc://a", "", 7):
        with pytest.raises(ValueError, match="grpc://host:port"):
            fastpipe.connect([url])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="empty"):
        fastpipe.connect([])
    with pytest.raises(fastpipe.UnsupportedError, match="rebatch"):
        Server(fastpipe.rebatch(read(arrays), batch_size=7))  # type: ignore[arg-type]


def test_a_token_is_wanted(arrays: dict[str, Any]) -> None:
    with read(arrays).serve(token="open sesame") as server:
        for wrong in (None, "open barley"):
            with pytest.raises(fastpipe.ServiceError, match="token"):
                fastpipe.connect(server.url, token=wrong, timeout=60)
        assert ids(fastpipe.connect(server.url, token="open sesame")) == ids(read(arrays))


def test_encrypted_connections(arrays: dict[str, Any], certificates: Path) -> None:
    tls = (certificates / "server.pem", certificates / "server.key")
    with read(arrays).serve("grpc+tls://127.0.0.1:0", tls=tls) as server:
        assert server.url.startswith("grpc+tls://")
        assert ids(fastpipe.connect(server.url, ca=certificates / "ca.pem")) == ids(read(arrays))
        for stranger in (certificates / "stranger.pem", None):
            with pytest.raises(fastpipe.ServiceError, match="127"):
                fastpipe.connect(server.url, ca=stranger, timeout=1)
        with pytest.raises(fastpipe.ServiceError, match="127"):
            fastpipe.connect(server.url.replace("grpc+tls", "grpc"), timeout=1)
    with read(arrays).serve("grpc+tls://127.0.0.1:0", tls=tls, client_ca=certificates / "ca.pem") as server:
        shown = (certificates / "client.pem", certificates / "client.key")
        remote = fastpipe.connect(server.url, ca=certificates / "ca.pem", certificate=shown)
        assert ids(remote) == ids(read(arrays))
        with pytest.raises(fastpipe.ServiceError, match="127"):
            fastpipe.connect(server.url, ca=certificates / "ca.pem", timeout=1)
    for url, options in (("grpc://127.0.0.1:0", {"tls": tls}), ("grpc+tls://127.0.0.1:0", {}), ("127.0.0.1", {})):
        with pytest.raises(ValueError, match="grpc"):
            read(arrays).serve(url, **options)


def test_a_pass_that_is_left_ends(arrays: dict[str, Any]) -> None:
    with read(arrays).serve() as server:
        remote = fastpipe.connect(server.url)
        batches = iter(remote)
        next(batches)
        remote.close()
        with pytest.raises(fastpipe.PassClosedError):
            next(batches)
        assert wait_until(lambda: server.stats()["clients"] == 0)


def test_stats_and_explain(arrays: dict[str, Any]) -> None:
    with read(arrays).serve() as server:
        remote = fastpipe.connect(server.url)
        assert len(list(remote)) == 79
        stats = remote.stats()
        assert (stats["batches"], stats["rows"]) == (79, 5000)
        assert json.loads(json.dumps(stats)) == stats
        assert re.match("(server|consumer)-bound: ", remote.explain())
        assert "127.0.0.1" in repr(remote)
