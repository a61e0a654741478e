"""The list of servers: a fixed list of URLs, or a directory whose list changes while passes run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from fastpipe._fastpipe import ServiceConnection
from fastpipe.service._connection import Connection, NetworkConnection
from fastpipe.service._local_connection import SCHEME, LocalConnection
from fastpipe.service._settings import Directory, Options

_SCHEMES = ("grpc", "grpc+tcp", "grpc+tls")
# Seconds between two questions to a directory.
_PAUSE = 1.0


class Fixed:
    """A directory that always lists the same servers.

    Args:
        urls: URLs of the servers.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    def urls(self) -> Sequence[str]:
        """Returns all URLs."""
        return self._urls


def checked_url(url: Any) -> str:
    """Returns the URL of a server.

    Raises:
        ValueError: If the URL is invalid.
    """
    try:
        found = urlsplit(url)
        whole = found.scheme in _SCHEMES and found.hostname is not None and found.port is not None
    except (ValueError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"a server's URL must be grpc://host:port or grpc+tls://host:port; got {url!r:.200}")
    return str(url)


def _connection(url: str, options: Options) -> Connection:
    return LocalConnection(url) if url.startswith(SCHEME) else NetworkConnection(url, options)


class Servers:
    """Connections to the servers that a directory lists. Pickling keeps the last list.

    Args:
        directory: Lists the servers.
        options: Options of the connections.
        known: URLs that the directory has already listed.
        absent: Whether no server was available the last time. Passes set this attribute.
    """

    def __init__(
        self, directory: Directory, options: Options, known: Sequence[str] = (), *, absent: bool = False
    ) -> None:
        self.absent = absent
        self._directory, self._options = directory, options
        self._changes = not isinstance(directory, Fixed)
        self._lock = threading.Lock()
        self._connections = {url: _connection(url, options) for url in dict.fromkeys(known)}
        self._asked = 0.0
        self._asking = False
        self._error: Exception | None = None

    @property
    def options(self) -> Options:
        """Options of the connections."""
        return self._options

    def known(self) -> list[Connection]:
        """Connections to the servers of the last list. Never waits: if the list is old, a thread asks for a new one."""
        with self._lock:
            ask = self._changes and not self._asking and time.monotonic() >= self._asked + _PAUSE
            self._asking |= ask
            found = list(self._connections.values())
        if ask:
            threading.Thread(target=self._ask, name="fastpipe-directory", daemon=True).start()
        return found

    def listed(self) -> list[ServiceConnection] | None:
        """Rust's connections to the servers of the last list; None if the list never changes."""
        return [connection.handle for connection in self.known()] if self._changes else None

    def now_listed(self) -> list[Connection]:
        """Asks for a new list. Returns connections to its servers.

        Raises:
            Exception: Any error of the directory.
            ValueError: If an entry of the list is not a URL.
        """
        urls = dict.fromkeys(checked_url(url) for url in self._directory.urls())
        with self._lock:
            known = self._connections
            self._connections = {url: known.get(url) or _connection(url, self._options) for url in urls}
            return list(self._connections.values())

    def _ask(self) -> None:
        error: Exception | None = None
        try:
            self.now_listed()
        except Exception as raised:  # The directory is the user's code. The last list stays valid.
            error = raised
        with self._lock:
            self._error = error
            self._asked = time.monotonic()
            self._asking = False

    def why(self) -> str:
        """Explains why the list is empty, or returns the directory's error."""
        with self._lock:
            error, listed = self._error, bool(self._connections)
        if error is not None:
            return f"the directory of servers: {str(error) or type(error).__name__}"
        return "" if listed else "the directory lists no server"

    @property
    def changes(self) -> bool:
        """Whether the list of servers may change."""
        return self._changes

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            return partial(Servers, absent=self.absent), (self._directory, self._options, list(self._connections))

    def __str__(self) -> str:
        with self._lock:
            return ", ".join(self._connections) or "no servers"
