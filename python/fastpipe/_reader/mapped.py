"""A reader whose batches a function changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fastpipe._arguments import within
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._private_constructor import private_constructor
from fastpipe._reader.mapped_batches import MapFunction
from fastpipe._reader.mapped_passes import MapOptions, MappedPasses
from fastpipe._reader.ordering import LARGEST_WORLD
from fastpipe._reader.passes import Passes, warn_of_ranks
from fastpipe._reader.plan import Plan, plan_of
from fastpipe._reader.state import LARGEST_EPOCH
from fastpipe.specs import Features

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe._locations import Location
    from fastpipe.leases import LeaseWorker
    from fastpipe.service._server import Server

# Largest number of threads, and of results that wait for the consumer.
_MOST = 1024


class Mapped:
    """Yields the batches of a reader after a function changed them. `map`, `pack`, `bucket` and `filter` create maps.

    It keeps the promises of its reader. Iteration, epochs, states, shards and `batch_at` work as in a `Reader`,
    and adapters such as `fastpipe.torch.dataset` accept it. Its passes are passes of the reader, which has one active
    pass. So iterate either over the reader or over the map.

    An error of the function is raised at its batch, with a note that has the epoch, the step and the rank. It ends the
    pass, and each further `next` raises it again. `mapped.load_state_dict(mapped.state_dict())` resumes with the batch
    that failed.

    Several threads may draw from one pass; each batch goes to one of them. Ctrl-C doesn't end a pass. If it interrupts
    the function in the consumer's thread, the batch is read again. Closing a pass waits for calls of the function that
    are running. Dropping a pass doesn't wait: its threads end after their current call.

    A map can be pickled if its function can, and used in a forked child process. Passes can't.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_csv("rides.csv", columns=["distance"], batch_size=500)
        >>> with reader.map(lambda batch: float(batch["distance"].max()), num_threads=2) as longest:
        ...     found = [distance > 0 for distance in longest]
        >>> found, longest.epoch
        ([True, True, True, True], 1)
    """

    @private_constructor("reader.map(function)")
    def _of(self, passes: MappedPasses, reader: Any) -> None:
        self._passes = passes
        self._reader = reader
        self._warned_of_ranks = False

    @property
    def reader(self) -> Any:
        """The `Reader`, or the `Mapped` before this one, whose batches the function gets."""
        return self._reader

    @property
    def features(self) -> Features | None:
        """The specs of the results, as passed to `map`. None if they are unknown."""
        return self._passes.known_features

    @property
    def batch_size(self) -> int:
        """Maximum number of rows in the batches that the function gets."""
        return self._passes.batch_size

    @property
    def rank(self) -> int:
        """The rank whose batches are yielded."""
        return self._passes.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._passes.world_size

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that was yielded, as in `Reader.epoch`."""
        return self._passes.epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass start at the beginning of this epoch. The active pass continues unchanged."""
        self._passes.set_epoch(within("epoch", epoch, 0, LARGEST_EPOCH))

    def __len__(self) -> int:
        """Returns the number of batches that this rank gets in a pass.

        Raises:
            TypeError: If passes have no end (`epochs=None`).
        """
        return len(self._passes)

    def __iter__(self) -> Iterator[Any]:
        """Starts a pass, as `iter(reader)` does."""
        if not self._warned_of_ranks:
            self._warned_of_ranks = True
            warn_of_ranks(self._passes)
        return self._passes.start().batches

    def batch_at(self, step: int, epoch: int | None = None) -> Any:
        """Returns the result for any batch without reading the batches before it. Calls the function in this thread.

        Args:
            step: Index of the batch within the epoch of this rank, from 0.
            epoch: Epoch of the batch, 0 to 2^62. Defaults to `epoch`.

        Raises:
            IndexError: If the epoch has no such batch. Negative indices are not supported.
            TypeError: If `step` or `epoch` isn't an integer.
            ValueError: If the epoch is out of range.
            FastpipeError: If the batch can't be read.
        """
        return self._passes.batch_at(step, epoch)

    def locate(self, step: int, row: int, epoch: int | None = None) -> Location:
        """Returns where a row of a batch is stored, before the function. See `Reader.locate`.

        Args:
            step: Index of the batch within the epoch of this rank, from 0.
            row: Index of the row, or of the pack, in the batch that the function gets.
            epoch: Epoch of the batch, 0 to 2^62. Defaults to `epoch`.

        Returns:
            The location. That of a pack is a `fastpipe.typing.PackLocation`, with the locations of its rows.

        Raises:
            IndexError: If the batch or row doesn't exist. Negative indices are not supported.
            TypeError: If an index or the epoch isn't an integer.
            ValueError: If the epoch is out of range.
        """
        return self._passes.locate(step, row, self.epoch if epoch is None else epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the active or last pass. It counts only batches that `next` has returned.

        It is a state of the reader, so the reader, other maps of it, and its shards can also resume from it.

        Returns:
            A small dict that can be stored as JSON. See `Reader.state_dict`.
        """
        return self._passes.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass resume from a state. The active pass is closed. See `Reader.load_state_dict`.

        Args:
            state_dict: A state as `state_dict` of a map or a reader returned it.

        Raises:
            StateError: If the state has another dataset or other arguments, was saved by a later version of fastpipe,
                or is damaged. Nothing changes then.
        """
        self._passes.load_state_dict(state_dict)

    def shard(self, num_shards: int, index: int) -> Mapped:
        """Returns a map of one of `num_shards` equal shards, with the same function. See `Reader.shard`.

        Args:
            num_shards: Number of shards, at least 1.
            index: Index of the shard, 0 to `num_shards - 1`.

        Raises:
            ValueError: If the index is out of range, or if no shard would get a batch. The message lists settings that
                work.
            StateError: If a loaded state can't be divided among the shards.
        """
        shards = within("num_shards", num_shards, 1, LARGEST_WORLD)
        return _mapped(self._passes.shard(shards, within("index", index, 0, shards - 1)))

    def map(
        self,
        function: Callable[..., Any],
        *,
        num_threads: int = 0,
        prefetch: int = 2,
        seed: int | None = None,
        features: Features | None = None,
        num_processes: int = 0,
    ) -> Mapped:
        """Returns a map of this map: `function` gets the results. It takes the arguments of `Reader.map`.

        With the same seed as this map, the function gets other random numbers.
        """
        return map_passes(self._passes, self, function, num_threads, prefetch, seed, features, num_processes)

    def to_arrow_reader(self) -> pa.RecordBatchReader:
        """Starts a pass, as `iter` does, and yields its batches as Arrow record batches. Requires `features`.

        The function must return a dict with exactly these features, and with `valid` if the reader has
        `on_uneven="pad"`. See `Reader.to_arrow_reader`.

        Raises:
            ImportError: If pyarrow isn't installed.
            UnsupportedError: If `features` wasn't passed to `map`.
            ValueError: If Arrow doesn't support the name or size of a feature.
        """
        return self._passes.arrow_reader(lambda: self._passes.start().batches)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_arrow_reader().__arrow_c_stream__(requested_schema)

    def plan(self) -> Plan:
        """Describes the stages from the dataset to the batches. Reads no data. See `Reader.plan`."""
        return plan_of(self._passes)

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
        """Joins a job whose workers share the results through leases. See `Reader.lease`.

        The ledger doesn't know the function, so all workers must have the same.
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

    def serve(self, *, host: str = "127.0.0.1", port: int = 0, **options: Any) -> Server:
        """Serves the batches of packs or buckets to clients. See `Reader.serve`.

        Raises:
            UnsupportedError: If `map` or `filter` created this map. Serve its reader, and map in the client.
        """
        require_pyarrow()
        from fastpipe.service._server import Server

        return Server(self, host=host, port=port, **options)

    def close(self) -> None:
        """Ends the active pass, if there is one, and waits for its threads."""
        self._passes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self._passes,)

    def __repr__(self) -> str:
        return repr(self._passes).replace("<map of", "<fastpipe.Mapped of", 1)


