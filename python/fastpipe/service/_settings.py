"""How a client connects, and to whom."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

_TOKEN = re.compile(r"[ -~]*")


def checked_token(token: str | None) -> str | None:
    """A token, which travels in a header of HTTP.

    Raises:
        TypeError: if it is no text.
        ValueError: if a header can't hold it. The message doesn't tell it.
    """
    if token is None:
        return None
    if not isinstance(token, str):
        raise TypeError(f"token is text, not {type(token).__name__}")
    if not _TOKEN.fullmatch(token):
        raise ValueError("token has characters other than the printable ones of ASCII, which no header can hold")
    return token


@dataclass(frozen=True, slots=True)
class Options:
    """How a client connects; it can be pickled.

    Attributes:
        token: that servers want.
        ca: certificates, PEM, one of which has signed the servers'; None for those that the system knows.
        certificate: of the client, PEM, and its private key; None if servers don't ask for one.
        timeout: seconds in which a server has to answer.
    """

    token: str | None = field(default=None, repr=False)
    ca: bytes | None = field(default=None, repr=False)
    certificate: tuple[bytes, bytes] | None = field(default=None, repr=False)
    timeout: float = 30.0

    def __post_init__(self) -> None:
        checked_token(self.token)


@runtime_checkable
class Directory(Protocol):
    """Says which servers there are just now. `fastpipe.connect` takes one in place of URLs.

    While a pass runs it is asked about once a second, in a thread of its own: servers that it has come to list are
    used from then on, and those that it doesn't list any more are left. It is pickled along with the reader.
    """

    def urls(self) -> Sequence[str]:
        """The URL of each server, in any order; none if there is none just now.

        Whatever it raises, passes go on with the servers that it has listed last. The message is told where no server
        answers for too long.
        """
