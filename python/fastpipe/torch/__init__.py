"""Batches as Torch tensors: `IterableDataset`, alone, in a `DataLoader`, and in `torch.distributed`.

Tensors share the memory of the batch's arrays; nothing is copied, and the memory is used again when the last tensor
over it has died. Several arrays that belong together are named tuples of tensors, which `DataLoader` pins and sends
between processes, and which `.to` is easily mapped over.
"""

from __future__ import annotations

import difflib
import logging
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

from fastpipe._reader.ordering import within
from fastpipe._reader.passes import Passes, passes_of
from fastpipe._reader.reader import Reader
from fastpipe.errors import FastpipeError, StateError

try:
    import torch
    import torch.utils.data
    from torch.utils.data._utils.fetch import _IterableDatasetFetcher

    from fastpipe._interop.distributed import local_ranks, world
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
    from fastpipe.torch._worker_epochs import ASKED_AHEAD, EpochLogFile, Joiner, Version
    from fastpipe.torch.loader import DataLoader, item_rng, worker_info
except ImportError as error:
    raise ImportError("fastpipe.torch needs PyTorch: pip install 'fastpipe-data[torch]'") from error

__all__ = [
    "Bag",
    "DataLoader",
    "IterableDataset",
    "Jagged",
    "Masked",
    "Strings",
    "item_rng",
    "keyed_jagged",
    "tensors",
    "worker_info",
]

_LOG = logging.getLogger("fastpipe")

Selection: TypeAlias = "str | list[str] | tuple[Any, ...]"


class IterableDataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a reader as tensors.

    It yields whole batches, so a `DataLoader` around it is told `batch_size=None`:

        DataLoader(fastpipe.torch.IterableDataset(reader), batch_size=None, pin_memory=True)

    With several ranks all have equally many batches, as the reader's `uneven` says; with workers, a rank's workers
    share its batches, which are as many as without (with `shuffle="block"` and `"buffer"` as many but for short last
    batches, since units are shared out). Workers take their share of the processors. They decode into memory that the
    process that trains has mapped, so batches aren't copied, unless the loader has a `collate_fn`. `num_workers=0` is
    simpler and mostly several times faster: the reader's own threads decode ahead all the same. Workers help only if
    `map` or `collate_fn` takes long; without either, the first pass with workers warns once.

    In `torch.distributed` a reader of one rank is divided among the ranks of the default process group or, before there
    is one, as RANK and WORLD_SIZE of the environment (torchrun's) say. That is logged (logger `fastpipe`, INFO). A
    reader that has a rank already is left as it is.

    All workers of a pass read the same epoch: the one that was next when the loader's `iter` was called. (With workers
    that are kept, that may be as late as when the first of them begins.) A pass that has yielded a batch counts as an
    epoch, in workers too, whether it was finished or left; `set_epoch` overrides, also while a pass is active, which
    goes on as it is.

    An error ends a pass: it is raised again by each further `next`. Those of fastpipe arrive from workers with all
    their attributes. Ctrl-C ends no pass.

    Args:
        reader: of any source, as `fastpipe.read_avro` returns it. The data set has it to itself.
        select: what to yield: a name for that feature, a list of names for a dict of these, a tuple for a tuple of
            such, as `select=(["age", "terms"], "label")`. None for all, as a dict.
        map: a function of what was selected, whose result is yielded; it must be picklable for workers that are
            spawned.
        distributed: False leaves the reader whole in each rank, as when all of them evaluate the same.
        ragged: as in `tensors`.
        sparse: as in `tensors`.
        strings: as in `tensors`.

    Raises:
        TypeError: if `reader` is no reader, `map` can't be called, or `select` is not made of names, lists and tuples.
        ValueError: if `select` names what isn't a feature, or there is no such form; from the first use, if ranks shall
            share out a shuffled reader whose seed was drawn, or RANK or WORLD_SIZE is no number.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        select: Selection | None = None,
        map: Callable[[Any], Any] | None = None,
        distributed: bool = True,
        ragged: RaggedAs = "offsets",
        sparse: SparseAs = "coo",
        strings: StringsAs = "tensors",
    ) -> None:
        super().__init__()
        passes = passes_of(reader, ": IterableDataset(fastpipe.read_avro(path, batch_size=1024))")
        if map is not None and not callable(map):
            raise TypeError(f"map is a function of what select picks, not {type(map).__name__}")
        self._passes = passes
        self._select = _checked(select, passes)
        self._map = map
        self._distributed = distributed
        self._forms = Forms(ragged, sparse, strings)
        # How far the active or last pass of this process has come.
        self._seen: Seen | None = None
        # What this process says to workers, and where they note what becomes of it.
        self._version = Version(0, passes.next_epoch, passes.loaded)
        self._ledger = EpochLogFile()
        # In a worker: the process that a state was loaded in, its share, how many passes it has begun, and the last.
        self._loaded: int | None = None
        self._share: tuple[tuple[int, int], Passes] | None = None
        self._iterations = 0
        self._last: int | None = None
        # In a worker: the memory in which it makes batches for the process that trains.
        self._lending: Lending | None = None

    def __iter__(self) -> Iterator[Any]:
        """Starts a pass; it is the one active pass of this process."""
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
            """Says what loaders that begin now read: the epoch after the one that is being read here."""
            nonlocal said
            # Unless something else was said meanwhile.
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
        # Torchdata loads states in workers.
        own = passes.pass_epoch if self._loaded == os.getpid() else None
        self._loaded = None
        joined = self._ledger.join(
            Joiner(main, self._version, kept, key, worker.id, worker.num_workers, own, last if kept else None)
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

        # How far the consumer is in a pass of several epochs isn't known here: it counts as all of them.
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
        # When the loader was left, its workers end, and so does this. (That isn't so of workers that are killed.)
        weakref.finalize(batches, counted)
        return batches

    def _make(self, batch: dict[str, Any]) -> Any:
        """What is yielded for a batch of the reader."""
        select = self._select
        if select is None:
            out: Any = self._forms.convert(batch, torch.from_numpy)
        else:
            wanted = {name: batch[name] for name in dict.fromkeys(_names(select))}
            out = _pick(self._forms.convert(wanted, torch.from_numpy), select)
        return out if self._map is None else self._map(out)

    def __len__(self) -> int:
        """Batches of this rank, with any number of workers.

        (With `shuffle="block"` and `"buffer"` workers may have a short last batch each, and so a few batches more.)

        Raises:
            TypeError: if passes have no end.
        """
        return len(self._of_rank())

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass start with this epoch, from its beginning; in workers too, whether kept or not.

        The active pass goes on as it is.
        """
        number = within("epoch", epoch, 0, 2**31 - 1)
        self._here().set_epoch(number)
        if worker_info() is None:
            self._say(Version(0, number, False))
        else:
            self._loaded = os.getpid()

    def state_dict(self) -> dict[str, Any]:
        """How far this process has come, as `Reader.state_dict`: only batches that `next` has returned count as seen.

        So `torchdata`'s `StatefulDataLoader` keeps it, with workers too, and so does `torch.distributed.checkpoint`,
        since this makes it a `Stateful`. Without workers, states of all ranks are equal, and may be loaded on another
        number of ranks, where the reader's can. (The states of a `StatefulDataLoader` itself are for as many workers as
        it had: with another `num_workers` it fails in an `assert`.)

        Raises:
            StateError: if workers of a plain `DataLoader` are in the midst of a pass: how far they are is not known
                here.
        """
        if worker_info() is not None:
            passes, ended_stays = self._here(), True
        else:
            passes, ended_stays = self._of_rank(), False
            if self._go_on():
                raise StateError(
                    "batches are read by a DataLoader's workers, and how many of them were seen isn't known here:"
                    " torchdata's StatefulDataLoader knows, or num_workers=0"
                )
        if self._seen is None:
            return passes.state(ended_stays=ended_stays)
        return self._seen.state(ended_stays=ended_stays)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next pass go on where a state was saved.

        Workers that a loader keeps (`persistent_workers`) don't get it once they are started: the next pass raises
        `StateError` then.

        Raises:
            StateError: as `Reader.load_state_dict` does; and if it is one of a `StatefulDataLoader`, which loads these
                itself.
        """
        if isinstance(state_dict, dict) and not {"_snapshot", "fetcher_state"}.isdisjoint(state_dict):
            raise StateError(
                "this is the state of a StatefulDataLoader, not of its data set: give it to the load_state_dict of one"
                " with as many workers"
            )
        passes = self._here()
        passes.load_state_dict(state_dict)
        if worker_info() is not None:
            self._loaded = os.getpid()
        else:
            self._say(Version(0, passes.next_epoch, not passes.at_end))

    def _say(self, version: Version) -> None:
        """Says in this process, which is no worker, what the next pass is."""
        self._version = version._replace(number=self._version.number + 1)
        self._ledger.announce(self._version)

    def _go_on(self) -> bool:
        """Takes notice of passes that workers have ended; says whether they are in the midst of one."""
        epoch, under_way = self._ledger.next(self._version)
        if epoch != self._version.epoch:
            self._of_rank().set_epoch(epoch)
            if not under_way:
                self._say(Version(0, epoch, False))
        return under_way

    def _here(self) -> Passes:
        """This process's passes: a worker's share, or the rank's."""
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
        """The reader's passes, divided among ranks as soon as there are several."""
        passes = self._passes
        if self._distributed and passes.world_size == 1:
            rank, ranks, origin = world()
            if ranks > 1:
                passes = self._passes = passes.share(ranks, rank)
                _LOG.info("rank %d of %d reads its share (by %s)", rank, ranks, origin)
                passes.share_processors(local_ranks())
        return passes

    def __getstate__(self) -> dict[str, Any]:
        # What is spawned has no process group to ask.
        passes = self._of_rank()
        state = self.__dict__ | {"_share": None, "_loaded": None, "_seen": None, "_iterations": 0, "_lending": None}
        if multiprocessing.context.get_spawning_popen() is None:
            # Another data set, of which this one's workers know nothing.
            epoch = self._ledger.next(self._version)[0]
            return state | {"_ledger": None, "_version": Version(0, epoch, self._version.loaded)}
        # A worker begins with what the ledger says, whatever is being read here meanwhile.
        return state | {"_passes": passes.rebuilt()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state if state["_ledger"] is not None else state | {"_ledger": EpochLogFile()})


