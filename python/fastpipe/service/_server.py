"""A server of batches on Arrow Flight."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as flight

from fastpipe._reader.ordering import within
from fastpipe._reader.pass_options import memory_size
from fastpipe._reader.reader import Reader
from fastpipe.errors import FastpipeError
from fastpipe.service._bounds import Admission, BusyError, Shares, Unread
from fastpipe.service._intake import INTAKE, Arrived
from fastpipe.service._logs import RequestLog, say, say_error
from fastpipe.service._metrics import Metrics, shown
from fastpipe.service._served import Served
from fastpipe.service._settings import checked_token
from fastpipe.service._streams import Need, Streams
from fastpipe.service._wire import DamagedError, Ticket, error_bytes, message, messages, schema, summed, unsealed

if TYPE_CHECKING:
    from fastpipe.service._metrics_http import MetricsEndpoint

LOOPBACK = "127.0.0.1"
_LARGEST_REQUEST = 1 << 16
_TICK = 0.2
_ACTIONS = {
    "describe": "what a reader yields, and the rows of its units",
    "place": "where a row comes from",
    "health": "whether the server takes requests",
    "metrics": "what it has done, as Prometheus reads it",
}


class _Token(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets nobody in without the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        given = [value for name, values in headers.items() if name.lower() == "authorization" for value in values]
        if not any(hmac.compare_digest(value.encode(), self._expected) for value in given):
            say(logging.WARNING, "unauthenticated", "refused a client that doesn't know the token")
            raise flight.FlightUnauthenticatedError("this server wants a token: connect(..., token=...)")


class _Flight(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, server: Server, location: str, options: dict[str, Any]) -> None:
        self._server = server
        super().__init__(location, **options)

    def do_get(self, context: Any, ticket: Any) -> Any:
        data = ticket.ticket
        arrived = INTAKE.arrived(context.peer(), len(data))
        return flight.GeneratorStream(schema(), self._server._answer(context, data, arrived))

    def do_action(self, context: Any, action: Any) -> Iterator[Any]:
        peer = context.peer()
        body = b"" if action.body is None else action.body.to_pybytes()
        try:
            return iter(self._server._act(action.type, body))
        except BusyError as error:
            self._server._metrics.refused_one()
            raise flight.FlightUnavailableError(str(error)) from None
        except Exception as error:
            say_error(error, peer=peer)
            if isinstance(error, FastpipeError):
                return iter(summed([error_bytes(error)]))
            if isinstance(error, flight.FlightError):
                raise
            # Arrow would send the traceback of anything else, and with it where files of this machine are.
            raise flight.FlightServerError(f"{type(error).__name__}: {error}") from None
        finally:
            INTAKE.begun(peer, len(action.type) + len(body))

    def list_actions(self, context: Any) -> list[Any]:
        INTAKE.begun(context.peer(), 0)
        return [flight.ActionType(name, text) for name, text in _ACTIONS.items()]


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
        self._unread = Unread(INTAKE.close_idle)
        most = within("max_requests", max_requests, 1, 1 << 20)
        self._admission = Admission(most, make_room=self._unread.make_room)
        self._served = {name: Served(name, reader, shares) for name, reader in named.items()}
        self._streams = Streams(max_passes, kept, shares, self._unread.make_room)
        self._metrics = Metrics(self._streams)
        self._ending = threading.Event()
        self._stopping = threading.Lock()
        self._shutdown: threading.Thread | None = None
        options: dict[str, Any] = {}
        if tls is not None:
            chain, key = (Path(file).read_bytes() for file in tls)
            options["tls_certificates"] = [(chain, key)]
        if client_ca is not None:
            options |= {"verify_client": True, "root_certificates": Path(client_ca).read_bytes()}
        token = checked_token(token)
        if token is not None:
            options["middleware"] = {"token": _Token(token)}
        self._scheme = "grpc" if tls is None else "grpc+tls"
        self._host = host
        try:
            self._flight = _Flight(self, f"{self._scheme}://{shown(host)}:{port}", options)
        except pa.ArrowException as error:
            raise OSError(f"can't listen at {shown(host)}:{port}: {error}") from error
        self._endpoint: MetricsEndpoint | None = None
        try:
            if metrics_port is not None:
                # prometheus_client is an extra.
                from fastpipe.service._metrics_http import MetricsEndpoint

                where = host if metrics_host is None else metrics_host
                self._endpoint = MetricsEndpoint(where, metrics_port, self._metrics, self._serving)
            INTAKE.watch(self.port, self._metrics.closed_one)
        except BaseException:
            if self._endpoint is not None:
                self._endpoint.close()
            self._flight.shutdown()
            raise
        text = "listening at %(url)s, serving %(readers)s"
        say(logging.INFO, "listening", text, url=self.url, readers=sorted(self._served))

    @property
    def port(self) -> int:
        """The port that it listens at."""
        found: int = self._flight.port
        return found

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
            decoded, `refused`: requests that were, since the server was busy, `closed`: connections that sent more than
            requests have (Linux only); `clients`, `streams`, `passes` and `kept_bytes` there are now, and `batch_bytes`
            of all batches that were made and are still in memory. `making_seconds` is how long requests have waited
            for batches being made, and `held_back_seconds` how long batches have waited for clients to take them; each
            request counts by itself.
        """
        return self._metrics.numbers()

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
        self._streams.close()
        with self._stopping:
            if self._shutdown is None:
                # It waits for clients, for as long as they like.
                self._shutdown = threading.Thread(target=self._flight.shutdown, name="fastpipe-stop", daemon=True)
                self._shutdown.start()
        self._shutdown.join(grace)
        ended = not self._shutdown.is_alive()
        INTAKE.leave(self.port, self._metrics.closed_one)
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

    def _find(self, name: str) -> Served:
        found = self._served.get(name)
        if found is None:
            raise flight.FlightServerError(
                f"there is no reader {name!r:.100} here, only {', '.join(sorted(self._served))}"
            )
        return found

    def _act(self, action: str, body: bytes) -> list[bytes]:
        if action not in _ACTIONS:
            raise flight.FlightServerError(f"there is no action {action!r:.100}, only {', '.join(_ACTIONS)}")
        if action == "health":
            return [b'{"serving": true}']
        if action == "metrics":
            return [self._metrics.text().encode()]
        if len(body) > _LARGEST_REQUEST:
            raise flight.FlightServerError(f"a request has {_LARGEST_REQUEST} bytes at most")
        try:
            with self._admission.request(len(body)):
                request = unsealed(body)
                served = self._find(str(request["reader"]))
                if action == "describe":
                    return summed([json.dumps(served.description()).encode(), served.unit_rows().tobytes()])
                served.check(dict(request["data"]))
                place = served.place(int(request["unit"]), int(request["record"]))
        except FastpipeError:
            raise
        except DamagedError as error:
            raise flight.FlightUnavailableError(str(error)) from None
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, LookupError) as error:
            raise flight.FlightServerError(f"a request that can't be read: {error!r:.300}") from None
        return summed([json.dumps(place).encode()])

    def _answer(self, context: Any, data: bytes, arrived: Arrived) -> Iterator[Any]:
        request = RequestLog(context.peer())
        with self._metrics.client(), closing(request), ExitStack() as admitted:
            try:
                admitted.enter_context(self._admission.request(len(data)))
                ticket = Ticket.read(data)
                del data
                arrived.begun()
                yield from self._metrics.timed(self._batches(context, ticket, request))
                request.ends("sent")
            except BusyError as error:
                # As if it weren't there: the client asks another server, or again after a while.
                self._metrics.refused_one()
                request.ends("refused")
                raise flight.FlightUnavailableError(str(error)) from None
            except InterruptedError:
                request.ends("cancelled")
                raise flight.FlightCancelledError("the server is stopping, or the client has gone") from None
            except DamagedError as error:
                # As if its connection had failed: the client asks again.
                self._metrics.errors += 1
                request.fails(error)
                raise flight.FlightUnavailableError(str(error)) from None
            except Exception as error:  # Whatever it is, the client is told, and the server goes on.
                self._metrics.errors += 1
                request.fails(error)
                yield message([]), error_bytes(error)

    def _batches(self, context: Any, ticket: Ticket, request: RequestLog) -> Iterator[Any]:
        request.asks(ticket)
        served = self._find(ticket.reader)
        served.check(ticket.data)
        order = served.order(ticket)
        # Its digest, since there may be long lists in it.
        of = json.dumps([ticket.order.text(), ticket.progress], sort_keys=True).encode()
        key = (ticket.reader, ticket.epoch, ticket.csr, hashlib.blake2b(of).digest())

        need = Need(ticket.reader, ticket.order.batch_size, served.limit or 0)

        def wanted() -> bool:
            return not (self._ending.is_set() or context.is_cancelled())

        def begin(step: int) -> Any:
            return served.begin(ticket, order, step, max(step + 1, ticket.until))

        step = ticket.start
        while step < ticket.stop:
            drawn = self._streams.get(
                key,
                step,
                ticket.stop,
                begin,
                wanted,
                client=context.peer(),
                now=step == ticket.start,
                need=need,
            )
            said, pieces, end = drawn.part(step, ticket.stop)
            nbytes = sum(map(len, pieces))
            self._metrics.sent(end - step, nbytes)
            request.sent(end - step, nbytes)
            yield from self._unread.watched(context.peer(), messages(said, pieces))
            step = end
            # Or there would be two of them while it waits for the next.
            del drawn, pieces


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
