"""A pass without workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fastpipe.loading._collation import collate, is_default
from fastpipe.loading._pass import Pass, fetch_of
from fastpipe.loading._seeds import generators
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

    def _next_data(self) -> Any:
        try:
            number, indices = self._drawn()
        except StopIteration:
            self.progress.ended = True
            raise
        self.progress.give(number)
        return self._pinned(self._here.batch(number, indices, self.progress.seed))


class Here:
    """Makes batches in this process, as workers would make them.

    Args:
        loader: whose batches they are.
    """

    def __init__(self, loader: Any) -> None:
        self._dataset = loader.dataset
        self._generators = generators()
        self._fetch_kind = fetch_of(loader)
        self._collate = collate if is_default(loader.collate_fn) else loader.collate_fn
        self._fetch = fetcher(loader.dataset, self._fetch_kind, self._collate)
        # Where the process's generators stood when nobody had drawn from them for items.
        self._before: _States | None = None

    def batch(self, number: int, indices: Any, seed: int) -> Any:
        """The batch of a number, of these indices, in the pass with this seed."""
        try:
            return self._batch(number, indices, seed)
        except StopIteration as error:
            # It would end the loop over the loader as if there were no more.
            raise RuntimeError("the data set, or collate_fn, raised StopIteration") from error

    def _batch(self, number: int, indices: Any, seed: int) -> Any:
        if self._fetch_kind == "items" and not self._generators.seeds():
            changed = self._generators.look_again()
            if self._before is None:
                self._before = _States()
            elif True in changed:
                self._before.note(changed)
            dataset = self._dataset
            try:
                data = self._collate([dataset[index] for index in indices])
            except Exception:
                if not self._generators.look():
                    raise
            else:
                if not self._generators.look():
                    return data
            # It drew from generators that weren't seeded for it: once more, as workers would make it.
            self._before.put_back()
        kept = _States()
        try:
            if self._fetch_kind != "items":
                of_batch = [indices] if self._fetch_kind == "sample" else indices
                return self._generators.call(self._fetch, of_batch, seed, number)
            items = self._generators.items(self._dataset, indices, seed, number, 0)
            return self._generators.call(self._collate, items, seed, number)
        finally:
            kept.put_back()


_GENERATORS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
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
