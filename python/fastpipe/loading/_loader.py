"""The loader."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex, TypeVar

import torch.utils.data
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from fastpipe.errors import StateError, UnsupportedError
from fastpipe.loading._explaining import explained
from fastpipe.loading._iteration import InProcess, Progress, WithWorkers
from fastpipe.loading._order import Rest
from fastpipe.loading._streams import Streams

__all__ = ["DataLoader"]

_T = TypeVar("_T", covariant=True)

_VERSION = 1

_HAS_IN_ORDER = "in_order" in inspect.signature(torch.utils.data.DataLoader.__init__).parameters


def _default_method() -> str:
    """Threads where they run at once: on free-threaded Python."""
    gil = getattr(sys, "_is_gil_enabled", None)
    return "multiprocessing" if gil is None or gil() else "thread"


class DataLoader(torch.utils.data.DataLoader[_T]):
    """A `torch.utils.data.DataLoader` that spends memory on batches, not on workers."""

    # Of classes derived from this one that don't call its `__init__`, as torchdata's may be made to be.
    _streams: Streams | None = None

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: torch.utils.data.Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: torch.utils.data.Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        num_batch_workers: SupportsIndex | None = None,
        worker_method: str | None = None,
        memory_limit: SupportsIndex | None = None,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        more = {"in_order": in_order} if _HAS_IN_ORDER else {}
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **more,  # type: ignore[arg-type]
        )
        if not _HAS_IN_ORDER:
            self.in_order = in_order
        self.num_batch_workers = _whole("num_batch_workers", num_batch_workers, 0)
        self.memory_limit = _whole("memory_limit", memory_limit, 1)
        self.worker_method = _default_method() if worker_method is None else _method(worker_method)
        self.snapshot_every_n_steps = snapshot_every_n_steps
        if num_workers and self.worker_method == "multiprocessing" and sys.platform != "linux":
            raise UnsupportedError(
                "fastpipe's workers share memory by means of Linux: use torch.utils.data.DataLoader here, or num_workers=0"
            )
        if self.worker_method == "thread" and multiprocessing_context is not None:
            raise ValueError('multiprocessing_context is for processes, and worker_method="thread" starts none')
        # What items are made of, as the last pass has learned it.
        self._layout: bytes | None = None
        self._progress: Progress | None = None
        self._last: weakref.ref[Any] = lambda: None  # type: ignore[assignment]
        self._resumed: dict[str, Any] | None = None
        self._rest: Rest | None = None
        self._loaded: dict[str, Any] | None = None
        if self._dataset_kind == 1 or isinstance(dataset, (IterDataPipe, MapDataPipe)):
            self._streams = Streams(self)

    def _get_iterator(self) -> Any:
        if self._streams is not None:
            return super()._get_iterator()
        resumed, rest = self._taken_state()
        if rest is not None:
            rest.put_back(self)
        seed = None if rest is None else rest.seed
        if self.num_workers == 0:
            return InProcess(self, resumed, seed)
        self.check_worker_number_rationality()
        return WithWorkers(self, resumed, seed)

    def __iter__(self) -> Any:
        """Starts a pass."""
        if self._streams is not None:
            return self._streams.begin(self, super().__iter__)
        iterator = super().__iter__()
        self._progress = iterator.progress
        self._last = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Batches of a pass.

        Raises:
            TypeError: if the data set or the sampler doesn't know its length.
        """
        if self._streams is not None:
            return self._streams.length(super().__len__)
        return super().__len__()

    def _taken_state(self) -> tuple[dict[str, Any] | None, Rest | None]:
        """What the next pass goes on from: within a pass, or between two."""
        taken = self._resumed, self._rest
        self._resumed = self._rest = self._loaded = None
        return taken

    def state_dict(self) -> dict[str, Any]:
        if self._streams is not None:
            return self._streams.state_dict()
        if self._loaded is not None:
            return self._loaded
        progress = self._progress
        state: dict[str, Any] = {"version": _VERSION, "kind": "items", "batch_size": self._told_batch_size()}
        if progress is not None and not progress.ended:
            return state | {"pass": progress.state()}
        iterator = self._iterator
        return state | {"rest": Rest.told(self, None if iterator is None else iterator.next_seed)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self._streams is not None:
            self._streams.load_state_dict(state_dict)
            return
        state = dict(state_dict)
        if state.get("kind") != "items":
            hint = " (it is one of torchdata's)" if "_snapshot" in state or "_sampler_iter_state" in state else ""
            raise StateError(f"this is no state of a fastpipe.torch.DataLoader of a map-style data set{hint}")
        if state.get("version") != _VERSION:
            raise StateError(f"the state is of version {state.get('version')}, and this reads version {_VERSION}")
        if state["batch_size"] != self._told_batch_size():
            raise StateError(
                f"the state is of batches of {state['batch_size']}, and this loader makes batches of"
                f" {self._told_batch_size()}: a pass can't go on with others"
            )
        rest = Rest(self, state["rest"]) if "rest" in state else None
        self._resumed, self._rest, self._loaded = state.get("pass"), rest, state
        self._progress = None

    def _told_batch_size(self) -> Any:
        sampler = self.batch_sampler
        size = getattr(sampler, "batch_size", None)
        return [size, bool(getattr(sampler, "drop_last", False))] if isinstance(size, int) else None

    def explain(self) -> str:
        """Says what limits the last pass, in words."""
        return explained(self, self._last())


def _whole(name: str, value: SupportsIndex | None, least: int) -> int | None:
    if value is None:
        return None
    number = value.__index__()
    if number < least:
        raise ValueError(f"{name} is at least {least}, not {number}")
    return number


def _method(method: str) -> str:
    if method not in ("multiprocessing", "thread"):
        raise ValueError(f'worker_method is "multiprocessing" or "thread", not {method!r}')
    return method
