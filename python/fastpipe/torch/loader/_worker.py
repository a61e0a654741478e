"""A worker: a process or a thread that makes items, or batches of items."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper

from fastpipe._fastpipe import ItemBatch, ItemConsumer, ItemRoom, ItemWorker, end_with_parent
from fastpipe.errors import WorkerError
from fastpipe.torch.loader import _messages, _structure
from fastpipe.torch.loader._messages import ThreadBatches
from fastpipe.torch.loader._seeds import ItemGenerators, seed_worker
from fastpipe.torch.loader._structure import collate, collate_privately, is_default
from fastpipe.torch.loader._worker_info import ItemWorkerInfo, set_in_process, set_in_thread


class SharedFile:
    """The file of memory in common, for the processes that this one starts."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise TypeError("memory in common goes only to processes that are being started")
        return _received, (DupFd(self.number),)


def _received(file: Any) -> SharedFile:
    return SharedFile(file.detach())


class Task(NamedTuple):
    """What workers are started for.

    Attributes:
        dataset: whose items they make.
        collate_fn: makes a batch of items, or of what the data set has for all indices of a batch at once.
        fetch: how: "items" are asked for one by one, a "batch" at once (`__getitems__`), or the only one is a "sample".
        worker_init_fn: called first, with the worker's number.
        num_workers: makers of items.
        base_seed: of the first pass.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    fetch: str
    worker_init_fn: Callable[[int], Any] | None
    num_workers: int
    base_seed: int


class _Helper:
    """What `ItemWorker` asks Python to do."""

    def __init__(self, task: Task, worker: ItemWorker, where: str, batches: ThreadBatches | None) -> None:
        self.dataset = task.dataset
        # None in threads, which share the generators with the program.
        self.generators: ItemGenerators | None = None
        self.layout = lambda description: _structure.Layout(description).rows
        self.pack = _messages.message
        self.indices = pickle.loads
        self.default = is_default(task.collate_fn)
        self.join_whole = None if task.fetch == "items" else self._join_whole
        self._collate = collate if self.default else task.collate_fn
        self._fetch = fetcher(task.dataset, task.fetch, self._collate)
        # Writes what was made of items that no other worker has.
        self._own_message = _messages.message if batches is None else batches.message
        self._where = where
        self._worker = worker

    def describe(self, item: Any, before: bytes | None) -> bytes | None:
        return _structure.described(item, before, default=self.default)

    def fail(self, error: BaseException, room: ItemRoom) -> tuple[int, int]:
        wrapped = ExceptionWrapper((type(error), error, error.__traceback__), where=self._where)  # type: ignore[no-untyped-call]
        if isinstance(error, StopIteration):
            # It would end the loop over the loader as if there were no more.
            wrapped.exc_type = RuntimeError
        elif not isinstance(error, Exception):
            # `sys.exit` of an item, for example, isn't the program's.
            wrapped.exc_type = WorkerError
        wrapped.exc_type = _raisable(wrapped)
        return _messages.message(wrapped, room)

    def join(self, batch: ItemBatch, room: ItemRoom) -> tuple[int, int]:
        made = [batch.items(_messages.read)]
        number, seed = batch.number, batch.seed
        made.append(self._seeded(self._collate, made.pop(), seed, number))
        return _messages.message_of_batch(made, batch, room)

    def join_own(self, items: list[Any], room: ItemRoom, seed: int, number: int) -> tuple[int, int]:
        return self._own_message(self._seeded(self._collate, items, seed, number), room)

    def _join_whole(self, indices: list[Any], room: ItemRoom, seed: int, number: int) -> tuple[int, int]:
        return self._own_message(self._seeded(self._fetch, indices, seed, number), room)

    def _seeded(self, function: Callable[[Any], Any], argument: Any, seed: int, number: int) -> Any:
        if self.generators is None:
            return function(argument)
        return self.generators.call(function, argument, seed, number)


def _raisable(wrapped: Any) -> type[BaseException]:
    """The class of what the consumer is to raise."""
    kind: type[BaseException] = wrapped.exc_type
    try:
        copy = pickle.loads(pickle.dumps(wrapped))
    except Exception:
        # It is known here alone.
        return WorkerError
    try:
        copy.reraise()
    except (kind, RuntimeError):
        return kind
    except BaseException:
        # It isn't made of a message.
        return RuntimeError
    return kind


def fetcher(dataset: Any, fetch: str, collate_fn: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    """What makes a batch of all its indices at once."""
    if fetch == "sample":
        return lambda indices: collate_fn(dataset[indices[0]])
    return lambda indices: collate_fn(dataset.__getitems__(indices))


def work(
    file: SharedFile, task: Task, number: int, joins: bool, fork: bool, parent: int | None, by_main_thread: bool
) -> None:
    """What a worker's process does.

    Args:
        file: of the memory in common.
        task: what it does.
        number: among makers, or among those that join.
        joins: whether it makes batches of items, instead of items.
        fork: whether the process was forked.
        parent: the process that started it; None if it was another one's, which ends with the program's.
        by_main_thread: whether the main thread of that process did. Another thread may end before its process does.
    """
    # Ctrl-C is for the program: it decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent is None:
        _watch_program()
        parent = os.getppid()
    if by_main_thread and not end_with_parent(parent):
        return
    torch._C._set_worker_signal_handlers()
    torch.set_num_threads(1)
    collate_privately()
    worker = ItemWorker(file.number, number, joins=joins)
    # What torch would seed it with. Those that join have numbers of their own.
    ordinal = number + task.num_workers if joins else number
    seed = task.base_seed + ordinal
    seed_worker(task.base_seed, ordinal)
    if not fork:
        # CUDA's generators, too. They are of no use to a process that was forked, and take milliseconds.
        torch.manual_seed(seed)
    set_in_process(ItemWorkerInfo(ordinal, task.num_workers, task.dataset, "multiprocessing", seed))
    helper = _Helper(task, worker, f"in DataLoader worker process {number}", None)
    init = task.worker_init_fn
    try:
        if init is not None:
            init(ordinal)
    except Exception as error:
        worker.refuse(helper, error, parent)
        return
    info: Any = ItemWorkerInfo(
        ordinal, task.num_workers, task.dataset, "multiprocessing", worker.seed, lambda: worker.item
    )
    helper.generators = ItemGenerators(lambda drawn: info.rng.forget())
    set_in_process(info)
    worker.run(helper, parent)
    # Without a word of threads that the data set has started, as torch does it.
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _watch_program() -> None:
    """Lets a process that a server has forked end with the program.

    The server ends when all have let go of a pipe which the program has, and each process that it has forked; then its
    processes end, those too that are stopped. Processes of others may keep it alive, so the program is watched as well.
    """
    # Not on each system.
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    program = multiprocessing.parent_process()
    assert program is not None

    def watch() -> None:
        program.join()
        os._exit(1)

    threading.Thread(target=watch, name="fastpipe-watch", daemon=True).start()


def work_in_thread(consumer: ItemConsumer, task: Task, number: int, joins: bool, batches: ThreadBatches) -> None:
    """What a worker's thread does. As `work`; `batches` has those that it makes by itself."""
    collate_privately()
    worker = ItemWorker(consumer, number, joins=joins)
    ordinal = number + task.num_workers if joins else number
    set_in_thread(ItemWorkerInfo(ordinal, task.num_workers, task.dataset, "thread", task.base_seed + ordinal))
    helper = _Helper(task, worker, f"in DataLoader worker thread {number}", batches)
    init = task.worker_init_fn
    try:
        if init is not None:
            init(ordinal)
    except Exception as error:
        worker.refuse(helper, error, None)
        return
    set_in_thread(ItemWorkerInfo(ordinal, task.num_workers, task.dataset, "thread", worker.seed, lambda: worker.item))
    worker.run(helper, None)
