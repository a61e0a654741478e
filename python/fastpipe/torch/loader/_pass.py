"""What passes over a map-style data set have in common."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fastpipe.torch.loader._order import Order
from fastpipe.torch.loader._seeds import Draws

__all__ = ["Pass", "Progress", "ahead_of", "fetch_of"]


def ahead_of(loader: Any) -> int:
    """Batches that are made ahead. There is no `prefetch_factor` if `num_workers` was set later, as an attribute."""
    return 2 if loader.prefetch_factor is None else max(loader.prefetch_factor, 1)


def fetch_of(loader: Any) -> str:
    """How items of a loader's data set are asked for: see `Task`."""
    if loader.batch_sampler is None:
        return "sample"
    return "batch" if _has_getitems(loader.dataset) else "items"


def _has_getitems(dataset: Any) -> bool:
    """Whether a data set has its items at once, by code of its own: some of torch's ask others for theirs."""
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
    """How far a pass has come. It doesn't keep its workers.

    Attributes:
        order: the batches of indices.
        seed: of the items.
        batches: that the consumer was given in order, those that failed among them.
        beyond: the numbers of further ones, if they come in any order.
        ended: whether the consumer has seen the end.
    """

    def __init__(self, order: Order, seed: int) -> None:
        self.order = order
        self.seed = seed
        self.batches = 0
        self.beyond: set[int] = set()
        self.ended = False

    def give(self, number: int) -> None:
        """Notes that the consumer is given a batch."""
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


class _Shim:
    """A loader, as torch's iterator looks at it, whose sampler is asked by an `Order`."""

    def __init__(self, loader: Any, order: Order) -> None:
        self._loader = loader
        self._index_sampler = order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Pass(_BaseDataLoaderIter):
    """What passes have in common. torch's own iterator warns, names, and counts."""

    def __init__(self, loader: Any, resumed: dict[str, Any] | None, seed: int | None) -> None:
        with Draws.expected():
            self._prepare(loader, resumed, seed)

    def _prepare(self, loader: Any, resumed: dict[str, Any] | None, seed: int | None) -> None:
        order = Order(loader, None if resumed is None else resumed["order"])
        if resumed is None and seed is None:
            super().__init__(_Shim(loader, order))  # type: ignore[arg-type]
        else:
            # The seed is known: nothing is to be drawn for it.
            generator = loader.generator if loader.generator is not None else torch.default_generator
            before = generator.get_state()
            super().__init__(_Shim(loader, order))  # type: ignore[arg-type]
            if resumed is None or loader.generator is None:
                generator.set_state(before)
            self._base_seed = seed if seed is not None else resumed["seed"]  # type: ignore[index]
        self._index_sampler = loader._index_sampler
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._begin(order, int(self._base_seed), resumed)

    def _begin(self, order: Order, seed: int, resumed: dict[str, Any] | None) -> None:
        self.progress = Progress(order, seed)
        self._done: set[int] = set()
        if resumed is not None:
            order.skip(resumed["batches"])
            self.progress.batches = resumed["batches"]
            self.progress.beyond = set(resumed["beyond"])
            self._done = set(resumed["beyond"])

    def _drawn(self) -> tuple[int, Any]:
        """Number and indices of the next batch that the consumer hasn't been given.

        Raises:
            StopIteration: if there are no more.
        """
        order = self.progress.order
        while True:
            number = order.next
            indices = order.draw()
            if number not in self._done:
                return number, indices

    def __next__(self) -> Any:
        with self._lock:
            if _is_profiled():
                return super().__next__()
            # The same, but for the name that profilers are told: that takes longer than making a batch of small items.
            data = self._next_data()
            self._num_yielded += 1
            return data

    def _next_data(self) -> Any:
        """The next batch."""
        raise NotImplementedError

    def _next_index(self) -> Any:
        return self._drawn()[1]

    def _pinned(self, data: Any) -> Any:
        if not self._pin_memory:
            return data
        try:
            return _utils.pin_memory.pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        except TypeError:
            return _utils.pin_memory.pin_memory(data)  # type: ignore[no-untyped-call]
