"""Workers on leases as Ray's actors, more or fewer of them while they run.

    import fastpipe.ray

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
    with fastpipe.ray.LeaseWorkers(reader, "postgresql://.../ledger", embed, num_workers=2) as pool:
        pool.scale(8)
        for epoch, step, worker, value in pool:
            ...

Ray starts the processes; the ledger says which of them does which batches (see `Reader.lease`). So nothing is lost when
Ray moves an actor, or a machine goes: what it hadn't committed is done by another one.

A worker hands in the result of a batch, and commits the batch when the collector has it. So each batch that is
committed has a result there. If a worker dies in between, another one uses the batch, too; the collector keeps the
first result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import ray

from fastpipe._reader.passes import passes_of
from fastpipe._reader.reader import Reader
from fastpipe.errors import StaleLeaseError, WorkerError
from fastpipe.ray._arguments import at_least


class Result(NamedTuple):
    """What `consume` returned for a batch.

    Attributes:
        epoch: of the batch.
        step: of the batch in its epoch, as `Reader.batch_at` counts.
        worker: that used it.
        value: that was returned.
    """

    epoch: int
    step: int
    worker: str
    value: Any


class Outcome(NamedTuple):
    """How a worker ended.

    Attributes:
        kind: "finished" if the job is done, "stopped" if it was told to, or "failed".
        refused: commits that were refused, since another worker does the batches.
        batch: the epoch and the step of the batch that `consume` failed with; None if something else failed.
        error: pickled by Ray; None if it can't be.
        told: the error with its traceback, as text.
    """

    kind: str
    refused: int = 0
    batch: tuple[int, int] | None = None
    error: bytes | None = None
    told: str = ""


class Collector:
    """Keeps results until they are taken, one for each batch.

    Args:
        limit: how many it keeps; then workers wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ready: deque[Result] = deque()
        # A byte for each step of an epoch: results are those of batches that weren't there before.
        self._seen: dict[int, bytearray] = {}
        self._changed = asyncio.Condition()

    async def add(self, result: Result) -> None:
        """Takes a result; returns when there was room for it."""
        seen = self._seen.setdefault(result.epoch, bytearray())
        if result.step >= len(seen):
            seen.extend(bytes(max(1024, result.step + 1 - len(seen), len(seen))))
        if seen[result.step]:
            return
        seen[result.step] = 1
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready) < self._limit)
            self._ready.append(result)
            self._changed.notify_all()

    async def take(self, seconds: float) -> list[Result]:
        """All results that are there; waits for the first one for so long."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._ready), seconds)
            taken = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        return taken


class Worker:
    """A worker on leases, in a process of Ray's. `run` and `stop` are called from different threads."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._refused = 0
        self._batch: tuple[int, int] | None = None

    def ready(self) -> None:
        """Answers when the process is there."""

    def stop(self) -> None:
        """Lets `run` end behind the batch that is being used."""
        self._stopped.set()

    def run(
        self, reader: Reader, url: str, name: str, consume: Callable[[Any], Any], collector: Any, lease: dict[str, Any]
    ) -> Outcome:
        """Uses batches until the job is done. Errors are returned, so that they reach the driver whatever they are."""
        try:
            finished = self._run(reader, url, name, consume, collector, lease)
            return Outcome("finished" if finished else "stopped", self._refused)
        except Exception as error:
            try:
                pickled = ray.cloudpickle.dumps(error)
                ray.cloudpickle.loads(pickled)
            except Exception:
                # It has a lock in it, or can't be built from its arguments: its text has to do.
                pickled = None
            return Outcome("failed", self._refused, self._batch, pickled, traceback.format_exc())

    def _run(
        self, reader: Reader, url: str, name: str, consume: Callable[[Any], Any], collector: Any, lease: dict[str, Any]
    ) -> bool:
        """Returns whether the job is done."""
        # As in Ray Data, a class is built once for each worker: a model is loaded once.
        use = consume() if isinstance(consume, type) else consume
        worker = reader.lease(url, worker=name, **lease)
        try:
            for batch in worker:
                assert worker.position is not None
                epoch, step = self._batch = worker.position
                value = use(batch)
                self._batch = None
                if value is not None:
                    ray.get(collector.add.remote(Result(epoch, step, name, value)))
                self._try(worker.commit)
                if self._stopped.is_set():
                    return False
            return True
        finally:
            self._try(worker.close)

    def _try(self, act: Callable[[], None]) -> None:
        """Commits; that another worker was quicker is no fault."""
        try:
            act()
        except StaleLeaseError:
            self._refused += 1


_log = logging.getLogger("fastpipe")

# Seconds between two looks at the workers; what they tell arrives at once.
_LOOK = 0.2
# Seconds that workers have to end their batch and give up their leases when the pool is closed.
_GRACE = 5.0


class PoolStatus(NamedTuple):
    """What the workers of a pool do. What is done of the job says `fastpipe.Ledger(url, job).status()`.

    Attributes:
        pending: names of the workers that wait for Ray to start them.
        running: names of the workers that run.
        stopping: names of the workers that end behind the batch that they use.
        restarts: how often a worker died and was started again.
        refused: commits of workers that have ended which were refused, since another worker did the batches.
        done: whether the job is done.
    """

    pending: tuple[str, ...]
    running: tuple[str, ...]
    stopping: tuple[str, ...]
    restarts: int
    refused: int
    done: bool


