"""A server in another process of the same machine that passes its batches through shared memory."""

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
from typing import Any, Literal, Self

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._fastpipe import SharedArena
from fastpipe._reader.mapped import Mapped
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
# Seconds that the server has to exit by itself before it is killed.
_GRACE = 2.0


class LocalProcess:
    """The process of a local server and the connection to it.

    Args:
        reader: Reader to serve.
        timeout: Maximum time in seconds that the process may take to start.

    Raises:
        FastpipeError: If the server reports an error.
        ServiceError: If the process doesn't start in time.
        TypeError: If the reader can't be pickled.
    """

    def __init__(self, reader: Reader | Mapped, timeout: float) -> None:
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
        """The process ID."""
        return self._process.pid

    def reader(self, asked: Asked, running: PassOptions, timeout: float, fallback: Reader | Mapped | None) -> Reader:
        """Returns a reader of the server's batches.

        Raises:
            FastpipeError: If the fallback doesn't match the served reader.
            ValueError: If an option is out of range.
        """
        if fallback is not None:
            check_fallback(fallback, self._description)
        # A server that has ended is never replaced, so waiting for another one is pointless.
        url, options = self._link.url, Options(timeout=timeout)
        data = RemoteData("default", self._description, Servers(Fixed([url]), options, [url]), 0.0, fallback)
        return asked.reader(data, self._description, running)

    def _introduced(self, prepared: bytes, pickled: bytes, timeout: float) -> Description:
        """Sends the reader to the server and maps the server's memory. Returns the server's description."""
        link = self._link
        with link.request(INIT) as connection:
            connection.settimeout(timeout)
            try:
                send_frame(connection, Frame(b"r", prepared))
                send_frame(connection, Frame(b"r", pickled))
                # A separate call: buffered reads of the stream would lose the file that comes with this byte.
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
                raise ServiceError(f"the local server did not start within {timeout:g} seconds") from error
            except OSError as error:
                raise link.gone() from error
        return Description(frame.said, frame.places, "the local server")

    def close(self) -> None:
        """Ends the process. Batches that were already delivered stay valid. Closing twice has no effect."""
        self._link.close()
        if self._started_by != os.getpid():
            return
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _pickled(reader: Any) -> tuple[bytes, bytes]:
    """Returns the pickled preparation data of the process and the pickled reader."""
    try:
        pickled = pickle.dumps(reader, pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(f"a LocalService needs a reader that can be pickled: {error}") from error
    prepared: dict[str, Any] = spawn.get_preparation_data("fastpipe")
    del prepared["authkey"]
    if b"__main__" not in pickled:
        # The child doesn't import the main module, so a script needs no `__main__` guard.
        prepared = {name: value for name, value in prepared.items() if not name.startswith("init_main")}
    return pickle.dumps(prepared), pickled


class LocalService:
    """Prepares the batches of a reader in another process of this machine and passes them without a copy.

    Requires Linux and the extra `arrow`.

    Decoding runs outside of the training process: its CPU time, its threads, and its Python code (custom sources and
    functions). Both processes map the memory of the batches. It is reused when the last array over a batch is released.
    The memory has no name in the file system, so it is freed even if either process crashes.

    The reader is pickled and recreated in the other process. If it needs functions or classes of the main script, guard
    the script with `if __name__ == "__main__":`, as for `multiprocessing`.

    Args:
        reader: Reader to run in the other process.
        rank: Rank of the service's `reader`, 0 to `world_size` - 1. Pass it together with `world_size`.
        world_size: Number of ranks. Defaults to the rank and world size of `reader`.
        seed: Seed of the shuffle, 0 to 2^64 - 1. Defaults to the seed of `reader`.
        epochs: Number of epochs in a pass; None for endless passes. Defaults to `"served"`, the number of `reader`.
        prefetch: Number of batches to receive in advance. Defaults to about 8 MiB of batches, 2 to 256.
        memory_limit: Maximum size of these batches in bytes, or as text such as `"512MB"`; None for no limit. The
            server's own prefetching is limited by the arguments of `reader`.
        progress: Whether passes show a progress bar (extra `progress`).
        timeout: Maximum time in seconds to wait for the server to start, or for more data of requested batches.
        fallback: Whether this process prepares the batches if the server has ended. Otherwise passes raise
            `ServiceError`.

    Raises:
        ImportError: If pyarrow isn't installed.
        UnsupportedError: If the reader can't be served, or the system isn't Linux.
        ValueError: If an argument is out of range.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
        >>> with fastpipe.service.LocalService(reader) as service:
        ...     sum(len(batch["label"]) for batch in service.reader)
        6144
    """

    def __init__(
        self,
        reader: Reader | Mapped,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        epochs: int | Literal["served"] | None = "served",
        prefetch: int | None = None,
        memory_limit: int | str | None = None,
        progress: bool = False,
        timeout: float = 30.0,
        fallback: bool = False,
    ) -> None:
        if sys.platform != "linux":
            raise UnsupportedError("LocalService requires Linux; use reader.serve() on other systems")
        # The features are described as an Arrow schema.
        require_pyarrow()
        from fastpipe.service._served import Served

        self._asked = Asked(rank, world_size, seed, epochs, progress)
        self._running = PassOptions.checked(num_threads=None, prefetch=prefetch, memory_limit=memory_limit)
        self._timeout = check_timeout(timeout)
        # Raises an error for a reader that can't be served before a process starts.
        Served("default", reader)
        self._served, self._fallback = reader, fallback
        self._process: LocalProcess | None = None
        self._remote: Reader | None = None
        self._closed = False

    def start(self) -> Self:
        """Starts the server's process. `with` does so, too.

        Returns:
            This service, whose `reader` now yields batches.

        Raises:
            ServiceError: If the service was already started, or doesn't start in time.
            FastpipeError: If the server reports an error.
            TypeError: If the reader can't be pickled.
        """
        if self._process is not None or self._closed:
            raise ServiceError("the local service was already started: create another one")
        process = self._process = LocalProcess(self._served, self._timeout)
        try:
            fallback = self._served if self._fallback else None
            self._remote = process.reader(self._asked, self._running, self._timeout, fallback)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def reader(self) -> Reader:
        """The reader of the batches that the other process prepares, always the same object.

        Raises:
            ServiceError: If the service wasn't started or is closed.
        """
        if self._remote is None:
            state = "is closed; make another one" if self._closed else "wasn't started; use `with` or start()"
            raise ServiceError(f"the local service {state}")
        return self._remote

    def close(self) -> None:
        """Ends the server's process. Batches that were already delivered stay valid. Closing twice has no effect."""
        self._closed = True
        self._remote = None
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The attribute is missing if the constructor failed.
        if getattr(self, "_process", None) is not None:
            self.close()

    def __repr__(self) -> str:
        process = self._process
        state = "closed" if self._closed else "not started" if process is None else f"pid {process.pid}"
        return f"<fastpipe.service.LocalService of {self._served!r}: {state}>"
