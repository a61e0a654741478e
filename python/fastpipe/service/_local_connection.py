"""A connection to a local server.

The program has one socket to its server. It passes another socket through it for each request, along with a letter for
the kind of request. The program then sends one frame, and the server answers with frames. Each frame has a kind, the
headers of batches, and the places of their memory. The program acknowledges each frame of batches with a byte before it
borrows the memory. The server reclaims memory that wasn't acknowledged. Batches are received in Rust
(`rust/fastpipe-service/src/local.rs`).
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any, BinaryIO, NamedTuple

from fastpipe._fastpipe import ServiceConnection, SharedArena
from fastpipe.errors import ServiceError
from fastpipe.service._wire import as_error

INIT, ASK, BATCHES = b"i", b"a", b"b"
_FRONT = struct.Struct("<cQQ")


class Frame(NamedTuple):
    """A message between the program and its server.

    Attributes:
        kind: `b"b"` for batches, `b"e"` for an error, `b"."` for the end, `b"r"` for anything else.
        said: Headers of batches, or another text.
        places: Places of lent memory.
    """

    kind: bytes
    said: bytes
    places: bytes = b""


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Sends a frame.

    Raises:
        OSError: If the other side is gone.
    """
    front = _FRONT.pack(frame.kind, len(frame.said), len(frame.places))
    connection.sendall(b"".join((front, frame.said, frame.places)))


def read_frame(file: BinaryIO) -> Frame | None:
    """Reads the next frame. Returns None if the other side is gone."""
    front = file.read(_FRONT.size)
    if len(front) < _FRONT.size:
        return None
    kind, said, places = _FRONT.unpack(front)
    body = file.read(said + places)
    return Frame(kind, body[:said], body[said:]) if len(body) == said + places else None


SCHEME = "local:"

# The servers of this process, by URL. A forked child may use its parent's.
_links: dict[str, Link] = {}


class Link:
    """The program's side of a local server.

    Args:
        url: URL of the server.
        control: Socket through which the sockets of requests are passed.
        process: Process ID of the server.
    """

    def __init__(self, url: str, control: socket.socket, process: int) -> None:
        self.url = url
        self._control: socket.socket | None = control
        self._lock = threading.Lock()
        self.process = process
        # Receives batches, until the server is closed.
        self.handle: ServiceConnection | None = None
        _links[url] = self

    def map(self, memory: SharedArena) -> None:
        """Sets the shared memory that the server fills with batches."""
        self.handle = ServiceConnection.local(self.url, self.process, memory, self.request)

    def request(self, kind: bytes) -> socket.socket:
        """Returns the socket of a new request.

        Raises:
            ServiceError: If the server has ended.
        """
        with self._lock:
            if self._control is None:
                raise ServiceError("the local service is closed")
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [kind], [theirs.fileno()])
                except BaseException as error:
                    ours.close()
                    if isinstance(error, OSError):
                        raise self.gone() from error
                    raise
        return ours

    def gone(self) -> ServiceError:
        """Returns the error for a server that has ended."""
        return ServiceError(f"the local server (pid {self.process}) has ended; start another LocalService")

    def close(self) -> None:
        """Ends the server by closing its socket. Delivered batches keep the memory that they use."""
        _links.pop(self.url, None)
        self.handle = None
        with self._lock:
            control, self._control = self._control, None
        if control is not None:
            control.close()


class LocalConnection:
    """A connection to the local server with a given URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def handle(self) -> ServiceConnection:
        """The connection in Rust, over which batches arrive.

        Raises:
            ServiceError: If the service is closed, or belongs to another process.
        """
        handle = self._link().handle
        if handle is None:
            raise ServiceError("the local service is closed")
        return handle

    def _link(self) -> Link:
        found = _links.get(self.url)
        if found is None:
            raise ServiceError(
                "the local service is closed, or it is another process's. Its readers work only in the process that"
                " started it and in forked children; other processes can connect to reader.serve()"
            )
        return found

    def ask(self, action: str, request: dict[str, Any], seconds: float) -> list[bytes]:
        """Asks the server a question and returns the parts of its answer.

        Raises:
            FastpipeError: If the server reports an error.
            ServiceError: If the server doesn't answer in time.
        """
        link = self._link()
        with link.request(ASK) as connection:
            connection.settimeout(seconds)
            try:
                with connection.makefile("rb") as file:
                    send_frame(connection, Frame(b"r", json.dumps({"action": action} | request).encode()))
                    frame = read_frame(file)
            except TimeoutError as error:
                text = f"the local server (pid {link.process}) has not answered for {seconds:g} seconds"
                raise ServiceError(text) from error
            except OSError as error:
                raise link.gone() from error
        return [checked(frame, link).said]

    def passes(self, error: ServiceError) -> bool:
        """Whether the server may answer a later request. A server that has ended is never replaced."""
        return isinstance(error.__cause__, TimeoutError)


def checked(frame: Frame | None, link: Link) -> Frame:
    """Returns the frame if it is a valid answer.

    Raises:
        FastpipeError: If the frame contains an error, or is missing because the server has ended.
    """
    if frame is None:
        raise link.gone()
    told = as_error(frame.said, "the local server") if frame.kind == b"e" else None
    if told is not None:
        raise told
    return frame
