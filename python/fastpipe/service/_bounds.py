"""What a server may take: how its memory is divided, and how many requests it answers at once.

A client that takes nothing keeps its request open, and a batch in memory, for as long as it likes, until others can't
be answered for it. Then its connection is closed. It asks again when it wants more, as after any fault of the network.
One that takes a long message bit by bit, since its network is slow, keeps it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeVar

# Bytes of tickets that are being answered. Each is in memory four times, and larger yet when it is read: those of most
# clients have less than 1 KiB.
_TICKETS = 16 << 20


class BusyError(Exception):
    """A server does as much as it may; the client is to ask another one, or later."""


@dataclass(frozen=True, slots=True)
class Shares:
    """A server's memory, divided: what is kept for other clients, what passes may take, and what is being sent.

    A batch belongs to its pass until that hands it over, and takes half of its limit at most: a pass refuses to begin
    where the batch that is made and the one that waits don't fit. So no pass has more than twice what may be sent.

    Attributes:
        keep: bytes of batches that are kept.
        passes: bytes that all open passes may take together.
        sending: bytes of batches that were handed over, and aren't kept.
        each: bytes for a pass that has no limit of its own.
    """

    keep: int
    passes: int
    sending: int
    each: int

    @classmethod
    def of(cls, memory: int, keep: int, max_passes: int) -> Self:
        """Divides it.

        Args:
            memory: bytes for all.
            keep: bytes of these for batches that are kept.
            max_passes: that may be open at once.

        Raises:
            ValueError: if nothing is left for passes.
        """
        rest = memory - keep
        sending = rest // 4
        passes = rest - sending
        if passes // max_passes < 1:
            raise ValueError(
                f"the server's memory_limit is {memory} bytes, and keep is {keep} of these: nothing is left for"
                f" {max_passes} passes; raise memory_limit, or lower keep or max_passes"
            )
        return cls(keep, passes, sending, min(passes // max_passes, 2 * sending))

    def limit(self, own: int | None) -> int:
        """Bytes for a pass of a reader that has this limit, or none."""
        return self.each if own is None else min(own, 2 * self.sending)


class Admission:
    """Lets in as many requests as a server answers at once.

    Args:
        most: how many.
        tickets: bytes that their tickets may have together.
        make_room: called when there are too many.
    """

    def __init__(self, most: int, tickets: int = _TICKETS, make_room: Callable[[], None] = lambda: None) -> None:
        self._most, self._tickets, self._make_room = most, tickets, make_room
        self._open = self._bytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def request(self, size: int) -> Iterator[None]:
        """One is being answered, whose ticket has this many bytes.

        Raises:
            BusyError: if there are too many.
        """
        with self._lock:
            # One alone is always let in.
            if self._open >= self._most or (self._open and self._bytes + size > self._tickets):
                self._make_room()
                raise BusyError(
                    f"this server is busy: it answers {self._open} requests, whose tickets have {self._bytes} bytes, of"
                    f" {self._most} and {self._tickets} at most; ask another one, or later"
                )
            self._open += 1
            self._bytes += size
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                self._bytes -= size


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
