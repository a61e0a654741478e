"""The passes of a reader, in the form that adapters use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fastpipe._arrow import ArrowStreams
from fastpipe._fastpipe import Order, Pass, PassMemory, ReaderTotals, SharedSlabs
from fastpipe._progress import Counter
from fastpipe._reader.left_out_steps import check_all_steps
from fastpipe._reader.losses import refuse
from fastpipe._reader.passes import BatchPlace, Passes, Position, Started
from fastpipe._reader.state import State, fresh, state

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from fastpipe._reader.dataset import Dataset
    from fastpipe._reader.ordering import Ordering
    from fastpipe._reader.pass_options import PassOptions
    from fastpipe._reader.reader import Reader
    from fastpipe.specs import Features


class ReaderParts(NamedTuple):
    """The parts of a reader, for code that creates similar readers elsewhere.

    Attributes:
        data: Dataset that the reader reads.
        ordering: Settings of the order.
        order: Order of the dataset's rows.
        running: Run-time options of the passes.
        epochs: Number of epochs in a pass; None if a pass has no end.
    """

    data: Dataset
    ordering: Ordering
    order: Order
    running: PassOptions
    epochs: int | None


class ReaderPasses(Passes):
    """The passes of a reader. The reader holds their position.

    Args:
        reader: The reader.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __repr__(self) -> str:
        return repr(self._reader)

    @property
    def origin(self) -> Reader:
        return self._reader

    @property
    def parts(self) -> ReaderParts:
        """The parts of the reader."""
        reader = self._reader
        return ReaderParts(reader._data, reader._ordering, reader._order, reader._running, reader._epochs)

    @property
    def features(self) -> Features:
        return self._reader.features

    @property
    def batch_size(self) -> int:
        return self._reader.batch_size

    @property
    def drop_last(self) -> bool:
        return self._reader._ordering.drop_last

    @property
    def one_size(self) -> bool:
        # A batch is shorter if some of its rows are lost and not filled.
        lost = self._reader._lost
        return super().one_size and (lost is None or lost.fills)

    @property
    def marks_valid(self) -> bool:
        lost = self._reader._lost
        return super().marks_valid or (lost is not None and lost.fills)

    @property
    def on_uneven(self) -> str:
        return self._reader._ordering.on_uneven

    @property
    def epochs(self) -> int | None:
        return self._reader._epochs

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def shows_progress(self) -> bool:
        return self._reader._progress

    @property
    def rank(self) -> int:
        return self._reader.rank

    @property
    def world_size(self) -> int:
        return self._reader.world_size

    def shard(self, num_shards: int, index: int) -> Passes:
        shard = self._reader.shard(num_shards, index)
        # The user monitors this reader, so its shards add to its totals.
        shard._totals = self._reader._totals
        return ReaderPasses(shard)

    def share(self, processes: int, index: int) -> Passes:
        if processes > 1 and self.drawn:
            raise ValueError("set a seed: every process must use the same seed, and random seeds differ")
        share = self.shard(processes, index)
        share.totals.rank = share.rank
        return share

    @property
    def drawn(self) -> bool:
        ordering = self._reader._ordering
        return not ordering.seed_given and not self.loaded and ordering.shuffle != "sequential"

    def worker(self, workers: int, worker: int) -> Passes:
        advice = "their losses would be unknown here. Set num_workers=0: the reader has its own threads"
        refuse(self._reader._lost, "a DataLoader with workers", advice)
        if workers > 1:
            advice = (
                f"the steps are those of the rank, and each of the {workers} workers counts its own. Set num_workers=0:"
                " the reader has its own threads. Or skip the steps in the training loop"
            )
            check_all_steps(self._reader._ordering, "workers of a DataLoader can't read", advice)
        return ReaderPasses(self._reader._reordered(self._reader._ordering.worker(workers, worker)))

    def rebuilt(self) -> Passes:
        return ReaderPasses(self._reader._rebuilt())

    @property
    def sharers(self) -> int:
        return self._reader._running.sharers

    def share_processors(self, sharers: int) -> None:
        self._reader._running = replace(self._reader._running, sharers=sharers)

    @property
    def epoch(self) -> int:
        return self._reader.epoch

    @property
    def pass_epoch(self) -> int:
        return self._reader._cursor.pass_epoch

    @property
    def next_epoch(self) -> int:
        return self.epoch if self.at_end else self._reader._cursor.next_start()[0]

    @property
    def loaded(self) -> bool:
        return self._reader._cursor.loaded is not None

    def set_epoch(self, epoch: int) -> None:
        self._reader.set_epoch(epoch)

    def is_current(self, position: Position) -> bool:
        return self._reader._cursor.position is position and not self.loaded

    def go_back(self, progress: State) -> None:
        self._reader._cursor.go_back(progress)

    def state(self, *, ended_stays: bool) -> dict[str, Any]:
        return self._reader._stored(*self._reader._cursor.here(self.world_size, ended_stays=ended_stays))

    def state_at(self, progress: State, *, ended: bool) -> dict[str, Any]:
        return self._reader._stored(*self._reader._cursor.at(progress, ended=ended))

    def start_state(self) -> Callable[[], State]:
        reader = self._reader
        ordering, window, (epoch, progress) = reader._ordering, reader._order.shuffle_buffer, reader._cursor.begun
        progress = fresh(epoch, self.world_size) if progress is None else progress
        return lambda: state(reader._data.fingerprint(), ordering, window, epoch, progress)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._reader.load_state_dict(state_dict)

    def start(self, memory: PassMemory | None = None) -> Started:
        started = self._reader._start(memory)
        return Started(self._reader._shown(started), started.position, started.close)

    def batch_at(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        return self._reader.batch_at(step, epoch)

    def place_of(self, epoch: int, step: int) -> BatchPlace:
        return BatchPlace(epoch, step, self._reader._order.index(step))

    def close(self) -> None:
        self._reader.close()

    def memory(self, allocate: Callable[[int], np.ndarray], held: int) -> PassMemory:
        return PassMemory(self._reader._data.handle, allocate, held)

    def shared_memory(self, slabs: SharedSlabs, held: int) -> PassMemory:
        return PassMemory.shared(self._reader._data.handle, slabs, held)

    @property
    def totals(self) -> ReaderTotals:
        return self._reader._totals

    def limit_threads(self, most: int) -> None:
        running = self._reader._running
        if running.num_threads is None:
            self._reader._running = replace(running, num_threads=most)

    @property
    def together(self) -> int:
        buffer = self._reader.shuffle_buffer
        return (
            1
            if buffer is None or self._reader._ordering.is_sample
            else max(1, buffer // self.batch_size // self.world_size)
        )

    @property
    def steps(self) -> int:
        return self._reader._order.steps

    @property
    def without_steps(self) -> tuple[tuple[int, int], ...]:
        return self._reader._ordering.without_steps

    def batches(self, epoch: int, start: int, stop: int) -> Started:
        started = self._stretch(epoch, start, stop, csr=False)
        return Started(started, started.position, started.close)

    def _stretch(self, epoch: int, start: int, stop: int, *, csr: bool) -> Pass:
        options = replace(self._reader._running, csr=csr, totals=self._reader._totals, lost=self._reader._lost)
        return self._reader._order.batches(options, epoch, start, stop)

    def record_batches(self, epoch: int, start: int, stop: int) -> pa.RecordBatchReader:
        return arrow_streams(self._reader, partial(self._stretch, epoch, start, stop, csr=True)).record_batches()

    def rows_of(self, epoch: int, step: int) -> int:
        units, _ = self._reader._order.rows(epoch, step)
        return len(units)

    @property
    def leaves_out_damage(self) -> bool:
        return self._reader._lost is not None

    @property
    def in_engine(self) -> bool:
        return not self.leaves_out_damage

    def start_in_engine(self) -> Pass:
        self._reader._close(
            "another iterator over the tf.data.Dataset of this reader was started, and a reader has one pass at a time."
            " For two iterators at a time, create a second reader and fastpipe.tf.dataset(second_reader)"
        )
        return self._reader._start()


def arrow_streams(reader: Reader, start: Callable[[], Pass] | None = None) -> ArrowStreams:
    """Returns the Arrow streams of a reader.

    Args:
        reader: The reader.
        start: Function that starts a pass. By default, starts a pass of the reader, with a progress bar if it has one.
    """

    def counter(started: Pass) -> Counter | None:
        return (
            Counter(total=started.total, batch_size=reader.batch_size) if reader._progress and start is None else None
        )

    return ArrowStreams(
        features=reader.features,
        padded=reader._passes.marks_valid,
        schema=reader._data.handle.arrow_schema,
        start=partial(reader._start, csr=True) if start is None else start,
        counter=counter,
    )
