"""`serve`: servers of a reader's batches as Ray's actors, more or fewer of them as consumers need.

One thread of the driver's starts them, sees them die and starts others, looks at what they do, and tells a small actor,
the directory, which servers there are. Clients ask that one while they read (`fastpipe.service.Directory`), and know
nothing else of Ray: batches come over Arrow Flight.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, SupportsIndex

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fastpipe.errors import ServiceError
from fastpipe.ray._arguments import at_least, shipped
from fastpipe.ray._server_actors import NAMESPACE, DirectoryActor, RayDirectory, ServerActor
from fastpipe.reader import Reader
from fastpipe.service import connect
from fastpipe.service._autoscaling import Look, decide

__all__ = ["Service", "ServiceStatus", "serve"]

_log = logging.getLogger("fastpipe")

# Bounds of num_servers="auto".
_AUTO = (1, 16)
# Seconds between two looks at whether servers live, and between two at what they do.
_TICK, _LOOK = 0.2, 1.0
# Seconds that a server has to say what it does; then it hangs, and is killed.
_HUNG = 30.0
# Seconds in which clients learn that a server leaves; then it stops. And seconds that it has for that.
_LEAVE, _GRACE = 3.0, 2.0
# Seconds before a server is started again: twice as many after each that ended before it served.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0


class ServiceStatus(NamedTuple):
    """What the servers of a service do.

    Attributes:
        running: the URL of each server that serves, by its name.
        pending: names of those that wait for Ray to start them.
        stopping: names of those that clients leave.
        wanted: how many servers there are to be.
        bounds: within which that is chosen.
        restarts: how often a server died and another one was started.
        look: what servers did of late, as shares of their time; None as long as that isn't known.
        decision: how many servers the last look asked for, and why.
        failure: why no more servers are started; empty if they are.
    """

    running: dict[str, str]
    pending: tuple[str, ...]
    stopping: tuple[str, ...]
    wanted: int
    bounds: tuple[int, int]
    restarts: int
    look: Look | None
    decision: str
    failure: str


@dataclass(eq=False)
class _Server:
    """A server of the service.

    Attributes:
        name: as log lines and the status have it.
        actor: Ray's handle.
        awaited: known to Ray once the server serves; then, once it has ended.
        url: None until it serves.
        asked: what it was asked for its numbers with; None if it wasn't.
        ask_at: when it is to be asked for them.
        numbers: the last ones.
        heard: when these came, or it began to serve.
        share: its last seconds, as `Look.of` takes them.
        leave: when it is told to stop; None as long as it is to stay.
        told: whether it was.
    """

    name: str
    actor: Any
    awaited: Any
    url: str | None = None
    asked: Any = None
    ask_at: float = 0.0
    numbers: dict[str, float] | None = None
    heard: float = 0.0
    share: tuple[float, float, float] | None = None
    leave: float | None = None
    told: bool = False


def serve(
    reader: Reader | Mapping[str, Reader],
    *,
    num_servers: SupportsIndex | tuple[SupportsIndex, SupportsIndex] | str = "auto",
    actor_options: Mapping[str, Any] | None = None,
    max_restarts: SupportsIndex = 10,
    token: str | None = None,
    **options: Any,
) -> Service:
    """Serves the batches of a reader by actors of Ray's, as many as consumers need (extras `ray` and `arrow`).

    The batches of `service.connect()` are bit for bit the reader's, whichever servers make them, come, die or are
    stopped meanwhile. It returns at once; `connect` waits for the first server.

    Args:
        reader: or a dict from name to reader. It is pickled, so no pass may be active; each node reads the same files.
        num_servers: how many; or between which two numbers, as servers find consumers waiting for them, or themselves
            waiting for consumers. `"auto"` is between 1 and 16. Servers for which Ray has no room are pending, and no
            more are asked for meanwhile.
        actor_options: for Ray, such as `{"num_cpus": 4, "resources": {"loader": 1}}`. By default each server takes a
            CPU, and they are spread over the nodes (`scheduling_strategy="SPREAD"`). It reads with as many threads as
            it has CPUs, unless the reader was told how many.
        max_restarts: servers that may die, or not start, and be replaced. After that, none is started any more.
        token: that clients must know; None for one that is drawn.
        **options: further arguments of `fastpipe.service.Server`: `tls`, `client_ca`, `max_passes`, `keep`,
            `memory_limit`, `max_requests`.

    Returns:
        The service. Leave it by `with`, or `close()` it: its servers end then.

    Raises:
        ImportError: if pyarrow isn't installed.
        TypeError: if an argument is of the wrong type, or a reader can't be pickled.
        UnsupportedError: if a reader can't be served, or Ray can't pickle its data; it says what to do.
        ValueError: if a number is out of range.

    Example:
        >>> ray.init(num_cpus=2)  # doctest: +SKIP
        >>> reader = fastpipe.from_arrays({"id": np.arange(100)}, batch_size=10)  # doctest: +SKIP
        >>> with fastpipe.ray.serve(reader) as service:  # doctest: +SKIP
        ...     sum(batch["id"].sum() for batch in service.connect())
        4950
    """
    return Service(
        reader,
        num_servers=num_servers,
        actor_options=actor_options,
        max_restarts=max_restarts,
        token=token,
        **options,
    )


class Service:
    """Servers of a reader's batches, as `fastpipe.ray.serve` starts them. Several threads may use it."""

    def __init__(
        self,
        reader: Reader | Mapping[str, Reader],
        *,
        num_servers: Any,
        actor_options: Mapping[str, Any] | None,
        max_restarts: SupportsIndex,
        token: str | None,
        **options: Any,
    ) -> None:
        _check(reader, options)
        self._bounds = _bounds(num_servers)
        self._wanted = self._bounds[0]
        self._max_restarts = at_least("max_restarts", max_restarts, 0)
        self.token = secrets.token_urlsafe(32) if token is None else token
        given = {"num_cpus": 1, "scheduling_strategy": "SPREAD"} | dict(actor_options or {})
        # Its methods are answered while it serves; a server that dies is replaced by another actor, elsewhere.
        self._actor = ray.remote(ServerActor).options(**given, max_concurrency=4, max_restarts=0)
        self._task = (shipped(reader), self.token, options)
        self._prefix = f"server-{secrets.token_hex(3)}"
        name = f"{self._prefix}-directory"
        # With this process, whose actors end with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        directory = ray.remote(DirectoryActor).options(
            name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, scheduling_strategy=here
        )
        self._directory_actor = directory.remote()
        self._directory = RayDirectory(name)
        self._servers: list[_Server] = []
        self._started = self._restarts = self._unserved = 0
        self._not_before = 0.0
        self._looks: list[Look] = []
        self._looked = time.monotonic()
        self._decision = ""
        self._failure = ""
        self._closed = False
        self._lock = threading.RLock()
        self._fill_up()
        self._watcher = threading.Thread(target=self._watch, name="fastpipe-ray-service", daemon=True)
        self._watcher.start()

    # What users do.

    def connect(self, reader: str = "default", **options: Any) -> Reader:
        """A reader whose batches the servers make: `fastpipe.connect` to those that there are, while they change.

        It can be pickled, for Ray's tasks and actors. In a process that isn't connected to Ray (a worker of a
        `DataLoader`, for example) it goes on with the servers that were known when it was pickled.

        Args:
            reader: its name, if several are served.
            **options: further arguments of `fastpipe.connect`, such as `rank` and `world_size`, or `timeout`.

        Raises:
            ServiceError: if the service is closed, too many servers have died, or none serves within `timeout`.
        """
        self._check_open()
        try:
            return connect(self._directory, reader, token=self.token, **options)
        except ServiceError as error:
            status = self.status()
            if status.running or not status.pending:
                raise
            waiting = f"{len(status.pending)} servers wait for Ray to start them: `ray status` shows what it lacks"
            raise ServiceError(f"{error}; {waiting}") from error

    def scale(self, num_servers: SupportsIndex | tuple[SupportsIndex, SupportsIndex] | str) -> None:
        """Changes how many servers there are. Clients leave those that are too many before these stop.

        Args:
            num_servers: as `serve` takes it: a number, two of them, or `"auto"`.

        Raises:
            ServiceError: if the service is closed, or too many servers have died.
            ValueError: if a number is out of range.
        """
        bounds = _bounds(num_servers)
        with self._lock:
            self._check_open()
            self._bounds = bounds
            self._want(min(max(self._wanted, bounds[0]), bounds[1]))

    def status(self) -> ServiceStatus:
        """What the servers do, and what the last look at them asked for."""
        with self._lock:
            staying = [server for server in self._servers if server.leave is None]
            return ServiceStatus(
                running={server.name: server.url for server in staying if server.url is not None},
                pending=tuple(server.name for server in staying if server.url is None),
                stopping=tuple(server.name for server in self._servers if server.leave is not None),
                wanted=self._wanted,
                bounds=self._bounds,
                restarts=self._restarts,
                look=self._looks[-1] if self._looks else None,
                decision=self._decision,
                failure=self._failure,
            )

    @property
    def urls(self) -> list[str]:
        """Of the servers that run: for `fastpipe.connect(urls, token=service.token)` outside of Ray."""
        return list(self.status().running.values())

    def close(self) -> None:
        """Ends all servers. Passes that still want batches go on for their `timeout`, then raise a `ServiceError`.

        Twice does no harm.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._watcher.join()
        if not ray.is_initialized():
            return
        stopping = [server.actor.stop.remote(_GRACE) for server in self._servers if server.url is not None]
        try:
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=2 * _GRACE)
        finally:
            for actor in [*(server.actor for server in self._servers), self._directory_actor]:
                ray.kill(actor)
            self._servers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        status = self.status()
        return f"Service({len(status.running)} running, {len(status.pending)} pending, {len(status.stopping)} stopping)"

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError("the service is closed")
        if self._failure:
            raise ServiceError(self._failure)

    # Servers.

    def _want(self, number: int) -> None:
        """Lets so many servers run. Those that Ray hasn't started yet go first, then the youngest."""
        self._wanted = number
        self._looks.clear()
        staying = [server for server in self._servers if server.leave is None]
        for server in sorted(staying, key=lambda server: server.url is None)[number:]:
            if server.url is None:
                self._end(server)
            else:
                server.leave = time.monotonic() + _LEAVE
        self._fill_up()
        self._tell()

    def _fill_up(self) -> None:
        """Starts as many servers as are missing."""
        while not self._failure and time.monotonic() >= self._not_before:
            if sum(server.leave is None for server in self._servers) >= self._wanted:
                return
            self._started += 1
            actor = self._actor.remote()
            self._servers.append(_Server(f"{self._prefix}-{self._started}", actor, actor.start.remote(*self._task)))

    def _end(self, server: _Server) -> None:
        self._servers.remove(server)
        ray.kill(server.actor)

    def _tell(self) -> None:
        """Tells the directory which servers there are."""
        urls = [server.url for server in self._servers if server.url is not None and server.leave is None]
        self._directory_actor.tell.remote(urls, self._failure)

    def _watch(self) -> None:
        """Looks after the servers until the service is closed; in a thread of its own."""
        while not self._closed and ray.is_initialized():
            try:
                self._look_around()
            except Exception:  # Without this thread nobody would replace servers.
                _log.exception("looking after the servers failed; it is tried again")
                time.sleep(_LOOK)

    def _look_around(self) -> None:
        with self._lock:
            awaited = {server.awaited: server for server in self._servers}
            asked = {server.asked: server for server in self._servers if server.asked is not None}
        references = [*awaited, *asked]
        known: list[Any] = []
        if references:
            known, _ = ray.wait(references, num_returns=1, timeout=_TICK)
            known, _ = ray.wait(references, num_returns=len(references), timeout=0) if known else ([], [])
        else:
            time.sleep(_TICK)
        now = time.monotonic()
        with self._lock:
            before = [server.url for server in self._servers]
            for reference in known:
                if reference in asked:
                    self._answered(asked[reference], reference, now)
            for reference in known:
                if reference in awaited:
                    self._changed(awaited[reference])
            for server in list(self._servers):
                self._look_at(server, now)
            if now >= self._looked + _LOOK:
                self._decide(now)
            self._fill_up()
            if before != [server.url for server in self._servers]:
                self._tell()

    def _changed(self, server: _Server) -> None:
        """A server serves, or has ended."""
        if server not in self._servers:
            return
        try:
            url: str | None = ray.get(server.awaited)
        except ray.exceptions.RayError as error:
            if server.url is not None and isinstance(error, ray.exceptions.ActorUnavailableError):
                # The network hiccups, or Ray doesn't know yet that the actor is dead. If it stays so, it is silent.
                time.sleep(_TICK)
                server.awaited = server.actor.wait.remote()
                return
            self._end(server)
            self._died(server, error)
            return
        if url is None:
            self._end(server)
            return
        server.url, server.awaited = url, server.actor.wait.remote()
        server.heard = time.monotonic()
        self._unserved = 0
        _log.info("the server %s serves at %s", server.name, url)

    def _answered(self, server: _Server, reference: Any, now: float) -> None:
        """A server has told its numbers."""
        server.asked = None
        try:
            numbers: dict[str, float] = ray.get(reference)
        except ray.exceptions.RayError:
            return  # If it is dead, `awaited` tells of it, too.
        if server.numbers is not None:
            waited, held = (numbers[name] - server.numbers[name] for name in ("making_seconds", "held_back_seconds"))
            server.share = waited, held, now - server.heard
        server.numbers, server.heard = numbers, now

    def _look_at(self, server: _Server, now: float) -> None:
        if server.url is None:
            return
        if server.leave is not None and now >= server.leave and not server.told:
            server.told = True
            server.actor.stop.remote(_GRACE)
        if server.asked is None and now >= server.ask_at:
            server.asked, server.ask_at = server.actor.stats.remote(), now + _LOOK
        if now >= server.heard + _HUNG:
            self._end(server)
            if server.leave is None:
                self._died(server, ServiceError(f"it has said nothing for {_HUNG:g} seconds"))

    def _died(self, server: _Server, error: Exception) -> None:
        """Replaces a server, but for too many."""
        if server.leave is not None or self._closed or self._failure:
            return
        # What Ray says of how processes end behind the first line is long, and in its logs.
        told = str(getattr(error, "cause", None) or error).strip().split("\n", 1)[0]
        what = "died" if server.url is not None else "did not start"
        if self._restarts >= self._max_restarts:
            self._failure = (
                f"the server {server.name} {what}, and {self._restarts} have been replaced before"
                f" (max_restarts={self._max_restarts}): {told}"
            )
            _log.error("%s", self._failure)
            self._tell()
            return
        self._restarts += 1
        self._looks.clear()
        if server.url is None:
            pause = min(_FIRST_PAUSE * 2**self._unserved, _LONGEST_PAUSE)
            self._not_before = time.monotonic() + pause
            self._unserved += 1
        _log.warning("the server %s %s and is replaced (%d): %s", server.name, what, self._restarts, told)

    def _decide(self, now: float) -> None:
        """Looks at what servers have done since the last look, and changes how many there are if that pays."""
        self._looked = now
        # So that a directory that was restarted knows again.
        self._tell()
        staying = [server for server in self._servers if server.leave is None]
        shares = [server.share for server in staying if server.share is not None]
        if len(shares) < len(staying) or not shares or self._failure:
            # Some have just come, or wait for Ray: whether they are enough isn't known yet.
            return
        for server in staying:
            server.share = None
        self._looks = [*self._looks[-99:], Look.of(shares)]
        wanted, why = decide(self._looks, len(staying), *self._bounds)
        self._decision = f"{wanted} servers: {why}"
        if wanted != self._wanted:
            _log.info("%d servers instead of %d: %s", wanted, self._wanted, why)
            self._want(wanted)


