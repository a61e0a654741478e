"""The workers of a loader: processes, or threads of this one; and what is raised if there is no memory for them."""

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

# Seconds that workers have to end by themselves, once they are told to: as many as torch gives them.
_PATIENCE = 5.0

# Seconds that workers have once they are asked to end by a signal, where something has gone wrong.
_GRACE = 0.2

# Seconds for which a worker must have been stopped, while a batch is waited for, to count as lost.
_STOPPED = 1.5

# Seconds between looks at workers that are to end.
_LOOK = 0.05

Worker = Any


class Workers:
    """Started workers. They end with `end`, or when this is dropped.

    Args:
        consumer: for whom they work.
        task: what they do.
        makers: how many make items.
        joiners: how many make batches of items.
        context: of multiprocessing, for processes; None for threads.

    Attributes:
        batches: in flight from threads to the consumer; None for processes.
    """

    def __init__(self, consumer: ItemConsumer, task: Task, makers: int, joiners: int, context: Any) -> None:
        self._consumer = consumer
        self._process = os.getpid()
        self._ended = False
        # Since when a worker is stopped, and when that was last seen.
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
            name=f"fastpipe-{'joiner' if joins else 'maker'}-{number}",
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
                    "a worker can't be started, since what it needs can't be pickled: the data set, collate_fn or"
                    " worker_init_fn. Python 3.14 starts workers by 'forkserver', which needs that;"
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
        """Of all workers, as errors and `explain` call them."""
        return [_name(worker) for worker in self.all]

    def check(self, *, waiting: bool) -> None:
        """Looks after the workers.

        Args:
            waiting: whether a batch is waited for, which workers that are stopped by a signal may hold up. Then this is
                called several times a second.

        Raises:
            WorkerError: if one has ended, or has been stopped by a signal; it says which, and what it was doing.
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
                # Nobody has waited meanwhile, and it may have worked.
                since = now
            self._stopped[worker.pid] = since, now
            if now > since + _STOPPED:
                self._raise([worker], "is stopped by a signal, and its items with it")

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
            # In torch's words, which programs look for. It says it of one, too, if there are several.
            first = killed[0]
            who = f"DataLoader worker (pid {first.pid})"
            what = f"is killed by signal: {signal.strsignal(-first.exitcode)}"
        self.end(at_once=True)
        raise WorkerError(f"{who} {what}: {'; '.join(doing)}", worker=_name(first))

    def told(self) -> str:
        """What the workers are doing, in words."""
        pairs = zip(self.all, self._consumer.views(), strict=False)
        return "; ".join(f"{_name(worker)}{self._told_to_stop(worker)} {_activity(view)}" for worker, view in pairs)

    def _told_to_stop(self, worker: Worker) -> str:
        return " is stopped by a signal" if not self.threads and _is_stopped(worker.pid) else ""

    def end(self, *, at_once: bool = False, grace: float | None = None) -> None:
        """Lets the workers end behind the items that they are making, and waits for them.

        Args:
            at_once: ends processes that are making items.
            grace: seconds that a process has to end once it is asked to by a signal.
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
    """Ends the workers with the program, before multiprocessing does, which would wait for one that is stopped.

    Threads are waited for as well. One that comes back from its item later would be ended by Python within frames of
    Rust, which aborts the program.
    """
    for workers in list(_started):
        workers.end(at_once=True, grace=_PATIENCE)
    _join([worker for workers in _started if workers.threads for worker in workers.all])


def _join(workers: list[Worker], seconds: float = _PATIENCE) -> None:
    """Waits for workers that were told to end. A process that is stopped by a signal won't, and is killed."""
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
    """Whether a process is stopped by a signal; being stopped by a debugger is another state."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keeps Ctrl-C from processes that are being started, until they ignore it themselves."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def threads_take_turns() -> bool:
    """Whether one thread of this interpreter runs at a time: in all but free-threaded Python."""
    gil = getattr(sys, "_is_gil_enabled", None)
    return gil is None or bool(gil())


def context_of(given: Any) -> Any:
    """The context of multiprocessing to start processes by."""
    return torch.multiprocessing if given is None else given


# As `shared_slabs.rs` has it.
_LEAST_SPACE = 16 << 20


def no_address_space(error: Exception) -> OutOfMemoryError:
    """Of memory that can't even be mapped."""
    return OutOfMemoryError(
        f"there is no address space for batches, of which workers need {_LEAST_SPACE:,} bytes, several times over:"
        f" {error}. See what `ulimit -v` and `ulimit -f` allow"
    )


def no_memory(wanted: int, held: int, most: int, number: int | None, *, limited: bool) -> OutOfMemoryError:
    """Of a batch.

    Args:
        wanted: bytes that it needs.
        held: bytes that are in use.
        most: bytes that there may be.
        number: of the system's error; None if the limit is reached.
        limited: whether the program has set the limit.
    """
    why = f"{os.strerror(number)} (error {number})" if number else f"{most:,} may be in all"
    whose = "memory_limit" if limited else "what the machine, or its container, has left"
    return OutOfMemoryError(
        f"there is no shared memory for a batch: it needs {wanted:,} bytes beside the {held:,} in use, and {why}"
        f" ({whose}). A smaller batch_size or prefetch_factor needs less, and so does letting go of batches"
    )
