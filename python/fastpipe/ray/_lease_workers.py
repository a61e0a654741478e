"""Lease workers as Ray actors. Their number can change while they run.

    import fastpipe.ray

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
    with fastpipe.ray.LeaseWorkers(reader, "postgresql://.../ledger", embed, num_workers=2) as pool:
        pool.scale(8)
        for epoch, step, worker, value in pool:
            ...

Ray starts the processes, and the ledger assigns batches to them (see `Reader.lease`). Nothing is lost if Ray moves an
actor or a node fails: another worker processes the batches that weren't committed.

A worker sends the result of a batch to the collector, and commits the batch after the collector has accepted it. The
collector therefore has a result for each committed batch. If a worker dies in between, another worker processes the
batch again, and the collector keeps the first result.
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
    """The return value of `consume` for one batch.

    Attributes:
        epoch: Epoch of the batch.
        step: Index of the batch in its epoch, from 0.
        worker_name: Name of the worker that processed the batch.
        value: The return value.
    """

    epoch: int
    step: int
    worker_name: str
    value: Any


class Outcome(NamedTuple):
    """The reason why a worker ended.

    Attributes:
        kind: "finished" if the job is done, "stopped" if the pool stopped the worker, or "failed".
        refused: Number of commits that were refused because another worker held the lease.
        batch: Epoch and step of the batch that `consume` failed on, or None if something else failed.
        error: The error, pickled by Ray, or None if it can't be pickled.
        told: The error with its traceback, as text.
    """

    kind: str
    refused: int = 0
    batch: tuple[int, int] | None = None
    error: bytes | None = None
    told: str = ""


class Collector:
    """Keeps one result for each batch until the pool fetches it.

    Args:
        limit: Maximum number of results to keep. Workers wait when it is reached.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ready: deque[Result] = deque()
        # One byte per step for each epoch, set when a result has arrived. It filters out duplicates.
        self._seen: dict[int, bytearray] = {}
        self._changed = asyncio.Condition()

    async def add(self, result: Result) -> None:
        """Adds a result unless there is one for this batch. Returns after there was room for it."""
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
        """Returns and removes all results. Waits up to `seconds` for the first one."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._ready), seconds)
            taken = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        return taken


class Worker:
    """A lease worker in a Ray process. Ray calls `run` and `stop` in different threads."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._refused = 0
        self._batch: tuple[int, int] | None = None

    def ready(self) -> None:
        """Returns once the process has started."""

    def stop(self) -> None:
        """Makes `run` return after the current batch."""
        self._stopped.set()

    def run(
        self, reader: Reader, url: str, name: str, consume: Callable[[Any], Any], collector: Any, lease: dict[str, Any]
    ) -> Outcome:
        """Processes batches until the job is done. Returns an error instead of raising it, so the driver can see it."""
        try:
            finished = self._run(reader, url, name, consume, collector, lease)
            return Outcome("finished" if finished else "stopped", self._refused)
        except Exception as error:
            try:
                pickled = ray.cloudpickle.dumps(error)
                ray.cloudpickle.loads(pickled)
            except Exception:
                # For example, the error holds a lock or can't be rebuilt from its arguments. Only its text is sent.
                pickled = None
            return Outcome("failed", self._refused, self._batch, pickled, traceback.format_exc())

    def _run(
        self, reader: Reader, url: str, name: str, consume: Callable[[Any], Any], collector: Any, lease: dict[str, Any]
    ) -> bool:
        """Returns whether the job is done."""
        # As in Ray Data, a class is instantiated once for each worker, so that it can load a model only once.
        use = consume() if isinstance(consume, type) else consume
        worker = reader.lease(url, worker_name=name, **lease)
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
        """Calls a method that commits. Counts a refused commit, which isn't an error: another worker was faster."""
        try:
            act()
        except StaleLeaseError:
            self._refused += 1


_log = logging.getLogger("fastpipe")

