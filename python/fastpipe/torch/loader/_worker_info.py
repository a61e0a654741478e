"""Information about workers and the items that they create.

In worker processes, torch's `get_worker_info` also returns it. In worker threads, only `worker_info` does.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from torch.utils.data._utils import worker as torch_worker

from fastpipe.errors import UnsupportedError
from fastpipe.torch.loader._seeds import ItemRng


class _FixedError(dataclasses.FrozenInstanceError, RuntimeError):
    pass


class ItemWorkerInfo(torch_worker.WorkerInfo):
    """Read-only information about a worker.

    Attributes:
        id: Index of the worker, from 0.
        num_workers: Number of item workers.
        seed: Seed of the item that is being created, 0 to 2^63 - 1. It is a pure function of the loader's generator,
            the epoch, and the item's position in the epoch, so it is the same in each worker. In `collate_fn` it is the
            seed of the batch. In `worker_init_fn`, and for an iterable dataset, it is that of the worker, as in torch.
        dataset: The worker's copy of the dataset. In a thread, the dataset itself.
        rng: Generators for the item (`random_generator`, `torch_generator`, `numpy_generator`), seeded with its seeds.
        worker_method: "multiprocessing" or "thread".
    """

    __slots__ = ("_facts",)

    id: int
    num_workers: int
    seed: int
    dataset: Any
    rng: ItemRng  # type: ignore[assignment]
    worker_method: Literal["multiprocessing", "thread"]

    def __init__(
        self,
        number: int,
        workers: int,
        dataset: Any,
        method: str,
        seed: Callable[[int], int] | int,
        item: Callable[[], int] | None = None,
    ) -> None:
        rng = ItemRng(seed, item) if callable(seed) else ItemRng(lambda which: seed + which)
        facts = {"id": number, "num_workers": workers, "dataset": dataset, "rng": rng, "worker_method": method}
        object.__setattr__(self, "_facts", (facts, seed))

    def __getattribute__(self, name: str) -> Any:
        facts, seed = object.__getattribute__(self, "_facts")
        if name == "seed":
            return seed(0) if callable(seed) else seed
        if name in facts:
            return facts[name]
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch's messages, which differ between its versions.
        if dataclasses.is_dataclass(torch_worker.WorkerInfo):
            raise _FixedError(f"cannot assign to field {name!r}")
        raise _FixedError("Cannot assign attributes to WorkerInfo objects")

    def __repr__(self) -> str:
        names = ("id", "num_workers", "seed", "dataset", "worker_method")
        return f"WorkerInfo({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def set_in_process(info: ItemWorkerInfo | None) -> None:
    """Sets the information about this worker process, for torch as well."""
    torch_worker._worker_info = info


_thread = threading.local()


def set_in_thread(info: ItemWorkerInfo | None) -> None:
    """Sets the information about this worker thread."""
    _thread.info = info


def worker_info() -> ItemWorkerInfo | None:
    """Returns information about the worker process or thread that runs this code.

    Datasets, `collate_fn` and `worker_init_fn` call it. In worker processes, `torch.utils.data.get_worker_info` returns
    the same object. In worker threads, that function returns None, since torch doesn't know about them.

    Returns:
        None outside of workers, and in passes without workers. In a worker, an object with these attributes:

        - `id`: Index of the worker, from 0. Batch workers have the indices from `num_workers` on.
        - `num_workers`: Number of item workers.
        - `dataset`: The worker's copy of the dataset. In a thread, the dataset itself.
        - `seed`: Seed of the item that is being created, 0 to 2^63 - 1. In `collate_fn` it is the seed of the batch,
          and in `worker_init_fn` that of the worker.
        - `rng`: Generators for the item, as returned by `item_rng`.
        - `worker_method`: "multiprocessing" or "thread".

        In workers of an iterable dataset, `seed` is that of the worker, as in torch. In workers of torch's own loader,
        the object is torch's `WorkerInfo`, with `id`, `num_workers`, `dataset` and `seed`.

    Example:
        >>> import torch
        >>> import fastpipe.torch
        >>> class Methods(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 2
        ...
        ...     def __getitem__(self, index):
        ...         info = fastpipe.torch.worker_info()
        ...         return "no worker" if info is None else info.worker_method
        >>> list(fastpipe.torch.DataLoader(Methods(), batch_size=2))
        [['no worker', 'no worker']]
        >>> list(fastpipe.torch.DataLoader(Methods(), batch_size=2, num_workers=1, worker_method="thread"))
        [['thread', 'thread']]
    """
    found: ItemWorkerInfo | None = getattr(_thread, "info", None)
    return torch_worker.get_worker_info() if found is None else found  # type: ignore[return-value]


def in_worker_thread() -> bool:
    """Whether this thread is a worker."""
    return getattr(_thread, "info", None) is not None


_here = threading.local()


@contextmanager
def making_here(rng: ItemRng) -> Iterator[None]:
    """Context manager for code in which this thread itself creates items with these generators."""
    before = getattr(_here, "rng", None)
    _here.rng = rng
    try:
        yield
    finally:
        _here.rng = before


def item_rng() -> ItemRng:
    """Returns random generators for the item that is being created, seeded the same way in every worker.

    Datasets and `collate_fn` call it while a `fastpipe.torch.DataLoader` fetches an item or creates a batch. The
    generators draw the same numbers in worker processes, in worker threads and without workers. The global generators
    of `random`, `numpy.random` and `torch` are seeded for items only in worker processes and without workers. Worker
    threads share the global generators with the program.

    Returns:
        An object with `random_generator` (a `random.Random`), `numpy_generator` (a `numpy.random.Generator`) and
        `torch_generator` (a `torch.Generator`), each seeded for the item.

    Raises:
        RuntimeError: If no such item is being created.

    Example:
        >>> import torch
        >>> import fastpipe.torch
        >>> class Noise(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 6
        ...
        ...     def __getitem__(self, index):
        ...         return torch.rand((), generator=fastpipe.torch.item_rng().torch_generator)
        >>> def numbers(**workers):
        ...     generator = torch.Generator().manual_seed(7)
        ...     return torch.cat(list(fastpipe.torch.DataLoader(Noise(), generator=generator, **workers)))
        >>> bool((numbers() == numbers(num_workers=2, worker_method="thread")).all())
        True
    """
    rng = getattr(_here, "rng", None)
    if rng is None:
        rng = getattr(worker_info(), "rng", None)
    if not isinstance(rng, ItemRng):
        raise RuntimeError(
            "call item_rng() only while fastpipe.torch.DataLoader makes an item: none is being made here"
        )
    return rng


_Init: TypeAlias = Callable[[int], Any]


class WorkerInit:
    """Calls the user's `worker_init_fn` in workers of fastpipe, and raises an error in any other worker.

    Libraries such as accelerate accept any `torch.utils.data.DataLoader`, read the arguments from its attributes, and
    build a torch loader from them. They call no method of the loader that they replace. torch's workers call
    `worker_init_fn` first, so only this function can detect that they aren't workers of fastpipe.

    Args:
        given: The user's function, or None.
    """

    def __init__(self, given: _Init | None) -> None:
        self.given = given

    def __call__(self, worker: int) -> Any:
        """Calls the function with the worker's index.

        Raises:
            UnsupportedError: If this isn't a worker of fastpipe.
        """
        if not isinstance(worker_info(), ItemWorkerInfo):
            raise UnsupportedError(
                "torch.utils.data.DataLoader was built from the arguments of a fastpipe.torch.DataLoader, and would"
                " replace it: accelerate.prepare and skip_first_batches do that. Iterate over the"
                " fastpipe.torch.DataLoader itself: leave it out of prepare, pass"
                " sampler=torch.utils.data.DistributedSampler(dataset) if there are several processes, and move batches"
                " with accelerate.utils.send_to_device(batch, accelerator.device). With a Hugging Face Trainer, return"
                " it from get_train_dataloader"
            )
        return None if self.given is None else self.given(worker)

    def __repr__(self) -> str:
        return f"<worker_init_fn of a fastpipe.torch.DataLoader: {self.given!r}>"


def given_init(worker_init_fn: _Init | None) -> _Init | None:
    """Returns the user's function from a loader's `worker_init_fn`."""
    return worker_init_fn.given if isinstance(worker_init_fn, WorkerInit) else worker_init_fn
