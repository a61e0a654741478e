"""Batches as Torch tensors: `dataset`, usable by itself, in a `DataLoader`, and in `torch.distributed`.

Tensors share the memory of the batch's arrays without a copy. The memory is reused after the last tensor that refers to
it is released. A feature that consists of several arrays is a named tuple of tensors. `DataLoader` can pin named
tuples and send them between processes, and `.to` is easily mapped over them.
"""

from __future__ import annotations

import difflib
import multiprocessing
import multiprocessing.context
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

from fastpipe._arguments import within
from fastpipe._private_constructor import private_constructor
from fastpipe._reader.passes import Passes, passes_of, shard_of_this_rank
from fastpipe._reader.reader import Reader
from fastpipe.errors import FastpipeError, StateError

try:
    import torch
    import torch.utils.data
    from torch.utils.data._utils.fetch import _IterableDatasetFetcher

    from fastpipe._interop.distributed import local_ranks
    from fastpipe._interop.tensors import (
        Bag,
        Forms,
        Jagged,
        Masked,
        RaggedAs,
        SparseAs,
        Strings,
        StringsAs,
        keyed_jagged,
        tensors,
    )
    from fastpipe.torch._batches import Batches, Seen, carrying
    from fastpipe.torch._shared_batches import Lending
    from fastpipe.torch._worker_epochs import ASKED_AHEAD, EpochLogFile, Participant, Version
    from fastpipe.torch.loader import DataLoader, item_rng, worker_info
except ImportError as error:
    raise ImportError("fastpipe.torch requires PyTorch: pip install 'fastpipe-data[torch]'") from error

__all__ = [
    "Bag",
    "DataLoader",
    "IterableDataset",
    "Jagged",
    "Masked",
    "Strings",
    "dataset",
    "item_rng",
    "keyed_jagged",
    "tensors",
    "worker_info",
]

Selection: TypeAlias = "str | list[str] | tuple[Any, ...]"


def dataset(
    reader: Reader,
    *,
    select: Selection | None = None,
    map: Callable[[Any], Any] | None = None,
    distributed: bool = True,
    ragged: RaggedAs = "offsets",
    sparse: SparseAs = "coo",
    strings: StringsAs = "tensors",
) -> IterableDataset:
    """Returns an iterable dataset of a reader's batches as tensors.

    It yields whole batches, so pass `batch_size=None` to a `DataLoader` around it:

        DataLoader(fastpipe.torch.dataset(reader), batch_size=None, pin_memory=True)

    With several ranks, all ranks get the same number of batches, as the reader's `on_uneven` specifies. The workers of
    a rank divide its batches among themselves without changing their number. (With `shuffle="block"` and `"buffer"`,
    workers divide units instead, and each worker may add a short last batch.) The processors are divided among the
    workers. Workers decode into memory that the training process has mapped, so batches aren't copied unless the loader
    has a `collate_fn`.

    `num_workers=0` is simpler and usually several times faster, since the reader's own threads decode in advance.
    Workers help only if `map` or `collate_fn` is slow. Without either, the first pass with workers warns once.

    A reader without a rank is divided among the ranks of the program: those of the default process group of
    `torch.distributed` or, before it exists, of the environment variables RANK and WORLD_SIZE (set by torchrun). The
    division is logged (logger `fastpipe`, level INFO). A reader that has a rank is not divided again.

    All workers of a pass read the same epoch: the one that was next when the loader's `iter` was called. (With
    persistent workers, the epoch may be determined as late as when the first worker begins.) A pass that has yielded a
    batch counts as an epoch, in workers as well, whether it was finished or left. `set_epoch` overrides that, also
    during a pass, and doesn't affect the active pass.

    An error ends a pass, and each further `next` raises it again. Errors of fastpipe arrive from workers with all their
    attributes. Ctrl-C doesn't end a pass.

    Args:
        reader: Reader of any source, for example from `fastpipe.read_avro`. Don't iterate over it elsewhere.
        select: Features to yield. A name yields that feature, a list of names a dict of features, and a tuple of
            selections a tuple, as in `select=(["age", "terms"], "label")`. Defaults to None, which yields all features
            as a dict.
        map: Function of the selected features whose result is yielded. It must be picklable if workers are spawned.
            Defaults to None.
        distributed: Whether to divide the reader among ranks. Set it to False if each rank must read everything, as in
            an evaluation on all ranks. Defaults to True.
        ragged: "offsets" for `Jagged(values, offsets)`, or "nested" for nested tensors. Defaults to "offsets".
        sparse: "coo" for COO tensors, "csr" for CSR tensors, or "bag" for the inputs of `torch.nn.EmbeddingBag`.
            Defaults to "coo".
        strings: "tensors" for the bytes and offsets of strings, or "lists" for lists of Python strings. Defaults to
            "tensors".

    Raises:
        TypeError: If `reader` isn't a reader, `map` isn't callable, or `select` contains anything but names, lists and
            tuples.
        ValueError: If `select` names an unknown feature, or a type is unknown. The first use raises it if ranks would
            divide a shuffled reader that has no `seed`, or if RANK or WORLD_SIZE isn't a number.

    Example:
        >>> import fastpipe
        >>> import fastpipe.torch
        >>> reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
        >>> for embeddings, label in fastpipe.torch.dataset(reader, select=("user_embedding", "label")):
        ...     shape, dtype = tuple(embeddings.shape), label.dtype
        >>> shape, dtype
        ((1024, 64), torch.float32)
    """
    return IterableDataset._of(
        reader, select=select, map=map, distributed=distributed, ragged=ragged, sparse=sparse, strings=strings
    )


class IterableDataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a reader as tensors. Created by `dataset`."""

    @private_constructor("fastpipe.torch.dataset(reader)")
    def _of(
        self,
        reader: Reader,
        *,
        select: Selection | None,
        map: Callable[[Any], Any] | None,
        distributed: bool,
        ragged: RaggedAs,
        sparse: SparseAs,
        strings: StringsAs,
    ) -> None:
        super().__init__()
        passes = passes_of(reader, ": fastpipe.torch.dataset(fastpipe.read_avro(path, batch_size=1024))")
        if map is not None and not callable(map):
            raise TypeError(f"map must be a function of the selected features; got {type(map).__name__}")
        self._passes = passes
        self._select = _checked(select, passes)
        self._map = map
        self._distributed = distributed
        self._forms = Forms(ragged, sparse, strings)
        # The progress of this process's active or last pass, as its consumer has seen it.
        self._seen: Seen | None = None
        # The latest announcement of this process to workers, and the log in which workers record their passes.
        self._version = Version(0, passes.next_epoch, passes.loaded)
        self._ledger = EpochLogFile()
        # In a worker: the process in which a state was loaded, the worker's shard, how many passes the worker has
        # begun, and the serial number of the last one.
        self._loaded: int | None = None
        self._share: tuple[tuple[int, int], Passes] | None = None
        self._iterations = 0
        self._last: int | None = None
        # In a worker: the memory in which it creates batches for the training process.
        self._lending: Lending | None = None

    def __iter__(self) -> Iterator[Any]:
        """Starts a pass, which is then the only active pass of this process."""
        _warn_of_batching(sys._getframe(1))
        worker = worker_info()
        plain = _is_sent_as_it_is(sys._getframe(1))
        return self._begin_here() if worker is None else self._begin_in_worker(worker, plain=plain)

    def _begin_here(self) -> Iterator[Any]:
        passes = self._of_rank()
        self._go_on()
        self._say(Version(0, passes.next_epoch, False))
        said = self._version

        def follow(asked: int, ended: bool) -> None:
            """Announces the epoch for loaders that begin now: the one after the epoch being read here."""
            nonlocal said
            # Skip this if something else was announced in the meantime.
            if self._version == said and passes.next_epoch != said.epoch:
                self._say(Version(0, passes.next_epoch, False))
                said = self._version

        batches = Batches(passes, self._make, lambda error: error, follow)
        self._seen = batches.seen
        return batches

    def _begin_in_worker(self, worker: Any, *, plain: bool) -> Iterator[Any]:
        passes = self._here()
        parent = multiprocessing.parent_process()
        main = os.getppid() if parent is None or parent.pid is None else parent.pid
        last, kept = self._last, self._iterations > 0
        key = f"{worker.seed - worker.id}/{self._iterations}"
        self._iterations += 1
        # torchdata loads states in workers.
        own = passes.pass_epoch if self._loaded == os.getpid() else None
        self._loaded = None
        joined = self._ledger.join(
            Participant(main, self._version, kept, key, worker.id, worker.num_workers, own, last if kept else None)
        )
        self._last = joined.serial
        if own is not None and passes.at_end:
            self._ledger.end(joined.serial, worker.id, joined.epoch + (passes.epochs or 0))
        if plain and self._map is None and joined.serial == 1 and worker.id == 0:
            _warn_of_workers(worker.num_workers)
        if own is None:
            if joined.loaded:
                passes.begin(joined.epoch)
            else:
                passes.set_epoch(joined.epoch)

        # A worker doesn't know how many epochs of a pass the consumer has seen, so the pass counts as all of its
        # epochs.
        counted = partial(self._ledger.count, joined.serial, joined.epoch + (passes.epochs or 1))

        def follow(asked: int, ended: bool) -> None:
            if ended:
                self._ledger.end(joined.serial, worker.id, joined.epoch + (passes.epochs or 0))
            if asked == ASKED_AHEAD + 1:
                counted()

        lending = self._lending = Lending.of(passes) if plain and self._lending is None else self._lending
        if lending is None or not plain:
            batches = Batches(passes, self._make, _carried, follow)
        else:
            make = self._make
            batches = Batches(passes, lambda batch: lending.lent(batch, make(batch)), _carried, follow, lending.memory)
        self._seen = batches.seen
        # When the consumer leaves the loader, its workers end and drop this iterator. (A worker that is killed never
        # counts.)
        weakref.finalize(batches, counted)
        return batches

    def _make(self, batch: dict[str, Any]) -> Any:
        """Returns the value to yield for a batch of the reader."""
        select = self._select
        if select is None:
            out: Any = self._forms.convert(batch, torch.from_numpy)
        else:
            wanted = {name: batch[name] for name in dict.fromkeys(_names(select))}
            out = _pick(self._forms.convert(wanted, torch.from_numpy), select)
        return out if self._map is None else self._map(out)

    def __len__(self) -> int:
        """Returns the number of batches of this rank, which doesn't depend on the number of workers.

        (With `shuffle="block"` and `"buffer"`, each worker may yield a short last batch, so a pass may have a few more
        batches.)

        Raises:
            TypeError: If passes are infinite.
        """
        return len(self._of_rank())

    def set_epoch(self, epoch: int) -> None:
        """Starts the next pass at the beginning of this epoch, in new and in persistent workers as well.

        The active pass is not affected.

        Args:
            epoch: Epoch of the next pass, 0 to 2^31 - 1.
        """
        number = within("epoch", epoch, 0, 2**31 - 1)
        self._here().set_epoch(number)
        if worker_info() is None:
            self._say(Version(0, number, False))
        else:
            self._loaded = os.getpid()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this process, like `Reader.state_dict`, counting only batches that `next` has returned.

        `torchdata`'s `StatefulDataLoader` saves this state, including with workers. `torch.distributed.checkpoint`
        saves it as well, since the method makes this class a `Stateful`. Without workers, the states of all ranks are
        equal. They can be loaded on another number of ranks if the reader's states can. (The state of a
        `StatefulDataLoader` itself requires the same `num_workers`. With another number, its `assert` fails.)

        Raises:
            StateError: If workers of a plain `DataLoader` are in the middle of a pass. This process doesn't know how
                many of their batches were seen.
        """
        if worker_info() is not None:
            passes, ended_stays = self._here(), True
        else:
            passes, ended_stays = self._of_rank(), False
            if self._go_on():
                raise StateError(
                    "workers of a DataLoader are reading batches, and this process doesn't know how many were seen:"
                    " use torchdata's StatefulDataLoader or num_workers=0"
                )
        if self._seen is None:
            return passes.state(ended_stays=ended_stays)
        return self._seen.state(ended_stays=ended_stays)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from a saved state in the next pass.

        The persistent workers of a loader (`persistent_workers=True`) don't receive a state that is loaded after they
        started. The next pass raises `StateError` then.

        Raises:
            StateError: If the reader can't resume from the state, as described for `Reader.load_state_dict`, or if it
                is the state of a `StatefulDataLoader`, which must load it itself.
        """
        if isinstance(state_dict, dict) and not {"_snapshot", "fetcher_state"}.isdisjoint(state_dict):
            raise StateError(
                "this is the state of a StatefulDataLoader, not of its dataset: pass it to the load_state_dict"
                " of a loader with the same num_workers"
            )
        passes = self._here()
        passes.load_state_dict(state_dict)
        if worker_info() is not None:
            self._loaded = os.getpid()
        else:
            self._say(Version(0, passes.next_epoch, not passes.at_end))

    def _say(self, version: Version) -> None:
        """Announces from the main process what the next pass reads."""
        self._version = version._replace(number=self._version.number + 1)
        self._ledger.announce(self._version)

    def _go_on(self) -> bool:
        """Updates the epoch after passes that workers have ended.

        Returns whether workers are in the middle of a pass.
        """
        epoch, under_way = self._ledger.next(self._version)
        if epoch != self._version.epoch:
            self._of_rank().set_epoch(epoch)
            if not under_way:
                self._say(Version(0, epoch, False))
        return under_way

    def _here(self) -> Passes:
        """Returns the passes of this process: a worker's shard, or all batches of the rank."""
        worker = worker_info()
        if worker is None:
            return self._of_rank()
        key = os.getpid(), worker.id
        if self._share is None or self._share[0] != key:
            share = self._of_rank().worker(worker.num_workers, worker.id)
            share.share_processors(worker.num_workers * local_ranks())
            self._share, self._seen = (key, share), None
        return self._share[1]

    def _of_rank(self) -> Passes:
        """Returns the reader's passes, divided among the ranks as soon as there is more than one rank."""
        self._passes = shard_of_this_rank(self._passes, distributed=self._distributed)
        return self._passes

    def __getstate__(self) -> dict[str, Any]:
        # A spawned process has no process group, so the rank is determined now.
        passes = self._of_rank()
        state = self.__dict__ | {"_share": None, "_loaded": None, "_seen": None, "_iterations": 0, "_lending": None}
        if multiprocessing.context.get_spawning_popen() is None:
            # A copy is another dataset, whose passes are independent of this dataset's workers.
            epoch = self._ledger.next(self._version)[0]
            return state | {"_ledger": None, "_version": Version(0, epoch, self._version.loaded)}
        # A worker starts from what the epoch log says, not from what this process is reading.
        return state | {"_passes": passes.rebuilt()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state if state["_ledger"] is not None else state | {"_ledger": EpochLogFile()})


