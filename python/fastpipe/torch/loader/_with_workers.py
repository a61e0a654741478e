"""A pass with workers."""

from __future__ import annotations

import errno
import os
import pickle
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils

from fastpipe._boundary import ItemConsumerOptions
from fastpipe._fastpipe import ItemConsumer, available_memory, item_seed
from fastpipe.errors import PassClosedError, WorkerError
from fastpipe.torch.loader import _messages
from fastpipe.torch.loader._delivery import Delivery
from fastpipe.torch.loader._hints import LayoutHints
from fastpipe.torch.loader._in_process import Beginning, Pass, ahead_of, fetch_of, stream_batch_size
from fastpipe.torch.loader._pin_thread import first_ready
from fastpipe.torch.loader._pinning import Pinning
from fastpipe.torch.loader._seeds import GlobalRngWatch
from fastpipe.torch.loader._structure import is_default
from fastpipe.torch.loader._time_account import Account, Look
from fastpipe.torch.loader._worker import Task
from fastpipe.torch.loader._worker_info import given_init
from fastpipe.torch.loader._workers import Workers, context_of, no_address_space, threads_take_turns

# Seconds that workers may be idle while the consumer waits for a batch, before another batch is starten for them.
_IDLE = 0.005
# Seconds between checks of the workers while the consumer waits for a batch, and while it doesn't.
LOOK = 0.05
_LOOK_UNASKED = 1.0
# Seconds between measurements of the available memory.
_MEASURE = 1.0

# Bytes that batches may use beyond the prefetched batches and the one that the consumer has.
_SLACK = 32 << 20

# Factor by which the number of begun batches may exceed torch's number while one batch takes long. If one item in a
# hundred takes 2 seconds, 8 workers create 1,600 items in 4.4 seconds with this value. With a factor of 1 they wait for
# each other and take 6.4 seconds.
_FURTHER = 2


