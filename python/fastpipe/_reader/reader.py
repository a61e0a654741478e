"""The reader, which yields the batches of a dataset pass after pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fastpipe._arguments import flag, integer, within
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._fastpipe import Order, Pass, PassMemory, Position, ReaderTotals
from fastpipe._locations import Location
from fastpipe._private_constructor import private_constructor
from fastpipe._progress import show
from fastpipe._reader import dropped_rows as _left_out
from fastpipe._reader import growth as _growth
from fastpipe._reader import losses as _losses
from fastpipe._reader import state as _state
from fastpipe._reader.dataset import Dataset
from fastpipe._reader.explain import explain
from fastpipe._reader.first_rows import head
from fastpipe._reader.ordering import LARGEST_WORLD, Ordering
from fastpipe._reader.partitions import Partition, dataset_part, split_dataset
from fastpipe._reader.pass_cursor import PassCursor
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.passes import Passes, warn_of_ranks
from fastpipe._reader.plan import Plan, plan_of
from fastpipe._reader.reader_passes import ReaderPasses, arrow_streams
from fastpipe._reader.shaping import Shaping
from fastpipe.errors import StateError
from fastpipe.specs import Features

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe._reader.growth import Growth
    from fastpipe._reader.ordering import Shuffle
    from fastpipe.leases import LeaseWorker
    from fastpipe.service._server import Server
    from fastpipe.statistics._description import Description
    from fastpipe.statistics._shuffle_report import ShuffleReport


class Reader(Shaping):
    """Yields the batches of a dataset. Functions such as `read_avro` and `from_arrow` create readers.

    `iter(reader)` starts a pass. A reader has one active pass: a second `iter` closes the first pass, whose `next` then
    raises `PassClosedError`. (So `zip(reader, reader)` fails; use two readers.) Several threads may draw from one pass;
    each batch goes to one of them. Dropping a pass ends its threads. An error ends a pass, and each further `next`
    raises it again.

    A pass that has yielded a batch counts as an epoch, whether it was finished, left by `break`, or ended by an error.
    The next `iter` starts the epoch after the one that was being read. So successive passes of a fixed number of steps
    see different rows, and all ranks agree on the epoch even if they leave at different steps. A pass without a batch
    starts again. `set_epoch` and `load_state_dict` override this. `batch_at(0)` returns a batch without starting a
    pass.

    The rows of a batch depend only on the dataset, the arguments that define what is read and in which order, the
    epoch, and the step. They never depend on threads, prefetching, or earlier reads.

    Batches are dicts from feature name to array or batch form, in the order of `features`. You can keep batches as long
    as you like: the reader reuses the memory of an array only after the last array over it has been released.

    A reader is also an Arrow stream: `pyarrow.table(reader)`, `polars.DataFrame(reader)` and
    `duckdb.sql("select avg(x) from reader")` read a pass. See `to_arrow_reader`.

    A reader can be pickled, and used in a forked child process. Passes can't.

    Example:
        >>> import fastpipe
        >>> with fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024) as reader:
        ...     rows = sum(len(batch["label"]) for batch in reader)
        >>> rows, reader.num_rows, reader.epoch
        (6144, 6144, 1)
    """

    @private_constructor("fastpipe.read_avro(...), read_csv(...) or another function that returns a reader")
    def _of(
        self,
        data: Dataset,
        *,
        ordering: Ordering,
        running: PassOptions,
        progress: bool,
        epochs: int | None,
    ) -> None:
        self._data = data
        self._ordering = ordering
        self._order = ordering.of(data.handle)
        self._running = running
        self._progress = flag("progress", progress)
        self._epochs = None if epochs is None else within("epochs", epochs, 1, 2**31 - 1)
        self._cursor = PassCursor()
        self._active: Position | None = None
        self._warned_of_ranks = False
        # Totals over all passes, for `fastpipe.metrics`.
        self._totals = ReaderTotals(ordering.rank)
        # The damaged units that are left out.
        self._lost = _losses.of(data, running.on_error)
        _left_out.check(self._order, ordering, self.num_rows, data.words.units)

    def _reported(self) -> Self:
        """Reports rows that the order leaves out, and returns the reader."""
        _left_out.report(self._order, self._ordering, self.num_rows)
        return self

    @property
    def _passes(self) -> Passes:
        """The passes of this reader. Adapters use no other private name."""
        return ReaderPasses(self)

    @property
    def features(self) -> Features:
        """The spec of each feature."""
        return self._data.features

    @property
    def files(self) -> list[str]:
        """The files, in the order of the dataset."""
        return list(self._data.files)

    @property
    def categories(self) -> dict[str, list[str]]:
        """The categories of each feature that is read as codes, by feature name. Code `i` is category `i`.

        They are the symbols of an enum, the values of a dictionary, or the names of a union's types.

        Example:
            >>> import fastpipe
            >>> import pyarrow as pa
            >>> table = pa.table({"suit": pa.array(["hearts", "spades", "hearts"]).dictionary_encode()})
            >>> features = {"suit": fastpipe.DenseSpec((), "int8")}
            >>> fastpipe.from_arrow(table, features=features, batch_size=2).categories
            {'suit': ['hearts', 'spades']}
        """
        return dict(self._data.categories)

    @property
    def num_rows(self) -> int:
        """Number of rows in one epoch of all ranks, including rows that `drop_last` leaves out."""
        return self._order.num_rows if self._ordering.has_own_rows else self._data.handle.num_rows

    @property
    def losses(self) -> list[_losses.Loss]:
        """What is lost to damage in the batches that this reader has yielded, by file and block.

        Empty unless the reader was created with `on_error=fastpipe.Skip(...)`. `state_dict` contains the losses, and
        `load_state_dict` replaces them by the losses of the state. Each rank has the losses of its own batches.
        """
        return [] if self._lost is None else self._lost.losses

    @property
    def batch_size(self) -> int:
        """Number of rows per batch."""
        return self._ordering.batch_size

    @property
    def shuffle_buffer(self) -> int | None:
        """Number of rows in a window, pool or buffer. None without shuffling, and for a mixture."""
        return None if self._ordering.shuffle in ("sequential", "mixture") else self._order.shuffle_buffer

    @property
    def seed(self) -> int:
        """The seed that was passed, or the random seed that was drawn."""
        return self._ordering.seed

    @property
    def rank(self) -> int:
        """The rank whose batches this reader yields."""
        return self._ordering.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ordering.world_size

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that was yielded, until the pass ends or another one starts.

        In the body of a loop, and after `break`, `batch_at(step)` and `locate(step, row)` refer to this epoch. Before
        the first pass, after a pass has ended, and after `set_epoch` or `load_state_dict`, it is the epoch with which
        the next pass starts.
        """
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass start at the beginning of this epoch. The active pass continues unchanged."""
        self._cursor.set_epoch(within("epoch", epoch, 0, _state.LARGEST_EPOCH))

    def __len__(self) -> int:
        """Returns the number of batches that this rank gets in a pass.

        Raises:
            TypeError: If passes have no end (`epochs=None`).
        """
        if self._epochs is None:
            raise TypeError("a reader with epochs=None has no length: its passes don't end")
        return self._order.steps * self._epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Starts a pass at the loaded state, or at the beginning of the next epoch that no pass has read.

        The first pass logs a warning (logger `fastpipe`) if the program has several ranks and the reader isn't divided
        among them.
        """
        if not self._warned_of_ranks:
            self._warned_of_ranks = True
            warn_of_ranks(self._passes)
        return self._shown(self._start())

    def to_arrow_reader(self) -> pa.RecordBatchReader:
        """Starts a pass, as `iter(reader)` does, and yields its batches as Arrow record batches (extra `arrow`).

        Each record batch equals the result of `to_arrow` and shares the memory of its batch. It is made when the
        consumer asks for it, so only a few are in memory unless the consumer keeps them. Sparse columns are read as
        `SparseCSR`, which saves a copy. The schema is known before the first batch. It follows from `features`, which
        its metadata contains, and has a bool column `valid` with `on_uneven="pad"`. Dropping the stream, or calling
        `Reader.close`, ends the pass. The stream's own `close` doesn't end it. With `epochs=None` the stream has no
        end, so reading all of it never returns. Only one thread at a time may use an Arrow stream, but several may draw
        from `iter(reader)`.

        Libraries that accept Arrow streams also accept the reader itself, without pyarrow, and each read starts a pass.
        A query that refers to a reader twice needs two readers. `polars.from_arrow` turns any stream into a series of
        structs; use `polars.DataFrame` to get a data frame. This stream raises the errors of the pass unchanged. Other
        libraries raise their own error (`pyarrow.ArrowInvalid`, `polars.exceptions.ComputeError`,
        `duckdb.InvalidInputException`), whose message contains the name and message of the original error.

        Raises:
            ImportError: If pyarrow isn't installed.
            ValueError: If Arrow doesn't support the name or size of a feature.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label", "age"], batch_size=1024)
            >>> [batch.num_rows for batch in reader.to_arrow_reader()]
            [1024, 1024, 1024, 1024, 1024, 1024]
            >>> import pyarrow as pa
            >>> pa.table(reader)["age"].null_count
            878
        """
        return arrow_streams(self).record_batches()

    def head(self, n: int = 5) -> pa.Table:
        """Returns the first rows of the current epoch as a `pyarrow.Table`, to look at (extra `arrow`).

        The rows are in the order of this reader, and of its rank if it has one. The active pass and the epoch don't
        change. Only the batches with these rows are read, so a small `n` is fast, apart from the first window of a
        shuffled reader.

        Args:
            n: Maximum number of rows, 0 to 2^31 - 1. Defaults to 5.

        Returns:
            A table with the schema of `to_arrow_reader`. It has fewer rows if the epoch has.

        Raises:
            ImportError: If pyarrow isn't installed.
            TypeError: If `n` isn't an integer.
            ValueError: If `n` is out of range, or Arrow doesn't support the name or size of a feature.
            FastpipeError: If the rows can't be read.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label", "age"], batch_size=1024)
            >>> table = reader.head(3)
            >>> table.num_rows, table.column_names, reader.epoch
            (3, ['label', 'age'], 0)
        """
        return head(self, n)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        if requested_schema is None:
            return arrow_streams(self).stream_capsule()
        # Uses pyarrow to cast to the requested types.
        return self.to_arrow_reader().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return arrow_streams(self).schema_capsule()

    def _start(self, memory: PassMemory | None = None, *, csr: bool = False) -> Pass:
        """Starts a pass.

        Args:
            memory: Memory for the batches. An allocator that is written in Python must not be called when the
                interpreter exits, so the caller must close the pass before.
            csr: Whether sparse columns have the layout "csr".
        """
        epoch, progress = self._cursor.next_start()
        self._close(
            "another iter(reader) began a pass. A reader has one pass at a time; use two readers for two passes"
        )
        options = replace(self._running, memory=memory, csr=csr, totals=self._totals, lost=self._lost)
        started = self._order.start(options, epoch, None if self._epochs is None else epoch + self._epochs, progress)
        self._active = started.position
        self._cursor.start(epoch, progress, started.position)
        return started

    def _shown(self, started: Pass) -> Iterator[dict[str, Any]]:
        """Returns the batches of a pass, with a progress bar if the user asked for one."""
        return show(started, total=started.total, batch_size=self.batch_size) if self._progress else started

    def describe(
        self,
        *,
        rows: int | None = None,
        seed: int = 0,
        exact_values: int = 100_000,
        progress: bool = False,
    ) -> Description:
        """Reads this reader's rows once, and returns statistics of each feature (extra `describe`).

        Counts of text, integers and bools, and quantiles of integers, are exact for up to `exact_values` distinct
        values. Beyond that, and for quantiles of floats, fastpipe uses Apache DataSketches sketches of bounded size.
        `value_counts_error` and `quantile_error` return their maximum errors. Moments are always exact up to float64
        rounding.

        If a spec fills nulls with NaN, as the inferred specs of floats in CSV files do, NaN counts as null. Otherwise
        NaN is a value, which `nan_count` counts.

        If this reader has several ranks, only the rows of its rank are described. Its pass and epoch don't change.

        Args:
            rows: Number of rows of a uniform sample to describe. Defaults to None, which describes all rows.
            seed: Seed of the sample, 0 to 2^64 - 1. Defaults to 0 instead of a random seed, so that two descriptions of
                the same dataset are of the same rows and can be compared.
            exact_values: Maximum number of distinct values per feature that are counted exactly, 1 to 2^31. Defaults to
                100,000.
            progress: Whether to show a progress bar (extra `progress`). Defaults to False.

        Returns:
            The statistics by feature name. You can merge the descriptions of several ranks or partitions.

        Raises:
            ImportError: If datasketches or pyarrow isn't installed. The message says what to install.
            TypeError: If an argument has the wrong type.
            UnsupportedError: If a feature has values without statistics.
            ValueError: If a number is out of range.
            FastpipeError: If the data can't be read.

        Example:
            >>> import fastpipe
            >>> found = fastpipe.read_csv("rides.csv", batch_size=256).describe()
            >>> found.num_rows, found["distance"].null_fraction
            (2000, 0.0)
        """
        from fastpipe.statistics._description import describe

        return describe(self, rows=rows, seed=seed, exact_values=exact_values, progress=progress)

    def shuffle_report(
        self,
        *,
        shuffle: bool | Shuffle | None = None,
        shuffle_buffer: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        epoch: int | None = None,
        max_batches: int = 200,
    ) -> ShuffleReport:
        """Reports how well this reader's order, or another one, shuffles the dataset. Works with any local source.

        The report needs only the number of rows in each unit (block, row group, CSV chunk), so it reads no data. This
        reader doesn't change.

        Let B be the number of batches in an epoch. If B is more than M = `max_batches`, the batches (2i + 1) B / 2M for
        i below M are sampled. If it takes long to reach each sampled batch (more than 3 * 10^7 rows with a large
        buffer), several neighboring batches are sampled at each of fewer places, at least 12. The call takes a few
        seconds, or up to two minutes if the buffer has millions of rows.

        Args:
            shuffle: Order of the rows: True or `"window"`, `"block"`, `"buffer"`, or False for no shuffling. Defaults
                to this reader's order.
            shuffle_buffer: Number of rows in a window, pool or buffer, 1 to 2^31. Defaults to this reader's buffer, or
                to the default of the source if this reader doesn't shuffle.
            batch_size: Number of rows per batch, 1 to 2^31 - 1. Defaults to this reader's batch size.
            seed: Seed of the shuffle, 0 to 2^64 - 1. It matters little, unless the dataset has only a few units.
                Defaults to this reader's seed.
            epoch: The epoch to sample, 0 to 2^62. Defaults to the epoch in which this reader's next pass begins.
            max_batches: Maximum number of batches to sample, 1 to 2^31 - 1. Fewer are sampled if their rows would
                exceed 2^25 in total, but at least 12 or all. Defaults to 200.

        Returns:
            The report. The same reader and arguments give the same report.

        Raises:
            LimitError: If the order needs more than half of the memory of this machine or container. The message names
                a `shuffle_buffer` that fits.
            TypeError: If an argument has the wrong type.
            UnsupportedError: If this reader is a sample or reads from servers. The message says which reader to use
                instead.
            ValueError: If arguments exclude each other or are out of range, or if this reader has several ranks.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=64, shuffle=True, seed=7)
            >>> report = reader.shuffle_report()
            >>> report.num_rows, report.displacement.score > 0.8
            (2000, True)
            >>> reader.shuffle_report(shuffle="buffer", shuffle_buffer=100).displacement.score < 0.2
            True
        """
        from fastpipe.statistics._shuffle_report import shuffle_report

        return shuffle_report(self, shuffle, shuffle_buffer, batch_size, seed, epoch, max_batches)

    def shard(self, num_shards: int, index: int) -> Reader:
        """Returns a reader of one of `num_shards` equal shards of this reader's batches.

        If this reader already has a rank, its shard is divided further: shard `index` of rank `r` of `w` is rank
        `r * num_shards + index` of `w * num_shards`. All shards have the same order and seed as this reader, and begin
        where its next pass would. So each row is in exactly one shard, except as `on_uneven` specifies.

        Args:
            num_shards: Number of shards, at least 1.
            index: Index of the shard, 0 to `num_shards - 1`.

        Raises:
            ValueError: If the index is out of range, or if no shard would get a batch. The message lists settings that
                work.
            StateError: If a loaded state can't be divided among the shards.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024)
            >>> [len(reader.shard(3, index)) for index in range(3)]
            [2, 2, 2]
        """
        shards = within("num_shards", num_shards, 1, LARGEST_WORLD)
        return self._reordered(self._ordering.shard(shards, within("index", index, 0, shards - 1)))._reported()

    def partition(self, num_partitions: int) -> list[Partition]:
        """Divides the data into partitions that take about the same time to read.

        Each row is in one partition. The source's units (blocks, row groups, CSV chunks) stay whole and keep their
        order. The partitions depend only on the dataset, not on this reader's order or rank.

        Args:
            num_partitions: Maximum number of partitions, 1 to 2^31. No partition is empty, so a dataset with few units
                has fewer.

        Returns:
            The partitions, in the order of the dataset. Each one consists of a few numbers.

        Raises:
            TypeError: If `num_partitions` isn't an integer.
            ValueError: If it is out of range, or if the reader is a sample.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256)
            >>> parts = reader.partition(4)
            >>> sum(part.rows for part in parts) == reader.num_rows
            True
            >>> sum(len(batch["distance"]) for part in parts for batch in reader.read_partition(part))
            2000
        """
        return split_dataset(self._data, self._ordering, num_partitions)

    def read_partition(self, partition: Partition) -> Self:
        """Returns a reader of one partition.

        Args:
            partition: A partition that `partition` returned, of this reader or of a reader of the same dataset in
                another process.

        Returns:
            A reader of the partition, which supports states, `batch_at` and adapters like any other. It has the same
            features, order, seed, ranks, threads, limits and epochs as this reader. Rows are shuffled within the
            partition, and its ranks share the partition. Its states fit only this partition.

        Raises:
            StateError: If the partition belongs to another dataset, or if the dataset has changed.
            TypeError: If the argument isn't a `Partition`.
            ValueError: If the reader is a sample.
        """
        return type(self)._of(dataset_part(self._data, self._ordering, partition), **self._options())

    def lease(
        self,
        url: str,
        *,
        worker_name: str | None = None,
        job: str = "default",
        stretch: int | None = None,
        ttl: float = 30.0,
        prefetch: int = 1,
        barrier: bool = True,
        copies: bool = True,
        patience: float = 600.0,
    ) -> LeaseWorker:
        """Joins a job whose workers share this reader's batches through leases. Workers may join and leave at any time.

        A ledger, stored in database tables, records which ranges of the order are free, leased or done. The ranges are
        defined by this reader's order, so the rows of a batch never depend on which worker reads it. If a worker is
        killed or hangs, its leases expire, and other workers continue after its last committed batch.

        Args:
            url: URL of the ledger's database: `postgresql://user@host/database`, or `sqlite:///ledger.db` for a file
                that workers of one machine share. The first worker creates the tables.
            worker_name: Unique name of this worker. A worker that restarts under the same name resumes its leases.
                Defaults to the host name and the process ID.
            job: Name of the job. All of its workers must have readers with the same data, order and seed. Defaults to
                "default".
            stretch: Number of batches in a leased range. All workers must pass the same number. Defaults to 32, or
                fewer if there are few batches.
            ttl: Seconds after which a lease expires unless it is renewed, measured by the database's clock. Defaults to
                30.
            prefetch: Number of ranges that are leased before they are needed, at least 1. Defaults to 1.
            barrier: Whether an epoch begins only when the previous one is done. If False, workers that find no free
                range continue with the next epoch. Defaults to True.
            copies: Whether this worker, if it finds no free range, also reads a range of a slow worker. The first
                worker to commit wins. Defaults to True.
            patience: Seconds for which the worker tolerates an unreachable database. Defaults to 600.

        Returns:
            The worker: iterate over it, and call its `commit()`.

        Raises:
            ImportError: If the database driver isn't installed. The message says what to install.
            LedgerError: If the database can't be reached or written.
            StateError: If the ledger has a job of that name with other data or another order.
            TypeError: If an argument has the wrong type.
            ValueError: If a number is out of range, if the reader has several ranks or a randomly drawn seed, or if the
                reader has no batches.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256, shuffle=True, seed=7)
            >>> rows = 0
            >>> with reader.lease("sqlite:///ledger.db", worker_name="pod-17") as worker:
            ...     for batch in worker:
            ...         rows += len(batch["distance"])
            ...         worker.commit()
            >>> rows
            2000
        """
        from fastpipe.leases._ledger import lease

        return lease(
            self,
            url,
            worker_name=worker_name,
            job=job,
            stretch=stretch,
            ttl=ttl,
            prefetch=prefetch,
            barrier=barrier,
            copies=copies,
            patience=patience,
        )

    def _reordered(self, ordering: Ordering) -> Reader:
        """Returns a reader of the same data in another order, which starts where this reader's next pass would.

        Raises:
            StateError: If a loaded state can't be resumed in that order.
        """
        epoch, loaded = self._cursor.following()
        reader = _rebuild(self._data, self._options() | {"ordering": ordering}, epoch, loaded, self._stored_losses())
        if loaded is not None:
            reader._check(reader._order, loaded[1])
        return reader

    def _like(self, data: Dataset, **changes: Any) -> Reader:
        """Returns a reader of a dataset, at its beginning, with this reader's options and some changes."""
        return Reader._of(data, **(self._options() | changes))

    def _rebuilt(self) -> Reader:
        """Returns a copy that starts where this reader's next pass would."""
        return _rebuild(self._data, self._options(), *self._cursor.following(), self._stored_losses())

    @staticmethod
    def _check(order: Order, progress: _state.State) -> None:
        try:
            order.check(progress)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"cannot resume from this state: {error}") from None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the active or last pass. Another reader can resume from it exactly.

        Only batches that `next` has returned count as read; prefetched batches don't. A state that is saved after the
        last batch of a pass, but before `next` has reported the end, is at the end of that pass. After loading it, the
        first loop yields the empty rest of that pass, and the second loop reads the next epoch. To start with the next
        epoch at once, save the state after the loop.

        After `break`, until the next `iter`, the state is the middle of the pass that was left, and loading it resumes
        there. After an error, `reader.load_state_dict(reader.state_dict())` resumes with the batch that failed.

        Threads, prefetching, columns and the folders of files may differ between saving and loading. With
        `shuffle=True` or without shuffling, `rank` and `world_size` may also differ, if all ranks had read the same
        number of batches when the state was saved. (With `"block"` and `"buffer"` this requires `shard_by="batch"`.)
        The states of all ranks are then equal, so one of them is enough.

        Returns:
            A small dict that can be stored as JSON. Later versions of fastpipe can read it. It identifies the dataset
            by a digest that includes file names without their folders.

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
        window, losses = self._order.shuffle_buffer, self._stored_losses()
        return _state.state(self._data.fingerprint(), self._ordering, window, pass_epoch, progress, losses)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass resume from a state. The active pass is closed.

        If the reader was created without a seed, it uses the seed of the state. If the state was saved after the last
        batch of a pass, the rest of that pass is empty: see `state_dict`.

        Args:
            state_dict: A state as `state_dict` returned it.

        Raises:
            StateError: If the state has another dataset or other arguments, was saved by a later version of fastpipe,
                or is damaged. Nothing changes then.

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
        lost = _losses.loaded(state_dict, self._lost)
        self._close("load_state_dict() was called; iter(reader) resumes where the state was saved")
        self._ordering, self._order, self._lost = ordering, order, lost
        self._cursor.load(pass_epoch, progress)

    def resume_appended(self, state: Mapping[str, Any]) -> Growth:
        """Resumes from a state after files were added to its dataset.

        All files of the state must still exist, unchanged and in the same order. They must be either the first files of
        this reader or the files with the oldest modification times. The epoch in which the state was saved is completed
        without the added files, so it has the batches that it would have had without them. The next epoch reads all
        files. A state that is saved while `begun` is read belongs to the old files. `resume_appended` can resume from
        it even if more files have been added by then.

        This reader must have the arguments of the saved reader. Its active pass is closed. Its next pass begins with
        the epoch after the state's epoch, or with the state's epoch if that had not begun. If no files were added, this
        is the same as `load_state_dict`.

        Args:
            state: A state as `state_dict` returned it.

        Returns:
            A reader of the rest of the interrupted epoch, and the files that were added. The logger `fastpipe` also
            reports the added files.

        Raises:
            StateError: If files of the state are missing or changed, or if the state has other arguments, was saved by
                a later version of fastpipe, or is damaged. This reader is unchanged then.
            UnsupportedError: If this reader doesn't read files, or reads a partition of them.
            FastpipeError: If files can't be read.

        Example:
            >>> import fastpipe
            >>> options = {"columns": ["label"], "batch_size": 1024, "shuffle": True, "seed": 7}
            >>> before = fastpipe.read_avro("data/part-0.avro", **options)
            >>> first = next(iter(before))
            >>> reader = fastpipe.read_avro("data/*.avro", **options)
            >>> growth = reader.resume_appended(before.state_dict())
            >>> len(list(growth.begun)) + 1 == len(before), len(growth.added_files) + 1 == len(reader.files)
            (True, True)
            >>> reader.epoch
            1
        """
        return _growth.resume_appended(self, state)

    def batch_at(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        """Returns any batch without reading the batches before it.

        Args:
            step: Index of the batch within the epoch of this rank, from 0.
            epoch: Epoch of the batch, 0 to 2^62. Defaults to the reader's `epoch`.

        Raises:
            IndexError: If the epoch has no such batch. Negative indices are not supported.
            TypeError: If `step` or `epoch` isn't an integer.
            ValueError: If the epoch is out of range.
            LimitError: If the order needs more memory than `memory_limit`, or without a limit more than half of the
                memory of this machine or container. The message says which `shuffle_buffer` would fit.
            FastpipeError: If the batch can't be read.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
            >>> reader.batch_at(3)["label"].shape, reader.batch_at(3, epoch=1)["label"].shape
            ((1024,), (1024,))
        """
        at, options = self._step(step), replace(self._running, sharers=1, prefetch=1, lost=self._lost)
        started = self._order.batches(options, self._at(epoch), at, at + 1)
        try:
            batch = next(started)
            # The end of the pass checks whether files changed while they were read.
            next(started, None)
            return batch
        finally:
            started.close()

    def locate(self, step: int, row: int, epoch: int | None = None) -> Location:
        """Returns where a row of a batch comes from. Reads no data.

        Args:
            step: Index of the batch in the epoch, from 0.
            row: Index of the row within the batch.
            epoch: Epoch of the batch, 0 to 2^62. Defaults to the reader's `epoch`.

        Returns:
            The `Location` of the row: its file and index, and the fields of the source's subclass, such as
            `AvroLocation`.

        Raises:
            IndexError: If the batch or row doesn't exist. Negative indices are not supported.
            TypeError: If an index or the epoch isn't an integer.
            ValueError: If the epoch is out of range.
            LimitError: If the order needs more memory than `memory_limit` or, without a limit, half of the memory of
                the machine or container.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024)
            >>> reader.locate(0, row=5)
            AvroLocation(file='data/part-0.avro', row=5, block=0)
        """
        at, slot = self._step(step), integer("row", row)
        if not 0 <= slot < self._ordering.batch_size:
            raise IndexError(
                f"row {slot} does not exist: rows of a batch are counted from 0 to {self._ordering.batch_size - 1}"
            )
        return self._data.locate(self._order, self._at(epoch), at, slot, self._running.memory_limit)

    def _step(self, step: int) -> int:
        at, steps = integer("step", step), self._order.steps
        if not 0 <= at < steps:
            last = f", counted from 0 to {steps - 1}" if steps else ""
            raise IndexError(f"batch {at} does not exist: an epoch has {steps} batches{last}")
        return at

    def _at(self, epoch: int | None) -> int:
        return self.epoch if epoch is None else within("epoch", epoch, 0, _state.LARGEST_EPOCH)

    def stats(self) -> dict[str, Any]:
        """Returns what the last pass has done so far, and where its time went.

        Counting costs less than 1 % of that time. Batches count when they are made, which is before they are yielded.
        `fastpipe.metrics` has totals over passes.

        Returns:
            A dict that can be stored as JSON, with the following entries:

            - `batches`, `rows` and `bytes_delivered`: what was made.
            - `units` of the source (blocks of a file, shards, row groups), `rows_in_units`, `bytes_read`, and
              `bytes_opened`, their size when open: what was opened to make the batches.
            - `rows_reopened`: rows of units that were opened a second time because a window boundary splits them.
            - `rows_skipped`: rows that one thread passed over so that several threads could work on the same unit.
            - `ready`: batches that are waiting to be yielded.
            - `keys`: the keys of each feature with `on_unknown="drop"` in the batches that were yielded: how many were
              `read`, and how many of these were `dropped`. Nulls are not keys. A feature is missing until it has keys.
            - `seconds`: `elapsed` since the pass began. Summed over all threads: `reading`, opening units (named by the
              source: `decompressing`, `sampling` or `opening`), `indexing` (finding where records start), `skipping`,
              making rows (`decoding` or `gathering`), `assembling` and `planning`. `fetching` is the sum over all calls
              of a source for which no thread of the pass waits. For the consumer: `consumer_waiting`, when it waited
              for a batch, and `waiting_for_consumer`, when it was busy with the previous batch.
            - `threads`: how many were `chosen` of those `available`, and `start_delay`, the seconds until a sleeping
              thread starts to work.
            - `memory`: bytes `reserved` for work in flight, and their maximum, `most_reserved`; bytes `in_batches` that
              are not yet yielded; `free` bytes that are kept for reuse; and how many slabs and buffers were `recycled`
              or `fresh`.
            - `model`: the learned costs of each class of units with similar costs: `ns_per_stored_byte` to open,
              `ns_per_row` and `ns_per_byte` to decode, `ns_per_skipped_byte`, and the `expansion` when opened.
              `predictions` counts the predictions of the model, and `error` is their relative error. None for costs
              that were not observed.
            - `block_cache`, if files are read through one: `bytes_cached`, which it provided, and `bytes_fetched` from
              the storage. All readers of this process with this cache count, also when they open files.

            The dict is empty before the first pass.
        """
        position = self._cursor.position
        found = ({} if position is None else position.stats()) or {}
        return found | self._data.storage_counts() if found else found

    def explain(self) -> str:
        """Explains in words what limits the last pass, and how to make it faster.

        If the consumer waited for less than 5 % of the time, the text says that the reader is not a bottleneck.
        Otherwise, may read one unit and decode it several times to measure the cost of each column.

        Raises:
            FastpipeError: If that unit can't be read.
        """
        return explain(self.stats(), self._data)

    def plan(self) -> Plan:
        """Describes the stages from the dataset to the batches: source, selections, order, ranks and batches.

        `plan` of a map also describes the map. Reads no data.

        Returns:
            The `fastpipe.typing.Plan`, whose `repr` has a line for each stage.

        Example:
            >>> import fastpipe
            >>> from fastpipe import col
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256)
            >>> reader.filter(col("city") == "Wien").plan()
            source   rides.csv (rows: 2,000; files: 1; chunks: 2)
            filter   col("city") == "Wien": 1,000 of 2,000 rows
            order    as in the source
            batches  4 batches of batch_size=256 in an epoch
        """
        return plan_of(self._passes)

    def serve(self, *, host: str = "127.0.0.1", port: int = 0, **options: Any) -> Server:
        """Serves this reader's batches to clients, which call `fastpipe.connect` (extra `arrow`).

        Args:
            host: Address to listen on. By default, only processes of this machine can connect.
            port: Port to listen on; 0 for any free port. Defaults to 0.
            **options: Options of `fastpipe.service.Server`: `token`, `tls`, `client_ca`, `max_passes`, `cache_bytes`,
                `memory_limit`, `max_requests`, `metrics_port`, `metrics_host`.

        Returns:
            The server, which runs until its `close` method is called or its `with` block ends.

        Raises:
            ImportError: If pyarrow isn't installed.
            OSError: If the server can't listen on the address.
            TypeError: If `Server` has no such option.
            ValueError: If `Server` rejects an argument.
        """
        require_pyarrow()
        from fastpipe.service._server import Server

        return Server(self, host=host, port=port, **options)

    def close(self) -> None:
        """Ends the active pass, if there is one, and waits for its threads."""
        self._close("close() was called; iter(reader) starts a new pass")

    def _close(self, because: str) -> None:
        """Ends the active pass. Its `next` then raises an error that contains the reason."""
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
        return _rebuild, (self._data, self._options(), *self._cursor.following(), self._stored_losses())

    def _stored_losses(self) -> list[list[Any]]:
        return [] if self._lost is None else self._lost.stored()

    def _options(self) -> dict[str, Any]:
        return {
            "ordering": self._ordering,
            "running": self._running,
            "progress": self._progress,
            "epochs": self._epochs,
        }

    def __repr__(self) -> str:
        order = self._ordering
        shuffled = "" if self.shuffle_buffer is None else f", shuffle={order.shuffle!r}, seed={order.seed}"
        ranks = "" if order.world_size == 1 else f", rank={order.rank}, world_size={order.world_size}"
        return (
            f"<fastpipe.Reader of {self._data}: {self.num_rows} rows, {len(self.features)} features, "
            f"batch_size={order.batch_size}{shuffled}{ranks}>"
        )


def made(data: Dataset, **options: Any) -> Reader:
    """Creates a reader for the user, and reports rows that its order leaves out."""
    return Reader._of(data, **options)._reported()


def _rebuild(
    data: Dataset,
    options: dict[str, Any],
    epoch: int,
    loaded: tuple[int, _state.State] | None,
    losses: list[list[Any]],
) -> Reader:
    """Creates a reader that starts where another one would, and has its losses."""
    reader = Reader._of(data, **options)
    reader._lost = reader._lost and reader._lost.replaced(losses)
    reader._cursor = PassCursor(epoch, loaded)
    return reader
