"""What runs in Ray's processes for `fastpipe.ray.serve`: servers, and the directory that lists them for clients.

Ray starts a server's process again when it dies. The server then listens at another port, and perhaps on another node,
so each server registers its URL at the directory, again every second. Ray may also restart the directory, which then
knows no server until the next registration.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from fastpipe._reader.passes import passes_of
from fastpipe._reader.reader import Reader
from fastpipe.errors import ServiceError
from fastpipe.ray._arguments import take_given_processors

__all__ = ["NAMESPACE", "DirectoryActor", "RayDirectory", "ServerActor"]

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