def _bounds(num_servers: Any) -> tuple[int, int]:
    """The least and the greatest number of servers."""
    if isinstance(num_servers, str):
        if num_servers != "auto":
            raise ValueError(f'num_servers is a number, two numbers, or "auto", not {num_servers!r:.100}')
        return _AUTO
    if isinstance(num_servers, tuple):
        if len(num_servers) != 2:
            raise ValueError(f"num_servers is the least and the greatest number of them, not {num_servers!r:.100}")
        least = at_least("num_servers", num_servers[0], 1)
        return least, at_least("the greatest of num_servers", num_servers[1], least)
    number = at_least("num_servers", num_servers, 1)
    return number, number


def _check(readers: Reader | Mapping[str, Reader], options: Mapping[str, Any]) -> None:
    """Whether readers can be served so: what is found here needn't fail in each server."""
    from fastpipe._columns.arrow_schema import require_pyarrow

    require_pyarrow()
    from fastpipe.service._served import Served

    named = readers if isinstance(readers, Mapping) else {"default": readers}
    if not named:
        raise ValueError("there is no reader to serve")
    for name, reader in named.items():
        Served(name, reader)
    known = {"tls", "client_ca", "max_passes", "keep", "memory_limit", "max_requests"}
    for name in options:
        if name not in known:
            placed = "Ray chooses where servers listen" if name in ("host", "port") else "a server has no such argument"
            raise TypeError(f"serve() takes no {name!r}: {placed}; it takes {', '.join(sorted(known))}")
