"""The interface between those that yield batches by step and those that make something else of them, the adapters.

Whoever yields batches (a reader's engine; later a server, a mixture, a map over another) is `Passes`. Adapters take
what a user gives them to `passes_of`, and know nothing of it but this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastpipe._arrow.schema import schema_of
from fastpipe.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from fastpipe._fastpipe import Pass, PassMemory, ReaderTotals, SharedSlabs
    from fastpipe._reader.state import State
    from fastpipe.specs import Features


class Position(Protocol):
    """How far a pass has come. It doesn't keep the pass."""

    @property
    def epoch(self) -> int:
        """The epoch of the batch that `next` returned last; before one that of the first, after the end the next."""

    @property
    def delivered(self) -> int:
        """Batches that `next` has returned."""

    @property
    def ended(self) -> bool:
        """Whether `next` has said that there are no more."""

    def progress(self) -> State:
        """What is left, fit for `Passes.state_behind`."""

    def close(self) -> None:
        """Ends the pass, if there still is one, and waits for its threads."""


class Started(NamedTuple):
    """A pass that was started.

    Attributes:
        batches: what it yields. Several threads may draw from it: each batch goes to one of them. It ends when this is
            dropped.
        position: how far it has come; the same object for all its life.
        close: ends it, and waits for its threads. Keeps it.
    """

    batches: Iterator[dict[str, Any]]
    position: Position
    close: Callable[[], None]


