"""`serve`: servers of a reader's batches as Ray actors.

Ray does what concerns machines: it places the servers, and restarts those whose processes die. Servers register at a
small actor, the directory. Clients ask the directory while they read (`fastpipe.service.Directory`), and know nothing
else of Ray: batches come over Arrow Flight.

Ray starts a server's process again when it dies. The server then listens at another port, and perhaps on another node,
so each server registers its URL at the directory, again every second. Ray may also restart the directory, which then
knows no server until the next registration.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, SupportsIndex

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fastpipe._reader.passes import passes_of
from fastpipe._reader.reader import Reader
from fastpipe.errors import ServiceError
from fastpipe.ray._arguments import at_least, shipped, take_given_processors
from fastpipe.service import connect

NAMESPACE = "fastpipe"
"""Ray namespace of the directories' names, so that other jobs of the cluster find them."""

# Seconds the directory has to answer. Clients ask it in a separate thread, again and again.
_TIMEOUT = 5.0
# Seconds between two registrations of a server.
_PAUSE = 1.0


class ServerActor:
    """A server in a Ray process. Ray calls its methods from several threads.

    Args:
        name: Name of the server at the directory.
        directory: Ray's handle of the `DirectoryActor`.
        readers: A reader, or a dict from name to reader. The service keeps Ray's reference to it for restarts.
        token: Token that clients must send.
        options: Further arguments of `fastpipe.service.Server`.
    """

    def __init__(
        self,
        name: str,
        directory: Any,
        readers: Reader | Mapping[str, Reader],
        token: str,
        options: dict[str, Any],
    ) -> None:
        from fastpipe.service import Server

        for reader in readers.values() if isinstance(readers, Mapping) else [readers]:
            take_given_processors(passes_of(reader))
        self._server = Server(readers, host=ray.util.get_node_ip_address(), port=0, token=token, **options)
        self._leaving = threading.Event()
        threading.Thread(target=self._register, args=(name, directory), name="fastpipe-register", daemon=True).start()

    def url(self) -> str:
        """Returns the URL of the server."""
        return self._server.url

    def leave(self, seconds: float, grace: float) -> None:
        """Ends the actor after clients have had `seconds` to leave it, and `grace` seconds to end their streams."""
        self._leaving.set()
        time.sleep(seconds)
        self._server.stop(grace)
        ray.actor.exit_actor()

    def _register(self, name: str, directory: Any) -> None:
        while not self._leaving.is_set():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(directory.register.remote(name, self._server.url), timeout=_TIMEOUT)
            self._leaving.wait(_PAUSE)


class DirectoryActor:
    """Knows the URL of each server that has registered."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._forgotten: set[str] = set()

    def register(self, name: str, url: str) -> None:
        """Lists a server, in place of the URL that it had before Ray restarted it."""
        if name not in self._forgotten:
            self._urls[name] = url

    def forget(self, names: Sequence[str]) -> None:
        """Lists servers no more, even if they register again. Names aren't used twice."""
        self._forgotten.update(names)
        for name in names:
            self._urls.pop(name, None)

    def urls(self) -> list[str]:
        """Returns the URLs of the servers."""
        return list(self._urls.values())


class RayDirectory:
    """A `fastpipe.service.Directory` of the servers that Ray runs. It can be pickled, and used where Ray is connected.

    Args:
        name: Name of its actor.
        check: In the process that serves: called when no server has registered; raises an error if none will. It isn't
            pickled.
    """

    def __init__(self, name: str, check: Callable[[], None] | None = None) -> None:
        self._name, self._check = name, check
        # Ray may take long to start the directory. A directory that was pickled has started.
        self._starting = check is not None
        self._actor: Any = None

    def urls(self) -> Sequence[str]:
        """Returns the URLs of the servers that have registered.

        Raises:
            ServiceError: if Ray doesn't say, the service is closed, or no server could start.
        """
        # Without this check Ray would start a cluster.
        if not ray.is_initialized():
            raise ServiceError("this process isn't connected to Ray, which knows the servers that come and go")
        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._name, NAMESPACE)
            urls: list[str] = ray.get(self._actor.urls.options(max_task_retries=-1).remote(), timeout=_TIMEOUT)
        except (ValueError, ray.exceptions.ActorDiedError):
            self._actor = None
            raise ServiceError("the service was closed, or the process that had started it has ended") from None
        except ray.exceptions.RayError as error:
            self._actor = None
            if self._starting and isinstance(error, ray.exceptions.GetTimeoutError):
                return []
            raise ServiceError(f"Ray doesn't say which servers there are: {type(error).__name__}: {error}") from error
        self._starting = False
        if not urls and self._check is not None:
            self._check()
        return urls

    def __reduce__(self) -> tuple[Any, ...]:
        return RayDirectory, (self._name,)


