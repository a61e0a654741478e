"""Datasets for the loader's tests that spawned workers can import, and comparisons of batches."""

from __future__ import annotations

import collections
import dataclasses
import logging
import mmap
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from fastpipe.torch import item_rng, worker_info

# Arguments that select how a loader runs its workers.
IN_PROCESS: dict[str, Any] = {"num_workers": 0}
FORKED: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "worker_method": "multiprocessing"}
# A single worker, because each one takes seconds to import torch.
SPAWNED = FORKED | {"multiprocessing_context": "spawn", "num_workers": 1}
SERVED = FORKED | {"multiprocessing_context": "forkserver"}
THREADS: dict[str, Any] = {"num_workers": 2, "worker_method": "thread"}

WAYS = {"alone": IN_PROCESS, "fork": FORKED, "thread": THREADS}
WORKERS = {"fork": FORKED, "thread": THREADS}
ALL_WAYS = WAYS | {"spawn": SPAWNED, "forkserver": SERVED}


class Pair(NamedTuple):
    """A named tuple of an item."""

    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    """A data class."""

    values: Any
    name: Any = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """A frozen data class with slots, so it has no `__dict__`."""

    values: Any
    label: Any


# Seconds per item that keep a batch of three from being collated by the worker that makes its items.
SHARED = 0.0008


class Items(Dataset[Any]):
    """Returns the given items, each after `seconds` seconds."""

    def __init__(self, items: Sequence[Any], seconds: float = 0.0) -> None:
        self.items = items
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        if self.seconds:
            time.sleep(self.seconds)
        return self.items[index]


class Numbers(Dataset[int]):
    """The numbers from 0 to `count` - 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


class Squares(Dataset[Any]):
    """Items with several values, each a function of the index."""

    def __init__(self, count: int, width: int = 3) -> None:
        self.count = count
        self.width = width

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        row = np.arange(index, index + self.width, dtype=np.float32) ** 2
        return {"row": row, "index": index, "name": f"item {index}", "pair": (torch.tensor(index / 2), index % 2 == 0)}


class Echo(Dataset[Any]):
    """Returns the index itself."""

    def __getitem__(self, index: Any) -> Any:
        return index


class Described(Dataset[str]):
    """Returns the type and repr of the index."""

    def __getitem__(self, index: Any) -> str:
        return f"{type(index).__module__}.{type(index).__name__} {index!r}"


class AtOnce(Numbers):
    """Numbers that are requested a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, len(indices)) for index in indices]


class Slow(Numbers):
    """Numbers that take the seconds given for their index."""

    def __init__(self, count: int, slow: dict[int, float], otherwise: float = 0.0) -> None:
        super().__init__(count)
        self.slow = slow
        self.otherwise = otherwise

    def __getitem__(self, index: int) -> int:
        time.sleep(self.slow.get(index, self.otherwise))
        return super().__getitem__(index)


class Gated(Numbers):
    """Numbers. One number waits until a file exists."""

    def __init__(self, count: int, gated: int, go: Path) -> None:
        super().__init__(count)
        self.gated = gated
        self.go = go

    def __getitem__(self, index: int) -> int:
        while index == self.gated and not self.go.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


class Gathering:
    """A barrier for workers that are forks or threads."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._come = mmap.mmap(-1, mmap.PAGESIZE)

    def come(self, number: int) -> None:
        """Marks a worker as arrived."""
        self._come[number] = 1

    def wait(self, number: int) -> None:
        """Marks a worker as arrived and waits for the other workers."""
        self.come(number)
        deadline = time.monotonic() + 60
        while not all(self._come[: self._workers]):
            assert time.monotonic() < deadline, "some workers do not arrive"
            time.sleep(0.0005)


class Failing(Numbers):
    """Numbers, with errors raised at some indices."""

    def __init__(self, count: int, errors: dict[int, BaseException]) -> None:
        super().__init__(count)
        self.errors = errors

    def __getitem__(self, index: int) -> int:
        if index in self.errors:
            raise self.errors[index]
        return super().__getitem__(index)


class Workers(Numbers):
    """Returns the process and worker info that an item is made with."""

    def __getitem__(self, index: int) -> Any:
        info = worker_info()
        if info is None:
            return os.getpid(), -1, -1, -1, index
        time.sleep(0.001)
        return os.getpid(), info.id, info.num_workers, info.seed, index


class Large(Numbers):
    """Arrays of `nbytes` bytes."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__(count)
        self.nbytes = nbytes

    def __getitem__(self, index: int) -> Any:
        return np.full(self.nbytes, index % 251, np.uint8)


def drawn_from_all(index: int) -> Any:
    """Draws from the process's generators."""
    return index, random.random(), random.gauss(0, 1), np.random.rand(2), float(np.random.normal()), torch.randn(2)


class Augmented(Numbers):
    """Draws from the named generators of Python, NumPy and torch, from the item `first` on.

    Args:
        own: Whether to draw from the generators of `item_rng()` instead of the process's.
    """

    def __init__(
        self, count: int, names: Sequence[str] = ("python", "numpy", "torch"), first: int = 0, *, own: bool = False
    ) -> None:
        super().__init__(count)
        self.names = names
        self.first = first
        self.own = own

    def __getitem__(self, index: int) -> Any:
        found = {"index": torch.tensor(index), "python": 0.0, "numpy": np.zeros(2), "torch": torch.zeros(2)}
        if index < self.first:
            return found
        python: Any = item_rng().random_generator if self.own else random
        numpy: Any = item_rng().numpy_generator if self.own else np.random
        generator = item_rng().torch_generator if self.own else None
        if "python" in self.names:
            found["python"] = python.random() + python.gauss(0, 1)
        if "numpy" in self.names:
            found["numpy"] = numpy.random(2) + numpy.normal()
        if "torch" in self.names:
            found["torch"] = torch.randn(2, generator=generator) + torch.rand(1, generator=generator)
        return found


