"""The reader: batches of a data set, pass after pass; and how far its passes have come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from fastpipe._arguments import flag
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._fastpipe import Order, Pass, PassMemory, Position, ReaderTotals
from fastpipe._progress import show
from fastpipe._reader import dropped_rows as _left_out
from fastpipe._reader import state as _state
from fastpipe._reader.dataset import Dataset
from fastpipe._reader.explain import explain
from fastpipe._reader.ordering import LARGEST_WORLD, Ordering, integer, within
from fastpipe._reader.partitions import Partition, dataset_part, split_dataset
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.passes import Passes
from fastpipe._reader.reader_passes import ReaderPasses, arrow_streams
from fastpipe.errors import StateError
from fastpipe.specs import Features

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe.leases import LeaseWorker
    from fastpipe.service._server import Server


class PassCursor:
    """How far the passes of a reader have come.

    Args:
        epoch: with which the next pass begins.
        loaded: what is to be resumed, if anything: the epoch with which its pass began, and its progress.

    Attributes:
        loaded: as above, until a pass begins.
        position: of the last pass; None if there was none, or something was said of the next one since.
    """

    def __init__(self, epoch: int = 0, loaded: tuple[int, _state.State] | None = None) -> None:
        self.loaded = loaded
        self.position: Position | None = None
        # With which the last pass began, or the next one will.
        self._first = epoch
        # What the pass of that position began with.
        self._begun: tuple[int, _state.State | None] = 0, None

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last; before a pass, or after its end, that of the next pass."""
        return self._first if self.position is None else self.position.epoch

    @property
    def pass_epoch(self) -> int:
        """The epoch with which the active or last pass began, or that of a loaded state."""
        return self._first if self.loaded is None else self.loaded[0]

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass start with this epoch, from its beginning."""
        self._first, self.position, self.loaded = epoch, None, None

    def load(self, pass_epoch: int, progress: _state.State) -> None:
        """Lets the next pass resume one that began with this epoch, behind this progress."""
        self.set_epoch(int(progress["epoch"]))
        self.loaded = pass_epoch, progress

    def go_back(self, progress: _state.State) -> None:
        """Lets the next pass be the last one once more, behind this progress."""
        self.loaded = self._first, progress

    def next_start(self) -> tuple[int, _state.State | None]:
        """The epoch with which the next pass begins, and where a loaded state resumes it.

        A pass that has yielded a batch counts as an epoch, whether the consumer saw its end, left it, or an error ended
        it: the next pass begins with the epoch after the one that was being read. A pass without a batch begins again
        where it began: `tqdm.auto.tqdm(reader)` calls `iter` twice, and a loaded state must outlive that.
        """
        if self.loaded is not None:
            return self.loaded
        position = self.position
        if position is None:
            return self._first, None
        if position.ended:
            return position.epoch, None
        return self._begun if position.delivered == 0 else (position.epoch + 1, None)

    def following(self) -> tuple[int, tuple[int, _state.State] | None]:
        """The arguments of a cursor whose first pass is the next pass of this one."""
        epoch, progress = self.next_start()
        return (epoch, None) if progress is None else (int(progress["epoch"]), (epoch, progress))

    def start(self, epoch: int, progress: _state.State | None, position: Position) -> None:
        """A pass has begun, with what `next_start` returned."""
        self.loaded = None
        self._first, self.position = epoch, position
        self._begun = epoch, progress

    def here(self, world_size: int, *, ended_stays: bool) -> tuple[int, _state.State]:
        """The epoch with which the pass began, and its progress.

        Args:
            world_size: number of ranks.
            ended_stays: whether a pass that the consumer saw end is at that end; otherwise at the start of the next.
        """
        if self.loaded is not None:
            return self.loaded
        if self.position is None:
            return self._first, _state.fresh(self._first, world_size)
        progress = self.position.progress()
        return self.behind(progress, ended=self.position.ended and not ended_stays)

    def behind(self, progress: _state.State, *, ended: bool) -> tuple[int, _state.State]:
        """The same of the last pass when its position had made this progress.

        Args:
            progress: of the position, behind a batch.
            ended: whether the consumer has seen the end of the pass.
        """
        # Behind the end a new pass begins. Before the consumer has seen that, its pass is to end where it is.
        return int(progress["epoch"]) if ended else self._first, progress


class Reader:
    """Yields the batches of a data set. `read_avro`, `from_arrow` and their like make one.

    `iter(reader)` starts a pass; it is the one active pass of the reader, and a second one closes the first, whose
    `next` then raises `PassClosedError`. (So `zip(reader, reader)` fails: two readers have two passes.) Several
    threads may draw from one pass: each batch goes to one of them. A pass that is dropped ends its threads. An error
    ends a pass: it is raised again by each further `next`.

    A pass that has yielded a batch counts as an epoch, whether it was finished, left by `break`, or ended by an error:
    the next `iter` starts the epoch after the one that was being read. So passes of a fixed number of steps see other
    rows each time, and all ranks agree on the epoch, whatever the step at which each of them left. A pass without a
    batch starts again. `set_epoch` and `load_state_dict` override that. `batch_at(0)` shows a batch without a pass.

    Which rows stand in a batch depends on the data set, the arguments that say what is read and in which order, the
    epoch and the batch's number alone: never on threads, on look-ahead, or on what was read before.

    Batches are dicts from feature name to array or batch form, in the order of `features`. Their arrays lie in memory
    of the reader, which is used again when the last array over it has died; so keeping batches is safe.

    A reader is an Arrow stream, too: `pyarrow.table(reader)`, `polars.DataFrame(reader)` and `duckdb.sql("select avg(x)
    from reader")` read a pass. See `to_reader`.

    A reader can be pickled, and used in a forked child; passes can't.

    Example:
        >>> import fastpipe
        >>> with fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024) as reader:
        ...     rows = sum(len(batch["label"]) for batch in reader)
        >>> rows, reader.num_rows, reader.epoch
        (6144, 6144, 1)
    """

    def __init__(
        self,
        data: Dataset,
        *,
        ordering: Ordering,
        running: PassOptions,
        progress: bool,
        epochs: SupportsIndex | None,
    ) -> None:
        self._data = data
        self._ordering = ordering
        self._order = ordering.of(data.handle)
        self._running = running
        self._progress = flag("progress", progress)
        self._epochs = None if epochs is None else within("epochs", epochs, 1, 2**31 - 1)
        self._cursor = PassCursor()
        self._active: Position | None = None
        # What all passes have done, for `fastpipe.metrics`.
        self._totals = ReaderTotals(ordering.rank)
        _left_out.check(self._order, ordering, self.num_rows, data.words.units)

    def _warned(self) -> Self:
        """The same, once the user was told of the rows that it leaves out, if these are many."""
        _left_out.warn(self._order, self._ordering, self.num_rows)
        return self

    @property
    def _passes(self) -> Passes:
        """What adapters know of this reader: the one private name that they use."""
        return ReaderPasses(self)

    @property
    def features(self) -> Features:
        """The spec of each feature."""
        return self._data.features

    @property
    def files(self) -> list[str]:
        """The files, in the order in which they stand in the data set."""
        return list(self._data.files)

    @property
    def symbols(self) -> dict[str, list[str]]:
        """For each enum or dictionary that is read as codes its symbols; code `i` stands for symbol `i`."""
        return dict(self._data.symbols)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch of all ranks, with those that `drop_last` leaves out."""
        return self._order.num_rows if self._ordering.is_sample else self._data.handle.num_rows

    @property
    def batch_size(self) -> int:
        """Rows a batch."""
        return self._ordering.batch_size

    @property
    def shuffle_buffer(self) -> int | None:
        """Rows of a window, pool or buffer; None without shuffling."""
        return None if self._ordering.shuffle == "sequential" else self._order.shuffle_buffer

    @property
    def seed(self) -> int:
        """The seed; one that was drawn if none was given."""
        return self._ordering.seed

    @property
    def rank(self) -> int:
        """The rank whose batches these are."""
        return self._ordering.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ordering.world_size

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last, until the pass ends or another one starts.

        In the body of a loop, and after `break`, `batch_at(step)` and `locate(step, row)` refer to it. Before the first
        pass, after a pass that has ended, and after `set_epoch` and `load_state_dict`, it is the epoch with which the
        next pass starts.
        """
        return self._cursor.epoch

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Lets the next pass start with this epoch, from its beginning. The active pass goes on as it is."""
        self._cursor.set_epoch(within("epoch", epoch, 0, _state.LARGEST_EPOCH))

    def __len__(self) -> int:
        """Batches that this rank gets in a pass.

        Raises:
            TypeError: if passes have no end (`epochs=None`).
        """
        if self._epochs is None:
            raise TypeError("a reader with epochs=None has no length: its passes don't end")
        return self._order.steps * self._epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Starts a pass: where a loaded state stands, else at the start of the next epoch that no pass has read."""
        return self._shown(self._start())

    def to_reader(self) -> pa.RecordBatchReader:
        """Starts a pass, as `iter(reader)` does, and yields its batches as Arrow record batches (extra `arrow`).

        They are what `to_arrow` makes of the batches, over their memory, when they are asked for: so few are held,
        unless whoever reads keeps them. Sparse columns are read as `SparseCSR` for it, which saves a copy. The schema
        is known at once; it follows from `features`, which its metadata holds, and has a bool column `valid` with
        `uneven="pad"`. Dropping the stream ends the pass; its own `close` doesn't, but `Reader.close` does. With
        `epochs=None` it has no end, and what reads all of it won't return. A stream of Arrow is for one thread at a
        time; several may draw from `iter(reader)`.

        Libraries that take Arrow streams take the reader itself, without pyarrow, and each read of it starts a pass. A
        query that names a reader twice needs two readers. `polars.from_arrow` makes a series of structs of any stream,
        and `polars.DataFrame` a frame. What is raised in a pass comes out of this stream as it is; through other
        libraries it becomes their error (`pyarrow.ArrowInvalid`, `polars.exceptions.ComputeError`,
        `duckdb.InvalidInputException`), whose message has the name and the message of fastpipe's.

        Raises:
            ImportError: if pyarrow isn't installed.
            ValueError: if the name of a feature, or its size, isn't one that Arrow has.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label", "age"], batch_size=1024)
            >>> [batch.num_rows for batch in reader.to_reader()]
            [1024, 1024, 1024, 1024, 1024, 1024]
            >>> import pyarrow as pa
            >>> pa.table(reader)["age"].null_count
            878
        """
        return arrow_streams(self).record_batches()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        if requested_schema is None:
            return arrow_streams(self).stream_capsule()
        # pyarrow casts to other types.
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return arrow_streams(self).schema_capsule()

    def _start(self, memory: PassMemory | None = None, *, csr: bool = False) -> Pass:
        """Starts a pass whose batches lie in this memory; with `csr` their sparse columns are in that layout.

        Memory whose allocator is written in Python must not be asked for when the interpreter ends: the pass has to be
        closed before.
        """
        epoch, progress = self._cursor.next_start()
        self._close(
            "another iter(reader) began a pass, and a reader has one at a time; take two readers for two passes"
        )
        options = replace(self._running, memory=memory, csr=csr, totals=self._totals)
        started = self._order.start(options, epoch, None if self._epochs is None else epoch + self._epochs, progress)
        self._active = started.position
        self._cursor.start(epoch, progress, started.position)
        return started

    def _shown(self, started: Pass) -> Iterator[dict[str, Any]]:
        """The batches of a pass, with a progress bar if that is wanted."""
        if not self._progress:
            return started
        return show(started, total=started.total, batch_size=self.batch_size)

    def shard(self, num_shards: SupportsIndex, index: SupportsIndex) -> Reader:
        """Another reader, of one of equal shares of what this one yields; `rank` and `world_size` of these.

        Where this reader has a rank already, its share is divided further: rank `r` of `w` becomes rank
        `r * num_shards + index` of `w * num_shards`. The shares are of one order, with this reader's seed, and begin
        where its next pass would. So each row is in exactly one of them, but for what `uneven` says of the rest.

        Args:
            num_shards: number of shares, at least 1.
            index: which of them, 0 to `num_shards - 1`.

        Raises:
            ValueError: if there is no such share, or shares would have no batch of their own; it names what would do.
            StateError: if a state was loaded that can't be shared out so.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024)
            >>> [len(reader.shard(3, index)) for index in range(3)]
            [2, 2, 2]
        """
        shards = within("num_shards", num_shards, 1, LARGEST_WORLD)
        return self._reordered(self._ordering.shard(shards, within("index", index, 0, shards - 1)))._warned()

    def partition(self, partitions: SupportsIndex) -> list[Partition]:
        """Divides the data into parts that take about as long to read, for whoever deals them out.

        Each row is in one part. The source's units (blocks, row groups, stretches of lines) stay whole, in their order.
        The division is a pure function of the data set; this reader's order and rank have no part in it.

        Args:
            partitions: how many, at most: no part is empty, so there are fewer where there are few units.

        Returns:
            The parts, in their order: a few numbers each.

        Raises:
            TypeError: if the number is no integer.
            ValueError: if it is out of range, or the reader is of a sample.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256)
            >>> parts = reader.partition(4)
            >>> sum(part.rows for part in parts) == reader.num_rows
            True
            >>> sum(len(batch["distance"]) for part in parts for batch in reader.read_partition(part))
            2000
        """
        return split_dataset(self._data, self._ordering, partitions)

    def read_partition(self, partition: Partition) -> Self:
        """Reads one part of the data.

        Args:
            partition: as `partition` returned it, of this reader or of one of the same data set in another process.

        Returns:
            A reader of the part, with states, `batch_at` and adapters as any other. It has this one's features, order,
            seed, ranks, threads, limits and epochs: shuffling stays within the part, which ranks share. Its states fit
            this part alone.

        Raises:
            StateError: if the partition is of another data set, or of one that has changed.
            TypeError: if it is no partition.
            ValueError: if the reader is of a sample.
        """
        return type(self)(dataset_part(self._data, self._ordering, partition), **self._options())

    def lease(
        self,
        url: str,
        *,
        worker: str | None = None,
        job: str = "default",
        stretch: SupportsIndex | None = None,
        ttl: float = 30.0,
        ahead: SupportsIndex = 1,
        barrier: bool = True,
        copies: bool = True,
        patience: float = 600.0,
    ) -> LeaseWorker:
        """Joins a job whose workers share this reader's batches by leases, however many come and go.

        A ledger, some tables in a database, holds which stretches of the order are free, leased or done. This reader's
        order says what a stretch is: which batch is which never depends on who reads it. Stretches of a worker that is
        killed or hangs pass to others when its leases expire, from the last batch that it has committed.

        Args:
            url: of the ledger's database: `postgresql://user@host/database`, or `sqlite:///ledger.db`, a file, for
                workers of one machine. Its tables are made by the first worker.
            worker: a name of its own. One that comes back under its name takes over what it held. By default the host's
                name and the process's number.
            job: a name for what is read: all its workers have readers of the same data, order and seed.
            stretch: batches of a stretch; by default up to 32, and fewer for few batches. All workers give the same.
            ttl: seconds after which a lease expires that isn't renewed, by the database's clock.
            ahead: stretches that are leased before they are needed.
            barrier: whether an epoch begins when the one before it is done. Without, workers that find no stretch go on
                with the next one.
            copies: whether this worker, when it finds no stretch, takes a second copy of one that another worker is
                slow with: the first to commit wins.
            patience: seconds for which the database may be away.

        Returns:
            The worker: iterate over it, and call its `commit()`.

        Raises:
            ImportError: if the database's driver isn't installed; it says what to install.
            LedgerError: if the database can't be reached, or written.
            StateError: if the ledger has a job of that name that reads other data, or in another order.
            TypeError: if an argument is of the wrong type.
            ValueError: if a number is out of range, the reader is one of several ranks or has drawn its seed, or there
                is no batch.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256, shuffle=True, seed=7)
            >>> rows = 0
            >>> with reader.lease("sqlite:///ledger.db", worker="pod-17") as worker:
            ...     for batch in worker:
            ...         rows += len(batch["distance"])
            ...         worker.commit()
            >>> rows
            2000
        """
        from fastpipe.leases import lease

        return lease(
            self,
            url,
            worker=worker,
            job=job,
            stretch=stretch,
            ttl=ttl,
            ahead=ahead,
            barrier=barrier,
            copies=copies,
            patience=patience,
        )

    def _reordered(self, ordering: Ordering) -> Reader:
        """Another one of the same data in another order, which starts where this one's next pass would.

        Raises:
            StateError: if a state was loaded that can't be gone on from in that order.
        """
        epoch, loaded = self._cursor.following()
        reader = _rebuild(self._data, self._options() | {"ordering": ordering}, epoch, loaded)
        if loaded is not None:
            reader._check(reader._order, loaded[1])
        return reader

    def _rebuilt(self) -> Reader:
        """Another one that starts where this one's next pass would."""
        return _rebuild(self._data, self._options(), *self._cursor.following())

    @staticmethod
    def _check(order: Order, progress: _state.State) -> None:
        try:
            order.check(progress)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"the state can't be gone on from: {error}") from None

    def state_dict(self) -> dict[str, Any]:
        """How far the pass has come: with it another reader goes on exactly where this one is.

        Only batches that `next` has returned count as seen, not those that are decoded ahead. A state that is saved
        behind a pass's last batch, before `next` has said that there are no more, stands at the end of that pass: the
        first loop after loading it is the rest of the pass, without a batch, and the second one is the next epoch. To
        begin the next epoch at once, save behind the loop. After `break`, until the next `iter`, the state is the
        middle of the pass that was left: loading it, here or elsewhere, resumes there. After an error,
        `reader.load_state_dict(reader.state_dict())` resumes with the batch that failed. Threads, look-ahead and
        columns may differ between saving and loading, folders of files too; with `shuffle=True` or without shuffling
        also `rank` and `world_size`, if all ranks had the same number of batches when it was saved. (With `"block"` and
        `"buffer"`, only if `shard_by="batch"`.) States of all ranks are then equal: any one of them serves all.

        Returns:
            A small dict that can be stored as JSON. Later versions of fastpipe will read it. It refers to the data set
            by a digest, in which file names have no folders.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
            >>> first = next(iter(reader))
            >>> state = reader.state_dict()
            >>> again = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
            >>> again.load_state_dict(state)
            >>> len(list(again)), len(again)
            (5, 6)
        """
        return self._stored(*self._cursor.here(self.world_size, ended_stays=False))

    def _stored(self, pass_epoch: int, progress: _state.State) -> dict[str, Any]:
        return _state.state(self._data.fingerprint(), self._ordering, self._order.shuffle_buffer, pass_epoch, progress)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next pass go on where a state was saved; the active one is closed.

        A seed that the reader was not given is taken from the state. If it was saved behind the last batch of a
        pass, what is left of that pass is empty: see `state_dict`.

        Args:
            state_dict: as `state_dict` returned it.

        Raises:
            StateError: if it is of another data set, of other arguments, of a later fastpipe, or damaged. Nothing
                changes then.

        Example:
            >>> import fastpipe
            >>> options = {"columns": ["label"], "batch_size": 500, "shuffle": True, "seed": 7}
            >>> reader = fastpipe.read_avro("data/*.avro", **options)
            >>> batches = iter(reader)
            >>> first, second = next(batches), next(batches)
            >>> ranks = [fastpipe.read_avro("data/*.avro", **options, rank=rank, world_size=2) for rank in range(2)]
            >>> for rank in ranks:
            ...     rank.load_state_dict(reader.state_dict())
            >>> len(reader), [len(list(rank)) for rank in ranks]
            (13, [5, 5])
        """
        pass_epoch, progress, seed = _state.parts(state_dict, self._data, self._ordering, self._order.shuffle_buffer)
        ordering = self._ordering if seed == self.seed else self._ordering.with_seed(seed)
        order = self._order if ordering is self._ordering else ordering.of(self._data.handle)
        self._check(order, progress)
        self._close("load_state_dict() was called; iter(reader) goes on where the state was saved")
        self._ordering, self._order = ordering, order
        self._cursor.load(pass_epoch, progress)

    def batch_at(self, step: SupportsIndex, epoch: SupportsIndex | None = None) -> dict[str, Any]:
        """Makes any batch, without reading those before.

        Args:
            step: its number within the epoch, as this rank counts them if no other number of ranks had a part in it.
            epoch: by default `epoch` of the reader.

        Raises:
            IndexError: if the epoch has no such batch; a negative number is none.
            TypeError: if a number is no integer.
            ValueError: if the epoch is out of range.
            LimitError: if its order takes more than `memory_limit`, or without one more than half of the memory of this
                machine or container; the message says which `shuffle_buffer` would fit.
            FastpipeError: if it can't be read.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
            >>> reader.batch_at(3)["label"].shape, reader.batch_at(3, epoch=1)["label"].shape
            ((1024,), (1024,))
        """
        at, options = self._step(step), replace(self._running, sharers=1, prefetch=1)
        started = self._order.batches(options, self._at(epoch), at, at + 1)
        try:
            batch = next(started)
            # Its end says whether files changed while it was read.
            next(started, None)
            return batch
        finally:
            started.close()

    def locate(self, step: SupportsIndex, row: SupportsIndex, epoch: SupportsIndex | None = None) -> Any:
        """Says where a row of a batch comes from. Reads no data.

        Args:
            step: the batch, as in `batch_at`.
            row: the row of the batch.
            epoch: by default `epoch` of the reader.

        Returns:
            A named tuple of the source's own, whose fields say where the row comes from.

        Raises:
            IndexError: if there is no such batch or row; a negative number is none.
            TypeError: if a number is no integer.
            ValueError: if the epoch is out of range.
            LimitError: as `batch_at`.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024)
            >>> reader.locate(0, row=5)
            Location(file='data/part-0.avro', block=0, record=5)
        """
        at, slot = self._step(step), integer("row", row)
        if not 0 <= slot < self._ordering.batch_size:
            raise IndexError(
                f"there is no row {slot}: rows of a batch are counted from 0 to {self._ordering.batch_size - 1}"
            )
        return self._data.place(*self._order.locate(self._at(epoch), at, slot, self._running.memory_limit))

    def _step(self, step: SupportsIndex) -> int:
        at, steps = integer("step", step), self._order.steps
        if not 0 <= at < steps:
            last = f", counted from 0 to {steps - 1}" if steps else ""
            raise IndexError(f"an epoch has {steps} batches{last}: there is no batch {at}")
        return at

    def _at(self, epoch: SupportsIndex | None) -> int:
        return self.epoch if epoch is None else within("epoch", epoch, 0, _state.LARGEST_EPOCH)

    def stats(self) -> dict[str, Any]:
        """What the last pass has done so far, and where its time went. Counting it costs less than a hundredth of that.

        Batches count when they are made, which is before they are yielded. `fastpipe.metrics` has totals over passes.

        Returns:
            A dict that can be stored as JSON, with

            - `batches`, `rows`, and `bytes_delivered`: what was made;
            - `units` of the source (blocks of a file, shards, row groups), `rows_in_units`, `bytes_read`,
              and `bytes_opened`, which is what these are when they are open: what was opened for it;
              `rows_reopened`: rows of units that were opened a second time, because the edge of a window cuts them;
              `rows_skipped`: rows that were passed over once, to let several threads work on one unit;
            - `ready`: batches that wait to be yielded;
            - `seconds`: `elapsed` since the pass began; of all threads together `reading`, opening units (by the
              source's word for it: `decompressing`, `sampling`, `opening`), `indexing` (finding where records start),
              `skipping`, making rows of them (`decoding` or `gathering`), `assembling` and `planning`; `fetching` of
              all calls of a source together, for which no thread of the pass waits; and of the consumer
              `consumer_waiting`, when it wanted a batch that wasn't there, and `waiting_for_consumer`, when it was busy
              with the one before;
            - `threads`: how many were `chosen` of those `available`, and `start_delay`, the seconds until one that
              slept does something;
            - `memory`: bytes `reserved` for what is under way, now and at `most_reserved`; bytes `in_batches` that
              aren't yielded, and `free`, which is kept to be used again; how many slabs and buffers were `recycled`,
              and how many `fresh`;
            - `model`: for each class of units that cost alike what was learned: `ns_per_stored_byte` to
              open, `ns_per_row` and `ns_per_byte` to decode, `ns_per_skipped_byte`, the `expansion` by
              opening; and by how much the `predictions` that were made with it were off: `error`, as a fraction
              of what was predicted. None for what wasn't met.

            Empty before the first pass.
        """
        position = self._cursor.position
        return ({} if position is None else position.stats()) or {}

    def explain(self) -> str:
        """Says in words what limits the last pass, and what would help.

        May read a unit and decode it several times, to see what each column takes.

        Raises:
            FastpipeError: if that unit can't be read.
        """
        return explain(self.stats(), self._data)

    def serve(self, url: str = "grpc://127.0.0.1:0", **options: Any) -> Server:
        """Serves its batches to others, who `fastpipe.connect` to it (extra `arrow`).

        Args:
            url: to listen at: `grpc://host:port`. By default only processes of this machine can connect, at any port
                that is free.
            **options: of `fastpipe.service.Server`: `token`, `tls`, `client_ca`, `max_passes`, `keep`,
                `memory_limit`, `max_requests`, `metrics_port`, `metrics_host`.

        Returns:
            The server, which runs until its `stop` is called, or its `with` block ends.

        Raises:
            ImportError: if pyarrow isn't installed.
            OSError: if it can't listen there.
            ValueError: if the URL is none, and as `Server` does.
        """
        require_pyarrow()
        from fastpipe.service._server import listening

        return listening(self, url, options)

    def close(self) -> None:
        """Ends the active pass, if there is one, and waits for its threads."""
        self._close("close() was called; iter(reader) starts a new pass")

    def _close(self, because: str) -> None:
        """Ends the active pass, whose `next` then says why."""
        active, self._active = self._active, None
        if active is not None:
            active.close(f"the pass was closed: {because}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close("the with block of its reader ended; iter(reader) starts a new pass")

    def __reduce__(self) -> tuple[Any, ...]:
        if self._active is not None and self._active.active:
            raise TypeError("a reader can't be pickled while a pass is active: close() it first")
        return _rebuild, (self._data, self._options(), *self._cursor.following())

    def _options(self) -> dict[str, Any]:
        return {
            "ordering": self._ordering,
            "running": self._running,
            "progress": self._progress,
            "epochs": self._epochs,
        }

    def __repr__(self) -> str:
        order = self._ordering
        shuffled = "" if order.shuffle == "sequential" else f", shuffle={order.shuffle!r}, seed={order.seed}"
        ranks = "" if order.world_size == 1 else f", rank={order.rank}, world_size={order.world_size}"
        return (
            f"<fastpipe.Reader of {self._data}: {self.num_rows} rows, {len(self.features)} features, "
            f"batch_size={order.batch_size}{shuffled}{ranks}>"
        )


def made(data: Dataset, **options: Any) -> Reader:
    """A reader of these options for the user, who is told of the rows that it leaves out, if these are many."""
    return Reader(data, **options)._warned()


def _rebuild(data: Dataset, options: dict[str, Any], epoch: int, loaded: tuple[int, _state.State] | None) -> Reader:
    """A reader that starts where another one would."""
    reader = Reader(data, **options)
    reader._cursor = PassCursor(epoch, loaded)
    return reader
