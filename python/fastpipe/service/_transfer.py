"""Brings the batches of a pass from servers: a thread for each of them, which puts what comes into the pass's feed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fastpipe.errors import FastpipeError, MalformedFileError, OutOfMemoryError, PassClosedError, ServiceError
from fastpipe.service._directory import Servers
from fastpipe.service._schedule import Schedule, Stretch
from fastpipe.service._transport import Answer, Connection
from fastpipe.service._wire import Ticket

if TYPE_CHECKING:
    from fastpipe import _fastpipe

__all__ = ["Request", "Transfer"]

_Make: TypeAlias = "Callable[[int, dict[str, Any] | None, int, int, bool], _fastpipe.Pass]"
"""Begins a pass in this process: of epoch, progress, start, stop, and layout."""

# Batches that are asked for ahead of the consumer, whatever their size.
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


@dataclass(slots=True, eq=False)
class _Worker:
    """A thread that brings what a server makes.

    Attributes:
        stretch: what it is bringing; None if nothing.
        answer: what comes from the server; None as long as that hasn't answered.
        heard: when something last came, or was asked for.
        abandoned: whether nobody waits for it any more: another thread has taken its place, or the server has gone.
    """

    server: int
    stretch: Stretch | None = None
    answer: Answer | None = None
    heard: float = 0.0
    abandoned: bool = False

    @property
    def busy(self) -> bool:
        """Whether it is bringing something."""
        return self.stretch is not None and not self.abandoned


class Transfer:
    """Brings the batches of a pass.

    Args:
        feed: where they are put.
        request: which ones.
        servers: that make them.
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
        servers: Servers,
        ticket: Callable[[int, dict[str, Any] | None, int, int, int, bool], Ticket],
        group: int,
        patience: float,
        timeout: float,
        fallback: _Make | None,
    ) -> None:
        self._feed, self._request, self._ticket = feed, request, ticket
        self._servers = servers
        # By their numbers, which aren't given again; those that have gone stay, for threads that are about to end.
        self._connections: dict[int, Connection] = {}
        self._patience, self._timeout, self._fallback = patience, timeout, fallback
        self._schedule = Schedule(0, request.total, request.left, request.steps, group)
        self._lock = threading.Lock()
        self._errors: dict[int, FastpipeError] = {}
        # Since when no server has brought anything, once one has failed.
        self._failing: float | None = None
        self._workers: dict[int, _Worker] = {}
        self._largest = 1
        # Bytes of batches that are asked for ahead of the consumer.
        self._room = 1
        self._given_up = False

    def start(self) -> None:
        """Starts the threads. They end with the pass."""
        self._update()
        threading.Thread(target=self._watch, name="fastpipe-watch", daemon=True).start()

    def _update(self) -> None:
        """Takes servers that have come, and leaves those that have gone."""
        known = self._servers.known()
        with self._lock:
            self._room = min((connection.ahead for connection in known), default=self._room)
            come = [one for one in known if not any(self._connections[number] is one for number in self._workers)]
            gone = [worker for number, worker in self._workers.items() if self._connections[number] not in known]
            for worker in gone:
                self._schedule.remove(worker.server)
                del self._workers[worker.server]
                self._errors.pop(worker.server, None)
                if worker.answer is None:
                    # It can't be told to stop.
                    self._abandon(worker)
            begun = range(len(self._connections), len(self._connections) + len(come))
            for number, connection in zip(begun, come, strict=True):
                self._connections[number] = connection
                self._schedule.add(number)
            if not known and self._failing is None:
                self._failing = time.monotonic()
        for worker in gone:
            answer = worker.answer
            if answer is not None:
                answer.cancel()
        for number in begun:
            self._begin(number)

    def _abandon(self, worker: _Worker) -> None:
        """Lets others make what a thread was to bring, whatever becomes of that."""
        if worker.stretch is not None and not worker.abandoned:
            self._schedule.done(worker.stretch)
        worker.abandoned = True

    def _begin(self, server: int) -> None:
        worker = _Worker(server)
        self._workers[server] = worker
        threading.Thread(target=self._serve, args=(worker,), name=f"fastpipe-{server}", daemon=True).start()

    def _watch(self) -> None:
        """Ends what nobody waits for any more, and what has stopped to come; gives up when nothing comes at all."""
        while True:
            wanted, _, _, over = self._feed.look()
            now = time.monotonic()
            with self._lock:
                workers = list(self._workers.values())
                finished = self._given_up or (self._schedule.finished and not any(worker.busy for worker in workers))
                late = [worker for worker in workers if worker.busy and worker.heard < now - self._timeout]
                # One that waits for an answer can't be told to stop: another thread takes its place.
                for worker in late:
                    if worker.answer is None and worker.stretch is not None:
                        self._abandon(worker)
                        url = self._connections[worker.server].url
                        self._failed(worker.server, ServiceError(f"{url} has not answered for {self._timeout:g} s"))
                if any(worker.busy and worker.heard == float("inf") for worker in workers):
                    # A server has answered: it is the consumer who is waited for.
                    self._failing = None
                give_up = self._failing is not None and now - self._failing >= self._patience and not finished
                self._given_up |= give_up
            for worker in workers if over else late:
                if worker.answer is not None:
                    worker.answer.cancel()
            if over or finished:
                return
            if give_up:
                self._give_up()
                return
            for worker in late:
                if worker.abandoned:
                    self._connections[worker.server].forget()
                    self._begin(worker.server)
            self._update()
            self._feed.wait(wanted, _TICK)
            time.sleep(_TICK / 10)

    def _failed(self, server: int, error: FastpipeError) -> None:
        """Notes that a server has failed."""
        self._errors[server] = error
        if self._failing is None:
            self._failing = time.monotonic()

    def _give_up(self) -> None:
        """No server answers: makes the batches here, or says so."""
        if self._fallback is not None:
            self._make_here(self._fallback)
            return
        with self._lock:
            told = "; ".join(
                filter(None, [*(str(self._errors[server]) for server in sorted(self._errors)), self._servers.why()])
            )
            cause = next(iter(self._errors.values()), None)
        # Without patience nothing was waited for: no other server replaces a local one.
        waited = f"no server has answered for {self._patience:g} seconds: " if self._patience else ""
        gone = ServiceError(f"{waited}{told}")
        gone.__cause__ = cause
        wanted, *_ = self._feed.look()
        self._fail(wanted, gone)

    def _fail(self, number: int, error: Exception) -> None:
        """Puts a server's error in the place of a batch.

        The feed keeps it. The frames of its traceback would keep the feed, and what connections have mapped, in a cycle
        through Rust, which the garbage collector doesn't see.
        """
        part: BaseException | None = error
        while part is not None:
            part.__traceback__ = None
            part = part.__cause__ or part.__context__
        self._feed.fail(number, error)

    @property
    def _ahead(self) -> int:
        limit = self._request.memory_limit
        most = self._room if limit is None else limit // 2
        # Or servers would have nothing to do, unless a limit says so.
        least = _LEAST_AHEAD * (max(len(self._workers), 1) if limit is None else 1)
        ahead = min(max(most // self._largest, least), _MOST_AHEAD)
        prefetch = self._request.prefetch
        return ahead if prefetch is None else max(1, min(prefetch, ahead) if limit is not None else prefetch)

    def _serve(self, worker: _Worker) -> None:
        server, pause = worker.server, _FIRST_PAUSE
        while True:
            wanted, _, waiting, over = self._feed.look()
            if over:
                return
            with self._lock:
                if self._given_up or self._schedule.finished or server not in self._workers:
                    return
                stretch = self._schedule.take(server, time.monotonic(), wanted, self._ahead, waiting=waiting)
                worker.stretch = stretch
                worker.heard = time.monotonic()
            if stretch is None:
                self._feed.wait(wanted, _TICK)
                if waiting:
                    time.sleep(_TICK / 10)
                continue
            before = stretch.next
            failed: FastpipeError | None = None
            try:
                self._bring(worker, stretch)
            except PassClosedError:
                failed = None
            except FastpipeError as error:
                failed = error
            except Exception as error:  # A thread that dies silently would leave the consumer waiting.
                failed = ServiceError(f"{self._connections[server].url}: {type(error).__name__}: {error}")
                failed.__cause__ = error
            with self._lock:
                if worker.abandoned:
                    return
                worker.stretch = None
                self._schedule.done(stretch)
                if server not in self._workers:
                    return
                if failed is not None:
                    self._failed(server, failed)
            if failed is None:
                pause = _FIRST_PAUSE
                continue
            if not isinstance(failed, (ServiceError, OutOfMemoryError)):
                # Of the data: each server would say the same.
                self._fail(stretch.next, failed)
                return
            if stretch.next > before:
                pause = _FIRST_PAUSE
            # The jitter keeps clients of a server that comes back from asking all at once.
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _bring(self, worker: _Worker, stretch: Stretch) -> None:
        epoch, start, progress = self._request.place(stretch.next)
        stop = start + stretch.stop - stretch.next
        until = stop if not self._schedule.alone else start + self._schedule.boundary(stretch.next) - stretch.next
        ticket = self._ticket(epoch, progress, start, stop, until, self._request.csr)
        answer = self._connections[worker.server].batches(ticket)
        try:
            with self._lock:
                if worker.abandoned:
                    return
                worker.answer, worker.heard = answer, time.monotonic()
            self._receive(worker, stretch, answer, (epoch, None if progress is not None else start))
        finally:
            worker.answer = None
            answer.close()

    def _receive(self, worker: _Worker, stretch: Stretch, answer: Answer, place: tuple[int, int | None]) -> None:
        incoming = self._feed.receive(stretch.next, stretch.stop, *place)
        waited = 0.0
        for message in answer:
            if message.begins:
                # It is kept waiting, which is as good as being heard.
                worker.heard = float("inf")
                waited += self._wait_for_room(stretch)
            now = worker.heard = time.monotonic()
            try:
                message.into(incoming)
            except MalformedFileError as error:
                # Damaged on its way, it is asked for again; what doesn't fit the columns is the server's fault.
                raise ServiceError(f"{self._connections[worker.server].url}: {error}") from error
            finally:
                came = incoming.next - stretch.next
                if came:
                    self._largest = max(self._largest, incoming.largest)
                    with self._lock:
                        self._schedule.brought(stretch, now, came, waited=waited)
                        self._failing = None
                        self._errors.pop(worker.server, None)
                    waited = 0.0
            if stretch.next >= stretch.stop:
                return
            if stretch.again and not self._feed.wants(stretch.next):
                return
        raise ServiceError(f"{self._connections[worker.server].url} ended too early")

    def _wait_for_room(self, stretch: Stretch) -> float:
        """Waits until the consumer is near enough. Returns the seconds that it took."""
        begun = time.monotonic()
        while True:
            wanted, _, _, over = self._feed.look()
            if over:
                raise PassClosedError("the pass is over")
            ahead = self._ahead
            if stretch.next < wanted + ahead:
                return time.monotonic() - begun
            self._feed.wait(stretch.next - ahead, _TICK)

    def _make_here(self, make: _Make) -> None:
        """Makes all batches that are still missing in this process."""
        number, *_ = self._feed.look()
        try:
            while True:
                epoch, start, progress = self._request.place(number)
                stop = self._schedule.boundary(number)
                if self._request.total is not None:
                    stop = min(stop, self._request.total)
                if number >= stop:
                    return
                made = make(epoch, progress, start, start + stop - number, self._request.csr)
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
            # Whoever wrote the source sees where it failed; frames of this file would keep the feed, see `_fail`.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            self._feed.fail(number, error.with_traceback(trace))
