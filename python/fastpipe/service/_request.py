"""A pass whose batches are made elsewhere: what the extension asks for, and making it here, where no server does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fastpipe.errors import ServiceError

if TYPE_CHECKING:
    from fastpipe._fastpipe import BatchFeed, Pass


@dataclass(frozen=True, slots=True)
class Request:
    """The batches of a pass: what the extension module asks for.

    Attributes:
        order: its settings, as `Ordering.text` writes them.
        epoch: of the first one.
        step: the number of the first one, counted as tickets do.
        left: batches of that epoch.
        steps: batches of each further epoch.
        progress: from where the first epoch's are counted; None for its start.
        total: batches of the pass; None if it has no end.
        csr: whether sparse columns are laid out as Arrow's are.
        prefetch: how many to have ahead; None for what fits.
        memory_limit: bytes for those.
    """

    order: str
    epoch: int
    step: int
    left: int
    steps: int
    progress: dict[str, Any] | None
    total: int | None
    csr: bool
    prefetch: int | None
    memory_limit: int | None

    def place(self, number: int) -> tuple[int, int, dict[str, Any] | None]:
        """Epoch, step and progress that a ticket has for a batch of the pass."""
        if number < self.left:
            return self.epoch, self.step + number, self.progress
        epochs, step = divmod(number - self.left, max(self.steps, 1))
        return self.epoch + 1 + epochs, step, None


Make: TypeAlias = "Callable[[int, dict[str, Any] | None, int, int, bool], Pass]"
"""Begins a pass in this process: of epoch, progress, start, stop, and layout."""


class Fallback:
    """Puts batches of a pass into its feed. Those that follow each other are of one pass of this process.

    Args:
        feed: where they are put.
        request: the batches of the pass.
        boundary: says for a batch which one is behind the last of its epoch.
        make: begins a pass in this process.
    """

    file = __file__

    def __init__(self, feed: BatchFeed, request: Request, boundary: Callable[[int], int], make: Make) -> None:
        self._feed, self._request, self._boundary, self._make = feed, request, boundary, make
        self._made: Pass | None = None
        # The batch that it makes next, and the one behind its last.
        self._next = self._stop = 0

    def put(self, number: int) -> None:
        """Makes a batch. If a server was faster, that one counts.

        Raises:
            FastpipeError: what is wrong with the data.
            ServiceError: if there is no such batch.
        """
        if self._made is None or not self._next == number < self._stop:
            self.close()
            epoch, start, progress = self._request.place(number)
            stop = self._boundary(number)
            if self._request.total is not None:
                stop = min(stop, self._request.total)
            self._next, self._stop = number, stop
            self._made = self._make(epoch, progress, start, start + stop - number, self._request.csr)
        if self._feed.put_next(number, self._made) is None:
            raise ServiceError("the fallback has fewer batches than the servers")
        self._next = number + 1

    def close(self) -> None:
        """Ends what is read ahead."""
        made, self._made = self._made, None
        if made is not None:
            made.close()