class Unhurried(Augmented):
    """Random items so slow that several workers make a batch and a batch worker collates it."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(SHARED)
        return super().__getitem__(index)


class OwnGenerators(Numbers):
    """Draws from the generators of the worker info if there is one."""

    def __getitem__(self, index: int) -> Any:
        info: Any = worker_info()
        time.sleep(0.0005)
        rng = info.rng
        seeded = np.random.default_rng(info.seed).random()
        drawn = (
            rng.random_generator.random(),
            rng.numpy_generator.random(),
            torch.rand(1, generator=rng.torch_generator),
        )
        # A second draw continues the generator's sequence.
        return index, info.seed, seeded, *drawn, rng.numpy_generator.random()


class Own:
    """A class that default collation doesn't support."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


def listed(items: list[Any]) -> list[Any]:
    """A `collate_fn` that returns the items unchanged."""
    return list(items)


def with_noise(items: list[Any]) -> Any:
    """A `collate_fn` that draws from all generators."""
    drawn = drawn_from_all(len(items))
    return torch.utils.data.default_collate(items), drawn


def with_own_noise(items: list[Any]) -> Any:
    """A `collate_fn` that draws from the generators of `item_rng()`."""
    rng = item_rng()
    drawn = rng.random_generator.random(), rng.numpy_generator.random(), torch.rand(2, generator=rng.torch_generator)
    return torch.utils.data.default_collate(items), drawn


def difference(one: Any, other: Any, at: str = "") -> str:
    """Returns the first difference between two values in class, dtype, shape or bits; empty if there is none."""
    if type(one) is not type(other):
        return f"{at}: {type(one)} {one!r}, not {type(other)} {other!r}"
    if isinstance(one, torch.Tensor):
        return _of_tensors(one, other, at)
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{at}: {one.dtype} {one.shape}, not {other.dtype} {other.shape}"
        if one.dtype.hasobject:
            return difference(one.tolist(), other.tolist(), at)
        if one.dtype == np.longdouble:
            # longdouble has padding bytes with arbitrary content.
            return "" if np.array_equal(one, other) else f"{at}: {one!r}, not {other!r}"
        return "" if one.tobytes() == other.tobytes() else f"{at}: {one!r}, not {other!r}"
    if isinstance(one, Mapping):
        if list(one) != list(other):
            return f"{at}: keys {list(one)}, not {list(other)}"
        return next(filter(None, (difference(one[key], other[key], f"{at}[{key!r}]") for key in one)), "")
    if isinstance(one, (list, tuple, collections.deque, collections.UserList)):
        if len(one) != len(other):
            return f"{at}: {len(one)}, not {len(other)}"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(*pair, f"{at}[{place}]") for place, pair in pairs)), "")
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one)]
        pairs_of_fields = ((getattr(one, name), getattr(other, name), f"{at}.{name}") for name in names)
        return next(filter(None, (difference(*each) for each in pairs_of_fields)), "")
    if isinstance(one, (float, complex, np.generic)) and one != one:
        return "" if other != other else f"{at}: {one}, not {other}"
    return "" if one == other else f"{at}: {one!r}, not {other!r}"


def _of_tensors(one: torch.Tensor, other: torch.Tensor, at: str) -> str:
    for what in ("dtype", "shape", "layout", "requires_grad", "is_nested"):
        if getattr(one, what) != getattr(other, what):
            return f"{at}: {what} {getattr(one, what)}, not {getattr(other, what)}"
    if one.is_quantized or one.layout is not torch.strided or one.is_nested:
        one, other = (each.dequantize() if each.is_quantized else each.to_dense() for each in (one, other))
    bits = [
        each.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        for each in (one, other)
    ]
    return "" if torch.equal(*bits) else f"{at}: {one!r}, not {other!r}"


def same(one: Any, other: Any) -> bool:
    """Returns whether two values have the same classes, dtypes, shapes and bits."""
    return not difference(one, other)


def assert_same(found: Any, expected: Any) -> None:
    said = difference(found, expected)
    assert not said, f"found {said}"


def copied(batch: Any) -> Any:
    """Returns a copy of a batch in separate memory."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if type(batch) is dict:
        return {key: copied(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(map(copied, batch))  # type: ignore[attr-defined]
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(copied, batch))
    return batch


def outcomes(iterator: Iterator[Any], most: int = 1000) -> list[Any]:
    """Returns the batches of an iterator, with the class of an error in place of each batch that raises."""
    found: list[Any] = []
    while len(found) < most:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error))
    raise AssertionError("the iterator does not end")


class Messages(logging.Handler):
    """Collects the log messages of fastpipe."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def logged() -> Messages:
    """Returns a handler that collects what fastpipe logs from now on. Only for processes that end after the test."""
    messages = Messages()
    log = logging.getLogger("fastpipe")
    log.addHandler(messages)
    log.setLevel("INFO")
    return messages
