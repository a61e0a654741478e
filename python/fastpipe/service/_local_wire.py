"""What a local server and its program say to each other, over sockets that nobody else has.

The program has one socket to its server, by which it hands over others: one for each request, which begins with a
letter. The request follows as one frame, and the answer is frames: each has a kind, what is said of batches, and the
places of their memory. The program answers each frame of batches with a byte, before it borrows what was lent: the
server waits for that, and takes back what it has heard nothing of.
"""

from __future__ import annotations

import socket
import struct
from typing import BinaryIO, NamedTuple

__all__ = ["ASK", "BATCHES", "INIT", "SEEN", "Frame", "read_frame", "send_frame"]

INIT, ASK, BATCHES = b"i", b"a", b"b"
SEEN = b"s"
_FRONT = struct.Struct("<cQQ")


class Frame(NamedTuple):
    """What is sent at once.

    Attributes:
        kind: `b"b"` for batches, `b"e"` for an error, `b"."` at the end, `b"r"` for anything else.
        said: what is said.
        places: of lent memory.
    """

    kind: bytes
    said: bytes
    places: bytes = b""


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Sends a frame.

    Raises:
        OSError: if nobody is there.
    """
    front = _FRONT.pack(frame.kind, len(frame.said), len(frame.places))
    connection.sendall(b"".join((front, frame.said, frame.places)))


def read_frame(file: BinaryIO) -> Frame | None:
    """The next frame; None if there is none, since the other side is gone."""
    front = file.read(_FRONT.size)
    if len(front) < _FRONT.size:
        return None
    kind, said, places = _FRONT.unpack(front)
    body = file.read(said + places)
    return Frame(kind, body[:said], body[said:]) if len(body) == said + places else None
