"""How a client connects."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Options"]


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