def _carried(error: Exception) -> Exception:
    return carrying(error) if isinstance(error, FastpipeError) else error


def _warn_of_batching(caller: FrameType) -> None:
    """Warns if a `DataLoader` is about to collate batches into batches, which it does by default."""
    fetcher = caller.f_locals.get("self")
    if isinstance(fetcher, _IterableDatasetFetcher) and fetcher.auto_collation:
        worker = worker_info()
        if worker is None or worker.id == 0:
            warnings.warn(
                "the DataLoader treats each batch of this dataset as a single sample and collates them, which adds a"
                " dimension. The dataset yields whole batches: use DataLoader(dataset, batch_size=None)",
                UserWarning,
                stacklevel=2,
            )


def _warn_of_workers(workers: int) -> None:
    """Warns about a loader whose workers only decode, which the reader's threads do faster."""
    warnings.warn(
        f"num_workers={workers} makes a DataLoader of this reader slower, often several times: the reader decodes on"
        " its own threads, and sending batches between processes is slower. Set num_workers=0. Workers help only"
        " if map= or collate_fn= is slow",
        UserWarning,
        stacklevel=3,
    )


def _is_sent_as_it_is(caller: FrameType) -> bool:
    """Whether the `DataLoader` that runs this worker sends the dataset's values unchanged, without a `collate_fn`."""
    fetcher = caller.f_locals.get("self")
    return getattr(fetcher, "auto_collation", True) is False and (
        getattr(fetcher, "collate_fn", None) is torch.utils.data.default_convert
    )


def _checked(select: Any, passes: Passes) -> Any:
    """Returns the selection after validating it."""
    if select is None:
        return None
    for name in _names(select):
        if passes.known_features is not None and name not in passes.features and name != "valid":
            close = difflib.get_close_matches(name, passes.features, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"select names {name!r}{hint}, which isn't one of {', '.join(passes.features)}")
    return select


def _names(selection: Any) -> Iterator[str]:
    if isinstance(selection, str):
        yield selection
    elif isinstance(selection, tuple) or (isinstance(selection, list) and all(isinstance(x, str) for x in selection)):
        for part in selection:
            yield from _names(part)
    else:
        raise TypeError(
            "select must be the name of a feature, a list of names, or a tuple of selections such as"
            f' (["age", "terms"], "label"); got {selection!r}'
        )


def _pick(batch: dict[str, Any], selection: Selection) -> Any:
    if isinstance(selection, str):
        return batch[selection]
    if isinstance(selection, list):
        return {name: batch[name] for name in selection}
    return tuple(_pick(batch, part) for part in selection)
