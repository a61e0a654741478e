"""Datasets, collate functions, and loaders for the comparison of DataLoaders.

The module imports as little as possible because every spawned worker imports it.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import fastpipe.torch

# The tables include more workers than the machine has cores on purpose.
warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)

SIZES = {"100 B": 100, "4 KB": 4 << 10, "4 MB": 4 << 20}
"""Label of an item size -> bytes."""

_POOL = 64 << 20


class Copies(Dataset[Any]):
    """Items of `size` bytes that are almost free to create: each is a fresh copy of a row in memory."""

    def __init__(self, kind: str, size: int, length: int) -> None:
        rows = max(1, min(1024, _POOL // size))
        self.rows = np.random.default_rng(1).random((rows, size // 4), dtype=np.float32)
        self._tensors = torch.from_numpy(self.rows) if kind == "tensor" else None
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        row = index % len(self.rows)
        return self.rows[row].copy() if self._tensors is None else self._tensors[row].clone()

    def expected(self, first: int, rows: int) -> np.ndarray:
        """Returns the values of a range of items."""
        return self.rows[np.arange(first, first + rows) % len(self.rows)]


class Waiting(Dataset[Any]):
    """Items of 4 KB that sleep instead of computing, so two cores are enough for many workers.

    An item takes `seconds`. A random fraction `slow` of the items, drawn with `seed`, takes `slow_seconds` instead.
    """

    def __init__(
        self, length: int, seconds: float, slow: float = 0.0, slow_seconds: float = 0.0, seed: int = 0
    ) -> None:
        drawn = np.random.default_rng(seed).permutation(length)[: round(length * slow)]
        self.seconds = np.full(length, seconds)
        self.seconds[drawn] = slow_seconds

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(self.seconds[index])
        return np.full(1024, index, np.float32)


class Filled(Dataset[Any]):
    """Items of `size` bytes that are created on access. Every `slow`-th item takes 50 ms."""

    def __init__(self, size: int, length: int, slow: int = 0) -> None:
        self._size, self._length, self._slow = size, length, slow

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> np.ndarray:
        if self._slow and index % self._slow == 0:
            time.sleep(0.05)
        return np.full(self._size // 4, index, np.float32)


class FilledStream(IterableDataset[Any]):
    """The items of `Filled`, divided between the workers."""

    def __init__(self, size: int, length: int, slow: int = 0) -> None:
        self._items, self._length = Filled(size, length, slow), length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(number, self._length, workers):
            yield self._items[index]


def stack(items: list[Any]) -> torch.Tensor:
    """Collates items with `torch.stack`, as a user-defined `collate_fn` might."""
    return torch.stack([torch.as_tensor(item) for item in items])


def identity(items: list[Any]) -> list[Any]:
    """Returns the items unchanged."""
    return items


COLLATIONS: dict[str, Callable[[list[Any]], Any] | None] = {
    "default": None,
    "stream": None,
    "stack": stack,
    "identity": identity,
}


def loader(who: str, dataset: Dataset[Any], method: str, workers: int, collation: str, **more: Any) -> Any:
    """Returns a loader of `who`, "torch" or "fastpipe", with workers by "fork", "forkserver", "spawn" or "thread".

    torch has no worker threads and uses "fork" instead of "thread". The fork server preloads fastpipe.torch, which is
    how programs usually configure it.
    """
    if workers:
        if method == "forkserver":
            multiprocessing.set_forkserver_preload(["fastpipe.torch"])
        if (who, method) == ("torch", "thread"):
            method = "fork"
        more["worker_method" if method == "thread" else "multiprocessing_context"] = method
    made = torch.utils.data.DataLoader if who == "torch" else fastpipe.torch.DataLoader
    return made(dataset, num_workers=workers, collate_fn=COLLATIONS[collation], **more)