# Seconds a server has to answer `status`.
_ANSWER = 2.0
# Seconds in which clients learn that a server leaves; then it stops. And seconds it has to stop.
_LEAVE, _GRACE = 3.0, 2.0


class ServiceStatus(NamedTuple):
    """The servers of a service, by whether they serve.

    Attributes:
        running: URL of each server that serves, by its name.
        pending: Names of the servers that Ray has yet to start or to restart, or that didn't answer in two seconds.
        failed: Why servers that couldn't start ended, or those that Ray restarts no more, by their names.
    """

    running: dict[str, str]
    pending: tuple[str, ...]
    failed: dict[str, str]


@dataclass(eq=False)
class _Server:
    """A server of the service.

    Attributes:
        name: as the directory and the status have it.
        actor: Ray's handle; the only one, so that Ray ends the actor when the service drops it.
        url: Ray's reference to its URL: the last request that wasn't answered, or the error it ended with.
    """

    name: str
    actor: Any
    url: Any


def serve(
    reader: Reader | Mapping[str, Reader],
    *,
    num_servers: SupportsIndex = 1,
    actor_options: Mapping[str, Any] | None = None,
    token: str | None = None,
    **options: Any,
) -> Service:
    """Serves the batches of a reader by Ray actors (extras `ray` and `arrow`).

    The batches of `service.connect()` are bit for bit the reader's, whichever servers make them, and whichever of them
    are added, die, restart or are removed while they are read. `serve` returns at once; `connect` waits for the first
    server.

    Args:
        reader: A reader, or a dict from name to reader. It is pickled, so no pass may be active; each node reads the
            same files.
        num_servers: Number of servers, at least 1. `Service.scale` changes it. Servers for which Ray has no room are
            pending until it has.
        actor_options: Ray's options of each server, such as `{"num_cpus": 4, "resources": {"loader": 1}}`. By default
            each server takes a CPU, the servers are spread over the nodes (`scheduling_strategy="SPREAD"`), and Ray
            restarts those that die without limit (`max_restarts=-1`). A server reads with as many threads as it has
            CPUs, unless the reader was told how many.
        token: Token that clients must send; None to draw one.
        **options: Further arguments of `fastpipe.service.Server`: `tls`, `client_ca`, `max_passes`, `keep`,
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
    return Service(reader, num_servers=num_servers, actor_options=actor_options, token=token, **options)


class Service:
    """Servers of a reader's batches, as `fastpipe.ray.serve` starts them. Several threads may use it."""

    def __init__(
        self,
        reader: Reader | Mapping[str, Reader],
        *,
        num_servers: SupportsIndex,
        actor_options: Mapping[str, Any] | None,
        token: str | None,
        **options: Any,
    ) -> None:
        _check(reader, options)
        wanted = _number_of_servers(num_servers)
        self.token = secrets.token_urlsafe(32) if token is None else token
        given = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": -1} | dict(actor_options or {})
        # Its methods are answered while it serves and leaves.
        self._actor = ray.remote(ServerActor).options(**given | {"max_concurrency": 4})
        self._prefix = f"server-{secrets.token_hex(3)}"
        name = f"{self._prefix}-directory"
        # On the node of this process, whose actors end with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        directory = ray.remote(DirectoryActor).options(
            name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here
        )
        self._directory_actor = directory.remote()
        self._directory = RayDirectory(name, self._check_startable)
        self._task = (self._directory_actor, shipped(reader), self.token, options)
        self._servers: list[_Server] = []
        self._started = 0
        self._closed = False
        self._lock = threading.RLock()
        self.scale(wanted)

    def connect(self, reader: str = "default", **options: Any) -> Reader:
        """Returns a reader whose batches the servers make: `fastpipe.connect` to the servers, while they change.

        It can be pickled, for Ray's tasks and actors. In a process that isn't connected to Ray (a worker of a
        `DataLoader`, for example) it keeps to the servers that were known when it was pickled.

        Args:
            reader: Name of the reader, if several are served.
            **options: Further arguments of `fastpipe.connect`, such as `rank` and `world_size`, or `timeout`.

        Raises:
            ServiceError: if the service is closed, no server could start, or none serves within `timeout`.
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

    def scale(self, num_servers: SupportsIndex) -> None:
        """Changes how many servers there are, and replaces those that have failed.

        Servers that Ray hasn't started yet are removed first, then the youngest. A server that is removed stops three
        seconds later: by then its clients use the others.

        Args:
            num_servers: Number of servers, at least 1.

        Raises:
            ServiceError: if the service is closed.
            TypeError: if the number is not an integer.
            ValueError: if it is less than 1.
        """
        wanted = _number_of_servers(num_servers)
        with self._lock:
            self._check_open()
            status = self.status()
            kept = [server for server in self._servers if server.name not in status.failed]
            # The sort is stable: of the servers that run, older ones come first.
            kept = sorted(kept, key=lambda server: server.name not in status.running)[:wanted]
            removed = [server for server in self._servers if server not in kept]
            self._servers = kept
            if removed:
                self._directory_actor.forget.remote([server.name for server in removed])
            for server in removed:
                if server.name in status.running:
                    # If its process dies first, Ray ends the restarted actor: the service has no handle of it any more.
                    server.actor.leave.remote(_LEAVE, _GRACE)
                else:
                    ray.kill(server.actor)
            while len(self._servers) < wanted:
                self._started += 1
                name = f"{self._prefix}-{self._started}"
                actor = self._actor.remote(name, *self._task)
                self._servers.append(_Server(name, actor, actor.url.remote()))

    def status(self) -> ServiceStatus:
        """Asks each server whether it serves. Waits at most two seconds for the answers."""
        return self._status(_ANSWER)

    @property
    def urls(self) -> list[str]:
        """URLs of the servers that serve: for `fastpipe.connect(urls, token=service.token)` outside of Ray."""
        return list(self.status().running.values())

    def close(self) -> None:
        """Ends all servers. Passes that still want batches try for their `timeout`, then raise a `ServiceError`.

        Closing twice does no harm.
        """
        with self._lock:
            if self._closed:
                return
            running = self.status().running
            self._closed = True
            servers, self._servers = self._servers, []
        if not ray.is_initialized():
            return
        # Streams end before the processes do, so that clients need not wait for their timeout.
        stopping = [server.actor.leave.remote(0.0, _GRACE) for server in servers if server.name in running]
        try:
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=2 * _GRACE)
        finally:
            for actor in [*(server.actor for server in servers), self._directory_actor]:
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<fastpipe.ray.Service {self._prefix} of {len(self._servers)} servers>"

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError("the service is closed")
        if not ray.is_initialized():
            raise ServiceError("this process is no longer connected to Ray: ray.init(), and serve the reader again")

    def _check_startable(self) -> None:
        """Raises a `ServiceError` if no server will ever serve."""
        failed = self._status(0.0).failed
        if failed and len(failed) == len(self._servers):
            raise ServiceError("; ".join(f"the server {name} can't run: {why}" for name, why in failed.items()))

    def _status(self, seconds: float) -> ServiceStatus:
        running, pending, failed = dict[str, str](), list[str](), dict[str, str]()
        with self._lock:
            # Without this check Ray would start a cluster.
            servers = self._servers if ray.is_initialized() else []
            for server in servers:
                server.url = server.url or server.actor.url.remote()
            requests = [server.url for server in servers]
            answered = ray.wait(requests, num_returns=len(requests), timeout=seconds)[0] if requests else []
            for server in servers:
                if server.url not in answered:
                    pending.append(server.name)
                    continue
                try:
                    running[server.name] = ray.get(server.url)
                    server.url = None
                except ray.exceptions.ActorDiedError as error:
                    failed[server.name] = _why(error)
                except ray.exceptions.RayError:
                    # It died, and Ray restarts it.
                    pending.append(server.name)
                    server.url = None
        return ServiceStatus(running, tuple(pending), failed)


def _why(error: Exception) -> str:
    """Returns what an actor has died of: the error of its constructor, or what Ray says first."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if "creation task" in lines[0] else lines[0]