class Passes(ABC):
    """Yields batches by step, pass after pass: from where, with which state, which share of the ranks.

    At most one pass is active: a further one closes it. A pass that yielded a batch counts as an epoch. The names that
    a `Reader` has, too, mean what they do there.
    """

    @property
    def origin(self) -> Any:
        """What the user knows these by: their reader, if they have one."""
        return self

    # What is yielded.

    @property
    @abstractmethod
    def features(self) -> Features:
        """The spec of each feature."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Rows a batch, at most."""

    @property
    @abstractmethod
    def drop_last(self) -> bool:
        """Whether a last batch of fewer rows is left out."""

    @property
    @abstractmethod
    def uneven(self) -> str:
        """What becomes of batches that not all ranks would have. With "pad" batches have a column `valid`."""

    @property
    def one_size(self) -> bool:
        """Whether all batches have `batch_size` rows."""
        return self.drop_last or self.uneven == "pad"

    @property
    @abstractmethod
    def epochs(self) -> int | None:
        """Epochs of a pass; None if it has no end."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of a pass, of this rank. Raises a TypeError if passes have no end."""

    @property
    @abstractmethod
    def shows_progress(self) -> bool:
        """Whether passes show a progress bar."""

    # Shares.

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank whose batches these are."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def shard(self, num_shards: int, index: int) -> Passes:
        """One of equal shares, from where the next pass would begin. As `Reader.shard`."""

    @abstractmethod
    def share(self, processes: int, index: int) -> Passes:
        """The same among processes, each of which has made its own of these: so they must have agreed on the seed.

        Raises:
            ValueError: as `shard` does, and for a shuffled order whose seed was drawn.
        """

    @abstractmethod
    def worker(self, workers: int, worker: int) -> Passes:
        """The share of one of this rank's workers, from where the next pass would begin.

        Raises:
            StateError: if a state was loaded that can't be shared out so.
        """

    @abstractmethod
    def rebuilt(self) -> Passes:
        """Others that start where the next pass of these would, and can be pickled whatever is being read here."""

    @property
    @abstractmethod
    def sharers(self) -> int:
        """How many like these share the processors of this machine."""

    @abstractmethod
    def share_processors(self, sharers: int) -> None:
        """Takes no more than this share of the processors from now on, unless told how many threads to take."""

    # Where they stand.

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last; before a pass, or after its end, that of the next pass."""

    @property
    @abstractmethod
    def pass_epoch(self) -> int:
        """The epoch with which the active or last pass began, or that of a loaded state."""

    @property
    @abstractmethod
    def loaded(self) -> bool:
        """Whether the next pass continues from a loaded state."""

    @property
    def at_end(self) -> bool:
        """Whether a loaded state stands at the end of its pass."""
        return self.loaded and self.epochs is not None and self.epoch >= self.pass_epoch + self.epochs

    @property
    @abstractmethod
    def next_epoch(self) -> int:
        """The epoch with which the next pass begins that has a batch."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass start with this epoch, from its beginning. The active one goes on as it is."""

    def begin(self, epoch: int) -> None:
        """Lets the next pass be the one that begins with an epoch; where a loaded state of it stands, if any."""
        if not self.loaded or self.pass_epoch != epoch:
            self.set_epoch(epoch)

    @abstractmethod
    def is_current(self, position: Position) -> bool:
        """Whether this is of the last pass, and nothing was said of the next one since."""

    @abstractmethod
    def go_back(self, progress: State) -> None:
        """Lets the next pass be the last one once more, from where its position had made this progress."""

    @abstractmethod
    def state(self, *, ended_stays: bool) -> dict[str, Any]:
        """The state; of a pass that the consumer saw end that of the next one, unless it is to stay at that end."""

    @abstractmethod
    def state_behind(self, progress: State, *, ended: bool) -> dict[str, Any]:
        """The state of the last pass when its position had made this progress.

        Args:
            progress: of the position, behind a batch.
            ended: whether the consumer has seen the end of the pass.
        """

    def state_dict(self) -> dict[str, Any]:
        """How far the pass has come."""
        return self.state(ended_stays=False)

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next pass go on where a state was saved; the active one is closed.

        Raises:
            StateError: if it is of others, or damaged. Nothing changes then.
        """

    # Batches.

    @abstractmethod
    def start(self, memory: PassMemory | None = None) -> Started:
        """Starts a pass: where a loaded state stands, else at the start of the next epoch.

        Args:
            memory: of these passes, where batches are to lie. What has an allocator written in Python must not be asked
                for memory when the interpreter ends: the pass has to be closed before.
        """

    @abstractmethod
    def batch_at(self, step: int) -> dict[str, Any]:
        """A batch of this epoch. Raises an IndexError if there is none."""

    @abstractmethod
    def close(self) -> None:
        """Ends the active pass, if there is one, and waits for its threads."""

    # What only some have.

    @property
    def steps(self) -> int:
        """Batches of an epoch, of this rank.

        Raises:
            UnsupportedError: if these don't know.
        """
        if self.epochs is None:
            raise UnsupportedError(f"{self!r} can't say how many batches an epoch has")
        return len(self) // self.epochs

    @property
    def totals(self) -> ReaderTotals:
        """The totals over all passes in this process.

        Raises:
            UnsupportedError: if these count nothing.
        """
        raise UnsupportedError(f"{self!r} counts nothing: give the reader that its batches come from")

    def limit_threads(self, most: int) -> None:
        """Takes so many threads from now on, unless told how many to take."""
        raise UnsupportedError(f"{self!r} has no threads of its own")

    @property
    def together(self) -> int:
        """Batches that are made together, as of a window of the shuffle: stretches of so many cost least."""
        return 1

    @property
    def drawn(self) -> bool:
        """Whether the order follows from a seed that was drawn: the same in another process has another one."""
        return False

    def batches(self, epoch: int, start: int, stop: int) -> Started:
        """Starts a pass of the batches `start` to `stop` of an epoch; it is not the active one.

        Raises:
            IndexError: if the epoch doesn't have them all.
            UnsupportedError: if these can't begin anywhere.
            ValueError: if there is none among them.
        """
        raise UnsupportedError(f"{self!r} can't begin at any batch")

    def record_batches(self, epoch: int, start: int, stop: int) -> pa.RecordBatchReader:
        """The same batches as Arrow has them; see `Reader.to_reader`.

        Raises:
            ImportError: if pyarrow isn't installed.
            IndexError: if the epoch doesn't have them all.
            UnsupportedError: if these can't begin anywhere.
            ValueError: if there is none among them, or Arrow has no such name or size.
        """
        raise UnsupportedError(f"{self!r} can't begin at any batch")

    def arrow_schema(self) -> pa.Schema:
        """The schema of all batches as Arrow has them.

        Raises:
            ImportError: if pyarrow isn't installed.
            ValueError: if Arrow has no such name or size.
        """
        return schema_of(self.features, valid=self.uneven == "pad")

    def rows_of(self, epoch: int, step: int) -> int:
        """The rows of a batch, which isn't read for it.

        Raises:
            UnsupportedError: if these don't know.
        """
        raise UnsupportedError(f"{self!r} can't say how many rows a batch has")

    def memory(self, allocate: Callable[[int], np.ndarray], held: int) -> PassMemory | None:
        """Memory of one's own for batches, of which this many may be held; None if these don't choose their memory."""
        return None

    def shared_memory(self, slabs: SharedSlabs, held: int) -> PassMemory | None:
        """Memory for batches that other processes map, as `memory`; None if these don't choose their memory."""
        return None

    def start_in_engine(self) -> Pass:
        """Starts a pass for those that draw without Python.

        Raises:
            UnsupportedError: if Python makes the batches.
        """
        raise UnsupportedError(f"Python makes the batches of {self!r}, and this draws them without Python")


def passes_of(reader: object, hint: str = "") -> Passes:
    """The passes of what a user gave for a reader: `Reader`, another that has some, or passes themselves.

    Raises:
        TypeError: if it has none; it ends with the hint.
    """
    found = reader if isinstance(reader, Passes) else getattr(reader, "_passes", None)
    if not isinstance(found, Passes):
        raise TypeError(f"reader is a Reader, as fastpipe.read_avro makes one, not {type(reader).__name__}{hint}")
    return found