def _mapped(passes: MappedPasses) -> Mapped:
    """Creates the user's object of passes, and of the passes before them."""
    incoming = passes.incoming
    return Mapped._of(passes, _mapped(incoming) if isinstance(incoming, MappedPasses) else incoming.origin)


def map_passes(
    incoming: Passes,
    reader: Any,
    function: Callable[..., Any],
    num_threads: int,
    prefetch: int,
    seed: int | None,
    features: Features | None,
    num_processes: int = 0,
) -> Mapped:
    """Returns a map. `Reader.map` describes the arguments.

    Raises:
        TypeError: If an argument has the wrong type, or the function can't be pickled for processes.
        ValueError: If a number is out of range, or threads and processes are asked for.
    """
    if not callable(function):
        raise TypeError(f"function must be a function of a batch; got {type(function).__name__}")
    depth = incoming.options.function.depth + 1 if isinstance(incoming, MappedPasses) else 0
    options = MapOptions(
        MapFunction(function, None if seed is None else within("seed", seed, 0, 2**64 - 1), depth),
        within("num_threads", num_threads, 0, _MOST),
        within("prefetch", prefetch, 0, _MOST),
        None if features is None else Features(features),
        within("num_processes", num_processes, 0, _MOST),
    )
    if options.num_threads and options.num_processes:
        raise ValueError("map() takes num_threads or num_processes, not both")
    return Mapped._of(MappedPasses(incoming, options), reader)
