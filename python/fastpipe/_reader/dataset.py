"""The interface between readers and datasets of any source."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from fastpipe._fastpipe import Data, Order
from fastpipe._locations import Location, PackLocation
from fastpipe._reader.state import VERSION
from fastpipe.specs import Features

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fastpipe._reader.condition_bounds import Bounds


Buffer: TypeAlias = bytes | memoryview


class SourceWording(NamedTuple):
    """Words that a source uses in messages about its readers.

    Attributes:
        units: The source's name for its units.
        advice: For each kind of work that `Reader.stats` reports, how to reduce it.
        bound: For each kind of work, a description of a pass that this work limits. Defaults to the name of the work
            and "-bound".
        other_digest: The reason for refusing a state if only the digest of its dataset differs.
    """

    units: str = "units"
    advice: Mapping[str, str] = MappingProxyType({})
    bound: Mapping[str, str] = MappingProxyType({})
    other_digest: str = "the dataset has different contents"


class IndexEntries(Protocol):
    """Values of rows that are stored in the index cache."""

    def get(self, text: str, size: int, compute: Callable[[], Buffer]) -> tuple[Buffer, bool]:
        """Returns stored values or computes and stores them, and whether they were stored.

        Args:
            text: Identifies the values.
            size: Number of bytes that they have.
            compute: Function that reads the rows and returns the values.
        """


class Dataset(Protocol):
    """A dataset. `str` returns a short description. A pickled dataset opens its files again when it is unpickled."""

    @property
    def handle(self) -> Data:
        """The Rust object from which orders and passes are created."""

    @property
    def features(self) -> Features:
        """The spec of each feature."""

    @property
    def files(self) -> list[str]:
        """The files, in the order of the dataset."""

    @property
    def categories(self) -> dict[str, list[str]]:
        """The categories of each feature that is read as codes. See `Reader.categories`."""

    @property
    def words(self) -> SourceWording:
        """The words that readers use in messages about this dataset."""

    @property
    def interpretation(self) -> Mapping[str, Any]:
        """All settings except `features` and `categories` that affect the values of batches, as JSON-compatible data.

        Examples are vocabularies, a reader's schema, and the dialect of CSV files. Servers and clients compare these
        settings.
        """

    @property
    def column_times(self) -> Callable[[], tuple[float, list[tuple[str, float]]]] | None:
        """A function that measures how long a row takes to decode: in total, and without each column, in nanoseconds.

        The function reads a sample of the data. None if columns aren't decoded one by one.
        """

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns JSON-compatible data that identifies the dataset: a few counts and a `digest`.

        Args:
            version: Version of the state format. A saved state is compared with the fingerprint of the state's version.
        """

    def fitted(self, saved: dict[str, Any], progress: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
        """Returns the fingerprint in a saved state, with the own values of entries that may differ after its position.

        Args:
            saved: The fingerprint in the state, unchecked.
            progress: The position in the state, unchecked.
            batch_size: Number of rows per batch of this reader.
        """

    def place(self, unit: int, record: int) -> Location:
        """Returns where a row of a unit comes from."""

    def locate(self, order: Order, epoch: int, step: int, row: int, memory_limit: int | None) -> Location:
        """Returns where a row of a batch comes from.

        Args:
            order: Order of this dataset.
            epoch: Epoch of the batch.
            step: Index of the batch in the epoch. It exists.
            row: Index of the row, or of the group of rows, in the batch.
            memory_limit: Maximum size of the order in bytes. None for half of the machine's memory.

        Raises:
            IndexError: If the row doesn't exist.
            LimitError: If the order needs more memory.
        """

    def default_window(self, batch_size: int) -> int | None:
        """Returns the default of `shuffle_buffer`. None for the larger of 16 batches and 64 average units."""

    @property
    def holds_units(self) -> bool:
        """Whether a pass holds the contents of the units of a window in memory, unlike those of in-memory data."""

    def narrowed(self, names: Sequence[str]) -> Dataset:
        """Returns a dataset of the same rows, in the same sequence, for a sequential pass that needs few features.

        Its units may differ. Returns the dataset itself if the source can't leave out features.

        Args:
            names: Names of the features to read, at least one.
        """

    def unsliced(self) -> Dataset:
        """Returns the dataset with whole units, as readers that shuffle read it.

        Sequential passes may read a dataset in slices of units.
        """

    def bounds(self, names: Sequence[str]) -> tuple[Sequence[int], dict[str, Bounds | None]] | None:
        """Returns the rows of each unit and what the source knows about the values of features in it, without reading.

        None if the source knows nothing. Each feature must have one value per row.

        Args:
            names: Names of features.
        """

    def index_entries(self) -> IndexEntries | None:
        """Returns the entries of the dataset's files in the index cache. None if it has no cache or no local files."""

    def storage_counts(self) -> dict[str, Any]:
        """Returns what `Reader.stats` says of the storage: entries that can be stored as JSON."""


class BaseDataset(abc.ABC):
    """The methods of a dataset with the usual default window, whose units have no slices and whose rows are fixed.

    Attributes:
        may_lose_units: Whether passes may leave out damaged units.
    """

    may_lose_units: bool = False

    @abc.abstractmethod
    def place(self, unit: int, record: int) -> Location:
        """Returns where a row of a unit comes from."""

    def locate(self, order: Order, epoch: int, step: int, row: int, memory_limit: int | None) -> Location:
        """Returns where a row of a batch comes from, according to the order."""
        found = order.locate(epoch, step, row, memory_limit)
        places = tuple(self.place(unit, record) for unit, record in found)
        if not order.is_grouped:
            return places[0]
        return PackLocation(file=places[0].file, row=places[0].row, rows=places)

    @property
    def holds_units(self) -> bool:
        """Returns True."""
        return True

    def default_window(self, batch_size: int) -> int | None:
        """Returns None: the larger of 16 batches and 64 average units."""
        return None

    def fitted(self, saved: dict[str, Any], progress: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
        """Returns the saved fingerprint: the whole dataset must be the same."""
        return saved

    def narrowed(self, names: Sequence[str]) -> Any:
        """Returns the dataset itself, with all features."""
        return self

    def unsliced(self) -> Self:
        """Returns the dataset itself."""
        return self

    def bounds(self, names: Sequence[str]) -> tuple[Sequence[int], dict[str, Bounds | None]] | None:
        """Returns None: nothing is known about values before they are read."""
        return None

    def index_entries(self) -> IndexEntries | None:
        """Returns None: no values of rows are stored."""
        return None

    def storage_counts(self) -> dict[str, Any]:
        """Returns an empty dict: nothing is counted."""
        return {}


class NarrowedDataset(BaseDataset):
    """The same units as another dataset with fewer features, for one pass.

    Args:
        whole: The dataset with all features.
        handle: The same units with fewer columns.
        names: Names of the features that are read.
    """

    column_times = None

    def __init__(self, whole: Dataset, handle: Data, names: Sequence[str]) -> None:
        self._whole, self.handle = whole, handle
        self.features = Features({name: spec for name, spec in whole.features.items() if name in names})
        self.categories = {name: listed for name, listed in whole.categories.items() if name in names}
        self.files, self.words, self.interpretation = whole.files, whole.words, whole.interpretation
        self.may_lose_units = getattr(whole, "may_lose_units", False)

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the fingerprint of the dataset with all features, which doesn't depend on them."""
        return self._whole.fingerprint(version)

    def place(self, unit: int, record: int) -> Location:
        """Returns where a row comes from."""
        return self._whole.place(unit, record)

    def storage_counts(self) -> dict[str, Any]:
        """Returns the counts of the dataset with all features."""
        return self._whole.storage_counts()

    def __str__(self) -> str:
        return str(self._whole)


# The rows of a window are counted in 32 bits.
LARGEST_WINDOW = 2**31


def whole_window(data: Dataset, batch_size: int) -> int:
    """Returns the default window of in-memory data: all rows, up to 2^31, because permuting them needs no reading.

    The window depends only on the data, not on the machine or the memory limit. So the order doesn't depend on them
    either.
    """
    return max(min(data.handle.num_rows, LARGEST_WINDOW), batch_size)


@runtime_checkable
class FileDataset(Dataset, Protocol):
    """A dataset whose units are parts of files. Some of the files can be read separately."""

    def subset(self, numbers: Sequence[int]) -> Dataset:
        """Returns a dataset with the same features that consists of some of the files."""

    def file_sizes(self) -> list[int]:
        """Returns the size of each file in bytes."""

    def stamps(self) -> list[tuple[int, int]]:
        """Returns the size and the modification time in nanoseconds that each file had when it was opened.

        Empty if a file isn't on a disk.
        """

    def unit_files(self) -> npt.NDArray[np.int64]:
        """Returns the index of each unit's file, int64 `[units]`, ascending. Files without rows may be omitted."""


@runtime_checkable
class DerivedDataset(Dataset, Protocol):
    """A dataset that consists of some rows of another dataset."""

    def origin(self) -> tuple[Dataset, npt.NDArray[Any] | slice]:
        """Returns the whole dataset, and an index of the rows: `values_of_whole[index]` are this dataset's values."""