# Seconds between checks of the workers. The pool handles ended workers at once.
_LOOK = 0.2
# Seconds that workers have to finish their batch and release their leases when the pool is closed.
_GRACE = 5.0


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The workers of a pool by their state.

    `fastpipe.leases.Ledger(url, job).status()` returns the progress of the job.

    Attributes:
        pending: Names of the workers that Ray hasn't started yet.
        running: Names of the workers that are running.
        stopping: Names of the workers that will stop after their current batch.
        restarts: Number of times that a worker died and was restarted.
        refused: Number of commits of ended workers that were refused because another worker processed the batches.
        done: Whether the job is done.
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
        name: Name in the ledger. A worker that replaces a dead one has the same name.
        actor: Ray's handle.
        awaited: Ray reference that resolves once the process has started, and from then on a reference for its end.
        pending: Whether Ray hasn't started it yet. A pending worker hasn't joined the job, so it can be killed.
        stopping: Whether the pool has asked it to stop.
    """

    name: str
    actor: Any
    awaited: Any
    pending: bool = True
    stopping: bool = False


class LeaseWorkers:
    """Ray actors that share the batches of a reader through leases. Each batch counts once per epoch.

    A worker that dies is restarted under its name and takes over its leases. Its uncommitted batches are processed
    again. `consume` may have seen some of them before, but the pool yields one result for each batch.

    Several threads may use a pool.

    Args:
        reader: Reader of the whole order, with a seed if it shuffles. It is pickled, so no pass may be active.
        url: URL of the ledger: `sqlite:///path` or `postgresql://…`. An SQLite file works only if all Ray nodes
            are on this machine.
        consume: Function that is called with each batch, in the worker's process. Its return value is a result if
            it isn't None. The batch is committed after the pool has the result. A class is instantiated once for each
            worker, and the instance is called.
        num_workers: Initial number of actors, at least 1. Defaults to 1.
        job: Name of the job in the ledger. Defaults to "default".
        actor_options: Options for Ray, such as `{"num_cpus": 2, "num_gpus": 1}`.
        max_restarts: Number of times that workers may die and be restarted before the pool fails. Defaults to 10.
        max_results: Maximum number of results to keep until they are fetched, at least 1. Workers wait when it is
            reached. Defaults to 1000.
        **lease: Further arguments of `Reader.lease`, such as `ttl=10.0` or `barrier=False`.

    Raises:
        TypeError: If `reader` isn't a reader, `consume` isn't callable, or one of them can't be pickled.
        ValueError: If a number is too small.

    Example:
        >>> import numpy as np
        >>> import fastpipe, fastpipe.ray
        >>> import ray
        >>> _ = ray.init(num_cpus=2, log_to_driver=False)
        >>> reader = fastpipe.from_arrays({"id": np.arange(100)}, batch_size=10)
        >>> with fastpipe.ray.LeaseWorkers(reader, "sqlite:///workers.db", lambda batch: batch["id"].sum()) as pool:
        ...     int(sum(result.value for result in pool))
        4950
        >>> ray.shutdown()
    """

    def __init__(
        self,
        reader: Reader,
        url: str,
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
            raise TypeError(
                f"consume must be a function of a batch, or a class with a __call__; got {type(consume).__name__}"
            )
        self._wanted = at_least("num_workers", num_workers, 1)
        self._max_restarts = at_least("max_restarts", max_restarts, 0)
        limit = at_least("max_results", max_results, 1)
        if "worker_name" in lease:
            raise TypeError("LeaseWorkers chooses the names of its workers: remove the argument `worker_name`")
        # One thread runs `run`, and the second one `stop`.
        self._actor = ray.remote(Worker).options(**(actor_options or {}), max_concurrency=2, max_restarts=0)
        # With references, Ray ships the objects once to each node instead of once to each worker.
        self._task = (ray.put(reader), url, ray.put(consume), {"job": job, **lease})
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
        """Changes the number of workers. Surplus workers stop after their current batch.

        Workers that Ray hasn't started yet are removed first, then the newest.

        Args:
            num_workers: Number of workers, at least 1.

        Raises:
            ValueError: If the number is less than 1.
            WorkerError: If a worker has failed.
        """
        wanted = at_least("num_workers", num_workers, 1)
        with self._lock:
            self._check()
            self._wanted = wanted
            running = [worker for worker in self._workers if not worker.stopping]
            # The sort is stable, so the oldest running workers come first.
            keep = sorted(running, key=lambda worker: worker.pending)[:wanted]
            for worker in running:
                if worker not in keep:
                    self._stop(worker)
            self._fill_up()

    def status(self) -> PoolStatus:
        """Returns the names of the workers by their state, and counts of restarts and refused commits."""
        with self._lock:
            pending = {worker.name for worker in self._workers if not worker.stopping and worker.pending}
            running = [worker.name for worker in self._workers if not worker.stopping and worker.name not in pending]
            stopping = [worker.name for worker in self._workers if worker.stopping]
            return PoolStatus(
                tuple(sorted(pending)), tuple(running), tuple(stopping), self._restarts, self._refused, self._finished
            )

    def _fill_up(self) -> None:
        """Starts workers until the pool has the wanted number."""
        while not self._closed and not self._finished and self._failure is None:
            if sum(not worker.stopping for worker in self._workers) >= self._wanted:
                return
            self._started += 1
            self._start(f"{self._prefix}-{self._started}")

    def _start(self, name: str) -> None:
        actor = self._actor.remote()
        self._workers.append(_Running(name, actor, actor.ready.remote()))

    def _begin(self, worker: _Running) -> None:
        """Starts the loop of a worker whose process has started."""
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
        """Watches the workers in a separate thread until none is left."""
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
        """Handles a worker whose reference has resolved."""
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
            message = f"the worker {worker.name} died after {self._restarts} restarts of the pool's workers: {error}"
            self._fail(WorkerError(message, worker_name=worker.name), error)
            return
        self._restarts += 1
        _log.warning("the worker %s died and is restarted (%d): %s", worker.name, self._restarts, error)
        self._start(worker.name)

    def _fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """Stores the first error, which the next call raises, and stops all workers."""
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
        """Yields each result once, in order of arrival. Closes the pool after the job is done.

        Raises:
            WorkerError: If `consume` fails or too many workers die. The message contains the worker and the batch.
        """
        while not self._closed:
            # A worker adds all its results before it ends.
            ended = not self._watcher.is_alive()
            taken: list[Result] = ray.get(self._collector.take.remote(_LOOK))
            yield from taken
            if self._failure is not None:
                self.close()
                raise self._failure
            if ended and not taken:
                self.close()

    def join(self) -> list[Result]:
        """Waits until the job is done. Returns the results that weren't fetched yet, in the order of batches.

        Raises:
            WorkerError: If `consume` fails or too many workers die.
        """
        return sorted(self, key=lambda result: result[:2])

    def close(self) -> None:
        """Stops the workers, which then release their leases. Commits are kept, but unfetched results are lost.

        A worker that doesn't finish its batch within five seconds is killed, and its leases expire. Calling it twice
        has no effect.
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
            # Also kill workers that were pending: their process may have started in the meantime.
            for actor in [*(worker.actor for worker in workers), self._collector]:
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        status = self.status()
        return (
            f"LeaseWorkers({len(status.running)} running, {len(status.pending)} pending, "
            f"{len(status.stopping)} stopping)"
        )


def _failure(name: str, outcome: Outcome) -> BaseException:
    """Returns the error to raise for a failed worker."""
    error = None if outcome.error is None else ray.cloudpickle.loads(outcome.error)
    if outcome.batch is None and error is not None:
        # The error doesn't belong to a batch. Errors of the ledger are the same for all workers.
        return error  # type: ignore[no-any-return]
    epoch, step = outcome.batch or (None, None)
    where = f" with batch {step} of epoch {epoch}" if outcome.batch else ""
    failure = WorkerError(
        f"consume failed in the worker {name}{where}:\n{outcome.told}", worker_name=name, epoch=epoch, step=step
    )
    failure.__cause__ = error
    return failure
