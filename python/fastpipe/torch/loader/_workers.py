"""The workers of a loader, which are processes or threads, and the errors for lack of memory."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import PicklingError
from typing import Any

import torch.multiprocessing

from fastpipe._fastpipe import ItemConsumer
from fastpipe.errors import OutOfMemoryError, WorkerError
from fastpipe.torch.loader._messages import ThreadBatches
from fastpipe.torch.loader._worker import SharedFile, Task, work, work_in_thread

# Seconds that workers have to end by themselves after they are asked to, the same as in torch.
_PATIENCE = 5.0

# Seconds that workers have to end after a signal asks them to, if an error has occurred.
_GRACE = 0.2

# Seconds that a worker must have been stopped, while the consumer waits for a batch, to count as lost.
_STOPPED = 1.5

# Seconds between checks of workers that are ending.
_LOOK = 0.05

Worker = Any


class Workers:
    """Started workers. They end when `end` is called or this object is dropped.

    Args:
        consumer: Consumer of the workers' results.
        task: The work to do.
        makers: Number of item workers.
        joiners: Number of batch workers.
        context: Multiprocessing context for processes, or None for threads.

    Attributes:
        batches: Copied batches on their way from threads to the consumer. None for processes.
    """

    def __init__(self, consumer: ItemConsumer, task: Task, makers: int, joiners: int, context: Any) -> None:
        self._consumer = consumer
        self._process = os.getpid()
        self._ended = False
        # For each stopped worker, the time since which it is stopped and the time of the last check.
        self._stopped: dict[int, tuple[float, float]] = {}
        self.threads = context is None
        self.batches = ThreadBatches() if self.threads else None
        self.makers: list[Worker] = []
        self.joiners: list[Worker] = []
        _started.add(self)
        places = [(number, False) for number in range(makers)] + [(number, True) for number in range(joiners)]
        try:
            for number, joins in places:
                if self.batches is not None:
                    worker = self._thread(task, number, joins, self.batches)
                else:
                    worker = self._started(context, task, number, joins)
                (self.joiners if joins else self.makers).append(worker)
        except BaseException:
            self.end(at_once=True)
            raise

    def _thread(self, task: Task, number: int, joins: bool, batches: ThreadBatches) -> threading.Thread:
        thread = threading.Thread(
            target=work_in_thread,
            args=(self._consumer, task, number, joins, batches),
            name=f"fastpipe-{'batch-worker' if joins else 'item-worker'}-{number}",
            daemon=True,
        )
        thread.start()
        return thread

    def _started(self, context: Any, task: Task, number: int, joins: bool) -> Worker:
        file = self._consumer.file
        assert file is not None
        method = context.get_start_method()
        elsewhere = method == "forkserver"
        process = context.Process(
            target=work,
            args=(
                SharedFile(file),
                task,
                number,
                joins,
                method == "fork",
                None if elsewhere else os.getpid(),
                elsewhere or threading.current_thread() is threading.main_thread(),
            ),
        )
        process.daemon = True
        with _without_interrupts():
            try:
                process.start()
            except (TypeError, AttributeError, PicklingError):
                warnings.warn(
                    "cannot start a worker, because one of its arguments can't be pickled: the dataset, collate_fn or"
                    " worker_init_fn. Python 3.14 starts workers with 'forkserver', which pickles them;"
                    " multiprocessing_context='fork' doesn't",
                    stacklevel=2,
                )
                raise
        return process

    @property
    def all(self) -> list[Worker]:
        return self.makers + self.joiners

    @property
    def names(self) -> list[str]:
        """The names of all workers, as errors and `explain` use them."""
        return [_name(worker) for worker in self.all]

    def check(self, *, waiting: bool) -> None:
        """Checks that the workers are alive and not stopped.

        Args:
            waiting: Whether the consumer waits for a batch, which stopped workers may block. Then this is called
                several times a second.

        Raises:
            WorkerError: If a worker has exited or stays stopped by a signal. The message contains the worker's name and
                activity.
        """
        lost = [worker for worker in self.all if not worker.is_alive()]
        if lost:
            self._raise(lost, "exited unexpectedly" if not self.threads else "ended unexpectedly")
        if not waiting or self.threads:
            return
        now = time.monotonic()
        for worker in self.all:
            if not _is_stopped(worker.pid):
                self._stopped.pop(worker.pid, None)
                continue
            since, looked = self._stopped.get(worker.pid, (now, now))
            if now > looked + _STOPPED / 2:
                # No consumer has waited in the meantime, and the worker may have been running.
                since = now
            self._stopped[worker.pid] = since, now
            if now > since + _STOPPED:
                self._raise([worker], "is stopped by a signal, which blocks its items")

    def _raise(self, lost: list[Worker], what: str) -> None:
        views = self._consumer.views()
        doing = [f"{_name(worker)}{_ending(worker)} {_activity(views[self.all.index(worker)])}" for worker in lost]
        if self.threads:
            who = f"DataLoader worker thread(s) {', '.join(worker.name for worker in lost)}"
        else:
            who = f"DataLoader worker (pid(s) {', '.join(str(worker.pid) for worker in lost)})"
        first = lost[0]
        killed = [] if self.threads else [worker for worker in lost if (worker.exitcode or 0) < 0]
        if killed:
            # torch's wording, which programs search for. Like torch, it names one worker even if several were killed.
            first = killed[0]
            who = f"DataLoader worker (pid {first.pid})"
            what = f"is killed by signal: {signal.strsignal(-first.exitcode)}"
        self.end(at_once=True)
        raise WorkerError(f"{who} {what}: {'; '.join(doing)}", worker_name=_name(first))

    def told(self) -> str:
        """Returns a text that describes what the workers are doing."""
        pairs = zip(self.all, self._consumer.views(), strict=False)
        return "; ".join(f"{_name(worker)}{self._told_to_stop(worker)} {_activity(view)}" for worker, view in pairs)

    def _told_to_stop(self, worker: Worker) -> str:
        return " is stopped by a signal" if not self.threads and _is_stopped(worker.pid) else ""

    def end(self, *, at_once: bool = False, grace: float | None = None) -> None:
        """Lets the workers finish the items that they are creating, ends them, and waits for them.

        Args:
            at_once: Whether to end processes that are creating items.
            grace: Seconds that a process has to end after a signal asks it to.
        """
        if self._ended or self._process != os.getpid():
            return
        self._ended = True
        self._consumer.stop()
        if not at_once:
            _join(self.all)
        if self.threads:
            return
        if grace is None:
            grace = _GRACE if at_once else _PATIENCE
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _PATIENCE)):
            alive = [worker for worker in self.all if worker.is_alive()]
            for worker in alive:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, number)
            _join(alive, seconds)

    def __del__(self) -> None:
        with suppress(AttributeError, TypeError):
            self.end()


_started: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Ends the workers at exit, before multiprocessing does, which would wait for a stopped worker.

    Threads must end as well. If a thread returned from its item later, Python would end it inside frames of Rust, which
    aborts the program.
    """
    for workers in list(_started):
        workers.end(at_once=True, grace=_PATIENCE)
    _join([worker for workers in _started if workers.threads for worker in workers.all])


