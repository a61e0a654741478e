"""Connection options of clients, and the protocol for directories of servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

_TOKEN = re.compile(r"[ -~]*")


def checked_token(token: str | None) -> str | None:
    """Returns the token if it can be sent in an HTTP header.

    Raises:
        TypeError: If it isn't a str.
        ValueError: If a header can't contain it. The message doesn't reveal the token.
    """
    if token is None:
        return None
    if not isinstance(token, str):
        raise TypeError(f"token must be a str; got {type(token).__name__}")
    if not _TOKEN.fullmatch(token):
        raise ValueError("token must consist of printable ASCII characters: it is sent in an HTTP header")
    return token


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a client's connections. They can be pickled.

    Attributes:
        token: Token that the servers require.
        ca: PEM certificates of the CAs that the servers' certificates must be signed by; None for the system's.
        certificate: The client's certificate chain and private key, PEM; None if servers don't require them.
        timeout: Maximum time in seconds that a server may take to answer. Defaults to 30.
    """

    token: str | None = field(default=None, repr=False)
    ca: bytes | None = field(default=None, repr=False)
    certificate: tuple[bytes, bytes] | None = field(default=None, repr=False)
    timeout: float = 30.0

    def __post_init__(self) -> None:
        checked_token(self.token)


@runtime_checkable
class Directory(Protocol):
    """Lists the servers that are currently available. `fastpipe.connect` accepts a directory in place of URLs.

    During a pass, a separate thread calls `urls` about once a second. New servers are used from then on, and servers
    that disappear from the list are dropped. The directory is pickled along with the reader.
    """

    def urls(self) -> Sequence[str]:
        """Returns the URLs of the servers in any order. The list may be empty.

        If this method raises an exception, passes continue with the last list. The exception's message is reported if
        no server answers in time.
        """
