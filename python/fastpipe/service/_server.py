"""A server of batches over Arrow Flight."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fastpipe._arguments import memory_size, within
from fastpipe._fastpipe import FlightServer, Pass
from fastpipe._reader.reader import Reader
from fastpipe.errors import FastpipeError, ServiceError
from fastpipe.service._logs import RequestLog, say, say_error
from fastpipe.service._metrics import described, shown, text_of
from fastpipe.service._served import Served, Shares
from fastpipe.service._settings import checked_token
from fastpipe.service._wire import LARGEST_TICKET, DamagedError, Ticket, error_bytes, summed, unsealed

if TYPE_CHECKING:
    from fastpipe._reader.mapped import Mapped
    from fastpipe.service._metrics_http import MetricsEndpoint

LOOPBACK = "127.0.0.1"
# Bytes. An order has half of a ticket at most.
_LARGEST_REQUEST = LARGEST_TICKET // 2 + (1 << 16)
# Bytes that Flight adds to a ticket.
_AROUND = 16
# Maximum bytes of tickets in progress. Most tickets have less than 1 KiB.
_TICKETS = 16 * (LARGEST_TICKET + 2 * _AROUND)
# Seconds that a request waits for memory or for a pass before it is refused because the server is busy.
_PATIENCE = 5.0
# If other clients wait, the connection of a client that has read nothing for this many seconds is closed.
_IDLE = 3.0
_TICK = 0.2


@dataclass(frozen=True, slots=True)
class _Options:
    """Options that `FlightServer` reads."""

    token: str | None
    tls: tuple[bytes, bytes] | None
    client_ca: bytes | None
    max_passes: int
    cache_bytes: int
    pass_bytes: int | None
    alive: int | None
    max_requests: int
    patience: float
    idle: float
    request_bytes: int = LARGEST_TICKET + _AROUND
    requests_bytes: int = _TICKETS


class _Decisions:
    """Answers the questions that `FlightServer` asks Python, once for each request.

    Args:
        served: Readers by name.
        stats: Returns the counters of the server.
    """

    def __init__(self, served: Mapping[str, Served], stats: Callable[[], dict[str, float]]) -> None:
        self._served, self._stats = served, stats

    def request(self, peer: str) -> RequestLog:
        """Returns the log record of a new request for batches."""
        return RequestLog(peer)

    def told(self, error: Exception) -> bytes:
        """Encodes an error for a client, which receives it in place of a batch."""
        return error_bytes(error)

    def open(
        self, request: RequestLog, data: bytes
    ) -> tuple[bytes, int, int, str, int, int, Callable[[int], Pass]] | bytes:
        """Returns the batches that a ticket requests, or an encoded error.

        Raises:
            ConnectionError: If the ticket was damaged in transit.
        """
        try:
            ticket = Ticket.read(data)
            request.asks(ticket)
            served = self._find(ticket.reader)
            served.check(ticket.data)
            order = served.order(ticket.order)
        except DamagedError as error:
            raise ConnectionError(str(error)) from None
        except Exception as error:  # The client receives any error, and the server continues.
            return error_bytes(error)
        # The key is a digest, because the progress may contain long lists.
        of = json.dumps([ticket.reader, ticket.epoch, ticket.csr, ticket.order.text(), ticket.progress], sort_keys=True)
        key = hashlib.blake2b(of.encode()).digest()

        def begin(step: int) -> Pass:
            return served.begin(ticket, order, step, max(step + 1, ticket.until))

        return key, ticket.start, ticket.stop, ticket.reader, ticket.order.batch_size, served.limit or 0, begin

    def act(self, action: str, body: bytes, peer: str) -> list[bytes]:
        """Answers an action.

        Raises:
            ConnectionError: If the request was damaged in transit.
            ValueError: If the action is unknown, or its request can't be read.
        """
        if action == "health":
            return [b'{"serving": true}']
        if action == "metrics":
            return [text_of(self._stats()).encode()]
        try:
            return summed(self._acted(action, body))
        except FastpipeError as error:
            say_error(error, peer=peer)
            return summed([error_bytes(error)])
        except DamagedError as error:
            say_error(error, peer=peer)
            raise ConnectionError(str(error)) from None
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, LookupError) as error:
            say_error(error, peer=peer)
            raise ValueError(f"the request can't be read: {error!r:.300}") from None

    def _acted(self, action: str, body: bytes) -> list[bytes]:
        if action not in ("describe", "locate"):
            raise ValueError(f"an action must be describe, locate, health or metrics; got {action!r:.100}")
        if len(body) > _LARGEST_REQUEST:
            raise ValueError(f"a request must have at most {_LARGEST_REQUEST} bytes; got {len(body)}")
        request = unsealed(body)
        served = self._find(str(request["reader"]))
        if action == "describe":
            return [json.dumps(served.description()).encode(), served.unit_rows().tobytes()]
        return [json.dumps(served.locate(request)).encode()]

    def _find(self, name: str) -> Served:
        found = self._served.get(name)
        if found is None:
            there = ", ".join(sorted(self._served))
            raise ServiceError(f"this server has no reader {name!r:.100}; its readers are {there}")
        return found

    def log_refused(self, peer: str) -> None:
        """Logs that a client was refused because it doesn't know the token."""
        say(logging.WARNING, "unauthenticated", "%(peer)s: refused a client that doesn't know the token", peer=peer)

    def log_closed(self, peer: str) -> None:
        """Logs that a connection was closed because its client stopped reading while others waited."""
        text = "%(peer)s: closed its connection, on which it took nothing while others waited"
        say(logging.WARNING, "closed", text, peer=peer)


