"""A connection to one server."""

from __future__ import annotations

from typing import Any, Protocol

from fastpipe._fastpipe import ServiceConnection
from fastpipe.errors import ServiceError
from fastpipe.service._settings import Options
from fastpipe.service._wire import DamagedError, as_error, intact, sealed

# Actions that clients other than fastpipe request, too. Their answers lack a checksum.
_PLAIN = ("health", "metrics")


class Connection(Protocol):
    """A connection to a server. Several threads may use it.

    Attributes:
        url: URL of the server.
        handle: The connection in Rust, over which batches arrive.
    """

    url: str

    @property
    def handle(self) -> ServiceConnection:
        """The connection in Rust, over which batches arrive.

        Raises:
            ServiceError: If this process can't use it.
        """

    def ask(self, action: str, request: dict[str, Any], seconds: float) -> list[bytes]:
        """Asks the server a question and returns the parts of its answer.

        Raises:
            FastpipeError: If the server reports an error.
            ServiceError: If the server doesn't answer in time.
        """

    def passes(self, error: ServiceError) -> bool:
        """Whether a server that failed with this error may answer a later request."""


class NetworkConnection:
    """A connection to a server over the network.

    The first request opens the connection. A forked child opens its own.

    Args:
        url: `grpc://host:port` or `grpc+tls://host:port`.
        options: Options of the connection.

    Raises:
        ServiceError: If the certificates can't be used.
    """

    def __init__(self, url: str, options: Options) -> None:
        self.url = url
        try:
            self.handle = ServiceConnection(url, options.token, options.ca, options.certificate)
        except ValueError as error:
            raise ServiceError(f"{url}: {error}") from error

    def ask(self, action: str, request: dict[str, Any], seconds: float) -> list[bytes]:
        """Asks the server a question and returns the parts of its answer.

        Raises:
            FastpipeError: If the server reports an error.
            ServiceError: If the server doesn't answer in time.
        """
        try:
            parts = self.handle.ask(action, sealed(request), seconds)
            if action not in _PLAIN:
                parts = intact(parts)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ServiceError(f"{self.url}: {error}") from error
        told = as_error(parts[0], self.url) if parts else None
        if told is not None:
            raise told
        return parts

    def passes(self, error: ServiceError) -> bool:
        """Whether a server that failed with this error may answer a later request."""
        return isinstance(error.__cause__, (ConnectionError, DamagedError))