@dataclass(eq=False)
class _Running:
    """A worker of the pool.

    Attributes:
        name: in the ledger; that of the worker whose place it takes, if one died.
        actor: Ray's handle.
        awaited: known to Ray once the process is there; then, once it has ended.
        pending: whether Ray hasn't started it yet. Until then it joins no job, so that it can be killed.
        stopping: whether it was told to stop.
    """

    name: str
    actor: Any
    awaited: Any
    pending: bool = True
    stopping: bool = False


class LeaseWorkers:
    """Ray actors that share the batches of a reader by leases, each batch once an epoch.

    A worker that dies is started again under its name, and takes its leases over. Its batches that weren't committed
    are used once more; `consume` may have seen some of those, and the pool has one result for each all the same.

    Several threads may use a pool.

    Args:
        reader: of the whole order, with a seed if it shuffles. It is pickled, so no pass may be active.
        ledger_url: as in `Reader.lease`. A SQLite file does if all of Ray is on this machine.
        consume: called with each batch, in the worker's process. What it returns is a result, unless that is None; the
            batch is committed once the pool has it. A class is built once for each worker, and called then.
        num_workers: actors to begin with, at least 1.
        job: its name in the ledger.
        actor_options: for Ray, such as `{"num_cpus": 2, "num_gpus": 1}`.
        max_restarts: how many workers may die and be started again before the pool gives up.
        max_results: results that are kept until they are taken, at least 1; then workers wait.
        **lease: further arguments of `Reader.lease`, such as `ttl=10.0` or `barrier=False`.

    Raises:
        TypeError: if `reader` has no batches, `consume` can't be called, or one of them can't be pickled.
        ValueError: if a number is less than it may be.

    Example:
        >>> ray.init(num_cpus=2)  # doctest: +SKIP
        >>> reader = fastpipe.from_arrays({"id": np.arange(100)}, batch_size=10)  # doctest: +SKIP
        >>> with LeaseWorkers(reader, "sqlite:///ledger.db", lambda batch: batch["id"].sum()) as pool:  # doctest: +SKIP
        ...     sum(result.value for result in pool)
        4950
    """

    def __init__(
        self,
        reader: Reader,
        ledger_url: str,
        consume: Callable[[Any], Any],
        *,
        num_workers: int = 1,
        job: str = "default",
        actor_options: Mapping[str, Any] | None = None,
        max_restarts: int = 10,
        max_results: int = 1000,
        **lease: Any,
    ) -> None:
        passes_of(reader)
        if not callable(consume):
            raise TypeError(f"consume is a function of a batch, or a class of such, not {type(consume).__name__}")
        self._wanted = at_least("num_workers", num_workers, 1)
        self._max_restarts = at_least("max_restarts", max_restarts, 0)
        limit = at_least("max_results", max_results, 1)
        if "worker" in lease:
            raise TypeError("LeaseWorkers names its workers itself: leave `worker` out")
        # One at a time runs; the second thread tells it to stop.
        self._actor = ray.remote(Worker).options(**(actor_options or {}), max_concurrency=2, max_restarts=0)
        # References, so that Ray ships them once to each machine, not once to each worker.
        self._task = (ray.put(reader), ledger_url, ray.put(consume), {"job": job, **lease})
        self._collector = ray.remote(Collector).options(num_cpus=0, max_concurrency=10_000).remote(limit)
        self._prefix = f"ray-{secrets.token_hex(3)}"
        self._started = self._restarts = self._refused = 0
        self._workers: list[_Running] = []
        self._lock = threading.RLock()
        self._closed = self._finished = False
        self._failure: BaseException | None = None
        self._fill_up()
        self._watcher = threading.Thread(target=self._watch, name="fastpipe-ray", daemon=True)
        self._watcher.start()

    # Workers.

    def scale(self, num_workers: int) -> None:
        """Lets so many workers run from now on. Those that are too many end behind the batch that they use.

        Workers that Ray hasn't started yet go first, then the youngest.

        Args:
            num_workers: at least 1.

        Raises:
            ValueError: if it is less.
            WorkerError: if a worker has failed.
        """
        wanted = at_least("num_workers", num_workers, 1)
        with self._lock:
            self._check()
            self._wanted = wanted
            running = [worker for worker in self._workers if not worker.stopping]
            # Among those that run the oldest come first.
            keep = sorted(running, key=lambda worker: worker.pending)[:wanted]
            for worker in running:
                if worker not in keep:
                    self._stop(worker)
            self._fill_up()

    def status(self) -> PoolStatus:
        """What the workers do."""
        with self._lock:
            pending = {worker.name for worker in self._workers if not worker.stopping and worker.pending}
            running = [worker.name for worker in self._workers if not worker.stopping and worker.name not in pending]
            stopping = [worker.name for worker in self._workers if worker.stopping]
            return PoolStatus(
                tuple(sorted(pending)), tuple(running), tuple(stopping), self._restarts, self._refused, self._finished
            )

    def _fill_up(self) -> None:
        """Starts as many workers as are missing."""
        while not self._closed and not self._finished and self._failure is None:
            if sum(not worker.stopping for worker in self._workers) >= self._wanted:
                return
            self._started += 1
            self._start(f"{self._prefix}-{self._started}")

    def _start(self, name: str) -> None:
        actor = self._actor.remote()
        self._workers.append(_Running(name, actor, actor.ready.remote()))

    def _begin(self, worker: _Running) -> None:
        """Lets a worker run whose process is there."""
        reader, url, consume, lease = self._task
        worker.pending = False
        worker.awaited = worker.actor.run.remote(reader, url, worker.name, consume, self._collector, lease)

    def _stop(self, worker: _Running) -> None:
        worker.stopping = True
        if worker.pending:
            ray.kill(worker.actor)
        else:
            worker.actor.stop.remote()

    def _watch(self) -> None:
        """Sees workers end, until there are none; in a thread of its own."""
        while True:
            with self._lock:
                awaited = {worker.awaited: worker for worker in self._workers}
            if not awaited:
                return
            known, _ = ray.wait(list(awaited), num_returns=1, timeout=_LOOK)
            with self._lock:
                for reference in known:
                    self._look_at(awaited[reference])
                self._fill_up()

    def _look_at(self, worker: _Running) -> None:
        """Sees what has become of a worker."""
        try:
            outcome: Outcome | None = ray.get(worker.awaited)
        except ray.exceptions.RayError as error:
            self._workers.remove(worker)
            self._died(worker, error)
            return
        if outcome is None and not worker.stopping:
            self._begin(worker)
            return
        self._workers.remove(worker)
        if outcome is not None:
            self._ended(worker, outcome)

    def _ended(self, worker: _Running, outcome: Outcome) -> None:
        self._refused += outcome.refused
        if outcome.kind == "finished":
            self._finished = True
        elif outcome.kind == "failed" and not self._closed:
            self._fail(_failure(worker.name, outcome))

    def _died(self, worker: _Running, error: BaseException) -> None:
        if worker.stopping or self._closed or self._finished or self._failure is not None:
            return
        if self._restarts == self._max_restarts:
            message = f"the worker {worker.name} died, and {self._restarts} have been started again before: {error}"
            self._fail(WorkerError(message, worker=worker.name), error)
            return
        self._restarts += 1
        _log.warning("the worker %s died and is started again (%d): %s", worker.name, self._restarts, error)
        self._start(worker.name)

    def _fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """Keeps the first error for whoever asks next, and stops all workers."""
        if self._failure is None:
            error.__cause__ = cause or error.__cause__
            self._failure = error
        for worker in self._workers:
            self._stop(worker)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise WorkerError("the pool is closed")

    # Results.

    def __iter__(self) -> Iterator[Result]:
        """Results as they come, each once; ends when the job is done, and closes the pool.

        Raises:
            WorkerError: if `consume` fails, or too many workers die; it says which worker, and with which batch.
        """
        while not self._closed:
            # Whoever has ended has handed in its results before.
            ended = not self._watcher.is_alive()
            taken: list[Result] = ray.get(self._collector.take.remote(_LOOK))
            yield from taken
            if self._failure is not None:
                self.close()
                raise self._failure
            if ended and not taken:
                self.close()

    def join(self) -> list[Result]:
        """Waits until the job is done, and returns the results that weren't taken yet, in the order of batches.

        Raises:
            WorkerError: as iteration does.
        """
        return sorted(self, key=lambda result: result[:2])

    def close(self) -> None:
        """Stops the workers, which give up their leases. What was committed stays; results that weren't taken are lost.

        A worker that doesn't end its batch within five seconds is killed; its leases expire. Twice does no harm.
        """
        with self._lock:
            self._closed = True
            workers = list(self._workers)
            for worker in workers:
                if not worker.stopping:
                    self._stop(worker)
        if not ray.is_initialized():
            return
        deadline = time.monotonic() + _GRACE
        try:
            self._watcher.join(max(0.0, deadline - time.monotonic()))
        finally:
            # A process may be there by now.
            for actor in [*(worker.actor for worker in workers), self._collector]:
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        pending, running, stopping, *_ = self.status()
        return f"LeaseWorkers({len(running)} running, {len(pending)} pending, {len(stopping)} stopping)"


def _failure(name: str, outcome: Outcome) -> BaseException:
    """The error to raise for a worker's."""
    error = None if outcome.error is None else ray.cloudpickle.loads(outcome.error)
    if outcome.batch is None and error is not None:
        # It isn't about a batch: what the ledger says is the same for all workers.
        return error  # type: ignore[no-any-return]
    epoch, step = outcome.batch or (None, None)
    where = f" with batch {step} of epoch {epoch}" if outcome.batch else ""
    failure = WorkerError(
        f"consume failed in the worker {name}{where}:\n{outcome.told}", worker=name, epoch=epoch, step=step
    )
    failure.__cause__ = error
    return failure
