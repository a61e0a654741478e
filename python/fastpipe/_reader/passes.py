"""The interface between producers of batches and adapters.

Every producer of batches, such as a reader, a mixture, a served reader or a map over another producer, implements
`Passes`. Adapters call `passes_of` with the object that the user passed, and use only this interface.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastpipe._arrow.schema import schema_of
from fastpipe._interop.distributed import World, local_ranks, world
from fastpipe.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from fastpipe._fastpipe import Pass, PassMemory, ReaderTotals, SharedSlabs
    from fastpipe._reader.state import State
    from fastpipe.specs import Features

_LOG = logging.getLogger("fastpipe")


class BatchPlace(NamedTuple):
    """Which batch of an epoch a batch is.

    Attributes:
        epoch: Its epoch.
        step: Its step among all steps of the rank in the epoch, including steps that are left out.
        batch: Its index among the batches of all ranks in the epoch. It doesn't depend on the number of ranks, unless
            each rank has its own units.
    """

    epoch: int
    step: int
    batch: int


class Position(Protocol):
    """The position of a pass. It doesn't keep the pass alive."""

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that `next` returned.

        Before the first batch it is the epoch of that batch. After the end it is the following epoch.
        """

    @property
    def delivered(self) -> int:
        """Number of batches that `next` has returned."""

    @property
    def ended(self) -> bool:
        """Whether `next` has reported the end of the pass."""

    @property
    def last_batch(self) -> tuple[int, int, int] | None:
        """The `BatchPlace` of the last batch that `next` returned. None before the first batch."""

    def progress(self) -> State:
        """Returns what is left of the epoch, in the form that `Passes.state_at` accepts.

        Its entries `epoch` and `step` describe the next batch.
        """

    def close(self) -> None:
        """Ends the pass if it is still running, and waits for its threads."""


class Started(NamedTuple):
    """A pass that was started.

    Attributes:
        batches: Iterator over the batches. Several threads may draw from it; each batch goes to one of them. Dropping
            the iterator ends the pass.
        position: Position of the pass, the same object for the whole pass.
        close: Function that ends the pass and waits for its threads. Holding it keeps the pass alive.
    """

    batches: Iterator[dict[str, Any]]
    position: Position
    close: Callable[[], None]


class Passes(ABC):
    """Yields batches by step, pass after pass, with states and shards for ranks.

    At most one pass is active: starting another one closes it. A pass that yielded a batch counts as an epoch. Members
    that `Reader` also has mean the same as there.
    """

    @property
    def origin(self) -> Any:
        """The object that the user knows: their reader, if there is one."""
        return self

    # Properties of the batches.

    @property
    @abstractmethod
    def features(self) -> Features:
        """The spec of each feature.

        Raises:
            UnsupportedError: If they are unknown, as for a map without `features=`.
        """

    @property
    def known_features(self) -> Features | None:
        """The spec of each feature, or None if they are unknown."""
        return self.features

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Maximum number of rows per batch."""

    @property
    @abstractmethod
    def drop_last(self) -> bool:
        """Whether a shorter last batch is dropped."""

    @property
    @abstractmethod
    def on_uneven(self) -> str:
        """How batches that not all ranks would get are handled. With "pad", batches have a column `valid`."""

    @property
    def one_size(self) -> bool:
        """Whether all batches have `batch_size` rows."""
        return self.drop_last or self.on_uneven == "pad"

    @property
    def marks_valid(self) -> bool:
        """Whether batches have a column `valid`, which marks the rows that aren't padding."""
        return self.on_uneven == "pad"

    @property
    @abstractmethod
    def epochs(self) -> int | None:
        """Number of epochs in a pass; None if a pass has no end."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of batches of this rank in a pass.

        Raises:
            TypeError: If passes have no end.
        """

    @property
    @abstractmethod
    def shows_progress(self) -> bool:
        """Whether passes show a progress bar."""

    # Division into shards.

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process, whose batches are yielded."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def shard(self, num_shards: int, index: int) -> Passes:
        """Returns one of `num_shards` equal shards, starting where the next pass would begin. See `Reader.shard`."""

    @abstractmethod
    def share(self, processes: int, index: int) -> Passes:
        """Returns a shard for one of several processes that each created a separate reader.

        The processes must have used the same seed.

        Raises:
            ValueError: If the seed of a shuffled order was drawn at random, or if `shard` raises it.
        """

    @abstractmethod
    def worker(self, workers: int, worker: int) -> Passes:
        """Returns the shard of one of this rank's workers, starting where the next pass would begin.

        Raises:
            StateError: If a loaded state can't be divided among the workers.
        """

    @abstractmethod
    def rebuilt(self) -> Passes:
        """Returns a copy that starts where the next pass would. It can be pickled even while a pass is active here."""

    @property
    @abstractmethod
    def sharers(self) -> int:
        """Number of readers that share the processors of this machine."""

    @abstractmethod
    def share_processors(self, sharers: int) -> None:
        """Limits automatic thread counts to one of `sharers` equal shares of the processors."""

    # Positions and states.

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the last batch that was yielded. Before a pass or after its end, the epoch of the next pass."""

    @property
    @abstractmethod
    def pass_epoch(self) -> int:
        """The epoch with which the active or last pass began, or in which the pass of a loaded state began."""

    @property
    @abstractmethod
    def loaded(self) -> bool:
        """Whether the next pass continues from a loaded state."""

    @property
    def at_end(self) -> bool:
        """Whether a loaded state is at the end of its pass."""
        return self.loaded and self.epochs is not None and self.epoch >= self.pass_epoch + self.epochs

    @property
    @abstractmethod
    def next_epoch(self) -> int:
        """The epoch with which the next pass that has a batch begins."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass start at the beginning of this epoch. The active pass continues unchanged."""

    def begin(self, epoch: int) -> None:
        """Makes the next pass start at `epoch`, or resume a loaded state of a pass that began with `epoch`."""
        if not self.loaded or self.pass_epoch != epoch:
            self.set_epoch(epoch)

    @abstractmethod
    def is_current(self, position: Position) -> bool:
        """Whether the position belongs to the last pass, and the start of the next pass has not been set since."""

    @abstractmethod
    def go_back(self, progress: State) -> None:
        """Makes the next pass repeat the last pass, starting from the given progress."""

    @abstractmethod
    def state(self, *, ended_stays: bool) -> dict[str, Any]:
        """Returns the state of the active or last pass.

        Args:
            ended_stays: Whether the state of a pass that the consumer saw end stays at that end. Otherwise it is at the
                start of the next pass.
        """

    @abstractmethod
    def state_at(self, progress: State, *, ended: bool) -> dict[str, Any]:
        """Returns the state that the last pass had at an earlier progress.

        Args:
            progress: Progress of the position after a batch.
            ended: Whether the consumer has seen the end of the pass.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the active or last pass."""
        return self.state(ended_stays=False)

    def start_state(self) -> Callable[[], State] | None:
        """Returns a function that returns the state at the beginning of the last pass, or None if it is unknown."""
        return None

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass resume from a state. The active pass is closed.

        Raises:
            StateError: If the state belongs to another reader or is damaged. Nothing changes then.
        """

    # Access to batches.

    @abstractmethod
    def start(self, memory: PassMemory | None = None) -> Started:
        """Starts a pass at the loaded state, if any, or at the beginning of the next epoch.

        Args:
            memory: Memory for the batches, from `memory` or `shared_memory`. An allocator that is written in Python
                must not be called when the interpreter exits, so the caller must close the pass before.
        """

    @abstractmethod
    def batch_at(self, step: int, epoch: int | None = None) -> Any:
        """Returns a batch of an epoch, by default of the current one.

        Raises:
            IndexError: If the epoch has no such batch.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the active pass, if there is one, and waits for its threads."""

    # Operations that only some implementations support.

    @property
    def steps(self) -> int:
        """Number of batches of this rank in an epoch.

        Raises:
            UnsupportedError: If the number is unknown.
        """
        if self.epochs is None:
            raise UnsupportedError(f"{self!r} doesn't know how many batches an epoch has")
        return len(self) // self.epochs

    @property
    def totals(self) -> ReaderTotals:
        """Totals over all passes in this process.

        Raises:
            UnsupportedError: If nothing is counted.
        """
        raise UnsupportedError(f"{self!r} has no counters: pass the reader that its batches come from")

    def limit_threads(self, most: int) -> None:
        """Limits the number of threads to `most`, unless the user chose a number."""
        raise UnsupportedError(f"{self!r} doesn't have its own threads")

    @property
    def together(self) -> int:
        """Number of successive batches that are produced together, such as the batches of a shuffle window.

        Ranges of this many batches are the cheapest to read.
        """
        return 1

    @property
    def drawn(self) -> bool:
        """Whether the order depends on a random seed, so that another process would have another order."""
        return False

    @property
    def without_steps(self) -> tuple[tuple[int, int], ...]:
        """Ranges `(start, stop)` of steps that are left out of every epoch. The step of a progress counts them."""
        return ()

    @abstractmethod
    def place_of(self, epoch: int, step: int) -> BatchPlace:
        """Returns the place of a batch, whose step is counted as for `batch_at`."""

    def batches(self, epoch: int, start: int, stop: int) -> Started:
        """Starts a pass over the batches `start` to `stop - 1` of an epoch. The active pass doesn't change.

        Raises:
            IndexError: If the epoch doesn't have all of these batches.
            UnsupportedError: If passes can't start at an arbitrary batch.
            ValueError: If the range is empty.
        """
        raise UnsupportedError(f"{self!r} doesn't support random access to batches")

    def record_batches(self, epoch: int, start: int, stop: int) -> pa.RecordBatchReader:
        """Returns the batches `start` to `stop - 1` of an epoch as Arrow record batches. See `Reader.to_arrow_reader`.

        Raises:
            ImportError: If pyarrow isn't installed.
            IndexError: If the epoch doesn't have all of these batches.
            UnsupportedError: If passes can't start at an arbitrary batch.
            ValueError: If the range is empty, or if Arrow doesn't support the name or size of a feature.
        """
        raise UnsupportedError(f"{self!r} doesn't support random access to batches")

    def arrow_schema(self) -> pa.Schema:
        """Returns the Arrow schema of all batches.

        Raises:
            ImportError: If pyarrow isn't installed.
            ValueError: If Arrow doesn't support the name or size of a feature.
        """
        return schema_of(self.features, valid=self.marks_valid)

    def rows_of(self, epoch: int, step: int) -> int:
        """Returns the number of rows in a batch without reading it.

        Raises:
            UnsupportedError: If the number is unknown.
        """
        raise UnsupportedError(f"{self!r} doesn't know how many rows a batch has")

    def memory(self, allocate: Callable[[int], np.ndarray], held: int) -> PassMemory | None:
        """Returns memory for up to `held` batches at a time, allocated with `allocate`.

        None if the memory of these batches can't be chosen.
        """
        return None

    def shared_memory(self, slabs: SharedSlabs, held: int) -> PassMemory | None:
        """Returns memory for batches that other processes map. None if the memory of these batches can't be chosen."""
        return None

    @property
    def leaves_out_damage(self) -> bool:
        """Whether damaged units are left out, which only Python reports."""
        return False

    @property
    def in_engine(self) -> bool:
        """Whether a consumer can draw batches without Python."""
        return False

    def start_in_engine(self) -> Pass:
        """Starts a pass for a consumer that draws batches without Python.

        Raises:
            UnsupportedError: If Python makes the batches.
        """
        raise UnsupportedError(f"Python makes the batches of {self!r}, so they can't be drawn without Python")


