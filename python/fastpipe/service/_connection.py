"""A connection to one server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from fastpipe.errors import ServiceError
from fastpipe.service._settings import Options
from fastpipe.service._wire import Ticket, as_error

__all__ = ["Answer", "Connection", "check_process"]


# A server that has vanished without a word is missed after a while.
_KEEPALIVE = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000)]

# Of the process that has first connected.
_PROCESS_OF_GRPC: list[int] = []


def check_process() -> None:
    """Whether this process can connect.

    Raises:
        ServiceError: if it can't.
    """
    # Threads and sockets of gRPC don't come along when a process forks, and it can't begin anew in the child.
    if _PROCESS_OF_GRPC and _PROCESS_OF_GRPC[0] != os.getpid():
        raise ServiceError(
            "this process was forked from one that had connected to a server, which gRPC doesn't survive; start"
            " processes by spawn or forkserver, or connect in the child first"
        )


class Connection:
    """A connection to one server, made when it is first needed.

    Args:
        url: `grpc://host:port`, or `grpc+tls://host:port`.
        options: how to connect.
    """

    def __init__(self, url: str, options: Options) -> None:
        self.url = url
        self._options = options
        self._client: Any = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Connection, (self.url, self._options)

    def _connected(self) -> Any:
        check_process()
        with self._lock:
            if self._client is None:
                _PROCESS_OF_GRPC[:] = [os.getpid()]
                secure: dict[str, Any] = {}
                if self._options.ca is not None:
                    secure["tls_root_certs"] = self._options.ca
                if self._options.certificate is not None:
                    secure["cert_chain"], secure["private_key"] = self._options.certificate
                self._client = flight.FlightClient(self.url, generic_options=_KEEPALIVE, **secure)
            return self._client

    def _call(self, timeout: float | None) -> Any:
        headers = [] if self._options.token is None else [(b"authorization", f"Bearer {self._options.token}".encode())]
        return flight.FlightCallOptions(timeout=timeout, headers=headers)

    def ask(self, action: str, request: dict[str, Any]) -> list[bytes]:
        """What a server answers to a request.

        Raises:
            ServiceError: if it doesn't.
        """
        try:
            call = flight.Action(action, json.dumps(request).encode())
            answers = self._connected().do_action(call, self._call(self._options.timeout))
            return [answer.body.to_pybytes() for answer in answers]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ServiceError(f"{self.url}: {_told(error)}") from error

    def batches(self, ticket: Ticket) -> Answer:
        """Asks for batches.

        Raises:
            ServiceError: if the server doesn't answer.
        """
        try:
            return Answer(self.url, self._connected().do_get(flight.Ticket(ticket.write()), self._call(None)))
        except (pa.ArrowException, OSError) as error:
            raise ServiceError(f"{self.url}: {_told(error)}") from error

    def forget(self) -> None:
        """Lets the next request make another connection; whoever waits for this one goes on waiting."""
        with self._lock:
            self._client = None

    def close(self) -> None:
        """Lets go of the connection; the next request makes another one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None and [os.getpid()] == _PROCESS_OF_GRPC:
            client.close()


class Answer:
    """The messages of a stream of batches. Another thread may cancel it."""

    def __init__(self, url: str, reader: Any) -> None:
        self._url, self._reader = url, reader

    def __iter__(self) -> Iterator[tuple[bytes | None, np.ndarray]]:
        """The header of a batch, if one begins, and bytes of it, uint8.

        Raises:
            FastpipeError: what the server tells.
            ServiceError: if the connection breaks.
        """
        while True:
            try:
                chunk = self._reader.read_chunk()
                metadata = None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
                data = np.frombuffer(chunk.data.column(0)[0].as_buffer(), np.uint8)
            except StopIteration:
                return
            except (pa.ArrowException, OSError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise ServiceError(f"{self._url}: {_told(error)}") from error
            if metadata is not None:
                told = as_error(metadata, self._url)
                if told is not None:
                    raise told
            yield metadata, data

    def cancel(self) -> None:
        """No more messages are wanted."""
        self._reader.cancel()


def _told(error: BaseException) -> str:
    """The first line of what Arrow tells, without where in its sources that was."""
    text = str(error).strip().split("\n", 1)[0]
    return text.split(". gRPC client debug context", 1)[0].split(". Client context", 1)[0][:300] or type(error).__name__
