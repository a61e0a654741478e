"""Starts the process of a local server."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
from multiprocessing import spawn
from typing import Any

from fastpipe._fastpipe import SharedArena
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.reader import Reader
from fastpipe.errors import FastpipeError, ServiceError
from fastpipe.service._connect import Asked
from fastpipe.service._directory import Fixed, Servers
from fastpipe.service._local_connection import SCHEME, Link, checked
from fastpipe.service._local_wire import INIT, Frame, read_frame, send_frame
from fastpipe.service._remote_data import Description, RemoteData, check_fallback
from fastpipe.service._settings import Options

__all__ = ["LocalProcess"]

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from fastpipe.service._local_server import main
main(*map(int, sys.argv[2:]))
"""
# Seconds that the server has to end by itself.
_GRACE = 2.0


class LocalProcess:
    """The process of a local server, and this one's way to it.

    Args:
        reader: what it serves.
        timeout: seconds within which it must start.

    Raises:
        FastpipeError: what goes wrong there.
        ServiceError: if it doesn't start.
        TypeError: if the reader can't be pickled.
    """

    def __init__(self, reader: Reader, timeout: float) -> None:
        prepared, pickled = _pickled(reader)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        by_main_thread = threading.current_thread() is threading.main_thread()
        with theirs:
            try:
                numbers = [theirs.fileno(), os.getpid(), int(by_main_thread)]
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *map(str, numbers)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        self._started_by = os.getpid()
        self._link = Link(f"{SCHEME}{secrets.token_hex(8)}", ours, self._process.pid)
        try:
            self._description = self._introduced(prepared, pickled, timeout)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def reader(self, asked: Asked, running: PassOptions, timeout: float, fallback: Reader | None) -> Reader:
        """The reader of its batches.

        Raises:
            FastpipeError: if the fallback can't be one.
            ValueError: if what is asked for is out of range.
        """
        if fallback is not None:
            check_fallback(fallback, self._description)
        # Where it has ended, nobody comes in its place.
        url, options = self._link.url, Options(timeout=timeout)
        data = RemoteData("default", self._description, Servers(Fixed([url]), options, [url]), 0.0, fallback)
        return asked.reader(data, self._description, running)

    def _introduced(self, prepared: bytes, pickled: bytes, timeout: float) -> Description:
        """Hands the reader over, and maps the memory."""
        link = self._link
        with link.request(INIT) as connection:
            connection.settimeout(timeout)
            try:
                send_frame(connection, Frame(b"r", prepared))
                send_frame(connection, Frame(b"r", pickled))
                # By itself: whoever reads on in the stream loses the file that comes with this byte.
                _, files, _, _ = socket.recv_fds(connection, 1, 1)
                try:
                    link.memory = SharedArena(files[0]) if files else None
                finally:
                    for file in files:
                        os.close(file)
                with connection.makefile("rb") as rest:
                    frame = checked(read_frame(rest), link)
            except FastpipeError:
                raise
            except TimeoutError as error:
                raise ServiceError(f"the local server hasn't started within {timeout:g} s") from error
            except OSError as error:
                raise link.gone() from error
        return Description(frame.said, frame.places, "the local server")

    def close(self) -> None:
        """Ends the process. Batches that were handed over stay as they are. Twice does no harm."""
        self._link.close()
        if self._started_by != os.getpid():
            return
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _pickled(reader: Any) -> tuple[bytes, bytes]:
    """How the process is to be prepared, and the reader."""
    try:
        pickled = pickle.dumps(reader, pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(f"a LocalService needs a reader that can be pickled: {error}") from error
    prepared: dict[str, Any] = spawn.get_preparation_data("fastpipe")
    del prepared["authkey"]
    if b"__main__" not in pickled:
        # Then a script needs no guard.
        prepared = {name: value for name, value in prepared.items() if not name.startswith("init_main")}
    return pickle.dumps(prepared), pickled
