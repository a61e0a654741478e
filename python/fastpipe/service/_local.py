"""A server in a process of this machine, whose batches lie in memory in common."""

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
from types import TracebackType
from typing import Any, Literal, SupportsIndex

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._fastpipe import SharedArena
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.reader import Reader
from fastpipe.errors import FastpipeError, ServiceError, UnsupportedError
from fastpipe.service._connect import Asked, check_timeout
from fastpipe.service._directory import Fixed, Servers
from fastpipe.service._local_connection import INIT, SCHEME, Frame, Link, checked, read_frame, send_frame
from fastpipe.service._remote_data import Description, RemoteData, check_fallback
from fastpipe.service._settings import Options

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
                    if files:
                        link.map(SharedArena(files[0]))
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


class LocalService:
    """Makes the batches of a reader in another process of this machine, and hands them over without a copy.

    Linux alone has what it needs; the extra `arrow` is needed, too.

    What decoding costs, its threads and its Python (sources and functions of yours) are out of the way of the process
    that trains. Batches lie in memory that both processes have mapped; it is used again when the last array over them
    dies. Nothing is left behind when either process ends, however that happens: the memory has no name.

    The reader is pickled and made anew in the other process; a script whose own functions or classes it needs has to
    guard what it runs by `if __name__ == "__main__":`, as for `multiprocessing`.

    Args:
        reader: what is read there.
        rank: of the reader here; with `world_size`. By default as `reader` has it, and so for what follows.
        world_size: number of ranks.
        seed: another one than the reader's.
        epochs: epochs a pass; None for passes without end; `"served"` for as many as the reader has.
        prefetch: batches to have ahead here; None for as many as have 8 MiB, 2 to 256.
        memory_limit: bytes that these may take, or a size such as `"512MB"`; None for no limit. What the server has
            ahead is limited by the reader's own arguments.
        progress: whether passes show a progress bar (extra `progress`).
        timeout: seconds within which the server must start, and send something when it was asked for batches.
        fallback: whether this process makes the batches when the server has ended, instead of a `ServiceError`.

    Raises:
        ImportError: if pyarrow isn't installed.
        UnsupportedError: if the reader can't be served, or the system isn't Linux.
        ValueError: if an argument is out of range.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
        >>> with fastpipe.LocalService(reader) as remote:
        ...     sum(len(batch["label"]) for batch in remote)
        6144
    """

    def __init__(
        self,
        reader: Reader,
        *,
        rank: SupportsIndex | None = None,
        world_size: SupportsIndex | None = None,
        seed: SupportsIndex | None = None,
        epochs: SupportsIndex | Literal["served"] | None = "served",
        prefetch: SupportsIndex | None = None,
        memory_limit: SupportsIndex | str | None = None,
        progress: bool = False,
        timeout: float = 30.0,
        fallback: bool = False,
    ) -> None:
        if sys.platform != "linux":
            raise UnsupportedError("LocalService shares memory by means of Linux; use reader.serve() on other systems")
        # In which the features are told.
        require_pyarrow()
        from fastpipe.service._served import Served

        self._asked = Asked(rank, world_size, seed, epochs, progress)
        self._running = PassOptions.checked(num_threads=None, prefetch=prefetch, memory_limit=memory_limit)
        self._timeout = check_timeout(timeout)
        # Says what can't be served before a process starts.
        Served("default", reader)
        self._reader, self._fallback = reader, fallback
        self._process: LocalProcess | None = None
        self._closed = False

    def start(self) -> Reader:
        """Starts the server's process.

        Returns:
            The reader of its batches.

        Raises:
            ServiceError: if it has been started already, or doesn't start.
            FastpipeError: what goes wrong there.
            TypeError: if the reader can't be pickled.
        """
        if self._process is not None or self._closed:
            raise ServiceError("the local service has been started; make another one")
        process = self._process = LocalProcess(self._reader, self._timeout)
        try:
            return process.reader(self._asked, self._running, self._timeout, self._reader if self._fallback else None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the server's process. Batches that were handed over stay as they are. Twice does no harm."""
        self._closed = True
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> Reader:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # What failed to be made has no process.
        if getattr(self, "_process", None) is not None:
            self.close()

    def __repr__(self) -> str:
        process = self._process
        state = "closed" if self._closed else "not started" if process is None else f"pid {process.pid}"
        return f"<fastpipe.LocalService of {self._reader!r}: {state}>"
