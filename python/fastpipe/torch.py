"""Batches as Torch tensors: `IterableDataset`, alone, in a `DataLoader`, and in `torch.distributed`.

Tensors share the memory of the batch's arrays; nothing is copied, and the memory is used again when the last tensor
over it has died. Several arrays that belong together are named tuples of tensors, which `DataLoader` pins and sends
between processes, and which `.to` is easily mapped over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from fastpipe._ordering import within
from fastpipe.errors import StateError
from fastpipe.reader import Reader

try:
    import torch
    import torch.utils.data

    from fastpipe._torch_forms import (
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
    from fastpipe._torch_ranks import local_ranks, world
except ImportError as error:
    raise ImportError("fastpipe.torch needs PyTorch: pip install 'fastpipe-data[torch]'") from error

__all__ = ["Bag", "IterableDataset", "Jagged", "Masked", "Strings", "keyed_jagged", "tensors"]

_LOG = logging.getLogger("fastpipe")

Selection: TypeAlias = "str | list[str] | tuple[Any, ...]"


class IterableDataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a reader as tensors.

    It yields whole batches, so a `DataLoader` around it is told `batch_size=None`:

        DataLoader(fastpipe.torch.IterableDataset(reader), batch_size=None, num_workers=2, pin_memory=True)

    In each of a loader's workers it reads another share, which is all of it once; with several ranks, all ranks have
    equally many batches, as the reader's `uneven` says. One rank alone loses nothing, whatever `uneven` says. Workers
    take their share of the processors, and copy what they read to the process that trains: `num_workers=0` needs no
    copy, and the reader's own threads decode ahead all the same.

    In `torch.distributed` a reader of one rank is divided among the ranks of the default process group or, before there
    is one, as RANK and WORLD_SIZE of the environment (torchrun's) say. That is logged (logger `fastpipe`, INFO). A
    reader that has a rank already is left as it is.

    A pass that ends advances the epoch, in workers too; `set_epoch` overrides.

    Args:
        reader: of any source. The data set has it to itself.
        select: what to yield: a name for that feature, a list of names for a dict of these, a tuple for a tuple of
            such, as `select=(["age", "terms"], "label")`. None for all, as a dict.
        map: a function of what was selected, whose result is yielded; it must be picklable for workers that are
            spawned.
        distributed: False leaves the reader whole in each rank, as when all of them evaluate the same.
        ragged: as in `tensors`.
        sparse: as in `tensors`.
        strings: as in `tensors`.

    Raises:
        ValueError: from the first use, if ranks shall share out a shuffled reader whose seed was drawn.
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
        self._reader = reader
        self._select = select
        self._map = map
        self._distributed = distributed
        self._forms = Forms(ragged, sparse, strings)
        for name in _names(select):
            if name not in reader.features and name != "valid":
                raise ValueError(f"select names {name!r}, and the reader's features are {', '.join(reader.features)}")
        self._passes = _Passes(reader._pass_epoch)
        self._loaded: int | None = None
        self._share: tuple[tuple[int, int], Reader] | None = None
        self._iterations = 0

    def __iter__(self) -> Iterator[Any]:
        """Starts a pass; it is the one active pass of this process."""
        reader = self._here()
        worker = torch.utils.data.get_worker_info()
        # Workers of one loader's pass have this in common; those that are kept for the next passes count.
        generation = 0 if worker is None else hash((worker.seed - worker.id, self._iterations))
        self._iterations += 1
        if self._loaded == os.getpid():
            self._loaded = None
            self._passes.write(generation, reader._pass_epoch, reader._at_end)
        else:
            reader._begin(self._passes.begin(generation, reader._epochs))
        return self._batches(reader, generation)

    def _batches(self, reader: Reader, generation: int) -> Iterator[Any]:
        select, function, convert = self._select, self._map, self._forms.convert
        started = reader._pass_epoch
        for batch in reader:
            if select is None:
                out: Any = convert(batch, torch.from_numpy)
            else:
                out = convert({name: batch[name] for name in dict.fromkeys(_names(select))}, torch.from_numpy)
                out = _pick(out, select)
            yield out if function is None else function(out)
        self._passes.write(generation, started, True)

    def __len__(self) -> int:
        """Batches of this rank. Workers may have fewer, or more, as `uneven` says.

        Raises:
            TypeError: if passes have no end.
        """
        return len(self._of_rank())

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass start with this epoch, from its beginning; in workers too, whether kept or not."""
        number = within("epoch", epoch, 0, 2**31 - 1)
        self._loaded = None
        self._of_rank().set_epoch(number)
        self._passes.write(0, number, False)

    def state_dict(self) -> dict[str, Any]:
        """How far this process has come, as `Reader.state_dict`.

        So `torchdata`'s `StatefulDataLoader` keeps it, with workers too, and so does `torch.distributed.checkpoint`,
        since this makes it a `Stateful`. Without workers, states of all ranks are equal, and may be loaded on another
        number of ranks, where the reader's can.

        Raises:
            StateError: if workers of a plain `DataLoader` are in the midst of a pass: how far they are is not known
                here.
        """
        if torch.utils.data.get_worker_info() is not None:
            return self._here()._state(ended_stays=True)
        generation, epoch, finished = self._passes.read()
        reader = self._of_rank()
        if generation == 0:
            return reader.state_dict()
        if not finished:
            raise StateError(
                "batches are read by a DataLoader's workers, and how many of them were seen isn't known here:"
                " torchdata's StatefulDataLoader knows, or num_workers=0"
            )
        reader._begin(epoch + (reader._epochs or 0))
        return reader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next pass go on where a state was saved.

        Raises:
            StateError: as `Reader.load_state_dict` does.
        """
        reader = self._here()
        reader.load_state_dict(state_dict)
        self._loaded = os.getpid()
        self._passes.write(0, reader._pass_epoch, reader._at_end)

    def _here(self) -> Reader:
        """This process's reader: a worker's share, or the rank's."""
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return self._of_rank()
        key = os.getpid(), worker.id
        if self._share is None or self._share[0] != key:
            reader = self._of_rank()
            if reader.world_size == 1:
                # No other rank waits for this one, so no batch need be left out.
                reader = reader._with_uneven("allow")
            share = reader.shard(worker.num_workers, worker.id)
            share._sharing(worker.num_workers * local_ranks())
            self._share = key, share
        return self._share[1]

    def _of_rank(self) -> Reader:
        """The reader, divided among ranks as soon as there are several."""
        reader = self._reader
        if self._distributed and reader.world_size == 1:
            rank, ranks, origin = world()
            if ranks > 1:
                reader = self._reader = reader._share(ranks, rank)
                _LOG.info("rank %d of %d reads its share (by %s)", rank, ranks, origin)
                reader._sharing(local_ranks())
        return reader

    def __getstate__(self) -> dict[str, Any]:
        # What is spawned has no process group to ask.
        self._of_rank()
        return self.__dict__ | {"_share": None, "_loaded": None}


