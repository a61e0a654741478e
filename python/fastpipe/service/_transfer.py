"""Brings the batches of a pass from servers: a thread for each of them, which puts what comes into the pass's feed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastpipe.errors import FastpipeError, MalformedFileError, OutOfMemoryError, PassClosedError, ServiceError
from fastpipe.service._connection import Answer, Connection
from fastpipe.service._schedule import Schedule, Stretch
from fastpipe.service._wire import Ticket

if TYPE_CHECKING:
    from fastpipe import _fastpipe

__all__ = ["Request", "Transfer"]

# Batches that are asked for ahead of the consumer: as many as have this many bytes.
_AHEAD_BYTES = 32 << 20
_LEAST_AHEAD, _MOST_AHEAD = 2, 256
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_TICK = 0.1


@dataclass(frozen=True, slots=True)
class Request:
    """The batches of a pass: what the extension module asks for.

    Attributes:
        order: the arguments of the order, as `order_of` has them.
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

    order: dict[str, Any]
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


class Transfer:
    """Brings the batches of a pass.

    Args:
        feed: where they are put.
        request: which ones.
        connections: to servers.
        ticket: makes tickets: of epoch, progress, start, stop, until, and layout.
        group: batches that are cheaper to make together.
        patience: seconds for which it goes on when no server answers.
        timeout: seconds in which a server that was asked for batches has to send something.
        fallback: begins a pass in this process, of a batch and of how many behind it; None if there is none.
    """

    def __init__(
        self,
        feed: _fastpipe.BatchFeed,
        request: Request,
        connections: list[Connection],
        ticket: Callable[[int, dict[str, Any] | None, int, int, int, bool], Ticket],
        group: int,
        patience: float,
        timeout: float,
        fallback: Callable[[int, dict[str, Any] | None, int, int, bool], _fastpipe.Pass] | None,
    ) -> None:
        self._feed, self._request, self._ticket = feed, request, ticket
        self._connections = connections
        self._patience, self._timeout, self._fallback = patience, timeout, fallback
        self._schedule = Schedule(len(connections), request.total, request.left, request.steps, group)
        self._lock = threading.Lock()
        self._errors: dict[int, FastpipeError] = {}
        # Since when no server has brought anything, once one has failed.
        self._failing: float | None = None
        # What each server is asked for, and when it last sent something.
        self._answers: dict[int, tuple[Answer, float]] = {}
        self._largest = 1
        self._local = False

    def start(self) -> None:
        """Starts the threads. They end with the pass."""
        for server in range(len(self._connections)):
            thread = threading.Thread(target=self._serve, args=(server,), name=f"fastpipe-{server}", daemon=True)
            thread.start()
        threading.Thread(target=self._watch, name="fastpipe-watch", daemon=True).start()

    def _watch(self) -> None:
        """Ends what nobody waits for any more, and what has stopped to come."""
        while True:
            wanted, _, _, over = self._feed.look()
            with self._lock:
                answers = list(self._answers.values())
                finished = self._local or (self._schedule.finished and not answers)
            late = time.monotonic() - self._timeout
            for answer, since in answers:
                if over or since < late:
                    answer.cancel()
            if over or finished:
                return
            self._feed.wait(wanted, _TICK)
            time.sleep(_TICK / 10)

    @property
    def _ahead(self) -> int:
        limit = self._request.memory_limit
        most = _AHEAD_BYTES if limit is None else limit // 2
        ahead = min(max(most // self._largest, _LEAST_AHEAD), _MOST_AHEAD)
        prefetch = self._request.prefetch
        return ahead if prefetch is None else max(1, min(prefetch, ahead) if limit is not None else prefetch)

    def _serve(self, server: int) -> None:
        pause = _FIRST_PAUSE
        while True:
            wanted, _, waiting, over = self._feed.look()
            if over:
                return
            with self._lock:
                if self._local or self._schedule.finished:
                    return
                stretch = self._schedule.take(server, time.monotonic(), wanted, self._ahead, waiting=waiting)
            if stretch is None:
                self._feed.wait(wanted, _TICK)
                if waiting:
                    time.sleep(_TICK / 10)
                continue
            before = stretch.next
            try:
                self._bring(server, stretch)
            except PassClosedError:
                return
            except FastpipeError as error:
                failed: FastpipeError | None = error
            except Exception as error:  # A thread that dies silently would leave the consumer waiting.
                failed = ServiceError(f"{self._connections[server].url}: {type(error).__name__}: {error}")
                failed.__cause__ = error
            else:
                failed = None
            with self._lock:
                self._schedule.done(stretch)
                self._schedule.set_usable(server, failed is None)
            if failed is None:
                pause = _FIRST_PAUSE
                continue
            if stretch.next > before:
                pause = _FIRST_PAUSE
            if not self._go_on(server, stretch, failed):
                return
            # The jitter keeps clients of a server that comes back from asking all at once.
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _go_on(self, server: int, stretch: Stretch, error: FastpipeError) -> bool:
        """Whether to try again after an error."""
        damaged = isinstance(error, MalformedFileError) and error.path is None
        if not isinstance(error, (ServiceError, OutOfMemoryError)) and not damaged:
            # Of the data: each server would say the same.
            self._feed.fail(stretch.next, error)
            return False
        with self._lock:
            self._errors[server] = error
            now = time.monotonic()
            if self._failing is None:
                self._failing = now
            if now - self._failing < self._patience or self._local:
                return not self._local
            told = "; ".join(str(self._errors[server]) for server in sorted(self._errors))
            self._local = True
        if self._fallback is not None:
            self._make_here()
            return False
        gone = ServiceError(f"no server has answered for {self._patience:g} seconds: {told}")
        wanted, *_ = self._feed.look()
        gone.__cause__ = error
        self._feed.fail(wanted, gone)
        return False

    def _bring(self, server: int, stretch: Stretch) -> None:
        epoch, start, progress = self._request.place(stretch.next)
        stop = start + stretch.stop - stretch.next
        until = stop if len(self._connections) > 1 else start + self._schedule.boundary(stretch.next) - stretch.next
        answer = self._connections[server].batches(self._ticket(epoch, progress, start, stop, until, self._request.csr))
        try:
            self._receive(server, stretch, answer, (epoch, None if progress is not None else start - stretch.next))
        finally:
            with self._lock:
                self._answers.pop(server, None)
            answer.cancel()

    def _heard(self, server: int, answer: Answer, *, waits: bool = False) -> None:
        """A server has sent something; or is kept waiting, which is as good."""
        with self._lock:
            self._answers[server] = answer, float("inf") if waits else time.monotonic()

    def _receive(self, server: int, stretch: Stretch, answer: Answer, place: tuple[int, int | None]) -> None:
        epoch, offset = place
        self._heard(server, answer)
        incoming: _fastpipe.IncomingBatch | None = None
        waited = 0.0
        url = self._connections[server].url
        for header, data in answer:
            if header is not None:
                if incoming is not None or stretch.next >= stretch.stop:
                    raise ServiceError(f"{url} sent a batch that doesn't belong here")
                self._heard(server, answer, waits=True)
                waited = self._wait_for_room(stretch)
                incoming = self._feed.receive(header)
                self._largest = max(self._largest, incoming.nbytes)
                if incoming.epoch != epoch or (offset is not None and incoming.step != stretch.next + offset):
                    raise ServiceError(
                        f"{url} sent batch {incoming.step} of epoch {incoming.epoch}, not what was asked"
                    )
            self._heard(server, answer)
            if incoming is None:
                raise ServiceError(f"{url} sent bytes that belong to no batch")
            if incoming.add(data):
                self._feed.put(stretch.next, incoming)
                incoming = None
                with self._lock:
                    self._schedule.brought(stretch, time.monotonic(), waited=waited)
                    self._failing = None
                    self._errors.pop(server, None)
                if stretch.next >= stretch.stop:
                    return
                if not self._feed.wants(stretch.next) and stretch.again:
                    return
        if stretch.next < stretch.stop:
            raise ServiceError(f"{url} ended too early")

    def _wait_for_room(self, stretch: Stretch) -> float:
        """Waits until the consumer is near enough. Returns the seconds that it took."""
        begun = time.monotonic()
        while True:
            wanted, _, _, over = self._feed.look()
            if over:
                raise PassClosedError("the pass is over")
            if stretch.next < wanted + self._ahead:
                return time.monotonic() - begun
            self._feed.wait(wanted, _TICK)

    def _make_here(self) -> None:
        """Makes all batches that are still missing in this process."""
        assert self._fallback is not None
        number, *_ = self._feed.look()
        try:
            while True:
                epoch, start, progress = self._request.place(number)
                stop = self._schedule.boundary(number)
                if self._request.total is not None:
                    stop = min(stop, self._request.total)
                if number >= stop:
                    return
                made = self._fallback(epoch, progress, start, start + stop - number, self._request.csr)
                while number < stop:
                    wanted, _, _, over = self._feed.look()
                    if over:
                        return
                    if number >= wanted + self._ahead:
                        self._feed.wait(wanted, _TICK)
                    elif self._feed.put_next(number, made) is None:
                        raise ServiceError("the fallback has fewer batches than the servers")
                    else:
                        number += 1
        except Exception as error:  # As above.
            self._feed.fail(number, error)
