"""A reader without some steps of each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fastpipe._arguments import within
from fastpipe._locations import Location
from fastpipe._private_constructor import private_constructor
from fastpipe._reader.mapped import Mapped, map_passes
from fastpipe._reader.passes import warn_of_ranks
from fastpipe._reader.plan import Plan, plan_of
from fastpipe._reader.reader_passes import ReaderPasses
from fastpipe._reader.remaining_passes import LeftOut, RemainingPasses, several_ranks
from fastpipe._reader.state import LARGEST_EPOCH
from fastpipe.errors import UnsupportedError
from fastpipe.specs import Features

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe._reader.reader import Reader


class RemainingSteps:
    """Yields the batches of a reader except at some steps. Created by `Reader.without(steps=...)`.

    Each remaining batch has the rows that it has in the reader, and the batches are in the same sequence. `len`,
    `batch_at` and `locate` count only the remaining batches. A state is a state of the reader, whose step counts all
    batches of the epoch. So a reader and all of its `RemainingSteps` can resume from each other's states.

    The batches of the steps that are left out are made and dropped, so they take the time of other batches. An error in
    one of them is raised.

    Adapters such as `fastpipe.torch.dataset` accept the object, and it can be pickled, as long as there is one rank.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_csv("rides.csv", columns=["distance"], batch_size=100, shuffle=True, seed=7)
        >>> remaining = reader.without(steps=range(5, 8))
        >>> len(reader), len(remaining), len(list(remaining))
        (20, 17, 17)
        >>> bool((remaining.batch_at(5, epoch=0)["distance"] == reader.batch_at(8)["distance"]).all())
        True
    """

    @private_constructor("reader.without(steps=...)")
    def _of(self, passes: RemainingPasses) -> None:
        self._passes = passes
        self._warned_of_ranks = False

    @property
    def reader(self) -> Reader:
        """The `Reader` that makes the batches. Its `stats` and `explain` describe passes of this object, too."""
        origin: Reader = self._passes.origin
        return origin

    @property
    def steps(self) -> list[int]:
        """The steps of the reader that are left out, in ascending order."""
        return list(self._passes.left_out.steps)

    @property
    def features(self) -> Features:
        """The spec of each feature."""
        return self._passes.features

    @property
    def batch_size(self) -> int:
        """Number of rows per batch."""
        return self._passes.batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that was yielded, as in `Reader.epoch`."""
        return self._passes.epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass start at the beginning of this epoch. The active pass continues unchanged."""
        self._passes.set_epoch(within("epoch", epoch, 0, LARGEST_EPOCH))

    def __len__(self) -> int:
        """Returns the number of batches in a pass.

        Raises:
            TypeError: If passes have no end (`epochs=None`).
        """
        return len(self._passes)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Starts a pass, as `iter(reader)` does."""
        if not self._warned_of_ranks:
            self._warned_of_ranks = True
            warn_of_ranks(self._passes)
        return self._passes.start().batches

    def batch_at(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        """Returns any batch without reading the batches before it.

        Args:
            step: Index of the batch among the remaining batches of the epoch, from 0.
            epoch: Epoch of the batch, 0 to 2^62. Defaults to `epoch`.

        Raises:
            IndexError: If the batch doesn't exist. Negative indices are not supported.
            TypeError: If `step` or `epoch` isn't an integer.
            ValueError: If the epoch is out of range.
            FastpipeError: If the batch can't be read.
        """
        return self._passes.batch_at(step, epoch)

    def locate(self, step: int, row: int, epoch: int | None = None) -> Location:
        """Returns where a row of a batch comes from. Reads no data. See `Reader.locate`.

        Args:
            step: Index of the batch among the remaining batches of the epoch, from 0.
            row: Index of the row within the batch.
            epoch: Epoch of the batch, 0 to 2^62. Defaults to `epoch`.

        Raises:
            IndexError: If the batch or row doesn't exist. Negative indices are not supported.
            TypeError: If an index or the epoch isn't an integer.
            ValueError: If the epoch is out of range.
        """
        return self.reader.locate(self._passes.step_in_order(step), row, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the active or last pass, as a state of the reader. See `Reader.state_dict`."""
        return self._passes.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass resume from a state. The active pass is closed. See `Reader.load_state_dict`.

        The pass continues with the first remaining batch at or after the step of the state.

        Args:
            state_dict: A state as `state_dict` of the reader, or of the reader without any of its steps, returned it.

        Raises:
            StateError: If the state has another dataset or other arguments, was saved by a later version of fastpipe,
                is damaged, or was saved in the middle of an epoch that several ranks have read. Nothing changes then.
        """
        self._passes.load_state_dict(state_dict)

    def map(
        self,
        function: Callable[..., Any],
        *,
        num_threads: int = 0,
        prefetch: int = 2,
        seed: int | None = None,
        features: Features | None = None,
    ) -> Mapped:
        """Returns an iterable of the batches after `function` changed them. It takes the arguments of `Reader.map`.

        With a seed, a batch has the same random numbers as in a map of the reader. The function doesn't
        get the batches that are left out.
        """
        return map_passes(self._passes, self, function, num_threads, prefetch, seed, features)

    def to_arrow_reader(self) -> pa.RecordBatchReader:
        """Starts a pass, as `iter` does, and yields its batches as Arrow record batches. See `Reader.to_arrow_reader`.

        Raises:
            ImportError: If pyarrow isn't installed.
            ValueError: If Arrow doesn't support the name or size of a feature.
        """
        return self._passes.arrow_reader(lambda: self._passes.start().batches)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_arrow_reader().__arrow_c_stream__(requested_schema)

    def plan(self) -> Plan:
        """Describes the stages from the dataset to the batches. Reads no data. See `Reader.plan`."""
        return plan_of(self._passes)

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
        return _remaining, (self._passes,)

    def __repr__(self) -> str:
        return repr(self._passes).replace("<", "<fastpipe.RemainingSteps: ", 1)


def _remaining(passes: RemainingPasses) -> RemainingSteps:
    return RemainingSteps._of(passes)


def without_steps(reader: Reader, steps: Iterable[int] | slice) -> RemainingSteps:
    """Leaves out steps of each epoch. See `Reader.without`.

    Raises:
        UnsupportedError: If the reader is one of several ranks.
    """
    if reader.world_size > 1:
        raise UnsupportedError(several_ranks(f"{reader.world_size} ranks"))
    left_out = LeftOut.checked(steps, reader._order.steps)
    return RemainingSteps._of(RemainingPasses(ReaderPasses(reader._like(reader._data)), left_out))
