"""What runs in Ray's processes for `fastpipe.ray.serve`: servers, and the directory that tells clients of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from fastpipe._passes import passes_of
from fastpipe.errors import ServiceError
from fastpipe.ray._arguments import take_given_processors
from fastpipe.reader import Reader

if TYPE_CHECKING:
    from fastpipe.service import Server

__all__ = ["NAMESPACE", "DirectoryActor", "RayDirectory", "ServerActor"]

NAMESPACE = "fastpipe"
"""Of the names of directories: so that other jobs of the cluster find them, too."""

# Seconds in which the directory has to answer; clients ask in a thread of their own.
_TIMEOUT = 10.0


class ServerActor:
    """A server, in a process of Ray's. Its methods are called from different threads."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._stopped = threading.Event()

    def start(self, readers: Reader | Mapping[str, Reader], token: str, options: dict[str, Any]) -> str:
        """Serves readers at this node's address, and returns the URL."""
        from fastpipe.service import Server

        for reader in readers.values() if isinstance(readers, Mapping) else [readers]:
            take_given_processors(passes_of(reader))
        self._server = Server(readers, host=ray.util.get_node_ip_address(), port=0, token=token, **options)
        return self._server.url

    def stats(self) -> dict[str, float]:
        """What the server has done."""
        assert self._server is not None
        return self._server.stats()

    def wait(self) -> None:
        """Returns when the server was stopped: whoever waits for it sees the process die, too."""
        self._stopped.wait()

    def stop(self, grace: float) -> None:
        """Ends all streams, so that clients go on elsewhere."""
        try:
            if self._server is not None:
                self._server.stop(grace)
        finally:
            self._stopped.set()


class DirectoryActor:
    """Knows the servers that there are. The driver tells it again and again, so it may be restarted."""

    def __init__(self) -> None:
        self._urls: list[str] = []
        self._why = ""

    def tell(self, urls: list[str], why: str) -> None:
        """Which servers there are; or why there will be none any more."""
        self._urls, self._why = urls, why

    def urls(self) -> tuple[list[str], str]:
        """What it was told last."""
        return self._urls, self._why


class RayDirectory:
    """A `fastpipe.service.Directory` of the servers that Ray runs. It can be pickled, and used where Ray is connected.

    Args:
        name: of its actor.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: Any = None

    def urls(self) -> Sequence[str]:
        """The servers that run.

        Raises:
            ServiceError: if that can't be known, or there won't be any.
        """
        # Ray would start a cluster of its own.
        if not ray.is_initialized():
            raise ServiceError("this process isn't connected to Ray, which knows the servers that come and go")
        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._name, NAMESPACE)
            urls, why = ray.get(self._actor.urls.remote(), timeout=_TIMEOUT)
        except (ValueError, ray.exceptions.ActorDiedError):
            self._actor = None
            raise ServiceError("the service was closed, or the process that had started it has ended") from None
        except ray.exceptions.RayError as error:
            self._actor = None
            raise ServiceError(f"Ray doesn't say which servers there are: {type(error).__name__}: {error}") from error
        if why and not urls:
            raise ServiceError(why)
        return list(urls)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayDirectory, (self._name,)