class Server:
    """Serves the batches of readers to clients, which connect with `fastpipe.connect` (extra `arrow`).

    Clients choose one of the readers, and the order, epoch and steps of its batches; they can't choose files or code.
    The server keeps no state that clients depend on, so servers may be stopped, restarted or added at any time. Clients
    that request the same steps at about the same time share the decoding.

    Args:
        readers: A reader, a mixture, packs or buckets; or a dict from name to these. A single one is named `"default"`.
            The arguments of the readers are the defaults of clients. `num_threads`, `prefetch` and `memory_limit` apply
            to each pass.
        host: Address to listen on. By default, only processes of this machine can connect.
        port: Port to listen on; 0 for any free port, see `port`. Defaults to 0.
        token: Token that clients must send; None admits any client that can connect.
        tls: PEM files of the certificate chain and its private key; None for no encryption.
        client_ca: PEM file with the CA certificates that client certificates must be signed by. Requires `tls`.
        max_passes: Maximum number of open passes over all clients. Defaults to 16.
        cache_bytes: Maximum size of batches that are kept for other clients, in bytes or as text such as `"128MiB"`.
            Only 8 MiB are used until two clients have read the same stream.
        memory_limit: Maximum size of the batches of all clients, in bytes or as text such as `"4GiB"`. After
            `cache_bytes` is subtracted, a quarter is for batches that are being sent, and the rest for passes. A pass
            gets the limit of its reader as far as it fits, or an equal share for each of `max_passes` if the reader has
            no limit. Fewer passes are open if their limits don't fit together. Memory of Python, gRPC and the readers
            is not included. None for no limit.
        max_requests: Maximum number of requests that are answered at once. Further requests are refused as busy; the
            clients ask other servers and retry later. Defaults to 512.
        metrics_port: HTTP port for metrics; 0 for any free port, see `metrics_url` (extra `metrics`). `/metrics` serves
            Prometheus metrics. `/healthz` returns 200 if the server accepts requests, and 503 while it stops. Neither
            requires a token or is encrypted, and neither exposes data. None for no such port.
        metrics_host: Address of the metrics port. Defaults to `host`.

    Raises:
        ImportError: If pyarrow isn't installed, or `prometheus_client` for `metrics_port`.
        OSError: If the server can't listen on the address and port.
        LimitError: If a pass of a reader needs more than the memory limit leaves for it.
        UnsupportedError: If a reader can't be served.
        ValueError: If an argument is out of range, `memory_limit` leaves nothing for passes, `client_ca` is given
            without `tls`, or `metrics_host` without `metrics_port`.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
        >>> with fastpipe.service.Server(reader) as server:
        ...     remote = fastpipe.connect(server.url)
        ...     sum(len(batch["label"]) for batch in remote)
        6144
    """

    def __init__(
        self,
        readers: Reader | Mapped | Mapping[str, Reader | Mapped],
        *,
        host: str = LOOPBACK,
        port: int = 0,
        token: str | None = None,
        tls: tuple[str | Path, str | Path] | None = None,
        client_ca: str | Path | None = None,
        max_passes: int = 16,
        cache_bytes: int | str = "128MiB",
        memory_limit: int | str | None = None,
        max_requests: int = 512,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
    ) -> None:
        named = readers if isinstance(readers, Mapping) else {"default": readers}
        if not named:
            raise ValueError("readers is empty: pass at least one reader")
        if client_ca is not None and tls is None:
            raise ValueError("client_ca needs tls=(certificate, key)")
        if max_passes < 1:
            raise ValueError(f"max_passes must be at least 1; got {max_passes}")
        if metrics_host is not None and metrics_port is None:
            raise ValueError("metrics_host requires metrics_port: pass both, or remove it")
        if metrics_port is not None:
            metrics_port = within("metrics_port", metrics_port, 0, 65_535)
        kept = memory_size("cache_bytes", cache_bytes)
        shares = (
            None if memory_limit is None else Shares.of(memory_size("memory_limit", memory_limit), kept, max_passes)
        )
        most = within("max_requests", max_requests, 1, 1 << 20)
        self._served = {name: Served(name, reader, shares) for name, reader in named.items()}
        self._ending = threading.Event()
        options = _Options(
            token=checked_token(token),
            tls=None if tls is None else (Path(tls[0]).read_bytes(), Path(tls[1]).read_bytes()),
            client_ca=None if client_ca is None else Path(client_ca).read_bytes(),
            max_passes=max_passes,
            cache_bytes=kept,
            pass_bytes=None if shares is None else shares.passes,
            alive=None if shares is None else shares.cache_bytes + shares.sending,
            max_requests=most,
            patience=_PATIENCE,
            idle=_IDLE,
        )
        self._scheme = "grpc" if tls is None else "grpc+tls"
        self._host = host
        try:
            self._flight = FlightServer(host, port, options, _Decisions(self._served, self.stats))
        except OSError as error:
            raise OSError(f"can't listen at {shown(host)}:{port}: {error}") from error
        self._endpoint: MetricsEndpoint | None = None
        try:
            if metrics_port is not None:
                # Imported here because prometheus_client is an extra.
                from fastpipe.service._metrics_http import MetricsEndpoint

                where = host if metrics_host is None else metrics_host
                self._endpoint = MetricsEndpoint(where, metrics_port, lambda: described(self.stats()), self._serving)
        except BaseException:
            self._flight.stop(0.0)
            raise
        text = "listening at %(url)s, serving %(readers)s"
        say(logging.INFO, "listening", text, url=self.url, readers=sorted(self._served))

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._flight.port

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
        return f"{self._scheme}://{_from_here(self._host)}:{self.port}"

    @property
    def metrics_url(self) -> str | None:
        """The URL of `/metrics` for this machine; None without `metrics_port`. `/healthz` uses the same port."""
        if self._endpoint is None:
            return None
        return f"http://{_from_here(self._endpoint.host)}:{self._endpoint.port}/metrics"

    @property
    def names(self) -> list[str]:
        """The names of the readers."""
        return list(self._served)

    def stats(self) -> dict[str, float]:
        """Returns counters since the start of the server, and current sizes.

        Returns:
            A dict of numbers:

            - `requests`: Requests for batches.
            - `batches`, `bytes`: Batches that were sent, and their size.
            - `errors`: Errors that were sent to clients.
            - `decoded`, `begun`: Batches that were decoded, and passes that were started for them.
            - `kept_hits`: Batches that were sent without decoding, because another request had them decoded.
            - `refused`: Requests that were refused because the server was busy.
            - `closed`: Connections that were closed because their clients stopped reading while others waited.
            - `clients`, `streams`, `passes`: Streams that are being sent, current streams, and open passes.
            - `kept_bytes`, `batch_bytes`: Size of the batches that are kept, and of all batches in memory.
            - `making_seconds`: Time that requests have waited for batches to be made, summed over requests.
            - `held_back_seconds`: Time that batches have waited for slow clients, summed over requests.
        """
        return self._flight.stats()

    def wait(self) -> None:
        """Waits until the server is closed. Ctrl-C interrupts the wait."""
        while not self._ending.wait(_TICK):
            pass

    def close(self, grace: float = 5.0) -> bool:
        """Ends all passes and connections. Clients continue with other servers, if any. Closing twice has no effect.

        Args:
            grace: Seconds to wait for clients to read what was sent to them. Defaults to 5.

        Returns:
            Whether all connections have ended. The others end with the process, or when their clients disconnect.
        """
        self._ending.set()
        ended = self._flight.stop(grace)
        if self._endpoint is not None:
            self._endpoint.close()
        text = "stopped" if ended else "stopped; some clients don't take what was sent to them"
        say(logging.INFO, "stopped", text, ended=ended)
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<fastpipe.service.Server at {self.url} of {', '.join(self._served)}>"

    # Requests.

    def _serving(self) -> bool:
        """Whether the server accepts requests."""
        return not self._ending.is_set()


def _from_here(host: str) -> str:
    """Returns the address of a server as clients on this machine write it in a URL."""
    return {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, shown(host))
