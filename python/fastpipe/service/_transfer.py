"""Brings the batches of a pass from servers: a thread for each of them, which puts what comes into the pass's feed.

A server hangs that was asked for batches, or has begun to send some, and then sends nothing for `timeout` seconds: as
long as that is not over, it is merely slow. Others make what it was to bring, and it is asked again.

A connection may break without a word, too: if nothing comes on one, and the server doesn't say on it that it is there,
another one is made. What comes is noticed message by message, so a slow link needs time for one. (Pings of gRPC are
answered behind all that was sent before, which takes a slow link much longer.)

The pass itself ends when no server brings anything for `patience` seconds. They are counted from when a server was last
heard of, but not from before the first of the requests that have failed or hang: a consumer may take its time. An
answer without batches counts once, until that server has brought something: one that fails again and again behind each
of its answers would keep the pass waiting for ever.

With a fallback the pass doesn't end: a thread makes the batches here, as if it were another server. Servers are then
asked whether they are there before they are given anything to make, with growing pauses. The first one that brings a
batch takes over.

A file that one server can't read may be there for another one: that one makes the batch. If each server has said so,
the error is raised, or the fallback makes the batch.

A batch that was damaged on its way is asked for again at once. If most are, for `patience` seconds, the pass ends.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastpipe.errors import FastpipeError, MalformedFileError, OutOfMemoryError, PassClosedError, ServiceError
from fastpipe.service._directory import Servers
from fastpipe.service._faults import Faults
from fastpipe.service._request import Fallback, Make, Request
from fastpipe.service._schedule import Schedule, Stretch
from fastpipe.service._transport import Answer, Connection, Worker
from fastpipe.service._wire import FILE_ERRORS, Ticket

if TYPE_CHECKING:
    from fastpipe._fastpipe import BatchFeed

# Batches that are asked for ahead of the consumer, whatever their size.
_LEAST_AHEAD, _MOST_AHEAD = 2, 256
_AHEAD_HERE = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_TICK = 0.1
# A part of the timeout: after so long without a message a server is asked whether it is there, for as long again.
_SILENCE = 0.25


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
        feed: BatchFeed,
        request: Request,
        servers: Servers,
        ticket: Callable[[int, dict[str, Any] | None, int, int, int, bool], Ticket],
        group: int,
        patience: float,
        timeout: float,
        fallback: Make | None,
    ) -> None:
        self._feed, self._request, self._ticket = feed, request, ticket
        self._servers = servers
        # By their numbers, which aren't given again; those that have gone stay, for threads that are about to end.
        self._connections: dict[int, Connection] = {}
        self._patience, self._timeout, self._fallback = patience, timeout, fallback
        self._schedule = Schedule(0, request.total, request.left, request.steps, group)
        self._lock = threading.Lock()
        self._faults = Faults(patience)
        # When a server last brought something, or was kept waiting; and since when none has, once one has failed.
        self._heard = 0.0
        self._failing: float | None = None
        # Those that have answered since they last brought something, and failed, or have hung.
        self._vain: set[int] = set()
        # As what the schedule knows the fallback, while it makes the batches; and servers that are there meanwhile.
        self._here: int | None = None
        self._engaged = 0
        self._there: set[int] = set()
        self._workers: dict[int, Worker] = {}
        self._largest = 1
        # Bytes of batches that are asked for ahead of the consumer.
        self._room = 1
        self._given_up = False

    def start(self) -> None:
        """Starts the threads. They end with the pass."""
        if self._fallback is not None and self._servers.absent:
            self._engage(self._fallback)
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
                self._faults.forget(worker.server)
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

    def _abandon(self, worker: Worker) -> None:
        """Lets others make what a thread was to bring, whatever becomes of that."""
        if worker.stretch is not None and not worker.abandoned:
            self._schedule.done(worker.stretch)
        worker.abandoned = True

    def _begin(self, server: int) -> None:
        worker = Worker(server)
        self._workers[server] = worker
        threading.Thread(target=self._serve, args=(worker,), name=f"fastpipe-{server}", daemon=True).start()

    def _watch(self) -> None:
        """Ends what nobody waits for any more, and what has stopped to come; gives up when nothing comes at all."""
        while True:
            wanted, _, waiting, over = self._feed.look()
            now = time.monotonic()
            with self._lock:
                workers = list(self._workers.values())
                finished = self._given_up or (self._schedule.finished and not any(worker.busy for worker in workers))
                late = [worker for worker in workers if worker.busy and worker.heard < now - self._timeout]
                if any(worker.busy and worker.heard == float("inf") for worker in workers):
                    # A server has answered: it is the consumer who is waited for.
                    self._failing, self._heard = None, now
                # One that waits for an answer can't be told to stop: another thread takes its place.
                for worker in late:
                    self._vain.add(worker.server)
                    if worker.answer is None:
                        self._abandon(worker)
                        url = self._connections[worker.server].url
                        self._failed(worker, ServiceError(f"{url} has not answered for {self._timeout:g} s"))
                hopeless = self._silent(now) >= self._patience or (waiting and self._faults.damage.is_hopeless(now))
                give_up = self._here is None and not finished and hopeless
                if give_up and self._fallback is not None:
                    # Nobody waits for what servers were to bring.
                    late = [worker for worker in workers if worker.busy]
                    for worker in late:
                        if worker.answer is None:
                            self._abandon(worker)
                self._given_up |= give_up and self._fallback is None
                silent = [
                    worker
                    for worker in workers
                    if self._patience and worker.busy and worker.probed != worker.heard < now - self._timeout * _SILENCE
                ]
                for worker in silent:
                    worker.probed = worker.heard
            for worker in workers if over else late:
                answer = worker.answer
                if answer is not None:
                    answer.cancel()
            if over or finished:
                return
            if give_up and self._fallback is not None:
                self._engage(self._fallback)
            elif give_up:
                self._give_up()
                return
            for worker in silent:
                threading.Thread(target=self._probe, args=(worker,), name="fastpipe-probe", daemon=True).start()
            for worker in late:
                if worker.abandoned:
                    self._connections[worker.server].forget()
                    self._begin(worker.server)
            self._update()
            self._feed.wait(wanted, _TICK)
            time.sleep(_TICK / 10)

    def _probe(self, worker: Worker) -> None:
        """Replaces the connection on which nothing comes, if the server doesn't say that it is there."""
        connection, heard = self._connections[worker.server], worker.probed
        try:
            connection.ask("health", {}, self._timeout * _SILENCE)
        except FastpipeError as error:
            with self._lock:
                if not worker.busy or worker.heard != heard:
                    return
                silence = time.monotonic() - heard
                worker.broken = ServiceError(f"{connection.url} has sent nothing for {silence:.2g} s: {error}")
                answer = worker.answer
                if answer is None:
                    # It can't be told to stop: another thread takes its place.
                    self._abandon(worker)
                    self._failed(worker, worker.broken)
            connection.forget()
            if answer is not None:
                answer.cancel()
            else:
                self._begin(worker.server)

    def _silent(self, now: float) -> float:
        """Seconds for which no server has been heard of, if one has failed."""
        if self._failing is None:
            return -1.0
        # Only what has been answered: a server that has stopped is connected to, and asked, by its system alone.
        heard = [
            worker.heard
            for worker in self._workers.values()
            if worker.busy and worker.answer is not None and worker.server not in self._vain
        ]
        return now - max(self._failing, *heard) if heard else now - self._failing

    def _failed(self, worker: Worker, error: FastpipeError) -> None:
        """Notes that a server has failed."""
        self._faults.note(worker.server, error)
        self._there.discard(worker.server)
        if worker.answered:
            self._vain.add(worker.server)
        if self._failing is None:
            # Others that were asked may hang.
            asked = [other.heard for other in self._workers.values() if other.busy]
            self._failing = max(self._heard, min(time.monotonic(), worker.heard, *asked))

    def _engage(self, make: Make) -> None:
        """Lets batches be made here, until servers bring some."""
        with self._lock:
            if self._here is not None:
                return
            self._servers.absent = True
            self._there.clear()
            # Under a number that is no server's.
            self._engaged -= 1
            here = self._here = self._engaged
            self._schedule.add(here)
        fallback = Fallback(self._feed, self._request, self._schedule.boundary, make)
        threading.Thread(target=self._make_here, args=(here, fallback), name="fastpipe-here", daemon=True).start()

    def _give_up(self) -> None:
        """No server answers: says so."""
        with self._lock:
            now = time.monotonic()
            for worker in self._workers.values():
                if worker.busy:
                    url, silent = self._connections[worker.server].url, now - worker.heard
                    self._faults.note_silence(worker.server, ServiceError(f"{url} has not answered for {silent:.2g} s"))
            wanted, *_ = self._feed.look()
            error = self._faults.error(wanted, self._servers.why())
        self._fail(wanted, error)

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

    @property
    def _ahead_here(self) -> int:
        """Of batches that are made here, how many wait for the consumer: their pass reads ahead by itself."""
        if self._request.prefetch is not None:
            return self._ahead
        return _LEAST_AHEAD if self._request.memory_limit is not None else _AHEAD_HERE

    def _serve(self, worker: Worker) -> None:
        server, pause = worker.server, _FIRST_PAUSE
        while True:
            wanted, _, waiting, over = self._feed.look()
            if over:
                return
            with self._lock:
                if self._given_up or self._schedule.finished or server not in self._workers:
                    return
                unknown = self._here is not None and server not in self._there
                stretch = None
                if not unknown:
                    stretch = self._schedule.take(server, time.monotonic(), wanted, self._ahead, waiting=waiting)
                worker.stretch = stretch
                worker.heard, worker.answered, worker.broken = time.monotonic(), False, None
            if stretch is None and not unknown:
                self._rest(wanted, waiting)
                continue
            before = wanted if stretch is None else stretch.next
            failed = self._tried(worker, stretch)
            # Of the data: each server would say the same.
            final = failed is not None and not isinstance(failed, (ServiceError, OutOfMemoryError, *FILE_ERRORS))
            unreadable = stretch is not None and isinstance(failed, FILE_ERRORS)
            came = stretch is not None and stretch.next > before
            with self._lock:
                if worker.abandoned:
                    return
                worker.stretch = None
                if stretch is not None:
                    self._schedule.done(stretch)
                if server not in self._workers:
                    return
                if stretch is not None and unreadable:
                    none = self._faults.no_server_reads(stretch.next, server, wanted, self._workers)
                    unreadable = none and self._feed.wants(stretch.next)
                    final = unreadable and self._fallback is None
                damaged = failed is not None and isinstance(failed.__cause__, MalformedFileError)
                if damaged:
                    self._faults.damage.damaged(time.monotonic())
                if failed is not None and not final:
                    self._failed(worker, failed)
                elif unknown and not final:
                    self._there.add(server)
                    self._servers.absent = False
            if came or damaged or (failed is None and not unknown):
                pause = _FIRST_PAUSE
            if failed is None:
                continue
            if unreadable and self._fallback is not None:
                self._engage(self._fallback)
            if final:
                self._fail(before if stretch is None else stretch.next, failed)
                return
            # The jitter keeps clients of a server that comes back from asking all at once.
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _rest(self, wanted: int, waiting: bool) -> None:
        """There is nothing to do just now."""
        self._feed.wait(wanted, _TICK)
        if waiting and self._feed.look()[0] == wanted:
            time.sleep(_TICK / 10)

    def _tried(self, worker: Worker, stretch: Stretch | None) -> FastpipeError | None:
        """Has a stretch brought, or asks whether the server is there. Returns what goes wrong."""
        connection = self._connections[worker.server]
        try:
            if stretch is None:
                connection.ask("health", {}, self._timeout)
            else:
                self._bring(worker, stretch)
        except PassClosedError:
            return None
        except FastpipeError as error:
            return worker.broken or error
        except Exception as error:  # A thread that dies silently would leave the consumer waiting.
            failed = ServiceError(f"{connection.url}: {type(error).__name__}: {error}")
            failed.__cause__ = error
            return failed
        return None

    def _bring(self, worker: Worker, stretch: Stretch) -> None:
        epoch, start, progress = self._request.place(stretch.next)
        stop = start + stretch.stop - stretch.next
        until = stop if not self._schedule.alone else start + self._schedule.boundary(stretch.next) - stretch.next
        ticket = self._ticket(epoch, progress, start, stop, until, self._request.csr)
        answer = self._connections[worker.server].batches(ticket)
        try:
            with self._lock:
                if worker.abandoned:
                    return
                worker.answer, worker.answered, worker.heard = answer, True, time.monotonic()
            self._receive(worker, stretch, answer, (epoch, None if progress is not None else start))
        finally:
            worker.answer = None
            answer.close()

    def _receive(self, worker: Worker, stretch: Stretch, answer: Answer, place: tuple[int, int | None]) -> None:
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
                        self._faults.damage.came(came)
                        self._brings(worker, now)
                    waited = 0.0
            if stretch.next >= stretch.stop:
                return
            if stretch.again and not self._feed.wants(stretch.next):
                return
        raise ServiceError(f"{self._connections[worker.server].url} ended too early")

    def _brings(self, worker: Worker, now: float) -> None:
        """A server has brought something: all is well."""
        self._failing, self._heard = None, now
        self._faults.forget(worker.server)
        self._vain.discard(worker.server)
        worker.answered = False
        self._servers.absent = False
        if self._here is not None:
            self._schedule.remove(self._here)
            self._here = None

    def _wait_for_room(self, stretch: Stretch) -> float:
        """Waits until the consumer is near enough. Returns the seconds that it took."""
        begun = time.monotonic()
        while True:
            wanted, _, waiting, over = self._feed.look()
            if over:
                raise PassClosedError("the pass is over")
            ahead = self._ahead
            if stretch.next < wanted + ahead:
                return time.monotonic() - begun
            with self._lock:
                if waiting and self._schedule.came_back(wanted):
                    # The server that was to bring what the consumer waits for has failed.
                    raise PassClosedError("another batch is wanted first")
            self._feed.wait(stretch.next - ahead, _TICK)

    def _make_here(self, here: int, fallback: Fallback) -> None:
        """Makes batches in this process, until a server brings some."""
        stretch: Stretch | None = None
        wanted, *_ = self._feed.look()
        try:
            while True:
                wanted, _, waiting, over = self._feed.look()
                with self._lock:
                    if stretch is not None and (here != self._here or stretch.next >= stretch.stop):
                        self._schedule.done(stretch)
                        stretch = None
                    if over or here != self._here or self._schedule.finished:
                        return
                    ahead = self._ahead_here
                    if stretch is None:
                        stretch = self._schedule.take(here, time.monotonic(), wanted, ahead, waiting=waiting)
                    elif stretch.next >= wanted + ahead:
                        # There may be something that the consumer waits for.
                        self._schedule.done(stretch)
                        stretch = None
                if stretch is None:
                    self._rest(wanted, waiting)
                    continue
                begun = time.monotonic()
                fallback.put(stretch.next)
                with self._lock:
                    stretch.since = begun
                    self._schedule.brought(stretch, time.monotonic())
        except Exception as error:  # As above.
            # Whoever wrote the source sees where it failed; frames of these files would keep the feed, see `_fail`.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, Fallback.file):
                trace = trace.tb_next
            self._feed.fail(wanted if stretch is None else stretch.next, error.with_traceback(trace))
        finally:
            fallback.close()
