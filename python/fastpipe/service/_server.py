"""A server of batches on Arrow Flight."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from fastpipe._fastpipe import FlightServer, Pass
from fastpipe._reader.ordering import within
from fastpipe._reader.pass_options import memory_size
from fastpipe._reader.reader import Reader
from fastpipe.errors import FastpipeError, ServiceError
from fastpipe.service._logs import RequestLog, say, say_error
from fastpipe.service._metrics import described, shown, text_of
from fastpipe.service._served import Served, Shares
from fastpipe.service._settings import checked_token
from fastpipe.service._wire import LARGEST_TICKET, DamagedError, Ticket, error_bytes, summed, unsealed

if TYPE_CHECKING:
    from fastpipe.service._metrics_http import MetricsEndpoint

LOOPBACK = "127.0.0.1"
_LARGEST_REQUEST = 1 << 16
# What Flight writes around a ticket.
_AROUND = 16
# Bytes of tickets that are being answered. Most tickets have less than 1 KiB.
_TICKETS = 16 * (LARGEST_TICKET + 2 * _AROUND)
# Seconds that a request waits for memory or a pass before it is told that the server is busy.
_PATIENCE = 5.0
# Seconds after which a client that has taken nothing is closed when others wait.
_IDLE = 3.0
_TICK = 0.2


@dataclass(frozen=True, slots=True)
class _Options:
    """What `FlightServer` reads."""

    token: str | None
    tls: tuple[bytes, bytes] | None
    client_ca: bytes | None
    max_passes: int
    keep: int
    pass_bytes: int | None
    alive: int | None
    max_requests: int
    patience: float
    idle: float
    request_bytes: int = LARGEST_TICKET + _AROUND
    requests_bytes: int = _TICKETS


class _Decisions:
    """Decides what clients get: what `FlightServer` asks Python, once for each request.

    Args:
        served: readers by name.
        stats: numbers of the server.
    """

    def __init__(self, served: Mapping[str, Served], stats: Callable[[], dict[str, float]]) -> None:
        self._served, self._stats = served, stats

    def request(self, peer: str) -> RequestLog:
        """The record of a request for batches."""
        return RequestLog(peer)

    def told(self, error: Exception) -> bytes:
        """What a client is told of an error, in place of a batch."""
        return error_bytes(error)

    def open(
        self, request: RequestLog, data: bytes
    ) -> tuple[bytes, int, int, str, int, int, Callable[[int], Pass]] | bytes:
        """What a ticket asks for, or what the client is told instead.

        Raises:
            ConnectionError: if the ticket was damaged on its way.
        """
        try:
            ticket = Ticket.read(data)
            request.asks(ticket)
            served = self._find(ticket.reader)
            served.check(ticket.data)
            order = served.order(ticket)
        except DamagedError as error:
            raise ConnectionError(str(error)) from None
        except Exception as error:  # Whatever it is, the client is told, and the server goes on.
            return error_bytes(error)
        # A digest, because there may be long lists in it.
        of = json.dumps([ticket.reader, ticket.epoch, ticket.csr, ticket.order.text(), ticket.progress], sort_keys=True)
        key = hashlib.blake2b(of.encode()).digest()

        def begin(step: int) -> Pass:
            return served.begin(ticket, order, step, max(step + 1, ticket.until))

        return key, ticket.start, ticket.stop, ticket.reader, ticket.order.batch_size, served.limit or 0, begin

    def act(self, action: str, body: bytes, peer: str) -> list[bytes]:
        """The answer to an action.

        Raises:
            ConnectionError: if the request was damaged on its way.
            ValueError: if there is no such action, or its request can't be read.
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
            raise ValueError(f"a request that can't be read: {error!r:.300}") from None

    def _acted(self, action: str, body: bytes) -> list[bytes]:
        if action not in ("describe", "place"):
            raise ValueError(f"there is no action {action!r:.100}, only describe, place, health and metrics")
        if len(body) > _LARGEST_REQUEST:
            raise ValueError(f"a request has {_LARGEST_REQUEST} bytes at most")
        request = unsealed(body)
        served = self._find(str(request["reader"]))
        if action == "describe":
            return [json.dumps(served.description()).encode(), served.unit_rows().tobytes()]
        served.check(dict(request["data"]))
        return [json.dumps(served.place(int(request["unit"]), int(request["record"]))).encode()]

    def _find(self, name: str) -> Served:
        found = self._served.get(name)
        if found is None:
            raise ServiceError(f"there is no reader {name!r:.100} here, only {', '.join(sorted(self._served))}")
        return found

    def log_refused(self, peer: str) -> None:
        """Logs that a client doesn't know the token."""
        say(logging.WARNING, "unauthenticated", "%(peer)s: refused a client that doesn't know the token", peer=peer)

    def log_closed(self, peer: str) -> None:
        """Logs that a client took nothing while others waited."""
        text = "%(peer)s: closed its connection, on which it took nothing while others waited"
        say(logging.WARNING, "closed", text, peer=peer)


