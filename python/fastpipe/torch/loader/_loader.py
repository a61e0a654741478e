"""The loader.

Of iterable data sets each worker yields a stream, as torch does it, and by torch's own workers: what a worker's stream
yields is the data set's matter, so an item can't be given to whoever has time for it, and there is nothing here to do
better. With torchdata installed, its `StatefulDataLoader` is asked, so that there are states.
"""

from __future__ import annotations

import inspect
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex, TypeVar

import torch.utils.data
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from fastpipe.errors import StateError, UnsupportedError
from fastpipe.torch.loader._in_process import InProcess, Progress
from fastpipe.torch.loader._order import BetweenPasses
from fastpipe.torch.loader._time_account import Account, explained
from fastpipe.torch.loader._with_workers import LayoutHints, WithWorkers
from fastpipe.torch.loader._worker_info import WorkerInit, given_init


class Streams:
    """Passes over an iterable data set.

    Args:
        loader: whose they are.
    """

    def __init__(self, loader: Any) -> None:
        self._stateful = _stateful(loader)

    def begin(self, loader: Any, plainly: Callable[[], Any]) -> Any:
        """Starts a pass of the loader; by torch's own means, `plainly`, if need be."""
        if self._stateful is None:
            return plainly()
        iterator = iter(self._stateful)
        if loader.persistent_workers:
            loader._iterator = iterator
        return iterator

    def length(self, plainly: Callable[[], int]) -> int:
        """Batches of a pass, as far as is known."""
        return plainly() if self._stateful is None else len(self._stateful)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._with_states().state_dict()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._with_states().load_state_dict(state_dict)

    def _with_states(self) -> Any:
        if self._stateful is None:
            raise UnsupportedError(
                "states of iterable data sets are kept by torchdata's StatefulDataLoader: pip install torchdata"
                " (data pipes have none)"
            )
        return self._stateful