def _carried(error: Exception) -> Exception:
    return carrying(error) if isinstance(error, FastpipeError) else error


def _warn_of_batching(caller: FrameType) -> None:
    """Warns if a `DataLoader` is about to make batches of batches, as it does unless it is told not to."""
    fetcher = caller.f_locals.get("self")
    if isinstance(fetcher, _IterableDatasetFetcher) and fetcher.auto_collation:
        worker = worker_info()
        if worker is None or worker.id == 0:
            warnings.warn(
                "the DataLoader takes what this data set yields for single samples, and makes batches of them, with a"
                " dimension more. They are batches already: DataLoader(dataset, batch_size=None)",
                UserWarning,
                stacklevel=2,
            )


def _warn_of_workers(workers: int) -> None:
    """Warns of a loader whose workers only decode, which the reader's threads do faster."""
    warnings.warn(
        f"num_workers={workers} makes a DataLoader of this reader slower, mostly several times: the reader decodes on"
        " threads of its own, and sending batches between processes takes longer. Give num_workers=0. Workers help only"
        " if map= or collate_fn= takes long",
        UserWarning,
        stacklevel=3,
    )


def _is_sent_as_it_is(caller: FrameType) -> bool:
    """Whether a `DataLoader` in whose worker this is sends what the data set yields, and nothing looks at it before."""
    fetcher = caller.f_locals.get("self")
    return getattr(fetcher, "auto_collation", True) is False and (
        getattr(fetcher, "collate_fn", None) is torch.utils.data.default_convert
    )


def _checked(select: Any, passes: Passes) -> Any:
    """A selection, if it is one."""
    if select is None:
        return None
    for name in _names(select):
        if name not in passes.features and name != "valid":
            close = difflib.get_close_matches(name, passes.features, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"select names {name!r}{hint}, and the reader's features are {', '.join(passes.features)}")
    return select


def _names(selection: Any) -> Iterator[str]:
    if isinstance(selection, str):
        yield selection
    elif isinstance(selection, tuple) or (isinstance(selection, list) and all(isinstance(x, str) for x in selection)):
        for part in selection:
            yield from _names(part)
    else:
        raise TypeError(
            "select is the name of a feature, a list of names, or a tuple of these, as"
            f' (["age", "terms"], "label"), not {selection!r}'
        )


def _pick(batch: dict[str, Any], selection: Selection) -> Any:
    if isinstance(selection, str):
        return batch[selection]
    if isinstance(selection, list):
        return {name: batch[name] for name in selection}
    return tuple(_pick(batch, part) for part in selection)
