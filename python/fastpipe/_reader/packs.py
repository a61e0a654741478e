"""Batches of packs, and of rows with similar lengths, made from batches of rows in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._reader.mapped_batches import OwnFunction
from fastpipe.batch import Masked, Ragged
from fastpipe.batch._form import ranges, take_rows
from fastpipe.specs import DenseSpec, Features, RaggedSpec, Spec

# The entries of a batch of groups that describe the groups, and the entries that a batch of packs has in addition.
GROUPS = _SIZES, _STARTS = "group_sizes", "group_starts"
PLACES = _SEGMENTS, _POSITIONS = "segment_ids", "positions"


@dataclass(frozen=True, slots=True)
class Packs(OwnFunction):
    """Turns a batch of rows in groups into a batch of packs.

    Attributes:
        columns: Names of the features whose items are packed.
        length: Maximum number of items in a pack.
        padded: Whether packs are padded to this length.
        pad: Item that pads packs.
    """

    columns: tuple[str, ...]
    length: int
    padded: bool
    pad: Any

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch of packs. Packs that aren't padded share the memory of the rows. Changes `batch`."""
        sizes, starts = batch.pop(_SIZES), batch.pop(_STARTS)
        ends = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=ends[1:])
        batch |= {name: without_masks(batch[name]) for name in self.columns}
        pieces = self._pieces(batch[self.columns[0]], starts)
        packed: dict[str, Any] = {}
        for name, value in batch.items():
            if name in self.columns:
                rows = value if pieces is None else Ragged(take_rows(value.values, pieces[0]), pieces[1])
                packed[name] = self._padded(rows, ends) if self.padded else Ragged(rows, ends)
            else:
                packed[name] = value if name == "valid" else Ragged(value, ends)
        if self.padded:
            packed |= self._places(batch[self.columns[0]].offsets if pieces is None else pieces[1], ends)
        return packed

    def _padded(self, rows: Ragged, ends: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        packs = Ragged(rows.values, rows.offsets[ends])
        values: npt.NDArray[Any] = packs.to_padded(self.length, pad=self.pad).values
        return values

    def _pieces(self, rows: Ragged, starts: npt.NDArray[np.uint32]) -> tuple[Any, npt.NDArray[np.int64]] | None:
        """Returns the items that are in packs, and their offsets by row. None if all of them are."""
        lengths = rows.lengths
        if not (lengths > self.length).any():
            return None
        first = starts.astype(np.int64)
        return ranges(rows.offsets[:-1] + first, np.minimum(lengths - first, self.length))

    def _places(self, offsets: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Returns the place of each item: its row, counted from 1 in each pack, and its position in the row."""
        lengths = np.diff(offsets)
        numbers = np.arange(1, len(lengths) + 1) - np.repeat(ends[:-1], np.diff(ends))
        segments = np.repeat(numbers.astype(np.int32), lengths)
        positions = np.arange(len(segments)) - np.repeat(offsets[:-1] - offsets[0], lengths)
        packs = offsets[ends] - offsets[0]
        return {
            name: Ragged(values, packs).to_padded(self.length).values
            for name, values in ((_SEGMENTS, segments), (_POSITIONS, positions.astype(np.int32)))
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes as JSON-compatible data."""
        pad = self.pad.item() if isinstance(self.pad, np.generic) else self.pad
        return {"columns": list(self.columns), "length": self.length, "padded": self.padded, "pad": pad}

    def features(self, rows: Features) -> Features | None:
        """Returns the specs of packs, by those of the rows. None if a feature has no spec in packs."""
        places = DenseSpec((self.length,), "int32")
        found: dict[str, Spec] = {}
        for name, spec in rows.items():
            if name in self.columns and self.padded:
                found[name] = DenseSpec((self.length,), spec.dtype)
            elif name in self.columns:
                found[name] = RaggedSpec((None, None), spec.dtype)
            elif type(spec) in (DenseSpec, RaggedSpec):
                found[name] = RaggedSpec((None, *spec.shape), spec.dtype, on_null=spec.on_null, scale=spec.scale)
            else:
                return None
        return Features(found | ({_SEGMENTS: places, _POSITIONS: places} if self.padded else {}))


@dataclass(frozen=True, slots=True)
class Buckets(OwnFunction):
    """Turns a batch of rows in groups into a batch of rows."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch without the entries that describe the groups."""
        return {name: value for name, value in batch.items() if name not in GROUPS}

    def to_json(self) -> dict[str, Any]:
        """Returns an empty dict: there is nothing to choose."""
        return {}

    def features(self, rows: Features) -> Features:
        """Returns the specs of the rows."""
        return rows


def from_json(found: Any) -> Packs | Buckets:
    """Returns the function whose `to_json` is given.

    Raises:
        KeyError: If an attribute is missing.
        TypeError: If an attribute has another type.
    """
    if found == {}:
        return Buckets()
    columns, length, padded, pad = (found[name] for name in ("columns", "length", "padded", "pad"))
    names = tuple(map(str, columns))
    if not (names and type(length) is int and type(padded) is bool and isinstance(pad, (int, float))):
        raise TypeError("packs are described incorrectly")
    return Packs(names, length, padded, pad)


def without_masks(rows: Ragged | Masked) -> Ragged:
    """Returns rows without marks of null. A null row is empty."""
    plain: Ragged = rows.values if isinstance(rows, Masked) else rows
    return Ragged(plain.values.values, plain.offsets) if isinstance(plain.values, Masked) else plain
