"""Workers: processes or threads that create items or batches of items."""

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
from fastpipe.torch.loader._stream import Opening, Stream, Turn, WorkerStream
from fastpipe.torch.loader._structure import collate, collate_privately, is_default
from fastpipe.torch.loader._worker_info import ItemWorkerInfo, set_in_process, set_in_thread


class SharedFile:
    """The file descriptor of the shared memory, which can be sent to processes that this process starts."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise TypeError("shared memory can be sent only to a process that is being started")
        return _received, (DupFd(self.number),)


def _received(file: Any) -> SharedFile:
    return SharedFile(file.detach())


class Task(NamedTuple):
    """The work that workers are started for.

    Attributes:
        dataset: Dataset whose items the workers create.
        collate_fn: Function that creates a batch from items, or from the dataset's result for all indices of a batch.
        fetch: "items" fetches items individually, "batch" all at once (`__getitems__`), and "sample" a single one that
            isn't batched. "stream" makes batches of the worker's own iterator of the dataset.
        worker_init_fn: Function that each worker calls first, with its index.
        num_workers: Number of item workers.
        base_seed: Seed of the first pass.
        batch_size: Number of items per batch of a stream. None yields single items.
        drop_last: Whether to drop a last batch of a stream with fewer items.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    fetch: str
    worker_init_fn: Callable[[int], Any] | None
    num_workers: int
    base_seed: int
    batch_size: int | None
    drop_last: bool


class _Helper:
    """The Python functions that `ItemWorker` calls."""

    def __init__(self, task: Task, worker: ItemWorker, where: str, batches: ThreadBatches | None) -> None:
        self.dataset = task.dataset
        # None in threads, which share the generators with the program.
        self.generators: ItemGenerators | None = None
        self.layout = lambda description: _structure.Layout(description).rows
        self.pack = _messages.message
        self.indices = pickle.loads
        self.default = is_default(task.collate_fn)
        self.join_whole: Any = None if task.fetch == "items" else self._join_whole
        self._collate = collate if self.default else task.collate_fn
        if task.fetch == "stream":
            collate_fn = self._collate_in_place if self.default else task.collate_fn
            self._stream: WorkerStream | None = WorkerStream(
                Stream(task.dataset, task.batch_size, collate_fn, task.drop_last)
            )
            self.join_whole = self._join_stream
            # The batch that is being made of the stream.
            self._batch: ItemBatch | None = None
        else:
            self._fetch = fetcher(task.dataset, task.fetch, self._collate)
        # Writes a batch of items that no other worker has created.
        self._own_message = _messages.message if batches is None else batches.message
        self._where = where
        self._worker = worker

    def describe(self, item: Any, before: bytes | None) -> bytes | None:
        return _structure.described(item, before, default=self.default)

    def fail(self, error: BaseException, room: ItemRoom) -> tuple[int, int]:
        wrapped = ExceptionWrapper((type(error), error, error.__traceback__), where=self._where)  # type: ignore[no-untyped-call]
        if isinstance(error, StopIteration):
            # StopIteration would silently end the consumer's loop over the loader.
            wrapped.exc_type = RuntimeError
        elif not isinstance(error, Exception):
            # For example, `sys.exit` in an item must not exit the program.
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

    def _join_whole(self, indices: list[Any], room: ItemRoom, batch: ItemBatch) -> tuple[int, int]:
        made = self._seeded(self._fetch, indices, batch.seed, batch.number)
        room.wait()
        return self._own_message(made, room)

    def _join_stream(self, turns: list[Turn | Opening], room: ItemRoom, batch: ItemBatch) -> tuple[int, int]:
        assert self._stream is not None
        (turn,) = turns
        if isinstance(turn, Opening):
            state = self._stream.open(turn)
            room.ignore_size()
            return _messages.message(state, room)
        self._batch = batch
        try:
            made = [self._stream.answer(turn)]
        except BaseException:
            batch.release(keep=False)
            raise
        finally:
            self._batch = None
        if made[0].is_last:
            room.ignore_size()
        room.wait()
        return _messages.message_of_batch(made, batch, room)

    def _collate_in_place(self, items: list[Any]) -> Any:
        """Collates items in the memory of the batch, unless they are skipped."""
        batch = self._batch
        if batch is None:
            return collate(items)
        return _structure.collate_in(batch.array, items)

    def end(self) -> None:
        """Drops the iterator of a stream, so that its finalizers run before the process ends."""
        self._stream = None

    def _seeded(self, function: Callable[[Any], Any], argument: Any, seed: int, number: int) -> Any:
        if self.generators is None:
            return function(argument)
        return self.generators.call(function, argument, seed, number)


def _raisable(wrapped: Any) -> type[BaseException]:
    """Returns the exception class that the consumer can raise."""
    kind: type[BaseException] = wrapped.exc_type
    try:
        copy = pickle.loads(pickle.dumps(wrapped))
    except Exception:
        # Only this process can import the class.
        return WorkerError
    try:
        copy.reraise()
    except (kind, RuntimeError):
        return kind
    except BaseException:
        # The class can't be created from a message only.
        return RuntimeError
    return kind


def fetcher(dataset: Any, fetch: str, collate_fn: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    """Returns a function that creates a batch from all its indices at once."""
    if fetch == "sample":
        return lambda indices: collate_fn(dataset[indices[0]])
    return lambda indices: collate_fn(dataset.__getitems__(indices))


def work(
    file: SharedFile, task: Task, number: int, joins: bool, fork: bool, parent: int | None, by_main_thread: bool
) -> None:
    """Runs a worker process.

    Args:
        file: File of the shared memory.
        task: The work to do.
        number: Index of the worker among the item workers or among the batch workers.
        joins: Whether it creates batches of items (a batch worker) instead of items.
        fork: Whether the process was forked.
        parent: Id of the process that started it, or None if a fork server did, which ends with the program.
        by_main_thread: Whether the main thread of that process started it. Another thread may end before its process
            does.
    """
    # The program handles Ctrl-C and decides what happens to its workers.
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
    # The seed that torch would use. Batch workers are numbered after item workers.
    ordinal = number + task.num_workers if joins else number
    seed = task.base_seed + ordinal
    seed_worker(task.base_seed, ordinal)
    if not fork:
        # This also seeds CUDA's generators, which takes milliseconds. A forked process can't use them.
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
    if task.fetch != "stream":
        info: Any = ItemWorkerInfo(
            ordinal, task.num_workers, task.dataset, "multiprocessing", worker.seed, lambda: worker.item
        )
        helper.generators = ItemGenerators(lambda drawn: info.rng.forget())
        set_in_process(info)
    worker.run(helper, parent)
    helper.end()
    # Ignore errors caused by threads that the dataset has started, as torch does.
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _watch_program() -> None:
    """Makes a process that a fork server has forked end with the program.

    The fork server ends when the program and all processes forked by the server have closed a pipe. Its processes end
    with it, including stopped ones. Processes of other programs may keep the pipe open, so this thread also watches the
    program itself.
    """
    # Not available on every platform.
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
    """Runs a worker thread.

    See `work` for the arguments. `batches` stores the batches that the thread copies.
    """
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
