"""The base class of passes, and the pass over a map-style dataset without workers."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fastpipe._fastpipe import item_seed
from fastpipe.torch.loader._order import Order
from fastpipe.torch.loader._pin_thread import pinned
from fastpipe.torch.loader._seeds import BATCH, REST, GlobalRngWatch, ItemGenerators, ItemRng, States
from fastpipe.torch.loader._structure import collate, is_default
from fastpipe.torch.loader._time_account import Account
from fastpipe.torch.loader._worker import fetcher
from fastpipe.torch.loader._worker_info import in_worker_thread, making_here

# torch's number of the kind of iterable datasets.
ITERABLE = 1


def ahead_of(loader: Any) -> int:
    """Returns how many batches are prefetched.

    `prefetch_factor` can be None if `num_workers` was set later, as an attribute.
    """
    return 2 if loader.prefetch_factor is None else max(loader.prefetch_factor, 1)


def fetch_of(loader: Any) -> str:
    """Returns how a loader requests items of its dataset: "stream", "sample", "batch" or "items" (see `Task`)."""
    if loader._dataset_kind == ITERABLE:
        return "stream"
    if loader.batch_sampler is None:
        return "sample"
    return "batch" if _has_getitems(loader.dataset) else "items"


def stream_batch_size(loader: Any) -> int | None:
    """Returns the batch size of a loader with an iterable dataset, or None if it yields single items."""
    return None if loader.batch_sampler is None else int(loader.batch_size)


def _has_getitems(dataset: Any) -> bool:
    """Whether a dataset fetches several items at once by its own code.

    Some of torch's datasets only delegate to others.
    """
    method = getattr(type(dataset), "__getitems__", None)
    if method is None:
        return callable(getattr(dataset, "__getitems__", None))
    if method is torch.utils.data.Subset.__getitems__:
        return _has_getitems(dataset.dataset)
    if method is torch.utils.data.StackDataset.__getitems__:
        parts = dataset.datasets
        return any(map(_has_getitems, parts.values() if isinstance(parts, dict) else parts))
    return True


def _is_profiled() -> bool:
    return profiler._is_profiler_enabled or bool(torch._C._autograd._profiler_enabled())


class Progress:
    """The progress of a pass. It holds no reference to the workers.

    Attributes:
        order: Batches of indices.
        seed: Seed of the items.
        batches: Count of batches that the consumer received in order, including failed ones.
        beyond: Indices of batches received after a gap, if batches may arrive in any order.
        ended: Whether the consumer has seen the end.
    """

    def __init__(self, order: Order, seed: int) -> None:
        self.order = order
        self.seed = seed
        self.batches = 0
        self.beyond: set[int] = set()
        self.ended = False

    def give(self, number: int) -> None:
        """Records that the consumer receives a batch."""
        if number == self.batches and not self.beyond:
            self.batches += 1
            self.order.forget(self.batches)
            return
        self.beyond.add(number)
        while self.batches in self.beyond:
            self.beyond.remove(self.batches)
            self.batches += 1
        self.order.forget(self.batches)

    def state(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "beyond": sorted(self.beyond),
            "seed": self.seed,
            "order": self.order.state(self.batches),
        }


@dataclasses.dataclass
class Beginning:
    """How a pass begins.

    Attributes:
        resumed: State within a pass from which the pass resumes. None begins with the first batch.
        seed: Seed of the pass. None draws it. Defaults to that of `resumed`.
        starts: For each worker of an iterable dataset, the state from which its stream starts. None starts from the
            dataset.
    """

    resumed: dict[str, Any] | None = None
    seed: int | None = None
    starts: list[dict[str, Any] | None] | None = None

    def __post_init__(self) -> None:
        if self.seed is None and self.resumed is not None:
            self.seed = self.resumed["seed"]

    @property
    def order(self) -> dict[str, Any] | None:
        """The state of the order of the resumed pass."""
        return None if self.resumed is None else self.resumed["order"]


def check_timeout(loader: Any) -> None:
    """Rejects a timeout of a loader without workers."""
    if loader.timeout != 0:
        raise ValueError("timeout has no effect with num_workers=0: set timeout=0 or use workers")


class _Shim:
    """A loader as torch's iterator sees it, with an `Order` in place of the sampler."""

    def __init__(self, loader: Any, order: Order) -> None:
        self._loader = loader
        self._index_sampler = order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Pass(_BaseDataLoaderIter):
    """The common part of all passes.

    The base class, torch's own iterator, warns, names passes for profilers, and counts.
    """

    progress_class = Progress

    def __init__(self, loader: Any, beginning: Beginning) -> None:
        with GlobalRngWatch.expected():
            self._prepare(loader, beginning)

    def _prepare(self, loader: Any, beginning: Beginning) -> None:
        order = self._order_of(loader, beginning)
        if beginning.seed is None:
            super().__init__(_Shim(loader, order))  # type: ignore[arg-type]
        else:
            # The seed is known, so restore the generator after the base class has drawn one.
            generator = loader.generator if loader.generator is not None else torch.default_generator
            before = generator.get_state()
            super().__init__(_Shim(loader, order))  # type: ignore[arg-type]
            if beginning.resumed is None or loader.generator is None:
                generator.set_state(before)
            self._base_seed = beginning.seed
        self._index_sampler = loader._index_sampler
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._begin(order, int(self._base_seed), beginning.resumed)

    def _order_of(self, loader: Any, beginning: Beginning) -> Order:
        return Order(loader, beginning.order)

    def _begin(self, order: Order, seed: int, resumed: dict[str, Any] | None) -> None:
        self.progress = self.progress_class(order, seed)
        self._done: set[int] = set()
        if resumed is not None:
            order.skip(resumed["batches"])
            self.progress.batches = resumed["batches"]
            self.progress.beyond = set(resumed["beyond"])
            self._done = set(resumed["beyond"])

    def _drawn(self) -> tuple[int, Any]:
        """Returns the index of the next batch that the consumer hasn't received, and its row indices.

        Raises:
            StopIteration: If all batches have been drawn.
        """
        order = self.progress.order
        while True:
            number = order.next
            indices = order.draw()
            if number not in self._done:
                return number, indices

    def __next__(self) -> Any:
        with self._lock:
            if _is_profiled() or self._dataset_kind == ITERABLE:
                # It also warns if an iterable dataset yields more than its length.
                return super().__next__()
            # Skips the profiler range of the base class, which takes longer than creating a batch of small items.
            data = self._next_data()
            self._num_yielded += 1
            return data

    def _next_data(self) -> Any:
        """Returns the next batch."""
        raise NotImplementedError

    def _next_index(self) -> Any:
        return self._drawn()[1]

    def _pinned(self, data: Any) -> Any:
        if not self._pin_memory:
            return data
        # torch copies with all of its threads, which spin on the cores that workers need. Torch's own loader also pins
        # with one thread.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return pinned(data, self._pin_memory_device)
        finally:
            torch.set_num_threads(num_threads)


