"""The passes of a map, in the form that adapters use."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fastpipe._arguments import integer
from fastpipe._arrow import to_arrow
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.map_processes import MapProcesses
from fastpipe._reader.mapped_batches import MapFunction, MappedBatches, MappedPosition, OwnFunction
from fastpipe._reader.packs import Buckets
from fastpipe._reader.passes import BatchPlace, Passes, Position, Started
from fastpipe._reader.state import State
from fastpipe.errors import PassClosedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from fastpipe._fastpipe import Pass, PassMemory, ReaderTotals
    from fastpipe._locations import Location
    from fastpipe.specs import Features


class MapOptions(NamedTuple):
    """The arguments of a map.

    Attributes:
        function: Function of the batches.
        num_threads: Number of threads that call it. With 0, the consumer calls it.
        prefetch: Number of further results that may be waiting for the consumer.
        features: Specs of the results; None if they are unknown.
        num_processes: Number of processes that call it. With 0, threads or the consumer call it.
    """

    function: MapFunction
    num_threads: int
    prefetch: int
    features: Features | None
    num_processes: int = 0


class MappedPasses(Passes):
    """The passes of other passes, whose batches a function changes.

    With threads, the incoming pass is ahead of the consumer. So the states, epochs and shards follow from the position
    of the map's pass while it is the last pass. Otherwise, the incoming passes provide them.

    Args:
        incoming: Passes whose batches the function gets.
        options: Arguments of the map.
    """

    def __init__(self, incoming: Passes, options: MapOptions) -> None:
        self.incoming, self.options = incoming, options
        number = options.num_processes
        self._processes = MapProcesses(options.function, number) if number else None
        self._position: MappedPosition | None = None
        self._active: weakref.ref[MappedBatches] | None = None
        # The epoch with which the last pass began, and whether it resumed a loaded state.
        self._begun = 0, False

    def __repr__(self) -> str:
        function = self.options.function.function
        name = type(function).__name__ if isinstance(function, OwnFunction) else getattr(function, "__qualname__", None)
        return f"<map of {self.incoming!r} with {name or repr(function)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        position = self._current()
        if position is not None and position.active:
            raise TypeError("a map of a reader can't be pickled while a pass is active: close() it first")
        return MappedPasses, (self._following(), self.options)

    def _current(self) -> MappedPosition | None:
        """Returns the position of the last pass, if the next one starts after it."""
        position = self._position
        return position if position is not None and self.incoming.is_current(position.incoming) else None

    def _following(self) -> Passes:
        """Returns incoming passes that start where the map's next pass would."""
        position = self._current()
        if position is None or position.in_step:
            return self.incoming
        copy = self.incoming.rebuilt()
        epoch, loaded = self._begun
        if position.delivered:
            copy.set_epoch(position.epoch + 1)
        elif loaded:
            copy.load_state_dict(self.incoming.state_at(position.progress(), ended=False))
        else:
            copy.set_epoch(epoch)
        return copy

    def _of(self, incoming: Passes) -> MappedPasses:
        return MappedPasses(incoming, self.options)

    @property
    def origin(self) -> Any:
        return self.incoming.origin

    @property
    def features(self) -> Features:
        features = self.options.features
        if features is None:
            raise UnsupportedError(
                f"the features of {self!r} are unknown: pass features= to map, a dict from the name of each feature"
                " that the function returns to its spec"
            )
        return features

    @property
    def known_features(self) -> Features | None:
        return self.options.features

    @property
    def batch_size(self) -> int:
        return self.incoming.batch_size

    @property
    def drop_last(self) -> bool:
        return self.incoming.drop_last

    @property
    def on_uneven(self) -> str:
        return self.incoming.on_uneven

    @property
    def one_size(self) -> bool:
        return self.incoming.one_size and super().one_size

    @property
    def marks_valid(self) -> bool:
        function = self.options.function.function
        return self.incoming.marks_valid or (isinstance(function, OwnFunction) and function.marks_valid)

    @property
    def epochs(self) -> int | None:
        return self.incoming.epochs

    def __len__(self) -> int:
        return len(self.incoming)

    @property
    def shows_progress(self) -> bool:
        return self.incoming.shows_progress

    @property
    def rank(self) -> int:
        return self.incoming.rank

    @property
    def world_size(self) -> int:
        return self.incoming.world_size

    def shard(self, num_shards: int, index: int) -> MappedPasses:
        return self._of(self._following().shard(num_shards, index))

    def share(self, processes: int, index: int) -> MappedPasses:
        return self._of(self._following().share(processes, index))

    def worker(self, workers: int, worker: int) -> MappedPasses:
        return self._of(self._following().worker(workers, worker))

    def rebuilt(self) -> MappedPasses:
        following = self._following()
        return self._of(following.rebuilt() if following is self.incoming else following)

    @property
    def sharers(self) -> int:
        return self.incoming.sharers

    def share_processors(self, sharers: int) -> None:
        self.incoming.share_processors(sharers)

    @property
    def epoch(self) -> int:
        position = self._current()
        return self.incoming.epoch if position is None else position.epoch

    @property
    def pass_epoch(self) -> int:
        return self.incoming.pass_epoch

    @property
    def loaded(self) -> bool:
        return self.incoming.loaded

    @property
    def next_epoch(self) -> int:
        position = self._current()
        if position is None or position.in_step:
            return self.incoming.next_epoch
        return position.epoch + 1 if position.delivered else self._begun[0]

    def set_epoch(self, epoch: int) -> None:
        self.incoming.set_epoch(epoch)

    def is_current(self, position: Position) -> bool:
        return position is self._position and self._current() is not None

    def go_back(self, progress: State) -> None:
        self.incoming.go_back(progress)

    def state(self, *, ended_stays: bool) -> dict[str, Any]:
        position = self._current()
        if position is None:
            return self.incoming.state(ended_stays=ended_stays)
        mark = position.mark
        return self.incoming.state_at(dict(mark.progress), ended=mark.ended and not ended_stays)

    def state_at(self, progress: State, *, ended: bool) -> dict[str, Any]:
        return self.incoming.state_at(progress, ended=ended)

    def start_state(self) -> Callable[[], State] | None:
        return self.incoming.start_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.incoming.load_state_dict(state_dict)
        self._end_active()

    def start(self, memory: PassMemory | None = None) -> Started:
        position = self._current()
        if position is not None and not position.in_step:
            epoch, loaded = self._begun
            if position.delivered:
                self.incoming.set_epoch(position.epoch + 1)
            elif loaded:
                self.incoming.go_back(position.progress())
            else:
                self.incoming.set_epoch(epoch)
        begun = self.incoming.next_epoch, self.incoming.loaded
        # The function allocates the arrays that it returns, so the results can't be made in the given memory.
        started = self._batches(self.incoming.start(), self._again)
        self._end_active()
        self._begun, self._position, self._active = begun, started.position, weakref.ref(started)
        return Started(started, started.position, started.close)

    def _batches(self, started: Started, again: Callable[[MappedPosition], Started]) -> MappedBatches:
        options = self.options
        call = options.function if self._processes is None else self._processes
        # A thread waits for each process.
        threads = options.num_processes or options.num_threads
        return MappedBatches(started, again, call, rank=self.rank, num_threads=threads, prefetch=options.prefetch)

    def _again(self, position: MappedPosition) -> Started:
        if not self.is_current(position):
            raise PassClosedError("Ctrl-C interrupted this pass, and the start of the next one was set")
        self.incoming.go_back(position.progress())
        return self.incoming.start()

    def _end_active(self) -> None:
        """Ends the active pass, whose incoming pass was closed, and waits for its threads."""
        active = None if self._active is None else self._active()
        self._active = None
        if active is not None:
            active.end()

    def batch_at(self, step: int, epoch: int | None = None) -> Any:
        number = self.epoch if epoch is None else epoch
        batch = self.incoming.batch_at(step, number)
        return self.options.function(batch, self.place_of(operator.index(number), step), self.rank)

    def locate(self, step: int, row: int, epoch: int) -> Location:
        """Returns where a row of an incoming batch is stored."""
        if isinstance(self.incoming, MappedPasses):
            return self.incoming.locate(step, row, epoch)
        found: Location
        if not isinstance(self.options.function.function, Buckets):
            found = self.origin.locate(step, row, epoch)
            return found
        rows = self.origin.locate(step, 0, epoch).rows
        at = integer("row", row)
        if not 0 <= at < len(rows):
            raise IndexError(f"row {at} does not exist: batch {step} has {len(rows)} rows")
        found = rows[at]
        return found

    @property
    def without_steps(self) -> tuple[tuple[int, int], ...]:
        return self.incoming.without_steps

    def place_of(self, epoch: int, step: int) -> BatchPlace:
        return self.incoming.place_of(epoch, step)

    def close(self) -> None:
        self.incoming.close()
        self._end_active()
        if self._processes is not None:
            self._processes.close()

    @property
    def steps(self) -> int:
        return self.incoming.steps

    @property
    def totals(self) -> ReaderTotals:
        return self.incoming.totals

    def limit_threads(self, most: int) -> None:
        self.incoming.limit_threads(most)

    @property
    def together(self) -> int:
        return self.incoming.together

    @property
    def drawn(self) -> bool:
        return self.incoming.drawn

    def batches(self, epoch: int, start: int, stop: int) -> Started:
        def again(position: MappedPosition) -> Started:
            return self.incoming.batches(epoch, start + position.delivered, stop)

        started = self._batches(self.incoming.batches(epoch, start, stop), again)
        return Started(started, started.position, started.close)

    def record_batches(self, epoch: int, start: int, stop: int) -> pa.RecordBatchReader:
        return self.arrow_reader(lambda: self.batches(epoch, start, stop).batches)

    def arrow_reader(self, start: Callable[[], Iterator[Any]]) -> pa.RecordBatchReader:
        """Returns batches as Arrow record batches.

        Args:
            start: Function that starts their pass. It isn't called if the features have no schema.
        """
        pyarrow, features, schema = require_pyarrow(), self.features, self.arrow_schema()
        # A generator would hold a batch while the next one is made.
        return pyarrow.RecordBatchReader.from_batches(schema, map(partial(to_arrow, features=features), start()))

    def start_in_engine(self) -> Pass:
        raise UnsupportedError(f"Python makes the batches of {self!r}: map the batches where they are consumed instead")