def _number_of_servers(num_servers: Any) -> int:
    if isinstance(num_servers, (str, tuple)):
        raise TypeError(
            f"num_servers must be an integer; got {num_servers!r:.100}. The number of servers doesn't change by itself:"
            " start with one that suits, and change it with scale(n)"
        )
    return at_least("num_servers", num_servers, 1)


def _check(readers: Reader | Mapping[str, Reader], options: Mapping[str, Any]) -> None:
    """Raises the errors that every server would raise."""
    from fastpipe._arrow.schema import require_pyarrow

    require_pyarrow()
    from fastpipe.service._served import Served

    named = readers if isinstance(readers, Mapping) else {"default": readers}
    if not named:
        raise ValueError("there is no reader to serve")
    for name, reader in named.items():
        Served(name, reader)
    known = {"tls", "client_ca", "max_passes", "keep", "memory_limit", "max_requests"}
    hints = {
        "host": "Ray chooses where servers listen",
        "port": "Ray chooses where servers listen",
        "max_restarts": "Ray restarts servers without limit, or as actor_options={'max_restarts': 10} says",
    }
    for name in options:
        if name not in known:
            hint = hints.get(name, "a server has no such argument")
            raise TypeError(f"serve() takes no {name!r}: {hint}; it takes {', '.join(sorted(known))}")
