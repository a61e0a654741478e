"""A thread of a client that brings the batches of one server, as the others see it."""

from __future__ import annotations

from dataclasses import dataclass

from fastpipe.errors import ServiceError
from fastpipe.service._schedule import Stretch
from fastpipe.service._transport import Answer

__all__ = ["Worker"]


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