class WithWorkers(Pass):
    """A pass with workers. Persistent workers run further passes with the same object."""

    def __init__(self, loader: Any, beginning: Beginning) -> None:
        self._workers_of_pass: Workers | None = None
        super().__init__(loader, beginning)
        self._loader_in_order = getattr(loader, "in_order", True)
        self._fetch_kind = fetch_of(loader)
        self._known: LayoutHints = loader._known
        self._pinning = Pinning(self._pin_memory, self._pin_memory_device, self._known)
        self._ahead = ahead_of(loader)
        # If a worker creates a whole batch at once, the size of the batch isn't known in advance.
        further = _FURTHER if self._fetch_kind == "items" else 1
        self._most_begun = further * self._ahead * loader.num_workers
        self._limit = loader.memory_limit
        self._drained = False
        self._trouble: tuple[int | None, Exception] | None = None
        self._looked = self._measured = time.monotonic()
        self._awaited: tuple[int, int] | None = None
        self._draws = GlobalRngWatch() if loader.worker_method == "thread" and not self._known.drawn else None
        self._collates = not is_default(loader.collate_fn)
        self.account = Account(self)
        self._start(loader)

    def _start(self, loader: Any) -> None:
        """Starts the workers."""
        threads = loader.worker_method == "thread"
        makers, joiners = loader.num_workers, self._joiners(loader)
        default = is_default(loader.collate_fn) and self._fetch_kind == "items"
        init = given_init(loader.worker_init_fn)
        self._shutdown = False
        self._lost = ""
        # Batches that were started and not delivered: the id of the batch and its index in the pass.
        self._begun: list[tuple[int, int]] = []
        # Whether a batch was started before the size of an item was known.
        self._unplanned = False
        locks = self._pinning.open_locks()
        try:
            options = ItemConsumerOptions(
                makers=makers,
                joiners=joiners,
                slots=self._most_begun + 2,
                joining=0 if default else 2 if joiners else 1,
                whole=self._fetch_kind != "items",
                turns=threads and threads_take_turns(),
                # Devices may lag behind by as many batches, whose memory can't be reused yet.
                ahead=self._ahead if locks is None else 2 * self._ahead,
                slack=_SLACK,
                most=self._most(0),
                # Private memory is copied on write after a fork, while the device keeps copying from the old pages.
                shared=not threads or locks is not None,
            )
            self._consumer = ItemConsumer(options)
        except (MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EFBIG):
                raise
            raise no_address_space(error) from error
        if locks is not None:
            self._consumer.set_page_locks(locks)
        self._delivery = Delivery(loader, self._consumer)
        if self._known.description is not None:
            # If the description doesn't fit into memory, batches don't either, and they report the error.
            with suppress(MemoryError):
                self._consumer.tell(self._known.description)
        self._fill()
        task = Task(
            loader.dataset,
            loader.collate_fn,
            self._fetch_kind,
            init,
            makers,
            int(self._base_seed),
            stream_batch_size(loader) if self._fetch_kind == "stream" else None,
            loader.drop_last,
        )
        context = None if threads else context_of(loader.multiprocessing_context)
        with self._watched():
            self._workers_of_pass = Workers(self._consumer, task, makers, joiners, context)
            # torch's name for the list of workers.
            self._workers = self._workers_of_pass.makers
            self._delivery.thread_batches = self._workers_of_pass.batches
            if init is not None:
                self._await_init()
        self._start_pin_thread()
        self.account.started()

    def _start_pin_thread(self) -> None:
        begun = [(batch, number, self.progress.seed) for batch, number in self._begun]
        self._pinning.start_thread(self._consumer, self._delivery.batch, self._loader_in_order, self._ahead, begun)

    def _await_init(self) -> None:
        """Waits until workers have called `worker_init_fn`, or the first batch is ready."""
        assert self._workers_of_pass is not None
        try:
            self._await_beginning()
        except BaseException:
            # The consumer won't receive any of the workers' results.
            self._workers_of_pass.end(at_once=True)
            self._shutdown_workers()
            raise

    def _await_beginning(self) -> None:
        """Waits until workers have begun, or the first batch is ready.

        Raises:
            Exception: The error that `worker_init_fn` raised in a worker.
        """
        deadline = time.monotonic() + self._timeout if self._timeout > 0 else None
        while (refusal := self._consumer.refusal()) is None:
            is_there = bool(self._begun) and self._consumer.ready(self._begun[0][0])
            # After the timeout, the wait for the first batch reports it.
            is_late = deadline is not None and time.monotonic() > deadline
            if is_there or is_late or self._consumer.has_begun():
                return
            self._consumer.wait(self._begun[0][0] if self._begun else None, _IDLE)
            if time.monotonic() > self._looked + LOOK:
                self._look_after()
        failure: ExceptionWrapper = _messages.read(*refusal)
        del refusal
        failure.reraise()  # type: ignore[no-untyped-call]

    def _joiners(self, loader: Any) -> int:
        if fetch_of(loader) != "items" or is_default(loader.collate_fn):
            return 0
        given = loader.num_batch_workers
        return ahead_of(loader) if given is None else int(given)

    def _most(self, held: int) -> int:
        """Returns how many bytes batches may use, including the `held` bytes in use."""
        if self._limit is not None:
            return int(self._limit)
        free = available_memory()
        return 2**63 if free is None else held + free - free // 16

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begins another pass with the same workers."""
        with self._lock:
            self._check_process()
            if not self._shutdown:
                self._give_up()
            resumed, rest = loader._taken_state()
            order = self._order_of(loader, Beginning(resumed))
            seed = self.next_seed if resumed is None else resumed["seed"]
            if rest is not None:
                rest.put_back(loader)
            iter(order)
            if rest is not None:
                # The seed that the first pass of a new loader would use, or the one stored for persistent workers.
                seed = _drawn_seed(loader.generator) if rest.seed is None else rest.seed
            self._num_yielded = 0
            self._IterableDataset_len_called = loader._IterableDataset_len_called
            self._begin(order, seed, resumed)
            self._drained, self._trouble = False, None
            if self._shutdown:
                # A worker was lost, and all workers have ended.
                self.account = Account(self)
                self._start(loader)
                return
            before = self.look()
            self._start_pin_thread()
            self._consumer.set_most(self._most(self._consumer.held))
            self._fill()
            self.account = Account(self, before)

    @property
    def next_seed(self) -> int:
        """Seed of the next pass with persistent workers."""
        return item_seed(self.progress.seed, 0, 1, 0)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise PassClosedError(
                "the pass was started by another process; call iter(loader) to start one in this process"
            )

    def _give_up(self) -> None:
        """Cancels the begun batches and waits until no worker uses them."""
        taken = self._pinning.end_thread()
        batches = [batch for batch, _ in self._begun if batch not in taken]
        self._consumer.cancel(batches)
        for batch in batches:
            while not self._consumer.wait(batch, LOOK):
                self._look_after()
            self._consumer.take(batch)
        self._begun.clear()
        if self._delivery.thread_batches is not None:
            self._delivery.thread_batches.clear()

    # Beginning batches.

    def _layout(self) -> tuple[int, Any] | None:
        """Returns the index and the layout for new batches, or None if no item has been described yet."""
        told = self._consumer.layout()
        if told is None:
            return None
        number, description = told
        self._known.description = description
        layout = number, self._delivery.layout(number, description).rows
        if self._unplanned:
            self._plan(number)
        return layout

    def _plan(self, layout: int) -> None:
        """Allocates memory for batches that were started before the size of an item was known."""
        while (found := self._consumer.unplanned(layout)) is not None:
            batch, number = found
            self._consumer.plan(batch, self._delivery.layout(number).rows)
        self._unplanned = False

    def _begin_one(self, *, later: bool = False) -> bool:
        """Begins the next batch. Returns False if no batch can be begun.

        While the size of an item isn't known, a worker allocates the memory of the batch. With `later`, `_plan`
        allocates it.

        If the sampler raises an error, or memory for the indices is lacking, the consumer receives the error after the
        batches that were started before.
        """
        if self._drained or self._trouble is not None or not self._consumer.can_begin():
            return False
        number = None
        try:
            number, indices = self._drawn()
            listed = [indices] if self._fetch_kind == "sample" else indices if type(indices) is list else list(indices)
            layout = None if self._fetch_kind != "items" else self._layout()
            owner = self.progress.order.owner(number)
            batch = self._consumer.begin(listed, pickled, number, self.progress.seed, layout or later, owner)
        except StopIteration:
            self._drained = True
            return False
        except Exception as error:
            self._trouble = number, error
            return False
        self._begun.append((batch, number))
        if self._pinning.thread is not None:
            self._pinning.thread.add(batch, number, self.progress.seed)
        self._unplanned |= later
        return True

    def _fill(self) -> None:
        while len(self._begun) < self._ahead and self._begin_one():
            pass

    def _begin_for_idle(self) -> None:
        """Begins another batch for idle workers while the consumer waits for a batch.

        So a slow item delays only its own batch. At most twice as many batches are started as in torch, and the
        additional batches use little memory.
        """
        if len(self._begun) < self._most_begun and self._consumer.idle():
            layout = self._layout()
            if layout is None and self._fetch_kind == "items":
                # The size of an item isn't known. The consumer's memory has slots for the batches that may be in
                # flight, and workers keep items of later batches until their turn comes. Such items may also wait for
                # each other. If workers create whole batches, no layout is known even after the first batch.
                if self._num_yielded == 0 and len(self._begun) < self._ahead + len(self._workers):
                    self._begin_one(later=True)
                return
            rows = self._loader_batch
            if self._consumer.has_slack(None if layout is None else layout[1], rows):
                self._begin_one()

    @property
    def _loader_batch(self) -> int:
        sampler = self._index_sampler
        return int(getattr(sampler, "batch_size", None) or 1) if self._auto_collation else 1

    # Delivering batches.

    def _next_data(self) -> Any:
        self._check_process()
        self.account.wait()
        try:
            if self._lost:
                raise WorkerError(self._lost)
            if not self._begun and not self._shutdown:
                self._fill()
            if not self._begun:
                self._raise_trouble()
                self.progress.ended = True
                if not self._persistent_workers:
                    self._shutdown_workers()
                raise StopIteration
            if time.monotonic() > self._looked + _LOOK_UNASKED:
                self._look_after(waiting=False)
            if self._pinning.locks is not None:
                self._pinning.locks.reuse(self._consumer, self._ahead)
            place = self._wait()
            if self._draws is not None and self._draws.found:
                self._draws.warn(stacklevel=3)
                self._known.drawn, self._draws = True, None
            batch, number = self._begun.pop(place)
            if self._pinning.thread is not None:
                self.progress.give(number)
                self._fill()
                return self._pinning.thread.take()
            # A traceback that keeps this frame must not keep the memory.
            taken = [self._consumer.take(batch)]
            self.progress.give(number)
            self._fill()
            self._pinning.lock(taken[0])
            return self._pinned(self._delivery.batch(taken, number, self.progress.seed))
        finally:
            self.account.leave()

    def _raise_trouble(self) -> None:
        """Raises, once, the error that prevented a batch from being begun."""
        if self._trouble is not None:
            (number, error), self._trouble = self._trouble, None
            if number is not None:
                self.progress.give(number)
            try:
                raise error
            finally:
                # The error's traceback contains this frame, which would keep the pass alive.
                del error

    def _ready_place(self) -> int | None:
        """Returns the position among the begun batches of one that can be delivered, or None."""
        if self._pinning.thread is not None:
            first = self._pinning.thread.first()
            return next((place for place, (batch, _) in enumerate(self._begun) if batch == first), None)
        if self._loader_in_order:
            return 0 if self._consumer.ready(self._begun[0][0]) else None
        return first_ready([batch for batch, _ in self._begun], self._consumer)

    def _wait(self) -> int:
        """Waits for the next batch and returns its position among the begun batches."""
        place = self._ready_place()
        if place is not None:
            return place
        begin = time.monotonic()
        self._awaited = self._begun[0]
        try:
            with self._watched():
                return self._wait_since(begin)
        finally:
            self._awaited = None

    def _watched(self) -> AbstractContextManager[None]:
        """Returns a context in which worker threads may use the process's generators and the program doesn't."""
        return nullcontext() if self._draws is None else self._draws.watched()

    def _wait_since(self, begin: float) -> int:
        assert self._workers_of_pass is not None
        place = None
        while place is None:
            # The earliest batch must get its memory, no matter how much the consumer holds.
            earliest = self._begun[0][0]
            more = len(self._begun) < self._most_begun and not self._drained
            seconds = _IDLE if more else LOOK
            if self._timeout > 0:
                seconds = min(seconds, max(0.0, begin + self._timeout - time.monotonic()))
            if self._pinning.thread is not None:
                self._pinning.thread.wait(seconds)
            else:
                if not self._loader_in_order:
                    self._consumer.need(earliest)
                self._consumer.wait(earliest if self._loader_in_order else None, seconds)
            place = self._ready_place()
            now = time.monotonic()
            if place is None and self._timeout > 0 and now >= begin + self._timeout:
                told = self._workers_of_pass.told()
                raise WorkerError(f"DataLoader timed out after {self._timeout} seconds ({told})")
            if place is None and self._unplanned:
                self._layout()
            if place is None and more:
                with nullcontext() if self._draws is None else self._draws.apart():
                    # The sampler may draw random numbers.
                    self._begin_for_idle()
            if place is None and now >= max(begin, self._looked) + LOOK:
                self._look_after()
        return place

    def _look_after(self, *, waiting: bool = True) -> None:
        assert self._workers_of_pass is not None
        self._looked = time.monotonic()
        if self._limit is None and self._looked > self._measured + _MEASURE:
            # The memory that other programs use changes over time.
            self._measured = self._looked
            self._consumer.set_most(self._most(self._consumer.held))
        try:
            self._workers_of_pass.check(waiting=waiting)
        except WorkerError as error:
            # All workers have ended, so the begun batches won't arrive.
            self._shutdown, self._lost = True, str(error)
            self._pinning.end_thread()
            self._begun.clear()
            self.account.keep(self.look())
            raise

    # Ending workers.

    def _shutdown_workers(self) -> None:
        """Ends the workers. The name is torch's."""
        self._shutdown = True
        self._pinning.end_thread()
        if self._workers_of_pass is not None:
            self._workers_of_pass.end()
            if self._process == os.getpid():
                self.account.keep(self.look())

    def __del__(self) -> None:
        workers = getattr(self, "_workers_of_pass", None)
        if workers is not None and _utils.python_exit_status is not True:
            self._pinning.end_thread()
            workers.end()
            if self._process == os.getpid():
                self.account.keep(self.look())

    def look(self) -> Look:
        """Returns a snapshot of the workers' activities."""
        assert self._workers_of_pass is not None
        views = [
            view | {"name": name}
            for view, name in zip(self._consumer.views(), self._workers_of_pass.names, strict=True)
        ]
        makers, awaited = len(self._workers_of_pass.makers), self._awaited
        told = None if awaited is None else (awaited[1], self._consumer.left(awaited[0]))
        return Look(views[:makers], views[makers:], told, self._collates)


def _drawn_seed(generator: torch.Generator | None) -> int:
    """Draws the seed of a pass like torch does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def pickled(indices: list[Any]) -> bytes:
    return pickle.dumps(indices, 5)
