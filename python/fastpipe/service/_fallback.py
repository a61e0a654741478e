"""Makes batches of a pass in this process, where no server does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from fastpipe.errors import ServiceError
from fastpipe.service._request import Request

if TYPE_CHECKING:
    from fastpipe._fastpipe import BatchFeed, Pass

__all__ = ["Fallback", "Make"]

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
