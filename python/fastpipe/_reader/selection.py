"""Selections: some rows of a reader's dataset as a smaller dataset.

A selection has the units of the whole dataset with fewer rows each. Its order, length and states are those of a dataset
that consists of only the selected rows, so every order, rank, partition and adapter works with it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastpipe._expressions import Expr, abridged
from fastpipe._fastpipe import RemoteDataset
from fastpipe._locations import Location
from fastpipe._reader.dataset import BaseDataset, Dataset
from fastpipe._reader.ordering import digest
from fastpipe._reader.state import VERSION
from fastpipe.errors import UnsupportedError

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader


# For each method that selected rows: its name, how it selected, and the number of rows that it left.
History = tuple[tuple[tuple[str, str], int], ...]


def check(reader: Reader, method: str) -> None:
    """Checks that rows of a reader can be selected.

    Args:
        reader: The reader.
        method: Name of the method that selects, for the error.

    Raises:
        UnsupportedError: If the reader reads from servers.
        ValueError: If the reader is a sample.
    """
    if reader._ordering.is_sample:
        raise ValueError(
            f"{method}() cannot select rows of a sample: call it first, and draw the sample from its result"
        )
    if isinstance(reader._data.handle, RemoteDataset):
        reason = f"{method}() needs the data itself: call it on the server, and serve a reader of the selected rows"
        raise UnsupportedError(reason, reason=reason)


def select(
    reader: Reader,
    mask: npt.NDArray[np.bool_],
    condition: Expr | None = None,
    method: tuple[str, str] = ("select", "rows"),
) -> Reader:
    """Returns a reader of some rows, with the order, ranks and options of this reader, at its beginning.

    A selection of a selection is one selection of the whole dataset.

    Args:
        reader: The reader. It must not be a sample or read from servers: see `check`.
        mask: Whether each row of the reader's dataset is selected, bool `[rows]`.
        condition: A condition that all of these rows pass, for descriptions.
        method: Name of the method that selects, and how, for plans.

    Raises:
        ValueError: If no rank would get a batch.
    """
    data, chosen = reader._data, np.ascontiguousarray(mask, np.bool_)
    history: History = ()
    if isinstance(data, Selected):
        whole, rows = data.origin()
        rows[rows] = chosen
        history = data.history
        known = data.condition
        condition = known if condition is None else condition if known is None else known & condition
        data, chosen = whole, rows
    return reader._like(Selected(data, np.packbits(chosen, bitorder="little"), condition, history, method))


class Selected(BaseDataset):
    """The selected rows of a dataset as a dataset.

    Args:
        whole: The whole dataset.
        bits: A bit for each row, the first in the lowest bit of the first byte, uint8 `[ceil(rows / 8)]`. The remaining
            bits are 0.
        condition: A condition that all selected rows pass, for descriptions. None if there is none.
        history: The methods that selected rows, one after another, for plans.
        method: A further method, which selected these rows.
    """

    def __init__(
        self,
        whole: Dataset,
        bits: npt.NDArray[np.uint8],
        condition: Expr | None = None,
        history: History = (),
        method: tuple[str, str] | None = None,
    ) -> None:
        self._whole, self._bits, self.condition = whole, bits, condition
        self.handle = whole.handle.select(bits)
        self.history = history if method is None else (*history, (method, self.handle.num_rows))
        self.features, self.files, self.words = whole.features, whole.files, whole.words
        self.categories = whole.categories
        self.interpretation, self.column_times = whole.interpretation, whole.column_times
        self._own_digest: str | None = None

    @property
    def whole(self) -> Dataset:
        """The whole dataset."""
        return self._whole

    def origin(self) -> tuple[Dataset, npt.NDArray[np.bool_]]:
        """Returns the whole dataset, and whether each of its rows is selected, bool `[rows of the whole dataset]`."""
        return self._whole, self._mask()

    def _mask(self) -> npt.NDArray[np.bool_]:
        unpacked = np.unpackbits(self._bits, count=self._whole.handle.num_rows, bitorder="little")
        return unpacked.view(np.bool_)

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the fingerprint of the whole dataset with the number of selected rows and a separate digest."""
        whole = copy.copy(self._whole.fingerprint(version))
        if self._own_digest is None:
            self._own_digest = digest(self._bits.data)
        named = f"{whole['digest']} rows {self._own_digest}"
        return whole | {"rows": self.handle.num_rows, "digest": digest(named.encode())}

    def unsliced(self) -> Selected:
        """Returns the same rows with whole units."""
        whole = self._whole.unsliced()
        return self if whole is self._whole else Selected(whole, self._bits, self.condition, self.history)

    def narrowed(self, names: Sequence[str]) -> Selected:
        """Returns the same rows with fewer features."""
        return Selected(self._whole.narrowed(names), self._bits)

    def default_window(self, batch_size: int) -> int:
        """Returns the default of the whole dataset if it has its own, or else the default for the selection's units.

        A window has at most all selected rows.
        """
        whole = self._whole.default_window(batch_size)
        if whole is None:
            return self.handle.default_buffer(batch_size)
        return max(min(whole, self.handle.num_rows), batch_size)

    def place(self, unit: int, record: int) -> Location:
        """Returns where a row comes from in the whole dataset."""
        return self._whole.place(unit, self.handle.selected_record(unit, record))

    def __reduce__(self) -> tuple[Any, ...]:
        return Selected, (self._whole, self._bits, self.condition, self.history)

    def __str__(self) -> str:
        where = "" if self.condition is None else f", where {abridged(self.condition)}"
        return f"{self.handle.num_rows} of {self._whole.handle.num_rows} rows of {self._whole}{where}"
