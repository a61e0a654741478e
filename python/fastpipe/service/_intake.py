"""What clients may send to a server that no request has begun with.

gRPC receives a request whole, up to 2 GiB of it, before it calls the server, and Arrow's server in Python can't set a
limit. So connections that sent much more than requests have begun with are closed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable

from fastpipe._fastpipe import Intake as _NativeIntake
from fastpipe.service._logs import say

# Bytes that one connection, and all of them, may have sent without a request that they belong to. The largest ticket
# has 1 MiB; what is larger than that, and not much, is refused by name. What is received is copied three times before
# Python has it.
_EACH, _TOGETHER = 2 << 20, 32 << 20
_TICK = 1.0


class Arrived:
    """A request that has arrived. Its bytes count as those of none until it has begun, or nobody has it any more.

    So that many large ones are counted for as long as they wait for their turn, and until they have been refused.

    Args:
        begun: tells that it has.
    """

    def __init__(self, begun: Callable[[], None]) -> None:
        self._begun: Callable[[], None] | None = begun

    def begun(self) -> None:
        """It has begun. Twice does no harm."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()

    def __del__(self) -> None:
        self.begun()


class Intake:
    """Looks at the connections of all servers of this process, for as long as there are any, and tells what was closed.

    Only Linux counts what a connection has received; elsewhere nothing is closed.

    Args:
        each: bytes that a connection may be ahead of its requests.
        together: bytes that all connections may be.
    """

    def __init__(self, each: int = _EACH, together: int = _TOGETHER) -> None:
        self._limits = each, together
        self._forget()
        if hasattr(os, "register_at_fork"):
            # A child has its parent's connections, and nothing to say of them.
            os.register_at_fork(after_in_child=self._forget)
        # Its thread must have ended when Python does.
        atexit.register(self._end)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._intake = _NativeIntake(*self._limits)
        self._watched: dict[int, list[Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None

    def watch(self, port: int, closed: Callable[[], None]) -> None:
        """Looks at connections to this port from now on, and calls `closed` for each that it closes."""
        if sys.platform != "linux":
            return
        with self._lock:
            self._intake.watch(port)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fastpipe-closed", daemon=True)
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None
                    self._intake.leave(port)
                    raise
            self._watched.setdefault(port, []).append(closed)

    def leave(self, port: int, closed: Callable[[], None]) -> None:
        """Looks at it no more. Twice does no harm."""
        with self._lock:
            callbacks = self._watched.get(port, [])
            if closed not in callbacks:
                return
            callbacks.remove(closed)
            if not callbacks:
                del self._watched[port]
            self._intake.leave(port)
            if self._watched or self._thread is None:
                return
            # It ends by itself, without this lock.
            thread, self._thread = self._thread, None
        thread.join()

    def _end(self) -> None:
        for port, callbacks in list(self._watched.items()):
            for closed in list(callbacks):
                self.leave(port, closed)

    def begun(self, peer: str, size: int) -> None:
        """A request of this peer has begun, whose body has this size."""
        self._intake.begun(peer, size)

    def close_idle(self, peer: str) -> None:
        """Closes the connection of this peer soon, if it takes nothing. Others wait for that."""
        self._intake.close_idle(peer)

    def arrived(self, peer: str, size: int) -> Arrived:
        """A request of this peer has arrived, whose body has this size."""
        return Arrived(lambda: self.begun(peer, size))

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me:
            for peer, port, ahead in self._intake.closed(_TICK):
                if ahead is None:
                    text = "%(peer)s: closed its connection, by which it took nothing while others waited"
                    say(logging.WARNING, "closed", text, peer=peer)
                else:
                    text = "%(peer)s: closed its connection, which sent %(bytes)d bytes that belong to no request"
                    say(logging.WARNING, "closed", text, peer=peer, bytes=ahead)
                with self._lock:
                    callbacks = list(self._watched.get(port, ()))
                for closed in callbacks:
                    closed()


INTAKE = Intake()
