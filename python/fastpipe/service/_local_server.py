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
from collections import deque
from contextlib import suppress
from multiprocessing import spawn
from typing import Any

import numpy as np

from fastpipe._fastpipe import SharedArena, SharedSlabs, end_with_parent
from fastpipe.errors import UnsupportedError
from fastpipe.service._local_connection import ASK, BATCHES, INIT, Frame, read_frame, send_frame
from fastpipe.service._served import Served
from fastpipe.service._wire import Ticket, error_bytes

_NO_LIMIT = 2**63
# Bytes of free memory that are kept to be used again: what a program has ahead of it comes back at once.
_KEEP = 32 << 20
# Bytes of batches that are sent together, and seconds for which the first of them may wait for the others.
_TOGETHER, _PATIENCE = 1 << 20, 0.002
# Frames that the program hasn't seen yet.
_MOST_UNSEEN = 2


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

    def batches(self, connection: socket.socket, file: Any, frame: Frame) -> None:
        """Sends the batches that a ticket asks for."""
        unseen: deque[bytes] = deque()
        try:
            ticket = Ticket.read(frame.said)
            self.served.check(ticket.data)
            order = self.served.order(ticket)
            batches = self.served.begin(ticket, order, ticket.start, ticket.stop, self.memory)
            try:
                patience = 0.0
                while (lent := batches.next_lent(self.slabs, most=_TOGETHER, patience=patience)) is not None:
                    unseen.append(lent[1])
                    while len(unseen) > _MOST_UNSEEN:
                        if not file.read(1):
                            return
                        unseen.popleft()
                    send_frame(connection, Frame(b"b", *lent))
                    patience = _PATIENCE
                send_frame(connection, Frame(b".", b""))
            finally:
                batches.close()
        except ConnectionError:
            pass  # The program wants no more.
        except Exception as error:
            _tell(connection, error)
        finally:
            self._take_back(file, unseen)

    def _take_back(self, file: Any, unseen: deque[bytes]) -> None:
        """Waits for the program to end the request, and takes back what it hasn't borrowed."""
        # It may let go of the socket with frames in it, which is an error.
        with suppress(OSError):
            while file.read(1):
                unseen.popleft()
        if unseen:
            arena = SharedArena(self.file)
            for places in unseen:
                arena.borrow([(int(at), int(size)) for at, size in np.frombuffer(places, np.uint64).reshape(-1, 2)])


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
            local.batches(connection, file, frame)
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
