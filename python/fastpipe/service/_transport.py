"""What carries batches from a server, and a thread that brings them, as the others see it.

It is the network (`_connection`), or memory in common (`_local_connection`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fastpipe.errors import ServiceError
from fastpipe.service._schedule import Stretch

if TYPE_CHECKING:
    from fastpipe._fastpipe import IncomingBatches
    from fastpipe.errors import ServiceError
    from fastpipe.service._wire import Ticket


class Message(Protocol):
    """What has come at once."""

    @property
    def begins(self) -> bool:
        """Whether batches begin with it, which the consumer must have room for."""

    def into(self, incoming: IncomingBatches) -> None:
        """Hands over the batches that are whole with it.

        Raises:
            MalformedFileError: if it is damaged, or isn't what was asked for.
            FastpipeError: if there is no memory for them.
        """


class Answer(Protocol):
    """What comes from a server. Another thread may cancel it."""

    def __iter__(self) -> Iterator[Message]:
        """The messages.

        Raises:
            FastpipeError: what the server tells.
            ServiceError: if the connection breaks.
        """

    def cancel(self) -> None:
        """No more messages are wanted. Whoever waits for one hears that there are none."""

    def close(self) -> None:
        """Lets go of it; called by the thread that iterates."""


class Connection(Protocol):
    """A way to a server, used by several threads."""

    url: str

    @property
    def ahead(self) -> int:
        """Bytes of batches that are asked for ahead of the consumer."""

    def check(self) -> None:
        """Whether this process can connect.

        Raises:
            ServiceError: if it can't.
        """

    def ask(self, action: str, request: dict[str, Any], seconds: float) -> list[bytes]:
        """What a server answers to a request.

        Raises:
            FastpipeError: what it tells.
            ServiceError: if it doesn't answer within the time.
        """

    def passes(self, error: ServiceError) -> bool:
        """Whether a server that has failed so may answer another time."""

    def batches(self, ticket: Ticket) -> Answer:
        """Asks for batches.

        Raises:
            ServiceError: if the server doesn't answer.
        """

    def forget(self) -> None:
        """Lets the next request connect anew; whoever waits for this one goes on waiting."""


@dataclass(slots=True, eq=False)
class Worker:
    """A thread that brings what a server makes.

    Attributes:
        stretch: what it is bringing; None if nothing.
        answer: what comes from the server; None as long as that hasn't answered.
        heard: when something last came, or was asked for; infinite while it is kept waiting for the consumer.
        answered: whether the server has answered what was asked for last.
        probed: the value of `heard` for which the server was asked whether it is there.
        broken: what is wrong with the connection, if the server hasn't said so.
        abandoned: whether nobody waits for it any more: another thread has taken its place, or the server has gone.
    """

    server: int
    stretch: Stretch | None = None
    answer: Answer | None = None
    heard: float = 0.0
    answered: bool = False
    probed: float = -1.0
    broken: ServiceError | None = None
    abandoned: bool = False

    @property
    def busy(self) -> bool:
        """Whether it is bringing something."""
        return self.stretch is not None and not self.abandoned