def _names(selection: Selection | None) -> Iterator[str]:
    if isinstance(selection, str):
        yield selection
    else:
        for part in selection or ():
            yield from _names(part)


def _pick(batch: dict[str, Any], selection: Selection) -> Any:
    if isinstance(selection, str):
        return batch[selection]
    if isinstance(selection, list):
        return {name: batch[name] for name in selection}
    return tuple(_pick(batch, part) for part in selection)


_GENERATIONS = (1 << 31) - 1


class _Passes:
    """The pass that a data set is in, known to all processes that have it: its first epoch, and whether it has ended.

    A loader's workers have copies of the data set, and new ones for each pass unless they are kept. So that the next
    pass has the next epoch, it is noted in shared memory, together with which workers began it (their *generation*):
    all in one word, which is written whole. Workers that begin at once find the same, and write the same.
    """

    def __init__(self, epoch: int) -> None:
        self._word = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.write(0, epoch, False)

    def read(self) -> tuple[int, int, bool]:
        """Generation, 0 for none; first epoch; whether its end was seen."""
        word = int(self._word)
        return word >> 32, word >> 1 & _GENERATIONS, bool(word & 1)

    def write(self, generation: int, epoch: int, ended: bool) -> None:
        self._word.fill_(_short(generation) << 32 | min(epoch, _GENERATIONS) << 1 | ended)

    def begin(self, generation: int, epochs: int | None) -> int:
        """Begins a pass, or joins in one that workers of the same generation have begun; says its first epoch."""
        begun, epoch, ended = self.read()
        if generation and begun == _short(generation):
            return epoch
        epoch += (epochs or 0) if ended else 0
        self.write(generation, epoch, False)
        return epoch


def _short(generation: int) -> int:
    """Never 0 but for 0."""
    return 1 + generation % (_GENERATIONS - 1) if generation else 0
