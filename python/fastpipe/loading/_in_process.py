"""A pass without workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from fastpipe.loading._collation import collate, is_default
from fastpipe.loading._pass import Pass, fetch_of
from fastpipe.loading._seeds import generators
from fastpipe.loading._worker import fetcher

__all__ = ["InProcess"]


class InProcess(Pass):
    """A pass without workers: items are made when they are asked for, as workers would make them.

    The process's generators are left as they are.
    """

    def __init__(self, loader: Any, resumed: dict[str, Any] | None, seed: int | None) -> None:
        if loader.timeout != 0:
            raise ValueError("timeout is for workers, and num_workers=0 has none")
        super().__init__(loader, resumed, seed)
        self._generators = generators()
        self._fetch_kind = fetch_of(loader)
        collate_fn = collate if is_default(loader.collate_fn) else loader.collate_fn
        self._collate = collate_fn
        self._fetch = fetcher(loader.dataset, self._fetch_kind, collate_fn)

    def _next_data(self) -> Any:
        try:
            number, indices = self._drawn()
        except StopIteration:
            self.progress.ended = True
            raise
        self.progress.give(number)
        if self._fetch_kind == "items" and not self._generators.seeds():
            self._generators.look_again()
            dataset = self._dataset
            data = self._collate([dataset[index] for index in indices])
            if not self._generators.look():
                return self._pinned(data)
            # It drew from generators that weren't seeded for it: once more, as workers would make it.
        kept = _States()
        try:
            return self._pinned(self._made(number, indices))
        finally:
            kept.put_back()

    def _made(self, number: int, indices: Any) -> Any:
        seed = self.progress.seed
        if self._fetch_kind != "items":
            of_batch = [indices] if self._fetch_kind == "sample" else indices
            return self._generators.call(self._fetch, of_batch, seed, number)
        items = self._generators.items(self._dataset, indices, seed, number, 0)
        return self._generators.call(self._collate, items, seed, number)


class _States:
    """Where the process's generators stand."""

    def __init__(self) -> None:
        self._states = [
            (random.setstate, random.getstate()),
            (np.random.set_state, np.random.get_state()),
            (torch.set_rng_state, torch.get_rng_state()),
        ]

    def put_back(self) -> None:
        for put, state in self._states:
            put(state)  # type: ignore[operator]
