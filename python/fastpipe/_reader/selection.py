"""Selections: some rows of a reader's dataset as a smaller dataset.

A selection has the units of the whole dataset with fewer rows each. It has the order, length and states of a dataset
that consists of only the selected rows. So every order, rank, partition and adapter works with it.

Rows that are taken by index may be repeated, and have a sequence. A unit has a row as often as it is taken. Shuffled
orders ignore the sequence, and sequential order follows it.
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
from fastpipe._reader.dataset import BaseDataset, Dataset, DerivedDataset, IndexEntries
from fastpipe._reader.left_out_steps import check_all_steps
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
        UnsupportedError: If the reader is a mixture, leaves out steps or reads from servers.
        ValueError: If the reader draws a sample for each epoch.
    """
    if reader._order.is_grouped:
        reason = f"{method}() cannot select packs: call it before pack()"
        raise UnsupportedError(reason, reason=reason)
    if reader._ordering.is_mixture:
        reason = f"{method}() cannot select rows of a mixture: call it for its readers, and mix the results"
        raise UnsupportedError(reason, reason=reason)
    if reader._ordering.is_sample:
        raise ValueError(
            f"{method}() cannot select rows of samples that are drawn for each epoch: call it first, or draw one sample"
            " with redraw=False"
        )
    check_all_steps(reader._ordering, f"{method}() cannot select rows of a reader", "call it before without(steps=...)")
    if isinstance(reader._data.handle, RemoteDataset):
        reason = f"{method}() needs the data itself: call it on the server, and serve a reader of the selected rows"
        raise UnsupportedError(reason, reason=reason)


def select(
    reader: Reader,
    chosen: npt.NDArray[Any],
    condition: Expr | None = None,
    method: tuple[str, str] = ("select", "rows"),
) -> Reader:
    """Returns a reader of some rows, with the order, ranks and options of this reader, at its beginning.

    A selection of a selection is one selection of the whole dataset.

    Args:
        reader: The reader. It must not draw samples or read from servers: see `check`.
        chosen: Whether each row of the reader's dataset is selected, bool `[rows]`, or row indices, int64 `[n]`.
        condition: A condition that all of these rows pass, for descriptions.
        method: Name of the method that selects, and how, for plans.

    Raises:
        ValueError: If no rank would get a batch.
    """
    data = reader._data
    history: History = ()
    while not isinstance(data, Selected) and data.handle.rows_in_sequence is not None:
        # A part of rows in a sequence. Its handle counts them in another sequence.
        assert isinstance(data, DerivedDataset)
        data, part = data.origin()
        chosen = np.asarray(part)[chosen]
    if isinstance(data, Selected):
        history = data.history
        known = data.condition
        condition = known if condition is None else condition if known is None else known & condition
        data, rows = data.origin()
        if rows.dtype == np.bool_ == chosen.dtype:
            rows[rows] = chosen
            chosen = rows
        else:
            chosen = (np.flatnonzero(rows) if rows.dtype == np.bool_ else rows)[chosen]
    if chosen.dtype != np.bool_ and (chosen[1:] > chosen[:-1]).all():
        # The same rows have the same states, however they were selected.
        mask = np.zeros(data.handle.num_rows, np.bool_)
        mask[chosen] = True
        chosen = mask
    rows = np.packbits(chosen, bitorder="little") if chosen.dtype == np.bool_ else chosen
    return reader._like(Selected(data, rows, condition, history, method))


class Selected(BaseDataset):
    """The selected rows of a dataset as a dataset.

    Args:
        whole: The whole dataset.
        rows: A bit for each row, the first in the lowest bit of the first byte, uint8 `[ceil(rows / 8)]`, where the
            remaining bits are 0. Or row indices in any sequence, int64 `[n]`.
        condition: A condition that all selected rows pass, for descriptions. None if it is unknown.
        history: The methods that selected rows, one after another, for plans.
        method: A further method, which selected these rows.
    """

    def __init__(
        self,
        whole: Dataset,
        rows: npt.NDArray[Any],
        condition: Expr | None = None,
        history: History = (),
        method: tuple[str, str] | None = None,
    ) -> None:
        self._whole, self._rows, self.condition = whole, rows, condition
        if rows.dtype == np.uint8:
            self.handle = whole.handle.select(rows)
        elif (rows[1:] >= rows[:-1]).all():
            self.handle = whole.handle.take(rows.astype(np.uint64))
        else:
            order = np.argsort(rows, kind="stable")
            sequence = np.empty(len(rows), np.uint64)
            sequence[order] = np.arange(len(rows), dtype=np.uint64)
            self.handle = whole.handle.take(rows[order].astype(np.uint64), sequence)
        self.history = history if method is None else (*history, (method, self.handle.num_rows))
        self.features, self.files, self.words = whole.features, whole.files, whole.words
        self.categories = whole.categories
        self.interpretation, self.column_times = whole.interpretation, whole.column_times
        self.may_lose_units = getattr(whole, "may_lose_units", False)
        self._own_digest: str | None = None

    @property
    def whole(self) -> Dataset:
        """The whole dataset."""
        return self._whole

    def origin(self) -> tuple[Dataset, npt.NDArray[Any]]:
        """Returns the whole dataset, and an index of its rows.

        The index is a new array, bool `[rows of the whole dataset]`. If rows have a sequence or are repeated, it is
        their indices, int64 `[n]`, which must not be changed.
        """
        if self._rows.dtype != np.uint8:
            return self._whole, self._rows
        unpacked = np.unpackbits(self._rows, count=self._whole.handle.num_rows, bitorder="little")
        return self._whole, unpacked.view(np.bool_)

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the fingerprint of the whole dataset with the number of selected rows and a separate digest."""
        whole = copy.copy(self._whole.fingerprint(version))
        if self._own_digest is None:
            self._own_digest = digest(self._rows.dtype.str.encode(), self._rows.data)
        named = f"{whole['digest']} rows {self._own_digest}"
        return whole | {"rows": self.handle.num_rows, "digest": digest(named.encode())}

    def unsliced(self) -> Selected:
        """Returns the same rows with whole units."""
        whole = self._whole.unsliced()
        return self if whole is self._whole else Selected(whole, self._rows, self.condition, self.history)

    def narrowed(self, names: Sequence[str]) -> Selected:
        """Returns the same rows with fewer features."""
        return Selected(self._whole.narrowed(names), self._rows)

    @property
    def holds_units(self) -> bool:
        """Returns what holds for the whole dataset."""
        return self._whole.holds_units

    def default_window(self, batch_size: int) -> int:
        """Returns the default of the whole dataset if it has its own, or else the default for the selection's units.

        A window has at most all selected rows.
        """
        whole = self._whole.default_window(batch_size)
        if whole is None:
            return self.handle.default_buffer(batch_size)
        return max(min(whole, self.handle.num_rows), batch_size)

    def index_entries(self) -> IndexEntries | None:
        """Returns those of the whole dataset, whose files contain the rows."""
        return self._whole.index_entries()

    def storage_counts(self) -> dict[str, Any]:
        """Returns the counts of the whole dataset."""
        return self._whole.storage_counts()

    def place(self, unit: int, record: int) -> Location:
        """Returns where a row comes from in the whole dataset."""
        return self._whole.place(unit, self.handle.selected_record(unit, record))

    def __reduce__(self) -> tuple[Any, ...]:
        return Selected, (self._whole, self._rows, self.condition, self.history)

    def __str__(self) -> str:
        where = "" if self.condition is None else f", where {abridged(self.condition)}"
        return f"{self.handle.num_rows} of {self._whole.handle.num_rows} rows of {self._whole}{where}"
