"""The process of a local server. It prepares batches in memory that the program maps."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from multiprocessing import spawn
from typing import Any

from fastpipe._fastpipe import LocalRequest, SharedSlabs, end_with_parent
from fastpipe.errors import UnsupportedError
from fastpipe.service._local_connection import ASK, BATCHES, INIT, Frame, read_frame, send_frame
from fastpipe.service._served import Served
from fastpipe.service._wire import Ticket, error_bytes

_NO_LIMIT = 2**63
# Bytes of free memory that are kept for reuse, since the batches that a program prefetches are soon returned.
_KEEP = 32 << 20


class _Local:
    """A local server: the served reader and its shared memory.

    Args:
        reader: Reader to serve.
    """

    def __init__(self, reader: Any) -> None:
        self.served = Served("default", reader)
        self.slabs = SharedSlabs(_NO_LIMIT)
        file = self.slabs.file
        if file is None:
            raise UnsupportedError("LocalService requires Linux; use reader.serve() on other systems")
        self.file = file
        self.slabs.keep(_KEEP)
        self.memory = self.served.shared_memory(self.slabs)

    def ask(self, frame: Frame) -> bytes:
        """Answers a health check, or a question for the origin of a row."""
        request = json.loads(frame.said)
        if request["action"] == "health":
            return b'{"serving": true}'
        return json.dumps(self.served.locate(request)).encode()

    def batches(self, connection: socket.socket, frame: Frame) -> None:
        """Sends the requested batches."""
        request = LocalRequest(self.slabs, connection.fileno())
        try:
            ticket = Ticket.read(frame.said)
            self.served.check(ticket.data)
            order = self.served.order(ticket.order)
            batches = self.served.begin(ticket, order, ticket.start, ticket.stop, self.memory)
            try:
                batches.lend(request)
            finally:
                batches.close()
        except Exception as error:
            _tell(connection, error)
        finally:
            request.close()


def _tell(connection: socket.socket, error: Exception) -> None:
    # If the client is gone, the error is dropped.
    with suppress(OSError):
        send_frame(connection, Frame(b"e", error_bytes(error)))


def _answer(local: _Local, kind: bytes, connection: socket.socket) -> None:
    """Answers a request in a separate thread."""
    with connection, connection.makefile("rb") as file:
        frame = read_frame(file)
        if frame is None:
            return
        if kind == BATCHES:
            local.batches(connection, frame)
        elif kind == ASK:
            try:
                send_frame(connection, Frame(b"r", local.ask(frame)))
            except Exception as error:
                _tell(connection, error)


def _begun(connection: socket.socket) -> _Local | None:
    """Receives the reader, and sends its description. Returns None after a failure, which the program is sent."""
    with connection, connection.makefile("rb") as file:
        try:
            prepared = read_frame(file)
            pickled = read_frame(file)
            if prepared is None or pickled is None:
                return None
            # As multiprocessing prepares spawned processes: paths, arguments, and the main module if it is needed.
            spawn.prepare(pickle.loads(prepared.said))
            local = _Local(pickle.loads(pickled.said))
            description = json.dumps(local.served.description()).encode()
            told = Frame(b"r", description, local.served.unit_rows().tobytes())
        except Exception as error:
            with suppress(OSError):
                connection.send(b"e")
            _tell(connection, error)
            return None
        # If the program has ended, the sends fail. This process then ends as well.
        with suppress(OSError):
            socket.send_fds(connection, [b"f"], [local.file])
            send_frame(connection, told)
        return local


def _end_with(parent: int) -> None:
    """Ends this process when its program ends. The socket may stay open in other processes that the program forked."""
    try:
        program = os.pidfd_open(parent)
    except OSError:
        os._exit(0)
    if os.getppid() != parent:
        os._exit(0)
    select.select([program], [], [])
    os._exit(0)


def main(number: int, parent: int, by_main_thread: bool) -> None:
    """Serves requests until the program closes the socket or ends.

    Args:
        number: File descriptor of the socket.
        parent: Process ID of the program.
        by_main_thread: Whether the program's main thread started this process. Another thread may end earlier.
    """
    # Ctrl-C interrupts the program only.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if by_main_thread and not end_with_parent(parent):
        return
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    local: _Local | None = None
    with socket.socket(fileno=number) as control:
        while True:
            kind, files, _, _ = socket.recv_fds(control, 1, 1)
            if not kind:
                break
            connection = socket.socket(fileno=files[0])
            if kind == INIT:
                local = _begun(connection)
            if local is None:
                break
            if kind != INIT:
                threading.Thread(target=_answer, args=(local, kind, connection), daemon=True).start()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still be preparing batches that the program doesn't need any more.
    os._exit(0)
