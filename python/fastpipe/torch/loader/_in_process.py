"""A pass without workers."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from fastpipe._fastpipe import item_seed
from fastpipe.torch.loader._account import Account
from fastpipe.torch.loader._collation import collate, is_default
from fastpipe.torch.loader._info import in_worker_thread, making_here
from fastpipe.torch.loader._pass import Pass, fetch_of
from fastpipe.torch.loader._seeds import BATCH, REST, Draws, ItemGenerators, ItemRng, States
from fastpipe.torch.loader._worker import fetcher

__all__ = ["Here", "InProcess"]


class InProcess(Pass):
    """A pass without workers: items are made when they are asked for, as workers would make them.

    The process's generators are left as they are.
    """

    def __init__(self, loader: Any, resumed: dict[str, Any] | None, seed: int | None) -> None:
        if loader.timeout != 0:
            raise ValueError("timeout is for workers, and num_workers=0 has none")
        super().__init__(loader, resumed, seed)
        self._here = Here(loader)
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
            return self._pinned(self._here.batch(number, indices, self.progress.seed))
        finally:
            self.account.leave()


class Here:
    """Makes batches in this process, as workers would make them.

    Items are made with seeded generators, and the program's states of these are put back after each batch. Getting and
    putting back the states takes longer than making a batch of small items. So where the first items drew nothing, a
    batch is only made in this way if the last such batch began `REST` seconds ago. If items draw all the same by then,
    batches between may have drawn from the program's generators, which is warned of.

    In a worker thread, where an item may create a loader, nothing is seeded.

    Args:
        loader: whose batches they are.
    """

    def __init__(self, loader: Any) -> None:
        self._dataset = loader.dataset
        late = weakref.WeakMethod(self._drawn_late)
        # The collector sees no cycles through it.
        self._generators = None if in_worker_thread() else ItemGenerators(lambda drawn: _called(late, drawn))
        self._fetch_kind = fetch_of(loader)
        self._collate = collate if is_default(loader.collate_fn) else loader.collate_fn
        self._fetch = fetcher(loader.dataset, self._fetch_kind, self._collate)
        # When generators are to be checked next, and the first batch that wasn't checked since they were last.
        self._next_check = 0.0
        self._unchecked: int | None = None
        self._warning = ""
        self._rng = ItemRng(self._seed)
        # The item being made: the pass's seed, the batch's number, and what returns the row.
        self._making = 0, 0
        self._row: Callable[[], int] = _of_batch

    def _seed(self, which: int) -> int:
        seed, number = self._making
        return item_seed(seed, number, self._row(), which)

    def _drawn_late(self, drawn: list[str]) -> None:
        """Items drew from generators that weren't seeded for them, and are made again."""
        self._rng.forget()
        if self._unchecked is not None:
            self._warning = (
                f"items began to draw from the global generator of {' and '.join(drawn)} after the first items didn't."
                f" Batches {self._unchecked} to {self._making[1] - 1} weren't checked for that. Those whose items drew"
                " differ from what workers make. Draw from fastpipe.torch.item_rng() instead."
            )

    def batch(self, number: int, indices: Any, seed: int) -> Any:
        """The batch of a number, of these indices, in the pass with this seed."""
        self._making = seed, number
        self._row = _of_batch
        self._rng.forget()
        with making_here(self._rng):
            try:
                made = self._batch(number, indices, seed)
            except StopIteration as error:
                # It would end the loop over the loader as if there were no more.
                raise RuntimeError("the data set, or collate_fn, raised StopIteration") from error
            finally:
                # It may have the items, which are the consumer's now.
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
        with Draws.expected():
            try:
                generators.restart()
                return self._seeded(generators, indices, seed, number)
            finally:
                before.put_back()
                self._next_check, self._unchecked = now + REST, None

    def _plain(self, indices: Any) -> Any:
        """A batch for which nothing is seeded."""
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
        """A batch for which generators are seeded."""
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
