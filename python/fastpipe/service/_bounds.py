"""What a server may take: how its memory is divided, and how many requests it answers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

__all__ = ["Admission", "BusyError", "Shares"]

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
