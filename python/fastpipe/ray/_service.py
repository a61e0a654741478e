"""`serve`: Ray actors that serve the batches of a reader.

Ray places the servers and restarts servers whose processes die. Servers register with a small actor, the directory.
Clients query the directory while they read (`fastpipe.service.Directory`). They don't depend on Ray in any other way:
batches are sent over Arrow Flight.

After a restart, a server listens on another port, and perhaps on another node. Each server therefore registers its URL
with the directory every second. Ray may also restart the directory, which is then empty until the next registrations.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fastpipe._reader.mapped import Mapped
from fastpipe._reader.passes import passes_of
from fastpipe._reader.reader import Reader
from fastpipe.errors import ServiceError
from fastpipe.ray._arguments import at_least, shipped, take_given_processors
from fastpipe.service import connect

NAMESPACE = "fastpipe"
"""Ray namespace of the directories' names, so that other jobs of the cluster find them."""

# Seconds the directory has to answer. Clients query it regularly in a separate thread.
_TIMEOUT = 5.0
# Seconds between two registrations of a server.
_PAUSE = 1.0


class ServerActor:
    """A server in a Ray process. Ray calls its methods from several threads.

    Args:
        name: Name of the server in the directory.
        directory: Ray's handle of the `DirectoryActor`.
        readers: A reader, or a dict from name to reader. The service keeps Ray's reference to it for restarts.
        token: Token that clients must send.
        options: Further arguments of `fastpipe.service.Server`.
    """

    def __init__(
        self,
        name: str,
        directory: Any,
        readers: Reader | Mapped | Mapping[str, Reader | Mapped],
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
        self._server.close(grace)
        ray.actor.exit_actor()

    def _register(self, name: str, directory: Any) -> None:
        while not self._leaving.is_set():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(directory.register.remote(name, self._server.url), timeout=_TIMEOUT)
            self._leaving.wait(_PAUSE)


class DirectoryActor:
    """Stores the URL of each registered server."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._forgotten: set[str] = set()

    def register(self, name: str, url: str) -> None:
        """Registers a server. Replaces the URL that it had before Ray restarted it."""
        if name not in self._forgotten:
            self._urls[name] = url

    def forget(self, names: Sequence[str]) -> None:
        """Removes servers permanently, even if they register again. Server names are never reused."""
        self._forgotten.update(names)
        for name in names:
            self._urls.pop(name, None)

    def urls(self) -> list[str]:
        """Returns the URLs of the servers."""
        return list(self._urls.values())


class RayDirectory:
    """A `fastpipe.service.Directory` of the servers that Ray runs.

    It can be pickled and used in any process that is connected to Ray.

    Args:
        name: Name of the directory's actor.
        check: Function that is called when no server has registered, and raises an error if none ever will. Only the
            serving process has it: it isn't pickled.
    """

    def __init__(self, name: str, check: Callable[[], None] | None = None) -> None:
        self._name, self._check = name, check
        # Ray may take long to start the directory. A pickled directory has already started.
        self._starting = check is not None
        self._actor: Any = None

    def urls(self) -> Sequence[str]:
        """Returns the URLs of the registered servers.

        Raises:
            ServiceError: If Ray can't reach the directory, the service is closed, or no server could start.
        """
        # Without this check, Ray would start a cluster.
        if not ray.is_initialized():
            raise ServiceError(
                "this process isn't connected to Ray, which manages the list of servers: call ray.init() first"
            )
        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._name, NAMESPACE)
            urls: list[str] = ray.get(self._actor.urls.options(max_task_retries=-1).remote(), timeout=_TIMEOUT)
        except (ValueError, ray.exceptions.ActorDiedError):
            self._actor = None
            raise ServiceError("the service was closed, or the process that started it has ended") from None
        except ray.exceptions.RayError as error:
            self._actor = None
            if self._starting and isinstance(error, ray.exceptions.GetTimeoutError):
                return []
            raise ServiceError(f"cannot get the list of servers from Ray: {type(error).__name__}: {error}") from error
        self._starting = False
        if not urls and self._check is not None:
            self._check()
        return urls

    def __reduce__(self) -> tuple[Any, ...]:
        return RayDirectory, (self._name,)


# Seconds a server has to answer `status`.
_ANSWER = 2.0
# Seconds that clients have to switch to other servers before a server stops, and seconds that it then has to end its
# streams.
_LEAVE, _GRACE = 3.0, 2.0


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The servers of a service by their state.

    Attributes:
        running: URL of each running server, by name.
        pending: Names of the servers that Ray has yet to start or restart, or that didn't answer within two seconds.
        failed: Reasons why servers couldn't start or are no longer restarted by Ray, by name.
    """

    running: dict[str, str]
    pending: tuple[str, ...]
    failed: dict[str, str]


@dataclass(eq=False)
class _Server:
    """A server of the service.

    Attributes:
        name: Name in the directory and in the status.
        actor: Ray's handle. It is the only one, so Ray ends the actor when the service drops it.
        url: Ray reference to its URL: the latest request if it is unanswered or failed, otherwise None.
    """

    name: str
    actor: Any
    url: Any


def serve(
    reader: Reader | Mapped | Mapping[str, Reader | Mapped],
    *,
    num_servers: int = 1,
    actor_options: Mapping[str, Any] | None = None,
    token: str | None = None,
    **options: Any,
) -> Service:
    """Serves the batches of a reader from Ray actors (extras `ray` and `arrow`).

    The batches of `service.connect()` are identical to the reader's, bit for bit. Servers may be added, die, restart or
    be removed while clients read. `serve` returns at once, and `connect` waits for the first server.

    Args:
        reader: A reader, or a dict from name to reader. It is pickled, so no pass may be active. Each node reads the
            same files.
        num_servers: Number of servers, at least 1. `Service.scale` changes it. Servers are pending until Ray has
            resources for them. Defaults to 1.
        actor_options: Ray's options of each server, such as `{"num_cpus": 4, "resources": {"loader": 1}}`. By default
            each server uses one CPU, the servers are spread over the nodes (`scheduling_strategy="SPREAD"`), and Ray
            restarts a dead server without limit (`max_restarts=-1`). A server uses one thread per CPU that Ray
            assigns to it, unless the reader sets `num_threads`.
        token: Token that clients must send. Defaults to a random token.
        **options: Further arguments of `fastpipe.service.Server`: `tls`, `client_ca`, `max_passes`, `cache_bytes`,
            `memory_limit`, `max_requests`.

    Returns:
        The service. Use it in a `with` block, or call `close()` to stop its servers.

    Raises:
        ImportError: If pyarrow isn't installed.
        TypeError: If an argument has the wrong type, or a reader can't be pickled.
        UnsupportedError: If a reader can't be served, or Ray can't pickle its data. The message says what to do.
        ValueError: If a number is out of range.

    Example:
        >>> import numpy as np
        >>> import fastpipe, fastpipe.ray
        >>> import ray
        >>> _ = ray.init(num_cpus=2, log_to_driver=False)
        >>> reader = fastpipe.from_arrays({"id": np.arange(100)}, batch_size=10)
        >>> with fastpipe.ray.serve(reader) as service:
        ...     int(sum(batch["id"].sum() for batch in service.connect()))
        4950
        >>> ray.shutdown()
    """
    return Service(reader, num_servers=num_servers, actor_options=actor_options, token=token, **options)


class Service:
    """Servers of a reader's batches, started by `fastpipe.ray.serve`. Several threads may use it."""

    def __init__(
        self,
        reader: Reader | Mapped | Mapping[str, Reader | Mapped],
        *,
        num_servers: int,
        actor_options: Mapping[str, Any] | None,
        token: str | None,
        **options: Any,
    ) -> None:
        _check(reader, options)
        wanted = _number_of_servers(num_servers)
        self.token = secrets.token_urlsafe(32) if token is None else token
        given = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": -1} | dict(actor_options or {})
        # Several threads, so that the actor answers other calls while `leave` waits.
        self._actor = ray.remote(ServerActor).options(**given | {"max_concurrency": 4})
        self._prefix = f"server-{secrets.token_hex(3)}"
        name = f"{self._prefix}-directory"
        # Run the directory on the node of this process: if the process ends, so do its actors.
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

    def connect(self, name: str = "default", **options: Any) -> Reader:
        """Connects to the servers, like `fastpipe.connect`, and returns a reader of their batches.

        The reader follows servers that are added or removed. It can be pickled for Ray's tasks and actors. In a process
        that isn't connected to Ray, such as a `DataLoader` worker, it uses only the servers that were known when it was
        pickled.

        Args:
            name: Name of the reader, if several are served. Defaults to "default".
            **options: Further arguments of `fastpipe.connect`, such as `rank` and `world_size`, or `timeout`.

        Raises:
            ServiceError: If the service is closed, no server could start, or none answers within `timeout`.
        """
        self._check_open()
        try:
            return connect(self._directory, name, token=self.token, **options)
        except ServiceError as error:
            status = self.status()
            if status.running or not status.pending:
                raise
            waiting = (
                f"{len(status.pending)} servers wait for Ray to start them: `ray status` shows the missing resources"
            )
            raise ServiceError(f"{error}; {waiting}") from error

    def scale(self, num_servers: int) -> None:
        """Changes the number of servers, and replaces failed servers.

        Servers that Ray hasn't started yet are removed first, then the newest. A removed server stops three seconds
        later, after its clients have switched to other servers.

        Args:
            num_servers: Number of servers, at least 1.

        Raises:
            ServiceError: If the service is closed.
            TypeError: If the number is not an integer.
            ValueError: If it is less than 1.
        """
        wanted = _number_of_servers(num_servers)
        with self._lock:
            self._check_open()
            status = self.status()
            kept = [server for server in self._servers if server.name not in status.failed]
            # The sort is stable, so the oldest running servers come first.
            kept = sorted(kept, key=lambda server: server.name not in status.running)[:wanted]
            removed = [server for server in self._servers if server not in kept]
            self._servers = kept
            if removed:
                self._directory_actor.forget.remote([server.name for server in removed])
            for server in removed:
                if server.name in status.running:
                    # If the process dies before that, Ray doesn't restart it, because the service has dropped the only
                    # handle.
                    server.actor.leave.remote(_LEAVE, _GRACE)
                else:
                    ray.kill(server.actor)
            while len(self._servers) < wanted:
                self._started += 1
                name = f"{self._prefix}-{self._started}"
                actor = self._actor.remote(name, *self._task)
                self._servers.append(_Server(name, actor, actor.url.remote()))

    def status(self) -> ServiceStatus:
        """Queries the state of each server. Waits at most two seconds for the answers."""
        return self._status(_ANSWER)

    @property
    def urls(self) -> list[str]:
        """URLs of the running servers, for `fastpipe.connect(urls, token=service.token)` outside of Ray."""
        return list(self.status().running.values())

    def close(self) -> None:
        """Stops all servers. Clients that need more batches retry for their `timeout`, and then raise `ServiceError`.

        Calling it twice has no effect.
        """
        with self._lock:
            if self._closed:
                return
            running = self.status().running
            self._closed = True
            servers, self._servers = self._servers, []
        if not ray.is_initialized():
            return
        # End the streams before the processes, so that clients need not wait for their timeout.
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
            raise ServiceError("this process is no longer connected to Ray: call ray.init() and serve the reader again")

    def _check_startable(self) -> None:
        """Raises `ServiceError` if all servers have failed permanently."""
        failed = self._status(0.0).failed
        if failed and len(failed) == len(self._servers):
            raise ServiceError("; ".join(f"the server {name} can't run: {why}" for name, why in failed.items()))

    def _status(self, seconds: float) -> ServiceStatus:
        running, pending, failed = dict[str, str](), list[str](), dict[str, str]()
        with self._lock:
            # Without this check, Ray would start a cluster.
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
                    # The server died, and Ray is restarting it.
                    pending.append(server.name)
                    server.url = None
        return ServiceStatus(running, tuple(pending), failed)


def _why(error: Exception) -> str:
    """Returns why an actor died: the error of its constructor, or the first line of Ray's message."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if "creation task" in lines[0] else lines[0]


def _number_of_servers(num_servers: Any) -> int:
    if isinstance(num_servers, (str, tuple)):
        raise TypeError(
            f"num_servers must be an integer; got {num_servers!r:.100}. The number of servers isn't scaled"
            " automatically: choose an initial number, and change it with scale(n)"
        )
    return at_least("num_servers", num_servers, 1)


def _check(readers: Reader | Mapped | Mapping[str, Reader | Mapped], options: Mapping[str, Any]) -> None:
    """Raises the errors that every server would raise at its start."""
    from fastpipe._arrow.schema import require_pyarrow

    require_pyarrow()
    from fastpipe.service._served import Served

    named = readers if isinstance(readers, Mapping) else {"default": readers}
    if not named:
        raise ValueError("no reader to serve")
    for name, reader in named.items():
        Served(name, reader)
    known = {"tls", "client_ca", "max_passes", "keep", "memory_limit", "max_requests"}
    hints = {
        "host": "Ray chooses where servers listen",
        "port": "Ray chooses where servers listen",
        "max_restarts": "Ray restarts servers without limit, or as set by actor_options={'max_restarts': 10}",
    }
    for name in options:
        if name not in known:
            hint = hints.get(name, "servers don't support it")
            raise TypeError(
                f"serve() got an unexpected argument {name!r}: {hint}; valid arguments are {', '.join(sorted(known))}"
            )
