"""Messages that clients don't take, while others wait for the room that these have.

A client that takes nothing keeps its request open, and a batch in memory, for as long as it likes, until others can't
be answered for it. Then its connection is closed. It asks again when it wants more, as after any fault of the network.
One that takes a long message bit by bit, since its network is slow, keeps it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["Unread"]

_T = TypeVar("_T")

# Seconds after which a client counts as one that takes nothing. Requests wait longer than that before they are refused.
_LONG = 3.0


class Unread:
    """What was handed to the transport, and when, as long as it hasn't asked for more.

    Args:
        close: closes the connection of a client, if it doesn't take a part now and then.
    """

    def __init__(self, close: Callable[[str], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._since: dict[object, tuple[float, str]] = {}

    def watched(self, client: str, messages: Iterator[_T]) -> Iterator[_T]:
        """The same messages, which are for a client."""
        request = object()
        for message in messages:
            with self._lock:
                self._since[request] = time.monotonic(), client
            try:
                yield message
            finally:
                with self._lock:
                    self._since.pop(request, None)

    def make_room(self) -> None:
        """Others wait: closes the connection of the client that has taken nothing for longest, if that is long."""
        with self._lock:
            request = min(self._since, key=lambda request: self._since[request][0], default=None)
            now = time.monotonic()
            if request is None or now < self._since[request][0] + _LONG:
                return
            # If it stays, others come before it.
            client = self._since[request][1]
            self._since[request] = now, client
        self._close(client)