def _stateful(loader: Any) -> Any:
    """The loader of torchdata with the same arguments; None if it isn't installed, or doesn't fit."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return None
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return None
    with warnings.catch_warnings():
        # It calls what newer versions of torch are about to take away.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
            in_order=getattr(loader, "in_order", True),
            snapshot_every_n_steps=loader.snapshot_every_n_steps,
        )


_T = TypeVar("_T", covariant=True)

_VERSION = 1

_HAS_IN_ORDER = "in_order" in inspect.signature(torch.utils.data.DataLoader.__init__).parameters


class DataLoader(torch.utils.data.DataLoader[_T]):
    """A `torch.utils.data.DataLoader` that spends memory on batches, not on workers.

    It is used as torch's, and is one: a sub-class, with its arguments and its semantics. What differs is how workers
    work. torch's each make a whole batch. Here they share each batch: whoever has nothing to do makes the next item,
    and writes it once, into its row of the batch, in memory that all processes have in common. So

    - the first batch comes when all workers together have made it;
    - memory is that of `prefetch_factor` batches and the one that the consumer has, for any number of workers;
    - an item that takes long holds up its own batch alone;
    - an item is the same whoever makes it, also where it is augmented at random, and whatever the number of workers.

    **Random numbers.** In worker processes, and without workers, the generators of Python, NumPy and torch are seeded
    before an item is made. The item's seeds follow from `generator` (or torch's own), the epoch, and the item's place
    in it. Only generators that one of the first 16 items drew from are seeded: if later items draw from another one,
    they are made again. Without workers that is checked for a batch every 10 ms, and the program's generators are left
    as they were. Worker threads share these generators with the program, so nothing seeds them there. Items draw
    reproducibly from `fastpipe.torch.item_rng()`, in threads too. A `UserWarning` says so, once for a loader, if worker
    threads are seen to use the shared generators.

    **Collation.** Items of numbers, text, NumPy arrays and tensors, in dicts, lists, tuples, named tuples and data
    classes of these, are a batch as they lie, if all have the same shapes and `collate_fn` isn't given. Others are
    collated by the worker that makes the last item of a batch, and with `collate_fn` by a batch worker, which sees
    items in the memory where they lie. (Where all items of a batch take less than two milliseconds, one item worker
    makes and collates them, unless batch workers are faster.) What `collate_fn` keeps of its items beyond its call
    stays valid.

    **States.** `state_dict` resumes between any two batches, with any number of workers, batch workers and threads. It
    counts what was yielded. Samplers with a `state_dict`, or whose iterators have one, keep their own states. Other
    samplers are asked for the same batches again, with torch's generators put back.

    **Iterable data sets** are read as torch reads them, a worker a stream, and by torch's workers; with torchdata
    installed by its `StatefulDataLoader`, which has states.

    **Errors.** What an item or `collate_fn` raises is raised at the place of its batch, with the worker's traceback,
    and the iteration goes on behind it. A worker that ends, or is stopped by a signal for more than a second and a
    half, is a `WorkerError` that says which one, and which item it was making. `timeout` is a `WorkerError`, too.

    Workers that are processes need Linux. They share memory without a name (`memfd`): nothing is ever in /dev/shm.

    Args:
        dataset: map-style, or iterable.
        batch_size: items a batch; None for items as they are.
        shuffle: whether each epoch has another order.
        sampler: yields indices.
        batch_sampler: yields lists of indices.
        num_workers: how many make items; 0 for none but the program itself.
        collate_fn: makes a batch of a list of items.
        pin_memory: whether batches are copied to page-locked memory, where there is an accelerator.
        drop_last: whether a last batch of fewer items is left out.
        timeout: seconds that a batch may be waited for; 0 for any time.
        worker_init_fn: called in each worker with its number: item workers first, batch workers behind them. What it
            raises, `iter(loader)` raises, unless the first batch is there before.
        multiprocessing_context: "fork", "spawn", "forkserver" or a context; by default Python's.
        generator: what samplers and seeds are drawn from; by default torch's own.
        prefetch_factor: batches that are made ahead, in all: not for each worker. By default 2. While a batch is waited
            for and workers have nothing to do, more are begun if they take less than 32 MB: up to twice this for each
            worker.
        persistent_workers: whether workers are kept for the next epoch.
        pin_memory_device: as torch's.
        in_order: whether batches come in the sampler's order; else in that in which they are ready.
        num_batch_workers: how many call `collate_fn`, where it is given; by default `prefetch_factor`. With 0 the item
            workers do. For map-style data sets, as are the next two.
        worker_method: "multiprocessing" (by default, on free-threaded Python too) or "thread".
        memory_limit: bytes of shared memory that batches may take, those that the consumer keeps among them. By default
            what the machine, or its container, has left.
        snapshot_every_n_steps: of iterable data sets, as torchdata's `StatefulDataLoader`.

    Raises:
        ValueError: for values out of range, and where torch's loader raises one.
        TypeError: for arguments of other types.
        UnsupportedError: for worker processes on other systems than Linux; and for arguments that iterable data sets
            have no use for.
        OutOfMemoryError: by `next`, if a batch doesn't fit into `memory_limit`, or what there is; it names the sizes.
        WorkerError: by `next`, as above.

    Example:
        >>> import torch
        >>> from fastpipe.torch import DataLoader
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.arange(6.0), torch.arange(6))
        >>> loader = DataLoader(data, batch_size=4, num_workers=2)
        >>> [values.tolist() for values, labels in loader]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    """

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
            **more,
        )
        if not _HAS_IN_ORDER:
            self.in_order = in_order
        is_stream = self._dataset_kind == 1 or isinstance(dataset, (IterDataPipe, MapDataPipe))
        self.num_batch_workers = _whole("num_batch_workers", num_batch_workers, 0)
        self.memory_limit = _whole("memory_limit", memory_limit, 1)
        self.worker_method = "multiprocessing" if worker_method is None else _method(worker_method)
        if is_stream:
            _check_stream(num_batch_workers=num_batch_workers, memory_limit=memory_limit, worker_method=worker_method)
            self.worker_method = "multiprocessing"
        elif num_workers:
            # A loader that is built from this one's attributes has it, too.
            self.worker_init_fn = WorkerInit(given_init(worker_init_fn))
        self.snapshot_every_n_steps = snapshot_every_n_steps
        if num_workers and self.worker_method == "multiprocessing" and sys.platform != "linux":
            raise UnsupportedError(
                "fastpipe's workers share memory by means of Linux: use torch.utils.data.DataLoader here, or"
                " num_workers=0"
            )
        if self.worker_method == "thread" and multiprocessing_context is not None:
            raise ValueError('multiprocessing_context is for processes, and worker_method="thread" starts none')
        self._known = LayoutHints()
        self._progress: Progress | None = None
        self._account: Account | None = None
        self._resumed: dict[str, Any] | None = None
        self._rest: BetweenPasses | None = None
        self._loaded: dict[str, Any] | None = None
        if is_stream:
            self._streams = Streams(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: it has no part in the passes of this one."""
        return self.__dict__ | {"_progress": None, "_account": None, "_known": LayoutHints()}

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
        state = self._resumed, self._rest, self._loaded
        try:
            iterator: Any = super().__iter__()
        except BaseException:
            # The next pass that begins resumes from there, and doesn't silently begin from the start.
            self._resumed, self._rest, self._loaded = state
            raise
        self._progress = iterator.progress
        self._account = iterator.account
        return iterator

    def __len__(self) -> int:
        """Batches of a pass.

        Raises:
            TypeError: if the data set or the sampler doesn't know its length.
        """
        if self._streams is not None:
            return self._streams.length(super().__len__)
        return super().__len__()

    def _taken_state(self) -> tuple[dict[str, Any] | None, BetweenPasses | None]:
        """What the next pass goes on from: within a pass, or between two."""
        taken = self._resumed, self._rest
        self._resumed = self._rest = self._loaded = None
        return taken

    def state_dict(self) -> dict[str, Any]:
        """How far the pass has come: what `load_state_dict` of a loader of the same data and samplers goes on from.

        Between two passes it is what the next one will draw from: the state of torch's generator (or the loader's).

        Returns:
            A dict, fit for JSON where the states of samplers are.

        Raises:
            UnsupportedError: for iterable data sets, if torchdata isn't installed.
        """
        if self._streams is not None:
            return self._streams.state_dict()
        if self._loaded is not None:
            return self._loaded
        progress = self._progress
        state: dict[str, Any] = {"version": _VERSION, "kind": "items", "batch_size": self._told_batch_size()}
        if progress is not None and not progress.ended:
            return state | {"pass": progress.state()}
        iterator: Any = self._iterator
        return state | {"rest": BetweenPasses.told(self, None if iterator is None else iterator.next_seed)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next pass go on where a state was saved, with any number of workers.

        The state of a loader between two passes puts the generators back from which the next pass draws. torch's own
        generator is put back only if nothing draws from it between this call and the pass: else the program has seeded
        it, or draws for its own ends.

        Raises:
            StateError: if it isn't one of such a loader; it says what differs. Nothing changes then. The next pass
                raises it, too, if the sampler yields other batches than before.
        """
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
        rest = BetweenPasses(self, state["rest"]) if "rest" in state else None
        self._resumed, self._rest, self._loaded = state.get("pass"), rest, state
        self._progress = None

    def _told_batch_size(self) -> Any:
        sampler = self.batch_sampler
        size = getattr(sampler, "batch_size", None)
        return [size, bool(getattr(sampler, "drop_last", False))] if isinstance(size, int) else None

    def explain(self) -> str:
        """Says what limits the last pass, in words: items, collation, copying, or the consumer.

        It names the items that took longest, and what workers do that have been at one thing for more than a second.
        While the program is held up by `next`, another thread can ask what it waits for.
        """
        return explained(self, self._account)


def _whole(name: str, value: SupportsIndex | None, least: int) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a whole number, not {value!r}") from None
    if number < least:
        raise ValueError(f"{name} is at least {least}, not {number}")
    return number


def _check_stream(**given: Any) -> None:
    """Refuses what torch's workers, which read iterable data sets, know nothing of."""
    for name, value in given.items():
        if value is not None and (name, value) != ("worker_method", "multiprocessing"):
            raise UnsupportedError(
                f"{name} is for map-style data sets: iterable ones are read by torch's own worker processes, so"
                " leave it out"
            )


def _method(method: str) -> str:
    if method not in ("multiprocessing", "thread"):
        raise ValueError(f'worker_method is "multiprocessing" or "thread", not {method!r}')
    return method
