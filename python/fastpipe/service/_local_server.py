"""The process of a local server: makes batches in memory that its program has mapped."""

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
# Bytes of free memory that are kept to be used again: what a program has ahead of it comes back at once.
_KEEP = 32 << 20


class _Local:
    """What a local server has.

    Args:
        reader: to serve.
    """

    def __init__(self, reader: Any) -> None:
        self.served = Served("default", reader)
        self.slabs = SharedSlabs(_NO_LIMIT)
        file = self.slabs.file
        if file is None:
            raise UnsupportedError("LocalService shares memory by means of Linux; use reader.serve() on other systems")
        self.file = file
        self.slabs.keep(_KEEP)
        self.memory = self.served.shared_memory(self.slabs)

    def ask(self, frame: Frame) -> bytes:
        """The answer to whether it is there, or to where a row comes from."""
        request = json.loads(frame.said)
        if request["action"] == "health":
            return b'{"serving": true}'
        self.served.check(request["data"])
        return json.dumps(self.served.place(int(request["unit"]), int(request["record"]))).encode()

    def batches(self, connection: socket.socket, frame: Frame) -> None:
        """Sends the batches that a ticket asks for."""
        request = LocalRequest(self.slabs, connection.fileno())
        try:
            ticket = Ticket.read(frame.said)
            self.served.check(ticket.data)
            order = self.served.order(ticket)
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
    # Somebody who is there no more needn't hear of it.
    with suppress(OSError):
        send_frame(connection, Frame(b"e", error_bytes(error)))


def _answer(local: _Local, kind: bytes, connection: socket.socket) -> None:
    """Answers a request, in a thread of its own."""
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
    """Gets the reader, and tells of it; None if that fails, which the program is told."""
    with connection, connection.makefile("rb") as file:
        try:
            prepared = read_frame(file)
            pickled = read_frame(file)
            if prepared is None or pickled is None:
                return None
            # As processes that multiprocessing spawns: paths, arguments, and the main module if the reader needs it.
            spawn.prepare(pickle.loads(prepared.said))
            local = _Local(pickle.loads(pickled.said))
            description = json.dumps(local.served.description()).encode()
            told = Frame(b"r", description, local.served.unit_rows().tobytes())
        except Exception as error:
            with suppress(OSError):
                connection.send(b"e")
            _tell(connection, error)
            return None
        # A program that has ended doesn't read this; then this process ends too.
        with suppress(OSError):
            socket.send_fds(connection, [b"f"], [local.file])
            send_frame(connection, told)
        return local


def _end_with(parent: int) -> None:
    """Ends this process when its program does, which may leave the socket to others that it has forked."""
    try:
        program = os.pidfd_open(parent)
    except OSError:
        os._exit(0)
    if os.getppid() != parent:
        os._exit(0)
    select.select([program], [], [])
    os._exit(0)


def main(number: int, parent: int, by_main_thread: bool) -> None:
    """What the process does, until its program closes the socket of that number, or ends.

    Args:
        number: of the file of the socket.
        parent: the program's process.
        by_main_thread: whether that one's main thread has started this process: another one may end before it.
    """
    # Ctrl-C is for the program.
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
    # Its threads may be in the middle of a batch that nobody wants.
    os._exit(0)
