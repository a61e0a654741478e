"""A connection to one server."""

from __future__ import annotations

import ipaddress
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from fastpipe.errors import ServiceError
from fastpipe.service._settings import Options
from fastpipe.service._wire import DamagedError, Ticket, as_error, intact, sealed

if TYPE_CHECKING:
    from fastpipe._fastpipe import IncomingBatches

_CHANNEL = [
    # Frames of HTTP/2 have 16 KiB otherwise, each of which costs both sides: a fifth of the rate.
    ("grpc.http2.max_frame_size", 128 << 10),
]

# gRPC connects through the proxy that http_proxy, https_proxy or grpc_proxy name, which can't reach this machine's
# loopback interface.
_NO_PROXY = [("grpc.enable_http_proxy", 0)]

# Actions that others than this client ask for, too: their answers have no checksum.
_PLAIN = ("health", "metrics")
# What becomes of requests to servers that aren't there, end, or hang, and of bytes that are changed on their way.
_PASSING = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightInternalError,
    flight.FlightCancelledError,
    DamagedError,
)

# Of the process that has first connected.
_PROCESS_OF_GRPC: list[int] = []


class Connection:
    """A connection to one server, made when it is first needed.

    Args:
        url: `grpc://host:port`, or `grpc+tls://host:port`.
        options: how to connect.
    """

    ahead = 32 << 20

    def __init__(self, url: str, options: Options) -> None:
        self.url = url
        self._options = options
        self._client: Any = None
        self._forgotten = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Connection, (self.url, self._options)

    def check(self) -> None:
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

    def _connected(self) -> Any:
        self.check()
        with self._lock:
            if self._client is None:
                _PROCESS_OF_GRPC[:] = [os.getpid()]
                secure: dict[str, Any] = {}
                if self._options.ca is not None:
                    secure["tls_root_certs"] = self._options.ca
                if self._options.certificate is not None:
                    secure["cert_chain"], secure["private_key"] = self._options.certificate
                # Clients of one process whose options are the same share a connection.
                options = [*_CHANNEL, ("fastpipe.connection", self._forgotten)]
                if _is_loopback(self.url):
                    options += _NO_PROXY
                self._client = flight.FlightClient(self.url, generic_options=options, **secure)
            return self._client

    def _call(self, timeout: float | None) -> Any:
        headers = [] if self._options.token is None else [(b"authorization", f"Bearer {self._options.token}".encode())]
        return flight.FlightCallOptions(timeout=timeout, headers=headers)

    def ask(self, action: str, request: dict[str, Any], seconds: float) -> list[bytes]:
        """What a server answers to a request.

        Raises:
            FastpipeError: what it tells.
            ServiceError: if it doesn't answer within the time.
        """
        try:
            call = flight.Action(action, sealed(request))
            answers = self._connected().do_action(call, self._call(seconds))
            parts = [answer.body.to_pybytes() for answer in answers]
            if action not in _PLAIN:
                parts = intact(parts)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ServiceError(f"{self.url}: {_told(error)}") from error
        told = as_error(parts[0], self.url) if parts else None
        if told is not None:
            raise told
        return parts

    def passes(self, error: ServiceError) -> bool:
        """Whether the server may answer another time."""
        return isinstance(error.__cause__, _PASSING)

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
            self._forgotten += 1

    def close(self) -> None:
        """Lets go of the connection; the next request makes another one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None and [os.getpid()] == _PROCESS_OF_GRPC:
            client.close()


class _Bytes(NamedTuple):
    """A message.

    Attributes:
        said: what is said of batches, if some begin.
        data: bytes of them, uint8.
    """

    said: bytes | None
    data: np.ndarray

    @property
    def begins(self) -> bool:
        """Whether batches begin with it."""
        return self.said is not None

    def into(self, incoming: IncomingBatches) -> None:
        """Copies the bytes, and hands over the batches that are whole."""
        incoming.take(self.said, self.data)


class Answer:
    """The messages of a stream of batches. Another thread may cancel it."""

    def __init__(self, url: str, reader: Any) -> None:
        self._url, self._reader = url, reader

    def __iter__(self) -> Iterator[_Bytes]:
        """What has come.

        Raises:
            FastpipeError: what the server tells.
            ServiceError: if the connection breaks.
        """
        while True:
            try:
                chunk = self._reader.read_chunk()
                metadata = None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
                data = _bytes_of(chunk.data)
            except StopIteration:
                return
            except (pa.ArrowException, OSError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise ServiceError(f"{self._url}: {_told(error)}") from error
            if metadata is not None:
                told = as_error(metadata, self._url)
                if told is not None:
                    raise told
            yield _Bytes(metadata, data)

    def cancel(self) -> None:
        """No more messages are wanted."""
        self._reader.cancel()

    def close(self) -> None:
        """Lets go of it."""
        self.cancel()


def _is_loopback(url: str) -> bool:
    """Whether a server is at this machine's loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bytes_of(batch: pa.RecordBatch) -> np.ndarray:
    """The bytes of a message, uint8, where they lie: Arrow's own scalars are copies.

    Raises:
        ValueError: if it is none.
    """
    column = batch.column(0)
    if batch.num_columns != 1 or len(column) != 1 or column.type != pa.large_binary() or column.offset:
        raise ValueError("a message isn't one stretch of bytes")
    _, offsets, data = column.buffers()
    start, stop = np.frombuffer(offsets, np.int64, 2)
    found = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    if not 0 <= start <= stop <= len(found):
        raise ValueError("a message says of more bytes than it has")
    return found[start:stop]


def _told(error: BaseException) -> str:
    """The first line of what Arrow tells, without where in its sources that was."""
    text = str(error).strip().split("\n", 1)[0]
    return text.split(". gRPC client debug context", 1)[0].split(". Client context", 1)[0][:300] or type(error).__name__