def shard_of_this_rank(passes: Passes, *, distributed: bool, framework: World | None = None) -> Passes:
    """Returns the batches of this rank: the rule by which all adapters divide readers.

    A reader that has a rank isn't divided again. The division is logged.

    Args:
        passes: Passes of the user's reader.
        distributed: Whether to divide them.
        framework: Ranks of the adapter's framework. Defaults to the ranks of torch.distributed or the environment.

    Raises:
        ValueError: If a shuffled order has no seed, a rank would have no batch, or the environment is invalid.
    """
    if not distributed or passes.world_size > 1:
        return passes
    rank, ranks, origin = world() if framework is None else framework
    if ranks == 1:
        return passes
    share = passes.share(ranks, rank)
    share.share_processors(local_ranks())
    _LOG.info("rank %d of %d reads its shard (by %s)", rank, ranks, origin)
    return share


def warn_of_ranks(passes: Passes) -> None:
    """Logs a warning if this process is one of several ranks, and the batches aren't divided among them.

    Raises:
        ValueError: If the environment is invalid.
    """
    rank, ranks, origin = world()
    if passes.world_size == 1 and ranks > 1:
        _LOG.warning(
            "rank %d of %d (by %s) reads all rows, as every rank does: iterate over reader.shard(%d, %d), or use an"
            " adapter such as fastpipe.torch.dataset(reader). %r",
            rank,
            ranks,
            origin,
            ranks,
            rank,
            passes.origin,
        )


def passes_of(reader: object, hint: str = "") -> Passes:
    """Returns the passes of an object that a user passed as a reader: a `Reader`, an object with passes, or `Passes`.

    Raises:
        TypeError: If the object has no passes. The message ends with `hint`.
    """
    found = reader if isinstance(reader, Passes) else getattr(reader, "_passes", None)
    if not isinstance(found, Passes):
        raise TypeError(f"reader must be a fastpipe.Reader; got {type(reader).__name__}{hint}")
    return found
