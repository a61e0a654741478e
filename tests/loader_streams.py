"""Iterable datasets for the loader's tests that spawned workers can import."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


def worker() -> int:
    """Returns the index of this worker, or 0 without workers."""
    info = get_worker_info()
    return 0 if info is None else info.id


def item(number: int) -> Any:
    """Returns an item with several values, some of which are drawn from the process's generators."""
    name = f"{worker()}.{number}"
    return {"name": name, "torch": torch.rand(3), "pair": (np.random.random(2), random.random()), "number": number}


class Plain(IterableDataset[Any]):
    """A stream of the given length for each worker. It has no states.

    Args:
        lengths: Number of items of each worker.
    """

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.passes = 0

    @property
    def length(self) -> int:
        return self.lengths[worker()]

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number in range(self.length):
            yield item(number + 100 * self.passes)


class Stateful(Plain):
    """A dataset with states. Its items depend on how many passes it has begun."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += not self.at
        while self.at < self.length:
            self.at += 1
            yield item(self.at + 100 * self.passes)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class Steps:
    """An iterator with states."""

    def __init__(self, stop: int) -> None:
        self.at, self.stop = 0, stop

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        if self.at == self.stop:
            raise StopIteration
        self.at += 1
        return item(self.at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class OfSteps(Plain):
    """A dataset whose iterators have states."""

    def __iter__(self) -> Any:
        return Steps(self.length)


class Itself(Steps, IterableDataset[Any]):
    """A dataset that is its own iterator."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(0)
        self.lengths = lengths

    def __iter__(self) -> Itself:
        self.at, self.stop = 0, self.lengths[worker()]
        return self


class Counted(IterableDataset[Any]):
    """Arrays of `nbytes` bytes, counted in shared memory when a worker makes them."""

    def __init__(self, nbytes: int, count: int, seconds: float = 0.0) -> None:
        self.nbytes, self.count, self.seconds = nbytes, count, seconds
        # One number for each worker. Forked workers share it.
        self._made = np.frombuffer(mmap.mmap(-1, 8 * 64), np.int64)

    @property
    def made(self) -> int:
        """Number of items that all workers have made."""
        return int(self._made.sum())

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(number, self.count, workers):
            self._made[number] += 1
            time.sleep(self.seconds)
            yield np.full(self.nbytes, index % 251, np.uint8)


class Large(IterableDataset[Any]):
    """Items with arrays and tensors of several dtypes, some of which are large."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.lengths[worker()]):
            row = torch.arange(number, number + 12_000)
            yield {
                "small": torch.tensor(number),
                "array": row.numpy().astype(np.float32).reshape(3, 4000),
                "flags": row % 3 == 0,
                "half": [row.to(torch.bfloat16), row[::2]],
                "complex": row * 1j,
                "text": f"{worker()}.{number}",
            }


class Fails(IterableDataset[int]):
    """Numbers. The worker with index 0 fails in the given way instead of yielding its third number."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __iter__(self) -> Any:
        if self.how == "begin":
            raise ValueError("cannot begin")
        return self if self.how == "go on" else self._numbers()

    def __next__(self) -> int:
        self.at = getattr(self, "at", -1) + 1
        if self.at == 2:
            raise ValueError("cannot yield")
        if self.at == 6:
            raise StopIteration
        return self.at

    def _numbers(self) -> Iterator[int]:
        for number in range(6):
            if number == 2 and worker() == 0:
                self._fail()
            yield number + 10 * worker()

    def _fail(self) -> None:
        match self.how:
            case "raise":
                raise ValueError("cannot yield")
            case "exit":
                raise SystemExit(3)
            case "end":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)


KINDS = {"plain": Plain, "stateful": Stateful, "iterator": OfSteps, "itself": Itself}


def with_noise(items: Any) -> Any:
    """A `collate_fn` that draws."""
    return {"noise": torch.rand(2), "items": items, "worker": worker()}


def resumed(make: Any, state: Any) -> Any:
    """Returns a loader of `make` that resumes from a state, which was stored as JSON."""
    loader = make()
    loader.load_state_dict(json.loads(json.dumps(state)))
    assert loader.state_dict() == json.loads(json.dumps(state))
    return loader