def _join(workers: list[Worker], seconds: float = _PATIENCE) -> None:
    """Waits for workers that were asked to end. Kills processes that are stopped by a signal, since they won't end."""
    deadline = time.monotonic() + seconds
    for worker in workers:
        if worker is threading.current_thread():
            continue
        worker.join(max(0.0, min(_LOOK, deadline - time.monotonic())))
        while worker.is_alive() and time.monotonic() < deadline:
            if not isinstance(worker, threading.Thread) and _is_stopped(worker.pid):
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
            worker.join(_LOOK)


def _name(worker: Worker) -> str:
    return str(worker.name)


def _ending(worker: Worker) -> str:
    code = getattr(worker, "exitcode", None)
    if code is None:
        return ""
    if code < 0:
        try:
            return f" was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f" was killed by signal {-code}"
    return f" ended with exit code {code}"


def _activity(view: dict[str, Any]) -> str:
    match view["activity"]:
        case "making":
            item = f"row {view['row']} of batch {view['batch']}"
            index = "" if view["index"] is None else f", index {view['index']}"
            return f"while making {item}{index}, for {view['for']:.1f} s"
        case "joining":
            return f"while collating batch {view['batch']}, for {view['for']:.1f} s"
        case "waiting":
            return "while waiting for work"
        case "starting":
            return "while starting"
    return "after its work"


def _is_stopped(process: int) -> bool:
    """Whether a signal has stopped a process. A process that a debugger has stopped is in another state."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Blocks Ctrl-C for processes that are being started, until they ignore it themselves."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def threads_take_turns() -> bool:
    """Whether only one thread of this interpreter runs at a time, which is true except on free-threaded Python."""
    gil = getattr(sys, "_is_gil_enabled", None)
    return gil is None or bool(gil())


def context_of(given: Any) -> Any:
    """Returns the multiprocessing context that starts processes."""
    return torch.multiprocessing if given is None else given


# The minimum size of shared memory, as in `shared_slabs.rs`.
_LEAST_SPACE = 16 << 20


def no_address_space(error: Exception) -> OutOfMemoryError:
    """Returns the error for shared memory that can't be mapped."""
    return OutOfMemoryError(
        f"cannot map shared memory for batches, which requires several times {_LEAST_SPACE:,} bytes of address space:"
        f" {error}. Check the limits `ulimit -v` and `ulimit -f`"
    )


def no_memory(wanted: int, held: int, most: int, number: int | None, *, limited: bool) -> OutOfMemoryError:
    """Returns the error for a batch that doesn't fit into memory.

    Args:
        wanted: Bytes that the batch needs.
        held: Bytes in use.
        most: Maximum number of bytes.
        number: Number of the system error, or None if the limit is reached.
        limited: Whether the program has set the limit.
    """
    why = f"{os.strerror(number)} (error {number})" if number else f"{most:,} is the limit"
    whose = "memory_limit" if limited else "the memory that the machine or its container has left"
    return OutOfMemoryError(
        f"not enough shared memory for a batch: it needs {wanted:,} bytes in addition to {held:,} in use, and {why}"
        f" ({whose}). Reduce batch_size or prefetch_factor, or release batches that the program keeps"
    )
