"""Tickets that fastpipe's readers don't write, clients that send them, and the highest value of a measurement."""

from __future__ import annotations

import json
import threading
from typing import Any, Self

import pytest

from fastpipe.errors import FastpipeError
from fastpipe.service._wire import as_error

flight = pytest.importorskip("pyarrow.flight")

__all__ = ["Highest", "act", "answer", "changed", "client_of", "entries", "identity", "ticket"]


def client_of(url: str, **options: Any) -> Any:
    """Returns a client with a separate connection, which buffers little data.

    By default, the clients of a process share a connection, and it may buffer 60 MB if it is fast.
    """
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.enable_retries", 0)]
    return flight.FlightClient(url, generic_options=own, **options)


def identity(about: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of a ticket that identifies the data, from a reader's description."""
    return about["fingerprints"]["2"] | {"specs": about["specs"]}


def entries(client: Any, options: Any = None, reader: str = "default") -> dict[str, Any]:
    """Returns the entries of a ticket for the first batch."""
    told, *_ = client.do_action(flight.Action("describe", json.dumps({"reader": reader}).encode()), options)
    about = json.loads(told.body.to_pybytes())
    said = {"version": about["version"], "reader": reader, "data": identity(about), "order": about["order"]}
    return said | {"epoch": 0, "progress": None, "start": 0, "stop": 1, "until": 1, "csr": False}


def changed(order: str, **entries: Any) -> str:
    """Returns the order of a ticket with these entries replaced."""
    return json.dumps(json.loads(order) | entries)


def ticket(
    client: Any,
    start: int = 0,
    stop: int = 1,
    *,
    until: int = 0,
    padding: int = 0,
    reader: str = "default",
    **order: Any,
) -> Any:
    """Returns a ticket for batches of the first epoch, in the served order with these entries replaced.

    It is padded to `padding` bytes.
    """
    said = entries(client, reader=reader)
    said |= {"start": start, "stop": stop, "until": max(stop, until), "order": changed(said["order"], **order)}
    return flight.Ticket(json.dumps(said).encode().ljust(padding))


def answer(client: Any, asked: Any) -> int | FastpipeError:
    """Returns the size of the batches that are sent, or the error that is sent instead."""
    nbytes = 0
    for chunk in client.do_get(asked, flight.FlightCallOptions(timeout=60)):
        metadata = None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
        if metadata is not None and (error := as_error(metadata, "a server")) is not None:
            return error
        nbytes += chunk.data.nbytes
    return nbytes


def act(client: Any, action: str, body: bytes, options: Any = None) -> list[bytes]:
    """Returns a server's answer to an action. An error in the answer is raised."""
    parts = [part.body.to_pybytes() for part in client.do_action(flight.Action(action, body), options)]
    told = as_error(parts[0], "a server")
    if told is not None:
        raise told
    return parts


class Highest:
    """The highest value that a function returns while the block runs."""

    def __init__(self, look: Any) -> None:
        self._look, self._ended = look, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.value = look()

    def _run(self) -> None:
        while not self._ended.wait(0.002):
            self.value = max(self.value, self._look())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
