"""Where rows come from, asked of servers: the same answer as here, or a typed error; damage on the way is mended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fastpipe
from servers import free_port
from service_faults import through

pytest.importorskip("pyarrow.flight")

from fastpipe.service import Server

ARRAYS = {"id": np.arange(500), "x": np.arange(500, dtype="float32")}


def read(arrays: dict[str, Any] = ARRAYS) -> fastpipe.Reader:
    return fastpipe.from_arrays(arrays, batch_size=16, shuffle=True, seed=7)


def test_a_server_with_other_data_places_nothing() -> None:
    with Server(read(), port=free_port()) as server:
        remote = fastpipe.connect(server.url, timeout=60)
        assert remote.locate(3, 5) == read().locate(3, 5)
        with pytest.raises(IndexError, match="no row"):
            remote.locate(3, 99)
    with Server(read(ARRAYS | {"x": -ARRAYS["x"]}), port=server.port):
        with pytest.raises(fastpipe.StateError) as of_batches:
            remote.batch_at(3)
        with pytest.raises(fastpipe.StateError, match=r"other data.*connect anew") as of_places:
            remote.locate(3, 5)
        assert str(of_places.value) == str(of_batches.value)
    with Server(read(), port=server.port):
        assert remote.locate(3, 5) == read().locate(3, 5)


@pytest.mark.parametrize("sent", [b'"record": ', b'"digest"', b"fps1", b'"unit"'])
def test_a_request_that_is_changed_on_its_way_is_made_again(sent: bytes) -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, timeout=60)
        network.change_request = (sent, sent[:-2] + bytes([sent[-2] ^ 1]) + sent[-1:])
        assert remote.locate(3, 5) == read().locate(3, 5)
        assert network.faults == 1


@pytest.mark.parametrize("sent", [b'"fields"', b'"row": ', b'"kind"'])
def test_an_answer_that_is_changed_on_its_way_is_asked_for_again(sent: bytes) -> None:
    with read().serve() as server, through(server.port) as network:
        remote = fastpipe.connect(network.url, timeout=60)
        network.change_answer = (sent, sent[:-2] + bytes([sent[-2] ^ 1]) + sent[-1:])
        assert remote.locate(3, 5) == read().locate(3, 5)
        assert network.faults == 1


@pytest.mark.parametrize("sent", [b'"epochs": 1', b'seed\\": 7', b'batch_size\\": 16', b"\xf4\x01\x00\x00"])
def test_a_description_that_is_changed_on_its_way_is_asked_for_again(sent: bytes) -> None:
    with read().serve() as server, through(server.port) as network:
        network.change_answer = (sent, bytes([*sent[:-1], sent[-1] ^ 1]))
        remote = fastpipe.connect(network.url, timeout=60)
        assert [batch["id"].tolist() for batch in remote] == [batch["id"].tolist() for batch in read()]
        assert network.faults == 1


def test_places_are_asked_of_whoever_is_there() -> None:
    gone = f"grpc://127.0.0.1:{free_port()}"
    with read().serve() as server:
        remote = fastpipe.connect([gone, server.url, gone], timeout=5)
        assert remote.locate(3, 5) == read().locate(3, 5)
    with pytest.raises(fastpipe.ServiceError, match=r"127\.0\.0\.1"):
        fastpipe.connect([gone, gone], timeout=0.5)
    with pytest.raises(fastpipe.ServiceError, match=f"{gone}.*{server.url}"):
        remote.locate(3, 5)