class Server:
    """Serves the batches of readers to others, who `fastpipe.connect` to it (extra `arrow`).

    Whoever connects chooses which of these readers, and the order, epoch and steps of its batches; never files or code.
    The server keeps nothing that couldn't be asked for again: so it may be stopped, restarted or added at any time.
    Clients that ask for the same steps at about the same time share their decoding.

    Args:
        readers: a reader, or a dict from name to reader; a single one is called `"default"`. Their arguments are what
            clients get that ask for nothing else; `num_threads`, `prefetch` and `memory_limit` hold for each pass.
        host: the address to listen at. By default only processes of this machine can connect.
        port: 0 for any that is free, see `port`.
        token: what clients must know; None lets everybody in who can connect.
        tls: files of a certificate chain and of its private key, PEM; None for no encryption.
        client_ca: file of certificates, PEM, one of which must have signed the client's; needs `tls`.
        max_passes: passes that are open at once, over all clients.
        keep: bytes of batches, or a size such as `"128MiB"`, that are kept for other clients that ask for them; 8 MiB
            of these until two clients have read one stream.
        memory_limit: bytes, or a size such as `"4GiB"`, that batches may take, over all clients: those that are kept
            (`keep`), a quarter of the rest for those that are being sent, and the others for passes. A pass has the
            limit of its reader, if that fits, or what is left for each of `max_passes`; where the limits of more passes
            don't fit, fewer are open. Python, gRPC and what readers have in memory come on top. None for no such limit.
        max_requests: requests that are answered at once. Clients that ask for more are told that the server is busy;
            they ask other servers, and again after a while.
        metrics_port: a port for HTTP, 0 for any that is free, see `metrics_url` (extra `metrics`): `/metrics` has what
            Prometheus reads, `/healthz` says whether the server takes requests (200, or 503 while it stops). Neither
            asks for a token, nor is encrypted: they tell numbers only. None for no such port.
        metrics_host: the address of that; None for `host`.

    Raises:
        ImportError: if pyarrow isn't installed, or `prometheus_client` for a `metrics_port`.
        OSError: if it can't listen there.
        LimitError: if a pass of a reader takes more than the memory limit leaves for it.
        UnsupportedError: if a reader can't be served.
        ValueError: if an argument is out of range, `memory_limit` leaves nothing for passes, `client_ca` comes without
            `tls`, or `metrics_host` without `metrics_port`.

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
        readers: Reader | Mapping[str, Reader],
        *,
        host: str = LOOPBACK,
        port: int = 0,
        token: str | None = None,
        tls: tuple[str | Path, str | Path] | None = None,
        client_ca: str | Path | None = None,
        max_passes: int = 16,
        keep: int | str = "128MiB",
        memory_limit: int | str | None = None,
        max_requests: int = 512,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
    ) -> None:
        named = readers if isinstance(readers, Mapping) else {"default": readers}
        if not named:
            raise ValueError("there is no reader to serve")
        if client_ca is not None and tls is None:
            raise ValueError("client_ca checks certificates of clients, which needs tls=(certificate, key)")
        if max_passes < 1:
            raise ValueError(f"max_passes is at least 1, not {max_passes}")
        if metrics_host is not None and metrics_port is None:
            raise ValueError("metrics_host is where metrics_port listens: give that, too")
        if metrics_port is not None:
            metrics_port = within("metrics_port", metrics_port, 0, 65_535)
        kept = memory_size("keep", keep)
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
            keep=kept,
            pass_bytes=None if shares is None else shares.passes,
            alive=None if shares is None else shares.keep + shares.sending,
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
                # prometheus_client is an extra.
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
        """The port that it listens at."""
        return self._flight.port

    @property
    def url(self) -> str:
        """What to connect to from this machine."""
        return f"{self._scheme}://{_from_here(self._host)}:{self.port}"

    @property
    def metrics_url(self) -> str | None:
        """The URL of `/metrics`, from this machine; None without a `metrics_port`. `/healthz` is at the same port."""
        if self._endpoint is None:
            return None
        return f"http://{_from_here(self._endpoint.host)}:{self._endpoint.port}/metrics"

    @property
    def names(self) -> list[str]:
        """Of the readers."""
        return list(self._served)

    def stats(self) -> dict[str, float]:
        """What it has done so far, and what is open now.

        Returns:
            A dict of numbers: `requests`, `batches` and `bytes` that were sent, `errors` that were told, `decoded`
            batches and the `begun` passes that they are of, `kept_hits`: batches that another client's request had
            decoded, `refused`: requests that were, since the server was busy, `closed`: connections of clients that
            took nothing while others waited; `clients`, `streams`, `passes` and `kept_bytes` there are now, and
            `batch_bytes` of all batches that were made and are still in memory. `making_seconds` is how long requests
            have waited for batches being made, and `held_back_seconds` how long batches have waited for clients to take
            them; each request counts by itself.
        """
        return self._flight.stats()

    def wait(self) -> None:
        """Waits until it is stopped. Ctrl-C ends the waiting."""
        while not self._ending.wait(_TICK):
            pass

    def stop(self, grace: float = 5.0) -> bool:
        """Ends all passes and connections. Clients go on with other servers, if they have any. Twice does no harm.

        Args:
            grace: seconds to wait for clients that don't take what was sent to them.

        Returns:
            Whether all connections have ended. Those that haven't end with the process, or when their client goes.
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
        self.stop()

    def __repr__(self) -> str:
        return f"<fastpipe.service.Server at {self.url} of {', '.join(self._served)}>"

    # Requests.

    def _serving(self) -> bool:
        """Whether it takes requests."""
        return not self._ending.is_set()


def _from_here(host: str) -> str:
    """An address that a server listens at, as clients of this machine write it in an URL."""
    return {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, shown(host))


def listening(readers: Reader | Mapping[str, Reader], url: str, options: dict[str, Any]) -> Server:
    """A server at an URL.

    Raises:
        ValueError: if that is none, or says something else of encryption than the options do.
    """
    try:
        found = urlsplit(url)
        host, port = found.hostname, 0 if found.port is None else found.port
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"a server listens at grpc://host:port, not {url!r:.200}: {error}") from None
    if found.scheme not in ("grpc", "grpc+tcp", "grpc+tls") or host is None:
        raise ValueError(f"a server listens at grpc://host:port, not {url!r:.200}")
    if (found.scheme == "grpc+tls") != (options.get("tls") is not None):
        raise ValueError("grpc+tls://... and tls=(certificate, key) go together")
    return Server(readers, host=host, port=port, **options)
