"""Facts of workers, and of the items that they make.

In worker processes torch's own function returns them, too. In worker threads only `worker_info` does.
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
    """Facts of a worker. They can't be set.

    Attributes:
        id: its number, from 0.
        num_workers: how many there are.
        seed: of the item that is being made, of 63 bits: a pure function of the loader's generator, the epoch, and the
            item's place in it, so the same in each worker. In `collate_fn` that of the batch; in `worker_init_fn` that
            of the worker, as torch has it.
        dataset: the worker's copy of the data set; in a thread, the data set.
        rng: generators for the item (`random_generator`, `torch_generator`, `numpy_generator`), seeded with its seeds.
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
        # As torch says it: newer versions of it in one way, older ones in another.
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
    """Sets the facts of the worker that this process is, for torch, too."""
    torch_worker._worker_info = info


_thread = threading.local()


def set_in_thread(info: ItemWorkerInfo | None) -> None:
    """Sets the facts of the worker that this thread is."""
    _thread.info = info


def worker_info() -> ItemWorkerInfo | None:
    """Returns the facts of the worker that this code runs in, be it a process or a thread.

    Datasets, `collate_fn` and `worker_init_fn` call it. In worker processes `torch.utils.data.get_worker_info` returns
    the same. In worker threads, which torch doesn't know of, that returns None.

    Returns:
        None outside of workers, and in passes without workers. In a worker an object with

        - `id`: the worker's index, from 0; batch workers have those from `num_workers` on;
        - `num_workers`: how many workers make items;
        - `dataset`: the worker's copy of the dataset; in a thread, the dataset itself;
        - `seed`: the seed of the item that is being made, 0 to 2^63 - 1; in `collate_fn` that of the batch, and in
          `worker_init_fn` that of the worker;
        - `rng`: generators for the item, as `item_rng` returns them;
        - `worker_method`: "multiprocessing" or "thread".

        Iterable datasets are read by workers of torch's loader. There it is torch's `WorkerInfo`, with `id`,
        `num_workers`, `dataset` and `seed`.

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
    """This thread makes items itself, which draw from these generators."""
    before = getattr(_here, "rng", None)
    _here.rng = rng
    try:
        yield
    finally:
        _here.rng = before


def item_rng() -> ItemRng:
    """Random generators for the item that is being made: the same ones whoever makes it.

    To be called by data sets and `collate_fn` while a `fastpipe.torch.DataLoader` asks them for an item or a batch.
    What they draw from these generators is the same in worker processes, in worker threads and without workers. The
    generators of `random`, `numpy.random` and `torch` themselves are seeded for items in worker processes and without
    workers only. Worker threads share them with the program.

    Returns:
        An object with `random_generator` (a `random.Random`), `numpy_generator` (a `numpy.random.Generator`) and
        `torch_generator` (a `torch.Generator`), each seeded for the item.

    Raises:
        RuntimeError: where no such item is being made.

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
            "item_rng() is for items, while fastpipe.torch.DataLoader makes them: none is being made here"
        )
    return rng


_Init: TypeAlias = Callable[[int], Any]


class WorkerInit:
    """Calls the user's `worker_init_fn` in workers of fastpipe's, and raises an error in all others.

    Libraries such as accelerate take any `torch.utils.data.DataLoader`, read the arguments from its attributes, and
    build a loader of torch's from them. They don't call anything of the loader they replace. torch's workers call
    `worker_init_fn` first, so this is the place where they can be told apart from workers of fastpipe's.

    Args:
        given: the user's function; None if there is none.
    """

    def __init__(self, given: _Init | None) -> None:
        self.given = given

    def __call__(self, worker: int) -> Any:
        """Calls the function with the worker's number.

        Raises:
            UnsupportedError: if this isn't a worker of fastpipe's.
        """
        if not isinstance(worker_info(), ItemWorkerInfo):
            raise UnsupportedError(
                "torch.utils.data.DataLoader was built from the arguments of a fastpipe.torch.DataLoader, and would"
                " replace it: accelerate.prepare and skip_first_batches do that. Iterate over the"
                " fastpipe.torch.DataLoader itself: leave it out of prepare, give it"
                " sampler=torch.utils.data.DistributedSampler(dataset) if there are several processes, and move batches"
                " with accelerate.utils.send_to_device(batch, accelerator.device). With a Hugging Face Trainer, return"
                " it from get_train_dataloader"
            )
        return None if self.given is None else self.given(worker)

    def __repr__(self) -> str:
        return f"<worker_init_fn of a fastpipe.torch.DataLoader: {self.given!r}>"


def given_init(worker_init_fn: _Init | None) -> _Init | None:
    """The user's function, of a loader's `worker_init_fn`."""
    return worker_init_fn.given if isinstance(worker_init_fn, WorkerInit) else worker_init_fn
