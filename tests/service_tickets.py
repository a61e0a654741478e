"""Tickets that no reader of fastpipe's writes, and clients that send them: for tests of what servers bear."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastpipe.errors import FastpipeError
from fastpipe.service._wire import as_error

flight = pytest.importorskip("pyarrow.flight")

__all__ = ["act", "answer", "changed", "client_of", "entries", "identity", "ticket"]


def client_of(url: str) -> Any:
    """A client with its own connection, which holds little that isn't read.

    By default, the clients of a process share one, and it may hold 60 MB where it is fast.
    """
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    return flight.FlightClient(url, generic_options=options)


def identity(about: dict[str, Any]) -> dict[str, Any]:
    """What a ticket says of the data, from a reader's description."""
    return about["fingerprints"]["2"] | {"specs": about["specs"]}


def entries(client: Any, options: Any = None, reader: str = "default") -> dict[str, Any]:
    """What a ticket for the first batch says."""
    told, *_ = client.do_action(flight.Action("describe", json.dumps({"reader": reader}).encode()), options)
    about = json.loads(told.body.to_pybytes())
    said = {"version": about["version"], "reader": reader, "data": identity(about), "order": about["order"]}
    return said | {"epoch": 0, "progress": None, "start": 0, "stop": 1, "until": 1, "csr": False}


def changed(order: str, **entries: Any) -> str:
    """The order of a ticket, but for these entries."""
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
    """For some batches of the first epoch, in the served order but for these entries; so many bytes at least."""
    said = entries(client, reader=reader)
    said |= {"start": start, "stop": stop, "until": max(stop, until), "order": changed(said["order"], **order)}
    return flight.Ticket(json.dumps(said).encode().ljust(padding))


def answer(client: Any, asked: Any) -> int | FastpipeError:
    """The bytes of the batches that are sent, or the error that is told in their place."""
    nbytes = 0
    for chunk in client.do_get(asked, flight.FlightCallOptions(timeout=60)):
        metadata = None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
        if metadata is not None and (error := as_error(metadata, "a server")) is not None:
            return error
        nbytes += chunk.data.nbytes
    return nbytes


def act(client: Any, action: str, body: bytes, options: Any = None) -> list[bytes]:
    """What a server answers to an action; an error that it tells is raised."""
    parts = [part.body.to_pybytes() for part in client.do_action(flight.Action(action, body), options)]
    told = as_error(parts[0], "a server")
    if told is not None:
        raise told
    return parts
