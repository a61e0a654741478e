"""A pass without workers."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fastpipe._fastpipe import item_seed
from fastpipe.loading._account import Account
from fastpipe.loading._collation import collate, is_default
from fastpipe.loading._info import making_here
from fastpipe.loading._pass import Pass, fetch_of
from fastpipe.loading._seeds import Draws, ItemRng, generators
from fastpipe.loading._worker import fetcher

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

    Args:
        loader: whose batches they are.
    """

    def __init__(self, loader: Any) -> None:
        self._dataset = loader.dataset
        again = weakref.WeakMethod(self._again)
        # The collector sees no cycles through it.
        self._generators = generators(lambda: _called(again))
        self._fetch_kind = fetch_of(loader)
        self._collate = collate if is_default(loader.collate_fn) else loader.collate_fn
        self._fetch = fetcher(loader.dataset, self._fetch_kind, self._collate)
        # Where the process's generators stood when nobody had drawn from them for items.
        self._before: _States | None = None
        self._rng = ItemRng(self._seed)
        # What is being made: the pass's seed, the batch's number, and the row, or what tells it.
        self._making = 0, 0
        self._row: Callable[[], int] = _of_batch

    def _seed(self, which: int) -> int:
        seed, number = self._making
        return item_seed(seed, number, self._row(), which)

    def _again(self) -> None:
        """An item is made once more."""
        self._rng.forget()
        if isinstance(self._row, _Counting):
            self._row.row -= 1

    def batch(self, number: int, indices: Any, seed: int) -> Any:
        """The batch of a number, of these indices, in the pass with this seed."""
        self._making = seed, number
        self._rng.forget()
        with making_here(self._rng):
            try:
                return self._batch(number, indices, seed)
            except StopIteration as error:
                # It would end the loop over the loader as if there were no more.
                raise RuntimeError("the data set, or collate_fn, raised StopIteration") from error
            finally:
                # It has the items, which are the consumer's now.
                self._row = _of_batch

    def _batch(self, number: int, indices: Any, seed: int) -> Any:
        if self._fetch_kind == "items" and not self._generators.seeds():
            changed = self._generators.look_again()
            if self._before is None:
                self._before = _States()
            elif True in changed:
                self._before.note(changed)
            dataset = self._dataset
            items: list[Any] = []
            self._row = items.__len__
            try:
                for index in indices:
                    items.append(dataset[index])  # noqa: PERF401 - its length tells the row
                self._row = _of_batch
                data = self._collate(items)
            except Exception:
                if not self._generators.look():
                    raise
            else:
                if not self._generators.look():
                    return data
            # It drew from generators that weren't seeded for it: once more, as workers would make it.
            self._before.put_back()
            self._rng.forget()
        kept = _States()
        Draws.expect()
        self._row = _of_batch
        try:
            if self._fetch_kind != "items":
                of_batch = [indices] if self._fetch_kind == "sample" else indices
                return self._generators.call(self._fetch, of_batch, seed, number)
            self._row = counting = _Counting(self._dataset)
            items = self._generators.items(counting, indices, seed, number, 0)
            self._row = _of_batch
            return self._generators.call(self._collate, items, seed, number)
        finally:
            kept.put_back()


def _called(weak: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = weak()
    assert method is not None
    method()


def _of_batch() -> int:
    """Stands for the row where a whole batch is made, as `generators.rs` has it."""
    return 2**32 - 1


class _Counting:
    """A data set that knows which row of a batch it makes."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.row = -1

    def __getitem__(self, index: Any) -> Any:
        self.row += 1
        return self._dataset[index]

    def __call__(self) -> int:
        return self.row


# Looked up when they are called: in a worker's thread these are functions of its own generators.
_GENERATORS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: random.getstate(), lambda state: random.setstate(state)),
    (lambda: np.random.get_state(), lambda state: np.random.set_state(state)),
    (torch.get_rng_state, torch.set_rng_state),
]


class _States:
    """Where the process's generators stand, in the order of `ItemGenerators`."""

    def __init__(self) -> None:
        self._states = [get() for get, _ in _GENERATORS]

    def note(self, changed: Sequence[bool]) -> None:
        """Notes where those stand that have changed since."""
        for place, each in enumerate(changed):
            if each:
                self._states[place] = _GENERATORS[place][0]()

    def put_back(self) -> None:
        for (_, put), state in zip(_GENERATORS, self._states, strict=True):
            put(state)