class InProcess(Pass):
    """A pass without workers. It creates items on request, with the same values that workers would create.

    The process's random generators keep their states.
    """

    def __init__(self, loader: Any, beginning: Beginning) -> None:
        check_timeout(loader)
        super().__init__(loader, beginning)
        self._inline = InlineWorker(loader)
        self.account = Account()

    def _next_data(self) -> Any:
        self.account.wait()
        try:
            try:
                number, indices = self._drawn()
            except StopIteration:
                self.progress.ended = True
                raise
            self.progress.give(number)
            return self._pinned(self._inline.batch(number, indices, self.progress.seed))
        finally:
            self.account.leave()


class InlineWorker:
    """Creates batches in this process, with the same values that workers would create.

    Items are created with seeded generators, and the program's generator states are restored after each batch. Saving
    and restoring the states takes longer than creating a batch of small items. So if the first items drew no random
    numbers, a batch is seeded only if the last seeded batch began at least `REST` seconds ago. If an item draws after
    all, earlier batches may have drawn from the program's generators, and a warning reports that.

    In a worker thread, where an item may create a loader, nothing is seeded.

    Args:
        loader: Loader whose batches are created.
    """

    def __init__(self, loader: Any) -> None:
        self._dataset = loader.dataset
        late = weakref.WeakMethod(self._drawn_late)
        # A strong reference would form a cycle that the garbage collector can't see.
        self._generators = None if in_worker_thread() else ItemGenerators(lambda drawn: _called(late, drawn))
        self._fetch_kind = fetch_of(loader)
        self._collate = collate if is_default(loader.collate_fn) else loader.collate_fn
        self._fetch = fetcher(loader.dataset, self._fetch_kind, self._collate)
        # Time of the next check of the generators, and the first unchecked batch since the last check.
        self._next_check = 0.0
        self._unchecked: int | None = None
        self._warning = ""
        self._rng = ItemRng(self._seed)
        # The item being created: the seed of the pass, the index of the batch, and a function that returns the row.
        self._making = 0, 0
        self._row: Callable[[], int] = _of_batch

    def _seed(self, which: int) -> int:
        seed, number = self._making
        return item_seed(seed, number, self._row(), which)

    def _drawn_late(self, drawn: list[str]) -> None:
        """Handles items that drew from generators that weren't seeded for them. These items are created again."""
        self._rng.forget()
        if self._unchecked is not None:
            self._warning = (
                f"items began to draw from the global generator of {' and '.join(drawn)} after the first items didn't."
                f" Batches {self._unchecked} to {self._making[1] - 1} weren't checked for that. If their items drew"
                " random numbers, they differ from the batches of workers. Draw from fastpipe.torch.item_rng() instead."
            )

    def batch(self, number: int, indices: Any, seed: int) -> Any:
        """Returns batch `number` of the pass with this seed, created from these indices."""
        self._making = seed, number
        self._row = _of_batch
        self._rng.forget()
        with making_here(self._rng):
            try:
                made = self._batch(number, indices, seed)
            except StopIteration as error:
                # StopIteration would silently end the consumer's loop over the loader.
                raise RuntimeError("the dataset or collate_fn raised StopIteration") from error
            finally:
                # The bound method may keep the items alive, which now belong to the consumer.
                self._row = _of_batch
        if self._warning:
            warning, self._warning = self._warning, ""
            warnings.warn(warning, stacklevel=4)
        return made

    def _batch(self, number: int, indices: Any, seed: int) -> Any:
        generators = self._generators
        if generators is None:
            return self._plain(indices)
        now = time.monotonic()
        if self._fetch_kind == "items" and not generators.seeding and now < self._next_check:
            if self._unchecked is None:
                self._unchecked = number
            return self._plain(indices)
        before = States()
        with GlobalRngWatch.expected():
            try:
                generators.restart()
                return self._seeded(generators, indices, seed, number)
            finally:
                before.put_back()
                self._next_check, self._unchecked = now + REST, None

    def _plain(self, indices: Any) -> Any:
        """Returns a batch without seeding generators."""
        if self._fetch_kind != "items":
            return self._fetch([indices] if self._fetch_kind == "sample" else indices)
        dataset = self._dataset
        items: list[Any] = []
        self._row = items.__len__
        for index in indices:
            items.append(dataset[index])  # noqa: PERF401 - its length is the row
        self._row = _of_batch
        return self._collate(items)

    def _seeded(self, generators: ItemGenerators, indices: Any, seed: int, number: int) -> Any:
        """Returns a batch created with seeded generators."""
        if self._fetch_kind != "items":
            of_batch = [indices] if self._fetch_kind == "sample" else indices
            return generators.call(self._fetch, of_batch, seed, number)
        try:
            items = self._items(generators, indices, seed, number)
        except Exception:
            if not generators.drawn():
                raise
            items = self._items(generators, indices, seed, number)
        else:
            if generators.drawn():
                items = self._items(generators, indices, seed, number)
        self._row = _of_batch
        return generators.call(self._collate, items, seed, number)

    def _items(self, generators: ItemGenerators, indices: Any, seed: int, number: int) -> list[Any]:
        self._rng.forget()
        items: list[Any] = []
        self._row = items.__len__
        for row, index in enumerate(indices):
            items.append(generators.item(self._dataset, index, seed, number, row))
        return items


def _of_batch() -> int:
    return BATCH


def _called(weak: weakref.WeakMethod[Any], drawn: list[str]) -> None:
    method = weak()
    assert method is not None
    method(drawn)
