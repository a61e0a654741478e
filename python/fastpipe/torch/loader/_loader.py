"""The `DataLoader`.

The workers share the items of a map-style dataset. Each worker reads its own stream of an iterable dataset, as in
torch, and makes batches of it in the same shared memory. torch's loader reads data pipes.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from fastpipe._arguments import memory_size, within
from fastpipe.errors import StateError, UnsupportedError
from fastpipe.torch.loader._advice import advise
from fastpipe.torch.loader._hints import LayoutHints
from fastpipe.torch.loader._in_process import ITERABLE, Beginning, InProcess, Progress
from fastpipe.torch.loader._order import BetweenPasses
from fastpipe.torch.loader._stream import is_stateful
from fastpipe.torch.loader._stream_passes import StreamInProcess, StreamsWithWorkers
from fastpipe.torch.loader._time_account import Account, explained
from fastpipe.torch.loader._with_workers import WithWorkers
from fastpipe.torch.loader._worker_info import WorkerInit, given_init

_T = TypeVar("_T", covariant=True)

_VERSION = 1

_HAS_IN_ORDER = "in_order" in inspect.signature(torch.utils.data.DataLoader.__init__).parameters


class DataLoader(torch.utils.data.DataLoader[_T]):
    """A `torch.utils.data.DataLoader` whose workers build each batch together in shared memory.

    It is a subclass of torch's loader with the same arguments and semantics. Only the way that workers work differs. In
    torch, each worker creates a whole batch. Here the workers share each batch: an idle worker creates the next item
    and writes it once, directly into its row of the batch, in memory that all processes share. As a result:

    - The first batch arrives as soon as all workers together have created it.
    - Memory holds `prefetch_factor` batches and the one that the consumer has, for any number of workers.
    - A slow item delays only its own batch.
    - An item has the same value in any worker and with any number of workers, including random augmentation.

    **Random numbers.** In worker processes and without workers, the generators of Python, NumPy and torch are seeded
    before each item. The item's seeds are determined by `generator` (or torch's default), the epoch, and the item's
    position in the epoch. Only generators that one of the first 16 items drew from are seeded. If a later item draws
    from another generator, the item is created again with that generator seeded. Without workers, this is checked for
    one batch every 10 ms, and the program's generators keep their states. Worker threads share these generators with
    the program, so they aren't seeded in threads. With `fastpipe.torch.item_rng()`, items draw reproducible numbers
    everywhere, including in threads. If worker threads use the shared generators, the loader emits one `UserWarning`.

    **Collation.** Items can be numbers, text, NumPy arrays and tensors, in dicts, lists, tuples, named tuples and data
    classes. If all items have the same shapes and `collate_fn` isn't given, they form the batch in place. Otherwise the
    worker that creates the last item of a batch collates it. With `collate_fn`, a batch worker collates and reads the
    items without a copy. (If all items of a batch take less than two milliseconds, one item worker creates and collates
    them, unless batch workers are faster.) References to items that `collate_fn` keeps after its call stay valid.

    **States.** `state_dict` resumes between any two batches, with any number of workers, batch workers and threads. It
    counts the batches that were yielded. A sampler with a `state_dict`, or whose iterators have one, saves its own
    state. Any other sampler yields the same batches again after torch's generators are restored.

    **Iterable datasets.** As in torch, each worker reads its own copy of the dataset and makes whole batches. The
    workers take turns, and memory is bounded as above. Random numbers are seeded for each worker, not for each item.
    If the dataset or its iterators have `state_dict` and `load_state_dict`, states contain theirs. Otherwise workers
    skip the batches that were delivered. A state can be loaded only with the same `num_workers`.

    **Errors.** An error in an item or in `collate_fn` is raised in place of its batch, with the worker's traceback.
    Iteration can continue after it. If a worker exits, or is stopped by a signal for more than 1.5 seconds, `next`
    raises `WorkerError` with the worker's name and the item that it was creating. A `timeout` raises `WorkerError` as
    well.

    Workers require Linux. Processes share anonymous memory (`memfd`) and store nothing in
    /dev/shm.

    Args:
        dataset: Map-style or iterable dataset.
        batch_size: Number of items per batch. None yields single items. Defaults to 1.
        shuffle: Whether to shuffle the items in each epoch. Defaults to False.
        sampler: Sampler that yields indices.
        batch_sampler: Sampler that yields lists of indices.
        num_workers: Number of item workers. With 0, the program itself creates the items. More than `prefetch_factor *
            batch_size` only help while further batches are started (see `prefetch_factor`); the log says so. Defaults
            to 0.
        collate_fn: Function that creates a batch from a list of items.
        pin_memory: Whether batches are in page-locked memory if an accelerator is available. With CUDA and workers, the
            shared memory itself is page-locked, and holds up to `prefetch_factor` more batches while GPUs copy from
            them. If that isn't possible, a thread copies the batches, and the log says why. Defaults to False.
        drop_last: Whether to drop a last batch with fewer items. Defaults to False.
        timeout: Maximum number of seconds to wait for a batch. 0 waits without a limit. Defaults to 0.
        worker_init_fn: Function that each worker calls with its index. Batch workers are numbered after item workers.
            `iter(loader)` raises any error of this function, unless the first batch is ready before the error occurs.
        multiprocessing_context: "fork", "spawn", "forkserver" or a context. Defaults to Python's default.
        generator: Generator of the samplers and seeds. Defaults to torch's default generator.
        prefetch_factor: Number of batches to prefetch in total, not for each worker. Defaults to 2. If workers are idle
            while the consumer waits for a batch, more batches are started as long as they use less than 32 MB: up to
            twice this number for each worker.
        persistent_workers: Whether to keep the workers for the next epoch. Defaults to False.
        pin_memory_device: Device for which batches are page-locked, as in torch.
        in_order: Whether to yield batches in the sampler's order. With False, batches are yielded in the order in which
            they are ready. Defaults to True.
        num_batch_workers: Number of workers that call `collate_fn`, if it is given. With 0, the item workers call it.
            Defaults to `prefetch_factor`; more are logged like excess `num_workers`. For map-style datasets only.
        worker_method: "multiprocessing" or "thread". Defaults to "multiprocessing", also on free-threaded Python.
            "thread" is for map-style datasets only.
        memory_limit: Maximum size of shared memory for batches, including batches that the consumer keeps: a number of
            bytes, or a size such as "4GB". Defaults to the available memory of the machine or its container.
        snapshot_every_n_steps: Number of batches of a worker between snapshots of an iterable dataset's state, from 1.
            A resumed worker skips the batches after its last snapshot. None takes no snapshots. Defaults to 1.

    Raises:
        ValueError: If a value is out of range, or torch's loader raises it.
        TypeError: If an argument has an unsupported type.
        UnsupportedError: If workers are requested on another system than Linux, or an argument isn't supported for
            iterable datasets.
        OutOfMemoryError: By `next`, if a batch exceeds `memory_limit` or the available memory. The message contains the
            sizes.
        WorkerError: By `next`, if a worker is lost or `timeout` has passed.

    Example:
        >>> import torch
        >>> from fastpipe.torch import DataLoader
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.arange(6.0), torch.arange(6))
        >>> loader = DataLoader(data, batch_size=4, num_workers=2)
        >>> [values.tolist() for values, labels in loader]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    """

    # The value for subclasses that don't call `__init__`, which torchdata may create.
    _reads_pipe = False

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
        num_batch_workers: int | None = None,
        worker_method: str | None = None,
        memory_limit: int | str | None = None,
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
        self._reads_pipe = isinstance(dataset, (IterDataPipe, MapDataPipe))
        is_stream = self._dataset_kind == ITERABLE
        self.num_batch_workers = (
            None if num_batch_workers is None else within("num_batch_workers", num_batch_workers, 0, 2**31)
        )
        self.memory_limit = None if memory_limit is None else memory_size("memory_limit", memory_limit)
        self.worker_method = "multiprocessing" if worker_method is None else _method(worker_method)
        if is_stream or self._reads_pipe:
            _check_stream(num_batch_workers, worker_method, memory_limit if self._reads_pipe else None)
        elif num_workers:
            # Other libraries build loaders from the attributes of this one, and thereby copy this check.
            self.worker_init_fn = WorkerInit(given_init(worker_init_fn))
        self.snapshot_every_n_steps = (
            None
            if snapshot_every_n_steps is None
            else within("snapshot_every_n_steps", snapshot_every_n_steps, 0, 2**63 - 1)
        )
        # torch's own workers read data pipes.
        if num_workers and not self._reads_pipe and sys.platform != "linux":
            raise UnsupportedError(
                f"workers of fastpipe.torch.DataLoader require Linux; this is {sys.platform}. Use"
                " torch.utils.data.DataLoader or num_workers=0"
            )
        if self.worker_method == "thread" and multiprocessing_context is not None:
            raise ValueError('multiprocessing_context has no effect with worker_method="thread": remove it')
        self._known = LayoutHints()
        self._progress: Progress | None = None
        self._account: Account | None = None
        self._resumed: dict[str, Any] | None = None
        self._rest: BetweenPasses | None = None
        self._loaded: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, which doesn't take part in the passes of this loader."""
        return self.__dict__ | {"_progress": None, "_account": None, "_known": LayoutHints()}

    def _get_iterator(self) -> Any:
        if self._reads_pipe:
            return super()._get_iterator()
        resumed, rest = self._taken_state()
        if rest is not None:
            rest.put_back(self)
        beginning = Beginning(resumed) if rest is None else Beginning(resumed, rest.seed, rest.starts)
        is_stream = self._dataset_kind == ITERABLE
        if self.num_workers == 0:
            return StreamInProcess(self, beginning) if is_stream else InProcess(self, beginning)
        self.check_worker_number_rationality()
        advise(self)
        return StreamsWithWorkers(self, beginning) if is_stream else WithWorkers(self, beginning)

    def __iter__(self) -> Any:
        """Starts a pass."""
        if self._reads_pipe:
            return super().__iter__()
        state = self._resumed, self._rest, self._loaded
        try:
            iterator: Any = super().__iter__()
        except BaseException:
            # The next pass still resumes from the state instead of silently starting from the beginning.
            self._resumed, self._rest, self._loaded = state
            raise
        self._progress = iterator.progress
        self._account = iterator.account
        return iterator

    def _taken_state(self) -> tuple[dict[str, Any] | None, BetweenPasses | None]:
        """Returns and clears the loaded state: the state within a pass, and the state between two passes."""
        taken = self._resumed, self._rest
        self._resumed = self._rest = self._loaded = None
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the pass, from which a loader with the same dataset and samplers can resume.

        Between two passes, the state contains the state of the generator that the next pass draws from.

        Returns:
            A dict that can be stored as JSON if the states of the samplers, or of the iterable dataset, can.

        Raises:
            UnsupportedError: For data pipes.
        """
        self._check_states()
        if self._loaded is not None:
            return self._loaded
        progress = self._progress
        is_stream = self._dataset_kind == ITERABLE
        state: dict[str, Any] = {
            "version": _VERSION,
            "kind": "streams" if is_stream else "items",
            "batch_size": self._told_batch_size(),
        }
        if is_stream:
            state["num_workers"] = self.num_workers
        if progress is not None and not progress.ended:
            return state | {"pass": progress.state()}
        iterator: Any = self._iterator
        state["rest"] = BetweenPasses.told(self, None if iterator is None else iterator.next_seed)
        if is_stream and self.num_workers == 0 and is_stateful(self.dataset):
            dataset: Any = self.dataset
            state["rest"]["starts"] = [{"dataset": copy.deepcopy(dataset.state_dict())}]
        elif is_stream and iterator is not None:
            state["rest"]["starts"] = iterator.progress.order.starts()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from a saved state in the next pass, with any number of workers.

        A state that was saved between two passes restores the generators that the next pass draws from. torch's default
        generator is restored only if it isn't used between this call and the next pass. Otherwise the program has
        seeded it or draws from it. For an iterable dataset, `num_workers` must be the same.

        Args:
            state_dict: State, as returned by `state_dict` of a loader with the same dataset and samplers.

        Raises:
            StateError: If the state doesn't match this loader. The message describes the difference, and the loader
                stays unchanged. The next pass also raises it if the sampler yields other batches than before.
        """
        self._check_states()
        state = dict(state_dict)
        is_stream = self._dataset_kind == ITERABLE
        if state.get("kind") != ("streams" if is_stream else "items"):
            hint = " (torchdata saved it)" if "_snapshot" in state or "_sampler_iter_state" in state else ""
            what = "an iterable" if is_stream else "a map-style"
            raise StateError(f"this is not the state of a fastpipe.torch.DataLoader with {what} dataset{hint}")
        if state.get("version") != _VERSION:
            raise StateError(f"the state has version {state.get('version')}; this fastpipe reads version {_VERSION}")
        if state["batch_size"] != self._told_batch_size():
            raise StateError(
                f"cannot resume from this state: it was saved with batches of {state['batch_size']}; this loader has"
                f" batches of {self._told_batch_size()} ([batch_size, drop_last])"
            )
        if is_stream and state["num_workers"] != self.num_workers:
            raise StateError(
                f"cannot resume from this state: it was saved with num_workers={state['num_workers']}, and each worker"
                f" reads its own stream of an iterable dataset. Set num_workers={state['num_workers']}; this loader has"
                f" num_workers={self.num_workers}"
            )
        rest = BetweenPasses(self, state["rest"]) if "rest" in state else None
        self._resumed, self._rest, self._loaded = state.get("pass"), rest, state
        self._progress = None
        if is_stream:
            # Persistent workers don't resume: new workers start with the seeds of the state.
            self._iterator = None

    def _check_states(self) -> None:
        if self._reads_pipe:
            raise UnsupportedError("data pipes don't support states: use a map-style or an iterable dataset")

    def _told_batch_size(self) -> Any:
        sampler = self.batch_sampler
        size = getattr(sampler, "batch_size", None)
        return [size, bool(getattr(sampler, "drop_last", False))] if isinstance(size, int) else None

    def explain(self) -> str:
        """Returns a text that explains what limits the last pass: items, collation, copying, or the consumer.

        If the consumer waited for less than 5 % of the time, the text says that the loader is not a bottleneck.
        The text contains the slowest items, and the workers that have been busy with one item or batch for more than a
        second. Another thread can call this method to find out what a blocked `next` waits for.
        """
        return explained(self, self._account)


def _check_stream(num_batch_workers: int | None, worker_method: str | None, memory_limit: int | str | None) -> None:
    """Rejects arguments that aren't supported for iterable datasets and data pipes."""
    if num_batch_workers is not None:
        raise UnsupportedError(
            "num_batch_workers is for map-style datasets only: each worker of an iterable dataset collates its own"
            " batches. Remove the argument"
        )
    if worker_method == "thread":
        raise UnsupportedError(
            'worker_method="thread" is for map-style datasets only: an iterable dataset divides its items by'
            " torch.utils.data.get_worker_info(), which returns None in threads. Remove the argument"
        )
    if memory_limit is not None:
        raise UnsupportedError("memory_limit isn't supported for data pipes, which torch reads: remove the argument")


def _method(method: str) -> str:
    if method not in ("multiprocessing", "thread"):
        raise ValueError(f'worker_method must be "multiprocessing" or "thread"; got {method!r}')
    return method
